"""Recorded rules: the torch calls that the rules of a call made, repeated without the rules for calls that are alike.

A rule decides by dims, fills and dtypes what to fill and to mask, then calls torch on storages:

    x.sum(1)    t0 = torch.where(sizes.mask(dims, (1,)), x, 0)
                t1 = Tensor.sum(t0, 1)                              return t1

For the next call with the same dims, fills, dtypes and arguments it would call the same functions. So a `RuleRecording`
notes them, with what each tensor among their arguments is: an operand's storage, an earlier result, a mask of the true
sizes, or their values. A rule that gets a tensor elsewhere, or reads what a tensor holds, can't be repeated. Where
autograd tracks an operand, the trackers of its gradient are made anew, connected as the rules connected them.
"""

from __future__ import annotations

import builtins
import functools
import re
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from types import CodeType, FunctionType, MethodType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from subtensors.dispatch.ops.tree import Args, Kwargs, PyTree
from subtensors.dispatch.padded.gradient_masking import GradientTracker
from subtensors.dispatch.padded.padded_size import PaddedSize
from subtensors.dispatch.padded.padded_value import Layout, PaddedValue
from subtensors.dispatch.padded.size_conditions import noting
from subtensors.dispatch.padded.true_sizes import TrueSizes
from subtensors.dispatch.torch_internals.ops import binding_of

Program = Callable[[Sequence[PyTree], TrueSizes, Sequence[GradientTracker], Sequence[PyTree]], PyTree]
"""Takes the arguments of a call with storages in place of PaddedTensors, true sizes, trackers, and the arguments
themselves; returns what the call does."""

Wrapper = Callable[[Tensor, Layout, TrueSizes, GradientTracker | None], Tensor]
"""Makes a result of a storage."""

_METADATA = frozenset(
    """shape dtype device ndim is_cuda is_meta is_cpu requires_grad dim size numel is_floating_point is_complex
    result_type is_tensor""".split()
)
"""Functions whose answers follow from what calls that are alike have in common."""

_OF_VALUES = frozenset(
    """nonzero nonzero_numpy argwhere masked_select unique _unique _unique2 unique_consecutive unique_dim
    unique_dim_consecutive repeat_interleave bincount one_hot arange tensor_split _pack_padded_sequence
    linalg_lstsq _ctc_loss""".split()
)
"""Functions whose results have a shape that values decide, beside `where` of a condition: `arange` of tensors only."""

_CONSTANTS = (int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None))


class _UnrepeatableError(Exception):
    """A call that another run of the rule may make otherwise."""


TrackerNote = tuple[bool, int, Sequence[Sequence[int]]]
"""A tracker: whether its gradient is masked, its uses, and the indices of its conditions."""


class Record(NamedTuple):
    """The torch calls of a call's rules.

    Args:
        program: the calls, and what the call makes of their results.
        trackers: one entry a tracker, first those of the operands.
        writes: True if it writes to all of the first argument's storage, whose padding is undefined.
        plain_views: the indices of plain results that share an argument's memory; None where no result remembers what
            it is a view of.
    """

    program: Program
    trackers: Sequence[TrackerNote]
    writes: bool
    plain_views: Sequence[int] | None


class Note(Enum):
    """States of a call without a record."""

    SEEN = "it came once"
    READS_HOST = "there is a record for each of its true sizes"
    UNREPEATABLE = "its rules may call something else another time"


class RuleRecording(TorchFunctionMode):
    """A context in which the rules of a call run once; then `record` repeats their calls.

    Args:
        sources: the arguments of the call, by position and then by name.
        sizes: the true sizes of its tensors.
    """

    def __init__(self, sources: Sequence[PyTree], sizes: TrueSizes) -> None:
        super().__init__()
        self._sources, self._sizes = sources, sizes
        self._reads, self._outer = noting.host_reads, noting.recording
        self._grad = torch.is_grad_enabled()
        self._names: dict[int, str] = {}
        self._alive: list[PyTree] = []
        self._lines: list[str] = []
        # C++ that imports a module, as autograd's anomaly mode does, looks for builtins in the frame that called it.
        self._constants: dict[str, PyTree] = {"__builtins__": builtins}
        self._trackers: list[GradientTracker] = []
        self.is_repeatable = True

    @property
    def reads_host(self) -> bool:
        """Return whether a rule asked the host for a true size: its calls are those for these sizes alone."""
        return noting.host_reads != self._reads

    def add_operand(self, x: Tensor, value: PaddedValue) -> None:
        """Note the value of a tensor among the arguments."""
        if value.sizes is not None:
            value.sizes = self._sizes  # of tensors padded apart, too: the host knows that they agree
        self._alive.append(value)
        self._names.setdefault(id(value.dense), next(name for name, t in _listed("given", self._sources) if t is x))
        if value.tracker is not None:
            self._tracker(value.tracker)

    def __enter__(self) -> RuleRecording:
        super().__enter__()  # type: ignore[no-untyped-call]
        noting.recording = self.note
        return self

    def __exit__(self, *error: object) -> None:
        noting.recording = self._outer
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Callable[..., PyTree], types: Iterable[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> PyTree:
        """Run a call and note it."""
        out = func(*args, **(kwargs or {}))
        self.note(func, args, kwargs or {}, out)
        return out

    def note(self, func: Callable[..., PyTree], args: Args, kwargs: Kwargs, out: PyTree) -> None:
        """Note a call that was made."""
        if not self.is_repeatable:
            return
        self._alive.append((args, kwargs, out))  # no other tensor gets the id of one of these
        try:
            self._note(func, args, kwargs, out)
        except _UnrepeatableError:
            self.is_repeatable = False

    def _note(self, func: Callable[..., PyTree], args: Args, kwargs: Kwargs, out: PyTree) -> None:
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = getattr(getattr(func, "__self__", None), "__name__", "")
        outs = list(out) if isinstance(out, tuple | list) else [out]
        if not any(isinstance(t, Tensor) for t in outs):
            if name not in _METADATA and out is not None:
                raise _UnrepeatableError
            if out is not None:
                return
        name = name.partition(".")[0]  # of an op's overload
        if name == "_set_grad_enabled":
            return
        if torch.is_grad_enabled() != self._grad:
            raise _UnrepeatableError  # in an autograd function, whose backward isn't that of its calls
        if name in _OF_VALUES and (name != "arange" or any(isinstance(x, Tensor) for x in args)):
            raise _UnrepeatableError
        if (name == "where" and len(args) + len(kwargs) == 1) or _has_mask(name, args, kwargs):
            raise _UnrepeatableError
        values = [*map(self._text, args), *(f"{key}={self._text(x)}" for key, x in kwargs.items())]
        new = f"t{len(self._lines)}"
        self._lines.append(f"{new} = {self._constant(binding_of(func, kwargs))}({', '.join(values)})")
        for key, t in _listed(new, out):
            self._names[id(t)] = key  # an argument that is returned may be copied the next time

    def _text(self, x: PyTree) -> str:
        """Return the expression of an argument."""
        if isinstance(x, Tensor):
            return self._names.get(id(x)) or self._size_text(x)
        kind = type(x)
        if isinstance(x, PaddedSize):
            return str(int(x))
        if kind is list or kind is tuple:
            inner = "".join(f"{self._text(y)}, " for y in x)
            return f"[{inner}]" if kind is list else f"({inner})"
        if kind is slice:
            return f"slice({self._text(x.start)}, {self._text(x.stop)}, {self._text(x.step)})"
        if kind is MethodType and isinstance(x.__self__, GradientTracker):
            return f"trackers[{self._tracker(x.__self__)}].{x.__name__}"
        if not isinstance(x, (*_CONSTANTS, torch.Size, type(...))) and not (kind is FunctionType and not x.__closure__):
            raise _UnrepeatableError
        return repr(x) if kind in (int, bool, type(None)) else self._constant(x)

    def _size_text(self, x: Tensor) -> str:
        """Return the expression of a tensor that is made of true sizes."""
        if x is self._sizes.values:
            return "sizes.values"
        for key, mask in self._sizes.masks.items():
            if mask is x and isinstance(key, tuple) and isinstance(key[0], tuple):  # as `TrueSizes.mask` keeps it
                return f"sizes.mask(*{self._constant(key)})"
        raise _UnrepeatableError

    def _constant(self, x: PyTree) -> str:
        name = f"c{len(self._constants)}"
        self._constants[name] = x
        return name

    def _tracker(self, tracker: GradientTracker) -> int:
        """Return the index of a tracker, which gets one if it is new."""
        at = next((i for i, known in enumerate(self._trackers) if known is tracker), len(self._trackers))
        if at == len(self._trackers):
            self._trackers.append(tracker)
        return at

    def record(
        self, values: Sequence[PaddedValue | Tensor | None], kind: type, writes: bool, wrap: Wrapper
    ) -> Record | Note:
        """Return the calls, to repeat them.

        Args:
            values: what the call returns: arguments, and values; nothing if it did more than that, or failed.
            kind: the type of its result, or of the container of several.
            writes: as in `Record`.
            wrap: makes the results.
        """
        is_single = issubclass(kind, Tensor)
        if not (self.is_repeatable and self._lines and values and (is_single or kind in _KINDS)):
            return Note.UNREPEATABLE
        names, results = list[str](), list[str]()
        for x in values:
            if not isinstance(x, PaddedValue):
                names += [f"arguments[{i}]" for i, source in enumerate(self._sources) if source is x][:1]
                results += names[-1:]
                continue
            if id(x.dense) not in self._names or (x.sizes is not self._sizes and x.padded_dims):
                return Note.UNREPEATABLE
            name = self._names[id(x.dense)]
            names.append(name)
            if x.padded_dims:
                own = None if x.tracker is None else f"trackers[{self._tracker(x.tracker)}]"
                name = f"{self._constant(wrap)}({name}, {self._constant(x.layout())}, sizes, {own})"
            results.append(name)
        if len(names) < len(values) or len({*names}) < len(names):
            return Note.UNREPEATABLE
        made = results[0] if is_single else f"{self._constant(kind)}(({', '.join(results)},))"
        trackers = []
        for tracker in self._trackers:  # which grow while their conditions are read
            each = [[self._tracker(result) for result in results] for results in tracker.conditions]
            trackers.append((tracker.is_masked, tracker.uses, each))
        source = "\n    ".join([*_freeing(self._lines, names), f"return {made}"])
        program = FunctionType(_compiled(source), self._constants)
        views = {x.view for x in values if isinstance(x, PaddedValue) and x.view}
        has_views = "copy" in views or ("alias" in views and torch.is_grad_enabled())
        given = [(i, x) for i, x in enumerate(values) if isinstance(x, PaddedValue)]
        plain = [i for i, x in given if x.view == "alias" and not x.padded_dims]
        return Record(program, trackers, writes, plain if has_views else None)


_KINDS = {tuple, list, *(kind for kind in vars(torch.return_types).values() if isinstance(kind, type))}


def _freeing(lines: Sequence[str], kept: Sequence[str]) -> list[str]:
    """Return lines that free each result after its last use, but for what is returned."""
    last = {name: i for i, line in enumerate(lines) for name in re.findall(r"\bt\d+\b", line)}
    for name in re.findall(r"\bt\d+\b", " ".join(kept)):
        last.pop(name, None)
    ends = {i: " = ".join(name for name, at in last.items() if at == i) for i in {*last.values()}}
    return [f"{line}; {ends[i]} = None" if i in ends else line for i, line in enumerate(lines)]


@functools.lru_cache(4096)
def _compiled(source: str) -> CodeType:
    found: dict[str, PyTree] = {}
    exec(f"def program(given, sizes, trackers, arguments):\n    {source}", found)  # the text above
    code: CodeType = found["program"].__code__
    return code


def _listed(name: str, values: PyTree) -> list[tuple[str, Tensor]]:
    """Return the tensors of a tree of lists, each with its expression."""
    if isinstance(values, Tensor):
        return [(name, values)]
    parts = values if isinstance(values, tuple | list) else ()
    return [found for i, part in enumerate(parts) for found in _listed(f"{name}[{i}]", part)]


def _has_mask(name: str, args: Args, kwargs: Kwargs) -> bool:
    """Return whether a call is a read at an index with a mask, whose values decide how much is read."""
    if name not in ("__getitem__", "index", "_unsafe_index"):
        return False
    index = args[1] if len(args) > 1 else kwargs.get("indices")
    parts = index if isinstance(index, tuple | list) else (index,)
    return any(isinstance(t, Tensor) and t.dtype in (torch.bool, torch.uint8) for t in parts)
