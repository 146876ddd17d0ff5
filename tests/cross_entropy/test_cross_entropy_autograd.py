"""Linear + cross entropy under autograd: any upstream gradient, any number of backwards, nothing copied."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cross_entropy_cases import Sizes, cases, check, example
from device_waits import waits_are_errors
from hypothesis import given
from hypothesis import strategies as some
from programs import Lowering, each_kernel_lowering
from torch import Tensor

from subtensors.kernels.cross_entropy.cross_entropy import CrossEntropy
from subtensors.kernels.cross_entropy.cross_entropy_autograd import Schedule, differentiable_cross_entropy
from subtensors.kernels.cross_entropy.logits_block import LossAndGradients, scale_, scale_by_kernel

BY_ROWS, BY_COLUMNS = Schedule(rows=5), Schedule(columns=7)
each_schedule = pytest.mark.parametrize("schedule", [BY_ROWS, BY_COLUMNS], ids=["rows", "columns"])


def leaves(case: Any, device: str = "cpu") -> list[Tensor]:
    return [t.detach().clone().to(device).requires_grad_() for t in (case.hidden, case.weight, case.bias)]


def loss_of(case: Any, inputs: list[Tensor], schedule: Schedule) -> Tensor:
    hidden, weight, bias = inputs
    target = case.target.to(hidden.device)
    return differentiable_cross_entropy(hidden, weight, target, bias, options=case.options, schedule=schedule)


@given(case=cases(), size=some.integers(1, 13), by_rows=some.booleans())
def test_the_gradients_equal_those_of_the_plain_program(case: Any, size: int, by_rows: bool) -> None:
    if bool((case.target == case.options.ignore_index).all()) and case.options.reduction == "mean":
        return
    inputs = [None if t is None else t.clone().requires_grad_() for t in (case.hidden, case.weight, case.bias)]
    hidden, weight, bias = inputs
    schedule = Schedule(rows=size) if by_rows else Schedule(columns=size)
    loss = differentiable_cross_entropy(hidden, weight, case.target, bias, options=case.options, schedule=schedule)
    upstream = torch.randn(loss.shape, generator=torch.Generator().manual_seed(0))
    loss.backward(upstream)  # type: ignore[no-untyped-call]
    gradients = [None if t is None else t.grad for t in inputs]
    check(LossAndGradients(loss.detach(), *gradients), case, upstream)


@each_schedule
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loss_that_is_scaled_and_added_to_others_has_the_right_gradient(schedule: Schedule, reduction: str) -> None:
    case = example(reduction=reduction).to("cpu", torch.float64)
    inputs, plain = leaves(case), leaves(case)
    loss = loss_of(case, inputs, schedule)
    (3 * loss + loss.square() + inputs[0].square().sum()).backward()
    expected = F.cross_entropy(F.linear(*plain), case.target, reduction=reduction)
    (3 * expected + expected.square() + plain[0].square().sum()).backward()
    for mine, theirs in zip(inputs, plain, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


@each_schedule
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_retained_graph_gives_the_same_gradients_again(schedule: Schedule, reduction: str) -> None:
    case = example(reduction=reduction)
    inputs = leaves(case)
    loss = loss_of(case, inputs, schedule)
    first = torch.autograd.grad(loss, inputs, torch.full_like(loss, 2.0), retain_graph=True)
    kept = [t.clone() for t in first]
    for t in first:
        t.zero_()  # whoever got the gradients may do with them what they like
    second = torch.autograd.grad(loss, inputs, torch.full_like(loss, 4.0))
    for mine, theirs in zip(second, kept, strict=True):
        torch.testing.assert_close(mine, 2 * theirs)


def test_a_backward_after_the_weight_has_changed_is_refused_as_torch_refuses_it() -> None:
    case = example()
    inputs = leaves(case)
    loss = loss_of(case, inputs, BY_ROWS)
    loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        inputs[1].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()  # type: ignore[no-untyped-call]


def test_gradients_accumulate_over_micro_batches() -> None:
    case = example()
    inputs, plain = leaves(case), leaves(case)
    for _ in range(3):
        (loss_of(case, inputs, BY_ROWS) / 3).backward()  # type: ignore[no-untyped-call]
        (F.cross_entropy(F.linear(*plain), case.target) / 3).backward()
    for mine, theirs in zip(inputs, plain, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


@each_schedule
def test_the_computed_gradient_becomes_the_grad_without_a_copy(schedule: Schedule, device: str) -> None:
    inputs = leaves(example(), device)
    loss = loss_of(example(), inputs, schedule)
    assert loss.grad_fn is not None
    addresses = [t.data_ptr() for t in loss.grad_fn.gradients]  # type: ignore[attr-defined]
    loss.backward()  # type: ignore[no-untyped-call]
    assert [t.grad.data_ptr() for t in inputs if t.grad is not None] == addresses


@each_schedule
def test_differentiating_twice_is_refused(schedule: Schedule) -> None:
    inputs = leaves(example())
    loss = loss_of(example(), inputs, schedule)
    with pytest.raises(NotImplementedError, match="cannot be differentiated again"):
        torch.autograd.grad(loss, inputs[:1], create_graph=True)


@each_schedule
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_autograd_only_the_loss_is_computed(schedule: Schedule, mode: Any) -> None:
    case = example()
    inputs = leaves(case)
    with mode(), Sizes() as sizes:
        loss = loss_of(case, inputs, schedule)
    assert not loss.requires_grad
    assert len(sizes.products) == (3 if schedule is BY_ROWS else 4)  # the logits alone
    torch.testing.assert_close(loss, F.cross_entropy(F.linear(*inputs), case.target).detach())


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_a_frozen_input_gets_no_gradient_and_the_others_do(frozen: int) -> None:
    case = example()
    inputs, plain = leaves(case), leaves(case)
    for each in (inputs, plain):
        each[frozen].requires_grad_(False)
    loss_of(case, inputs, BY_ROWS).backward()  # type: ignore[no-untyped-call]
    F.cross_entropy(F.linear(*plain), case.target).backward()
    assert inputs[frozen].grad is None
    for mine, theirs in zip(inputs, plain, strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad)


def test_a_float16_gradient_is_computed_from_its_upstream_gradient() -> None:
    case = example().to("cpu", torch.float16)
    inputs = leaves(case)
    loss = loss_of(case, inputs, BY_ROWS)
    (loss * 2.0**-30 * 2.0**30).backward()  # type: ignore[no-untyped-call]
    check(LossAndGradients(loss.detach(), *[t.grad for t in inputs]), case)


def test_a_float16_mean_over_many_rows_is_not_lost_before_the_loss_scale() -> None:
    hidden, weight = torch.ones(256, 2, dtype=torch.float16), torch.zeros(16, 2, dtype=torch.float16)
    weight[0] = 6.0  # a wrong class has the probability e^-12, and a 256th of that is below half the least float16
    target = torch.zeros(256, dtype=torch.int64)
    gradients = []
    for dtype in (torch.float16, torch.float64):
        inputs = [t.to(dtype, copy=True).requires_grad_() for t in (hidden, weight)]
        loss = differentiable_cross_entropy(inputs[0], inputs[1], target, schedule=Schedule(rows=64))
        (2.0**14 * loss).backward()
        assert inputs[1].grad is not None
        gradients.append(inputs[1].grad.double())
    # Plain torch loses it, so its error is no measure: one rounding of float16 is.
    torch.testing.assert_close(gradients[0], gradients[1], rtol=torch.finfo(torch.float16).eps, atol=0)


@pytest.mark.parametrize(
    "options", [{}, {"reduction": "none"}, {"z_loss": 0.1, "softcap": 3.0, "label_smoothing": 0.1}]
)
def test_gradcheck(options: dict[str, Any]) -> None:
    case = example(count=5, width=3, classes=7, **options).to("cpu", torch.float64)
    for schedule in (Schedule(rows=2), Schedule(columns=3)):
        assert torch.autograd.gradcheck(lambda *inputs, s=schedule: loss_of(case, list(inputs), s), leaves(case))


def test_targets_and_class_weights_that_require_gradients_are_refused() -> None:
    hidden, weight = torch.ones(3, 2, requires_grad=True), torch.ones(4, 2)
    soft = torch.ones(3, 4, requires_grad=True)
    with pytest.raises(ValueError, match="no gradient flows to targets and class weights; give them detached"):
        differentiable_cross_entropy(hidden, weight, soft)
    options = CrossEntropy(class_weight=torch.ones(4, requires_grad=True))
    with pytest.raises(ValueError, match="no gradient flows"):
        differentiable_cross_entropy(hidden, weight, torch.zeros(3, dtype=torch.int64), options=options)


@each_kernel_lowering
@pytest.mark.parametrize("count", [0, 1, 5000])
def test_the_scale_kernel_multiplies_in_place(lowering: Lowering, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subtensors.kernels.cross_entropy.logits_block.SCALE_BLOCK", 256)
    monkeypatch.setattr("subtensors.kernels.cross_entropy.logits_block.SCALE_PROGRAMS", 8)
    values = torch.randn(count, generator=torch.Generator().manual_seed(0)).to(lowering.device)
    for factor in (1.0, -2.5):
        scaled = values.clone()
        scale_by_kernel(scaled, torch.tensor(factor, device=lowering.device))
        assert torch.equal(scaled, values * factor)


@each_kernel_lowering
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of NumPy, by which the interpreter computes
@pytest.mark.parametrize("factor", [torch.inf, torch.nan])
def test_zeros_are_zeros_after_a_scale_that_is_not_finite(lowering: Lowering, factor: float) -> None:
    values, scale = torch.tensor([0.0, 2.0, torch.nan]), torch.tensor(factor)
    found = values.to(lowering.device)
    scale_by_kernel(found, scale.to(lowering.device))
    for scaled in (found.cpu(), scale_(values.clone(), scale), scale_(values.expand(2, 3).t().clone(), scale)[:, 0]):
        torch.testing.assert_close(scaled, torch.where(values == 0, 0, values * factor), equal_nan=True)


@pytest.mark.gpu
@each_schedule
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_host_never_waits_for_the_device(schedule: Schedule, reduction: str) -> None:
    inputs = leaves(example(), "cuda")
    target = example().target.to("cuda")
    options = CrossEntropy(reduction=reduction, z_loss=0.1, label_smoothing=0.1, class_weight=torch.ones(23).cuda())
    upstream = torch.ones((12,) if reduction == "none" else (), device="cuda")
    torch.cuda.synchronize()
    with waits_are_errors():
        hidden, weight, bias = inputs
        loss = differentiable_cross_entropy(hidden, weight, target, bias, options=options, schedule=schedule)
        (loss * 2).backward(upstream)


@pytest.mark.gpu
@each_schedule
def test_a_captured_loss_is_correct_when_replayed_with_other_values(schedule: Schedule) -> None:
    case = example()
    inputs, target = leaves(case, "cuda"), case.target.to("cuda")

    def step() -> Tensor:
        for leaf in inputs:
            leaf.grad = None
        hidden, weight, bias = inputs
        loss = differentiable_cross_entropy(hidden, weight, target, bias, schedule=schedule)
        (3 * loss).backward()  # type: ignore[no-untyped-call]
        return loss

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    with torch.no_grad():
        inputs[0].mul_(-2)
        target.copy_(target.roll(1))
    graph.replay()
    plain = [t.detach().clone().requires_grad_() for t in inputs]
    expected = F.cross_entropy(F.linear(*plain), target)
    (3 * expected).backward()
    torch.testing.assert_close(loss, expected)
    for mine, theirs in zip(inputs, plain, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
