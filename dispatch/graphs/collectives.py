"""Collectives that a program calls: each process must call them as often as every other one.

Processes meet other sizes at other times, so one runs a bucket for the first time, or compares it with the plain
program, where another replays: whatever runs more than once on one of them must not wait for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from subtensors.dispatch.ops.tree import Args, Kwargs, PyTree

_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "symm_mem")


def is_distributed() -> bool:
    """Return whether this process is one of several."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def is_reducer(module: nn.Module) -> bool:
    """Return whether a module calls collectives in Python, around the modules that it holds."""
    if not is_distributed():
        return False
    from torch.distributed.fsdp import FullyShardedDataParallel

    return isinstance(module, (nn.parallel.DistributedDataParallel, FullyShardedDataParallel))


class WatchedOps(TorchDispatchMode):
    """A mode that shows each op to `note` before it runs, also those that composite functions and rules consist of."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: functions that the program compiles itself stay compiled."""
        return True

    def note(self, op: Callable[..., PyTree], args: Args, kwargs: Kwargs) -> None:
        """Look at a call of an op."""
        raise NotImplementedError

    def __torch_dispatch__(
        self, func: Callable[..., PyTree], types: Collection[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> PyTree:
        """Run one op."""
        if any(kind.__module__.startswith("subtensors.") for kind in types):
            return NotImplemented  # what it is made of comes here in its turn
        self.note(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


class Collectives(WatchedOps):
    """A mode that notes the first collective that is called in it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = ""
        """The name of its op; "" if there was none."""

    def note(self, op: Callable[..., PyTree], args: Args, kwargs: Kwargs) -> None:
        """Note a collective."""
        if getattr(op, "namespace", "") in _NAMESPACES:
            self.first = self.first or str(op)
