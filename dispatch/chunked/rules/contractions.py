"""Matrix products and other contractions: one rule for all of them, from the names of their dims."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable

import optree
import torch
from torch._ops import OpOverload

from subtensors.dispatch.chunked.lazy_graph import (
    CHUNK_INDEPENDENT_VIEWS,
    Combine,
    LazyValue,
    PerChunk,
    emit,
    is_differentiated,
)
from subtensors.dispatch.chunked.record import RULES, ChunkedCall, record
from subtensors.dispatch.chunked.rules.carried_dims import carry, rows_of
from subtensors.dispatch.ops.op_classes import OpClass
from subtensors.dispatch.ops.tree import PyTree

aten = torch.ops.aten

# The product to which an op adds an operand.
PLAIN_PRODUCTS: dict[OpOverload, OpOverload] = {
    aten.addmm.default: aten.mm.default,
    aten.baddbmm.default: aten.bmm.default,
    aten.addmv.default: aten.mv.default,
    aten.addr.default: aten.ger.default,
}


@RULES.register(aten.mm.default, *PLAIN_PRODUCTS)
def matrix_product(call: ChunkedCall) -> PyTree:
    """Record a product, once for the same operands; a scaled one with an addend in ops that are chunked one by one."""
    beta, alpha = call.get("beta", 1), call.get("alpha", 1)
    if (beta, alpha) == (1, 1):
        return _once(call.op, tuple(call.values), is_differentiated(), lambda: carry(call))
    added, *factors = call.values
    scaled = record(aten.mul.Scalar, record(PLAIN_PRODUCTS[call.op], *factors), alpha)
    return scaled if beta == 0 else record(aten.add.Tensor, scaled, record(aten.mul.Scalar, added, beta))


@RULES.register(OpClass.CONTRACTION, across=True)
def product(call: ChunkedCall) -> PyTree:
    """Sum the products of the chunks, where the rows are summed over."""
    found = call.dims()
    rows = rows_of(call, found)
    if rows.label in found.results[0] or (len(call.values) > 2 and call.op not in PLAIN_PRODUCTS):
        raise call.unchunkable("it combines the rows")
    if call.op in PLAIN_PRODUCTS:
        added, *factors = call.values
        return record(aten.add.Tensor, record(PLAIN_PRODUCTS[call.op], *factors), added)
    return call.emit([Combine.SUM], rows.operand)


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
    layout = rows.row_layout
    transposed = emit(aten.t.default, (weight,), {}, weight.meta.t(), grad=grad)
    meta = torch.empty(rows.shape[0], weight.shape[0], dtype=rows.dtype, device="meta")
    factors = (rows, transposed) if bias is None else (bias, rows, transposed)
    op = aten.mm.default if bias is None else aten.addmm.default
    return _once(op, factors, grad, lambda: emit(op, factors, {}, meta, [layout], grad))


_products: weakref.WeakValueDictionary[Hashable, LazyValue] = weakref.WeakValueDictionary()
"""Recorded products by what they read; the ids of tensors are those that the nodes of the products keep alive."""


def _once(
    op: OpOverload, factors: tuple[LazyValue, ...], grad: bool, record_product: Callable[[], PyTree]
) -> LazyValue:
    """Return the recorded product of these operands, which is recorded once."""
    key = op, grad, *map(_identity, factors)
    known = _products.get(key)
    if known is not None:
        return known
    out: LazyValue = record_product()
    if out.layout is not None:
        _products[key] = out
    return out


def _identity(x: PyTree) -> Hashable:
    """Return what is equal for values that are the same views or casts of one tensor, or one value."""
    if isinstance(x, LazyValue) and x.tensor is not None and x.layout is None:
        return id(x.tensor), x.recorded, x.needs_grad
    node = x.node if isinstance(x, LazyValue) and x.tensor is None else None
    if node is None or (node.name not in CHUNK_INDEPENDENT_VIEWS and node.op is not aten._to_copy.default):
        itself: Hashable = x
        return itself
    call: PyTree = (node.args, node.kwargs)
    leaves = optree.tree_leaves(call, none_is_leaf=True)
    operands = [_identity(y) for y in leaves if not isinstance(y, PerChunk)]
    return node.op, node.grad, x.shape, *operands
