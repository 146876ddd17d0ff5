"""Runs that leave no trace: what a program may write to is afterwards as it was before."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from subtensors.bucketed.state.program_state import State
from subtensors.bucketed.state.rng_state import RandomPlaces
from subtensors.dispatch.graphs.released_tensors import ReleasedTensor
from subtensors.dispatch.torch_internals import autograd

_log = logging.getLogger("subtensors.bucketed")

ROOM = 256 << 20
"""Bytes for copies of what a run that may raise may write to."""


@contextmanager
def restore_state(state: State, buffers: Sequence[Tensor], devices: Iterable[torch.device]) -> Iterator[None]:
    """Some buffers of a program's state, and random generators, are afterwards as they were before.

    Args:
        state: of the program.
        buffers: those that it may write to.
        devices: where it runs, beside those of its state.
    """
    held, values = state.held(), _Values(buffers)
    random = RandomPlaces([*devices, *[t.device for t in state.tensors()]])
    with autograd.unseen_writes(buffers):
        try:
            yield
        finally:
            state.put_back(held)
            values.put_back()
            random.go_back()


@contextmanager
def restore_all(state: State, others: Iterable[Tensor], devices: Iterable[torch.device]) -> Iterator[None]:
    """All that a program may write to is afterwards as it was before, a whole training step's as well.

    Args:
        state: of the program.
        others: beside it, what the run may write to.
        devices: where it runs, beside those of its state.
    """
    before = _Before(state, devices, state.buffers(), [*others, *state.tensors()])
    try:
        yield
    finally:
        before.put_back()


@contextmanager
def rollback_on_error(state: State, others: Iterable[Tensor], device: torch.device) -> Iterator[None]:
    """A run that raises leaves all that it may write to as it was: it will be made again in another way.

    Args:
        state: of the program.
        others: beside it, what the run may write to.
        device: where it runs, beside the CPU.
    """
    before = _Before(state, [device], [], others)
    try:
        yield
    except BaseException:
        before.put_back()
        raise


class _Before:
    """What a program may write to as it is now: tensors, gradients, what an optimizer holds, random generators.

    The largest, as caches of keys and values and weights, are left out where there is no room for a second one of each.

    Args:
        state: of the program.
        devices: whose random generators.
        whatever: tensors that are kept however large they are.
        others: those beside the state's that may be written to.
    """

    def __init__(
        self, state: State, devices: Iterable[torch.device], whatever: Sequence[Tensor], others: Iterable[Tensor]
    ) -> None:
        self._state, self._held = state, state.held()
        self._random = RandomPlaces([*devices, *[t.device for t in state.tensors()]])
        self._optimizers = state.optimizers.places()
        leaves = [t for t in state.tensors() if t.requires_grad and t.is_leaf and not isinstance(t, ReleasedTensor)]
        self._gradients = [(t, t.grad) for t in leaves]
        gradients = [g for _, g in self._gradients if g is not None]
        found = {id(t): t for t in [*state.at_risk(), *state.buffers(), *gradients, *state.stepped(), *others]}
        kept, self._left_out, room = {id(t): t for t in whatever}, list[Tensor](), ROOM
        awake = [t for t in found.values() if id(t) not in kept and not isinstance(t, ReleasedTensor)]
        for t in sorted(awake, key=_nbytes):
            if (room := room - _nbytes(t)) >= 0:
                kept[id(t)] = t
            elif not t.is_inference():
                self._left_out.append(t)
        self._values = _Values(kept.values())
        self._versions = [t._version for t in self._left_out]

    def put_back(self) -> None:
        """Undo what was written since, and say so where it can't be."""
        self._state.put_back(self._held)
        self._state.optimizers.go_back(self._optimizers)
        for t, gradient in self._gradients:
            t.grad = gradient
        with autograd.unseen_writes(self._values.tensors):
            self._values.put_back()
        self._random.go_back()
        if [t._version for t in self._left_out] != self._versions:
            _log.warning("a run that is to leave no trace wrote to what is too large for a copy to be kept of it")


class _Values:
    """The values of some tensors as they are now."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        # What has no memory, what sleeps, and what is of inference outside of it, nobody can write to.
        can_all = torch.is_inference_mode_enabled()
        self.tensors = [t for t in tensors if not isinstance(t, ReleasedTensor) and (can_all or not t.is_inference())]
        with torch.no_grad():
            self._kept = [t.clone() for t in self.tensors]

    def put_back(self) -> None:
        """Undo what was written since."""
        with torch.no_grad():
            for t, values in zip(self.tensors, self._kept, strict=True):
                t.copy_(values)


def _nbytes(t: Tensor) -> int:
    """The bytes of a copy; of a sparse one, which doesn't say, as if it were dense."""
    return t.numel() * t.element_size()
