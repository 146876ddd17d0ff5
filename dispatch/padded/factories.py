"""Factories: a tensor like a padded one is padded alike; one made from sizes is plain, of the bucket's."""

from __future__ import annotations

import torch

from subtensors.dispatch.ops.op_classes import OpClass
from subtensors.dispatch.padded.interpreter import PaddedCall, table
from subtensors.dispatch.padded.padded_value import PaddedValue, plain

aten = torch.ops.aten

_LIKE = {
    aten.zeros_like: 0,
    aten.ones_like: 1,
    aten.full_like: None,
    aten.empty_like: None,
}


@table.register(*_LIKE)
def like(call: PaddedCall) -> PaddedValue:
    """Same shape, same padding; what fills it fills the padding too."""
    known = _LIKE[call.op.overloadpacket]
    x: PaddedValue = call["self"]
    return x.like(call.dense(), call.get("fill_value", known))


@table.register(aten.new_zeros, aten.new_ones, aten.new_full, aten.new_empty)
def of_its_shape(call: PaddedCall) -> PaddedValue:
    """`x.new_zeros(x.shape)` is padded as `x` is; of other sizes it is plain."""
    x: PaddedValue = call["self"]
    out = call.dense()
    return x.like(out) if out.shape == x.shape else plain(out)


@table.register(OpClass.FACTORY)
def from_sizes(call: PaddedCall) -> PaddedValue:
    """A tensor of the sizes that the caller gave, none of them padded."""
    return plain(call.dense())
