"""What a recorded program does beside its results: gradients that it accumulates itself, steps of optimizers, writes.

A program that returns nothing that wants a gradient may still call `backward` and step an optimizer. A graph of it
writes to the gradients that it found, where they lay, or makes some in its own memory. The latter are nobody's after
the call: the next graph may overwrite them. So a parameter then has no gradient, rather than one of some other time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from operator import is_

import torch
from torch import Tensor

from subtensors.bucketed.state.program_state import State
from subtensors.bucketed.state.tensor_snapshot import TensorSnapshot
from subtensors.dispatch.graphs.live_scalars import GraphNumbers


class TrainingDetector:
    """Tells whether a program computes gradients, or takes a step, by itself.

    Args:
        state: of the program, which is about to be run.
    """

    def __init__(self, state: State) -> None:
        trained = [t for t in state.tensors() if t.requires_grad and t.is_leaf and not t.is_inference()]
        self._trained = trained if state.optimizers.are_there() else []
        self._written = [t._version for t in self._trained]
        self._held = [(t, t.grad, None if t.grad is None else t.grad._version) for t in trained]

    def any(self) -> bool:
        """Were there gradients, or a step of an optimizer, since?"""
        if [t._version for t in self._trained] != self._written:
            return True
        return any(t.grad is not g or (g is not None and g._version != version) for t, g, version in self._held)


class SideEffects:
    """What the replays of one graph do.

    Args:
        state: of the program.
    """

    def __init__(self, state: State) -> None:
        self.state = state
        self.numbers = GraphNumbers()
        self._accumulated: dict[Tensor, Tensor] = {}
        """Parameters whose gradient the graph reads, or adds to, where it lies, and that gradient."""
        self._held = TensorSnapshot([])
        self._dropped: list[Tensor] = []
        """Parameters whose gradient is in the graph's memory."""
        self._written: list[Tensor] = []

    @contextmanager
    def recorded(self, leaves_gradients: bool) -> Iterator[None]:
        """The program is captured meanwhile.

        Args:
            leaves_gradients: is the backward the caller's? Then gradients count that the program writes to, alone.
        """
        tensors = [*self.state.tensors(), *self.state.optimizers.tensors()]
        params = list({id(t): t for t in tensors if t.requires_grad and t.is_leaf}.values())
        counted = [t for t in tensors if not t.is_inference()]
        versions = [t._version for t in counted]
        found = [p.grad for p in params]
        written = [None if g is None else g._version for g in found]
        with self.numbers.kept():
            try:
                yield
            except BaseException:  # nothing was done
                for p, before in zip(params, found, strict=True):
                    p.grad = before
                raise
        for p, before, version in zip(params, found, written, strict=True):
            if p.grad is not before:
                self._dropped.append(p)
                p.grad = None
            elif before is not None and not (leaves_gradients and before._version == version):
                self._accumulated[p] = before
        self._held = TensorSnapshot(list(self._accumulated.values()))
        self._written = [t for t, version in zip(counted, versions, strict=True) if t._version != version]

    def obstacle(self) -> str:
        """Why the graph must not be replayed now; "" where it may."""
        gradients = list(self._accumulated.values())
        if not all(map(is_, [p.grad for p in self._accumulated], gradients)) or not self._held.are(gradients):
            return "a gradient that the program adds to was replaced: let zero_grad(set_to_none=False) keep it"
        return ""

    def before_replay(self) -> None:
        """Hand the numbers of the optimizers over."""
        self.state.optimizers.hand_over(self.numbers)
        self.numbers.upload()

    def after_replay(self) -> None:
        """Tell autograd, and whoever looks at gradients."""
        if self._written:
            torch.autograd.graph.increment_version(self._written)
        for p in self._dropped:
            p.grad = None
