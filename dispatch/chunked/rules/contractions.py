"""Matrix products and other contractions: one rule for all of them, from the names of their dims."""

from __future__ import annotations

import torch
from torch._ops import OpOverload

from subtensors.dispatch.chunked.lazy_graph import Combine, LazyValue, RowSlice, emit, replicated
from subtensors.dispatch.chunked.record import RULES, BoundCall, broadcast, record, sliced
from subtensors.dispatch.ops.tree import PyTree

aten = torch.ops.aten

# op: (the arguments that are factors, the dims of each and of the result, the argument added to the product).
PRODUCTS: dict[OpOverload, tuple[tuple[str, ...], str, str | None]] = {
    aten.mm.default: (("self", "mat2"), "ik,kj->ij", None),
    aten.addmm.default: (("mat1", "mat2"), "ik,kj->ij", "self"),
    aten.bmm.default: (("self", "mat2"), "bik,bkj->bij", None),
    aten.baddbmm.default: (("batch1", "batch2"), "bik,bkj->bij", "self"),
    aten.mv.default: (("self", "vec"), "ik,k->i", None),
    aten.addmv.default: (("mat", "vec"), "ik,k->i", "self"),
    aten.dot.default: (("self", "tensor"), "k,k->", None),
    aten.vdot.default: (("self", "other"), "k,k->", None),
    aten.addr.default: (("vec1", "vec2"), "i,j->ij", "self"),
}


@RULES.register(*PRODUCTS)
def product(call: BoundCall) -> PyTree:
    """Chunk a product along the chunked dim of a factor.

    A factor without that dim is replicated. Where the chunked dim is summed over, every chunk computes a part of the
    sum. Where each factor is chunked along a dim of its own, the smaller one is replicated.
    """
    names, formula, added = PRODUCTS[call.op]
    inputs, result = formula.split("->")
    letters = dict(zip(names, inputs.split(","), strict=True))
    if added is not None and (call["beta"], call["alpha"]) != (1, 1):
        return _scaled(call, names, added)
    letter = _chunked_letter(call, letters)
    if letter is None:
        return record(call.op, *(replicated(x) if isinstance(x, LazyValue) else x for x in call.positional))
    leader = next(n for n in names if _chunked_dim(call[n]) == letters[n].find(letter) >= 0)
    layout = call[leader].layout
    operands: dict[int, LazyValue | RowSlice] = {}
    for name in names:
        dim = letters[name].find(letter)
        value = call[name]
        operands[id(value)] = replicated(value) if dim < 0 else sliced(value, layout.with_dim(dim))
    if len(operands) < len(names):
        return _squared(call, names)
    if letter not in result:
        if added is not None:
            return record(aten.add.Tensor, record(_PLAIN_PRODUCTS[call.op], *(call[n] for n in names)), call[added])
        return call.emit([Combine.SUM], layout.axis, lambda v: operands[id(v)])
    out = layout.with_dim(result.index(letter))
    ndim = len(result)
    return call.emit([out], layout.axis, lambda v: operands[id(v)] if id(v) in operands else broadcast(v, ndim, out))


def linear_layer(rows: LazyValue, weight: LazyValue, bias: LazyValue | None, grad: bool) -> LazyValue:
    """Record `F.linear` of rows by a weight as `product` would, without torch or the rule table: every step has one.

    Args:
        rows: (N, H), chunked along N.
        weight: (V, H), replicated, of the same dtype and device.
        bias: (V,), such a value, or None.
        grad: whether it is differentiable.

    Returns:
        (N, V), chunked along N.
    """
    layout = rows.layout
    assert layout is not None
    transposed = emit(aten.t.default, (weight,), {}, weight.meta.t(), [None], None, grad)
    meta = torch.empty(rows.shape[0], weight.shape[0], dtype=rows.dtype, device="meta")
    factors = (rows, transposed) if bias is None else (bias, rows, transposed)
    op = aten.mm.default if bias is None else aten.addmm.default
    return emit(op, factors, {}, meta, [layout], layout.axis, grad)


def _chunked_dim(value: LazyValue) -> int:
    return -1 if value.layout is None else value.layout.dim


def _chunked_letter(call: BoundCall, letters: dict[str, str]) -> str | None:
    """Return the name of the dim that the product is chunked along; None to replicate both factors."""
    chunked = [(n, letters[n][call[n].layout.dim]) for n in letters if call[n].layout is not None]
    if not chunked:
        return None
    shared = [letter for _, letter in chunked if all(letter in names for names in letters.values())]
    if shared:
        return shared[0]
    # Neither factor has the other's dim: the larger one stays chunked.
    return max(chunked, key=lambda pair: call[pair[0]].meta.numel())[1]


_PLAIN_PRODUCTS: dict[OpOverload, OpOverload] = {
    aten.addmm.default: aten.mm.default,
    aten.baddbmm.default: aten.bmm.default,
    aten.addmv.default: aten.mv.default,
    aten.addr.default: aten.ger.default,
}


def _squared(call: BoundCall, names: tuple[str, ...]) -> PyTree:
    """Record a product of a value with itself: an alias gives each factor a layout of its own."""
    call[names[1]] = record(aten.alias.default, call[names[1]])
    return product(call)


def _scaled(call: BoundCall, names: tuple[str, ...], added: str) -> PyTree:
    """Record beta * added + alpha * product, in ops that are chunked one by one."""
    scaled = record(aten.mul.Scalar, record(_PLAIN_PRODUCTS[call.op], *(call[n] for n in names)), call["alpha"])
    if call["beta"] == 0:
        return scaled
    return record(aten.add.Tensor, scaled, record(aten.mul.Scalar, call[added], call["beta"]))
