"""Repeats of calls that are a single op: the dispatcher takes a call apart once, then its rule or outcome is repeated.

In torch's dispatcher every tensor of a call is replaced by a placeholder and back, which takes the host longer than the
op itself. Where a call turned out to be one op, `learn` notes which argument is which of the op's. Another call of the
function is that op again if its other arguments are the same and its tensors are alike; with
autocast and every mode off, nothing between the function and the rule can change it. So the op's rule runs directly.

A rule looks at dims, fills and dtypes, and often finds nothing to fill or to mask. If it only ran the op on its
operands' storages, a repeat does the same: then its `Outcome` is reused, and the call is the op and a new
wrapper. That holds where the rule depends on nothing else, such as true sizes known on the host, and where autograd
tracks nothing. A pointwise op that may write to all of its argument's storage, padding included, is repeated likewise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn import functional

from subtensors.dispatch.ops.plain_types import PLAIN_TYPES
from subtensors.dispatch.ops.tree import Args, Kwargs, PyTree
from subtensors.dispatch.padded import rules
from subtensors.dispatch.padded.interpreter import PaddedCall, is_observed
from subtensors.dispatch.padded.padded_size import PADDED_SIZES, PaddedSize
from subtensors.dispatch.padded.padded_value import Fill, PaddedValue, unpadded_value
from subtensors.dispatch.padded.true_sizes import TrueSizes
from subtensors.dispatch.sizes.dim_factors import Factors
from subtensors.dispatch.torch_internals import dispatcher
from subtensors.padded.autograd import unwrap_with_grad, wrap_results
from subtensors.padded.padded_tensor import PaddedTensor, View, fill_of, wrap_dense
from subtensors.padded.views import is_current, refresh_copies, remember_views

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

_SEQUENCES = frozenset([tuple, list, torch.Size])
_LISTS = frozenset([tuple, list])
_INTS = PADDED_SIZES | {int}
_INDICES = frozenset([int, type(None), type(...)])
_TENSORS = frozenset([PaddedTensor, *PLAIN_TYPES])
_CONSTANTS = frozenset([int, bool, str, type(None), torch.dtype])


class CallKey(NamedTuple):
    """The part of a call that decides which op it is, and its arguments.

    Args:
        values: equal for calls that are the same op.
        given: the arguments, by position and then by name.
        operands: the same, with storages in place of PaddedTensors.
        floats: the floats among them.
        sizes: the true sizes of all its padded operands; None where its outcome may depend on more.
    """

    values: tuple[object, ...]
    given: tuple[PyTree, ...]
    operands: list[PyTree]
    floats: tuple[object, ...]
    sizes: TrueSizes | None


Outcome = list[tuple[tuple[Factors, ...], Fill | None, View]]
"""The dims, the fill and the view of each result, as in `PaddedValue`."""


class _Place(NamedTuple):
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
        outcomes: by the floats of a call.
    """

    op: OpOverload
    args: Sequence[PyTree]
    kwargs: Mapping[str, PyTree]
    fixed: Mapping[int, str] = field(default_factory=dict)
    results: type | None = None
    writes: bool = False
    outcomes: dict[tuple[object, ...], Outcome] = field(default_factory=dict)

    def arguments(self, given: Sequence[PyTree]) -> tuple[list[PyTree], Kwargs]:
        """Return the op's arguments for those of a call."""
        args = [given[x.at] if type(x) is _Place else x for x in self.args]
        named = self.kwargs.items()
        return args, {name: given[x.at] if type(x) is _Place else x for name, x in named} if named else {}


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
    single = _calls.get(key.values) if key is not None else None
    if key is None or single is None:
        return NotImplemented
    if single.fixed and any(repr(key.given[i]) != x for i, x in single.fixed.items()):
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
        key = CallKey((), (*args, *kwargs.values()), [], (), None)
    single = _calls.get(key.values)
    if single is None:
        places = [_Place(i) for i in range(len(key.given))]
        single = SingleOp(op, places[: len(args)], dict(zip(kwargs, places[len(args) :], strict=True)))
        if key.values:
            _remember(key, single)
    return _run(single, key, func, args, kwargs)


def _run(single: SingleOp, key: CallKey, func: Callable[..., PyTree], args: Args, kwargs: Kwargs) -> PyTree:
    is_repeatable = key.sizes is not None and not is_observed() and not _is_tracked(key.given)
    known = single.outcomes.get(key.floats)
    if is_repeatable and (known is not None or single.writes):
        if kwargs or type(func) is FunctionType:
            op_args, op_kwargs = single.arguments(key.operands)
            dense = single.op(*op_args, **op_kwargs)
        else:  # torch's own binding of the op takes the host less time than the op's overload
            dense = func(*key.operands)
        if known is None:
            refresh_copies(args[0])
            return args[0]
        results: PyTree
        if single.results is None:
            results = wrap_dense(dense, known[0][0], key.sizes, known[0][1], known[0][2])
        else:
            given = zip(dense, known, strict=True)
            results = single.results([wrap_dense(t, dims, key.sizes, fill, view) for t, (dims, fill, view) in given])
        if known[0][2] and torch.is_grad_enabled():
            remember_views(func, args, kwargs, results, [])
        return results
    if single.writes:
        return NotImplemented
    values: dict[int, PaddedValue] = {}
    # A view that is older than the last write to its base is retaken here, by a call of its own.
    op_args, op_kwargs = single.arguments([_value_of(x, values) for x in key.given])
    with torch._C.DisableTorchFunctionSubclass():
        call = PaddedCall(single.op, op_args, op_kwargs)
        out = rules.run_call(call)
    outs = [out] if single.results is None else out
    if is_repeatable and call.unchanged is not None and not call.reads_sizes and len(single.outcomes) < MAX_CALLS:
        pairs = zip([call.unchanged] if single.results is None else call.unchanged, outs, strict=True)
        if all(t is x.dense and x.sizes is key.sizes and x.view != "copy" and x.padded_dims for t, x in pairs):
            single.outcomes[key.floats] = [(x.dims, x.fill, x.view) for x in outs]
    results = wrap_results(outs, func, args, kwargs)
    return results[0] if single.results is None else single.results(results)


def _value_of(x: PyTree, values: dict[int, PaddedValue]) -> PyTree:
    """Return an argument as rules take it; one tensor that is given twice is one value, kept in `values` by its id."""
    if type(x) is PaddedTensor:
        if id(x) not in values:
            values[id(x)] = unwrap_with_grad(x)
        return values[id(x)]
    if type(x) in _LISTS:
        return [_value_of(t, values) for t in x]
    return unpadded_value(x) if type(x) in PLAIN_TYPES else x


def _is_tracked(given: Sequence[PyTree]) -> bool:
    """Return whether autograd tracks a call."""
    if not torch.is_grad_enabled():
        return False
    with torch._C.DisableTorchFunctionSubclass():
        for x in given:
            if x.requires_grad if isinstance(x, Tensor) else type(x) in _LISTS and _is_tracked(x):
                return True
    return False


def call_key(func: Callable[..., PyTree], args: Args, kwargs: Kwargs) -> CallKey | None:
    """Return the key of a call; None for one with arguments of other types."""
    sizes: TrueSizes | None = None
    is_alike = True
    given = (*args, *kwargs.values()) if kwargs else args
    values: list[object] = [func, *kwargs]
    operands: list[PyTree] = []
    floats: list[object] = []
    tensors: list[int] = []
    for x in given:
        kind = type(x)
        if kind is PaddedTensor:
            own, dense = x._sizes, x._dense
            if own is not sizes:
                is_alike = is_alike and (sizes is None or _agree(own, sizes))
                sizes = own if sizes is None else sizes
                values.append(None if own is None else own.key)
            is_alike = is_alike and own is not None and (x._view_source is None or is_current(x))
            values += (x._dims, dense.dtype, dense.device, fill_of(x), x._view)
            operands.append(dense)
            tensors.append(id(x))
        elif kind in PLAIN_TYPES:
            values += (x.shape, x.dtype, x.device)
            operands.append(x)
            tensors.append(id(x))
        elif kind is float:
            values.append(kind)
            floats.append(x or repr(x))  # the sign of a zero matters
            operands.append(x)
        elif kind is slice or (func is Tensor.__getitem__ and kind is tuple):
            if (index := _index_key(x)) is None:
                return None
            values.append(index)
            operands.append(x)
        elif kind in _SEQUENCES:
            kinds = {*map(type, x)}
            if kind in _LISTS and kinds and kinds <= _TENSORS:
                listed = call_key(func, x, {})
                assert listed is not None
                values += (kind, listed.values)
                operands.append(listed.operands)
                tensors += map(id, x)
                own = next((t._sizes for t in x if type(t) is PaddedTensor), None)
                if own is not None and own is not sizes:
                    is_alike = is_alike and (sizes is None or _agree(own, sizes))
                    sizes = own if sizes is None else sizes
                is_alike = is_alike and (own is None or listed.sizes is own)
                continue
            if not kinds <= _INTS:
                return None
            values += (
                kind,
                tuple([n.text if isinstance(n, PaddedSize) else n for n in x] if kinds & PADDED_SIZES else x),
            )
            # Torch reads plain ints much faster.
            operands.append([*map(int, x)])
        elif kind in _CONSTANTS:
            values += (kind, x)
            operands.append(x)
        else:
            return None
    if len(tensors) > 1 and len({*tensors}) < len(tensors):
        # One tensor that is given twice is no two tensors.
        values.append(tuple(map(tensors.index, tensors)))
    # Rules compare sizes for every value up to their buckets, which are part of the key.
    one_run = sizes if is_alike and sizes is not None and sizes.rows is None else None
    return CallKey(tuple(values), given, operands, tuple(floats), one_run)


def _agree(a: TrueSizes | None, b: TrueSizes) -> bool:
    """Return whether the host knows that two tensors, padded apart, have the same true sizes."""
    return a is not None and a.key == b.key and a.known_on_host and b.known_on_host and a.host() == b.host()


def _index_key(index: PyTree) -> tuple[object, ...] | None:
    """Return the key of an index of ints, slices of ints, None and `...`; None for another index."""
    parts: list[object] = []
    for x in index if type(index) is tuple else (index,):
        found = (x.start, x.stop, x.step) if type(x) is slice else (x,)
        if any(type(n) not in _INDICES for n in found):
            return None
        parts.append(found)
    return tuple(parts)


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
    if key is None or key.values in _calls:
        return
    if single is None:
        _remember(key, None)
        return
    op, op_args, op_kwargs = single
    arguments = [*op_args, *op_kwargs.values()]
    given = {i: x for i, x in enumerate(key.given) if isinstance(x, Tensor | float) or _has_tensors(x)}
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
    if any((isinstance(x, Tensor) or _has_tensors(x)) and j not in placed for j, x in enumerate(arguments)):
        return
    templates = [_Place(placed[j]) if j in placed else x for j, x in enumerate(arguments)]
    named = dict(zip(op_kwargs, templates[len(op_args) :], strict=True))
    fixed = {i: repr(x) for i, x in given.items() if isinstance(x, float) and i not in placed.values()}
    results = None if issubclass(kind, Tensor) else kind
    _remember(key, SingleOp(op, templates[: len(op_args)], named, fixed, results, writes))


def _is_same(x: PyTree, y: PyTree) -> bool:
    """Return whether two arguments are one tensor, lists of the same ones, or equal floats."""
    if _has_tensors(x):
        return type(y) in _LISTS and len(x) == len(y) and all(a is b for a, b in zip(x, y, strict=True))
    return x is y if isinstance(x, Tensor) else type(y) is float and repr(x) == repr(y)


def _has_tensors(x: PyTree) -> bool:
    """Return whether an argument is a list of tensors, as `cat` takes."""
    return type(x) in _LISTS and any(isinstance(t, Tensor) for t in x)


def _remember(key: CallKey, single: SingleOp | None) -> None:
    if len(_calls) >= MAX_CALLS:
        _calls.clear()
    _calls[key.values] = single
    if single is not None:
        single_op_functions.add(key.values[0])  # type: ignore[arg-type]  # the function, as `call_key` puts it
