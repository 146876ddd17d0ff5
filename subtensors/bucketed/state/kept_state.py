"""Runs that leave no trace: what a program may write to is afterwards as it was before."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from subtensors.bucketed.state.program_state import State
from subtensors.dispatch import autograd_private, torch_capture

ROOM = 256 << 20
"""Bytes for copies of what a run that may raise may write to."""


@contextmanager
def kept_state(state: State, buffers: Sequence[Tensor], devices: Iterable[torch.device]) -> Iterator[None]:
    """Some buffers of a program's state, and random generators, are afterwards as they were before.

    Args:
        state: of the program.
        buffers: those that it may write to.
        devices: where it runs, beside those of its state.
    """
    put_back = _values(state, buffers)
    found = {*devices, *[t.device for t in state.tensors()]}
    drawn = sorted(device.index for device in found if device.type == "cuda")
    with warnings.catch_warnings(), torch.random.fork_rng(drawn), autograd_private.unseen_writes(buffers):
        try:
            yield
        finally:
            put_back()


@contextmanager
def undone_where_it_raises(state: State, others: Iterable[Tensor], device: torch.device) -> Iterator[None]:
    """A run that raises leaves buffers and random generators as they were: it will be made again in another way.

    The largest, as those of a cache of keys and values, are left out where there is no room for a second one of each.

    Args:
        state: of the program.
        others: beside it, what the run may write to.
        device: where it runs, beside the CPU.
    """
    found = {id(t): t for t in [*state.at_risk(), *others]}
    buffers = sorted(found.values(), key=lambda t: t.nbytes)
    while sum(t.nbytes for t in buffers) > ROOM:
        buffers.pop()
    put_back = _values(state, buffers)
    places = {where: torch_capture.random_place(where) for where in (torch.device("cpu"), device)}
    try:
        yield
    except BaseException:
        with autograd_private.unseen_writes(buffers):
            put_back()
        for where, place in places.items():
            torch_capture.go_to_random_place(where, place)
        raise


def _values(state: State, buffers: Sequence[Tensor]) -> Callable[[], None]:
    """Takes back what is written to these buffers, and what modules hold instead of others, from now on."""
    held = state.held()
    with torch.no_grad():
        kept = [(buffer, buffer.clone()) for buffer in buffers]

    def put_back() -> None:
        state.put_back(held)
        with torch.no_grad():
            for buffer, values in kept:
                buffer.copy_(values)

    return put_back
