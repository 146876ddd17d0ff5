"""Runs without side effects: whatever a program may write to is restored afterwards."""

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
"""Maximum bytes of the copies that are kept of tensors which a run may write to."""


@contextmanager
def restore_state(state: State, buffers: Sequence[Tensor], devices: Iterable[torch.device]) -> Iterator[None]:
    """A context that restores on exit some buffers, the modules' registered tensors, and random generators.

    Args:
        state: the state of the program.
        buffers: the buffers that it may write to.
        devices: the devices on which it runs, beside those of its state.
    """
    held, values = state.held(), _Values(buffers)
    random = RandomPlaces([*devices, *[t.device for t in state.tensors()]])
    with autograd.without_version_bumps(buffers):
        try:
            yield
        finally:
            state.put_back(held)
            values.put_back()
            random.go_back()


@contextmanager
def restore_all(state: State, others: Iterable[Tensor], devices: Iterable[torch.device]) -> Iterator[None]:
    """A context that restores on exit all that a program may write to, also in a whole training step.

    Args:
        state: the state of the program.
        others: further tensors that the run may write to.
        devices: the devices on which it runs, beside those of its state.
    """
    before = _Before(state, devices, state.buffers(), [*others, *state.tensors()])
    try:
        yield
    finally:
        before.put_back()


@contextmanager
def rollback_on_error(state: State, others: Iterable[Tensor], device: torch.device) -> Iterator[None]:
    """A context that restores all that a run may write to if the run raises, so that it can be repeated otherwise.

    Args:
        state: the state of the program.
        others: further tensors that the run may write to.
        device: the device on which it runs, beside the CPU.
    """
    before = _Before(state, [device], [], others)
    try:
        yield
    except BaseException:
        before.put_back()
        raise


class _Before:
    """A snapshot of what a program may write to: tensors, gradients, optimizer state, random generators.

    The largest tensors, such as weights and caches of keys and values, are left out if their copies exceed `ROOM`.

    Args:
        state: the state of the program.
        devices: the devices whose random generators are included.
        whatever: tensors that are copied however large they are.
        others: tensors beside the state's that may be written to.
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
        """Undo what was written since the snapshot; log a warning if a tensor without a copy was written to."""
        self._state.put_back(self._held)
        self._state.optimizers.go_back(self._optimizers)
        for t, gradient in self._gradients:
            t.grad = gradient
        with autograd.without_version_bumps(self._values.tensors):
            self._values.put_back()
        self._random.go_back()
        if [t._version for t in self._left_out] != self._versions:
            _log.warning("a run that is to leave no trace wrote to what is too large for a copy to be kept of it")


class _Values:
    """A snapshot of the values of some tensors."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        # Nobody can write to released tensors, nor to inference tensors outside of inference mode.
        can_all = torch.is_inference_mode_enabled()
        self.tensors = [t for t in tensors if not isinstance(t, ReleasedTensor) and (can_all or not t.is_inference())]
        with torch.no_grad():
            self._kept = [t.clone() for t in self.tensors]

    def put_back(self) -> None:
        """Undo what was written since the snapshot."""
        with torch.no_grad():
            for t, values in zip(self.tensors, self._kept, strict=True):
                t.copy_(values)


def _nbytes(t: Tensor) -> int:
    """Return the bytes of a copy; a sparse tensor counts as if it were dense."""
    return t.numel() * t.element_size()
