"""Pointwise ops: `out[i]` is a function of the operands at `i`, so valid positions never see the padding."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch._ops import OpOverload

from subtensors.dispatch.ops.errors import UnsupportedCall
from subtensors.dispatch.ops.lazy_storage import mask_gradient
from subtensors.dispatch.ops.op_classes import OpClass
from subtensors.dispatch.ops.plain_types import LAZY_TYPES
from subtensors.dispatch.ops.tree import PyTree, tree_map_only
from subtensors.dispatch.padded.interpreter import PaddedCall, table
from subtensors.dispatch.padded.padded_size import is_same
from subtensors.dispatch.padded.padded_value import (
    EDGE_FILL,
    FINITE_FILL,
    Fill,
    PaddedValue,
    ScatteredDim,
    known_sizes,
    masked_gradient,
    result,
)
from subtensors.dispatch.padded.true_sizes import SizeKey, TrueSizes, merge_sizes
from subtensors.dispatch.sizes.dim_factors import Factor, Factors, bucket_of, is_padded, size_of, static
from subtensors.dispatch.sizes.expressions import multiplied

# f(0) == 0 in every dtype, with the other arguments as `_has_usual_numbers` says.
_KEEPS_ZERO = frozenset(
    """abs neg relu gelu silu sin tan asin atan sinh tanh asinh atanh sqrt square expm1 log1p erf sign sgn trunc floor
    ceil round frac positive clone _to_copy alias detach contiguous relu6 leaky_relu hardtanh hardswish mish softsign
    conj_physical nan_to_num to copy""".split()
)

_KEEPS_VALUES = frozenset("clone alias detach contiguous".split())

# The derivative is finite if the operands are (for the linear ops always), so a gradient of zero stays zero.
_LINEAR = frozenset("add sub neg rsub clone _to_copy to alias detach positive contiguous".split())
_SMOOTH = _LINEAR | frozenset(
    "mul gelu relu silu sigmoid tanh sin cos mish softsign hardtanh relu6 leaky_relu hardswish".split()
)

# Results no larger than the operand or a constant.
_BOUNDED = frozenset("neg abs relu gelu silu sigmoid tanh sin cos mish softsign relu6 hardswish".split())

_CASTS = frozenset("_to_copy to".split())

_DIVIDES = frozenset("floor_divide remainder fmod div".split())

aten = torch.ops.aten


def may_divide_by_zero(op: OpOverload, divisor: Tensor) -> bool:
    """Return whether an op raises for a divisor of zero, as padding often is, and the size of what has no elements."""
    is_integer = not (divisor.is_floating_point() or divisor.is_complex()) and divisor.device.type == "cpu"
    return is_integer and op.overloadpacket.__name__.removesuffix("_") in _DIVIDES


@table.register(OpClass.POINTWISE, aten.fake_quantize_per_tensor_affine)
def pointwise(call: PaddedCall) -> PyTree:
    """Run the op on the storages, which broadcast as the unpadded tensors do."""
    operands = call.values
    dims, sizes = broadcast(operands)
    lazy = next((x.dense for x in operands if type(x.dense) in LAZY_TYPES), None)
    named = tree_map_only(PaddedValue, lambda x: gradient_safe(x, dims, sizes, lazy), call.arguments)
    divisor = call.arguments.get("other")
    if isinstance(divisor, PaddedValue) and may_divide_by_zero(call.op, divisor.dense):
        sizes_known = [known_sizes(x, d) for x in operands for d in x.padded_dims]
        is_empty = any(known and not any(known) for known in sizes_known)
        named["other"] = torch.ones_like(divisor.dense) if is_empty else divisor.filled(1)
    out = call.dense(named)
    fill = _fill_after(call, operands, dims)
    if isinstance(out, Tensor) and out.requires_grad:
        noted = result(out, dims, sizes, fill).gradient_tracked()
        _track_operand_gradients(call, operands, noted)
        return noted
    return tree_map_only(Tensor, lambda t: result(t, dims, sizes, fill), out)


@table.register(aten.fake_quantize_per_channel_affine)
def quantized_by_channel(call: PaddedCall, x: PaddedValue, axis: int) -> PaddedValue:
    """Quantize with a scale for each channel."""
    if x.is_padded(axis % x.dim()):
        raise UnsupportedCall("the channels are padded")
    return x.like(call.dense())


def _track_operand_gradients(call: PaddedCall, operands: Sequence[PaddedValue], out: PaddedValue) -> None:
    name = _name(call)
    # An operand without padding is bounded where it has no positions of its own.
    if name in _LINEAR or (
        name in _SMOOTH
        and all(x.padding_is_bounded if x.padded_dims else not _is_aligned(x, out.dims) for x in operands)
    ):
        for x in operands:
            added = out.dim() - x.dim()
            if all(d >= added and is_padded_alike(x.dims[d - added], out.dims[d]) for d in out.padded_dims):
                x.gradient_is_zero_if(out)


def _is_aligned(x: PaddedValue, dims: Sequence[Factors]) -> bool:
    """Return whether an operand without padding has positions of its own where the result is padded."""
    own = zip(reversed(x.shape), reversed(dims), strict=False)
    return not x.padded_dims and any(n != 1 and is_padded(factors) for n, factors in own)


@table.register(aten.copy.default)
def copied(call: PaddedCall, x: PaddedValue, src: PaddedValue) -> PaddedValue:
    """Broadcast the source to the dtype and shape of the destination."""
    dims, sizes = broadcast([x, src])
    if len(dims) != x.dim():
        raise UnsupportedCall("the source has more dims than the destination")
    # Torch has no gradient of `copy` itself.
    return result(expanded(src, dims, sizes).dense.to(x.dense, copy=True), dims, sizes)


def broadcast(operands: Sequence[PaddedValue]) -> tuple[tuple[Factors, ...], TrueSizes | None]:
    """Return the dims of a broadcast result, and the true sizes behind them.

    Raises:
        ScatteredDim: one is flattened there, and another one isn't.
        UnsupportedCall: two operands have different true sizes along one dim.
    """
    sizes = merge_sizes([x.sizes for x in operands if x.sizes is not None])
    try:
        return _broadcast(tuple([x.dims for x in operands]), None if sizes is None else sizes.key), sizes
    except UnsupportedCall:
        for back in range(1, max(x.dim() for x in operands) + 1):
            raise_if_scattered([(x, x.dim() - back) for x in operands if x.dim() >= back], sizes)
        raise


def raise_if_scattered(places: Sequence[tuple[PaddedValue, int]], sizes: TrueSizes | None) -> None:
    """Raise ScatteredDim for an operand that is not flattened in the shared dim, where another of its true size is."""
    along = [(x, d) for x, d in places if x.is_padded(d) and x.shape[d] > 1]
    chosen = max((x.dims[d] for x, d in along), key=len, default=())
    for x, d in along:
        if len(x.dims[d]) < len(chosen) and is_same(size_of(x.dims[d]), size_of(chosen), sizes):
            raise ScatteredDim(x, d, chosen) from None


@functools.lru_cache(4096)
def _broadcast(operands: tuple[tuple[Factors, ...], ...], sizes: SizeKey | None) -> tuple[Factors, ...]:
    """Return the dims that operands of these dims broadcast to."""
    rank = max(map(len, operands), default=0)
    return tuple(
        broadcast_dim([dims[-back] for dims in operands if len(dims) >= back], sizes) for back in range(rank, 0, -1)
    )


def broadcast_dim(candidates: Sequence[Factors], sizes: SizeKey | TrueSizes | None) -> Factors:
    """Broadcast one dim of several operands: a padded dim over an unpadded one of the bucket's size, any over size 1.

    A slice such as `x[:, :1]` makes a padded dim of true size Min(1, size); if that is 0, the unpadded program raises.
    """
    if len(candidates) == 1 and bucket_of(candidates[0]):
        return candidates[0]
    wide = [factors for factors in candidates if bucket_of(factors) != 1]
    candidates = wide or candidates
    padded = [factors for factors in candidates if is_padded(factors)]
    if not padded:
        return max(candidates, key=bucket_of) if all(map(bucket_of, candidates)) else (static(0),)
    chosen = padded[0]
    for other in padded[1:]:
        if other != chosen and not same_factors(chosen, other, sizes):
            if bucket_of(chosen) == 1:
                # The result is valid where all operands are.
                return (Factor(1, multiplied(*(size_of(factors) for factors in padded))),)
            raise UnsupportedCall(
                f"dims of the true sizes {_sizes(chosen)} and {_sizes(other)}, which differ, cannot be combined"
            )
    for other in candidates:
        if bucket_of(other) not in (1, bucket_of(chosen)):
            raise UnsupportedCall(
                f"a dim of bucket {bucket_of(chosen)} (true size {_sizes(chosen)}) cannot be combined with an unpadded "
                f"dim of {bucket_of(other)}: pad that tensor on the same Dim"
            )
    return chosen


def same_factors(a: Factors, b: Factors, sizes: SizeKey | TrueSizes | None) -> bool:
    """Return whether two dims are valid at the same positions, whatever the true sizes are."""
    if [f.bucket for f in a] != [f.bucket for f in b] or sizes is None:
        return False
    return all(is_same(f.size, g.size, sizes) for f, g in zip(a, b, strict=True))


def expanded(x: PaddedValue, dims: Sequence[Factors], sizes: TrueSizes | None) -> PaddedValue:
    """Return an operand expanded to the dims that several broadcast to; its gradient takes nothing from padding."""
    return result(gradient_safe(x, dims, sizes).expand([*map(bucket_of, dims)]), dims, sizes)


def gradient_safe(
    x: PaddedValue, dims: Sequence[Factors], sizes: TrueSizes | None, lazy: Tensor | None = None
) -> Tensor:
    """Return the storage of an operand of a broadcast op, such that its gradient takes nothing from padding.

    An operand that lacks a padded dim of the result, or is unpadded there, sums its gradient over padding: so it is
    expanded first, and the gradient is masked before the sum. Beside a `lazy` storage that is recorded, too.
    """
    if not x.is_tracked or sizes is None:
        return x.dense
    lacking = [
        d
        for d, factors in enumerate(dims)
        if is_padded(factors) and ((back := len(dims) - d) > x.dim() or not is_padded_alike(x.dims[-back], factors))
    ]
    if not lacking:
        return x.dense
    mask = PaddedValue(x.dense, tuple(dims), sizes).mask(lacking)
    if mask is None:
        return x.dense
    if lazy is not None:
        return mask_gradient(x.dense, mask, lazy)
    target = [1] * (len(dims) - x.dim()) + list(x.shape)
    for d, factors in enumerate(dims):
        if d in lacking or (mask.dim() == len(dims) and mask.shape[d] != 1):
            target[d] = bucket_of(factors)
    return masked_gradient(x.dense.expand(target), mask, sizes)


def is_padded_alike(own: Factors, of_result: Factors) -> bool:
    """Return whether an operand's dim is padded to the result's bucket, neither unpadded nor broadcast."""
    return is_padded(own) and bucket_of(own) == bucket_of(of_result)


def _fill_after(call: PaddedCall, operands: Sequence[PaddedValue], dims: Sequence[Factors]) -> Fill | None:
    """Return the known fill of the result: zero if the op keeps zero, `EDGE_FILL` if all operands have it."""
    name, fill = _name(call), operands[0].fill
    if torch.Tag.nondeterministic_seeded not in call.op.tags and all(
        x.fill == EDGE_FILL if x.padded_dims else not _is_aligned(x, dims) for x in operands
    ):
        return EDGE_FILL
    if len(operands) == 2 and name in ("add", "sub"):
        is_zero = all(x.fill == 0 and x.dims == operands[0].dims for x in operands)
        return 0 if is_zero and operands[0].padded_dims and _has_usual_numbers(call, name) else None
    if len(operands) != 1:
        return None
    if fill == FINITE_FILL and (name in _BOUNDED or (name in _CASTS and _is_safe_cast(call["self"].dense.dtype, call))):
        return FINITE_FILL
    keeps_zero = fill == 0 and name in _KEEPS_ZERO and _has_usual_numbers(call, name)
    return fill if keeps_zero or name in _KEEPS_VALUES else None


def _has_usual_numbers(call: PaddedCall, name: str) -> bool:
    """Return whether the other arguments let zero stay zero: finite numbers, and a range that holds it."""
    if name == "hardtanh" and not call["min_val"] <= 0 <= call["max_val"]:
        return False
    return all(math.isfinite(number) for number in call.arguments.values() if isinstance(number, float))


def _is_safe_cast(dtype: torch.dtype, call: PaddedCall) -> bool:
    """Return whether finite numbers of this dtype stay finite in the dtype that they are cast to."""
    to = call.get("dtype") or dtype
    return all(t.is_floating_point for t in (dtype, to)) and torch.finfo(to).max > 0.99 * torch.finfo(dtype).max


def _name(call: PaddedCall) -> str:
    """Return the op's name without the underscore of an in-place op."""
    name: str = call.op._schema.name
    return name.split("::")[1].rstrip("_")


def _sizes(factors: Factors) -> str:
    return " x ".join(str(factor.size) for factor in factors)
