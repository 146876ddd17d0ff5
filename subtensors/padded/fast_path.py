"""Repeats of calls: a call that is like an earlier one runs the torch calls that the rules made then.

In torch's dispatcher every tensor of a call is replaced by a placeholder and back, and rules look at dims and fills,
which takes the host longer than the ops themselves. A call of the same function is alike if its other arguments are the
same, its tensors have the same layouts, and autograd tracks the same ones; with autocast and every mode off, nothing
between the function and the torch calls of its rules can change them. So when a call comes a second time these are
recorded (`recorded_rules.py`), and from then on a call is these calls on the storages, masks that the true sizes hold,
and new wrappers. If a rule asked the host for true sizes, its record is one of these sizes alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn import functional

from subtensors.dispatch.ops.plain_types import PLAIN_TYPES
from subtensors.dispatch.ops.tree import Args, Kwargs, PyTree, tree_has, tree_map_only
from subtensors.dispatch.padded import rules
from subtensors.dispatch.padded.gradient_masking import GradientTracker
from subtensors.dispatch.padded.interpreter import is_observed
from subtensors.dispatch.padded.padded_size import PADDED_SIZES, PaddedSize
from subtensors.dispatch.padded.padded_value import PaddedValue
from subtensors.dispatch.padded.recorded_rules import Record, Result, RuleRecording
from subtensors.dispatch.padded.size_conditions import noting
from subtensors.dispatch.padded.true_sizes import TrueSizes
from subtensors.dispatch.torch_internals import dispatcher
from subtensors.padded.autograd import unwrap_with_grad, wrap_results, wrap_with_grad
from subtensors.padded.padded_tensor import PaddedTensor, fill_of, wrap_layout
from subtensors.padded.views import is_current, refresh_copies, remember_aliases, remember_views

aten = torch.ops.aten

MAX_CALLS = 4096
"""The most calls that are known at a time."""

SHAPE_OPS: dict[Callable[..., PyTree], OpOverload] = {
    Tensor.view: aten.view.default,
    Tensor.reshape: aten.reshape.default,
    torch.reshape: aten.reshape.default,
    Tensor.expand: aten.expand.default,
    Tensor.repeat: aten.repeat.default,
    Tensor.new_zeros: aten.new_zeros.default,
    Tensor.new_ones: aten.new_ones.default,
    Tensor.new_empty: aten.new_empty.default,
}
"""Functions of a list of sizes, or of as many arguments, and the op that each is."""

_TENSORS = frozenset([PaddedTensor, *PLAIN_TYPES])
_LISTS = frozenset([tuple, list])
_SEQUENCES = frozenset([tuple, list, torch.Size])
_INTS = PADDED_SIZES | {int}
_INDICES = frozenset([int, type(None), type(...)])
_CONSTANTS = frozenset([int, bool, str, type(None), torch.dtype])


class Known(NamedTuple):
    """The record of a call, and what it makes of the results.

    Args:
        record: the torch calls of its rules.
        kind: the type of several results; None of a single one.
        is_tracked: whether autograd tracks an argument.
        writes: True if it writes to all of the first argument's storage, whose padding is undefined.
        views: "" if results remember no base, "of the first" if the first argument is the only tensor, else "of any".
    """

    record: Record
    kind: type | None
    is_tracked: bool
    writes: bool
    views: str


Key = tuple[object, ...]

_calls: dict[Key, Known | str] = {}
"""What is known of each call: its record, or that it came once, reads true sizes, or may be another one next time."""
_SEEN, _READS_HOST, _UNREPEATABLE = "seen", "reads host", "unrepeatable"

repeated_functions: set[Callable[..., PyTree]] = {functional.dropout, *SHAPE_OPS}
"""The functions of which some call is recorded."""


class CallKey:
    """The part of a call that decides which torch calls it is, and its arguments.

    Args:
        func, args, kwargs: the call.

    Raises:
        KeyError: there is an argument of another type, or one about which the torch calls may depend on more.
    """

    def __init__(self, func: Callable[..., PyTree], args: Args, kwargs: Kwargs) -> None:
        if func in SHAPE_OPS:
            if len(args) > 1 and type(args[1]) in _INTS:
                args = args[0], args[1:]
            func = SHAPE_OPS[func]
        self.sources = (*args, *kwargs.values()) if kwargs else args
        self.sizes: TrueSizes | None = None
        """The true sizes of all its padded operands."""
        self.is_tracked = False
        self._grad = torch.is_grad_enabled()
        self._tensors: list[int] = []
        self._values: list[object] = [
            func, torch.get_default_dtype(), self._grad, torch.is_inference_mode_enabled(),
            torch._C._get_deterministic_algorithms(), *kwargs,
        ]  # fmt: skip
        self.operands = self._add(self.sources, func is Tensor.__getitem__)
        """The arguments, by position and then by name, with storages in place of PaddedTensors."""
        tensors = self._tensors
        if len(tensors) > 1 and len({*tensors}) < len(tensors):
            # One tensor that is given twice is no two tensors.
            self._values.append(tuple(map(tensors.index, tensors)))
        if self.sizes is None:
            raise KeyError
        # Rules compare sizes for every value up to their buckets, which are part of the key.
        self.values = tuple(self._values)

    def _add(self, given: Sequence[PyTree], is_index: bool = False) -> list[PyTree]:
        values, operands = self._values, list[PyTree]()
        for x in given:
            kind = type(x)
            if kind is PaddedTensor:
                own, dense, layout = x._sizes, x._dense, x._layout
                self._meet(own)
                if type(dense) not in PLAIN_TYPES or not (x._view_source is None or is_current(x)):
                    raise KeyError
                # A fill that a write to the storage made stale is none.
                values.append(layout if x._fill_version is None or fill_of(x) is layout.fill else (layout, "stale"))
                operands.append(dense)
                self._add_tensor(x, dense)
            elif kind in PLAIN_TYPES:
                values += (x.shape, x.dtype, x.device)
                operands.append(x)
                self._add_tensor(x, x)
            elif kind is float:
                values += (kind, x if x and x == x else repr(x))  # the sign of a zero matters, and NaN is not NaN
                operands.append(x)
            elif kind in _CONSTANTS:
                values += (kind, x)
                operands.append(x)
            elif kind is slice or (is_index and kind is tuple):
                values.append(_index_key(x))
                operands.append(x)
            elif kind in PADDED_SIZES:
                self._meet(x.sizes)
                values.append((x.text, int(x)))
                operands.append(int(x))
            elif kind in _SEQUENCES and _INTS.issuperset(kinds := {*map(type, x)}):
                values += (kind, tuple(x))
                for n in x if kinds & PADDED_SIZES else ():
                    if isinstance(n, PaddedSize):
                        self._meet(n.sizes)
                        values.append(n.text)
                # Torch reads plain ints much faster.
                operands.append([*map(int, x)])
            elif kind in _LISTS and _TENSORS.issuperset(kinds):
                values += (kind, len(x))
                operands.append(self._add(x))
            else:
                raise KeyError
        return operands

    def _meet(self, sizes: TrueSizes | None) -> None:
        if sizes is not self.sizes:
            if sizes is None or not (self.sizes is None or self.sizes.agree_with(sizes)):
                raise KeyError
            self.sizes = sizes if self.sizes is None else self.sizes
            self._values.append(sizes.kind)

    def _add_tensor(self, x: Tensor, dense: Tensor) -> None:
        self._tensors.append(id(dense))
        if self._grad:
            with torch._C.DisableTorchFunctionSubclass():
                self._values.append(x.requires_grad)
                self.is_tracked = self.is_tracked or x.requires_grad


def _index_key(index: PyTree) -> tuple[object, ...]:
    """Return the key of an index of ints, slices of ints, None and `...`."""
    parts: list[object] = []
    for x in index if type(index) is tuple else (index,):
        found = (x.start, x.stop, x.step) if type(x) is slice else (x,)
        if not _INDICES.issuperset(map(type, found)):
            raise KeyError
        parts.append(found)
    return tuple(parts)


def _known(call: CallKey) -> tuple[Key, Known | str | None]:
    """Return the key under which a call is known, and what is known of it."""
    key, sizes = call.values, call.sizes
    known = _calls.get(key)
    if known is _READS_HOST and sizes is not None:
        # With sizes to be noted the rules run in every call.
        key = key, sizes.host() if sizes.known_on_host else None
        known = _UNREPEATABLE if noting.into is not None else _calls.get(key)
    return key, known


def try_fast_path(func: Callable[..., PyTree], args: Args, kwargs: Kwargs) -> PyTree:
    """Repeat a call that is recorded; return NotImplemented for any other."""
    if func is functional.dropout and _drops_nothing(*args, **kwargs):
        return args[0]
    if dispatcher.is_intercepted() or is_observed():
        return NotImplemented
    try:
        call = CallKey(func, args, kwargs)
    except KeyError:
        return NotImplemented
    known = _known(call)[1]
    return _repeat(known, call, func, args, kwargs) if type(known) is Known else NotImplemented


def _drops_nothing(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> bool:
    return not training and 0 <= p <= 1


def _repeat(known: Known, call: CallKey, func: Callable[..., PyTree], args: Args, kwargs: Kwargs) -> PyTree:
    record, kind, is_tracked, writes, views = known
    sizes, operands = call.sizes, call.operands
    assert sizes is not None
    trackers: list[GradientTracker] = []
    if is_tracked:
        opened: dict[int, Tensor] = {}

        def storage(x: PaddedTensor) -> Tensor:
            if id(x) not in opened:
                value = unwrap_with_grad(x)
                opened[id(x)] = value.dense
                trackers.extend([] if value.tracker is None else [value.tracker])
            return opened[id(x)]

        operands = tree_map_only(PaddedTensor, storage, [*call.sources])
        trackers += [GradientTracker(is_masked) for is_masked, *_ in record.trackers[len(trackers) :]]
        for tracker, (_, uses, conditions) in zip(trackers, record.trackers, strict=True):
            tracker.uses = uses
            tracker.conditions = [[trackers[i] for i in each] for each in conditions]
    found = record.program(operands, sizes, trackers)
    if writes:
        refresh_copies(args[0])
    given = zip(record.results, found, strict=True)
    listed = [_wrapped(result, t, call, is_tracked, trackers) for result, t in given]
    results = listed[0] if kind is None else kind(listed)
    if views == "of the first":
        remember_aliases(func, args, kwargs, results)
    elif views:
        plain = [t for t, result in zip(listed, record.results, strict=True) if result.layout is None]
        remember_views(func, args, kwargs, results, plain)
    return results


def _wrapped(result: Result, t: Tensor, call: CallKey, is_tracked: bool, trackers: Sequence[GradientTracker]) -> Tensor:
    layout, argument, tracker = result
    if argument is not None:
        returned: Tensor = call.sources[argument]
        return returned
    if layout is None:
        return t
    if not is_tracked:
        return wrap_layout(t, layout, call.sizes)
    known = None if tracker is None else trackers[tracker]
    return wrap_with_grad(PaddedValue(t, layout.dims, call.sizes, layout.fill, layout.view, known))


class CallRecording:
    """The first runs of a call by rules, of which the second one is recorded.

    Args:
        func, args, kwargs: the call.
    """

    def __init__(self, func: Callable[..., PyTree], args: Args, kwargs: Kwargs) -> None:
        self.context: RuleRecording | contextlib.nullcontext[None] = contextlib.nullcontext()
        """What the rules run in."""
        self._func, self._is_first_named = func, not args
        if dispatcher.is_intercepted() or is_observed():
            return
        try:
            self._call = CallKey(func, args, kwargs)
        except KeyError:
            return
        self._key, known = _known(self._call)
        if known is None:
            # A number that a program computes, or a size, may never come again.
            _remember(self._key, _SEEN)
        elif known is _SEEN and self._call.sizes is not None:
            self.context = RuleRecording(self._call.sources, self._call.sizes, None if kwargs else func)

    def value(self, x: Tensor) -> PaddedValue:
        """Return the value of an argument, as rules take it."""
        value = unwrap_with_grad(x)
        if isinstance(self.context, RuleRecording):
            self.context.add_operand(x, value)
        return value

    def stop(self) -> None:
        """Keep no record: the call does something that another one may do otherwise."""
        if isinstance(self.context, RuleRecording):
            self.context.is_repeatable = False

    def end(self, values: Sequence[PaddedValue | Tensor | None], kind: type, writes: bool = False) -> None:
        """Keep the record.

        Args:
            values: what the call returns: arguments, and values; nothing if it did more than that, or failed.
            kind: the type of its result, or of the container of several.
            writes: as in `Known`.
        """
        recording = self.context
        if not isinstance(recording, RuleRecording):
            return
        sources = self._call.sources
        results: list[PaddedValue | int] = []
        for x in values:
            if isinstance(x, PaddedValue):
                results.append(x)
            else:
                results += [i for i, source in enumerate(sources) if source is x and x is not None][:1]
        is_whole = len(results) == len(values) > 0
        record = recording.record(results) if is_whole and (issubclass(kind, Tensor) or kind in _KINDS) else None
        key = self._key
        if recording.reads_host and key is self._call.values:
            _remember(key, _READS_HOST)
            key = _known(self._call)[0]
        if record is None:
            _remember(key, _UNREPEATABLE)
            return
        viewed = [x.view for x in results if isinstance(x, PaddedValue) and x.view]
        is_first = not (self._is_first_named or self._call.is_tracked or any(tree_has(Tensor, x) for x in sources[1:]))
        is_first = is_first and viewed == ["alias"] * len(results) and all(result.layout for result in record.results)
        views = "of the first" if is_first else "of any"
        if not viewed or not (torch.is_grad_enabled() or "copy" in viewed):
            views = ""
        single = issubclass(kind, Tensor)
        _remember(key, Known(record, None if single else kind, self._call.is_tracked, writes, views))
        repeated_functions.add(self._func)


_KINDS = _LISTS | {kind for kind in vars(torch.return_types).values() if isinstance(kind, type)}


def _remember(key: Key, known: Known | str) -> None:
    if len(_calls) >= MAX_CALLS:
        _calls.clear()
    _calls[key] = known


def run_op(op: OpOverload, again: Callable[..., PyTree], args: Args, kwargs: Kwargs) -> Tensor:
    """Run an op that returns one tensor by its rule.

    Args:
        op: the op.
        again: takes the same result again, of which an argument may be the base.
        args, kwargs: its arguments, padded sizes among them.
    """
    if not (dispatcher.is_intercepted() or is_observed()):
        with contextlib.suppress(KeyError):
            call = CallKey(op, args, kwargs)
            known = _known(call)[1]
            if type(known) is Known:
                result: Tensor = _repeat(known, call, again, args, kwargs)
                return result
    recording = CallRecording(op, args, kwargs)
    values: dict[int, PaddedValue] = {}

    def value(x: Tensor) -> PaddedValue:
        if id(x) not in values:
            values[id(x)] = recording.value(x)
        return values[id(x)]

    op_args, op_kwargs = tree_map_only(Tensor, value, (args, kwargs))
    with torch._C.DisableTorchFunctionSubclass(), recording.context:
        out = rules.run(op, op_args, op_kwargs)
    recording.end([out], Tensor)
    return wrap_results([out], again, args, kwargs)[0]
