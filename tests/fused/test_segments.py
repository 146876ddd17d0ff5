"""Segments, run one after another over memory and slots, equal the program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from program_oracle import _run, interpret
from programs import Lowering, check, each_kernel_lowering
from random_programs import traced, traced_programs
from torch import Tensor

from subtensors.dispatch.fused.tensor_columns import TensorColumn
from subtensors.dispatch.fused.trace import Trace
from subtensors.kernels.fused.program import Instruction, Program, Ref, Scalar, Shape
from subtensors.kernels.fused.segments import Segment, plan_segments, slot_count

ELEMENT, TENSOR = Shape.PER_ELEMENT, Shape.PER_TENSOR


def run_segments(program: Program, tensors: list[Tensor], scalars: list[float]) -> list[Tensor]:
    """Run the segments as the kernels run: each reads memory and slots first, and writes at its end."""
    slots: dict[int, Tensor] = {}
    outputs: dict[int, Tensor] = {}
    for segment in plan_segments(program):
        values: dict[int, Tensor] = {}
        for index in segment.steps:
            if index in segment.memory:
                values[index] = tensors[segment.memory[index]].clone()
            elif index in segment.slots:
                values[index] = slots[segment.slots[index]]
            else:
                values[index] = computed(program, index, values, scalars, tensors)
            if segment.shape is TENSOR:
                assert program.value(index).shape is TENSOR
        for parameter, value in segment.stores.items():
            tensors[parameter].copy_(values[value])
        outputs |= {number: values[value].clone() for number, value in segment.outputs.items()}
        slots |= {slot: values[value] for slot, value in (segment.keeps | segment.reductions).items()}
    return [outputs[k] for k in range(len(program.outputs))]


def computed(
    program: Program, index: int, values: dict[int, Tensor], scalars: list[float], tensors: list[Tensor]
) -> Tensor:
    step = program.value(index)
    assert isinstance(step, Instruction)
    reads = step.reads()

    def operand(argument: Any) -> Any:
        if isinstance(argument, Ref):
            if argument.index in reads:
                return values[argument.index]
            # Only the shape of this operand is read.
            shapes = [t for t, p in zip(tensors, program.parameters, strict=True) if p.shape is ELEMENT]
            like = shapes[0] if program.value(argument.index).shape is ELEMENT else torch.zeros(())
            return torch.empty_like(like, dtype=program.value(argument.index).dtype)
        return scalars[argument.index] if isinstance(argument, Scalar) else argument

    return _run(step.op, step.dtype, [operand(a) for a in step.args])


def assert_segments_agree(trace: Trace, tensors: list[Tensor], numbers: list[float]) -> None:
    scalars = [evaluate(numbers) for evaluate in trace.scalars]
    whole, parts = [t.clone() for t in tensors], [t.clone() for t in tensors]
    expected, actual = interpret(trace.program, whole, scalars), run_segments(trace.program, parts, scalars)
    for a, e in zip((*actual, *parts), (*expected, *whole), strict=True):
        assert a.dtype == e.dtype
        torch.testing.assert_close(a, e, rtol=0, atol=0, equal_nan=True)


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@given(drawn=traced_programs())
@settings(max_examples=4 * settings().max_examples)
def test_segments_equal_the_program(drawn: tuple[Trace, list[Tensor], list[float]]) -> None:
    assert_segments_agree(*drawn)


def lamb(p: Tensor, g: Tensor, m: Tensor, v: Tensor, *, lr: float) -> None:
    m.lerp_(g, 0.1)
    v.lerp_(g * g, 0.01)
    update = m / (v.sqrt() + 1e-6) + 0.01 * p
    p.sub_(lr * update * (p.norm() / update.norm()))


def old_value_kept(p: Tensor) -> None:
    old = p.clone()
    p.add_(1)
    p.mul_(old.sum())


def read_before_and_after(p: Tensor, step: Tensor) -> Tensor:
    before = p * step
    step.add_(1)
    p.add_(before * step)
    step.mul_(2)
    return before / step


def three_reductions(p: Tensor) -> Tensor:
    p.sub_(p.mean())
    p.div_(p.norm())
    return p * p.amax()


def counted_by_sum(p: Tensor, total: Tensor, count: Tensor) -> None:
    total.add_(p.sum())
    count.add_(1)
    p.sub_(total / count)


def exchanged(p: Tensor, q: Tensor) -> None:
    old = p.clone()
    p.copy_(q)
    q.copy_(old)


def exchanged_after_a_sum(p: Tensor, q: Tensor) -> None:
    old, size = p.clone(), q.sum()
    p.copy_(q * size)
    q.copy_(old / size)


def stored_twice(p: Tensor, q: Tensor) -> Tensor:
    total = p.add_(q).sum()
    q.copy_(p)
    p.mul_(total)
    return q - total


def number_read_late(p: Tensor, step: Tensor) -> Tensor:
    first = step * 2
    step.copy_(p.sum())
    return p * first + step


def number_from_a_late_store(p: Tensor, step: Tensor) -> None:
    old = step.clone()
    step.copy_(p.amax())
    p.div_(step).mul_(old)
    p.sub_(p.sum() * old)


EXAMPLES: list[tuple[Callable[..., Any], str, int]] = [
    (lamb, "eeee", 2),
    (old_value_kept, "e", 2),
    (read_before_and_after, "en", 2),
    (three_reductions, "e", 4),
    (counted_by_sum, "enn", 4),
    (exchanged, "ee", 1),
    (exchanged_after_a_sum, "ee", 2),
    (stored_twice, "ee", 2),
    (number_read_late, "en", 3),
    (number_from_a_late_store, "en", 4),
]


def arguments(kinds: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.rand((6, 30) if k == "e" else (), generator=generator) + 0.5 for k in kinds]


@pytest.mark.parametrize(("function", "kinds", "kernels"), EXAMPLES)
def test_no_value_is_read_from_memory_that_was_overwritten(
    function: Callable[..., Any], kinds: str, kernels: int
) -> None:
    keywords = {"lr": 0.5} if function is lamb else {}
    trace = traced(function, *(TensorColumn([t.clone()]) for t in arguments(kinds)), **keywords)
    assert_segments_agree(trace, arguments(kinds), list(keywords.values()))
    assert len(plan_segments(trace.program)) == kernels


@pytest.mark.parametrize(("function", "kinds", "kernels"), EXAMPLES)
@each_kernel_lowering
def test_kernels_keep_the_values_that_later_kernels_need(
    function: Callable[..., Any], kinds: str, kernels: int, lowering: Lowering
) -> None:
    keywords = {"lr": 0.5} if function is lamb else {}
    columns = [TensorColumn([t, t[:2, :1].clone() if t.dim() else t.clone()]) for t in arguments(kinds)]
    check(lowering, function, *columns, **keywords)


def adam(p: Tensor, g: Tensor, m: Tensor, v: Tensor, step: Tensor, counts: bool) -> None:
    if counts:
        step.add_(1)
    m.lerp_(g, 0.1)
    v.mul_(0.999).addcmul_(g, g, value=0.001)
    p.addcdiv_(m, v.sqrt() / (1 - step).sqrt() + 1e-8, value=-0.1)


def segments_of(function: Callable[..., Any], kinds: str, *more: Any) -> list[Segment]:
    return plan_segments(traced(function, *(TensorColumn([t]) for t in arguments(kinds)), *more).program)


def test_adam_is_one_sweep_over_elements_after_one_over_step_counts() -> None:
    assert [s.shape for s in segments_of(adam, "eeeen", True)] == [TENSOR, ELEMENT]
    assert [s.shape for s in segments_of(adam, "eeeen", False)] == [ELEMENT]


def test_a_program_that_writes_nothing_has_no_kernel() -> None:
    assert segments_of(lambda p: None, "e") == []


def test_unused_values_are_not_computed() -> None:
    (segment,) = segments_of(lambda p: (p.exp().sum(), p * 2)[1], "e")
    assert len(segment.steps) == 2


def test_reductions_of_one_round_share_a_sweep() -> None:
    segments = segments_of(lambda p, q: (p.sum(), q.amax(), (p * q).norm()), "ee")
    assert [s.shape for s in segments] == [ELEMENT, TENSOR]
    assert slot_count(segments) == 3


def test_a_costly_number_per_tensor_is_computed_once_a_tensor() -> None:
    assert [s.shape for s in segments_of(lambda p, n: p * n.exp(), "en")] == [TENSOR, ELEMENT]
    assert [s.shape for s in segments_of(lambda p, n: p * (1 - n), "en")] == [ELEMENT]
