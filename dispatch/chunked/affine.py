"""Affine values: constants plus constant multiples of sums over chunks.

The gradient of an affine value with respect to each sum is known before the sums are, so a chunk can be differentiated
in the pass that computes it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch._ops import OpOverloadPacket

from subtensors.dispatch.chunked.lazy_graph import LazyValue, RowSlice
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


def is_affine(value: LazyValue, sums: Sequence[LazyValue]) -> bool:
    """Return whether a value is a constant plus constant multiples of the sums.

    Args:
        value: a replicated value.
        sums: partials that it may depend on.

    Returns:
        False also where the ops don't show it.
    """
    depends, affine = _analyze(value, {id(v): (True, True) for v in sums})
    return depends and affine


def _analyze(value: LazyValue, known: dict[int, tuple[bool, bool]]) -> tuple[bool, bool]:
    """Return whether a value depends on the sums, and whether it is affine in them; add both to `known`, by its id."""
    if id(value) not in known:
        is_computed = value.node is not None and value.tensor is None and value.combine is None
        known[id(value)] = _analyze_op(value, known) if is_computed else (False, True)
    return known[id(value)]


def _analyze_op(value: LazyValue, known: dict[int, tuple[bool, bool]]) -> tuple[bool, bool]:
    """Analyze a value by its op and its operands."""
    node = value.node
    assert node is not None
    depending: list[int] = []
    nested = False
    for position, argument in enumerate([*node.args, *node.kwargs.values()]):
        for x in tree_leaves(argument):
            if isinstance(x, (LazyValue, RowSlice)):
                depends, affine = _analyze(x.value if isinstance(x, RowSlice) else x, known)
                if depends and not affine:
                    return True, False
                if depends:
                    depending.append(position)
                    nested = nested or not isinstance(argument, LazyValue)
    if not depending:
        return False, True
    packet = getattr(node.op, "overloadpacket", None)
    is_list = packet in (aten.stack, aten.cat)
    if (nested and not is_list) or value.needs_grad is False:
        return True, False
    if packet in JOINTLY_LINEAR:
        # div.Tensor_mode rounds.
        plain = not any(isinstance(x, str) for x in tree_leaves((node.args, node.kwargs)))
        return True, plain and all(position in JOINTLY_LINEAR[packet] for position in depending)
    if packet in _BILINEAR:
        return True, len(depending) == 1 and depending[0] in _BILINEAR[packet]
    return True, False
