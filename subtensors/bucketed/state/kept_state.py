"""Runs that leave no trace: what a program may write to is afterwards as it was before."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from subtensors.bucketed.state.program_state import State
from subtensors.dispatch import autograd_private


@contextmanager
def kept_state(state: State, buffers: Sequence[Tensor], devices: Iterable[torch.device]) -> Iterator[None]:
    """Some buffers of a program's state, and random generators, are afterwards as they were before.

    Args:
        state: of the program.
        buffers: those that it may write to.
        devices: where it runs, beside those of its state.
    """
    held = state.held()
    with torch.no_grad():
        kept = [(buffer, buffer.clone()) for buffer in buffers]
    found = {*devices, *[t.device for t in state.tensors()]}
    drawn = sorted(device.index for device in found if device.type == "cuda")
    with warnings.catch_warnings(), torch.random.fork_rng(drawn), autograd_private.unseen_writes(buffers):
        try:
            yield
        finally:
            state.put_back(held)
            with torch.no_grad():
                for buffer, values in kept:
                    buffer.copy_(values)
