"""Pointwise ops: `out[i]` is a function of the operands at `i`, so valid positions never see the padding."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from subtensors.dispatch.ops.op_classes import OpClass
from subtensors.dispatch.ops.tree import PyTree, tree_map_only
from subtensors.dispatch.padded.errors import UnsupportedCall
from subtensors.dispatch.padded.interpreter import PaddedCall, refuse, table
from subtensors.dispatch.padded.padded_value import EDGE_FILL, FINITE_FILL, Fill, PaddedValue, masked_gradient, result
from subtensors.dispatch.padded.true_sizes import Named, TrueSizes, merge_sizes
from subtensors.dispatch.sizes.dim_factors import Factor, Factors, bucket_of, is_padded, size_of, static
from subtensors.dispatch.sizes.expressions import multiplied

if TYPE_CHECKING:
    import sympy

# f(0) == 0 in every dtype, with the other arguments at their defaults.
_KEEPS_ZERO = frozenset(
    """abs neg relu gelu silu sin tan asin atan sinh tanh asinh atanh sqrt square expm1 log1p erf sign sgn trunc floor
    ceil round frac positive clone _to_copy alias detach contiguous relu6 leaky_relu hardtanh hardswish mish softsign
    conj_physical nan_to_num to copy""".split()
)

_KEEPS_VALUES = frozenset("clone alias detach contiguous".split())

# The derivative is a number where the operands are, for the first ones always: a gradient of zero stays zero.
_LINEAR = frozenset("add sub neg rsub clone _to_copy to alias detach positive contiguous".split())
_SMOOTH = _LINEAR | frozenset(
    "mul gelu relu silu sigmoid tanh sin cos mish softsign hardtanh relu6 leaky_relu hardswish".split()
)

# No larger than their operand, or than a constant.
_BOUNDED = frozenset("neg abs relu gelu silu sigmoid tanh sin cos mish softsign relu6 hardswish".split())

_CASTS = frozenset("_to_copy to".split())

# A CPU refuses a zero among the whole numbers that these divide by, and padding is often zero.
_DIVIDES = frozenset("floor_divide remainder fmod div".split())

aten = torch.ops.aten


@table.register(OpClass.POINTWISE, aten.fake_quantize_per_tensor_affine)
def pointwise(call: PaddedCall) -> PyTree:
    """Run the op on the storages, which broadcast as the logical tensors do."""
    operands = call.values
    dims, sizes = broadcast(operands)
    out_shape = tuple(map(bucket_of, dims))
    named = tree_map_only(PaddedValue, lambda x: gradient_safe(x, dims, out_shape, sizes), call.named)
    divisor = call.named.get("other")
    if isinstance(divisor, PaddedValue) and not divisor.dense.is_floating_point() and _name(call) in _DIVIDES:
        named["other"] = divisor.filled(1)
    out = call.dense(named)
    fill = _fill_after(call, operands, dims)
    if isinstance(out, Tensor) and out.requires_grad:
        noted = result(out, dims, sizes, fill).gradient_tracked()
        _say_what_is_sent(call, operands, noted)
        return noted
    return tree_map_only(Tensor, lambda t: result(t, dims, sizes, fill), out)


@table.register(aten.fake_quantize_per_channel_affine)
def quantized_by_channel(call: PaddedCall) -> PaddedValue:
    """Rounded to a scale of its channel's own."""
    x: PaddedValue = call["self"]
    if x.is_padded(call["axis"] % x.dim()):
        raise refuse(call, "the channels are padded")
    return x.like(call.dense())


def _say_what_is_sent(call: PaddedCall, operands: Sequence[PaddedValue], out: PaddedValue) -> None:
    name = _name(call)
    if name in _LINEAR or (name in _SMOOTH and all(_is_tame(x, out) for x in operands)):
        for x in operands:
            if all(d >= 0 and is_padded_alike(x.dims[d], out.dims[d - x.dim()]) for d in _padded_from_behind(x, out)):
                x.gradient_is_zero_if(out)


def _padded_from_behind(x: PaddedValue, out: PaddedValue) -> list[int]:
    """The dims of an operand that are padded ones of the result; negative where it lacks them."""
    return [d - out.dim() + x.dim() for d in out.padded_dims]


def _is_tame(x: PaddedValue, out: PaddedValue) -> bool:
    """Return whether an operand of a broadcast op is tame (`is_tame`) at the padded positions of the result."""
    return x.padding_is_bounded if x.padded_dims else not _is_aligned(x, out.dims)


def _is_aligned(x: PaddedValue, dims: Sequence[Factors]) -> bool:
    """Return whether an operand without padding has positions of its own where the result is padded."""
    own = zip(reversed(x.shape), reversed(dims), strict=False)
    return not x.padded_dims and any(n != 1 and is_padded(factors) for n, factors in own)


@table.register(aten.copy.default)
def copied(call: PaddedCall) -> PaddedValue:
    """`copy`: the second operand broadcast to the first, which gives dtype and shape."""
    dims, sizes = broadcast([call["self"], call["src"]])
    if len(dims) != call["self"].dim():
        raise refuse(call, "the source has more dims than the destination")
    shape = tuple(map(bucket_of, dims))
    source = gradient_safe(call["src"], dims, shape, sizes)
    # Torch has no gradient of `copy` itself.
    return result(source.expand(shape).to(call["self"].dense, copy=True), dims, sizes)


def broadcast(operands: Sequence[PaddedValue]) -> tuple[tuple[Factors, ...], TrueSizes | None]:
    """The dims of a broadcast result, and the sizes they speak of.

    Raises:
        Inexpressible: two operands have different true sizes along one dim.
    """
    sizes = merge_sizes([x.sizes for x in operands if x.sizes is not None])
    return _broadcast(tuple([x.dims for x in operands]), None if sizes is None else sizes.named), sizes


@functools.lru_cache(4096)
def _broadcast(operands: tuple[tuple[Factors, ...], ...], sizes: Named | None) -> tuple[Factors, ...]:
    """The dims that operands of these dims broadcast to."""
    rank = max(map(len, operands), default=0)
    return tuple(
        broadcast_dim([dims[-back] for dims in operands if len(dims) >= back], sizes) for back in range(rank, 0, -1)
    )


def broadcast_dim(candidates: Sequence[Factors], sizes: Named | TrueSizes | None) -> Factors:
    """One dim of several operands: a padded one wins over a plain one of its bucket's size, and any over bucket 1.

    What a slice as `x[:, :1]` leaves of a padded dim is Min(1, size) long: where that is 0 there is no plain program.
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
                # Each is there or not, and what they make is there where all are.
                return (Factor(1, multiplied(*(size_of(factors) for factors in padded))),)
            raise UnsupportedCall(
                f"dims of true size {_sizes(chosen)} and {_sizes(other)} meet, which are not the same"
            )
    for other in candidates:
        if bucket_of(other) not in (1, bucket_of(chosen)):
            raise UnsupportedCall(
                f"a dim of bucket {bucket_of(chosen)} (true size {_sizes(chosen)}) meets a plain dim of "
                f"{bucket_of(other)}: pad that tensor on the same Dim"
            )
    return chosen


def same_factors(a: Factors, b: Factors, sizes: Named | TrueSizes | None) -> bool:
    """Return whether two dims are valid at the same positions, whatever the true sizes are."""
    if [f.bucket for f in a] != [f.bucket for f in b] or sizes is None:
        return False
    return all(_same_size(f.size, g.size, sizes.symbols, sizes.buckets) for f, g in zip(a, b, strict=True))


@functools.cache
def _same_size(a: sympy.Expr, b: sympy.Expr, symbols: tuple[sympy.Symbol, ...], buckets: tuple[int, ...]) -> bool:
    if a == b:
        return True
    free = list((a - b).free_symbols)
    if len(free) != 1 or free[0] not in symbols:
        return False
    import sympy

    # One symbol has few values: as many as its bucket.
    difference = sympy.lambdify(free, a - b, modules=[{"Max": max, "Min": min}, "math"])
    return all(difference(n) == 0 for n in range(buckets[symbols.index(free[0])] + 1))


def gradient_safe(x: PaddedValue, dims: Sequence[Factors], shape: Sequence[int], sizes: TrueSizes | None) -> Tensor:
    """The storage of an operand of a broadcast op.

    One that lacks a padded dim of the result, or has only valid positions there, would take padding's gradients for
    its own: it is expanded first, and the gradient masked before it is added up.
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
    target = [1] * (len(dims) - x.dim()) + list(x.shape)
    for d in lacking:
        target[d] = shape[d]
    mask_dims = [d for d in range(len(dims)) if mask.dim() == len(dims) and mask.shape[d] != 1]
    for d in mask_dims:
        target[d] = shape[d]
    return masked_gradient(x.dense.expand(target), mask, sizes)


def is_padded_alike(own: Factors, of_result: Factors) -> bool:
    """Return whether an operand's dim is padded to the result's bucket, neither unpadded nor broadcast."""
    return is_padded(own) and bucket_of(own) == bucket_of(of_result)


def _fill_after(call: PaddedCall, operands: Sequence[PaddedValue], dims: Sequence[Factors]) -> Fill | None:
    """The known fill of the result: zero where the op keeps zero, the first valid values where operands repeat them."""
    name, fill = _name(call), operands[0].fill
    if _repeats(call, operands, dims):
        return EDGE_FILL
    if len(operands) == 2 and name in ("add", "sub"):
        is_zero = all(x.fill == 0 and x.dims == operands[0].dims for x in operands)
        return 0 if is_zero and operands[0].padded_dims else None
    if len(operands) != 1:
        return None
    if fill == FINITE_FILL and (
        name in _BOUNDED or (name in _CASTS and _holds_as_much(call["self"].dense.dtype, call))
    ):
        return FINITE_FILL
    return fill if (fill == 0 and name in _KEEPS_ZERO) or name in _KEEPS_VALUES else None


def _repeats(call: PaddedCall, operands: Sequence[PaddedValue], dims: Sequence[Factors]) -> bool:
    """Return whether the padding of the result, like that of the operands, repeats the first valid positions."""
    return (
        all(x.fill == EDGE_FILL if x.padded_dims else not _is_aligned(x, dims) for x in operands)
        and torch.Tag.nondeterministic_seeded not in call.op.tags
    )


def _holds_as_much(dtype: torch.dtype, call: PaddedCall) -> bool:
    """Return whether finite numbers of this dtype stay finite in the dtype that they are cast to."""
    to = call.get("dtype") or dtype
    return all(t.is_floating_point for t in (dtype, to)) and torch.finfo(to).max > 0.99 * torch.finfo(dtype).max


def _name(call: PaddedCall) -> str:
    """The op's, of one in place that of what it computes."""
    name: str = call.op._schema.name
    return name.split("::")[1].rstrip("_")


def _sizes(factors: Factors) -> str:
    return " x ".join(str(factor.size) for factor in factors)
