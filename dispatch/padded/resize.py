"""Interpolation to a size of padded tensors, as in `F.interpolate(h, size=x.shape[-1])`.

Each dim of m positions is resized to n in turn. Both are true sizes, on the device: position i of the result reads

    nearest        x[floor(i m / n)]
    linear         x[j] (1 - t) + x[j + 1] t        j + t = max((i + 1/2) m / n - 1/2, 0),

as torch computes it: a nearest position in float32, a linear one in float32, or float64 for float64 values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from subtensors.dispatch.padded.interpreter import PaddedCall, refuse
from subtensors.dispatch.padded.offset_reads import gather_along
from subtensors.dispatch.padded.padded_size import PaddedSize, dim_of, sizes_with, value_at
from subtensors.dispatch.padded.padded_value import PaddedValue, prefix_size

NEAREST = {"upsample_nearest": 0.0, "_upsample_nearest_exact": 0.5}
"""The part of a position that is added to it before it is scaled, by the op's name."""

LINEAR = frozenset(["upsample_linear", "upsample_bilinear", "upsample_trilinear"])


def resize(call: PaddedCall, x: PaddedValue, target: Sequence[int]) -> PaddedValue:
    """Resize the last dims to sizes, some of which are padded ones."""
    name = call.op.overloadpacket.__name__[:-2]  # without the number of dims, "1d"
    sizes = sizes_with(x.sizes, *target)
    assert sizes is not None
    if name not in NEAREST and name not in LINEAR:
        raise refuse(call, "only nearest and linear interpolation know a size that is padded")
    if sizes.rows is not None or call.get("align_corners"):
        raise refuse(call, "it is a ragged batch, or its corners are aligned")
    x = replace(x, sizes=sizes)
    for d, size in enumerate(target, start=x.dim() - len(target)):
        before = prefix_size(x, d)
        if sizes.known_on_host and 0 in (value_at(before, sizes.assignment()), _on_host(size)):
            raise refuse(call, "a size is 0")
        old = sizes.of_each(before) if x.is_padded(d) else torch.full((), x.shape[d], device=x.dense.device)
        new = size.on_device() if isinstance(size, PaddedSize) else torch.full((), size, device=x.dense.device)
        positions = torch.arange(int(size), device=x.dense.device)
        factors = dim_of(size, sizes)
        if name in NEAREST:
            scaled = (positions.float() + NEAREST[name]) * (old.float() / new.float())
            x = gather_along(x, d, torch.minimum(scaled.floor().long(), old - 1), factors)
            continue
        dtype = torch.float64 if x.dense.dtype == torch.float64 else torch.float32
        scaled = ((positions.to(dtype) + 0.5) * (old.to(dtype) / new.to(dtype)) - 0.5).clamp(min=0)
        low = torch.minimum(scaled.floor().long(), old - 1)
        part = (scaled - low).view([-1] + [1] * (x.dim() - d - 1))
        at_low = gather_along(x, d, low, factors)
        at_high = gather_along(x, d, torch.minimum(low + 1, old - 1), factors)
        mixed: Tensor = at_low.dense.to(dtype) * (1 - part) + at_high.dense.to(dtype) * part
        x = at_low.like(mixed.to(x.dense.dtype)).gradient_masked()
    return x


def _on_host(size: int) -> int:
    return size.on_host() if isinstance(size, PaddedSize) else size
