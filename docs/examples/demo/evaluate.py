"""The evaluation pass of the demo: documents of varying lengths, one by one, plain and through `st.bucketed`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from demo.timing import synchronize
from subtensors.bucketed.bucketed import bucketed
from subtensors.bucketed.runner import Bucketed
from subtensors.sizes.dims import Dim

BUCKETS = 8
"""At most so many graphs."""


@dataclass(frozen=True)
class Evaluation:
    """What one pass over the documents gave.

    Args:
        name: which way.
        loss: mean over all tokens, in nats.
        first_s: the first pass, with everything that it records.
        again_s: a second pass.
        summary: what the runner says of itself; "" for the plain model.
    """

    name: str
    loss: float
    first_s: float
    again_s: float
    summary: str = ""


def documents(text: Tensor, count: int, longest: int, seed: int) -> list[Tensor]:
    """Stretches of a text, of lengths from an eighth of the longest up.

    Args:
        text: tokens, (size,) int64.
        count: how many.
        longest: tokens of the longest, the first of which is only read.
        seed: of places and lengths.

    Returns:
        each (1, length + 1) int64.

    >>> [d.shape[1] for d in documents(torch.arange(100), count=3, longest=16, seed=0)]
    [17, 11, 16]
    """
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        length = int(torch.randint(longest // 8, longest + 1, (), generator=generator))
        start = int(torch.randint(len(text) - length, (), generator=generator))
        found.append(text[None, start : start + length + 1])
    return found


def evaluate(model: nn.Module, texts: Sequence[Tensor], device: str) -> list[Evaluation]:
    """Take the mean loss over the documents with the plain model and with the bucketed one.

    Args:
        model: next-token logits from (1, length) tokens.
        texts: what `documents` gave.
        device: "cpu" or "cuda".
    """
    longest = max(t.shape[1] for t in texts) - 1
    length = Dim("length", max=longest, buckets=-(-longest // BUCKETS))
    was_training = model.training
    model.eval()

    def loss(inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            logits = model(inputs)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")

    placed = [t.to(device) for t in texts]
    run = bucketed(loss, {"inputs": {1: length}, "targets": {1: length}})
    found = [_pass("plain PyTorch", loss, placed, device), _pass("bucketed", run, placed, device)]
    model.train(was_training)
    return found


@torch.no_grad()
def _pass(name: str, loss: Callable[[Tensor, Tensor], Tensor], texts: Sequence[Tensor], device: str) -> Evaluation:
    seconds = []
    for _ in range(2):
        synchronize(device)
        started = time.perf_counter()
        total = sum((loss(t[:, :-1], t[:, 1:]) for t in texts), torch.zeros((), device=device))
        synchronize(device)
        seconds.append(time.perf_counter() - started)
    mean = float(total) / sum(t.shape[1] - 1 for t in texts)
    summary = str(loss.stats()).splitlines()[0] if isinstance(loss, Bucketed) else ""
    return Evaluation(name, mean, seconds[0], seconds[1], summary)
