"""Measures beside a loss: all numbers, and numbers of rows, that are held of the same logits come from one pass."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from chunked_programs import ROWS, Products
from chunked_programs import linear_tensors as tensors
from torch import Tensor

import subtensors as st
from subtensors.chunked import torch_function


def accuracy(logits: Tensor, target: Tensor) -> Tensor:
    return (logits.argmax(-1) == target).float().mean()


def entropy(logits: Tensor, target: Tensor) -> Tensor:
    log_p = logits.log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1).mean()


def entropy_without_gradient(logits: Tensor, target: Tensor) -> Tensor:
    with torch.no_grad():
        return entropy(logits, target)


def detached_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return entropy(logits, target).detach() / 2


def size_of_sums(logits: Tensor, target: Tensor) -> Tensor:
    return logits.logsumexp(-1).square().mean().detach()


def likelihood_of_rows(logits: Tensor, target: Tensor) -> Tensor:
    return logits.detach().log_softmax(-1).gather(1, target[:, None]).squeeze(1)


MEASURES = [accuracy, entropy_without_gradient, detached_entropy, size_of_sums, likelihood_of_rows]


@pytest.mark.parametrize("when", ["before the backward", "after the backward"])
@pytest.mark.parametrize(
    "measures", [*([m] for m in MEASURES), MEASURES], ids=lambda m: "all" if m[1:] else m[0].__name__
)
def test_measures_of_the_logits_are_computed_in_the_pass_of_the_loss(
    measures: list[Callable[..., Tensor]], when: str
) -> None:
    found: list[list[Tensor]] = []
    for is_chunked in (True, False):
        t = {
            name: x.detach().double().requires_grad_() if x.is_floating_point() else x for name, x in tensors().items()
        }
        with Products() as products:
            logits = F.linear(st.chunk(t["h"], rows=8) if is_chunked else t["h"], t["w"])
            loss = F.cross_entropy(logits, t["target"])
            measured = [measure(logits, t["target"]) for measure in measures]
            if when == "after the backward":
                loss.backward()  # type: ignore[no-untyped-call]
            read = [x.realize() if hasattr(x, "realize") else x for x in measured]
            if when == "before the backward" and is_chunked and likelihood_of_rows not in measures:
                assert products.count == 3  # the gradient of the loss is known already
            if when == "before the backward":
                loss.backward()  # type: ignore[no-untyped-call]
        assert not any(x.requires_grad for x in read)
        gradients = [x.grad for x in (t["h"], t["w"]) if x.grad is not None]
        found.append([*read, loss.detach().clone(), *gradients])
        if is_chunked:
            assert products.count <= 3 + (likelihood_of_rows in measures and when == "before the backward")
    torch.testing.assert_close(*found)


def test_an_entropy_that_is_only_read_is_computed_in_the_pass_of_the_loss() -> None:
    t = tensors()
    with Products() as products:
        logits = F.linear(st.chunk(t["h"], rows=8), t["w"])
        loss, measure = F.cross_entropy(logits, t["target"]), entropy(logits, t["target"])
        loss.backward()  # type: ignore[no-untyped-call]
        value = measure.item()
    assert products.count == 3
    assert value == pytest.approx(entropy(F.linear(t["h"], t["w"]), t["target"]).item(), rel=1e-5)
    measure.backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("is_frozen", [False, True])
def test_the_numbers_of_an_evaluation_are_those_of_the_weights_that_it_ran_with(is_frozen: bool) -> None:
    t = tensors()
    measures = (F.cross_entropy, accuracy, entropy, size_of_sums)
    plain = F.linear(t["h"], t["w"])
    expected = torch.stack([f(plain, t["target"]) for f in measures]).detach()
    if is_frozen:
        t = {name: x.detach() for name, x in t.items()}
    with torch.set_grad_enabled(is_frozen):
        logits = F.linear(st.chunk(t["h"], rows=8), t["w"])
        numbers = [f(logits, t["target"]) for f in measures]
        numbers.append(F.cross_entropy(logits.float() * 1.0, t["target"]))
    with torch.no_grad():
        t["w"].zero_()  # as weights are swapped after an evaluation
    torch.testing.assert_close(torch.stack(numbers)[:-1], expected)
    torch.testing.assert_close(numbers[-1], expected[0])


def test_a_loss_without_gradients_and_without_measures_is_computed_by_its_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    t, calls = tensors(), list[object]()
    loss_of = torch_function.linear_cross_entropy_loss
    monkeypatch.setattr(torch_function, "linear_cross_entropy_loss", lambda *args: calls.append(0) or loss_of(*args))
    with torch.no_grad():
        loss = F.cross_entropy(F.linear(st.chunk(t["h"], rows=8), t["w"]), t["target"]) / 2
        assert loss.item() == pytest.approx(F.cross_entropy(t["h"] @ t["w"].t(), t["target"]).item() / 2, rel=1e-5)
    assert len(calls) == 1


@pytest.mark.parametrize("first", ["log-probabilities", "entropies", "largest"])
def test_rows_that_are_realized_one_by_one_take_one_pass_and_one_for_their_gradient(first: str) -> None:
    found = []
    for is_chunked in (True, False):
        t = {
            name: x.detach().double().requires_grad_() if x.is_floating_point() else x for name, x in tensors().items()
        }
        with Products() as products:
            logits = F.linear(st.chunk(t["h"], rows=8) if is_chunked else t["h"], t["w"])
            log_p = logits.log_softmax(-1)
            rows = {
                "log-probabilities": log_p.gather(1, t["target"][:, None]).squeeze(1),
                "entropies": -(log_p.exp() * log_p).sum(-1),
                "largest": logits.argmax(-1) == t["target"],
                "mean": logits.detach().mean(-1),
            }
            names = [first, *(name for name in rows if name != first)]
            got = {name: x.realize() if isinstance(x := rows[name], st.ChunkedTensor) else x for name in names}
            loss = (got["log-probabilities"] * torch.linspace(0, 1, ROWS)).sum() + got["entropies"].square().sum()
            gradients = torch.autograd.grad(loss, [t["h"], t["w"]])
        if is_chunked:
            assert products.count <= 4
        found.append([*(got[name].detach() for name in rows), *gradients])
    torch.testing.assert_close(*found)


def test_measures_that_are_kept_keep_nothing_else_in_memory() -> None:
    t, kept, watched = tensors(), list[Tensor](), list[weakref.ref[Tensor]]()
    average = torch.zeros(())
    gc.disable()
    try:
        for step in range(6):
            h = t["h"].sin() + step
            watched.append(weakref.ref(h))
            with torch.set_grad_enabled(step < 3):
                logits = F.linear(st.chunk(h, rows=8), t["w"])
                loss = F.cross_entropy(logits, t["target"])
                kept += [entropy(logits, t["target"]).detach(), accuracy(logits, t["target"])]
                average = 0.9 * average + 0.1 * loss.detach()
            if step < 3:
                loss.backward()  # type: ignore[no-untyped-call]
            del h, logits, loss
            assert [x() for x in watched[:-1]] == [None] * step
        assert average.item() > 0
        assert torch.stack(kept).isfinite().all()
    finally:
        gc.enable()
