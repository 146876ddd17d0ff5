"""What a chunked tensor holds: a value that in-place ops replace, and views that follow it."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

from subtensors.dispatch.errors import RuleError
from subtensors.dispatch.region.graph import NeedsValues, Value, cut_again, gathered, recording, tensors_of
from subtensors.dispatch.region.placing import Call
from subtensors.dispatch.region.rules.table import record

aten = torch.ops.aten


class Cell:
    """A value under a name. A view's cell knows whose view it is: writing to one is seen through the other.

    Args:
        value: what it holds.
        borrowed: it stands for a plain tensor of the caller's, whose memory is not written by recording.
    """

    __slots__ = ("_value", "base", "borrowed", "made", "stamp", "writes")

    def __init__(self, value: Value, borrowed: bool = False) -> None:
        self._value, self.borrowed = value, borrowed
        self.base: Cell | None = None
        self.made: tuple[OpOverload, tuple[Any, ...], dict[str, Any], int] | None = None
        self.stamp = self.writes = 0

    def view_of(self, base: Cell, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], place: int) -> Cell:
        """Say whose view this is, and how it was taken: the op's arguments after the base, and which result."""
        self.base, self.made, self.stamp = base, (op, args, kwargs, place), base.writes
        return self

    @property
    def value(self) -> Value:
        """What it holds now."""
        if self.base is not None and self.made is not None:
            value = self.base.value
            if self.base.writes != self.stamp:
                op, args, kwargs, place = self.made
                with recording(value.needs_grad):
                    self._value = _outputs(record(op, value, *args, **kwargs))[place]
                self.stamp = self.base.writes
                self.writes += 1
        return self._value

    def write(self, value: Value) -> None:
        """Put another value in its place, and into what it is a view of.

        Raises:
            NeedsValues: a plain tensor would have to be written to.
            RuleError: it is a view that can't be written through.
        """
        if self.borrowed:
            raise NeedsValues("an in-place op", "it writes to a plain tensor")
        if self.base is not None and self.made is not None:
            op, args, kwargs, place = self.made
            base = self.base.value
            try:
                written = _written_through(op, args, kwargs, place, base, value)
            except NeedsValues:
                if base.layout is None:
                    raise
                # What no chunk can write by itself is written to the whole.
                written = _written_through(op, args, kwargs, place, gathered(base), gathered(value))
            if base.layout is not None and written.layout is None:
                written = cut_again(written, base.layout)
            self.base.write(written)
            self.stamp = self.base.writes
        self._value = value
        self.writes += 1


def _outputs(results: Any) -> list[Value]:
    return [results] if isinstance(results, Value) else [r for r in results if isinstance(r, Value)]


def _written_through(
    op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], place: int, base: Value, new: Value
) -> Value:
    """The base whose view under `op` is `new`, and that is what it was elsewhere."""
    call = Call(op, (base, *args), kwargs)
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
        sizes = [v.shape[call["dim"]] for v in tensors_of(call.infer())]
        start = sum(sizes[:place])
        out = record(aten.slice_scatter.default, base, new, call["dim"], start, start + sizes[place])
    if out is None:
        raise RuleError(f"a ChunkedTensor can't be written to through {op}; write to what it is a view of")
    written: Value = out
    return written
