"""Images resized by a factor: beyond the true end stands the last real position, as torch's own border has it.

out[i] = sum over j near (i + 1/2) / factor - 1/2 of weight[i, j] x[min(max(j, 0), n - 1)]
"""

from __future__ import annotations

import torch

from subtensors.dispatch.padded.batch_independent import row_wise
from subtensors.dispatch.padded.interpreter import PaddedCall, refuse, table
from subtensors.dispatch.padded.pad_ops import repeated
from subtensors.dispatch.padded.padded_value import PaddedValue, prefix_size, result
from subtensors.dispatch.sizes.dim_factors import padded_dim, static_dims
from subtensors.dispatch.sizes.expressions import floor_divided, multiplied

aten = torch.ops.aten

_RESIZING = """upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d
    _upsample_nearest_exact2d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d upsample_trilinear3d
    upsample_bicubic2d"""
EXACT = 1024
"""Multiples of 1 / this times a size are exact in float64, in which torch computes sizes."""


@table.register(*(getattr(aten, name).vec for name in _RESIZING.split()))
def resized(call: PaddedCall) -> PaddedValue:
    """By factors, which say nothing of the true size; corners that are aligned, and a size that is given, do."""
    x: PaddedValue = call["input"]
    over = range(2, x.dim())
    if not any(x.is_padded(d) for d in over):
        return row_wise(call, [len(over)])  # type: ignore[no-any-return]
    factors = call["scale_factors"]
    if factors is None or call.get("align_corners"):
        raise refuse(call, "by how much it resizes depends on the true size")
    edged = x
    for d, factor in zip(over, factors, strict=True):
        if x.is_padded(d):
            if factor * EXACT != int(factor * EXACT):
                raise refuse(call, f"the factor {factor} is no multiple of 1/{EXACT}, and sizes are rounded")
            edged = repeated(edged, d, "replicate", 0, x.shape[d], static_dims([x.shape[d]])[0])
    out = call.dense({"input": edged.dense})
    dims = [*x.dims[:2], *static_dims(out.shape[2:])]
    for d, factor in zip(over, factors, strict=True):
        if x.is_padded(d):
            size = floor_divided(multiplied(prefix_size(x, d), int(factor * EXACT)), EXACT)
            dims[d] = padded_dim(out.shape[d], size)
    return result(out, dims, x.sizes).gradient_masked()
