"""The masked kernels as torch ops: gradients, compilation, capture, and what the ops refuse."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from device_waits import waits_are_errors
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from subtensors.kernels.padded.masked_ops import masked_norm, masked_reduction, masked_softmax
from subtensors.kernels.padded.masked_reduction import KINDS
from subtensors.kernels.runtime.valid_lengths import ValidLength, valid_mask

ORDERS = {"norm": (1.0, 2.0, 3.0, math.inf)}


def extents(device: str, least: int = 0) -> list[ValidLength]:
    """Of a (3, 5, 8) tensor: ragged along 1, padded along 2."""
    return [ValidLength(1, torch.tensor([5, least, 2], device=device)), ValidLength(2, torch.tensor(6, device=device))]


def few(device: str) -> list[ValidLength]:
    """Of a (2, 3, 4) tensor: ragged along 1, padded along 2."""
    return [ValidLength(1, torch.tensor([3, 2], device=device)), ValidLength(2, torch.tensor(3, device=device))]


def leaf(device: str, *size: int) -> Tensor:
    return torch.randn(size, dtype=torch.float64, device=device, requires_grad=True)


def test_softmax_passes_gradcheck(device: str) -> None:
    for is_log in (False, True):
        for dim in (0, 1, 2) if device == "cpu" or is_log else (1,):
            assert torch.autograd.gradcheck(
                lambda x: masked_softmax(x, dim, extents(device), is_log=is_log),  # noqa: B023
                leaf(device, 3, 5, 8),
            )


@pytest.mark.parametrize("kind", KINDS)
def test_a_reduction_passes_gradcheck(kind: str, device: str) -> None:
    if device == "cuda" and kind not in ("mean", "logsumexp"):
        pytest.skip(
            "how autograd reaches a kernel is the same for each; tests/padded/test_masked_kernels.py compiles them all"
        )
    for p in ORDERS.get(kind, (2.0,)):
        for dims in ([2], [0, 1], [0, 1, 2]):
            assert torch.autograd.gradcheck(
                lambda x: masked_reduction(x, kind, dims, extents(device, least=1), p).out,  # noqa: B023
                leaf(device, 3, 5, 8),
            )


@pytest.mark.parametrize("is_rms", [False, True], ids=["layer", "rms"])
def test_a_norm_passes_gradcheck(is_rms: bool, device: str) -> None:
    def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return masked_norm(x, 1, weight, bias, 1e-5, extents(device), is_rms=is_rms).y

    assert torch.autograd.gradcheck(norm, (leaf(device, 3, 5, 8), leaf(device, 8), leaf(device, 8)))
    assert torch.autograd.gradcheck(
        lambda x: masked_norm(x, 2, None, None, 1e-5, extents(device), is_rms=is_rms).y, leaf(device, 3, 5, 8)
    )


def test_softmax_passes_gradgradcheck(device: str) -> None:
    for is_log in (False, True):
        assert torch.autograd.gradgradcheck(
            lambda x: masked_softmax(x, 1, few(device), is_log=is_log),  # noqa: B023
            leaf(device, 2, 3, 4),
        )


@pytest.mark.parametrize("kind", KINDS)
def test_a_reduction_passes_gradgradcheck(kind: str, device: str) -> None:
    for dims in ([2], [0, 1]):
        assert torch.autograd.gradgradcheck(
            lambda x: masked_reduction(x, kind, dims, few(device)).out,  # noqa: B023
            leaf(device, 2, 3, 4),
        )


@pytest.mark.parametrize("is_rms", [False, True], ids=["layer", "rms"])
def test_a_norm_passes_gradgradcheck(is_rms: bool, device: str) -> None:
    def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return masked_norm(x, 1, weight, bias, 1e-5, few(device), is_rms=is_rms).y

    assert torch.autograd.gradgradcheck(norm, (leaf(device, 2, 3, 4), leaf(device, 4), leaf(device, 4)))
    assert torch.autograd.gradgradcheck(
        lambda x: masked_norm(x, 2, None, None, 1e-5, few(device), is_rms=is_rms).y, leaf(device, 2, 3, 4)
    )


def test_padding_and_empty_rows_put_no_nan_into_second_derivatives(device: str) -> None:
    x = leaf(device, 3, 5, 8)
    real = valid_mask((3, 5, 8), extents(device), x.device).expand(x.shape)
    poisoned = torch.where(real, x, math.nan).detach().requires_grad_()
    for kind in set(KINDS) - {"var"}:
        out = masked_reduction(poisoned, kind, [2], extents(device)).out
        (first,) = torch.autograd.grad((out.nan_to_num(posinf=0, neginf=0) ** 2).sum(), poisoned, create_graph=True)
        (second,) = torch.autograd.grad((first * first).sum(), poisoned)
        assert second.isfinite().all(), kind
        assert second[~real].eq(0).all()


def both_gradients(out: Tensor, inputs: list[Tensor]) -> list[tuple[Tensor, ...]]:
    """The gradients of a result, computed by a kernel and so that they can be differentiated themselves."""
    upstream = torch.linspace(1, 2, out.numel(), dtype=out.dtype, device=out.device).view(out.shape)
    return [
        torch.autograd.grad(out, inputs, upstream, retain_graph=True, create_graph=again) for again in (False, True)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_of_a_reduction_is_the_same_if_it_is_differentiated(kind: str, device: str) -> None:
    # Rows of equal elements, of zeros, of one element, of none; and the last one is padding.
    rows = [[1.0, 3.0, 3.0], [0.0, 2.0, math.nan], [0.0, 0.0, math.nan], [5.0, *[math.nan] * 2], *[[math.nan] * 3] * 2]
    lengths, bound = [3, 2, 2, 1, 0, 3], {"amax": -math.inf, "amin": math.inf}.get(kind)
    if bound is not None:
        rows[0], rows[1] = [bound, 3.0, 3.0], [bound, bound, math.nan]
    x = torch.tensor(rows, dtype=torch.float64, device=device, requires_grad=True)
    extent = [ValidLength(1, torch.tensor(lengths, device=device)), ValidLength(0, torch.tensor(5, device=device))]
    for p in (0.0, 0.5, *ORDERS["norm"]) if kind == "norm" else (2.0,):
        (first,), (again,) = both_gradients(masked_reduction(x, kind, [1], extent, p).out, [x])
        torch.testing.assert_close(again, first, equal_nan=True)


def test_the_second_derivative_of_a_product_with_zeros_is_that_of_torch(device: str) -> None:
    rows = [[2.0, 0.0, 3.0, math.nan], [0.0, 5.0, 0.0, math.nan], [4.0, 0.0, math.nan, math.nan]]
    x = torch.tensor(rows, dtype=torch.float64, device=device, requires_grad=True)
    lengths = [3, 3, 2]
    out = masked_reduction(x, "prod", [1], [ValidLength(1, torch.tensor(lengths, device=device))]).out
    wanted = torch.stack([row[:n].prod() for row, n in zip(x, lengths, strict=True)])
    found = []
    for product in (out, wanted):
        (first,) = torch.autograd.grad(product.sum(), x, create_graph=True)
        found.append(torch.autograd.grad(first.exp().sum(), x)[0])
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize("kind", KINDS)
def test_second_derivatives_of_a_reduction_do_not_wait_for_the_device(kind: str, device: str) -> None:
    class Ops(TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            assert op is not torch.ops.aten._local_scalar_dense.default
            return op(*args, **(kwargs or {}))

    x = leaf(device, 2, 3, 4)
    lengths = few(device)
    with Ops():
        out = masked_reduction(x, kind, [0, 2], lengths).out
        (first,) = torch.autograd.grad((out * out).sum(), x, create_graph=True)
        torch.autograd.grad((first * first).sum(), x)


@pytest.mark.parametrize("is_rms", [False, True], ids=["layer", "rms"])
def test_padded_rows_put_no_nan_into_differentiated_gradients_of_a_norm(is_rms: bool, device: str) -> None:
    x, weight, bias = leaf(device, 3, 4), leaf(device, 4), leaf(device, 4)
    with torch.no_grad():
        x[2] = math.nan
    # Without an eps, the scale of a row of padding is infinite.
    y = masked_norm(x, 1, weight, bias, 0.0, [ValidLength(0, torch.tensor(2, device=device))], is_rms=is_rms).y
    for first, again in zip(*both_gradients(y, [x, weight, bias]), strict=True):
        assert first.isfinite().all()
        torch.testing.assert_close(again, first)


@pytest.mark.parametrize("is_log", [False, True], ids=["softmax", "log_softmax"])
def test_the_gradient_of_a_softmax_of_half_precision_is_summed_in_float(is_log: bool, device: str) -> None:
    x = torch.zeros(1, 4096, dtype=torch.float16, device=device, requires_grad=True)
    upstream = torch.linspace(10, 50, 4096, dtype=torch.float16, device=device).unsqueeze(0)
    plain = torch.log_softmax(x, 1) if is_log else torch.softmax(x, 1)
    (wanted,) = torch.autograd.grad(plain, x, upstream)
    masked = masked_softmax(x, 1, [ValidLength(1, torch.tensor(4096, device=device))], is_log=is_log)
    for again in (False, True):
        (found,) = torch.autograd.grad(masked, x, upstream, retain_graph=True, create_graph=again)
        torch.testing.assert_close(found, wanted)


def test_parameters_of_half_precision_get_gradients_of_half_precision(device: str) -> None:
    x = torch.randn(3, 5, 8, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight, bias = (torch.ones(8, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    masked_norm(x, 1, weight, bias, 1e-5, extents(device)).y.float().sum().backward()
    for t in (x, weight, bias):
        assert t.grad is not None
        assert t.grad.dtype == torch.bfloat16
        assert t.grad.shape == t.shape


def test_the_ops_pass_torch_opcheck() -> None:
    x, w = leaf("cpu", 3, 5, 8), leaf("cpu", 8)
    padded = ([1, 2], [e.sizes for e in extents("cpu", least=1)], [0, 0])
    ops = torch.ops.subtensors
    torch.library.opcheck(ops.masked_softmax, (x, 2, *padded, 0.0, False))
    torch.library.opcheck(ops.masked_reduction, (x, "var", [2], *padded, 2.0, 1.0, 0.0, True))
    torch.library.opcheck(ops.masked_norm, (x, 1, w, w, 1e-5, *padded, 0.0, False))


def test_one_compilation_serves_every_length(device: str) -> None:
    @torch.compile(fullgraph=True, backend="aot_eager")
    def loss(x: Tensor, lengths: Tensor) -> Tensor:
        extent = [ValidLength(1, lengths)]
        y = masked_softmax(x, 1, extent)
        return masked_reduction(y * x, "mean", [0, 1], extent).out

    with torch._dynamo.config.patch(error_on_recompile=True):
        for lengths in ([4, 2], [1, 3], [0, 1]):
            x = torch.randn(2, 4, device=device, requires_grad=True)
            value = loss(x, torch.tensor(lengths, device=device))
            value.backward()
            rows = [row[:n] for row, n in zip(x.detach(), lengths, strict=True)]
            expected = torch.cat([row.softmax(0) * row for row in rows]).mean()
            torch.testing.assert_close(value.detach(), expected)
            assert x.grad is not None
            assert [row[n:].abs().sum().item() for row, n in zip(x.grad, lengths, strict=True)] == [0, 0]


@pytest.mark.gpu
def test_one_captured_graph_serves_every_length() -> None:
    x = torch.randn(2, 64, device="cuda")
    lengths = torch.tensor([64, 64], device="cuda")
    weight = torch.randn(64, device="cuda")

    def run() -> list[Tensor]:
        extent = [ValidLength(1, lengths)]
        return [
            masked_softmax(x, 1, extent),
            *(masked_reduction(x, kind, [1], extent).out for kind in KINDS),
            masked_norm(x, 1, weight, None, 1e-5, extent).y,
        ]

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for rows in ([64, 64], [3, 60], [1, 17]):
        lengths.copy_(torch.tensor(rows))
        graph.replay()
        for a, b in zip(captured, run(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(captured[2], torch.stack([r[:n].mean() for r, n in zip(x, rows, strict=True)]))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_no_op_waits_for_the_device() -> None:
    x = torch.randn(4, 32, 32, device="cuda", requires_grad=True)
    extent = [ValidLength(1, torch.tensor([3, 32, 0, 9], device="cuda"))]

    def run() -> None:
        y = masked_norm(masked_softmax(x, 1, extent), 1, None, None, 1e-5, extent).y
        sum((masked_reduction(y, kind, [1], extent).out.nan_to_num().sum() for kind in KINDS), x.sum() * 0).backward()

    run()
    with waits_are_errors():
        run()


def test_the_error_for_a_wrong_argument_names_its_value() -> None:
    x = torch.ones(2, 3)
    with pytest.raises(ValueError, match="got 'median'"):
        masked_reduction(x, "median", [1], [])
    with pytest.raises(ValueError, match="at least one dimension"):
        masked_reduction(x, "sum", [], [])
    with pytest.raises(ValueError, match="an order of at least 0, got -1"):
        masked_reduction(x, "norm", [1], [], p=-1)
    with pytest.raises(TypeError, match=r"mean takes a floating-point tensor, got torch.int64"):
        masked_reduction(x.long(), "mean", [1], [])
