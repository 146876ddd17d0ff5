"""The value behind a chunked tensor: in-place ops replace it, and views of it see the change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from subtensors.dispatch.chunked.bound_call import BoundCall
from subtensors.dispatch.chunked.lazy_graph import LazyValue, NeedsMaterialize, cut_again, gathered, recording
from subtensors.dispatch.chunked.rules.contractions import linear_layer
from subtensors.dispatch.chunked.rules.table import record
from subtensors.dispatch.ops.errors import RuleError
from subtensors.dispatch.ops.tree import tree_tensors

aten = torch.ops.aten


Geometry = tuple[Sequence[int], Sequence[int], torch.dtype, torch.device]


class AliasRef:
    """A reference to a value that in-place ops replace. A view refers to its base: each sees writes to the other.

    Args:
        value: the value it refers to.
        borrowed: whether it stands for a plain tensor of the caller, whose memory recording must not write.
    """

    __slots__ = ("_value", "base", "borrowed", "made", "stamp", "writes")

    def __init__(self, value: LazyValue, borrowed: bool = False) -> None:
        self._value, self.borrowed = value, borrowed
        self.base: AliasRef | None = None
        self.made: tuple[OpOverload, tuple[Any, ...], dict[str, Any], int] | None = None
        self.stamp = self.writes = 0

    def view_of(
        self, base: AliasRef, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], place: int
    ) -> AliasRef:
        """Make this a view of a base: the op that took it, its arguments after the base, the place of its result."""
        self.base, self.made, self.stamp = base, (op, args, kwargs, place), base.writes
        return self

    @property
    def needs_grad(self) -> bool:
        """Return whether the value requires grad."""
        return self.value.needs_grad

    def geometry(self) -> Geometry:
        """Sizes, strides, dtype and device."""
        value = self.value
        like = value.like
        return like.shape, like.stride(), like.dtype, value.device

    @property
    def value(self) -> LazyValue:
        """The current value; a view is taken again once its base was written to."""
        if self.base is not None and self.made is not None:
            value = self.base.value
            if self.base.writes != self.stamp:
                op, args, kwargs, place = self.made
                with recording(value.needs_grad):
                    try:
                        taken = record(op, value, *args, **kwargs)
                    except NeedsMaterialize:
                        taken = record(op, gathered(value), *args, **kwargs)
                self._value = _outputs(taken)[place]
                self.stamp = self.base.writes
                self.writes += 1
        return self._value

    def write(self, value: LazyValue) -> None:
        """Replace the value, and write it through to the base of a view.

        Raises:
            NeedsMaterialize: a plain tensor would have to be written to.
            RuleError: it is a view that can't be written through.
        """
        if self.borrowed:
            raise NeedsMaterialize("an in-place op", "it writes to a plain tensor")
        if self.base is not None and self.made is not None:
            op, args, kwargs, place = self.made
            base = self.base.value
            try:
                written = _written_through(op, args, kwargs, place, base, value)
            except NeedsMaterialize:
                if base.layout is None:
                    raise
                # A write that no chunk can do by itself is done on the whole base.
                written = _written_through(op, args, kwargs, place, gathered(base), gathered(value))
            if base.layout is not None and written.layout is None:
                written = cut_again(written, base.layout)
            self.base.write(written)
            self.stamp = self.base.writes
        self._value = value
        self.writes += 1


class LazyLinear(AliasRef):
    """A linear layer of rows, recorded only when something other than the cross-entropy kernels reads it.

    Args:
        rows: (N, H), chunked along N.
        weight: (V, H), a constant of the same dtype and device.
        bias: (V,), such a constant, or None.
        grad: whether it is differentiable.
        narrow: the layer that this is a cast of; None for the layer itself.
        dtype: the dtype it is cast to; None for that of the rows.
    """

    __slots__ = ("_product", "bias", "dtype", "grad", "narrow", "rows", "weight")

    def __init__(
        self,
        rows: LazyValue,
        weight: LazyValue,
        bias: LazyValue | None,
        grad: bool,
        narrow: LazyLinear | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(rows)
        self.rows, self.weight, self.bias, self.grad = rows, weight, bias, grad
        self.narrow, self.dtype = narrow, rows.dtype if dtype is None else dtype
        self._product: LazyValue | None = None

    def to(self, dtype: torch.dtype, grad: bool) -> LazyLinear:
        """The layer, cast to a dtype."""
        return LazyLinear(self.rows, self.weight, self.bias, self.grad and grad, self, dtype)

    @property
    def is_recorded(self) -> bool:
        """Return whether the layer was recorded as an op, or overwritten."""
        return self._value is not self.rows

    @property
    def value(self) -> LazyValue:
        """The current value, recorded on first use."""
        if not self.is_recorded:
            self._value = self.product
        return self._value

    @property
    def product(self) -> LazyValue:
        """The layer or its cast, recorded: its value unless it was overwritten."""
        if self._product is None:
            if self.narrow is None:
                self._product = linear_layer(self.rows, self.weight, self.bias, self.grad)
            else:
                with recording(self.grad):
                    self._product = record(aten._to_copy.default, self.narrow.product, dtype=self.dtype)
        return self._product

    @property
    def needs_grad(self) -> bool:
        """Return whether the value requires grad."""
        if self.is_recorded:
            return self._value.needs_grad
        has_grad = self.rows.needs_grad or self.weight.needs_grad or (self.bias is not None and self.bias.needs_grad)
        return self.grad and has_grad

    def geometry(self) -> Geometry:
        """Sizes, strides, dtype and device."""
        if self.is_recorded:
            return super().geometry()
        rows, classes = self.rows.like.shape[0], self.weight.like.shape[0]
        return (rows, classes), (classes, 1), self.dtype, self.rows.device


def _outputs(results: Any) -> list[LazyValue]:
    return [results] if isinstance(results, LazyValue) else [r for r in results if isinstance(r, LazyValue)]


def _written_through(
    op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], place: int, base: LazyValue, new: LazyValue
) -> LazyValue:
    """The base with `new` written into its view under `op`, and unchanged elsewhere."""
    call = BoundCall(op, (base, *args), kwargs)
    packet = op.overloadpacket
    out: Any = None
    if packet in (aten.alias, aten.view, aten._unsafe_view, aten.squeeze, aten.unsqueeze, aten.reshape):
        out = new if new.shape == base.shape else record(aten.reshape.default, new, list(base.shape))
    elif packet in (aten.t, aten.transpose):
        out = record(op, new, *args)
    elif packet is aten.permute:
        dims = [d % base.ndim for d in call["dims"]]
        out = record(op, new, [dims.index(d) for d in range(base.ndim)])
    elif packet is aten.select:
        out = record(aten.select_scatter.default, base, new, *args)
    elif packet is aten.slice:
        out = record(aten.slice_scatter.default, base, new, *args)
    elif packet is aten.unbind:
        out = record(aten.select_scatter.default, base, new, call["dim"], place)
    elif packet in (aten.split, aten.split_with_sizes):
        sizes = [v.shape[call["dim"]] for v in tree_tensors(call.infer())]
        start = sum(sizes[:place])
        out = record(aten.slice_scatter.default, base, new, call["dim"], start, start + sizes[place])
    if out is None:
        raise RuleError(f"a ChunkedTensor can't be written to through {op}; write to what it is a view of")
    written: LazyValue = out
    return written
