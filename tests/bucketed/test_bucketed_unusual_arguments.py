"""Arguments and results of unusual kinds are passed to the program and returned as without buckets."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bucketed_rows import DIMS, SEQ, assert_same, assert_same_gradients, rows
from counted_buckets import Counted
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import subtensors as st

pytestmark = pytest.mark.usefixtures("captured")


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested")
@torch.no_grad()
def test_layouts_have_keys_of_their_own(device: str) -> None:
    def program(x: Tensor, a: Tensor) -> Tensor:
        parts = a.unbind() if a.is_nested else [a if a.layout is torch.strided else a.to_dense()]
        return x.softmax(0).sum() + sum(part.sum() for part in parts)

    run = st.bucketed(program, {"x": {0: SEQ}})
    dense = torch.eye(3, dtype=torch.float64, device=device)
    nested = torch.nested.nested_tensor([torch.ones(2, device=device), torch.ones(3, device=device)])
    for a in (dense, dense.to_sparse(), dense, dense.to_sparse_csr(), nested, dense):
        x = rows(5, device)
        torch.testing.assert_close(run(x, a), program(x, a))


@torch.no_grad()
def test_conjugates_and_negatives_are_resolved(device: str) -> None:
    run = st.bucketed(lambda x: x.cumsum(0), DIMS)
    for n in (5, 6, 20, 7, 8, 21):
        x = torch.randn(n, 3, dtype=torch.complex128, device=device)
        for given in (x, x.conj(), x.conj().imag, x.imag):
            torch.testing.assert_close(run(given), given.cumsum(0))


@torch.no_grad()
def test_an_iterator_argument_is_consumed_once(device: str) -> None:
    def returns(x: Tensor, of: Callable[[list[Tensor]], Any]) -> Any:
        return of([x.softmax(0), x.sum(0)])

    def takes(x: Tensor, names: Any) -> Tensor:
        return x.softmax(0) * len(list(names))

    run, other = st.bucketed(returns, DIMS), st.bucketed(takes, DIMS)
    for n in (5, 6, 20):
        x = rows(n, device)
        for of in (iter, lambda parts: (part * 2 for part in parts), lambda parts: {"parts": enumerate(parts)}):
            found, expected = run(x, of), returns(x, of)
            if isinstance(found, dict):
                found, expected = found["parts"], expected["parts"]
            torch.testing.assert_close([*found], [*expected])
        torch.testing.assert_close(other(x, iter("ab")), takes(x, iter("ab")))


def test_results_of_the_first_call_belong_to_the_caller_too(device: str) -> None:
    norm = nn.BatchNorm1d(3, dtype=torch.float64, device=device)
    run = st.bucketed(lambda x, y: (norm(x), norm.running_mean, norm.weight, y), DIMS)
    y = rows(2, device)
    for n in (5, 6, 20, 7):
        _, mean, weight, same = run(rows(n, device), y)
        before = [t.clone() for t in (norm.running_mean, norm.weight, y)]  # type: ignore[union-attr]
        with torch.no_grad():
            for t in (mean, weight, same):
                t.zero_()
        torch.testing.assert_close([norm.running_mean, norm.weight.detach(), y], [t.detach() for t in before])
        assert weight.grad_fn is not None


def test_the_gradient_goes_to_the_parameter_that_was_passed(device: str) -> None:
    run = st.bucketed(lambda x, w: x.softmax(0) @ w, DIMS)
    one = nn.Parameter(torch.ones(3, dtype=torch.float64, device=device))
    other = nn.Parameter(one.data)
    for _ in range(2):
        for w in (one, other):
            x = rows(5, device)
            w.grad = None
            run(x, w).sum().backward()
            assert_same(w.grad, x.softmax(0).sum(0))


def test_a_loss_that_is_kept_does_not_keep_the_inputs(device: str) -> None:
    run = st.bucketed(nn.Linear(3, 3, dtype=torch.float64, device=device), {"input": {0: SEQ}})
    run(rows(4, device)).sum().backward()  # which is kept, to warm up like it
    kept = []
    for n in (5, 6, 20, 7):
        x = rows(n, device)
        loss = run(x).sum()
        loss.backward()
        kept.append((loss, weakref.ref(x)))
    del x
    gc.collect()
    assert [ref() for _, ref in kept] == [None] * 4


@torch.no_grad()
def test_tensors_are_made_on_the_callers_default_device(device: str) -> None:
    run = st.bucketed(lambda x: (x.softmax(0), torch.zeros(2)), DIMS)
    x = rows(5, device)
    for _ in range(2):
        assert run(x)[1].device.type == "cpu"
    elsewhere = "meta" if device == "cpu" else device
    with torch.device(elsewhere):
        assert {run(x)[1].device.type for _ in range(2)} == {elsewhere}
    assert run(x)[1].device.type == "cpu"


@torch.no_grad()
def test_ever_new_structures_get_a_limited_number_of_graphs(device: str, counted: Counted) -> None:
    run = st.bucketed(lambda batch: sum(x.sum() for x in batch.values()), {"batch": {0: SEQ}})
    for i in range(134):
        batch = {f"request {i}": rows(5, device)}
        torch.testing.assert_close(run(batch), batch[f"request {i}"].sum())
    assert counted.recorded == 128
    assert sum(run.stats().fallbacks.values()) == 6
    assert "the structure of batch had 128 values" in next(iter(run.stats().fallbacks))


def test_sparse_gradients_are_added_up(device: str) -> None:
    ours, theirs = (nn.Embedding(10, 3, sparse=True, dtype=torch.float64, device=device) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    run = st.bucketed(lambda x: ours(x).softmax(0), DIMS)
    for n in (5, 6, 20, 5):
        words = torch.randint(0, 10, (n,), device=device)
        run(words).square().sum().backward()
        theirs(words).softmax(0).square().sum().backward()
        for p in (ours.weight, theirs.weight):
            assert p.grad is not None
            assert p.grad.is_sparse
        assert_same(ours.weight.grad.to_dense(), theirs.weight.grad.to_dense())  # type: ignore[union-attr]
    assert not any("nbytes" in reason for reason in run.stats().fallbacks)


class Scaled(torch.autograd.Function):
    """x w, with three times the gradient of x, so that nothing else can be taken for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return gradients[0] * w * 3, (gradients[0] * x).sum(0)


FUNCTIONS: dict[str, Callable[[nn.Linear, Tensor], Tensor]] = {
    "an autograd function": lambda net, x: Scaled.apply(x, net.bias),  # type: ignore[no-untyped-call]
    "and what follows it": lambda net, x: net(Scaled.apply(x, net.bias)).softmax(0),  # type: ignore[no-untyped-call]
    "a reentrant checkpoint": lambda net, x: checkpoint(net, x, use_reentrant=True).softmax(0),
    "a checkpoint": lambda net, x: checkpoint(net, x, use_reentrant=False).softmax(0),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_autograd_functions_see_requires_grad_of_their_arguments(device: str, name: str) -> None:
    ours, theirs = (nn.Linear(3, 3, dtype=torch.float64, device=device) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    run = st.bucketed(lambda x: FUNCTIONS[name](ours, x), DIMS)
    for n in (5, 6, 20, 5):
        x = rows(n, device).requires_grad_()
        y = x.detach().clone().requires_grad_()
        run(x).square().sum().backward()
        FUNCTIONS[name](theirs, y).square().sum().backward()
        assert_same(x.grad, y.grad)
        assert_same_gradients(ours, theirs)
    if "checkpoint" not in name:
        assert not run.stats().fallbacks


class Slotted:
    """Has no dict of its attributes."""

    __slots__ = ("count", "rows")

    def __init__(self, rows: Tensor, count: float) -> None:
        self.rows, self.count = rows, count


@pytest.mark.parametrize("follows", [False, True])
def test_results_in_slots_sets_and_functions_belong_to_the_call(device: str, follows: bool) -> None:
    weight = torch.ones(3, dtype=torch.float64, device=device, requires_grad=follows)

    def softmax(x: Tensor) -> Tensor:
        return x.softmax(0) * weight

    ways: list[tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = [
        (lambda rows: Slotted(rows, 3), lambda result: result.rows),
        (lambda rows: {rows}, lambda result: next(iter(result))),
        (lambda rows: lambda: rows, lambda result: result()),
        (lambda rows: functools.partial(torch.mul, rows), lambda result: result(1)),
    ]
    for held, taken in ways:
        run = st.bucketed(lambda x, held=held: held(softmax(x)), DIMS)
        for n in (5, 6, 20, 5):
            x = rows(n, device)
            assert type(taken(run(x))) is Tensor
            assert_same(taken(run(x)), softmax(x))


@torch.no_grad()
@pytest.mark.parametrize("overlap", [0, 2, 5])
def test_an_argument_that_is_written_may_share_memory_with_another(overlap: int, device: str) -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return y * 2

    def views() -> tuple[Tensor, Tensor]:
        both = torch.arange(30.0, device=device).reshape(10, 3)
        return both[:5], both[5 - overlap : 10 - overlap]

    run = st.bucketed(program, {"x": {0: SEQ}, "y": {0: SEQ}}, check=False)
    for _ in range(2):
        run(torch.ones(5, 3, device=device), torch.ones(5, 3, device=device))
    found, expected = views(), views()
    assert torch.equal(run(*found), program(*expected))
    assert torch.equal(found[0], expected[0])
    assert [*run.stats().fallbacks] == ["it writes to an argument, which shares memory with another one"] * (
        overlap > 0
    )
