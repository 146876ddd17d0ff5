"""`total_norm` and `clip_grad_norm_` against torch.nn.utils."""

from __future__ import annotations

import math

import pytest
import torch
from device_waits import waits_are_errors
from hypothesis import given
from hypothesis import strategies as some
from programs import Expected, Lowering, each_lowering
from torch import Tensor

import subtensors as st

ORDERS = [1, 2, 3, 2.5, float("inf")]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64]


def random_tensors(shapes: list[tuple[int, ...]], dtypes: list[torch.dtype], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(s, dtype=torch.complex128 if d.is_complex else torch.float64, generator=generator).to(d)
        for s, d in zip(shapes, dtypes, strict=True)
    ]


def truth(tensors: list[Tensor], order: float) -> Tensor:
    """The norm of all numbers as one vector, in float64."""
    wide = [t.to(torch.complex128 if t.is_complex() else torch.float64).abs().flatten() for t in tensors]
    return torch.linalg.vector_norm(torch.cat(wide).cpu(), order)


def assert_norm(actual: Tensor, tensors: list[Tensor], order: float, lowering: Lowering) -> None:
    """No further from the truth than torch's own answer, and a rounding for each halving of a sum over all numbers."""
    plain = torch.nn.utils.get_total_norm(tensors, order)
    exact = truth(tensors, order)
    assert actual.dtype == plain.dtype
    assert actual.dim() == 0
    coarsest = max(torch.finfo(t.dtype).eps for t in tensors) / torch.finfo(plain.dtype).eps
    roundings = math.log2(sum(t.numel() for t in tensors) + 1) + lowering.slack(torch.bfloat16)
    Expected(plain.cpu(), [exact, plain.cpu().double()]).check(actual.cpu(), coarsest * roundings)


@given(
    dtypes=some.lists(some.sampled_from(DTYPES), min_size=1, max_size=4),
    order=some.sampled_from(ORDERS),
    seed=some.integers(0, 99),
)
@each_lowering
def test_the_total_norm_equals_that_of_torch(
    dtypes: list[torch.dtype], order: float, seed: int, lowering: Lowering
) -> None:
    shapes: list[tuple[int, ...]] = [(7,), (3, 5), (), (130, 10)]
    tensors = [t.to(lowering.device) for t in random_tensors(shapes[: len(dtypes)], dtypes, seed)]
    with lowering.running():
        assert_norm(st.total_norm(st.TensorList(tensors), order), tensors, order, lowering)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("norm", [0.5, 1e6])
@each_lowering
def test_gradients_are_clipped_as_torch_clips_them(order: float, norm: float, lowering: Lowering) -> None:
    def parameters() -> list[Tensor]:
        made = [t.to(lowering.device).requires_grad_() for t in random_tensors([(70,), (3, 5), (2,)], DTYPES[:3])]
        for p, g in zip(made[:2], random_tensors([(70,), (3, 5)], DTYPES[:2], seed=1), strict=True):
            p.grad = g.to(lowering.device)
        return made

    ours, theirs = parameters(), parameters()
    with lowering.running():
        total = st.clip_grad_norm_(st.TensorList(ours), norm, order)
    expected = torch.nn.utils.clip_grad_norm_(theirs, norm, order)
    gradients = random_tensors([(70,), (3, 5)], DTYPES[:2], seed=1)
    exact = truth(gradients, order)
    assert_no_further(total, expected, exact)
    assert ours[2].grad is None
    for a, b, g in zip(ours[:2], theirs[:2], gradients, strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert_no_further(a.grad, b.grad, g.double() * min(1.0, norm / (float(exact) + 1e-6)))


def assert_no_further(actual: Tensor, plain: Tensor, exact: Tensor) -> None:
    """From the truth than 1.5 times as far as torch, and a rounding: the norm is a float32 in both."""
    ours, theirs = ((t.cpu().double() - exact).norm() for t in (actual, plain))
    assert ours <= 1.5 * theirs + torch.finfo(torch.float32).eps * exact.norm()


def test_complex_gradients_are_clipped_too() -> None:
    ours, theirs = (torch.zeros(9, dtype=torch.complex64, requires_grad=True) for _ in range(2))
    (ours.grad,) = (theirs.grad,) = random_tensors([(9,)], [torch.complex64])
    theirs.grad = theirs.grad.clone()
    st.clip_grad_norm_(st.TensorList([ours]), 0.1, 1.0)
    torch.nn.utils.clip_grad_norm_([theirs], 0.1, 1.0)
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_gradients_that_require_grad_are_clipped() -> None:
    p = torch.ones(3, requires_grad=True)
    (p.grad,) = torch.autograd.grad((p**3).sum(), p, create_graph=True)
    st.clip_grad_norm_(st.TensorList([p]), 1.0)
    assert p.grad is not None
    torch.testing.assert_close(p.grad.norm(), torch.tensor(1.0))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@each_lowering
def test_a_norm_that_is_not_finite_is_returned_or_refused(bad: float, lowering: Lowering) -> None:
    p = torch.zeros(3, requires_grad=True, device=lowering.device)
    p.grad = torch.tensor([1.0, bad, 2.0], device=lowering.device)
    with lowering.running():
        assert not st.total_norm(st.TensorList([p.grad])).isfinite()
        with pytest.raises(RuntimeError, match="not finite"):
            st.clip_grad_norm_(st.TensorList([p]), 1.0, error_if_nonfinite=True)
        assert p.grad[0] == 1
        assert not st.clip_grad_norm_(st.TensorList([p]), 1.0).isfinite()
    assert p.grad.isnan().any() or bad == float("inf")


def test_iterators_and_pytrees_of_tensors_have_a_norm_and_are_clipped() -> None:
    model = torch.nn.Linear(3, 2)
    for given_as in (
        lambda: st.TensorList(model.parameters()),
        model.parameters,
        lambda: dict(model.named_parameters()),
    ):
        for p in model.parameters():
            p.grad = torch.full_like(p, 2.0)
        assert torch.equal(st.clip_grad_norm_(given_as(), 1.0), torch.tensor(32.0).sqrt())
        torch.testing.assert_close(st.total_norm([p.grad for p in model.parameters()]), torch.tensor(1.0))
    assert torch.equal(st.total_norm(torch.tensor([3.0, 4.0])), torch.tensor(5.0))
    with pytest.raises(TypeError, match=r"'lr'"):
        st.total_norm({"lr": 0.1})


def test_no_gradients_have_norm_zero() -> None:
    assert torch.equal(st.total_norm(st.TensorList([])), torch.nn.utils.get_total_norm([]))
    assert st.clip_grad_norm_(st.TensorList([torch.zeros(2, requires_grad=True)]), 1.0) == 0


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_norms_do_not_wait_for_the_device() -> None:
    p = torch.ones(1000, device="cuda", requires_grad=True)
    p.grad = torch.ones_like(p)
    parameters = st.TensorList([p])
    st.clip_grad_norm_(parameters, 1.0)
    with waits_are_errors():
        st.clip_grad_norm_(parameters, 1.0)


def test_the_function_of_torch_never_clips_a_list_element_by_element() -> None:
    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.full((3,), 9.0)
    with pytest.raises(TypeError):
        torch.nn.utils.clip_grad_norm_(st.TensorList([p]), 1.0)
    assert p.grad.tolist() == [9, 9, 9]
