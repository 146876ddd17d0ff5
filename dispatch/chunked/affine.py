"""Affine values: constants plus constant multiples of sums over chunks.

The gradient of an affine value with respect to each sum is known before the sums are, so a chunk can be differentiated
in the pass that computes it.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch._ops import OpOverloadPacket

from subtensors.dispatch.chunked.lazy_graph import LazyNode, LazyValue, computation
from subtensors.dispatch.ops.tree import tree_find

aten = torch.ops.aten

# op: the positions of arguments that may depend on the sums, alone or together.
JOINTLY_LINEAR: dict[OpOverloadPacket, Collection[int]] = {
    **dict.fromkeys((aten.add, aten.sub, aten.rsub), (0, 1)),
    **dict.fromkeys((aten.neg, aten.sum, aten.mean, aten.div, aten.clone, aten._to_copy, aten.stack, aten.cat), (0,)),
    **dict.fromkeys((aten.view, aten._unsafe_view, aten.reshape, aten.squeeze, aten.unsqueeze, aten.alias), (0,)),
    **dict.fromkeys((aten.select, aten.slice, aten.permute, aten.t, aten.transpose, aten.expand), (0,)),
}

_BILINEAR = frozenset({aten.mul, aten.mv, aten.dot, aten.mm})
"""Products of their first two arguments; only one may depend on the sums, since a product of two sums is not affine."""


def affine_ops(value: LazyValue, sums: Collection[LazyValue]) -> list[LazyValue] | None:
    """Return the values between sums and a value that is a constant plus constant multiples of them.

    Args:
        value: a replicated value.
        sums: partials that it may depend on.

    Returns:
        those that depend on the sums, in order; None where it depends on none, or the ops don't show it.
    """
    depending, found = {*sums}, list[LazyValue]()
    for v in computation([value], lambda v: v.combine is not None):
        if v.node is None or v.combine is not None or depending.isdisjoint(v.node.operands()):
            continue
        if not v.needs_grad or not _is_affine_in(v.node, depending):
            return None
        depending.add(v)
        found.append(v)
    return found if value in depending else None


def _is_affine_in(node: LazyNode, depending: Collection[LazyValue]) -> bool:
    """Return whether an op on replicated values is affine in those of its operands that depend on the sums."""
    arguments = [*node.args, *node.kwargs.values()]
    packet = getattr(node.op, "overloadpacket", None)
    leaves = ((n, leaf) for n, x in enumerate(arguments) for leaf in tree_find(LazyValue, x))
    positions = [n for n, leaf in leaves if leaf in depending]
    if packet not in (aten.stack, aten.cat) and any(not isinstance(arguments[n], LazyValue) for n in positions):
        return False
    if packet in JOINTLY_LINEAR:
        # div.Tensor_mode rounds.
        plain = not any(isinstance(x, str) for x in arguments)
        return plain and all(position in JOINTLY_LINEAR[packet] for position in positions)
    return packet in _BILINEAR and len(positions) == 1
