"""A limit of memory bounds the bytes at the peak, gradients included; what can't be met is refused with what can."""

from __future__ import annotations

import functools
import gc
import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as some
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import subtensors as st
from subtensors.dispatch.chunked.cost_model import CPU, LossShape, plan_linear_cross_entropy, plan_row_statistics

Loss = Callable[[Tensor, Tensor], Tensor]
"""A loss of logits (N, V) and targets (N,)."""


def with_z_loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits, target) + 1e-4 * logits.float().logsumexp(-1).square().mean()


def policy(logits: Tensor, target: Tensor) -> Tensor:
    log_p = logits.float().log_softmax(-1)
    selected = log_p.gather(-1, target[:, None]).squeeze(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return -(selected - selected.detach()).exp().mean() - 0.01 * entropy.square().mean()


def smoothed_rows(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits, target, label_smoothing=0.1, reduction="none").square().mean()


LOSSES: list[Loss] = [F.cross_entropy, with_z_loss, policy, smoothed_rows]
DTYPES = [torch.float32, torch.bfloat16]
ROWS, WIDTH, CLASSES = 512, 16, 3000


def gradients_peak(loss: Loss, dtype: torch.dtype, has_bias: bool = False, **chunks: int) -> int:
    """Return the bytes at the peak of a loss and its backward above its inputs."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, WIDTH, generator=generator).to(dtype).requires_grad_()
    weight = (0.1 * torch.randn(CLASSES, WIDTH, generator=generator)).to(dtype).requires_grad_()
    target = torch.randint(0, CLASSES, (ROWS,), generator=generator)
    bias = torch.zeros(CLASSES, dtype=dtype).requires_grad_() if has_bias else None
    return peak(lambda: loss(F.linear(st.chunk(hidden, **chunks), weight, bias), target).backward())


def peak(step: Callable[[], object]) -> int:
    """Return the most bytes that are allocated at once."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step()
    assert seen.profiler is not None
    assert seen.profiler.kineto_results is not None
    changes = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for change in sorted(changes, key=lambda event: event.start_ns()):
        held += change.nbytes()
        most = max(most, held)
    return most


@functools.cache
def products_take_memory(dtype: torch.dtype) -> bool:
    """Return whether torch's products compute in float32 memory of their own, as those of bfloat16 do on some CPUs."""
    a, result = torch.ones(ROWS, WIDTH, dtype=dtype), torch.empty(ROWS, ROWS, dtype=dtype)
    return peak(lambda: torch.mm(a, a.t(), out=result)) > 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("limit", [1_500_000, 4_000_000])
def test_a_limit_bounds_the_allocated_bytes_at_the_peak(loss: Loss, dtype: torch.dtype, limit: int) -> None:
    if products_take_memory(dtype):
        pytest.skip("torch's products take memory of their own here, which no plan can bound")
    gradients_peak(loss, dtype, memory_limit=limit)  # what is computed once
    assert gradients_peak(loss, dtype, memory_limit=limit) <= limit


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
@pytest.mark.parametrize("loss", [F.cross_entropy, policy])
@pytest.mark.parametrize("limit", [2_000_000, 4_000_000])
def test_a_limit_bounds_the_bytes_with_a_bias_too(loss: Loss, dtype: torch.dtype, limit: int) -> None:
    if products_take_memory(dtype):
        pytest.skip("torch's products take memory of their own here, which no plan can bound")
    gradients_peak(loss, dtype, has_bias=True, memory_limit=limit)  # what is computed once
    assert gradients_peak(loss, dtype, has_bias=True, memory_limit=limit) <= limit


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("loss", LOSSES)
def test_fewer_rows_never_allocate_more(loss: Loss, dtype: torch.dtype) -> None:
    gradients_peak(loss, dtype, rows=256)
    many, some_rows, few = (gradients_peak(loss, dtype, rows=rows) for rows in (512, 128, 48))
    assert many >= some_rows >= few


@given(
    rows=some.integers(1, 9000),
    width=some.integers(1, 3000),
    classes=some.integers(1, 200_000),
    itemsize=some.sampled_from([2, 4]),
    asked=some.tuples(some.integers(1, 9000), some.integers(1, 9000)),
)
def test_fewer_rows_never_plan_more(rows: int, width: int, classes: int, itemsize: int, asked: tuple[int, int]) -> None:
    shape = LossShape(rows, width, classes, itemsize, itemsize)
    few, many = sorted(asked)
    for plan in (plan_linear_cross_entropy, plan_row_statistics):
        less, more = (plan(shape, rows=count, rates=CPU) for count in (few, many))  # type: ignore[operator]
        assert less is None or (more is not None and less.bytes <= more.bytes)


def two_layers(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits, target) + logits.relu().sum()


def two_passes(logits: Tensor, target: Tensor) -> Tensor:
    return (logits.softmax(0) * logits.logsumexp(-1, keepdim=True)).square().sum()


@settings(max_examples=15, deadline=None)
@given(
    loss=some.sampled_from([*LOSSES, two_layers, two_passes]),
    rows=some.integers(2, 40),
    width=some.integers(1, 9),
    classes=some.integers(2, 90),
    dtype=some.sampled_from([*DTYPES, torch.float64]),
    frozen=some.booleans(),
)
def test_the_named_least_is_accepted(
    loss: Loss, rows: int, width: int, classes: int, dtype: torch.dtype, frozen: bool
) -> None:
    hidden = torch.randn(rows, width).to(dtype).requires_grad_()
    weight = torch.randn(classes, width).to(dtype).requires_grad_(not frozen)
    target = torch.randint(0, classes, (rows,))

    def run(limit: int) -> None:
        loss(F.linear(st.chunk(hidden, memory_limit=limit), weight), target).backward()

    with pytest.raises(ValueError, match="bytes are needed at least") as refused:
        run(10)
    found = re.search(r"(\d+) bytes", str(refused.value))
    assert found
    run(int(found[1]))


def test_the_named_least_of_numbers_of_several_layers_is_accepted() -> None:
    hidden = torch.randn(32, 4, requires_grad=True)
    small, large = torch.randn(20, 4, requires_grad=True), torch.randn(90, 4, requires_grad=True)
    target = torch.randint(0, 20, (32,))

    def run(limit: int, heads: tuple[Tensor, Tensor]) -> None:
        h = st.chunk(hidden, memory_limit=limit)
        torch.add(*(F.cross_entropy(F.linear(h, head), target) for head in heads)).backward()

    for heads in ((small, large), (large, small)):
        with pytest.raises(ValueError, match="bytes are needed at least") as refused:
            run(100, heads)
        found = re.search(r"(\d+) bytes", str(refused.value))
        assert found
        run(int(found[1]), heads)
