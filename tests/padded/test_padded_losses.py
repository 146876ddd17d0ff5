"""Losses over padded positions: reductions are over valid elements only, in one batch of a size and in a ragged one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import subtensors as st
from subtensors.padded import torch_function as padded_calls

SEQ = st.Dim("seq", max=16, buckets=[8, 16])
C = 4
W = torch.tensor([0.2, 1.0, 0.7, 0.4], dtype=torch.float64)

# Of scores (rows, positions, classes), others of their shape, and classes (rows, positions).
LOSSES: dict[str, Callable[[Any, Any, Any], Any]] = {
    "cross entropy": lambda x, y, t: F.cross_entropy(x.mT, t),
    "cross entropy, sum": lambda x, y, t: F.cross_entropy(x.mT, t, reduction="sum"),
    "cross entropy, smooth": lambda x, y, t: F.cross_entropy(x.mT, t, label_smoothing=0.1),
    "cross entropy, weighted": lambda x, y, t: F.cross_entropy(x.mT, t, weight=W, label_smoothing=0.2),
    "cross entropy, some ignored": lambda x, y, t: F.cross_entropy(x.mT, t, ignore_index=2),
    "cross entropy, flat": lambda x, y, t: F.cross_entropy(x.reshape(-1, C), t.reshape(-1), weight=W),
    "cross entropy of probabilities": lambda x, y, t: F.cross_entropy(x.mT, y.softmax(-1).mT, label_smoothing=0.1),
    "nll": lambda x, y, t: F.nll_loss(F.log_softmax(x, -1).mT, t, weight=W),
    "mse": lambda x, y, t: F.mse_loss(x, y),
    "mse, sum": lambda x, y, t: F.mse_loss(x, y, reduction="sum"),
    "l1": lambda x, y, t: F.l1_loss(x, y),
    "smooth l1": lambda x, y, t: F.smooth_l1_loss(x, y, beta=0.5),
    "huber": lambda x, y, t: F.huber_loss(x, y, delta=0.7),
    "bce": lambda x, y, t: F.binary_cross_entropy(x.sigmoid(), y.sigmoid(), weight=W),
    "bce of logits": lambda x, y, t: F.binary_cross_entropy_with_logits(x, y.sigmoid(), pos_weight=W, weight=W),
    "kl": lambda x, y, t: F.kl_div(F.log_softmax(x, -1), y.softmax(-1)),
    "kl of logs, sum": lambda x, y, t: F.kl_div(
        F.log_softmax(x, -1), F.log_softmax(y, -1), log_target=True, reduction="sum"
    ),
    "poisson": lambda x, y, t: F.poisson_nll_loss(x, y.abs(), full=True),
    "gaussian": lambda x, y, t: F.gaussian_nll_loss(x, y, y.abs() + 0.1),
    "hinge": lambda x, y, t: F.hinge_embedding_loss(x, y.sign()),
    "margin ranking": lambda x, y, t: F.margin_ranking_loss(x, y, (x * y).sign().detach(), margin=0.3),
    "soft margin": lambda x, y, t: F.soft_margin_loss(x, y.detach().sign()),
    "triplet": lambda x, y, t: F.triplet_margin_loss(x, y, x * 2 + 1),
    "multi margin": lambda x, y, t: F.multi_margin_loss(x.reshape(-1, C), t.reshape(-1)),
    "multilabel soft margin": lambda x, y, t: F.multilabel_soft_margin_loss(
        x.reshape(-1, C), (y > 0).to(x.dtype).reshape(-1, C), weight=W
    ),
    "a mean by hand": lambda x, y, t: (x * (t != 1).unsqueeze(-1)).sum() / (t != 1).sum(),
}


@pytest.mark.filterwarnings("ignore:reduction")
@pytest.mark.parametrize("lengths", [(5, 5, 5), (5, 7, 3)], ids=["one size", "ragged"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_equals_that_of_the_valid_elements(name: str, lengths: tuple[int, ...]) -> None:
    loss = LOSSES[name]
    for poison in (math.nan, math.inf, 1e30):
        rows, others = ([torch.randn(n, C, dtype=torch.float64, requires_grad=True) for n in lengths] for _ in range(2))
        classes = [torch.randint(0, C, (n,)) for n in lengths]
        # All rows one after the other have the same elements.
        expected = loss(*(torch.cat(values)[None] for values in (rows, others, classes)))
        padded_calls.fallbacks.clear()
        actual = loss(padded(rows, poison), padded(others, poison), padded(classes, 10**6))
        assert not padded_calls.fallbacks
        torch.testing.assert_close(actual, expected)
        wanted = torch.autograd.grad(expected, [*rows, *others], allow_unused=True)
        given = torch.autograd.grad(actual, [*rows, *others], allow_unused=True)
        for g, e in zip(given, wanted, strict=True):
            torch.testing.assert_close(g, e)


@pytest.mark.parametrize("soft", [False, True])
def test_classes_may_be_padded_too(soft: bool) -> None:
    batch = st.Dim("batch", max=8, buckets=[8])
    source = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)

    def contrastive(x: Any) -> Any:
        similarity = x @ x.T
        return F.cross_entropy(similarity, similarity.mT.softmax(-1) if soft else torch.arange(len(similarity)))

    expected = contrastive(source)
    padded_calls.fallbacks.clear()
    actual = contrastive(st.pad(source, {0: batch}, value=math.nan))
    assert not padded_calls.fallbacks
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(torch.autograd.grad(actual, source), torch.autograd.grad(expected, source))


def padded(rows: list[Tensor], poison: float) -> Any:
    if len({len(row) for row in rows}) == 1:
        return st.pad(torch.stack(rows), {1: SEQ}, value=poison)
    return st.pad(rows, {0: SEQ}, value=poison)


def test_a_causal_language_models_loss_is_that_of_each_rows_next_tokens() -> None:
    rows = [torch.randn(n, C, dtype=torch.float64, requires_grad=True) for n in (5, 7, 3)]
    classes = [torch.randint(0, C, (n,)) for n in (5, 7, 3)]
    x, t = padded(rows, math.nan), padded(classes, 10**6)
    actual = F.cross_entropy(x[:, :-1].reshape(-1, C), t[:, 1:].reshape(-1))
    expected = F.cross_entropy(torch.cat([row[:-1] for row in rows]), torch.cat([c[1:] for c in classes]))
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(torch.autograd.grad(actual, rows), torch.autograd.grad(expected, rows))


@pytest.mark.parametrize("soft", [False, True])
def test_a_weight_of_classes_may_be_the_one_tensor_that_is_padded(soft: bool) -> None:
    scores, classes = torch.randn(5, C, dtype=torch.float64), torch.randint(0, C, (5,))
    target = torch.randn(5, C, dtype=torch.float64).softmax(1) if soft else classes
    actual = F.cross_entropy(scores, target, weight=st.pad(W, {0: SEQ}, value=math.nan))
    torch.testing.assert_close(actual, F.cross_entropy(scores, target, weight=W))
