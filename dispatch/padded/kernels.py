"""Masked softmax, reductions and norms as one kernel each, on a GPU; the kernels do not read padding.

A compiler fuses a fill into the op behind it by itself, and an opaque kernel would stop it; so these run in eager mode
and in captured graphs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._ops import OpOverloadPacket

from subtensors.dispatch.ops.plain_types import LAZY_TYPES
from subtensors.dispatch.padded.padded_value import PaddedValue
from subtensors.dispatch.padded.true_sizes import rows_symbol
from subtensors.dispatch.torch_internals import dispatcher
from subtensors.kernels.padded import masked_ops
from subtensors.kernels.runtime.custom_ops import FLOAT_DTYPES, has_kernel
from subtensors.kernels.runtime.valid_lengths import ValidLength

aten = torch.ops.aten

KINDS: dict[OpOverloadPacket, str] = {
    aten.sum: "sum",
    aten.mean: "mean",
    aten.prod: "prod",
    aten.amax: "amax",
    aten.amin: "amin",
    aten.logsumexp: "logsumexp",
    aten.var: "var",
    aten.linalg_vector_norm: "norm",
}
"""The kernels' name of each reduction."""


def valid_lengths(x: PaddedValue) -> list[ValidLength] | None:
    """Return the padded dims as kernels take them; None if no kernel supports them."""
    if (
        type(x.dense) in LAZY_TYPES
        or not has_kernel(x.dense, FLOAT_DTYPES)
        or dispatcher.is_traced(x.dense)
        or x.sizes is None
        or not x.dim()
    ):
        return None
    rows, found = x.rows_dim, []
    for d in x.padded_dims:
        if d == rows:
            continue
        if len(x.dims[d]) != 1 or x.dims[d][0].size.has(rows_symbol()):
            return None
        sizes = x.sizes.of(x.dims[d][0].size)
        if sizes.dim() and rows is None:
            return None
        found.append(ValidLength(d, sizes, rows or 0))
    return found


def softmax(x: PaddedValue, dim: int, is_log: bool) -> PaddedValue | None:
    """Compute a softmax along a dim with a kernel; return None if no kernel supports it."""
    lengths = valid_lengths(x)
    if not lengths:
        return None
    return x.like(masked_ops.masked_softmax(x.dense, dim, lengths, 0.0, is_log), 0)


def reduced(
    op: OpOverloadPacket, x: PaddedValue, dims: Sequence[int], p: float = 2.0, correction: float = 1.0
) -> Tensor | None:
    """Compute a reduction with a kernel, without the reduced dims; return None if no kernel supports it."""
    kind = KINDS.get(op)
    lengths = valid_lengths(x) if kind is not None and dims and p >= 0 else None
    if not lengths or kind is None:
        return None
    return masked_ops.masked_reduction(x.dense, kind, list(dims), lengths, p, correction).out


def normed(
    x: PaddedValue, normalized: int, weight: PaddedValue | None, bias: PaddedValue | None, eps: float, is_rms: bool
) -> PaddedValue | None:
    """Compute a layer or rms norm over the last dims with a kernel; return None if no kernel supports it."""
    lengths = valid_lengths(x)
    if not lengths:
        return None
    scale, shift = (None if w is None else w.dense for w in (weight, bias))
    return x.like(masked_ops.masked_norm(x.dense, normalized, scale, shift, eps, lengths, 0.0, is_rms).y, 0)
