"""Ops that treat each row of a batch independently: padding along batch dims only makes rows that nobody reads.

The core dims of an operand are those that the op mixes; all dims before them are batch dims. Padded rows are filled
with valid ones, so that an op which needs a positive definite matrix, or an index in range, gets one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._ops import OpOverloadPacket

from subtensors.dispatch.ops.tree import PyTree, tree_map_only
from subtensors.dispatch.padded.interpreter import PaddedCall, apply, refuse, run, table
from subtensors.dispatch.padded.padded_value import PaddedValue, result
from subtensors.dispatch.padded.pointwise import broadcast_dim, gradient_safe, pointwise
from subtensors.dispatch.padded.true_sizes import TrueSizes, merge_sizes
from subtensors.dispatch.sizes.dim_factors import Factors, bucket_of, is_padded, static_dims

aten = torch.ops.aten

# The number of trailing dims that an op mixes, in each of its tensors.
MATRIX_OPS = """linalg_inv_ex linalg_inv inverse linalg_cholesky_ex linalg_cholesky cholesky cholesky_inverse linalg_eig
    linalg_eigvals _linalg_eigh linalg_eigh linalg_eigvalsh _linalg_svd linalg_svd linalg_svdvals svd
    linalg_qr qr linalg_lu linalg_lu_factor linalg_lu_factor_ex _linalg_det linalg_det det _linalg_slogdet
    linalg_slogdet slogdet logdet linalg_matrix_exp matrix_exp linalg_ldl_factor linalg_ldl_factor_ex
    linalg_matrix_power matrix_power linalg_cond linalg_matrix_norm cholesky_solve triangular_solve
    linalg_solve_triangular pinverse geqrf"""
IMAGE_OPS = {
    1: """upsample_linear1d upsample_nearest1d _upsample_nearest_exact1d reflection_pad1d replication_pad1d""",
    2: """upsample_bilinear2d upsample_nearest2d _upsample_nearest_exact2d upsample_bicubic2d _upsample_bilinear2d_aa
        _upsample_bicubic2d_aa adaptive_max_pool2d reflection_pad2d replication_pad2d max_unpool2d""",
    3: """upsample_trilinear3d upsample_nearest3d _upsample_nearest_exact3d adaptive_max_pool3d reflection_pad3d
        replication_pad3d max_unpool3d grid_sampler_2d pixel_shuffle pixel_unshuffle channel_shuffle
        native_channel_shuffle im2col col2im""",
    4: "grid_sampler_3d",
}

# Pivots and the factors of reflectors are vectors; tolerances are scalars.
MIXED_OPS = {
    "lu_unpack": (2, 1),
    "linalg_lu_solve": (2, 1, 2),
    "linalg_ldl_solve": (2, 1, 2),
    "linalg_householder_product": (2, 1),
    "orgqr": (2, 1),
    "ormqr": (2, 1, 2),
    "linalg_pinv": (2, 0, 0),
    "linalg_matrix_rank": (2, 0, 0),
    "_euclidean_dist": (2, 2),
}


def _overloads(names: str) -> list[OpOverloadPacket]:
    return [getattr(aten, name) for name in names.split() if hasattr(aten, name)]


_CORE: dict[OpOverloadPacket, int | tuple[int, ...]] = dict.fromkeys(_overloads(MATRIX_OPS), 2)
_CORE |= {packet: rank for rank, names in IMAGE_OPS.items() for packet in _overloads(names)}
_CORE |= {packet: cores for name, cores in MIXED_OPS.items() for packet in _overloads(name)}


def by_last_dims(call: PaddedCall) -> PyTree:
    """Run an op that mixes its last dims."""
    cores = _CORE[call.op.overloadpacket]
    operands = len(call.values)
    if [call.get("dim1", -2), call.get("dim2", -1)] != [-2, -1] or ("ord" in call and call["dim"] != [-2, -1]):
        raise refuse(call, "it mixes other dims than the last")
    if isinstance(cores, tuple) and len(cores) < operands:
        raise refuse(call, "the layout of its operands is unknown")
    return row_wise(call, cores[:operands] if isinstance(cores, tuple) else [cores] * operands)


def row_wise(call: PaddedCall, cores: Sequence[int]) -> PyTree:
    """Run an op whose rows are independent.

    Args:
        call: the call.
        cores: the number of mixed trailing dims of each operand.
    """
    operands = call.values
    for x, core in zip(operands, cores, strict=True):
        if x.dim() < core:
            raise refuse(call, f"an operand has less than {core} dims")
        if any(x.is_padded(d) for d in range(max(x.dim() - core, 0), x.dim())):
            raise refuse(call, f"it mixes the last {core} dims")
    batches = [
        PaddedValue(x.dense, x.dims[: max(x.dim() - core, 0)], x.sizes) for x, core in zip(operands, cores, strict=True)
    ]
    dims, sizes = _batch_dims(batches)
    safe = {id(x): _safe(x, core, dims, sizes) for x, core in zip(operands, cores, strict=True)}
    out = call.dense(tree_map_only(PaddedValue, lambda x: safe[id(x)], call.arguments))
    shape = [bucket_of(f) for f in dims]

    def padded_result(t: Tensor) -> PaddedValue:
        if list(t.shape[: len(shape)]) != shape:
            raise refuse(call, "its rows are not the first dims of its result")
        return result(t, [*dims, *static_dims(t.shape[len(shape) :])], sizes)

    return tree_map_only(Tensor, padded_result, out)


def _batch_dims(batches: Sequence[PaddedValue]) -> tuple[list[Factors], TrueSizes | None]:
    sizes = merge_sizes([x.sizes for x in batches if x.sizes is not None])
    rank = max(len(x.dims) for x in batches)
    return [
        broadcast_dim([x.dims[-back] for x in batches if len(x.dims) >= back], sizes) for back in range(rank, 0, -1)
    ], sizes


def _safe(x: PaddedValue, core: int, dims: Sequence[Factors], sizes: TrueSizes | None) -> Tensor:
    rows = len(x.dims) - core
    if x.padded_dims:
        return x.edge_filled()
    if rows < 0 or not any(is_padded(factors) for factors in dims):
        return x.dense
    inner = x.dims[max(rows, 0) :]
    target = [*dims, *inner]
    return gradient_safe(x, target, [bucket_of(f) for f in target], sizes)


for _packet in _CORE:
    table.register(_packet)(by_last_dims)


_ADAPTIVE = {
    aten.adaptive_avg_pool1d: 1,
    aten.adaptive_max_pool1d: 1,
    aten.adaptive_avg_pool2d: 2,
    aten._adaptive_avg_pool2d: 2,
    aten.adaptive_avg_pool3d: 3,
    aten._adaptive_avg_pool3d: 3,
}


@table.register(*_ADAPTIVE)
def adaptive_pool(call: PaddedCall) -> PyTree:
    """Pool to a single position as a reduction; more windows would depend on the true size."""
    x: PaddedValue = call["self"]
    rank = _ADAPTIVE[call.op.overloadpacket]
    over = range(x.dim() - rank, x.dim())
    if any(size != 1 for size in call["output_size"]) or not any(x.is_padded(d) for d in over):
        return row_wise(call, [rank])
    if call.op.overloadpacket is aten.adaptive_max_pool1d:
        return run(aten.max.dim, (x, x.dim() - 1, True), {})
    return apply(aten.mean.dim, x, list(over), True)


@table.register(aten._linalg_solve_ex)
def solve(call: PaddedCall) -> PyTree:
    """Solve systems of equations; the right side holds vectors if it has a dim less than the matrices."""
    a, b = call["A"], call["B"]
    vectors = b.dim() == 1 or (a.dim() - 1 == b.dim() and b.shape == a.shape[:-1])
    return row_wise(call, [2, 1 if vectors else 2])


@table.register(aten._linalg_check_errors)
def check_errors(call: PaddedCall) -> None:
    """Raise if the op failed on a valid matrix."""
    call.dense({"info": call["info"].edge_filled()})


@table.register(aten.cosine_similarity)
def cosine(call: PaddedCall) -> PaddedValue:
    """The cosine of the angle between vectors along a dim, their norms at least eps."""
    a, b = run(aten.broadcast_tensors.default, ([call["x1"], call["x2"]],), {})
    d = [call["dim"]]
    norms = [apply(aten.linalg_vector_norm.default, x, 2, d) for x in (a, b)]
    product = apply(aten.sum.dim_IntList, apply(aten.mul.Tensor, a, b), d)
    for norm in norms:
        floor = norm.like(ClampValue.apply(norm.dense, call["eps"]))  # type: ignore[no-untyped-call]
        product = apply(aten.div.Tensor, product, floor)
    return product


class ClampValue(torch.autograd.Function):
    """Clamp from below without a gradient for the clamping, as torch clamps these norms."""

    @staticmethod
    def forward(ctx: object, x: Tensor, minimum: float) -> Tensor:
        """The clamped values."""
        return x.clamp_min(minimum)

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> tuple[Tensor, None]:
        """The gradient, unchanged."""
        return gradients[0], None


@table.register(aten.cdist, aten._cdist_forward)
def distances(call: PaddedCall) -> PaddedValue:
    """The distance from each row of one matrix to each row of another; zeros in padded features add nothing."""
    a, b = call["x1"], call["x2"]
    sizes = call.sizes()
    features = broadcast_dim([a.dims[-1], b.dims[-1]], sizes)
    dims, _ = _batch_dims([PaddedValue(x.dense, x.dims[:-2], x.sizes) for x in (a, b)])
    filled = {
        name: PaddedValue(x.dense, (*x.dims[:-1], features), sizes).filled(0) for name, x in (("x1", a), ("x2", b))
    }
    return result(call.dense(filled), [*dims, a.dims[-2], b.dims[-2]], sizes).gradient_masked()


@table.register(aten.glu)
def gated(call: PaddedCall) -> PaddedValue:
    """One half of a dim times the sigmoid of the other."""
    x: PaddedValue = call["self"]
    d = call["dim"] % x.dim()
    if x.is_padded(d):
        raise refuse(call, "the boundary between the halves of a padded dim depends on its true size")
    out = call.dense()
    return result(out, [*x.dims[:d], *static_dims([out.shape[d]]), *x.dims[d + 1 :]], x.sizes)


@table.register(aten.linalg_cross, aten.cross)
def cross(call: PaddedCall) -> PyTree:
    """The vector product along a dim of size 3."""
    rank = max(x.dim() for x in call.values)
    d = call.get("dim")
    if d is None or any(x.is_padded(d % rank - rank) for x in call.values if x.dim() >= rank - d % rank):
        raise refuse(call, "the dim of the vectors is padded or not named")
    return pointwise(call)


@table.register(*_overloads("""_fft_c2c _fft_r2c _fft_c2r"""))
def fourier(call: PaddedCall) -> PaddedValue:
    """A Fourier transform of some dims; the others are batch dims."""
    x: PaddedValue = call["self"]
    mixed = {d % x.dim() for d in call["dim"]}
    if any(x.is_padded(d) for d in mixed):
        raise refuse(call, "a transform's frequencies depend on the true size")
    out = call.dense({"self": x.edge_filled()})
    dims = [factors if d not in mixed else static_dims([out.shape[d]])[0] for d, factors in enumerate(x.dims)]
    return result(out, dims, x.sizes)
