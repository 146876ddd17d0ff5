"""Kernels are compiled once each, and those of one call side by side."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import triton
from fused_lists import groups, lists
from torch import Tensor

from subtensors.dispatch.fused.fused_function import FusedFunction
from subtensors.dispatch.fused.tensor_columns import TensorColumn
from subtensors.dispatch.fused.triton_executor import TritonExecutor

Compiled = list[tuple[str, threading.Thread]]

SHAPES = [(3, 5), (700,), (64, 64)]


def counted_decay(constant: float) -> FusedFunction:
    """Math with different kernels for each constant, so that none was compiled before."""

    def decay(p: Tensor, step: Tensor, rate: float) -> Tensor:
        step.add_(constant)
        p.mul_(1 - rate**step).mul_(constant)
        return p.norm() * constant

    return FusedFunction(decay)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Compiled:
    """The kernels that Triton was asked to compile, each with the thread that asked."""
    seen: Compiled = []

    def listen(*, src: Any, **_: Any) -> None:
        seen.append((src.name, threading.current_thread()))

    monkeypatch.setattr(triton.knobs.compilation, "listener", listen)
    return seen


def arguments(device: str) -> tuple[TensorColumn, TensorColumn]:
    p = TensorColumn([*lists(*SHAPES, device=device), *lists(*SHAPES, dtype=torch.bfloat16, device=device)])
    return p, TensorColumn(torch.zeros((), device=device) for _ in p)


def test_programs_of_several_dtypes_share_a_common_kernel(device: str, kernels: None) -> None:
    fusion = counted_decay(1.0)
    fusion(*arguments(device), 0.5)
    first, second = (group.kernels.kernels for group in groups(fusion))
    counts = [kernel for kernel in first if "tensor_0" in kernel.name]
    assert counts
    assert [kernel.run for kernel in second if "tensor_0" in kernel.name] == [kernel.run for kernel in counts]
    elements = ([kernel.source for kernel in kernels if "element" in kernel.name] for kernels in (first, second))
    assert next(elements) != next(elements)


@pytest.mark.gpu
def test_kernels_of_a_call_are_compiled_once_each_in_other_threads(compiled: Compiled) -> None:
    fusion = counted_decay(2.0)
    p, step = arguments("cuda")
    expected = [t.double() * 1.875 for t in p]
    norms = fusion(p, step, 0.25)
    for t, truth, norm in zip(p, expected, norms, strict=True):
        # One rounding to the dtype of the element; a norm is of values before their rounding, and is rounded itself.
        torch.testing.assert_close(t.double(), truth, rtol=2**-8 if t.dtype == torch.bfloat16 else 1e-6, atol=0)
        torch.testing.assert_close(norm.double(), 2 * t.double().norm(), rtol=1e-2, atol=0)
    distinct = {id(k.run) for g in groups(fusion) if isinstance(g, TritonExecutor) for k in g.kernels.kernels}
    assert len(compiled) == len(distinct)
    assert threading.current_thread() not in [thread for _, thread in compiled]

    compiled.clear()
    fusion(p, step, 0.25)
    fusion(*arguments("cuda"), 0.25)
    assert not compiled


@pytest.mark.gpu
def test_a_call_works_inside_the_callers_own_async_compilation(compiled: Compiled) -> None:
    p, step = arguments("cuda")
    with ThreadPoolExecutor(1) as pool, triton.AsyncCompileMode(pool):
        counted_decay(3.0)(p, step, 0.5)
    assert compiled
    assert all((t == 3).all() for t in step)


@pytest.mark.gpu
def test_explain_compiles_nothing(compiled: Compiled) -> None:
    text = counted_decay(4.0).explain(*arguments("cuda"), 0.5)
    assert "kernel" in text
    assert not compiled
