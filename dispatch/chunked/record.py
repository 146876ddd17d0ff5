"""Recording of an op: its call by argument name, its metadata, its rule, and how operands reach a chunk.

`record(op, *args)` binds the call, looks its rule up in `RULES` (filled by `rules/`), and the rule calls `emit` with an
operand for each value: `replicated` (read in full by every chunk), `sliced` (its own rows) or `broadcast` (either).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import optree
import torch
from optree import PyTreeSpec
from torch import Tensor
from torch._ops import OpOverload
from torch.autograd.function import FunctionCtx

from subtensors.dispatch.chunked.lazy_graph import (
    Combine,
    LazyValue,
    NeedsMaterialize,
    PerChunk,
    RowSlice,
    constant,
    emit,
    is_differentiated,
    replicated,
)
from subtensors.dispatch.chunked.row_layout import RowLayout
from subtensors.dispatch.ops.bound_call import BoundCall
from subtensors.dispatch.ops.errors import RuleError
from subtensors.dispatch.ops.op_classes import OpClass, op_class
from subtensors.dispatch.ops.rule_table import RuleTable
from subtensors.dispatch.ops.tree import Args, Kwargs, PyTree, tree_find, tree_map_only

RULES = RuleTable("ChunkedTensor", dict.fromkeys(OpClass, "realize() it first, which is what is done otherwise"))


def record(op: OpOverload, *args: PyTree, **kwargs: PyTree) -> PyTree:
    """Record an op on values and tensors.

    Args:
        op: a functional aten overload.
        args, kwargs: its arguments; tensors are constants of the region.

    Returns:
        the pytree of its results, with values in place of tensors.

    Raises:
        NeedsMaterialize: the op has no rule, or its rule doesn't hold for these arguments.
    """
    args, kwargs = tree_map_only(Tensor, constant, (args, kwargs))
    call = ChunkedCall(op, args, kwargs)
    if not call.chunked and op_class(op) is not OpClass.RANDOM:
        return emit(op, args, kwargs, infer(op, args, kwargs))
    try:
        rule = RULES.lookup(op)
    except RuleError as error:
        raise NeedsMaterialize(op, str(error)) from None
    return rule(call)


_inferred: dict[object, PyTree] = {}

MAX_INFERRED_CALLS = 4096
"""Calls whose results are cached; each training step records the same ones."""


def infer(op: OpOverload, args: Args, kwargs: Kwargs) -> PyTree:
    """Return the results of an op as meta tensors; they are cached, so callers must not write to them.

    Raises:
        NeedsMaterialize: the results depend on values, or the op refuses these arguments.
    """
    flat: list[PyTree]
    flat, spec = optree.tree_flatten((args, kwargs), none_is_leaf=True)  # type: ignore[arg-type]  # any pytree
    metas = [x.value.meta if isinstance(x, RowSlice) else x.meta if isinstance(x, LazyValue) else x for x in flat]
    # Equal numbers of two types are promoted differently.
    key = op, spec, torch.get_default_dtype(), *(_metadata_key(x) for x in metas)
    try:
        found = _inferred.get(key)
    except TypeError:  # an unhashable argument
        return _infer(op, spec, metas)
    if found is None:
        found = _infer(op, spec, metas)
        if len(_inferred) >= MAX_INFERRED_CALLS:
            _inferred.clear()
        if all(type(meta) is Tensor for meta in tree_find(Tensor, found)):  # fake ones belong to their mode
            _inferred[key] = found
    return found


def _metadata_key(x: object) -> tuple[object, ...]:
    # By type: results of fake tensors are fake.
    return (type(x), x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else (type(x), x)


def _infer(op: OpOverload, spec: PyTreeSpec, flat: Sequence[PyTree]) -> PyTree:
    call: PyTree = spec.unflatten(flat)
    args, kwargs = call
    if "device" in kwargs:
        kwargs["device"] = torch.device("meta")
    try:
        return op(*args, **kwargs)
    except Exception as error:  # ops refuse meta tensors in many ways
        raise NeedsMaterialize(op, f"{type(error).__name__}: {error}") from error


class ChunkedCall(BoundCall[LazyValue]):
    """One call of an op on values, at least one of them chunked, with its arguments by name."""

    def __init__(self, op: OpOverload, args: Args, kwargs: Kwargs) -> None:
        super().__init__(op, args, kwargs, LazyValue)
        self._given = frozenset(kwargs)

    @property
    def chunked(self) -> list[LazyValue]:
        """The chunked values among the arguments."""
        return [v for v in self.values if v.layout is not None]

    def rows(self) -> tuple[LazyValue, RowLayout]:
        """Return the only chunked value among the arguments, and its layout."""
        (value,) = self.chunked
        return value, value.row_layout

    def unchunkable(self, reason: str) -> NeedsMaterialize:
        """Return the error that makes the caller materialize the operands."""
        return NeedsMaterialize(self.op, reason)

    def infer(self) -> PyTree:
        """Return the results of the call, as meta tensors."""
        return infer(self.op, *self.with_values(lambda v: v))

    def with_values(self, to_operand: Callable[[LazyValue], PyTree]) -> tuple[Args, Kwargs]:
        """Return the arguments with each value replaced; of those without a position, the ones that were given."""
        args, kwargs = self.split(self.arguments)
        given = {name: x for name, x in kwargs.items() if name in self._given}
        replaced: tuple[Args, Kwargs] = tree_map_only(LazyValue, to_operand, (args, given))
        return replaced

    def emit(
        self,
        layouts: Sequence[RowLayout | Combine | None],
        to_operand: Callable[[LazyValue], PyTree] = lambda value: value,
        op: Callable[..., PyTree] | None = None,
        metas: PyTree = None,
    ) -> PyTree:
        """Record the call.

        Args:
            layouts: the layouts of the results, or how their parts are combined.
            to_operand: returns for each value the operand of a chunk.
            op: the function called for each chunk; None: the overload.
            metas: the results of the full call as meta tensors; None: inferred.
        """
        metas = self.infer() if metas is None else metas
        args, kwargs = self.with_values(to_operand)
        return emit(op or self.op, args, kwargs, metas, layouts)


def sliced(value: LazyValue, layout: RowLayout) -> LazyValue | RowSlice:
    """Return an operand that each chunk reads its own part of, chunked by `layout`, or all where it broadcasts."""
    if value.shape[layout.dim] == 1 != layout.dim_size:
        return replicated(value)
    own = value.layout
    if own is not None and own.aligns_with(layout):
        layout.axis.merge(own.axis)
        return value
    return _by_chunks(value, layout) if _is_lazy_pointwise(value) else RowSlice(replicated(value), layout)


def _is_lazy_pointwise(value: LazyValue) -> bool:
    """Return whether a value is replicated, not computed yet, and the only result of a pointwise op."""
    node = value.node
    if value.layout is not None or value.tensor is not None or node is None or len(node.outputs) > 1:
        return False
    return isinstance(node.op, OpOverload) and op_class(node.op) is OpClass.POINTWISE


def _by_chunks(value: LazyValue, layout: RowLayout) -> LazyValue:
    """Record a replicated value's op chunk by chunk instead, so that its result is never in memory in full."""
    node = value.node
    assert node is not None
    args, kwargs = tree_map_only(LazyValue, lambda x: broadcast(x, value.ndim, layout), (node.args, node.kwargs))
    out: LazyValue = emit(node.op, args, kwargs, value.meta, [layout], node.grad)
    return out


def broadcast(value: LazyValue, ndim: int, layout: RowLayout) -> LazyValue | RowSlice:
    """Return an operand of a broadcasting op whose result of `ndim` dims is chunked by `layout`."""
    dim = layout.dim - (ndim - value.ndim)
    return replicated(value) if dim < 0 else sliced(value, layout.with_dim(dim))


def chunk_dim_size(layout: RowLayout) -> PerChunk:
    """Return the size of a chunked dim, which differs between chunks."""
    return PerChunk(layout.size_in)


class _GradientOfOld(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, old: Tensor, new: Tensor) -> Tensor:
        return new.view_as(new)

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def overwritten(old: Tensor, new: Tensor) -> Tensor:
    """Return the new numbers, whose gradient is that of the old ones."""
    out: Tensor = _GradientOfOld.apply(old, new)  # type: ignore[no-untyped-call]
    return out


def with_gradient_of(old: LazyValue, new: LazyValue) -> LazyValue:
    """Return a value that was written over another one, with that one's gradient if the write was under `no_grad`."""
    is_detached = new.node is not None and new.node.op is torch.ops.aten.detach.default
    if is_detached or is_differentiated() or not old.needs_grad:
        return new
    layout = old.layout
    operand = replicated(new) if layout is None else sliced(new, layout)
    out: LazyValue = emit(overwritten, (old, operand), {}, old.meta, [layout], grad=True)
    return out
