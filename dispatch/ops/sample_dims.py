"""The dimension maps of ops that treat the slices of a batch independently.

The core dims of an operand are those that such an op combines; all dims before them are batch dims, which broadcast.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._ops import OpOverloadPacket

from subtensors.dispatch.ops.dims import DimMap, Labels, Operand, carried, dim_rule, labels_of
from subtensors.dispatch.ops.errors import RuleError
from subtensors.dispatch.ops.op_classes import OpClass

aten = torch.ops.aten

# The number of trailing dims that an op combines, in each of its tensors.
MATRIX_OPS = """linalg_inv_ex linalg_inv inverse linalg_cholesky_ex linalg_cholesky cholesky cholesky_inverse linalg_eig
    linalg_eigvals _linalg_eigh linalg_eigh linalg_eigvalsh _linalg_svd linalg_svd linalg_svdvals svd
    linalg_qr qr linalg_lu linalg_lu_factor linalg_lu_factor_ex _linalg_det linalg_det det _linalg_slogdet
    linalg_slogdet slogdet logdet linalg_matrix_exp matrix_exp linalg_ldl_factor linalg_ldl_factor_ex
    linalg_matrix_power matrix_power linalg_cond cholesky_solve triangular_solve
    linalg_solve_triangular pinverse geqrf"""
IMAGE_OPS = {
    1: """upsample_linear1d upsample_nearest1d _upsample_nearest_exact1d avg_pool1d adaptive_avg_pool1d
        adaptive_max_pool1d""",
    2: """upsample_bilinear2d upsample_nearest2d _upsample_nearest_exact2d upsample_bicubic2d _upsample_bilinear2d_aa
        _upsample_bicubic2d_aa adaptive_max_pool2d max_unpool2d avg_pool2d adaptive_avg_pool2d
        _adaptive_avg_pool2d max_pool2d_with_indices""",
    3: """upsample_trilinear3d upsample_nearest3d _upsample_nearest_exact3d adaptive_max_pool3d
        max_unpool3d grid_sampler_2d pixel_shuffle pixel_unshuffle channel_shuffle
        native_channel_shuffle im2col avg_pool3d adaptive_avg_pool3d
        _adaptive_avg_pool3d max_pool3d_with_indices""",
    4: "grid_sampler_3d",
}

# Pivots and the factors of reflectors are vectors; tolerances are scalars; col2im takes columns of flattened windows.
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
    "col2im": (2,),
}


def _packets(names: str) -> list[OpOverloadPacket]:
    return [getattr(aten, name) for name in names.split() if hasattr(aten, name)]


CORE: dict[OpOverloadPacket, tuple[int, ...]] = dict.fromkeys(_packets(MATRIX_OPS), (2, 2))
CORE |= {packet: (rank, rank) for rank, names in IMAGE_OPS.items() for packet in _packets(names)}
CORE |= {packet: cores for name, cores in MIXED_OPS.items() for packet in _packets(name)}
"""The number of core dims of each operand."""


TOTAL = {
    packet
    for names in IMAGE_OPS.values()
    for packet in _packets(names)
    if not any(part in packet.__name__ for part in ("unpool", "grid_sampler"))
}
"""Those that take any values: a factorization refuses some matrices, an unpooling some indices, and the gradient of a
grid that holds NaN reads anywhere (torch 2.13 on a CPU)."""


def batched(operands: Sequence[Operand], cores: Sequence[int], is_partial: bool = True) -> DimMap:
    """Return the map of an op that combines the last dims of its operands, so many of each."""
    if len(operands) > len(cores):
        raise RuleError("the layout of its operands is unknown")
    batches = [max(x.ndim - core, 0) for x, core in zip(operands, cores, strict=False)]
    most = max(batches)
    labels: list[Labels] = []
    for i, (x, batch) in enumerate(zip(operands, batches, strict=True)):
        labels.append((*range(most - batch, most), *((f"core {i}", d) for d in range(x.ndim - batch))))
    core = frozenset(label for own in labels for label in own if isinstance(label, tuple))
    return DimMap(tuple(labels), ((*range(most), ...),), core, partial=is_partial)


def _by_cores(packet: OpOverloadPacket, cores: tuple[int, ...]) -> None:
    @dim_rule(packet)
    def by_cores(operands: Sequence[Operand]) -> DimMap:
        return batched(operands, cores, packet not in TOTAL)


for _packet, _cores in CORE.items():
    _by_cores(_packet, _cores)


@dim_rule(aten._linalg_solve_ex)
def solve(A: Operand, B: Operand) -> DimMap:
    """Systems of equations; the right side holds vectors if it has a dim less than the matrices."""
    is_vector = B.ndim == 1 or (A.ndim - 1 == B.ndim and B.shape == A.shape[:-1])
    return batched((A, B), (2, 1 if is_vector else 2))


@dim_rule(aten.linalg_cross, aten.cross)
def cross(x: Operand, other: Operand, dim: int | None) -> DimMap:
    """Vectors along a dim; the first of size 3 if none is named."""
    found = pointwise((x, other))
    rank = len(found.results[0])
    return found._replace(combined=frozenset(found.results[0] if dim is None else [dim if dim < 0 else dim - rank]))


@dim_rule(OpClass.POINTWISE)
def pointwise(operands: Sequence[Operand]) -> DimMap:
    """Operands that broadcast: the last dim of each is the same dim, and so on."""
    labels = tuple(tuple(range(-x.ndim, 0)) for x in operands)
    return DimMap(labels, (max(labels, key=len, default=()),))


@dim_rule(aten.broadcast_tensors, aten.expand_as)
def broadcast(operands: Sequence[Operand]) -> DimMap:
    """The operands themselves, broadcast."""
    return pointwise(operands)._replace(moves=True)


@dim_rule(aten.zeros_like, aten.ones_like, aten.full_like, aten.empty_like)
def like(x: Operand) -> DimMap:
    """A tensor of the operand's sizes."""
    own = labels_of(x)
    return DimMap((own,), (own,))


@dim_rule(aten.new_zeros, aten.new_ones, aten.new_full, aten.new_empty)
def new(x: Operand, size: Sequence[int]) -> DimMap:
    """A tensor of other sizes, with values that don't depend on the operand's."""
    alike = [len(size) == x.ndim and x.shape[d] == n for d, n in enumerate(size)]
    return carried(x, [d if same else None for d, same in enumerate(alike)], moves=False, sizes="size")


@dim_rule(aten.one_hot)
def one_hot(x: Operand, num_classes: int) -> DimMap:
    """A row for each index; without a number of classes its size depends on all indices."""
    own = labels_of(x)
    return DimMap((own,), ((*own, None),), frozenset(own if num_classes < 0 else ()), partial=True)


@dim_rule(aten.convolution)
def convolution(x: Operand, weight: Operand, bias: Operand | None, transposed: bool, groups: int) -> DimMap:
    """Sums over channels and windows; of several groups, each has output channels of its own."""
    window = tuple(("position", d) for d in range(2, weight.ndim))
    channels, out = ("in", "out") if groups == 1 else ("channel", "channel")
    batch = ("sample",) if x.ndim == weight.ndim else ()
    kernel = (channels, out, *window) if transposed else (out, channels, *window)
    combined = frozenset([channels, *window])
    biases = () if bias is None else ((out,),)
    return DimMap(((*batch, channels, *window), kernel, *biases), ((*batch, out, *window),), combined)


NONE, MEAN = 0, 1
"""Values of the argument `reduction`."""


@dim_rule(aten.mse_loss, aten.smooth_l1_loss, aten.huber_loss, aten.binary_cross_entropy,
          aten.binary_cross_entropy_with_logits, aten.soft_margin_loss)  # fmt: skip
def loss(operands: Sequence[Operand], reduction: int) -> DimMap:
    """A loss of each element of broadcast operands, or their mean or sum."""
    found = pointwise(operands)._replace(partial=True)
    if reduction == NONE:
        return found
    return found._replace(results=((),), combined=frozenset(found.results[0]))
