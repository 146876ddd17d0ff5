"""Torch code on joined and cut CPU tensors: the results are those of one element after the other, to the last bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st_
from program_oracle import interpret
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from subtensors.dispatch.fused import torch_executor
from subtensors.dispatch.fused.fused_function import FusedFunction
from subtensors.dispatch.fused.tensor_columns import TensorColumn


def adam(p: Tensor, g: Tensor, m: Tensor, v: Tensor, step: Tensor, lr: float) -> None:
    step.add_(1)
    t = step.double()
    m.lerp_(g, 0.1)
    v.mul_(0.99).add_(0.01 * g * g)
    p.sub_((lr / (1 - 0.9**t)) * (m / (v.sqrt() * (1 - 0.99**t) ** -0.5 + 1e-8)))


def columns_of(shapes: list[tuple[int, ...]], steps: list[float], permuted: set[int]) -> list[list[Tensor]]:
    torch.manual_seed(0)
    columns = [[torch.randn(shape) for shape in shapes] for _ in range(4)]
    columns[3] = [v.square() for v in columns[3]]
    for i in permuted:
        columns[1][i] = torch.randn(shapes[i][::-1]).permute(*range(len(shapes[i]))[::-1])
    return [*columns, [torch.tensor(s) for s in steps]]


def run_one_by_one(function: FusedFunction, columns: list[list[Tensor]], lr: float) -> None:
    """The oracle: the traced program, interpreted element by element."""
    ((_, executor),) = next(iter(function._variant.plans.values()))[0].groups
    assert isinstance(executor, torch_executor.TorchExecutor)
    assert executor.joined
    numbers = [evaluate([lr]) for evaluate in executor.trace.scalars]
    for row in zip(*columns, strict=True):
        interpret(executor.trace.program, list(row), numbers)


@given(
    shapes=st_.lists(st_.lists(st_.integers(0, 5), min_size=1, max_size=3).map(tuple), min_size=1, max_size=12),
    steps=st_.lists(st_.sampled_from([0.0, -0.0, 3.0, float("nan")]), min_size=12, max_size=12),
    permuted=st_.sets(st_.integers(0, 11)),
    piece=st_.sampled_from([1, 7, 30, 1000]),
)
def test_joined_and_cut_tensors_have_the_results_of_single_ones(
    shapes: list[tuple[int, ...]], steps: list[float], permuted: set[int], piece: int
) -> None:
    count = len(shapes)
    of = (shapes, steps[:count], {i for i in permuted if i < count})
    ours, theirs = columns_of(*of), columns_of(*of)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_executor, "PIECE", piece)
        function = FusedFunction(adam)
        # The state is fixed, as an optimizer's is, and its views stay from call to call.
        state = [TensorColumn(column, is_fixed=True) for column in ours[2:]]
        with torch.no_grad():
            for _ in range(2):
                function(*map(TensorColumn, ours[:2]), *state, 0.5)
                run_one_by_one(function, theirs, 0.5)
    for own, expected in zip(ours, theirs, strict=True):
        for a, b in zip(own, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def test_elements_of_different_counts_are_joined_apart() -> None:
    p = [torch.ones(2) for _ in range(3)]
    steps = [torch.tensor(0.0), torch.tensor(3.0), torch.tensor(0.0)]

    def decay(p: Tensor, step: Tensor) -> None:
        step.add_(1)
        p.div_(step)

    FusedFunction(decay)(TensorColumn(p), TensorColumn(steps))
    assert [t.tolist() for t in p] == [[1.0, 1.0], [0.25, 0.25], [1.0, 1.0]]
    assert [t.item() for t in steps] == [1.0, 4.0, 1.0]


@pytest.mark.parametrize("fixed", [False, True])
def test_a_write_to_joined_tensors_counts_as_one_to_each(fixed: bool) -> None:
    p = [torch.ones(2), torch.ones(3, 2), torch.ones(2, 3).t()]
    function, column = FusedFunction(lambda x: x.mul_(2)), TensorColumn(p, is_fixed=fixed)
    for _ in range(2):
        before = [t._version for t in p]
        function(column)
        assert all(t._version > v for t, v in zip(p, before, strict=True))


def test_tensors_that_come_to_overlap_are_written_one_after_the_other() -> None:
    function = FusedFunction(lambda x, y: x.add_(y))
    memory = torch.ones(6)
    for y in (torch.ones(2), memory[2:4], torch.ones(2)):
        before = memory.clone()
        expected = [before[:2] + y, before[2:4] + y]
        x = [memory[:2], memory[2:4]]
        if y.data_ptr() == memory[2:4].data_ptr():
            expected[1] = before[2:4] * 2
        function(TensorColumn(x), TensorColumn([y, y]))
        assert [t.tolist() for t in x] == [t.tolist() for t in expected]


def test_a_write_in_a_dispatch_mode_counts_too() -> None:
    p = [torch.ones(2), torch.ones(3)]
    with FlopCounterMode(display=False):
        FusedFunction(lambda x: x.mul_(2))(TensorColumn(p))
    assert all(t._version > 0 for t in p)


def test_a_program_that_reduces_is_not_joined() -> None:
    p = [torch.tensor([3.0, 4.0]), torch.tensor([1.0])]
    FusedFunction(lambda x: x.div_(x.norm()))(TensorColumn(p))
    assert torch.allclose(p[0], torch.tensor([0.6, 0.8]))
    assert p[1].item() == 1
