"""Distances and pooling to a single position, made of reductions and products."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from subtensors.dispatch.ops.tree import PyTree
from subtensors.dispatch.padded.interpreter import PaddedCall, apply, refuse, run, table
from subtensors.dispatch.padded.padded_value import PaddedValue, result
from subtensors.dispatch.padded.pointwise import broadcast_dim
from subtensors.dispatch.padded.true_sizes import TrueSizes, merge_sizes
from subtensors.dispatch.sizes.dim_factors import Factors

aten = torch.ops.aten


def _batch_dims(batches: Sequence[PaddedValue]) -> tuple[list[Factors], TrueSizes | None]:
    sizes = merge_sizes([x.sizes for x in batches if x.sizes is not None])
    rank = max(len(x.dims) for x in batches)
    return [
        broadcast_dim([x.dims[-back] for x in batches if len(x.dims) >= back], sizes) for back in range(rank, 0, -1)
    ], sizes


_ADAPTIVE = {
    aten.adaptive_avg_pool1d: 1,
    aten.adaptive_max_pool1d: 1,
    aten.adaptive_avg_pool2d: 2,
    aten._adaptive_avg_pool2d: 2,
    aten.adaptive_avg_pool3d: 3,
    aten._adaptive_avg_pool3d: 3,
}


@table.register(*_ADAPTIVE, across=True)
def adaptive_pool(call: PaddedCall, x: PaddedValue, output_size: Sequence[int]) -> PyTree:
    """Pool to a single position as a reduction; more windows would depend on the true size."""
    if any(size != 1 for size in output_size):
        raise refuse(call, "its windows depend on the true size")
    if call.op.overloadpacket is aten.adaptive_max_pool1d:
        return run(aten.max.dim, (x, x.dim() - 1, True), {})
    return apply(aten.mean.dim, x, list(range(x.dim() - _ADAPTIVE[call.op.overloadpacket], x.dim())), True)


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
