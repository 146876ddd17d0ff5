"""Checks that positions lie within the true size, made in a debug mode only, since they wait for the device.

An index tensor is data. One that names positions beyond the true size reads padding, and nothing that only looks at
shapes can tell.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from subtensors.dispatch.padded.offset_reads import rows_dim
from subtensors.dispatch.padded.padded_value import PaddedValue
from subtensors.dispatch.torch_internals.dispatcher import is_traced

_watching: list[bool] = []


@contextmanager
def watched_bounds() -> Iterator[None]:
    """Meanwhile a position beyond the true size is an IndexError."""
    _watching.append(True)
    try:
        yield
    finally:
        _watching.pop()


def check_bounds(x: PaddedValue, d: int, index: PaddedValue, ends: Tensor | int | None = None) -> None:
    """Refuse positions beyond the true size of a dim.

    Args:
        x: what is indexed.
        d: the dim.
        index: the positions.
        ends: what each must be below, broadcastable to the index; by default the true size of the dim, where the index
            has the dims of `x`.

    Raises:
        IndexError: in the debug mode, where values are known.
    """
    if not _watching or not x.is_padded(d) or is_traced(index.dense):
        return
    if index.dense.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    if ends is None:
        ends = x.size(d)
        if isinstance(ends, Tensor) and ends.dim():
            ends = ends.view([-1 if e == rows_dim(x) else 1 for e in range(x.dim())])
    positions = index.filled(-1)
    beyond = positions >= ends
    if bool(beyond.any()):
        worst = int(positions[beyond.expand(positions.shape)].max())
        raise IndexError(f"position {worst} of dim {d} is padding: the true size there is less; count to x.count({d})")
