"""The side effects of a program: gradients that it accumulates itself, optimizer steps, writes.

A program may call `backward` and step an optimizer even if no result of it requires grad. Its graph writes in place to
the gradients that it found at capture, or makes new ones in its own memory. The next graph may overwrite the latter
after the call, so they are dropped: the parameter then has no gradient rather than a stale one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from operator import is_

import torch
from torch import Tensor

from subtensors.bucketed.state.guards import TensorSnapshot
from subtensors.bucketed.state.program_state import State
from subtensors.dispatch.graphs.dynamic_scalars import DynamicScalars
from subtensors.padded.padded_tensor import PaddedTensor


class WriteDetector:
    """A detector of writes to some tensors, from its creation on.

    Args:
        tensors: plain or padded; inference tensors have no version counter and are ignored.

    Example:
        >>> x = torch.zeros(2)
        >>> writes = WriteDetector([x])
        >>> writes.any(), x.add_(1), writes.any()
        (False, tensor([1., 1.]), True)
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        dense = [x._dense if isinstance(x, PaddedTensor) else x for x in tensors]
        self._versions = [(t, t._version) for t in dense if not t.is_inference()]

    def any(self) -> bool:
        """Return whether one of the tensors was written to."""
        return any(t._version != version for t, version in self._versions)


class TrainingDetector:
    """A detector of programs that accumulate gradients, or step an optimizer, themselves.

    Args:
        state: the state of the program, taken before it runs.
    """

    def __init__(self, state: State) -> None:
        trained = [t for t in state.tensors() if t.requires_grad and t.is_leaf and not t.is_inference()]
        self._trained = trained if state.optimizers.found else []
        self._versions = [t._version for t in self._trained]
        self._gradients = [(t, t.grad, None if t.grad is None else t.grad._version) for t in trained]

    def any(self) -> bool:
        """Return whether gradients were accumulated, or an optimizer stepped, since creation."""
        if [t._version for t in self._trained] != self._versions:
            return True
        return any(t.grad is not g or (g is not None and g._version != version) for t, g, version in self._gradients)


class SideEffects:
    """The side effects of one graph's replays.

    Args:
        state: the state of the program.
    """

    def __init__(self, state: State) -> None:
        self.state = state
        self.numbers = DynamicScalars()
        self._accumulated: dict[Tensor, Tensor] = {}
        """Parameters whose gradient the graph reads or adds to in place, each with that gradient."""
        self._snapshot = TensorSnapshot([])
        self._dropped: list[Tensor] = []
        """Parameters whose gradient is in the graph's memory."""
        self._written: list[Tensor] = []

    @contextmanager
    def noted(self, caller_runs_backward: bool) -> Iterator[None]:
        """A context in which the program is captured, and its side effects are noted.

        Args:
            caller_runs_backward: whether the caller runs the backward; then only gradients that the program writes
                itself count.
        """
        tensors = [*self.state.tensors(), *self.state.optimizers.tensors()]
        params = list({id(t): t for t in tensors if t.requires_grad and t.is_leaf}.values())
        counted = [t for t in tensors if not t.is_inference()]
        versions = [t._version for t in counted]
        gradients = [p.grad for p in params]
        gradient_versions = [None if g is None else g._version for g in gradients]
        with self.numbers.active():
            try:
                yield
            except BaseException:  # a failed capture has computed nothing
                for p, before in zip(params, gradients, strict=True):
                    p.grad = before
                raise
        for p, before, version in zip(params, gradients, gradient_versions, strict=True):
            if p.grad is not before:
                self._dropped.append(p)
                p.grad = None
            elif before is not None and not (caller_runs_backward and before._version == version):
                self._accumulated[p] = before
        self._snapshot = TensorSnapshot(list(self._accumulated.values()))
        self._written = [t for t, version in zip(counted, versions, strict=True) if t._version != version]

    def no_replay_reason(self) -> str:
        """Return the reason why the graph must not be replayed now; "" if it may."""
        gradients = list(self._accumulated.values())
        if not all(map(is_, [p.grad for p in self._accumulated], gradients)) or not self._snapshot.matches(gradients):
            return "a gradient that the program adds to was replaced: let zero_grad(set_to_none=False) keep it"
        return ""

    def before_replay(self) -> None:
        """Upload the dynamic scalars of the optimizers."""
        self.state.optimizers.set_dynamic_scalars(self.numbers)
        self.numbers.upload()

    def after_replay(self) -> None:
        """Bump the versions of written tensors, and drop the gradients that are in the graph's memory."""
        if self._written:
            torch.autograd.graph.increment_version(self._written)
        for p in self._dropped:
            p.grad = None
