"""Rules by their kernels: softmax, reductions and norms of padded tensors on a GPU, one kernel each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import subtensors as st
from subtensors.dispatch.padded import kernels

pytestmark = pytest.mark.gpu

SEQ = st.Dim("seq", max=512, buckets=st.Linear(64))

CALLS: dict[str, Callable[[Any, Tensor], Any]] = {
    "softmax": lambda x, w: torch.softmax(x, 1),
    "log softmax": lambda x, w: torch.log_softmax(x, 1),
    "sum": lambda x, w: x.sum(1),
    "sum of all but rows": lambda x, w: x.sum((1, 2)),
    "mean": lambda x, w: x.mean(1, keepdim=True),
    "maximum": lambda x, w: x.amax(1),
    "minimum": lambda x, w: x.amin(1),
    "logsumexp": lambda x, w: x.logsumexp(1),
    "variance": lambda x, w: x.var(1),
    "norm": lambda x, w: torch.linalg.vector_norm(x, 2, dim=1),
    "layer norm": lambda x, w: torch.nn.functional.layer_norm(x, (x.shape[-1],), w),
    "rms norm": lambda x, w: torch.nn.functional.rms_norm(x, (x.shape[-1],), w),
}


# Each is some kernels to compile, so that every other call has the one half precision, and the rest the other.
HALVES = [(name, (torch.bfloat16, torch.float16)[i % 2]) for i, name in enumerate(CALLS)]


@pytest.mark.parametrize(("name", "dtype"), [*((name, torch.float32) for name in CALLS), *HALVES])
def test_values_and_gradients_err_no_more_than_torch_on_each_row(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    call = CALLS[name]
    weight = torch.randn(40, device="cuda").to(dtype).requires_grad_()
    rows = [torch.randn(n, 40, device="cuda").to(dtype).requires_grad_() for n in (65, 3, 128)]

    def results(kind: torch.dtype, padded: bool) -> list[Tensor]:
        own = [row.detach().to(kind).requires_grad_() for row in rows]
        w = weight.detach().to(kind).requires_grad_()
        if padded:
            out = call(st.pad(own, {0: SEQ}, value=float("nan")), w)
            outs = out.unpad() if isinstance(out, st.PaddedTensor) else list(out)
        else:
            outs = [call(row[None], w)[0] for row in own]
        total = torch.stack([(o.double() ** 2).sum() for o in outs]).sum()
        grads = torch.autograd.grad(total, [*own, w], allow_unused=True)
        return [*outs, *(g for g in grads if g is not None)]

    truth, plain, actual = results(torch.float64, False), results(dtype, False), results(dtype, True)
    for a, p, t in zip(actual, plain, truth, strict=True):
        assert a.dtype == p.dtype
        assert a.shape == p.shape
        error, allowed = ((x.double() - t).abs().max() for x in (a, p))
        assert error <= 1.5 * allowed + torch.finfo(dtype).eps * t.abs().max()


def test_a_gpu_call_runs_the_masked_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = kernels.masked_ops.masked_softmax
    monkeypatch.setattr(kernels.masked_ops, "masked_softmax", lambda *args: calls.append(args) or real(*args))
    torch.softmax(st.pad(torch.randn(2, 5, device="cuda"), {1: SEQ}), 1)
    assert len(calls) == 1
