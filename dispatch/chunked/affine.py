"""Affine values: constants plus constant multiples of sums over chunks.

The gradient of an affine value with respect to each sum is known before the sums are, so a chunk can be differentiated
in the pass that computes it.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch._ops import OpOverloadPacket

from subtensors.dispatch.chunked.lazy_graph import LazyNode, LazyValue, computation
from subtensors.dispatch.ops.tree import tree_leaves

aten = torch.ops.aten

# op: the positions of arguments that may depend on the sums, alone or together.
JOINTLY_LINEAR: dict[OpOverloadPacket, Collection[int]] = {
    aten.add: (0, 1),
    aten.sub: (0, 1),
    aten.rsub: (0, 1),
    aten.neg: (0,),
    aten.sum: (0,),
    aten.mean: (0,),
    aten.div: (0,),
    aten._to_copy: (0,),
    aten.view: (0,),
    aten._unsafe_view: (0,),
    aten.reshape: (0,),
    aten.squeeze: (0,),
    aten.unsqueeze: (0,),
    aten.select: (0,),
    aten.slice: (0,),
    aten.permute: (0,),
    aten.t: (0,),
    aten.transpose: (0,),
    aten.expand: (0,),
    aten.alias: (0,),
    aten.clone: (0,),
    aten.stack: (0,),
    aten.cat: (0,),
}

# op: the positions of arguments; only one of them may depend on the sums, since a product of two sums is not affine.
_BILINEAR: dict[OpOverloadPacket, Collection[int]] = {
    aten.mul: (0, 1),
    aten.mv: (0, 1),
    aten.dot: (0, 1),
    aten.mm: (0, 1),
}


def affine_ops(value: LazyValue, sums: Collection[LazyValue]) -> set[LazyValue] | None:
    """Return the values between sums and a value that is a constant plus constant multiples of them.

    Args:
        value: a replicated value.
        sums: partials that it may depend on.

    Returns:
        those that depend on the sums, without the sums; None where it depends on none, or the ops don't show it.
    """
    depending = {*sums}
    for v in computation([value], lambda v: v.combine is not None):
        if v.node is None or v.combine is not None or depending.isdisjoint(v.node.operands()):
            continue
        if not v.needs_grad or not _is_affine_in(v.node, depending):
            return None
        depending.add(v)
    return depending.difference(sums) if value in depending else None


def _is_affine_in(node: LazyNode, depending: Collection[LazyValue]) -> bool:
    """Return whether an op on replicated values is affine in those of its operands that depend on the sums."""
    arguments = [*node.args, *node.kwargs.values()]
    packet = getattr(node.op, "overloadpacket", None)
    positions = [n for n, x in enumerate(arguments) for leaf in tree_leaves(x) if leaf in depending]
    if packet not in (aten.stack, aten.cat) and any(not isinstance(arguments[n], LazyValue) for n in positions):
        return False
    if packet in JOINTLY_LINEAR:
        # div.Tensor_mode rounds.
        plain = not any(isinstance(x, str) for x in tree_leaves(arguments))
        return plain and all(position in JOINTLY_LINEAR[packet] for position in positions)
    return packet in _BILINEAR and len(positions) == 1 and positions[0] in _BILINEAR[packet]
