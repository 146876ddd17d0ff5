"""Ops on a batch of samples in their first dim: pooling, resampling, convolutions. Samples are independent."""

from __future__ import annotations

from typing import Any

import torch

from subtensors.dispatch.chunked.bound_call import BoundCall, along, whole
from subtensors.dispatch.chunked.lazy_graph import LazyValue
from subtensors.dispatch.chunked.rules.table import RULES
from subtensors.dispatch.ops.tree import tree_tensors

aten = torch.ops.aten

# op: how many dims a batch of its samples has, and which operands hold a sample each; the others are read whole.
SAMPLES: dict[Any, tuple[int, tuple[str, ...]]] = {
    aten.avg_pool2d: (4, ("self",)),
    aten.avg_pool3d: (5, ("self",)),
    aten._adaptive_avg_pool2d: (4, ("self",)),
    aten._adaptive_avg_pool3d: (5, ("self",)),
    aten.adaptive_max_pool2d: (4, ("self",)),
    aten.adaptive_max_pool3d: (5, ("self",)),
    aten.max_pool2d_with_indices: (4, ("self",)),
    aten.max_pool3d_with_indices: (5, ("self",)),
    aten.reflection_pad2d: (4, ("self",)),
    aten.reflection_pad3d: (5, ("self",)),
    aten.replication_pad2d: (4, ("self",)),
    aten.replication_pad3d: (5, ("self",)),
    aten.upsample_nearest1d.default: (3, ("self",)),
    aten.upsample_nearest2d.default: (4, ("self",)),
    aten.upsample_linear1d.default: (3, ("self",)),
    aten.upsample_bilinear2d.default: (4, ("self",)),
    aten.upsample_bicubic2d.default: (4, ("self",)),
    aten.grid_sampler_2d: (4, ("input", "grid")),
    aten.grid_sampler_3d: (5, ("input", "grid")),
    aten.pixel_shuffle: (4, ("self",)),
    aten.pixel_unshuffle: (4, ("self",)),
    aten.im2col: (4, ("self",)),
    aten.col2im: (3, ("self",)),
    aten.convolution: (0, ("input",)),
}


@RULES.register(*SAMPLES)
def samples(call: BoundCall) -> Any:
    """Each chunk of samples by itself."""
    ndim, names = SAMPLES.get(call.op) or SAMPLES[call.op.overloadpacket]
    value: LazyValue = call[names[0]]
    layout = value.layout
    # A convolution has as many dims as its weight where its input is a batch.
    ndim = ndim or call["weight"].ndim
    if layout is None or layout.dim != 0 or layout.outer != 1 or value.ndim != ndim:
        raise call.unchunkable("its samples are not what is chunked")
    if call.op.overloadpacket is aten.convolution and call["weight"].layout is not None:
        raise call.unchunkable("its weight is chunked")
    metas = call.infer()
    by_sample = [call[name] for name in names]
    return call.emit(
        [layout] * len(tree_tensors(metas)),
        layout.axis,
        lambda v: along(v, layout) if any(v is s for s in by_sample) else whole(v),
        metas=metas,
    )
