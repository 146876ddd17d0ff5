"""The dimension maps of products, written as einsum writes them: dims of one letter are shared, those that the result
lacks are summed over."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch._ops import OpOverloadPacket

from subtensors.dispatch.ops.dims import DimMap, Operand, dim_rule

aten = torch.ops.aten

_LETTERS = "abcdefghijklmnopqrstuvw"


@functools.cache
def einsum(formula: str, added: int | None = None, before: bool = False) -> DimMap:
    """Return the map of a sum of products.

    Args:
        formula: a letter for each dim of the operands and of the result, as in "ij,jk->ik".
        added: the number of dims of an operand that is added to the product, and broadcasts to it.
        before: whether that comes before the factors among the arguments.
    """
    inputs, out = formula.split("->")
    operands = tuple(tuple(letters) for letters in inputs.split(","))
    if added is not None:
        broadcast = tuple(out[len(out) - added :])
        operands = (broadcast, *operands) if before else (*operands, broadcast)
    at = None if added is None else 0 if before else len(operands) - 1
    return DimMap(operands, (tuple(out),), frozenset(inputs) - set(out) - {","}, added=at)


FORMULAS: dict[OpOverloadPacket, str] = {
    aten.mm: "ij,jk->ik",
    aten.bmm: "bij,bjk->bik",
    aten.mv: "ij,j->i",
    aten.dot: "i,i->",
    aten.vdot: "i,i->",
    aten.outer: "i,j->ij",
    aten.ger: "i,j->ij",
    aten.addmm: "+ij,jk->ik",
    aten.baddbmm: "+bij,bjk->bik",
    aten.addbmm: "+bij,bjk->ik",
    aten.addmv: "+ij,j->i",
    aten.addr: "+i,j->ij",
}
"""Products of two operands; with a plus they are added to a first one."""


def _by_formula(packet: OpOverloadPacket, formula: str) -> None:
    @dim_rule(packet)
    def product(operands: Sequence[Operand]) -> DimMap:
        return einsum(formula[1:], operands[0].ndim, before=True) if formula[0] == "+" else einsum(formula)


for _packet, _formula in FORMULAS.items():
    _by_formula(_packet, _formula)


@dim_rule(aten.linear)
def linear(x: Operand, weight: Operand, bias: Operand | None) -> DimMap:
    """`input @ weight.T + bias`."""
    leading, features = _LETTERS[: x.ndim - 1], "z" if weight.ndim == 2 else ""
    return einsum(f"{leading}y,{features}y->{leading}{features}", None if bias is None else bias.ndim)


@dim_rule(aten.matmul, aten.linalg_matmul)
def matmul(x: Operand, other: Operand) -> DimMap:
    """A product of matrices or vectors, with leading dims that broadcast."""
    leading = _LETTERS[: max(x.ndim, other.ndim, 2) - 2]
    left = leading[len(leading) - max(x.ndim - 2, 0) :] + "xy" if x.ndim > 1 else "y"
    right = leading[len(leading) - max(other.ndim - 2, 0) :] + "yz" if other.ndim > 1 else "y"
    return einsum(f"{left},{right}->{leading}{'x' * (x.ndim > 1)}{'z' * (other.ndim > 1)}")


@dim_rule(aten.cdist, aten._cdist_forward)
def distances(x1: Operand, x2: Operand) -> DimMap:
    """A distance for each pair of rows of two matrices, with leading dims that broadcast."""
    leading = _LETTERS[: max(x1.ndim, x2.ndim) - 2]
    left, right = (leading[len(leading) + 2 - x.ndim :] for x in (x1, x2))
    return einsum(f"{left}xy,{right}zy->{leading}xz")


@dim_rule(aten.bilinear)
def bilinear(input1: Operand, input2: Operand, weight: Operand, bias: Operand | None) -> DimMap:
    """`input1 @ weight @ input2.T`, row by row, with a matrix of the weight for each output."""
    leading = _LETTERS[: input1.ndim - 1]
    return einsum(f"{leading}x,{leading}y,zxy->{leading}z", None if bias is None else bias.ndim)
