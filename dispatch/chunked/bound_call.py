"""Helpers that rules are written with: a call by argument name, and operands brought to one layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch._ops import OpOverload

from subtensors.dispatch.chunked.lazy_graph import (
    Combine,
    LazyValue,
    NeedsMaterialize,
    PerChunk,
    RowSlice,
    emit,
    gathered,
    infer,
)
from subtensors.dispatch.chunked.row_layout import ChunkAxis, RowLayout
from subtensors.dispatch.ops.op_classes import OpClass, op_class
from subtensors.dispatch.ops.tree import tree_leaves, tree_map
from subtensors.dispatch.torch_internals.ops import schema_of


class BoundCall:
    """One call of an op on values, at least one of them chunked.

    Args:
        op: the overload.
        args, kwargs: its arguments, values in place of tensors.
    """

    def __init__(self, op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.op = op
        self.arguments = schema_of(op).arguments
        self.positional: list[Any] = list(args)
        self.kwargs = dict(kwargs)
        for argument in self.arguments[len(args) :]:
            if argument.kwarg_only:
                break
            if argument.name in self.kwargs:
                self.positional.append(self.kwargs.pop(argument.name))
            elif argument.has_default_value():
                self.positional.append(argument.default_value)
        self.places = {a.name: i for i, a in enumerate(self.arguments) if not a.kwarg_only}

    def __contains__(self, name: str) -> bool:
        return name in self.places or any(a.name == name for a in self.arguments)

    def __getitem__(self, name: str) -> Any:
        """The argument of a name."""
        place = self.places.get(name)
        if place is not None:
            return self.positional[place]
        return self.kwargs.get(name, next((a.default_value for a in self.arguments if a.name == name), None))

    def __setitem__(self, name: str, value: Any) -> None:
        place = self.places.get(name)
        if place is None:
            self.kwargs[name] = value
        else:
            self.positional[place] = value

    @property
    def values(self) -> list[LazyValue]:
        """The values among the arguments, in order."""
        return [x for x in tree_leaves((self.positional, self.kwargs)) if isinstance(x, LazyValue)]

    @property
    def chunked(self) -> list[LazyValue]:
        """The chunked values among the arguments."""
        return [v for v in self.values if v.layout is not None]

    def unchunkable(self, reason: str) -> NeedsMaterialize:
        """The error that makes the caller materialize the operands."""
        return NeedsMaterialize(self.op, reason)

    def infer(self) -> Any:
        """The results of the call, as meta tensors."""
        return infer(self.op, tuple(self.positional), self.kwargs)

    def with_values(self, brought: Callable[[LazyValue], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with each value replaced."""
        placed: tuple[tuple[Any, ...], dict[str, Any]] = tree_map(
            (tuple(self.positional), self.kwargs), lambda x: brought(x) if isinstance(x, LazyValue) else x
        )
        return placed

    def emit(
        self,
        layouts: Sequence[RowLayout | Combine | None],
        axis: ChunkAxis,
        brought: Callable[[LazyValue], Any],
        op: Callable[..., Any] | None = None,
        metas: Any = None,
    ) -> Any:
        """Record the call: `brought` says how each value reaches a chunk, `layouts` where the results' rows are."""
        metas = self.infer() if metas is None else metas
        args, kwargs = self.with_values(brought)
        return emit(op or self.op, args, kwargs, metas, layouts, axis)


def largest(values: Sequence[LazyValue]) -> LazyValue:
    """The largest of the chunked values, whose layout the others take."""
    return max((v for v in values if v.layout is not None), key=lambda v: v.meta.numel())


def whole(value: LazyValue) -> LazyValue:
    """The value as a chunk reads it whole."""
    return gathered(value)


def along(value: LazyValue, layout: RowLayout) -> LazyValue | RowSlice:
    """The value as a chunk reads its own part of it, chunked as `layout` says."""
    own = value.layout
    if own is not None and own.dim == layout.dim and own.like(layout):
        layout.axis.meet(own.axis)
        return value
    return _by_rows(value, layout) if _has_own_rows(value) else RowSlice(gathered(value), layout)


def _has_own_rows(value: LazyValue) -> bool:
    """Return whether a value is whole, not computed yet, and the only result of a pointwise op."""
    node = value.node
    if value.layout is not None or value.tensor is not None or node is None or len(node.outputs) > 1:
        return False
    return isinstance(node.op, OpOverload) and op_class(node.op) is OpClass.POINTWISE


def _by_rows(value: LazyValue, layout: RowLayout) -> LazyValue:
    """Record a whole value's op chunk by chunk instead, so that its result is never in memory in full."""
    node = value.node
    assert node is not None
    args, kwargs = tree_map(
        (node.args, node.kwargs), lambda x: broadcast(x, value.ndim, layout) if isinstance(x, LazyValue) else x
    )
    out: LazyValue = emit(node.op, args, kwargs, value.meta, [layout], layout.axis, node.grad)
    return out


def broadcast(value: LazyValue, ndim: int, layout: RowLayout) -> LazyValue | RowSlice:
    """An operand of a broadcasting op whose result of `ndim` dims is chunked as `layout` says."""
    dim = layout.dim - (ndim - value.ndim)
    if dim < 0 or (value.shape[dim] == 1 and layout.extent != 1):
        return whole(value)
    return along(value, layout.at(dim))


def extent(layout: RowLayout) -> PerChunk:
    """The size of a chunked dim, as each chunk has it."""
    return PerChunk(layout.local)


def wrapped(dim: int, ndim: int) -> int:
    """A dim counted from the front."""
    return dim + max(ndim, 1) if dim < 0 else dim
