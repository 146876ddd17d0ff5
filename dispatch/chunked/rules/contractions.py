"""Products summed over shared positions: each operand's dims are named, and the name that is chunked decides."""

from __future__ import annotations

from typing import Any

import torch

from subtensors.dispatch.chunked.bound_call import BoundCall, along, broadcast, whole
from subtensors.dispatch.chunked.lazy_graph import Combine, LazyValue, emit
from subtensors.dispatch.chunked.rules.table import RULES, record

aten = torch.ops.aten

# op: (the arguments that are factors, the dims of each and of the result, what is added to the product).
PRODUCTS: dict[Any, tuple[tuple[str, ...], str, str | None]] = {
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
def product(call: BoundCall) -> Any:
    """A product is chunked along the dim that its chunked factor brings to it.

    A factor that lacks that dim is read whole. Where the chunked dim is summed over, every chunk gives a part of the
    sum. Where both factors bring one of their own, the one that is cheaper to have whole is.
    """
    names, formula, added = PRODUCTS[call.op]
    inputs, result = formula.split("->")
    letters = dict(zip(names, inputs.split(","), strict=True))
    if added is not None and (call["beta"], call["alpha"]) != (1, 1):
        return _scaled(call, names, added)
    letter = _letter(call, letters)
    if letter is None:
        return record(call.op, *(whole(x) if isinstance(x, LazyValue) else x for x in call.positional))
    leader = next(n for n in names if _brings(call[n]) == letters[n].find(letter) >= 0)
    layout = call[leader].layout
    brought: dict[int, Any] = {}
    for name in names:
        dim = letters[name].find(letter)
        value = call[name]
        brought[id(value)] = whole(value) if dim < 0 else along(value, layout.at(dim))
    if len(brought) < len(names):
        return _squared(call, names)
    if letter not in result:
        if added is not None:
            return record(aten.add.Tensor, record(_bare(call), *(call[n] for n in names)), call[added])
        return call.emit([Combine.SUM], layout.axis, lambda v: brought[id(v)])
    out = layout.at(result.index(letter))
    ndim = len(result)
    return call.emit([out], layout.axis, lambda v: brought[id(v)] if id(v) in brought else broadcast(v, ndim, out))


def linear_layer(rows: LazyValue, weight: LazyValue, bias: LazyValue | None, grad: bool) -> LazyValue:
    """Record `F.linear` of rows by a weight as `product` would, without asking torch or the table: it is in every step.

    Args:
        rows: (N, H), chunked along N.
        weight: (V, H), whole, of the same dtype and device.
        bias: (V,), such a value, or None.
        grad: whether it is differentiable.

    Returns:
        (N, V), chunked along N.
    """
    layout = rows.layout
    assert layout is not None
    across = emit(aten.t.default, (weight,), {}, weight.meta.t(), [None], None, grad)
    meta = torch.empty(rows.shape[0], weight.shape[0], dtype=rows.dtype, device="meta")
    factors = (rows, across) if bias is None else (bias, rows, across)
    op = aten.mm.default if bias is None else aten.addmm.default
    out: LazyValue = emit(op, factors, {}, meta, [layout], layout.axis, grad)
    return out


def _brings(value: LazyValue) -> int:
    return -1 if value.layout is None else value.layout.dim


def _letter(call: BoundCall, letters: dict[str, str]) -> str | None:
    """The name of the dim that the product is chunked along; None to have its factors whole."""
    brought = [(n, letters[n][call[n].layout.dim]) for n in letters if call[n].layout is not None]
    if not brought:
        return None
    shared = [letter for _, letter in brought if all(letter in names for names in letters.values())]
    if shared:
        return shared[0]
    # Neither factor has the other's: the larger result of the two stays chunked if the smaller is had whole.
    return max(brought, key=lambda pair: call[pair[0]].meta.numel())[1]


def _bare(call: BoundCall) -> Any:
    return {aten.addmm.default: aten.mm.default, aten.baddbmm.default: aten.bmm.default}.get(
        call.op, aten.mv.default if call.op is aten.addmv.default else aten.ger.default
    )


def _squared(call: BoundCall, names: tuple[str, ...]) -> Any:
    """One value in both places: an alias makes them two, each with a layout of its own."""
    call[names[1]] = record(aten.alias.default, call[names[1]])
    return product(call)


def _scaled(call: BoundCall, names: tuple[str, ...], added: str) -> Any:
    """beta * added + alpha * product, in ops that are chunked one by one."""
    scaled = record(aten.mul.Scalar, record(_bare(call), *(call[n] for n in names)), call["alpha"])
    if call["beta"] == 0:
        return scaled
    return record(aten.add.Tensor, scaled, record(aten.mul.Scalar, call[added], call["beta"]))
