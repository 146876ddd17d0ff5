"""A program as straight-line torch code equals `interpret` to the last bit, and takes less memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from program_oracle import interpret
from random_programs import traced_programs
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from subtensors.dispatch.fused.torch_executor import scalar_operands
from subtensors.dispatch.fused.trace import Trace, trace
from subtensors.kernels.fused.program import Parameter, Program, Shape
from subtensors.kernels.fused.torch_codegen import write_torch

ELEMENT, TENSOR = Shape.PER_ELEMENT, Shape.PER_TENSOR


def traced(function: Any, *parameters: tuple[torch.dtype, Shape], scalars: int = 0) -> Program:
    declared = tuple(Parameter(f"x{i}", *p) for i, p in enumerate(parameters))
    replace = lambda tensors, numbers: ((*tensors, *numbers), {})  # noqa: E731
    return trace(function, declared, [float] * scalars, replace, torch.device("cpu")).program


def both(program: Program, tensors: list[Tensor], numbers: list[float]) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs and tensors after the code, and after the interpreter."""
    ours, theirs = ([t.clone() for t in tensors] for _ in range(2))
    cpu = torch.device("cpu")
    return (
        write_torch(program)(ours, numbers, scalar_operands(numbers, cpu)) + ours,
        interpret(program, theirs, numbers) + theirs,
    )


class Allocations(TorchDispatchMode):
    """Counts the ops whose result is not one of their operands."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.count += not any(result is a for a in args)
        return result


def adam(p: Tensor, g: Tensor, m: Tensor, v: Tensor, lr: float) -> None:
    m.mul_(0.9).add_(g * 0.1)
    v.mul_(0.99).add_(g * g * 0.01)
    p.sub_(lr * m / (v.sqrt() + 1e-8))


def test_memory_of_dead_values_is_reused() -> None:
    program = traced(adam, *[(torch.float32, ELEMENT)] * 4, scalars=1)
    tensors = [torch.rand(5) for _ in range(4)]
    operands = scalar_operands([0.1], torch.device("cpu"))
    with Allocations() as mode:
        write_torch(program)(tensors, [0.1], operands)
    # g * 0.1, g * g, lr * m and v.sqrt(); the first operand of any other op is dead or written.
    assert mode.count == 4


def test_a_swap_reads_both_before_it_writes_either() -> None:
    def swap(a: Tensor, b: Tensor) -> None:
        kept = a + 0
        a.copy_(b * 2)
        b.copy_(kept * 3)

    program = traced(swap, *[(torch.float32, ELEMENT)] * 2)
    ours, theirs = both(program, [torch.arange(3.0), torch.arange(3.0) + 5], [])
    assert all(map(torch.equal, ours, theirs))


def test_a_value_that_is_stored_and_returned_is_two_tensors() -> None:
    def twice(a: Tensor) -> Tensor:
        a.mul_(2)
        return a * 1

    def same(a: Tensor) -> Tensor:
        b = a * 2
        a.copy_(b)
        return b

    for function in (twice, same):
        program = traced(function, (torch.float32, ELEMENT))
        tensors = [torch.ones(3)]
        (out,) = write_torch(program)(tensors, [], [])
        assert out.data_ptr() != tensors[0].data_ptr()
        assert torch.equal(out, tensors[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int32])
def test_a_dynamic_scalar_promotes_as_a_python_number(dtype: torch.dtype) -> None:
    for granularity, shape in ((ELEMENT, (4,)), (TENSOR, ())):
        program = traced(lambda x, n: x * n + n, (dtype, granularity), scalars=1)
        ours, theirs = both(program, [torch.ones(shape, dtype=dtype)], [0.3])
        assert [t.dtype for t in ours] == [t.dtype for t in theirs]
        assert all(map(torch.equal, ours, theirs))


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@given(drawn=traced_programs())
@settings(max_examples=4 * settings().max_examples)
def test_the_code_equals_the_interpreter(drawn: tuple[Trace, list[Tensor], list[float]]) -> None:
    trace, tensors, numbers = drawn
    scalars = [evaluate(numbers) for evaluate in trace.scalars]
    for a, b in zip(*both(trace.program, tensors, scalars), strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
