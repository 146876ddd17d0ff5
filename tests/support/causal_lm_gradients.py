"""Losses and gradients of a tiny causal language model, and how far they may err."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from chunked_programs import Allocations
from reordered_sums import orders
from tiny_causal_lms import VOCABULARY
from torch import Tensor

IDS = torch.randint(3, VOCABULARY, (2, 33), generator=torch.Generator().manual_seed(1))
LABELS = IDS.masked_fill(IDS % 5 == 0, -100)
COUNT = torch.tensor(50)


def own_loss(model: Any, count: Tensor | None) -> Tensor:
    """The loss of the labels by the model's own function."""
    loss: Tensor = model(input_ids=IDS, labels=LABELS, num_items_in_batch=count).loss
    return loss


def exact_loss(model: Any, count: Tensor | None, smoothing: float) -> Tensor:
    """The loss of logits in their own dtype, such as float64, where transformers rounds them to float32."""
    logits, labels = model(input_ids=IDS).logits[:, :-1].flatten(0, 1), LABELS[:, 1:].flatten()
    total = F.cross_entropy(logits, labels, label_smoothing=smoothing, reduction="sum")
    return total / (count if count is not None else (labels != -100).sum())


def values(model: Any, loss_of: Callable[..., Tensor], *args: Any, watch: Allocations | None = None) -> Tensor:
    """The loss and all gradients, in float64."""
    model.zero_grad()
    with watch or nullcontext():
        loss = loss_of(model, *args)
        loss.backward()
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return torch.cat([loss.detach().double().view(1), *(g.double() for g in gradients)])


def check_errs_as_plain(found: Tensor, plain: Callable[[], Tensor], truth: Tensor) -> None:
    """Compare with the largest error of plain runs in several orders of addition."""
    errors = []
    for order in orders():
        with order:
            errors.append(float((plain() - truth).norm()))
    allowed = 1.5 * max(errors) + torch.finfo(torch.float32).eps * float(truth.norm())
    assert float((found - truth).norm()) <= allowed
    assert found.shape == truth.shape
