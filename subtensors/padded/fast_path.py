"""Repeats of calls that are a single op: the dispatcher takes a call apart once, then its rule or outcome is repeated.

In torch's dispatcher every tensor of a call is replaced by a placeholder and back, which takes the host longer than the
op itself. Where a call turned out to be one op, `learn` notes which argument is which of the op's. Another call of the
function is that op again if its other arguments are the same and its tensors are alike; with autocast and every mode
off, nothing between the function and the rule can change it. So the op's rule runs directly.

Where autograd tracks nothing, the torch calls that a rule makes are recorded (`recorded_rules.py`): a repeat is these
calls on the storages, a mask that the true sizes hold, and a new wrapper. If the rule asked the host for true sizes,
its `Outcome` is one of these sizes alone. A pointwise op that may write to all of its argument's storage, padding
included, is repeated likewise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FunctionType

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn import functional

from subtensors.dispatch.ops.plain_types import PLAIN_TYPES
from subtensors.dispatch.ops.tree import Args, Kwargs, PyTree
from subtensors.dispatch.padded import rules
from subtensors.dispatch.padded.interpreter import PaddedCall, is_observed
from subtensors.dispatch.padded.padded_size import PADDED_SIZES, PaddedSize
from subtensors.dispatch.padded.padded_value import PaddedValue
from subtensors.dispatch.padded.recorded_rules import (
    BINDINGS,
    LISTS,
    Note,
    Outcome,
    Place,
    RuleRecording,
    SingleOp,
    bindings,
    has_tensors,
    outcome_of,
)
from subtensors.dispatch.padded.true_sizes import TrueSizes, noting
from subtensors.dispatch.torch_internals import dispatcher
from subtensors.padded.autograd import unwrap_with_grad, wrap_results
from subtensors.padded.padded_tensor import PaddedTensor, fill_of, wrap_layout
from subtensors.padded.views import is_current, refresh_copies, remember_aliases, remember_views

aten = torch.ops.aten

MAX_CALLS = 4096
"""The most calls that are known at a time, and the most outcomes of each."""

SHAPE_OPS: dict[Callable[..., PyTree], OpOverload] = {
    Tensor.view: aten.view.default,
    Tensor.reshape: aten.reshape.default,
    torch.reshape: aten.reshape.default,
    Tensor.expand: aten.expand.default,
    Tensor.repeat: aten.repeat.default,
    Tensor.new_zeros: aten.new_zeros.default,
    Tensor.new_ones: aten.new_ones.default,
    Tensor.new_empty: aten.new_empty.default,
    Tensor.contiguous: aten.contiguous.default,
}
"""Functions of a list of sizes, or of as many arguments, or of none; and the op that each is, or may skip."""

_TENSORS = frozenset([PaddedTensor, *PLAIN_TYPES])
_SEQUENCES = frozenset([tuple, list, torch.Size])
_INTS = PADDED_SIZES | {int}
_INDICES = frozenset([int, type(None), type(...)])
_CONSTANTS = frozenset([int, bool, str, type(None), torch.dtype])


CallKey = tuple[
    tuple[object, ...], tuple[PyTree, ...], list[PyTree], tuple[object, ...], TrueSizes | None
]  # fmt: skip
"""The part of a call that decides which op it is, and its arguments.

1. Values that are equal for calls that are the same op.
2. The arguments, by position and then by name.
3. The same, with storages in place of PaddedTensors.
4. The floats among them.
5. The true sizes of all its padded operands; None where its outcome may depend on more.
"""


_calls: dict[tuple[object, ...], SingleOp | None] = {}
"""The op of each call that was taken apart; None for one of several ops."""

single_op_functions: set[Callable[..., PyTree]] = {functional.dropout, *SHAPE_OPS}
"""The functions of which some call is known to be a single op."""


def try_fast_path(func: Callable[..., PyTree], args: Args, kwargs: Kwargs) -> PyTree:
    """Repeat a call that is known to be one op; return NotImplemented for any other."""
    if func is functional.dropout and _drops_nothing(*args, **kwargs):
        return args[0]
    if dispatcher.is_intercepted():
        return NotImplemented
    if func in SHAPE_OPS and not kwargs and type(args[0]) is PaddedTensor:
        if len(args) > 1 and type(args[1]) in _INTS:
            args = args[0], args[1:]
        if len(args) == 1 + (func is not Tensor.contiguous) and type(args[-1]) in (*_SEQUENCES, PaddedTensor):
            return run_op(SHAPE_OPS[func], func, args, kwargs)
    key = call_key(func, args, kwargs)
    single = _calls.get(key[0]) if key is not None else None
    if key is None or single is None:
        return NotImplemented
    if single.fixed and any(repr(key[1][i]) != x for i, x in single.fixed.items()):
        return NotImplemented
    return _run(single, key, func, args, kwargs)


def _drops_nothing(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> bool:
    return not training and 0 <= p <= 1


def run_op(op: OpOverload, func: Callable[..., PyTree], args: Args, kwargs: Kwargs) -> PyTree:
    """Run an op that returns one tensor by its rule.

    Args:
        op: the op.
        func: takes the same result again, of which an argument may be the base.
        args, kwargs: its arguments, padded sizes among them.
    """
    key = call_key(op, args, kwargs)
    if key is None:
        key = (), (*args, *kwargs.values()), [], (), None
    values, given, *_ = key
    single = _calls.get(values)
    if single is None:
        places = [Place(i) for i in range(len(given))]
        single = SingleOp(op, places[: len(args)], dict(zip(kwargs, places[len(args) :], strict=True)))
        if values:
            _remember(values, single)
    return _run(single, key, func, args, kwargs)


def _run(single: SingleOp, key: CallKey, func: Callable[..., PyTree], args: Args, kwargs: Kwargs) -> PyTree:
    _, given, operands, floats, sizes = key
    at: object = floats
    if sizes is not None and (is_observed() or (torch.is_grad_enabled() and _is_tracked(given))):
        sizes = None
    known = None
    if sizes is not None:
        known = single.outcomes.get(at)
        if type(known) is not Outcome and known is Note.BY_HOST:
            at = at, sizes.host() if sizes.known_on_host else None
            # With sizes to be noted the rule runs in every call.
            known = single.outcomes.get(at) if noting.into is None else Note.UNREPEATABLE
        if type(known) is Outcome:
            program, layouts, views = known
            out = program(operands, sizes)
            if single.results is None:
                results = out if layouts[0] is None else wrap_layout(out, layouts[0], sizes)
            else:
                pairs = zip(out, layouts, strict=True)
                results = single.results([t if own is None else wrap_layout(t, own, sizes) for t, own in pairs])
            if views and torch.is_grad_enabled():
                if views == "of the first" and args:
                    remember_aliases(func, args, kwargs, results)
                else:
                    listed = [results] if single.results is None else results
                    plain = [t for t, own in zip(listed, layouts, strict=True) if own is None]
                    remember_views(func, args, kwargs, results, plain)
            return results
    if single.writes:
        if sizes is None:
            return NotImplemented
        if kwargs or type(func) not in BINDINGS:
            op_args, op_kwargs = _arguments(single, operands)
            single.op(*op_args, **op_kwargs)
        else:
            func(*operands)
        refresh_copies(args[0])
        return args[0]
    if len(single.outcomes) >= MAX_CALLS:
        single.outcomes.clear()
    found: dict[int, PaddedValue] = {}
    # A view that is older than the last write to its base is retaken here, by a call of its own.
    op_args, op_kwargs = _arguments(single, [_value_of(x, found) for x in given])
    for value in found.values():
        if sizes is not None and value.sizes is not None:
            value.sizes = sizes  # of tensors padded apart, too: the host knows that they agree
    with torch._C.DisableTorchFunctionSubclass():
        call = PaddedCall(single.op, op_args, op_kwargs)
        if sizes is None or known is Note.UNREPEATABLE or (known is None and at):
            if sizes is not None and known is None:
                # A number that a program computes, or a size, may never come again.
                single.outcomes[at] = Note.SEEN
            out = rules.run_call(call)
            outs = [out] if single.results is None else out
        else:
            with RuleRecording(
                operands, sizes, bindings(None if kwargs else func, call, single, operands)
            ) as recording:
                out = rules.run_call(call)
            outs = [out] if single.results is None else out
            if recording.reads_host and at is floats:
                single.outcomes[at] = Note.BY_HOST
                at = at, sizes.host() if sizes.known_on_host else None
            single.outcomes[at] = outcome_of(recording, outs, sizes, given, single.results is not None)
    results = wrap_results(outs, func, args, kwargs)
    return results[0] if single.results is None else single.results(results)


def _arguments(single: SingleOp, given: Sequence[PyTree]) -> tuple[list[PyTree], Kwargs]:
    """Return the op's arguments for those of a call."""
    args = [given[x.at] if type(x) is Place else x for x in single.args]
    named = single.kwargs.items()
    return args, {name: given[x.at] if type(x) is Place else x for name, x in named} if named else {}


def _value_of(x: PyTree, values: dict[int, PaddedValue]) -> PyTree:
    """Return an argument as rules take it; one tensor that is given twice is one value, kept in `values` by its id."""
    if type(x) in _TENSORS:
        if id(x) not in values:
            values[id(x)] = unwrap_with_grad(x)
        return values[id(x)]
    return [_value_of(t, values) for t in x] if type(x) in LISTS else x


def _is_tracked(given: Sequence[PyTree]) -> bool:
    """Return whether autograd tracks a call, where it is enabled."""
    with torch._C.DisableTorchFunctionSubclass():
        for x in given:
            if x.requires_grad if type(x) in _TENSORS else type(x) in LISTS and _is_tracked(x):
                return True
    return False


def call_key(func: Callable[..., PyTree], args: Args, kwargs: Kwargs) -> CallKey | None:
    """Return the key of a call; None for one with arguments of other types."""
    sizes: TrueSizes | None = None
    is_alike = True
    given = (*args, *kwargs.values()) if kwargs else args
    values: list[object] = [func, torch.get_default_dtype(), *kwargs]
    operands: list[PyTree] = []
    floats: list[object] = []
    tensors: list[int] = []
    for x in given:
        kind = type(x)
        if kind is PaddedTensor:
            own, dense = x._sizes, x._dense
            if own is not sizes:
                is_alike = is_alike and own is not None and (sizes is None or sizes.agree_with(own))
                sizes = own if sizes is None else sizes
                values.append(None if own is None else own.kind)
            if own is None or type(dense) not in PLAIN_TYPES or not (x._view_source is None or is_current(x)):
                is_alike = False
            # A fill that a write to the storage made stale is none.
            layout = x._layout
            values.append(layout if x._fill_version is None or fill_of(x) is layout.fill else (layout, "stale"))
            operands.append(dense)
            tensors.append(id(dense))
        elif kind in PLAIN_TYPES:
            values += (x.shape, x.dtype, x.device)
            operands.append(x)
            tensors.append(id(x))
        elif kind is float:
            values.append(kind)
            floats.append(x if x and x == x else repr(x))  # the sign of a zero matters, and NaN is not NaN
            operands.append(x)
        elif kind is slice or (func is Tensor.__getitem__ and kind is tuple):
            if (index := _index_key(x)) is None:
                return None
            values.append(index)
            operands.append(x)
        elif kind in _SEQUENCES:
            kinds = {*map(type, x)}
            if kind in LISTS and kinds and kinds <= _TENSORS:
                listed = call_key(func, x, {})
                assert listed is not None
                listed_values, _, storages, _, listed_sizes = listed
                values += (kind, listed_values)
                operands.append(storages)
                tensors += map(id, storages)
                if listed_sizes is None:
                    is_alike = is_alike and PaddedTensor not in kinds
                elif listed_sizes is not sizes:
                    is_alike = is_alike and (sizes is None or sizes.agree_with(listed_sizes))
                    sizes = listed_sizes if sizes is None else sizes
                continue
            if not kinds <= _INTS:
                return None
            values += (
                kind,
                tuple([(n.text, int(n)) if isinstance(n, PaddedSize) else n for n in x] if kinds & PADDED_SIZES else x),
            )
            if kinds & PADDED_SIZES:
                others = [n.sizes for n in x if isinstance(n, PaddedSize) and n.sizes is not sizes]
                is_alike = is_alike and (not others or (sizes is not None and all(map(sizes.agree_with, others))))
            # Torch reads plain ints much faster.
            operands.append([*map(int, x)])
        elif kind in _CONSTANTS:
            values += (kind, x)
            operands.append(x)
        else:
            return None
    if len(tensors) > 1 and (tensors[0] == tensors[1] or (len(tensors) > 2 and len({*tensors}) < len(tensors))):
        # One tensor that is given twice is no two tensors.
        values.append(tuple(map(tensors.index, tensors)))
    # Rules compare sizes for every value up to their buckets, which are part of the key.
    return tuple(values), given, operands, tuple(floats), sizes if is_alike else None


def _index_key(index: PyTree) -> tuple[object, ...] | None:
    """Return the key of an index of ints, slices of ints, None and `...`; None for another index."""
    parts: list[object] = []
    for x in index if type(index) is tuple else (index,):
        found = (x.start, x.stop, x.step) if type(x) is slice else (x,)
        if not _INDICES.issuperset(map(type, found)):
            return None
        parts.append(found)
    return tuple(parts)


def _remember(values: tuple[object, ...], single: SingleOp | None) -> None:
    if len(_calls) >= MAX_CALLS:
        _calls.clear()
    _calls[values] = single
    if single is not None:
        single_op_functions.add(values[0])  # type: ignore[arg-type]  # the function, as `call_key` puts it


def learn(
    func: Callable[..., PyTree],
    args: Args,
    kwargs: Kwargs,
    single: tuple[OpOverload, Args, Kwargs] | None,
    kind: type = Tensor,
    writes: bool = False,
) -> None:
    """Note which op a call was.

    Args:
        func, args, kwargs: the call.
        single: its op and the op's arguments, with the tensors that the call was given; None if it was several ops.
        kind: the type of its result, or of the container of several.
        writes: as in `SingleOp`.
    """
    key = call_key(func, args, kwargs)
    if key is None or key[0] in _calls:
        return
    values, every, *_ = key
    if single is None:
        _remember(values, None)
        return
    op, op_args, op_kwargs = single
    arguments = [*op_args, *op_kwargs.values()]
    given = {i: x for i, x in enumerate(every) if isinstance(x, Tensor | float) or has_tensors(x)}
    placed: dict[int, int] = {}
    for i, x in given.items():
        at = [j for j, y in enumerate(arguments) if _is_same(x, y)]
        is_tensor = not isinstance(x, float)
        if is_tensor and not at:
            return
        # Code in Python may compute with a float, which happens to be its own result.
        is_computed = isinstance(func, FunctionType) or len(at) != 1
        if is_tensor or (not is_computed and sum(_is_same(x, y) for y in given.values()) == 1):
            placed |= dict.fromkeys(at, i)
    if any((isinstance(x, Tensor) or has_tensors(x)) and j not in placed for j, x in enumerate(arguments)):
        return
    templates = [Place(placed[j]) if j in placed else x for j, x in enumerate(arguments)]
    named = dict(zip(op_kwargs, templates[len(op_args) :], strict=True))
    fixed = {i: repr(x) for i, x in given.items() if isinstance(x, float) and i not in placed.values()}
    results = None if issubclass(kind, Tensor) else kind
    _remember(values, SingleOp(op, templates[: len(op_args)], named, fixed, results, writes))


def _is_same(x: PyTree, y: PyTree) -> bool:
    """Return whether two arguments are one tensor, lists of the same ones, or equal floats."""
    if has_tensors(x):
        return type(y) in LISTS and len(x) == len(y) and all(a is b for a, b in zip(x, y, strict=True))
    return x is y if isinstance(x, Tensor) else type(y) is float and repr(x) == repr(y)
