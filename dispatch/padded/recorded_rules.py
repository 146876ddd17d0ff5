"""Recorded rules: the torch calls that a rule made, repeated for calls that are alike without the rule.

A rule decides by dims, fills and dtypes what to fill and to mask, then calls torch on storages:

    x.sum(1)    t0 = torch.where(sizes.mask(dims, (1,)), x, 0)
                t1 = Tensor.sum(t0, 1)                              return t1

For the next call with the same dims, fills, dtypes and arguments it would call the same functions. So a `RuleRecording`
notes them, with what each tensor among their arguments is: an operand's storage, an earlier result, a mask of the true
sizes, or their values. A rule that gets a tensor elsewhere, or reads what a tensor holds, can't be repeated. A
`SingleOp` is a call that was recorded so, and its outcomes are what the recordings gave.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import BuiltinFunctionType, CodeType, FunctionType, MethodDescriptorType, WrapperDescriptorType
from typing import NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode

from subtensors.dispatch.ops.tree import Args, Kwargs, PyTree
from subtensors.dispatch.padded.interpreter import PaddedCall
from subtensors.dispatch.padded.padded_size import PaddedSize
from subtensors.dispatch.padded.padded_value import Layout, PaddedValue, layout_of
from subtensors.dispatch.padded.true_sizes import TrueSizes, noting

Program = Callable[[Sequence[PyTree], TrueSizes], PyTree]
"""Takes the arguments of a call, storages in place of PaddedTensors; returns the storage of its result, or a list."""

LISTS = frozenset([tuple, list])
BINDINGS = frozenset([BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType])
"""The types of torch's own bindings of ops, which take the host less time than an op's overload."""

_METADATA = frozenset(
    """shape dtype device ndim is_cuda is_meta is_cpu requires_grad dim size numel is_floating_point is_complex
    result_type is_tensor""".split()
)
"""Functions whose answers follow from what calls that are alike have in common."""

_OF_VALUES = frozenset(
    """nonzero nonzero_numpy argwhere masked_select unique _unique _unique2 unique_consecutive unique_dim
    unique_dim_consecutive repeat_interleave bincount one_hot arange tensor_split _pack_padded_sequence""".split()
)
"""Functions whose results have a shape that values decide, beside `where` of a condition: `arange` of tensors only."""

_CONSTANTS = (int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None))


class _UnrepeatableError(Exception):
    """A call that another run of the rule may make otherwise."""


class RuleRecording(TorchFunctionMode):
    """A context in which a rule runs once; then `program` repeats its calls.

    Args:
        operands: the arguments of the call, storages in place of PaddedTensors.
        sizes: their true sizes.
        shortened: returns another function and arguments that make the same call, which torch runs faster; or None.
    """

    def __init__(
        self,
        operands: Sequence[PyTree],
        sizes: TrueSizes,
        shortened: Callable[[Callable[..., PyTree], Args, Kwargs], tuple[Callable[..., PyTree], Args] | None],
    ) -> None:
        super().__init__()
        self._sizes, self._shortened = sizes, shortened
        self._reads = noting.host_reads
        self._names: dict[int, str] = {}
        self._alive: list[PyTree] = [operands]
        self._lines: list[str] = []
        self._constants: dict[str, PyTree] = {}
        self._is_repeatable = True
        for i, x in enumerate(operands):
            for name, t in [(f"given[{i}]", x)] if isinstance(x, Tensor) else _listed(f"given[{i}]", x):
                self._names.setdefault(id(t), name)

    @property
    def reads_host(self) -> bool:
        """Return whether the rule asked the host for a true size: its calls are those for these sizes alone."""
        return noting.host_reads != self._reads

    def __torch_function__(
        self, func: Callable[..., PyTree], types: Iterable[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> PyTree:
        """Run a call and note it."""
        out = func(*args, **(kwargs or {}))
        if self._is_repeatable:
            self._alive.append((args, kwargs, out))  # no other tensor gets the id of one of these
            try:
                self._note(func, args, kwargs or {}, out)
            except _UnrepeatableError:
                self._is_repeatable = False
                self._alive.clear()
        return out

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
        if name in _OF_VALUES and (name != "arange" or any(isinstance(x, Tensor) for x in args)):
            raise _UnrepeatableError
        if (name == "where" and len(args) + len(kwargs) == 1) or _has_mask(name, args, kwargs):
            raise _UnrepeatableError
        short = self._shortened(func, args, kwargs)
        if short is not None:
            func, args, kwargs = *short, {}
        is_fill = func is torch.where and len(args) == 3 and isinstance(args[2], float | int)
        if is_fill and args[1].is_cpu and args[1].dtype == outs[0].dtype:
            # Torch would make a tensor of the number in each call.
            number = torch.full((), args[2], dtype=args[1].dtype, device=args[1].device)
            self._names[id(number)] = self._constant(number)
            args = *args[:2], number
            self._alive.append(args)
        values = [*map(self._text, args), *(f"{key}={self._text(x)}" for key, x in kwargs.items())]
        if self._lines and not self._sizes.values.is_cpu:
            raise _UnrepeatableError
        new = f"t{len(self._lines)}"
        self._lines.append(f"{new} = {self._constant(func)}({', '.join(values)})")
        for key, t in [(new, out)] if isinstance(out, Tensor) else _listed(new, out):
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
        if not isinstance(x, (*_CONSTANTS, torch.Size, type(...))):
            raise _UnrepeatableError
        return repr(x) if kind in (int, bool, type(None)) else self._constant(x)

    def _size_text(self, x: Tensor) -> str:
        """Return the expression of a tensor that is made of true sizes."""
        if not self._sizes.values.is_cpu:  # what a GPU runs may be captured, with sizes of its own
            raise _UnrepeatableError
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

    def program(self, results: Sequence[Tensor], several: bool) -> Program | None:
        """Return the calls as a function; None if they may differ another time.

        Args:
            results: what it returns, tensors that the rule's calls made or got.
            several: whether it returns a list of them.
        """
        names = [self._names.get(id(t)) for t in results]
        if not self._is_repeatable or None in names:
            return None
        source = "\n    ".join([*self._lines, f"return {names if several else names[0]}".replace("'", "")])
        return FunctionType(_compiled(source), self._constants)


@functools.lru_cache(4096)
def _compiled(source: str) -> CodeType:
    found: dict[str, PyTree] = {}
    exec(f"def program(given, sizes):\n    {source}", found)  # the text above
    code: CodeType = found["program"].__code__
    return code


def _listed(name: str, values: PyTree) -> list[tuple[str, Tensor]]:
    """Return the tensors of a list, each with its expression."""
    if not isinstance(values, tuple | list):
        return []
    return [(f"{name}[{i}]", t) for i, t in enumerate(values) if isinstance(t, Tensor)]


def _has_mask(name: str, args: Args, kwargs: Kwargs) -> bool:
    """Return whether a call is a read at an index with a mask, whose values decide how much is read."""
    if name not in ("__getitem__", "index", "_unsafe_index"):
        return False
    index = args[1] if len(args) > 1 else kwargs.get("indices")
    parts = index if isinstance(index, tuple | list) else (index,)
    return any(isinstance(t, Tensor) and t.dtype in (torch.bool, torch.uint8) for t in parts)


class Outcome(NamedTuple):
    """The torch calls of a rule, and what it makes of their results.

    Args:
        program: the calls.
        layouts: of each result; None of one that is a plain tensor.
        views: "" if no result is a view, "of the first" if the first argument is the only tensor, else "of any".
    """

    program: Program
    layouts: list[Layout | None]
    views: str


class Note(Enum):
    """States of a call without an outcome."""

    SEEN = "it came once"
    BY_HOST = "there is an outcome for each of its true sizes"
    UNREPEATABLE = "its rule may call something else another time"


class Place(NamedTuple):
    """The place of an argument of the call among those of its op."""

    at: int


@dataclass(eq=False)
class SingleOp:
    """A call that is one op.

    Args:
        op: the op.
        args, kwargs: its arguments, with a place for each tensor and each float that the call was given.
        fixed: the text of floats without a place, by their position in the call.
        results: the type of several results; None of a single one.
        writes: True if it writes to all of the first argument's storage, whose padding is undefined.
        outcomes: by the floats of a call, and where the rule asked for true sizes by those, too.
    """

    op: OpOverload
    args: Sequence[PyTree]
    kwargs: Mapping[str, PyTree]
    fixed: Mapping[int, str] = field(default_factory=dict)
    results: type | None = None
    writes: bool = False
    outcomes: dict[object, Outcome | Note] = field(default_factory=dict)


def outcome_of(
    recording: RuleRecording, outs: Sequence[PaddedValue], sizes: TrueSizes, given: Sequence[PyTree], several: bool
) -> Outcome | Note:
    """Return the outcome of a call whose rule was recorded.

    Args:
        recording: the calls that the rule made.
        outs: its results.
        sizes: the true sizes of the operands.
        given: the arguments of the call.
        several: whether the result is a container.
    """
    program = recording.program([x.dense for x in outs], several)
    if program is None or any(x.view == "copy" or (x.sizes is not sizes and x.padded_dims) for x in outs):
        return Note.UNREPEATABLE
    layouts = [
        layout_of(x.dims, x.dtype, x.dense.device, x.fill, x.view, repr(x.fill)) if x.padded_dims else None
        for x in outs
    ]
    others = (isinstance(x, Tensor) or has_tensors(x) for x in given[1:])
    of_first = isinstance(given[0], Tensor) and all(layouts) and not any(others)
    views = "" if not any(x.view for x in outs) else "of the first" if of_first else "of any"
    return Outcome(program, layouts, views)


def bindings(
    func: Callable[..., PyTree] | None, call: PaddedCall, single: SingleOp, operands: Sequence[PyTree]
) -> Callable[[Callable[..., PyTree], Args, Kwargs], tuple[Callable[..., PyTree], Args] | None]:
    """Return a function that makes calls of the op to calls of `func`, where these do the same.

    Args:
        func: the function that was called by position; None if it was not.
        call, single: the call of the op.
        operands: the arguments of `func`, with storages.
    """
    bound = dict(call.arguments)
    templates = {**dict(zip(bound, single.args, strict=False)), **single.kwargs}

    def bound_call(op: Callable[..., PyTree], args: Args, named: Kwargs) -> tuple[Callable[..., PyTree], Args] | None:
        if op is not call.op or func is None or type(func) not in BINDINGS:
            return None
        given = [None if isinstance(x, Tensor) or has_tensors(x) else x for x in operands]
        for (name, own), x in zip(bound.items(), (*args, *named.values()), strict=True):
            place = templates.get(name)
            if type(place) is not Place:
                if type(x) is not type(own) or x != own:
                    return None
                continue
            before, operand = given[place.at], operands[place.at]
            if not _is_alike(x, operand) or not (before is None or before is operand or before is x):
                return None
            given[place.at] = x
        is_whole = all(x is not None or y is None for x, y in zip(given, operands, strict=True))
        return (func, tuple(given)) if is_whole else None

    return bound_call


def _is_alike(x: PyTree, y: PyTree) -> bool:
    """Return whether a function takes two arguments alike: tensors of one shape and dtype, or equal values."""
    if isinstance(x, Tensor):
        return isinstance(y, Tensor) and x.shape == y.shape and x.dtype == y.dtype
    if has_tensors(x):
        return len(x) == len(y) and all(map(_is_alike, x, y))
    return bool(x == y)


def has_tensors(x: PyTree) -> bool:
    """Return whether an argument is a list of tensors, as `cat` takes."""
    return type(x) in LISTS and any(isinstance(t, Tensor) for t in x)
