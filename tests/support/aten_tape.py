"""A recording of what a program does to memory, below all of Python, which is replayed as a CUDA graph is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten

_ASKS_THE_DEVICE = {
    aten._local_scalar_dense.default,
    aten.equal.default,
    aten.masked_select.default,
    aten.nonzero.default,
    aten._unique2.default,
}


class Asked(RuntimeError):
    """A program that is captured asks for a value, which is not there yet."""


class Tape(TorchDispatchMode):
    """Keeps each call of an aten op that computes: its arguments' memory, its numbers, and the memory of its results.

    Args:
        inputs: tensors that hold nothing while this records.
    """

    def __init__(self, inputs: Collection[Tensor]) -> None:
        super().__init__()
        self._calls: list[tuple[Callable[..., Any], list[Any], Any, list[Tensor], list[int]]] = []
        self.made: list[Tensor] = []
        """What the ops made, in the memory that a replay writes to."""
        self._unknown = set(map(_memory, inputs))
        self._own: set[int] = set()
        self._constants: set[int] = set()
        """Memory of `torch.tensor(number)` and of what is made of such: beside a GPU that is on the host."""
        self.read: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage, Tensor]] = {}
        """Memory from elsewhere, by its id: it, what it held before, and something that keeps it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one op, and keep it."""
        leaves, spec = pytree.tree_flatten((args, kwargs or {}))
        given = [x for x in leaves if isinstance(x, Tensor)]
        if any(type(x).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl for x in given):
            return NotImplemented  # what that is made of comes here in its turn
        has_mask = func is aten.index.Tensor and any(x is not None and x.dtype == torch.bool for x in args[1])
        is_constant = func is aten.lift_fresh.default or (given and all(_memory(x) in self._constants for x in given))
        if (func in _ASKS_THE_DEVICE or has_mask) and not is_constant:
            raise Asked(f"operation not permitted when stream is capturing: {func}")
        given = [x for x in given if x.layout is torch.strided]
        for x in given:
            if (place := _memory(x)) not in self._own and place not in self.read:
                self.read[place] = x.untyped_storage(), x.untyped_storage().clone(), x.data
        out = func(*args, **(kwargs or {}))
        there = set(map(_memory, given))
        made = [x for x in pytree.tree_leaves(out) if isinstance(x, Tensor) and x.layout is torch.strided]
        fresh = [i for i, x in enumerate(made) if _memory(x) not in there]
        if is_constant:
            self._constants.update(map(_memory, made))
        # `.data` is not what autograd counts writes to, nor what another tensor may be put in place of.
        kept = [x.data for x in made]
        self._own.update(_memory(made[i]) for i in fresh)
        self.made += [kept[i] for i in fresh]
        if fresh or func._schema.is_mutable or not func.is_view:
            held = [x.data if isinstance(x, Tensor) else x for x in leaves]
            self._calls.append((func, held, spec, kept, fresh))
        return out

    def is_unknown(self, x: Tensor) -> bool:
        """Is its value not there before a replay?"""
        return x.layout is torch.strided and (_memory(x) in self._own or _memory(x) in self._unknown)

    def put_back(self) -> None:
        """Give memory from elsewhere what it held before."""
        for now, before, _ in self.read.values():
            if now.nbytes() == before.nbytes():
                now.copy_(before)

    def kept_bytes(self, pool: Iterable[Tape], results: Collection[Tensor]) -> int:
        """Count the bytes of what it made that others hold than the tapes of a pool, without the results."""
        counted = _holders(pool)
        but = set(map(_memory, results))
        made = {place: t for t in self.made if (place := _memory(t)) not in but and not t.is_meta}
        return sum(t.untyped_storage().nbytes() for place, t in made.items() if _use_count(place) > counted[place])

    def _held(self) -> list[Tensor]:
        found = [x for _, leaves, _, kept, _ in self._calls for x in (*leaves, *kept) if isinstance(x, Tensor)]
        return list({id(x): x for x in (*found, *self.made, *[x for *_, x in self.read.values()])}.values())

    def reads_of(self, other: Tape) -> bool:
        """Does it read what another one writes?"""
        return not self._own.isdisjoint(other._own) or not other._own.isdisjoint(self.read)

    def spoil(self) -> None:
        """Overwrite what it has made."""
        with torch.inference_mode(False), torch.no_grad():
            for t in self.made:
                t.fill_(float("nan") if t.is_floating_point() or t.is_complex() else 0)

    def check_use_after_free(self, pool: Iterable[Tape]) -> None:
        """Raise AssertionError if it reads memory that none but the tapes of a pool hold, which a GPU has freed."""
        tapes = [*pool]
        counted, made = _holders(tapes), set[int]().union(*[tape._own for tape in tapes])
        for place, (storage, _, x) in self.read.items():
            is_outside = not (place in made or place in self._constants or x.is_meta) and storage.nbytes()
            if is_outside and _use_count(place) <= counted[place]:
                raise AssertionError(f"a graph reads memory that was freed, of {tuple(x.shape)}")

    def replay(self) -> None:
        """Do it all again, in the same memory and with the same numbers."""
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            for func, held, spec, kept, fresh in self._calls:
                args, kwargs = pytree.tree_unflatten(held, spec)
                out = [x for x in pytree.tree_leaves(func(*args, **kwargs)) if isinstance(x, Tensor)]
                for i in fresh:
                    kept[i].copy_(out[i])


@contextmanager
def taped(inputs: Sequence[Tensor]) -> Iterator[Tape]:
    """What runs meanwhile is recorded, and leaves no trace elsewhere: a capture computes nothing."""
    tape = Tape(inputs)

    def refusing(read: Callable[..., Any]) -> Callable[..., Any]:
        def asked(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            if tape.is_unknown(x):
                raise Asked(f"operation not permitted when stream is capturing: {read.__name__}")
            return read(x, *args, **kwargs)

        return asked

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        for name in ("tolist", "numpy"):  # which no mode sees
            patch.setattr(torch.Tensor, name, refusing(getattr(torch.Tensor, name)))
        try:
            with torch.random.fork_rng([]), tape:
                yield tape
        finally:
            tape.put_back()


def _holders(tapes: Iterable[Tape]) -> Counter[int]:
    """Count the tensors that some tapes hold of each memory."""
    return Counter(_memory(x) for tape in tapes for x in tape._held() if x.layout is torch.strided)


def _use_count(memory: int) -> int:
    """Count the tensors that hold some memory."""
    found: int = torch._C._storage_Use_Count(memory)
    return found - 1  # the count's own


def _memory(x: Tensor) -> int:
    return x.untyped_storage()._cdata
