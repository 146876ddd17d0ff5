"""Linear + cross entropy in parts: value and gradients against the plain program, for every option and schedule."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from chunked_programs import allocations
from cross_entropy_cases import Case, Sizes, cases, check, example, plain
from hypothesis import given
from hypothesis import strategies as some
from programs import Lowering, each_lowering

from subtensors.kernels.cross_entropy.column_passes import ColumnSplit, aligned
from subtensors.kernels.cross_entropy.cross_entropy import CrossEntropy
from subtensors.kernels.cross_entropy.logits_block import LossAndGradients, padded_rows
from subtensors.kernels.cross_entropy.row_statistics import linear_row_statistics

GRADIENTS = ("hidden", "weight", "bias")


schedules = some.one_of(
    some.just({}),
    some.builds(
        lambda n, how: {"rows": n, "accumulate": how}, some.integers(1, 13), some.sampled_from(["exact", "fast"])
    ),
    some.builds(lambda n, kept: {"columns": n, "kept": kept}, some.integers(1, 41), some.integers(0, 41)),
)


def run(lowering: Lowering, case: Case, **keywords: Any) -> LossAndGradients:
    """The function under test, with the memory that it allocates full of NaN where that can be arranged."""
    with np.errstate(all="ignore"):  # the interpreter computes with numpy, which warns where a GPU does not
        return case.ours(kernels=lowering is not Lowering.TORCH, **keywords)


@pytest.fixture
def poisoned() -> Any:
    """Memory that was only allocated reads as NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@each_lowering
@given(case=cases(), schedule=schedules, dtype=some.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_value_and_gradients_equal_those_of_the_plain_program(
    lowering: Lowering, case: Case, schedule: dict[str, Any], dtype: torch.dtype
) -> None:
    if lowering is Lowering.INTERPRETER:
        dtype = torch.float32  # it garbles narrower ones
    if schedule.get("accumulate") == "fast" and dtype != torch.float32:
        schedule = {**schedule, "accumulate": "exact"}  # the error of "fast" has a test of its own
    case = case.to(lowering.device, dtype)
    if bool((case.target == case.options.ignore_index).all()) and case.options.reduction == "mean":
        return  # has a test of its own
    actual = run(lowering, case, **schedule)
    assert [t is None for t in actual] == [False, False, False, case.bias is None]
    check(actual, case)


@pytest.mark.parametrize("schedule", [{"rows": 5}, {"columns": 7}, {"columns": 7, "kept": 8}], ids=str)
def test_nothing_is_read_before_it_is_written(schedule: dict[str, int], poisoned: None) -> None:
    case = example()
    assert torch.empty(3).isnan().all()
    check(case.ours(**schedule), case)
    half = case.to("cpu", torch.bfloat16)
    check(half.ours(**schedule), half)


@each_lowering
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("schedule", [{"rows": 5}, {"columns": 7}], ids=str)
def test_the_upstream_gradient_is_part_of_the_gradients(
    lowering: Lowering, schedule: dict[str, int], reduction: str
) -> None:
    case = example(reduction=reduction, z_loss=0.01, label_smoothing=0.2).to(lowering.device, torch.float32)
    shape = (12,) if reduction == "none" else ()
    upstream = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(lowering.device)
    check(run(lowering, case, upstream=upstream, **schedule), case, upstream)


@each_lowering
@pytest.mark.parametrize("schedule", [{"rows": 5}, {"columns": 7}], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_with_all_targets_ignored_loss_and_gradients_are_those_of_torch(
    lowering: Lowering, schedule: dict[str, int], reduction: str, smoothing: float
) -> None:
    case = example(reduction=reduction, label_smoothing=smoothing)
    case = replace(case, target=torch.full_like(case.target, -100)).to(lowering.device, torch.float32)
    actual, expected = run(lowering, case, **schedule), plain(case)
    for mine, theirs in zip(actual, expected, strict=True):
        assert torch.equal(mine.nan_to_num(7), theirs.nan_to_num(7))  # type: ignore[union-attr]
    assert bool(actual.loss.isnan().all()) == (reduction == "mean")


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # numpy's, in the interpreter
@each_lowering
@pytest.mark.parametrize("schedule", [{"rows": 5}, {"columns": 7}], ids=str)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", ["target", "other", "row", "ignored"])
def test_nan_and_infinite_logits_propagate_as_in_torch(
    lowering: Lowering, schedule: dict[str, int], smoothing: float, value: float, place: str
) -> None:
    # The bias of identity weights gives each logit any value.
    logits = torch.randn(4, 23, generator=torch.Generator().manual_seed(3))
    target = torch.tensor([3, 22, 8, -100])
    row, column = {"target": (1, 22), "other": (1, 4), "row": (2, slice(None)), "ignored": (3, 1)}[place]
    logits[row, column] = value
    case = Case(torch.eye(4), logits.t().contiguous(), target, None, CrossEntropy(label_smoothing=smoothing))
    case = replace(case, options=replace(case.options, reduction="none")).to(lowering.device, torch.float32)
    actual, expected = run(lowering, case, **schedule), plain(case)
    # The gradient of the weight holds that of each logit; 0 * inf in the GEMM of the hidden state's is no one's choice.
    for mine, theirs in ((actual.loss, expected.loss), (actual.weight, expected.weight)):
        torch.testing.assert_close(mine, theirs, equal_nan=True)


@pytest.mark.parametrize("wrong", [23, -1, -101, 1000])
@pytest.mark.parametrize("schedule", [{"rows": 5}, {"columns": 7}], ids=str)
def test_an_invalid_target_is_an_index_error(schedule: dict[str, int], wrong: int) -> None:
    case = example()
    case.target[1] = wrong
    with pytest.raises(IndexError) as expected:
        plain(case)
    with pytest.raises(IndexError) as actual:
        case.ours(**schedule)
    assert str(actual.value) == str(expected.value)


@pytest.mark.gpu
def test_an_invalid_target_is_a_device_assertion_on_a_gpu() -> None:
    program = """
import torch
from subtensors.kernels.cross_entropy.linear_cross_entropy import linear_cross_entropy
x, w = torch.ones(4, 8, device="cuda"), torch.ones(5, 8, device="cuda")
linear_cross_entropy(x, w, torch.tensor([0, 1, 5, 2], device="cuda"), rows=2)
torch.cuda.synchronize()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode != 0
    assert "device-side assert triggered" in done.stderr


@pytest.mark.parametrize("schedule", [{"rows": 5}, {"columns": 7}, {}], ids=str)
def test_a_batch_of_no_rows_has_the_loss_of_torch_and_zero_gradients(schedule: dict[str, int]) -> None:
    case = example()
    case = replace(case, hidden=case.hidden[:0], target=case.target[:0])
    actual, expected = case.ours(**schedule), plain(case)
    for mine, theirs in zip(actual, expected, strict=True):
        assert torch.equal(mine.nan_to_num(7), theirs.nan_to_num(7))  # type: ignore[union-attr]


@pytest.mark.parametrize("schedule", [{"rows": 16}, {"columns": 16}], ids=str)
@pytest.mark.parametrize("soft", [False, True])
def test_no_tensor_is_larger_than_a_part_of_the_logits(schedule: dict[str, int], soft: bool) -> None:
    count, width, classes = 256, 4, 256
    target = torch.full((count, classes), 1 / classes) if soft else torch.arange(count)
    options = CrossEntropy(softcap=5.0, label_smoothing=0.1, z_loss=0.1, class_weight=torch.ones(classes))
    case = Case(torch.randn(count, width), torch.randn(classes, width), target, torch.zeros(classes), options)
    with Sizes() as sizes:
        case.ours(**schedule)
    given = target.nbytes if soft else 0
    # The reference has its classes as int64, twice a logit; the kernels have no temporaries.
    assert sizes.largest <= max(given, 2 * 16 * 256 * 4)


@pytest.mark.parametrize("schedule", [{"rows": 4}, {"columns": 9}, {"columns": 9, "kept": 8}], ids=str)
@pytest.mark.parametrize(
    "needs", [(h, w, b) for h in (True, False) for w in (True, False) for b in (True, False)], ids=str
)
def test_a_gradient_that_is_not_needed_is_not_computed(
    schedule: dict[str, int], needs: tuple[bool, bool, bool]
) -> None:
    case = example()
    with Sizes() as sizes:
        result = case.ours(needs=needs, **schedule)
    assert [t is not None for t in result] == [True, *needs]
    check(result, case)
    of_gradients = {shape for shape in sizes.products if shape[1] == 5}
    of_hidden = (4, 5) if "rows" in schedule else (12, 5)
    assert (of_hidden in of_gradients) == needs[0]
    assert bool(of_gradients - {of_hidden}) == needs[1]


def test_the_order_by_columns_takes_four_products_for_logits_that_are_not_kept() -> None:
    case = example()
    with Sizes() as sizes:
        case.ours(columns=8)
    assert len(sizes.products) == 2 + 1 + 2 + 2  # a pass, a pass without the 12 columns that were kept, dX, dW
    with Sizes() as sizes:
        case.ours(rows=4)
    assert len(sizes.products) == 3 * 3


@pytest.mark.parametrize("kept", [0, 2, 8, 10, 16])
def test_columns_that_are_kept_are_not_computed_again(kept: int) -> None:
    case = example()
    with Sizes() as sizes:
        result = case.ours(columns=8, kept=kept)
    check(result, case)
    computed = sum(columns for columns, rows in sizes.products if rows == 12)
    # 4 would fit into the gradient's memory, but classes in the buffer begin at multiples of 16.
    assert computed == 23 + max(0, 23 - 4 - 8 - kept), "once, and once more all but those in memory"


def test_logits_in_the_memory_of_the_gradient_take_one_product_however_many_blocks_they_are() -> None:
    case = example(count=32, width=40, classes=200)
    with Sizes() as sizes:
        result = case.ours(columns=24)
    check(result, case)
    # Of 200 classes the gradient's memory keeps 176, and other memory 24: a pass and dX of two products, dW of 8 and 1.
    assert [shape for shape in sizes.products if shape[1] == 32] == [(176, 32), (24, 32)]
    assert sizes.products.count((32, 40)) == 2
    assert sizes.products.count((24, 40)) == 7 + 1


def test_columns_are_not_kept_where_no_gradient_is_needed() -> None:
    case = example(count=64, width=4, classes=500)
    with allocations() as made:
        case.ours(needs=(False, False, False), columns=8, kept=400)
    assert made.largest < 64 * 400


def test_no_rows_have_gradients_of_zero() -> None:
    hidden, weight = torch.ones(0, 16, requires_grad=True), torch.ones(32, 16, requires_grad=True)
    found = linear_row_statistics(hidden, weight, None, torch.empty(1, 0, dtype=torch.int64), columns=8)
    found.log_probabilities.sum().backward()
    assert weight.grad is not None
    assert not weight.grad.any()


def test_a_gradient_wider_than_the_weight_is_summed_in_its_own_dtype() -> None:
    case = example(count=64).to("cpu", torch.bfloat16)
    for schedule in ({"rows": 1}, {"columns": 7}):
        gradient = case.ours(weight_grad_dtype=torch.float32, **schedule).weight  # type: ignore[arg-type]
        assert gradient is not None
        assert gradient.dtype == torch.float32
        whole = case.ours(weight_grad_dtype=torch.float32).weight
        torch.testing.assert_close(gradient, whole, rtol=1e-5, atol=1e-6)


@given(
    classes=some.integers(1, 300), columns=some.integers(1, 300), kept=some.integers(0, 300),
    rows=some.integers(1, 20), elements=some.integers(0, 300),
)  # fmt: skip
def test_rows_of_a_gradient_are_written_behind_logits_that_are_yet_to_be_read(
    classes: int, columns: int, kept: int, rows: int, elements: int
) -> None:
    rows, columns = padded_rows(rows), min(columns, classes)
    split = ColumnSplit.of(classes, columns, kept, rows, elements)
    parts = [split.in_gradient, split.in_buffer, *split.recomputed]
    assert [begin for begin, _ in parts] == [0, *[end for _, end in parts[:-1]]]
    assert parts[-1][1] == classes
    assert max(end - begin for begin, end in parts[1:]) < columns + kept + 16
    end = split.in_gradient[1]
    start = aligned(classes * elements) - end * rows
    assert start >= 0
    for first in range(0, end, columns):
        assert min(first + columns, end) * elements <= start + first * rows
