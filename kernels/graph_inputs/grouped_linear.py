"""Linear layers of one input, up to three in one launch: y_i = x @ w_i.T + b_i.

Queries, keys and values are such layers. One with few rows does not fill a GPU: it takes as long as its first loads,
and three of them one after another take three times that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from subtensors.kernels.runtime.custom_ops import define
from subtensors.kernels.runtime.launcher import launching_on

MAX_LAYERS = 3
"""The most layers that the kernel takes."""
DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class LinearTiling:
    """The tile of a result that one program of the kernel computes.

    Args:
        rows, columns: the size of the tile.
        inner: the elements of the inner dimension per step.
        stages: the number of steps loaded ahead.
        warps: the warps of a program.
    """

    rows: int
    columns: int
    inner: int
    stages: int
    warps: int


TILINGS = ((448, LinearTiling(64, 64, 64, 5, 4)), (3072, LinearTiling(128, 128, 64, 3, 8)))
"""Each tiling with the most rows of x that it is used for; for more rows torch's products are faster.

Measured on an H200, with queries, keys and values of width 768.
"""


def grouped_linear(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> list[Tensor]:
    """Compute linear layers of one input.

    Args:
        x: (M, K), float16 or bfloat16 for the kernel; torch computes others.
        weights: at most `MAX_LAYERS`, (N_i, K) each, of x's dtype.
        biases: (N_i,) each, or an empty sequence.

    Returns:
        (M, N_i) each, summed in float32 with its bias and rounded once.

    Example:
        >>> x, w = torch.ones(2, 3), torch.eye(3)
        >>> [y.tolist()[0] for y in grouped_linear(x, [w, 2 * w], [torch.zeros(3), torch.ones(3)])]
        [[1.0, 1.0, 1.0], [3.0, 3.0, 3.0]]
    """
    outputs: list[Tensor] = torch.ops.subtensors.grouped_linear(x, list(weights), list(biases))
    return outputs


def grouped_linear_reference(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> list[Tensor]:
    """Compute the layers by torch, one after another."""
    if not biases:
        return [x @ w.t() for w in weights]
    return [torch.addmm(b, x, w.t()) for w, b in zip(weights, biases, strict=True)]


def grouped_linear_triton(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], tiling: LinearTiling
) -> list[Tensor]:
    """Compute the layers by the kernel; x has a last stride of one, and weights and biases are contiguous."""
    from subtensors.kernels.graph_inputs.grouped_linear_kernel import grouped_linear_kernel

    outs = [x.new_empty(x.shape[0], w.shape[0]) for w in weights]
    unused = range(MAX_LAYERS - len(weights))
    widths = [w.shape[0] for w in weights] + [0 for _ in unused]
    tiles = -(-x.shape[0] // tiling.rows) * sum(-(-n // tiling.columns) for n in widths)
    if not tiles:
        return outs
    is_multiple = x.shape[1] % tiling.inner == 0
    filled = [[*part, *(part[0] for _ in unused)] for part in (weights, biases or weights, outs)]
    with launching_on(x.device):
        grouped_linear_kernel[(tiles,)](
            x, *filled[0], *filled[1], *filled[2], x.shape[0], *widths, x.shape[1], x.stride(0), bool(biases),
            is_multiple, tiling.rows, tiling.columns, tiling.inner, num_stages=tiling.stages, num_warps=tiling.warps,
        )  # fmt: skip
    return outs


def _run(x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> list[Tensor]:
    parts = [*weights, *biases]
    has_kernel = x.is_cuda and x.dtype in DTYPES and x.stride(1) == 1 and all(t.is_contiguous() for t in parts)
    tiling = next((tiling for rows, tiling in TILINGS if x.shape[0] <= rows), None)
    if tiling is None or not has_kernel:
        return grouped_linear_reference(x, weights, biases)
    return grouped_linear_triton(x, weights, biases, tiling)


define(
    "grouped_linear", "Tensor x, Tensor[] weights, Tensor[] biases", "Tensor[]", _run,
    lambda x, weights, biases: [x.new_empty(x.shape[0], w.shape[0]) for w in weights],
)  # fmt: skip
