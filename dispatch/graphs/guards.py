"""Snapshots of what a launch or a graph was made for, to be compared with what there is now.

A captured graph holds addresses and Python values as constants, a cached launch a table of pointers. Whoever repeats
one keeps snapshots of these and compares them first, in the cheapest tier that its promises allow:

| tier | snapshot | what must be as before |
|---|---|---|
| identity | `are_same` | the objects themselves |
| layout | `LayoutSnapshot` | type, dtype, device, shape, strides and requires_grad of tensors |
| address | `AddressSnapshot` | where tensors begin and, of those with several dims, the layout |
| address and layout | `TensorSnapshot` | both, in every mode of torch; it names the property that changed |
| value | `Writes` | the number of writes to tensors |
| value | `ValueSnapshot` | plain Python values, by `exact` |

A comparison where nothing changed runs in C: a thousand tensors are compared in tens of microseconds. Values that no
snapshot holds are not guessed: runs of the plain program beside the recorded one find what they change
(`subtensors/bucketed/check.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from subtensors.dispatch.torch_internals.autograd import is_transforming
from subtensors.dispatch.torch_internals.ops import has_dispatch_mode
from subtensors.dispatch.torch_internals.requires import requires

TENSOR_PROPERTIES: dict[str, Callable[[Tensor], object]] = {
    "address": Tensor.data_ptr,
    "device": attrgetter("device"),
    "dtype": attrgetter("dtype"),
    "shape": attrgetter("shape"),
    "strides": Tensor.stride,
    "conjugation": Tensor.is_conj,
    "negation": Tensor.is_neg,
}
"""The properties of a tensor that a graph depends on: by name, the function that reads it."""

_MAX_MODES = 4
"""Combinations of grad mode, inference mode and autocast that the same tensors are compared in."""

_layout = attrgetter("layout")
_have_addresses = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)


def why_not_replayable() -> str:
    """Return the reason why no graph can be replayed in the current context; "" if one can."""
    if torch.compiler.is_compiling():
        return "it is being compiled"
    if is_transforming():
        return "it is inside a transform of torch.func, or forward-mode differentiation"
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return "it is part of a graph that is being captured"
    if has_dispatch_mode():
        return "a dispatch mode is around it, which is to see each op"
    return ""


def are_same(now: Collection[object], before: Collection[object]) -> bool:
    """Return whether two collections hold the same objects in order; `==` would compare tensors elementwise."""
    return len(now) == len(before) and all(map(is_, now, before))


class LayoutSnapshot:
    """A snapshot of tensors' type, dtype, device, shape, strides and requires_grad, compared in one C++ loop.

    The loop compares modes of torch as well: it passes only in the grad mode, inference mode and autocast in which the
    snapshot was taken. Checked on 2.11, 2.13.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._firsts = self._first_indices(tensors)
        distinct = tensors if self._firsts is None else [tensors[i] for i in dict.fromkeys(self._firsts)]
        # The C++ check ends the process on tensors without strides: those match no others.
        has_strides = set(map(_layout, distinct)) <= {torch.strided}
        self._count = len(tensors) if has_strides else -1
        self._check = _check_of(distinct if has_strides else [])

    def matches(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether every tensor is like the one at its position."""
        if len(tensors) != self._count:
            return False
        if self._firsts is not None:
            if self._first_indices(tensors) != self._firsts:
                return False
            tensors = [tensors[i] for i in dict.fromkeys(self._firsts)]
        return self._check(*tensors)

    @staticmethod
    def _first_indices(tensors: Sequence[Tensor]) -> list[int] | None:
        """Return the first index of each tensor; None when all differ. The C++ loop requires distinct tensors."""
        if len(set(map(id, tensors))) == len(tensors):
            return None
        first = {id(t): i for i, t in reversed([*enumerate(tensors)])}
        return [first[id(t)] for t in tensors]


def _python_check_of(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """Return a Python equivalent of the check of torch's `TensorGuards`."""
    before = list(map(_metadata, tensors))
    return lambda *now: list(map(_metadata, now)) == before


def _metadata(t: Tensor) -> tuple[object, ...]:
    return type(t), t.dtype, t.device, t.shape, t.stride(), t.requires_grad, t.is_conj(), t.is_neg()


@requires("torch._C._dynamo.guards.TensorGuards", otherwise=_python_check_of)
def _check_of(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    from torch._C._dynamo.guards import TensorGuards

    check: Callable[..., bool] = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return check


class AddressSnapshot:
    """A snapshot of tensors' addresses, compared in one C++ loop where torch has CUDA. Checked on 2.11, 2.13.

    Args:
        tensors: in the order in which later ones are given too.
        with_layout: compare the layout of tensors of several dims, too, which may be transposed in place.
    """

    def __init__(self, tensors: Sequence[Tensor], with_layout: bool = True) -> None:
        self.addresses = list(map(Tensor.data_ptr, tensors))
        self._indices = list(range(len(self.addresses)))
        self._matrices = [i for i, t in enumerate(tensors) if t.ndim > 1] if with_layout else []
        self._layouts = LayoutSnapshot([tensors[i] for i in self._matrices]) if self._matrices else None

    def matches(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether every tensor is where the one at its position was."""
        if not self._are_there(tensors):
            return False
        return self._layouts is None or self._layouts.matches([tensors[i] for i in self._matrices])

    def _are_there(self, tensors: Sequence[Tensor]) -> bool:
        if len(tensors) != len(self.addresses):
            return False
        if _have_addresses is not None:
            try:
                return bool(_have_addresses(tensors, self.addresses, self._indices))
            except RuntimeError:
                pass  # one has no memory; its class may raise a clearer error
        return list(map(Tensor.data_ptr, tensors)) == self.addresses

    def changed(self, tensors: Sequence[Tensor], name: str) -> str:
        """Return which tensor changed, in words with a name for what they are; "" if none did."""
        if self.matches(tensors):
            return ""
        pairs = enumerate(zip(tensors, self.addresses, strict=True))
        moved = next((i for i, (t, address) in pairs if t.data_ptr() != address), None)
        return f"the layout of a {name}" if moved is None else f"{name} {moved} of the step"


def tensor_properties(t: Tensor) -> tuple[object, ...] | None:
    """Return the `TENSOR_PROPERTIES` of one tensor; None if it has no address, such as a sparse one."""
    try:
        return tuple([read(t) for read in TENSOR_PROPERTIES.values()])
    except (RuntimeError, ValueError):  # torch's; a parameter of a lazy module has no size before the first call
        return None


class TensorSnapshot:
    """A snapshot of tensors' addresses and layouts, good in every mode of torch, which keeps their memory alive.

    Checks in C++ compare all tensors at once; if they report a difference, `TENSOR_PROPERTIES` decide.

    Args:
        tensors: the tensors, in the order in which later ones are given too.

    Example:
        >>> w = torch.ones(2, 2)
        >>> snapshot = TensorSnapshot([w])
        >>> w.data = w.data.t()
        >>> snapshot.matches([w]), snapshot.first_change([w])
        (False, (0, 'strides'))
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._properties = [tensor_properties(t) for t in tensors]
        self._addresses = AddressSnapshot(tensors, with_layout=False) if None not in self._properties else None
        self._by_mode = deque([LayoutSnapshot(tensors)], _MAX_MODES)
        with torch.no_grad():
            # Keeps the memory alive, even if `.data` is replaced.
            self._memory = [t.detach() for t, known in zip(tensors, self._properties, strict=True) if known is not None]

    def matches(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether every tensor still matches its snapshot."""
        if self._addresses is not None and self._addresses.matches(tensors):
            for layouts in self._by_mode:  # `any` of a generator would take longer than a check of few tensors
                if layouts.matches(tensors):
                    return True
        if self.first_change(tensors) is not None:
            return False
        if self._addresses is not None:
            self._by_mode.appendleft(LayoutSnapshot(tensors))
        return True

    def first_change(self, tensors: Sequence[Tensor]) -> tuple[int, str] | None:
        """Return the index of the first tensor that changed and the property that did; None if none changed."""
        for i, (t, before) in enumerate(zip(tensors, self._properties, strict=False)):
            if (now := tensor_properties(t)) != before:
                changed = zip(TENSOR_PROPERTIES, now or (), before or (), strict=False)
                return i, next((name for name, a, b in changed if a != b), "memory")
        known = len(self._properties)
        return None if len(tensors) == known else (min(len(tensors), known), "count")


class Writes:
    """The writes to some tensors from now on; inference tensors, which count none, are left out.

    Example:
        >>> x = torch.zeros(2)
        >>> writes = Writes([x])
        >>> writes.any(), x.add_(1), writes.any()
        (False, tensor([1., 1.]), True)
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        given = list(tensors)
        self.tensors = [t for t in given if not t.is_inference()]
        self.are_counted = len(self.tensors) == len(given)
        """False if a tensor was left out."""
        self._versions = [t._version for t in self.tensors]

    def any(self) -> bool:
        """Return whether one of the tensors was written to since."""
        return [t._version for t in self.tensors] != self._versions

    def written(self) -> list[Tensor]:
        """Return the tensors that were written to since."""
        return [t for t, version in zip(self.tensors, self._versions, strict=True) if t._version != version]


PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
"""Types of values that Python code computes with, or decides by."""


def is_plain(x: object) -> bool:
    """Return whether a value is plain, or a tuple of plain values."""
    return type(x) in PLAIN or (type(x) is tuple and all(map(is_plain, x)))


def exact(x: object) -> tuple[object, ...]:
    """Return a plain value in a form that equals only those which compute the same.

    Python finds 1, 1.0 and True equal, and 0.0 and -0.0, but no NaN.

    >>> exact(1) == exact(True), exact(0.0) == exact(-0.0), exact(float("nan")) == exact(float("nan"))
    (False, False, True)
    """
    kind = type(x)
    if isinstance(x, np.generic):
        return kind, x.tobytes()
    if isinstance(x, float):
        return kind, x.hex()
    if isinstance(x, complex):
        return kind, x.real.hex(), x.imag.hex()
    if isinstance(x, tuple):
        return kind, *map(exact, x)
    if isinstance(x, frozenset):
        return kind, frozenset(map(exact, x))
    return kind, x


class ValueSnapshot:
    """A snapshot of the values of some keys of dicts, such as the attributes of objects.

    Args:
        dicts: each dict with the keys that count.

    Example:
        >>> options = {"scale": 2.0, "calls": 1}
        >>> snapshot = ValueSnapshot([(options, ["scale"])])
        >>> options["scale"] = 3.0
        >>> snapshot.changed()
        'scale'
    """

    def __init__(self, dicts: Iterable[tuple[dict[str, Any], Iterable[str]]]) -> None:
        self._snapshots: dict[object, list[object]] = {}
        """The values for each key, in the order of the readers."""
        self._watch([(d, own) for d, names in dicts if (own := list(names))])
        self.changed()

    def _watch(self, dicts: list[tuple[dict[str, Any], list[str]]]) -> None:
        self._dicts = dicts
        # Read dict by dict in half the time of one by one; two names at least give a tuple.
        pairs = [(d, names if len(names) > 1 else names * 2) for d, names in dicts]
        self._readers = [(itemgetter(*names), d) for d, names in pairs]
        self._places = [(id(d), name) for d, names in pairs for name in names]

    def changed(self, key: object = None) -> str:
        """Return the name of the first value that changed; "" if nothing did.

        Args:
            key: calls with another one have values of their own.
        """
        try:
            rows = [get(d) for get, d in self._readers]
        except KeyError as error:  # a name was removed
            return str(error.args[0])
        before = self._snapshots.get(key)
        if before is not None and all(map(is_, chain.from_iterable(rows), before)):
            return ""
        now = list(chain.from_iterable(rows))
        before = now if before is None else before
        for (_, name), x, y in zip(self._places, now, before, strict=True):
            if x is not y and not _compute_the_same(x, y):
                return name
        self._snapshots[key] = now
        return ""

    @contextmanager
    def ignoring_own_changes(self) -> Iterator[None]:
        """A context in which the program runs: values that it changes are not watched any more."""
        before = [(d, name, d.get(name)) for d, names in self._dicts for name in names]
        try:
            yield
        finally:
            changed = {
                (id(d), name)
                for d, name, value in before
                if d.get(name) is not value and not _compute_the_same(d.get(name), value)
            }
            if changed:
                self._stop_watching(changed)

    def _stop_watching(self, changed: Collection[tuple[int, str]]) -> None:
        known = {key: dict(zip(self._places, row, strict=True)) for key, row in self._snapshots.items()}
        kept = [(d, [name for name in names if (id(d), name) not in changed]) for d, names in self._dicts]
        self._watch([(d, names) for d, names in kept if names])
        self._snapshots = {key: [values[place] for place in self._places] for key, values in known.items()}


def _compute_the_same(now: object, before: object) -> bool:
    """Return whether two values are exactly equal; False if comparing raises, as a tensor in a value's place may."""
    try:
        return bool(exact(now) == exact(before))
    except (RuntimeError, ValueError, TypeError):
        return False
