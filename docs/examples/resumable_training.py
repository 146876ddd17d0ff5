"""Training that may be killed at any moment, and then goes on as if it had not been: bit by bit the same.

    PYTHONPATH=docs/examples python -m resumable_training checkpoint.pt --steps 100 --device cuda --captured

Started again with the same arguments, it continues from the checkpoint.
"""

from __future__ import annotations

import argparse
import os
import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import subtensors as st

ACCUMULATE = 2


class Model(nn.Module):
    """A classifier of texts, with dropout, so that random numbers matter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 16)
        self.hidden = nn.Linear(16, 32)
        self.classes = nn.Linear(32, 4)

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        """Return the mean loss of a batch.

        Args:
            tokens: (rows, length) int64.
            target: (rows,) int64.
        """
        hidden = F.dropout(self.hidden(self.embedding(tokens)).relu(), 0.1, self.training)
        return F.cross_entropy(self.classes(hidden.mean(1)), target)


class Training:
    """A training run: all of its state is in `state_dict`.

    Args:
        device: where it runs.
        captured: whether optimizer steps are replays of a graph.
    """

    def __init__(self, device: str, captured: bool) -> None:
        torch.manual_seed(0)
        random.seed(0)
        self.device = device
        self.model = Model().to(device)
        self.optimizer = st.optim.AdamW(self.model.parameters(), lr=1e-2, max_norm=1.0, accumulate=ACCUMULATE)
        if captured:
            self.optimizer.capture()
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 500)
        length = st.Dim("length", max=24, buckets=8)
        self.loss = st.bucketed(self.model, {"tokens": {1: length}})
        self.losses: list[str] = []

    def step(self) -> None:
        """Make one update, of the mean gradient of some batches."""
        for _ in range(ACCUMULATE):
            tokens = torch.randint(64, (4, random.randint(1, 24)))
            loss = self.loss(tokens.to(self.device), tokens[:, 0].to(self.device) % 4)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.scheduler.step()
        self.losses.append(loss.item().hex())

    def state_dict(self) -> dict[str, Any]:
        """Return all that the next step depends on. Graphs are no part of it: they are captured anew."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "losses": self.losses,
            "random": {
                "python": random.getstate(),
                "cpu": torch.get_rng_state(),
                "cuda": torch.cuda.get_rng_state_all() if self.device == "cuda" else [],
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a return value of `state_dict`."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.losses = state["losses"]
        random.setstate(state["random"]["python"])
        torch.set_rng_state(state["random"]["cpu"])
        if self.device == "cuda":
            torch.cuda.set_rng_state_all(state["random"]["cuda"])


def save(state: dict[str, Any], path: Path) -> None:
    """Write a checkpoint so that there is a whole one at every moment: beside the last one, then in its place."""
    beside = path.with_name(path.name + ".new")
    with beside.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def train(path: Path, steps: int, device: str = "cpu", captured: bool = False) -> dict[str, Any]:
    """Train for some steps in all, from the checkpoint at `path` if there is one, and write one after each step.

    Args:
        path: of the checkpoint.
        steps: how many updates there are in the end, those before the checkpoint included.
        device: where it runs.
        captured: whether optimizer steps are replays of a graph.

    Returns:
        The last checkpoint.
    """
    training = Training(device, captured)
    if path.exists():
        training.load_state_dict(torch.load(path, map_location="cpu"))
    while len(training.losses) < steps:
        training.step()
        save(training.state_dict(), path)
    return training.state_dict()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--captured", action="store_true")
    options = parser.parse_args()
    train(options.checkpoint, options.steps, options.device, options.captured)
