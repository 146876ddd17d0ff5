"""A self-test of each type: a small program with it, compared with plain torch on the same device."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

import subtensors as st

Check = Callable[[str], str]
"""A test on a device, "cpu" or "cuda": returns where the program ran, and raises an error if a result is wrong."""


def check_padded(device: str) -> str:
    """Check sums and gradients of a padded softmax, and the mean over its true size."""
    x = torch.randn(4, 77, device=device, requires_grad=True)
    plain = x.detach().clone().requires_grad_()
    padded = st.pad(x, {1: st.Dim("length", max=512, buckets=64)})
    for values in (padded, plain):
        (values.softmax(1).square().sum() + values.mean()).backward()
    _same(padded.softmax(1).sum(), torch.tensor(4.0, device=device))
    _same(_grad(x), _grad(plain))
    return "Triton kernels of valid values" if device == "cuda" else "torch on filled padding"


def check_bucketed(device: str) -> str:
    """Check a program of three lengths in two buckets against the plain one, twice each."""
    layer = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Softmax(1)).to(device).eval()
    run = st.bucketed(layer, {0: {1: st.Dim("length", max=64, buckets=32)}})
    with torch.no_grad():
        for length in (20, 30, 40) * 2:
            x = torch.randn(2, length, 8, device=device)
            _same(run(x), layer(x))
    stats = run.stats()
    if stats.fallbacks:
        raise RuntimeError(f"calls fell back: {', '.join(stats.fallbacks)}")
    return f"CUDA graphs, {stats.captures} captured" if stats.captures else "without graphs, at the buckets' sizes"


def check_list(device: str) -> str:
    """Check a sum of two lists, element by element."""
    x, y = ([torch.randn(n, device=device) for n in (3, 50, 700)] for _ in range(2))
    total = st.TensorList(x) + st.TensorList(y)
    for i, (a, b) in enumerate(zip(x, y, strict=True)):
        _same(total[i], a + b)
    return "foreach overloads of torch"


def check_fused(device: str) -> str:
    """Check a momentum step as fused math, against the same math tensor by tensor."""

    def momentum_step(p: Tensor, g: Tensor, buf: Tensor, *, lr: float) -> None:
        buf.mul_(0.9).add_(g)
        p.sub_(lr * buf)

    lists = [[torch.randn(n, device=device) for n in (3, 50, 700)] for _ in range(3)]
    plain = [[t.clone() for t in tensors] for tensors in lists]
    step, (p, g, buf) = st.fused(momentum_step), map(st.TensorList, lists)
    step(p, g, buf, lr=0.1)
    path = "one Triton kernel" if "kernel" in st.explain(step, p, g, buf, lr=0.1) else "generated torch code"
    for row, copies in zip(zip(*lists, strict=True), zip(*plain, strict=True), strict=True):
        momentum_step(*copies, lr=0.1)
        _same(row[0], copies[0])
    return path


def check_optimizer(device: str) -> str:
    """Check three steps of AdamW, as a CUDA graph where there is one, against torch's own."""
    params = [torch.nn.Parameter(torch.randn(n, device=device)) for n in (3, 50)]
    copies = [torch.nn.Parameter(p.detach().clone()) for p in params]
    ours, plain = st.optim.AdamW(params, graph=True), torch.optim.AdamW(copies)
    for _ in range(3):
        for p, q in zip(params, copies, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        ours.step()
        plain.step()
    for p, q in zip(params, copies, strict=True):
        _same(p.detach(), q.detach())
    return "Triton, replayed as a CUDA graph" if ours.replays else "generated torch code"


def check_chunked(device: str) -> str:
    """Check cross entropy of chunked logits and the gradients of both operands, against full logits."""
    hidden, weight = torch.randn(64, 16, device=device), torch.randn(100, 16, device=device)
    target = torch.arange(64, device=device)
    found: list[list[Tensor]] = []
    for is_chunked in (True, False):
        h, w = (x.clone().requires_grad_() for x in (hidden, weight))
        loss = F.cross_entropy(F.linear(st.chunk(h, rows=16) if is_chunked else h, w), target)
        loss.backward()  # type: ignore[no-untyped-call]
        found.append([loss.detach() + 0, _grad(h), _grad(w)])
    for ours, plain in zip(*found, strict=True):
        _same(ours, plain)
    return "Triton kernels, 4 chunks of rows" if device == "cuda" else "torch, chunk by chunk"


def check_arena(device: str) -> str:
    """Check that a tensor has its address and values again after its memory was released and restored."""
    arena = st.Arena(device, reserve="64MiB")
    x = arena.zeros(1000)
    x.add_(1)
    address = x.data_ptr()
    arena.release()
    arena.restore()
    _same(x.sum(), torch.tensor(1000.0, device=device))
    if x.data_ptr() != address:
        raise RuntimeError("the tensor's address changed")
    return "released and restored at its address"


CHECKS: Mapping[str, Check] = {
    "PaddedTensor": check_padded,
    "st.bucketed": check_bucketed,
    "TensorList": check_list,
    "st.fused": check_fused,
    "st.optim": check_optimizer,
    "ChunkedTensor": check_chunked,
    "Static, Arena": check_arena,
}
"""The test of each type, by the name that the report has for it."""


def _same(ours: Tensor, plain: Tensor) -> None:
    """Raise an error unless the two agree within torch's tolerances for their dtype."""
    torch.testing.assert_close(ours.as_subclass(Tensor) if isinstance(ours, st.StaticAddressTensor) else ours, plain)


def _grad(x: Tensor) -> Tensor:
    if x.grad is None:
        raise RuntimeError("a gradient is missing")
    return x.grad
