"""Products of one matrix with up to three others, each with a bias: y_i = x @ w_i.T + b_i, in one launch.

Queries, keys and values are such products. One with few rows does not fill a GPU: it takes as long as its first loads
do, and three of them one after another thrice that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from subtensors.kernels.runtime.current_device import launching_on
from subtensors.kernels.runtime.custom_ops import define

MOST = 3
"""The most products that the kernel takes."""
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
"""For up to so many rows the fastest on an H200, of queries, keys and values of width 768; beyond, torch's are."""


def products(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> list[Tensor]:
    """Products of one matrix with several, each with a bias.

    Args:
        x: (M, K), float16 or bfloat16 for the kernel; torch computes others.
        weights: at most `MOST`, (N_i, K) each, of x's dtype.
        biases: (N_i,) each, or none at all.

    Returns:
        (M, N_i) each, summed in float32 with its bias and rounded once.

    Example:
        >>> x, w = torch.ones(2, 3), torch.eye(3)
        >>> [y.tolist()[0] for y in products(x, [w, 2 * w], [torch.zeros(3), torch.ones(3)])]
        [[1.0, 1.0, 1.0], [3.0, 3.0, 3.0]]
    """
    found: list[Tensor] = torch.ops.subtensors.products(x, list(weights), list(biases))
    return found


def reference(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> list[Tensor]:
    """The same by torch, one after another."""
    if not biases:
        return [x @ w.t() for w in weights]
    return [torch.addmm(b, x, w.t()) for w, b in zip(weights, biases, strict=True)]


def launched(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], tiling: LinearTiling) -> list[Tensor]:
    """The same by the kernel; arguments as of `products`, with rows of x in one piece and contiguous weights."""
    from subtensors.kernels.graph_inputs.grouped_linear_kernel import products_kernel

    outs = [x.new_empty(x.shape[0], w.shape[0]) for w in weights]
    missing = range(MOST - len(weights))
    widths = [w.shape[0] for w in weights] + [0 for _ in missing]
    tiles = -(-x.shape[0] // tiling.rows) * sum(-(-n // tiling.columns) for n in widths)
    if not tiles:
        return outs
    is_whole = x.shape[1] % tiling.inner == 0
    every = [[*part, *(part[0] for _ in missing)] for part in (weights, biases or weights, outs)]
    with launching_on(x.device):
        products_kernel[(tiles,)](
            x, *every[0], *every[1], *every[2], x.shape[0], *widths, x.shape[1], x.stride(0), bool(biases), is_whole,
            tiling.rows, tiling.columns, tiling.inner, num_stages=tiling.stages, num_warps=tiling.warps,
        )  # fmt: skip
    return outs


def _run(x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> list[Tensor]:
    parts = [*weights, *biases]
    has_kernel = x.is_cuda and x.dtype in DTYPES and x.stride(1) == 1 and all(t.is_contiguous() for t in parts)
    tiling = next((tiling for rows, tiling in TILINGS if x.shape[0] <= rows), None)
    if tiling is None or not has_kernel:
        return reference(x, weights, biases)
    return launched(x, weights, biases, tiling)


def _like(x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> list[Tensor]:
    return [x.new_empty(x.shape[0], w.shape[0]) for w in weights]


define("products", "Tensor x, Tensor[] weights, Tensor[] biases", "Tensor[]", _run, _like)
