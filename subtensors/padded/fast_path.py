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
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, are_deterministic_algorithms_enabled, get_default_dtype, is_grad_enabled
from torch._ops import OpOverload

from subtensors.dispatch.ops.plain_types import PLAIN_TYPES
from subtensors.dispatch.ops.tree import Args, Kwargs, PyTree, tree_map_only
from subtensors.dispatch.padded import rules
from subtensors.dispatch.padded.gradient_masking import GradientTracker
from subtensors.dispatch.padded.interpreter import is_observed
from subtensors.dispatch.padded.padded_size import PaddedSize
from subtensors.dispatch.padded.padded_value import PaddedValue
from subtensors.dispatch.padded.recorded_rules import Note, Record, RuleRecording, TrackerNote
from subtensors.dispatch.padded.size_conditions import noting
from subtensors.dispatch.padded.true_sizes import TrueSizes
from subtensors.dispatch.torch_internals.autograd import has_saved_tensor_hooks
from subtensors.dispatch.torch_internals.dispatcher import is_intercepted
from subtensors.padded.autograd import Unwrap, unwrap_with_grad, wrap_storage, wrap_with_grad
from subtensors.padded.padded_tensor import PaddedTensor, fill_of, wrap_layout
from subtensors.padded.views import is_current, refresh_copies, remember_views

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

_GET_ITEM = Tensor.__getitem__
_TENSORS = frozenset([PaddedTensor, *PLAIN_TYPES])
_LISTS = frozenset([tuple, list])
_SEQUENCES = frozenset([tuple, list, torch.Size])
_INTS = frozenset([int, PaddedSize])
_INDICES = frozenset([int, type(None), type(...)])
_CONSTANTS = frozenset([int, bool, str, type(None), torch.dtype])


Key = tuple[object, ...]
CallKey = tuple[Key, Sequence[PyTree], list[PyTree], TrueSizes, bool]
"""The part of a call that decides which torch calls it is, and its arguments.

1. Values that are equal for calls that are alike.
2. The arguments, by position and then by name.
3. The same, with storages in place of PaddedTensors.
4. The true sizes of all its padded operands.
5. Whether autograd tracks an operand.
"""

_calls: dict[Key, Record | Note] = {}
"""What is known of each call."""

repeated_functions: set[Callable[..., PyTree]] = {*SHAPE_OPS}
"""The functions of which some call is recorded."""


def call_key(func: Callable[..., PyTree], args: Args, kwargs: Kwargs) -> CallKey:
    """Return the key of a call.

    Raises:
        KeyError: there is an argument of another type, or one about which the torch calls may depend on more.
    """
    if func in SHAPE_OPS:  # of sizes in a list, or each by itself
        if len(args) > 1 and type(args[1]) in _INTS:
            args = args[0], args[1:]
        func = SHAPE_OPS[func]
    given = (*args, *kwargs.values()) if kwargs else args
    values = [func, get_default_dtype(), are_deterministic_algorithms_enabled(), *kwargs]
    operands: list[PyTree] = []
    tensors: list[Tensor] = []
    sizes = _add(given, values, operands, tensors, None, func is _GET_ITEM)
    if sizes is None:
        raise KeyError
    if len(tensors) > 1:
        # One tensor that is given twice is no two tensors.
        ids = [id(x._dense if type(x) is PaddedTensor else x) for x in tensors]
        if len({*ids}) < len(ids):
            values.append(tuple(map(ids.index, ids)))
    is_tracked = False
    if is_grad_enabled():
        with torch._C.DisableTorchFunctionSubclass():
            tracked = tuple([x.requires_grad for x in tensors])
        is_tracked = True in tracked
        values.append(tracked)
    return tuple(values), given, operands, sizes, is_tracked


def _add(
    given: Sequence[PyTree], values: list[object], operands: list[PyTree], tensors: list[Tensor],
    sizes: TrueSizes | None, is_index: bool = False,
) -> TrueSizes | None:  # fmt: skip
    """Add the key and the storages of some arguments; return the true sizes of all padded ones so far."""
    for x in given:
        kind = type(x)
        if kind is PaddedTensor:
            dense, layout = x._dense, x._layout
            if x._sizes is not sizes:
                sizes = _alike(x._sizes, sizes, values)
            if type(dense) not in PLAIN_TYPES or not (x._view_source is None or is_current(x)):
                raise KeyError
            # A fill that a write to the storage made stale is none.
            values.append(layout if x._fill_version is None or fill_of(x) is layout.fill else (layout, "stale"))
            if not dense.is_contiguous():
                values.append(_strides(dense))
            operands.append(dense)
            tensors.append(x)
        elif kind in PLAIN_TYPES:
            values += (x.shape, x.dtype, x.device, None if x.is_contiguous() else _strides(x))
            operands.append(x)
            tensors.append(x)
        elif kind in _CONSTANTS:
            values += (kind, x)
            operands.append(x)
        elif kind is float:
            values += (kind, x if x and x == x else repr(x))  # the sign of a zero matters, and NaN is not NaN
            operands.append(x)
        elif kind is slice or (is_index and kind is tuple):
            values.append(_index_key(x))
            operands.append(x)
        elif kind is PaddedSize:
            sizes = _alike(x.sizes, sizes, values)
            number = int.__int__(x)
            values += (x.text, number)
            operands.append(number)
        elif kind in _SEQUENCES and _INTS.issuperset(kinds := {*map(type, x)}):
            numbers = [*map(int.__int__, x)]  # which torch reads much faster
            values += (kind, tuple(numbers))
            operands.append(numbers)
            for n in x if PaddedSize in kinds else ():
                if type(n) is not int:
                    sizes = _alike(n.sizes, sizes, values)
                    values.append(n.text)
        elif kind in _LISTS and _TENSORS.issuperset(kinds):
            values += (kind, len(x))
            storages: list[PyTree] = []
            operands.append(storages)
            sizes = _add(x, values, storages, tensors, sizes)
        else:
            raise KeyError
    return sizes


def _alike(own: TrueSizes | None, sizes: TrueSizes | None, values: list[object]) -> TrueSizes:
    """Return the true sizes of a call, whose operands so far have some; those of tensors padded apart must agree."""
    if own is None or not (sizes is None or sizes is own or sizes.agree_with(own)):
        raise KeyError
    # Rules compare sizes for every value up to their buckets, which are part of the kind; a capture serves other sizes.
    values.append(own.kind)
    if own.is_cuda:
        values.append(own.is_captured)
    return own if sizes is None else sizes


def _strides(t: Tensor) -> tuple[int, ...]:
    """Return the strides of a storage, which decide what C++ copies between the ops of a call."""
    if t.layout is not torch.strided:
        raise KeyError
    return t.stride()


def _index_key(index: PyTree) -> Key:
    """Return the key of an index of ints, slices of ints, None and `...`."""
    parts: list[object] = []
    for x in index if type(index) is tuple else (index,):
        found = (x.start, x.stop, x.step) if type(x) is slice else (x,)
        if not _INDICES.issuperset(map(type, found)):
            raise KeyError
        parts.append(found)
    return tuple(parts)


def _known(key: Key, sizes: TrueSizes) -> tuple[Key, Record | Note | None]:
    """Return the key under which a call is known, and what is known of it."""
    known = _calls.get(key)
    if known is Note.READS_HOST:
        # With sizes to be noted the rules run in every call.
        key = key, sizes.host() if sizes.known_on_host else None
        known = Note.UNREPEATABLE if noting.into is not None else _calls.get(key)
    return key, known


def try_fast_path(
    func: Callable[..., PyTree], args: Args, kwargs: Kwargs, again: Callable[..., PyTree] | None = None
) -> PyTree:
    """Repeat a call that is recorded; return NotImplemented for any other.

    `again` takes the same result again, of which an argument may be the base; it is `func` by default.
    """
    if is_intercepted() or is_observed():
        return NotImplemented
    try:
        key, given, operands, sizes, is_tracked = call_key(func, args, kwargs)
    except KeyError:
        return NotImplemented
    known = _calls.get(key)
    if type(known) is not Record:
        known = _known(key, sizes)[1]
        if type(known) is not Record:
            return NotImplemented
    program, all_trackers, writes, plain_views = known
    if is_tracked:
        operands, trackers = _tracked(given, all_trackers)
        results = program(operands, sizes, trackers, given)
    else:
        results = program(operands, sizes, (), given)
    if writes:
        refresh_copies(args[0])
    if plain_views is not None:
        listed = [results] if isinstance(results, Tensor) else results
        remember_views(again or func, args, kwargs, results, [listed[i] for i in plain_views])
    return results


def _tracked(given: Sequence[PyTree], notes: Sequence[TrackerNote]) -> tuple[PyTree, list[GradientTracker]]:
    """Return arguments with storages that autograd tracks, each tensor's once, and the trackers of a call."""
    trackers = [GradientTracker(is_masked) for is_masked, *_ in notes]
    for tracker, (_, uses, conditions) in zip(trackers, notes, strict=True):
        tracker.uses, tracker.conditions = uses, [[trackers[i] for i in each] for each in conditions]
    with torch._C.DisableTorchFunctionSubclass():
        return _tracked_storages(given, iter(trackers), {}), trackers


def _tracked_storages(given: PyTree, trackers: Iterator[GradientTracker], found: dict[int, Tensor]) -> list[PyTree]:
    storages: list[PyTree] = []
    for x in given:
        kind = type(x)
        if kind is PaddedTensor and id(x) not in found:
            found[id(x)] = Unwrap.apply(x, next(trackers)) if x.requires_grad else x._dense  # type: ignore[no-untyped-call]
        is_list = kind is tuple or kind is list
        storages.append(_tracked_storages(x, trackers, found) if is_list else found.get(id(x), x))
    return storages


class CallRecording:
    """The first runs of a call by rules, of which the second one is recorded."""

    def __init__(self, func: Callable[..., PyTree], args: Args, kwargs: Kwargs) -> None:
        self.context: RuleRecording | contextlib.nullcontext[None] = contextlib.nullcontext()
        """What the rules run in."""
        self._func = func
        if is_intercepted() or is_observed() or not _is_torchs(func):
            return
        if has_saved_tensor_hooks():  # which may call torch themselves
            return
        try:
            self._key, given, _, self._sizes, self._is_tracked = call_key(func, args, kwargs)
        except KeyError:
            return
        key, known = _known(self._key, self._sizes)
        if known is None:
            # A number that a program computes, or a size, may never come again.
            _remember(key, Note.SEEN)
        elif known is Note.SEEN:
            self.context = RuleRecording(given, self._sizes)

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
            writes: as in `Record`.
        """
        recording = self.context
        if not isinstance(recording, RuleRecording):
            return
        record = recording.record(values, kind, writes, wrap_storage if self._is_tracked else wrap_layout)
        key = self._key
        if recording.reads_host:
            _remember(key, Note.READS_HOST)
            key = _known(key, self._sizes)[0]
        _remember(key, record)
        if isinstance(record, Record):
            repeated_functions.add(self._func)


def _is_torchs(func: Callable[..., PyTree]) -> bool:
    """Return whether a function is torch's own; another one may read what its arguments don't tell."""
    if isinstance(func, torch.ScriptMethod | torch.ScriptFunction):
        return False
    return str(getattr(func, "__module__", None) or "torch").partition(".")[0] == "torch"


def _remember(key: Key, known: Record | Note) -> None:
    if len(_calls) >= MAX_CALLS:
        _calls.clear()
    _calls[key] = known


def run_op(op: OpOverload, again: Callable[..., PyTree], args: Args, kwargs: Kwargs) -> Tensor:
    """Run an op that returns one tensor by its rule, padded sizes among its arguments; see `try_fast_path`."""
    if (found := try_fast_path(op, args, kwargs, again)) is not NotImplemented:
        result: Tensor = found
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
    wrapped = wrap_with_grad(out)
    if out.view:
        is_plain = out.view == "alias" and not isinstance(wrapped, PaddedTensor)
        remember_views(again, args, kwargs, wrapped, [wrapped] if is_plain else [])
    return wrapped
