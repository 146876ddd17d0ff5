"""Cross entropies by products that give exponentials, against the plain program; on a CPU the product is torch's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from cross_entropy_cases import Case, check, plain, terms_without_signs
from hypothesis import given
from hypothesis import strategies as some
from programs import Lowering, each_kernel_lowering
from torch import Tensor, nn
from torch.nn import functional as F

from subtensors.kernels.cross_entropy import exp_passes
from subtensors.kernels.cross_entropy.cross_entropy import CrossEntropy
from subtensors.kernels.cross_entropy.logits_block import LossAndGradients

# numpy's, in the interpreter
pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning", "ignore:invalid value:RuntimeWarning")


@pytest.fixture(autouse=True)
def exponentials(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Chunks go by exponentials, however few they are; the rows of each are listed."""
    taken = list[int]()
    write = exp_passes.ExponentialPasses.write

    def counted(self: Any, memory: Tensor, begin: int, end: int, scaled: Tensor | None) -> None:
        taken.append(end - begin)
        write(self, memory, begin, end, scaled)

    takes = exp_passes.takes_exponentials
    monkeypatch.setattr(exp_passes, "LEAST_ELEMENTS", 0)
    monkeypatch.setattr(
        exp_passes, "takes_exponentials", lambda hidden, *rest: not hidden.is_cuda or takes(hidden, *rest)
    )
    monkeypatch.setattr(exp_passes.ExponentialPasses, "write", counted)
    yield taken
    assert taken, "no chunk went by exponentials"


def problem(lowering: Lowering, seed: int, count: int = 37, scale: float = 1.0, **options: Any) -> Case:
    """Hidden states of 264 numbers and 512 classes; every fifth target is ignored."""
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = torch.randn(count, 264, generator=generator), torch.randn(512, 264, generator=generator) / 264**0.5
    target = torch.randint(512, (count,), generator=generator)
    target[::5] = -100
    case = Case(hidden * scale, weight, target, None, CrossEntropy(**options))
    return case.to(lowering.device, torch.bfloat16 if lowering is Lowering.CUDA else torch.float32)


def run(case: Case, **keywords: Any) -> LossAndGradients:
    with np.errstate(all="ignore"):
        return case.ours(kernels=True, **keywords)


@each_kernel_lowering
@given(
    seed=some.integers(0, 2**31),
    scale=some.sampled_from([0.3, 1.0, 20.0]),
    rows=some.sampled_from([9, 16, 37]),
    has_weight=some.booleans(),
    z_loss=some.sampled_from([0.0, 0.1]),
    temperature=some.sampled_from([1.0, 0.7]),
    reduction=some.sampled_from(["mean", "sum", "none"]),
)
def test_value_and_gradients_equal_those_of_the_plain_program(
    lowering: Lowering, seed: int, scale: float, rows: int, has_weight: bool, **options: Any
) -> None:
    weight = torch.rand(512, generator=torch.Generator().manual_seed(seed)) + 0.1 if has_weight else None
    case = problem(lowering, seed, scale=scale, class_weight=weight, **options)
    check(run(case, rows=rows), case)


@each_kernel_lowering
@pytest.mark.parametrize("logit", [8.0, 15.0, 20.0, 25.0])  # what lies 2^41 below is lost
def test_the_gradient_of_a_likely_target_is_not_a_difference(lowering: Lowering, logit: float) -> None:
    case = problem(lowering, 4)
    case.target[::5] = 3
    of = case.weight[case.target].float()
    case.hidden.copy_(case.hidden * 0.1 + of * (logit / of.square().sum(1, keepdim=True)))
    found, truth = run(case, rows=16), plain(case.to(str(case.hidden.device), torch.float64))
    for name, mine, true in zip(("loss", "hidden", "weight"), found, truth, strict=False):
        assert mine is not None
        assert true is not None
        # A float32 loss is the logarithm of one and a number that may vanish beside it.
        rounding = 2**-23 if name == "loss" else 0.0
        assert (mine.double() - true).norm() <= 0.02 * true.norm() + rounding, name
    assert found.loss >= 0


@each_kernel_lowering
@pytest.mark.parametrize("logit", [200.54, 2e4])
def test_large_logits_close_together_lose_nothing(lowering: Lowering, logit: float) -> None:
    case = problem(lowering, 4, temperature=0.01 if logit < 1e3 else 1.0, reduction="sum")
    case.hidden.zero_()[:, 0] = logit
    case.hidden[:, 1] = 1.0
    case.weight.zero_()[:, 0] = 1.0
    case.weight[:, 1] = torch.linspace(-0.01, 0.01, 512)
    exact = case.to(str(case.hidden.device), torch.float64)
    found, truth = run(case, rows=16), plain(exact)
    size = terms_without_signs(exact, None, F.linear(exact.hidden, exact.weight))
    unsigned = (torch.zeros(()), size @ exact.weight.abs(), size.t() @ exact.hidden.abs())
    for mine, true, terms in zip(found[:3], truth, unsigned, strict=False):
        assert mine is not None
        assert true is not None
        rounding = torch.finfo(mine.dtype).eps * terms  # of what cancels
        assert ((mine.double() - true).abs() <= 0.02 * true.abs().max() + rounding).all()


@pytest.mark.gpu
def test_hidden_states_that_are_a_parameter_go_by_exponentials() -> None:
    case = problem(Lowering.CUDA, 4)
    case = replace(case, hidden=nn.Parameter(case.hidden))
    check(run(case), case)


def far(lowering: Lowering, by: float) -> Case:
    """Row 1 has a logit that many above all others, of a class that is not sampled; some rows are hardly likely."""
    case = problem(lowering, 3)
    case.hidden[1] = 0
    case.hidden[1, 0] = 8
    case.weight[:, 0] = torch.linspace(-0.5, 0.5, 512)
    case.weight[300, 0] = by / 8
    case.target[1] = 7
    return case


@each_kernel_lowering
@pytest.mark.parametrize("by", [50.0, 90.0, 200.0, 3000.0])
def test_a_logit_far_above_the_sampled_ones_is_not_lost(lowering: Lowering, by: float) -> None:
    case = far(lowering, by)
    check(run(case, rows=16), case)
    torch.testing.assert_close(run(case, rows=16).loss, plain(case).loss, rtol=1e-2, atol=0)


@each_kernel_lowering
def test_ignored_rows_may_hold_what_is_no_number(lowering: Lowering) -> None:
    case = problem(lowering, 5)
    clean = run(case, rows=16)
    case.hidden[::5] = float("nan")
    case.hidden[5] = float("inf")
    found = run(case, rows=16)
    for one, other in zip(found[:3], clean[:3], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@each_kernel_lowering
def test_a_row_that_is_no_number_makes_the_loss_one(lowering: Lowering) -> None:
    case = problem(lowering, 6)
    case.hidden[3, 4] = float("nan")
    found = run(case, rows=16)
    assert found.hidden is not None
    assert found.loss.isnan()
    assert found.hidden[3].isnan().all()
    assert not found.hidden[4].isnan().any()


@each_kernel_lowering
def test_rows_of_one_class_add_up_in_one_order(lowering: Lowering) -> None:
    case = problem(lowering, 7, count=64)
    case.target[:40] = 11
    check(run(case, rows=24), case)
    first, second = (run(case, rows=24).weight for _ in range(2))
    assert first is not None
    assert second is not None
    assert torch.equal(first, second)


@each_kernel_lowering
@pytest.mark.parametrize("needs", [(True, False, False), (False, True, False)], ids=["hidden", "weight"])
@pytest.mark.parametrize("accumulate", ["exact", "fast"])
def test_one_gradient_alone_is_the_same(lowering: Lowering, needs: tuple[bool, bool, bool], accumulate: str) -> None:
    case = problem(lowering, 8)
    both, one = (run(case, rows=16, accumulate=accumulate, needs=n) for n in ((True, True, False), needs))
    for mine, theirs, needed in zip(one[1:3], both[1:3], needs, strict=False):
        assert (mine is not None) == needed
        if mine is not None:
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


@pytest.mark.gpu
def test_the_kernel_works_where_it_should(exponentials: list[int]) -> None:
    """And all sizes of the last chunk give the sums and the values of the reference."""
    exponentials.append(0)
    device = torch.device("cuda", torch.cuda.current_device())
    assert exp_passes.kernel_works(device) == (torch.cuda.get_device_capability() == (9, 0))
    generator = torch.Generator("cuda").manual_seed(2)
    for rows, width, classes in (1, 264, 256), (255, 768, 640), (257, 320, 1152), (700, 1000, 6272), (4096, 264, 50304):
        hidden, weight = (torch.randn(n, width, device=device, generator=generator).bfloat16() for n in (rows, classes))
        shifts = torch.randn(rows, device=device, generator=generator) + width**0.5
        results = []
        for product, dtype in (
            (exp_passes.product_by_kernel, torch.bfloat16),
            (exp_passes.product_by_torch, torch.float32),
        ):
            e = torch.full((rows, classes), float("nan"), device=device, dtype=dtype)
            sums = torch.full((classes // 128, rows), float("nan"), device=device)
            product(hidden, weight, shifts, 0.1, e, sums)
            results.append((e.float(), sums))
        # E is rounded to 8 bits, its sums to 24 after exponents of some tens.
        torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-2, atol=1e-30)
        torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-3, atol=1e-30)


@each_kernel_lowering
def test_a_wrong_kernel_is_found_out(
    lowering: Lowering, exponentials: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    exponentials.append(0)
    device, dtype = torch.device(lowering.device), torch.bfloat16 if lowering is Lowering.CUDA else torch.float32
    with np.errstate(all="ignore"):
        assert exp_passes.is_right(device, dtype)
        with monkeypatch.context() as patched:
            patched.setattr(exp_passes.ExponentialPasses, "complete", lambda self, hidden, weight: None)
            assert not exp_passes.is_right(device, dtype)
        monkeypatch.setattr(exp_passes, "MARGIN", float("nan"))
        assert not exp_passes.is_right(device, dtype)
