"""The evaluation pass of the demo: documents of varying lengths, one by one, plain and through `st.bucketed`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from demo.timing import synchronize
from subtensors.bucketed.bucketed import bucketed
from subtensors.sizes.dims import Dim

BUCKETS = 8
"""Graphs at most."""


@dataclass
class Evaluation:
    """The result of passes over the documents.

    Args:
        name: which way.
        documents: how many.
        loss: mean over all tokens, in nats.
        seconds: of each pass; the first has everything that it records.
        summary: what the runner says of itself; "" for the plain model.
    """

    name: str
    documents: int
    loss: float = 0.0
    seconds: list[float] = field(default_factory=list)
    summary: str = ""


def evaluate(model: nn.Module, texts: Sequence[Tensor], passes: int = 2) -> list[Evaluation]:
    """Take the mean loss over the documents with the plain model and with the bucketed one, in turns.

    Args:
        model: next-token logits from (1, length) tokens.
        texts: each (length + 1,) int64, on any device.
        passes: of each way.
    """
    device = next(model.parameters()).device
    longest = max(map(len, texts)) - 1
    length = Dim("length", max=longest, buckets=-(-longest // BUCKETS))
    was_training = model.training
    model.eval()

    def loss(inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(inputs)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")

    placed = [t[None].to(device) for t in texts]
    run = bucketed(loss, {"inputs": {1: length}, "targets": {1: length}})
    ways: list[tuple[Evaluation, Callable[[Tensor, Tensor], Tensor]]] = [
        (Evaluation("plain PyTorch", len(texts)), loss),
        (Evaluation("bucketed", len(texts)), run),
    ]
    with torch.no_grad():
        for _ in range(passes):
            for found, way in ways:
                _pass(found, way, placed)
    ways[1][0].summary = str(run.stats()).splitlines()[0]
    model.train(was_training)
    return [found for found, _ in ways]


def _pass(found: Evaluation, loss: Callable[[Tensor, Tensor], Tensor], texts: Sequence[Tensor]) -> None:
    device = texts[0].device
    synchronize(device.type)
    started = time.perf_counter()
    total = sum((loss(t[:, :-1], t[:, 1:]) for t in texts), torch.zeros((), device=device))
    synchronize(device.type)
    found.seconds.append(time.perf_counter() - started)
    found.loss = float(total) / sum(t.shape[1] - 1 for t in texts)
