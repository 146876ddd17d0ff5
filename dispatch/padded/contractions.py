"""Contractions: products summed over shared positions, where padding counts as zero in both operands.

Both must be filled: 0 * NaN is NaN. The gradient of an operand sums over the dims that it lacks, so if one requires
grad the other is filled along those dims too, and the result's gradient is masked.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from subtensors.dispatch.ops.dim_table import has_map
from subtensors.dispatch.ops.op_classes import OpClass
from subtensors.dispatch.ops.tree import PyTree
from subtensors.dispatch.padded.carried_dims import carry
from subtensors.dispatch.padded.errors import UnsupportedCall
from subtensors.dispatch.padded.interpreter import PaddedCall, apply, table
from subtensors.dispatch.padded.padded_value import EDGE_FILL, FINITE_FILL, Fill, PaddedValue, result, unpadded_value
from subtensors.dispatch.padded.pointwise import broadcast_dim, is_padded_alike
from subtensors.dispatch.padded.positions import rows_dim, with_factors
from subtensors.dispatch.padded.true_sizes import SizeKey, TrueSizes, rows_symbol
from subtensors.dispatch.sizes.dim_factors import Factors, bucket_of, is_padded, padded_dim, size_of, static_dims

aten = torch.ops.aten


@table.register(OpClass.CONTRACTION)
def contraction(call: PaddedCall) -> PyTree:
    """Fill the factors with zeros where needed, run the op, and mask the result's gradient where needed."""
    if not has_map(call.op):
        raise UnsupportedCall("its dims are not named")
    key = call.op, *[x.dense.dim() for x in call.values]
    if key not in _products:
        _products[key] = _product(call)
    names, letters, out, at = _products[key]
    if not letters:
        return carry(call)
    operands, added = [call[name] for name in names], None if at is None else call.values[at]
    sizes, tracked = call.sizes(), call.is_tracked
    plan = _plan_contraction(
        letters,
        out,
        tuple(x.dims for x in operands),
        None if added is None else added.dims,
        None if sizes is None else sizes.key,
        tuple(x.is_tracked for x in operands) if tracked else _NEITHER,
    )
    if tracked and _keeps_rows(operands, letters, added, out, plan.dims):
        x = next(x for x in operands if x.padded_dims)
        fill = EDGE_FILL if x.fill == EDGE_FILL else _fill_after(operands, added)
        product = result(call.dense(), plan.out, sizes, fill).gradient_masked()
        x.gradient_is_zero_if(product)
        return product
    changed: dict[str, Tensor] = {}
    for name, x, filling in zip(names, operands, plan.fillings, strict=True):
        filled = _filled(x, filling, sizes)
        if filled is not x.dense:
            changed[name] = filled
        if filling.is_complete:
            x.gradient_is_zero_if()
    product = result(call.dense(changed), plan.out, sizes, _fill_after(operands, added))
    if plan.is_summed or (added is not None and added.is_tracked and plan.added_lacks):
        return product.gradient_masked()
    return product


class _Product(NamedTuple):
    """The dims of a product, which depend on the numbers of dims of its operands alone.

    Args:
        names: of the factors.
        letters: of the dims of each factor; none if the op is no product.
        out: those of the result.
        added: the index of an operand that is added.
    """

    names: tuple[str, ...]
    letters: tuple[str, ...]
    out: str
    added: int | None


_products: dict[tuple[object, ...], _Product] = {}


def _product(call: PaddedCall) -> _Product:
    found = call.dims()
    named = [name for name, x in call.arguments.items() if isinstance(x, PaddedValue)]
    factors = [i for i in range(len(named)) if i != found.added]
    (out,) = found.results
    if not found.combined.isdisjoint(out):
        return _Product((), (), "", None)
    letters = tuple("".join(map(str, found.operands[i])) for i in factors)
    return _Product(tuple(named[i] for i in factors), letters, "".join(map(str, out)), found.added)


@table.register(aten.bilinear)
def bilinear(
    call: PaddedCall, input1: PaddedValue, input2: PaddedValue, weight: PaddedValue, bias: PaddedValue | None
) -> PaddedValue:
    """`input1 @ weight @ input2.T`, row by row."""
    given, sizes = {"input1": input1, "input2": input2}, call.sizes()
    is_padded_elsewhere = any(t is not None and t.padded_dims for t in (weight, bias))
    if is_padded_elsewhere or any(x.is_padded(x.dim() - 1) for x in given.values()):
        raise UnsupportedCall("its features are padded")
    rows = [broadcast_dim([a, b], sizes) for a, b in zip(input1.dims[:-1], input2.dims[:-1], strict=True)]
    filled = {name: PaddedValue(x.dense, (*rows, x.dims[-1]), sizes).filled(0) for name, x in given.items()}
    out = call.dense(filled)
    return result(out, [*rows, *static_dims([out.shape[-1]])], sizes).gradient_masked()


@table.register(aten.cov)
def covariance(
    call: PaddedCall, x: PaddedValue, correction: int, fweights: PaddedValue | None, aweights: PaddedValue | None
) -> PaddedValue:
    """Products of deviations from the row means, divided by the number of valid columns minus the correction."""
    if fweights is not None or aweights is not None or not x.dense.is_floating_point():
        raise UnsupportedCall("its columns have weights, or it is not floating point")
    rows = x if x.dim() == 2 else apply(aten.unsqueeze.default, x, 0)
    distance = apply(aten.sub.Tensor, rows, apply(aten.mean.dim, rows, [1], True))
    product = apply(aten.matmul.default, distance, apply(aten.t.default, distance))
    out = product.dense / (rows.valid_count([1]) - correction).clamp(min=0)
    return product.like(out) if rows.shape[0] > 1 else unpadded_value(out.reshape(()))


class _Filling(NamedTuple):
    """The part of an operand that is filled with zeros.

    Args:
        wanted: the dims along which it is filled.
        assumed: the operand's dims, with those of the other operand where that is padded; None if they are its own.
        is_complete: whether these are all of its padded dims.
    """

    wanted: list[int]
    assumed: tuple[Factors, ...] | None
    is_complete: bool


class _ContractionPlan(NamedTuple):
    """The part of a contraction's plan that depends only on the dims of its operands.

    Args:
        dims: of each letter.
        out: of the result.
        fillings: of each operand.
        is_summed: whether a requested gradient sums over padded positions of the result.
        added_lacks: whether the gradient of the added operand does.
    """

    dims: dict[str, Factors]
    out: tuple[Factors, ...]
    fillings: list[_Filling]
    is_summed: bool
    added_lacks: bool


_NEITHER = (False, False)


@functools.lru_cache(4096)
def _plan_contraction(
    letters: tuple[str, ...],
    out: str,
    operands: tuple[tuple[Factors, ...], ...],
    added: tuple[Factors, ...] | None,
    sizes: SizeKey | None,
    tracked: tuple[bool, ...],
) -> _ContractionPlan:
    """Plan a contraction from the dims of its operands.

    Args:
        letters: of the dims of each operand.
        out: of the result's.
        operands, added: their dims.
        sizes: the true sizes behind the dims.
        tracked: the operands that require grad.
    """
    dims: dict[str, Factors] = {}
    for letter in dict.fromkeys("".join(letters)):
        factors = [own[at.index(letter)] for own, at in zip(operands, letters, strict=True) if letter in at]
        dims[letter] = broadcast_dim(factors, sizes)
    for back in range(1, len(added or ()) + 1):
        assert added is not None
        dims[out[-back]] = broadcast_dim([added[-back], dims[out[-back]]], sizes)
    contracted = {letter for letter in dims if letter not in out}
    lacking = [_lacks(own, at, out, dims) for own, at in zip(operands, letters, strict=True)]
    sums = [is_tracked and lacks for is_tracked, lacks in zip(tracked, lacking, strict=True)]
    fillings = []
    for own, at, other_sums in zip(operands, letters, reversed(sums), strict=True):
        to_fill = {letter for letter in at if letter in contracted} | (set(at) if other_sums else set())
        assumed = tuple(
            dims[letter] if letter in to_fill and bucket_of(own[i]) == bucket_of(dims[letter]) else own[i]
            for i, letter in enumerate(at)
        )
        is_complete = to_fill.issuperset(at[d] for d, factors in enumerate(own) if is_padded(factors))
        wanted = [i for i, letter in enumerate(at) if letter in to_fill]
        fillings.append(_Filling(wanted, None if assumed == own or sizes is None else assumed, is_complete))
    lacks_added = added is not None and _lacks(added, out[len(out) - len(added) :], out, dims)
    return _ContractionPlan(dims, tuple(dims[letter] for letter in out), fillings, any(sums), lacks_added)


def _keeps_rows(
    operands: Sequence[PaddedValue],
    letters: Sequence[str],
    added: PaddedValue | None,
    out: str,
    dims: dict[str, Factors],
) -> bool:
    """Return whether one operand alone is padded, with finite padding, along dims of the result that no other has.

    Its padded rows are then rows of the result; they are combined with gradients only, which are zero there.
    """
    padded = [(x, at) for x, at in zip(operands, letters, strict=True) if x.padded_dims]
    if len(padded) != 1 or not padded[0][0].padding_is_finite:
        return False
    x, at = padded[0]
    own = {at[d] for d in x.padded_dims}
    other_letters = set("".join(letters).replace(at, "", 1))
    addend_letters = set() if added is None else {out[-b] for b in range(1, added.dim() + 1) if added.shape[-b] != 1}
    return (
        own == {letter for letter in dims if is_padded(dims[letter])}
        and own <= set(out) - other_letters - addend_letters
    )


@table.register(aten._grouped_mm)
def grouped_mm(call: PaddedCall, x: PaddedValue, mat2: PaddedValue, offs: PaddedValue | None) -> PaddedValue:
    """A product for each group of rows, which end where `offs` says: no group has the padding, so nothing reads it."""
    if x.dim() != 2 or mat2.dim() != 3 or x.is_padded(1) or mat2.padded_dims or offs is None or offs.padded_dims:
        raise UnsupportedCall("it has padding elsewhere than in the rows of its groups")
    x = with_factors(x, 0, padded_dim(x.shape[0], size_of(x.dims[0])))
    return result(call.dense({"self": x.dense}), [x.dims[0], mat2.dims[2]], call.sizes())


def _fill_after(operands: Sequence[PaddedValue], added: PaddedValue | None) -> Fill | None:
    """Return the known fill: products with zeros are zeros if the other factors are finite; addends keep theirs."""
    is_zero = all(x.fill == 0 for x in operands if x.padded_dims)
    return FINITE_FILL if is_zero and (added is None or not added.padded_dims or added.fill is not None) else None


def _lacks(own: Sequence[Factors], at: str, out: str, dims: dict[str, Factors]) -> bool:
    """Return whether the operand's gradient sums over a padded dim of the result, or takes all of it as valid."""
    for letter in out:
        if is_padded(dims[letter]) and (letter not in at or not is_padded_alike(own[at.index(letter)], dims[letter])):
            return True
    return False


def _filled(x: PaddedValue, filling: _Filling, sizes: TrueSizes | None) -> Tensor:
    """Return the operand's storage with zeros in the padding of some dims, the other operand's padding included."""
    if filling.assumed is None:
        return x.filled(0, filling.wanted)
    widened = replace(x, dims=filling.assumed, sizes=sizes, fill=None)
    try:
        if sizes is not None and sizes.rows is not None:
            if not any(f.size == rows_symbol() for factors in filling.assumed for f in factors):
                # An unpadded operand has nothing to fill; the other operand's zeros suffice.
                return x.filled(0, filling.wanted)
            rows_dim(widened)
    except UnsupportedCall:
        return x.filled(0, filling.wanted)
    return widened.filled(0, filling.wanted)
