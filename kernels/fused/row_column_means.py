"""The mean square of every row and every column of many matrices, in one sweep over them.

    rows[i]    = sum_j x[i, j]^2 / C            x: (R, C), row after row
    columns[j] = sum_i x[i, j]^2 / R

A program of the first kernel takes some rows of one matrix: it writes their means, and the column sums of its rows
alone. The second kernel adds those up, some columns a program. So results do not depend on the order of programs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from subtensors.kernels.fused.launch import before, tile_entries
from subtensors.kernels.fused.lowering import TRITON_TYPES
from subtensors.kernels.runtime.custom_ops import arithmetic_dtype
from subtensors.kernels.runtime.graph_lifetime import to_device
from subtensors.kernels.runtime.launcher import launching_on

ROWS = 32
"""Rows a program of the first kernel."""
COLUMNS = 128
"""Columns that a program takes at a time."""


def reference(matrices: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Compute `row_column_means` in torch ops, matrix by matrix."""
    wide = [x.to(arithmetic_dtype(x.dtype)) for x in matrices]
    rows = [(torch.linalg.vector_norm(x, dim=1, keepdim=True).square() / max(x.shape[1], 1)) for x in wide]
    columns = [(torch.linalg.vector_norm(x, dim=0, keepdim=True).square() / max(x.shape[0], 1)) for x in wide]
    return rows, columns


def row_column_means(matrices: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The mean squares of rows and of columns.

    Args:
        matrices: (rows, columns) each, row after row in memory, none empty; floats of one dtype on one device.

    Returns:
        (rows, 1) tensors and (1, columns) tensors, in float64 for float64 and otherwise in float32. Those of all
        matrices follow each other in memory.
    """
    from subtensors.kernels.fused.row_column_means_kernel import mean_columns, mean_rows
    from subtensors.kernels.runtime.triton_compat import tl

    device, dtype = matrices[0].device, matrices[0].dtype
    kind = arithmetic_dtype(dtype)
    shapes = np.asarray([x.shape for x in matrices], dtype=np.int64).reshape(-1, 2)
    heights, widths = shapes[:, 0], shapes[:, 1]
    rows = torch.empty(int(heights.sum()), dtype=kind, device=device)
    columns = torch.empty(int(widths.sum()), dtype=kind, device=device)
    blocks = -(-heights // ROWS)
    partials = torch.empty(int((blocks * widths).sum()), dtype=kind, device=device)
    table = np.empty((6, len(matrices)), dtype=np.int64)
    table[0] = [x.data_ptr() for x in matrices]
    table[1], table[2] = heights, widths
    table[3] = rows.data_ptr() + before(heights) * kind.itemsize
    table[4] = columns.data_ptr() + before(widths) * kind.itemsize
    table[5] = before(blocks * widths)
    # One copy to the device holds the table and the tiles of both kernels.
    by_rows, by_columns = tile_entries(blocks), tile_entries(-(-widths // COLUMNS))
    words = to_device(np.concatenate([table.reshape(-1), by_rows, by_columns]), device)
    addresses, first, second = words.split([table.size, len(by_rows), len(by_columns)])
    sum_kind = getattr(tl, TRITON_TYPES[kind].removeprefix("tl."))
    element_kind = getattr(tl, TRITON_TYPES[dtype].removeprefix("tl."))
    with launching_on(device):
        mean_rows[(len(by_rows),)](addresses, first, partials, len(matrices), element_kind, sum_kind, ROWS, COLUMNS)
        mean_columns[(len(by_columns),)](addresses, second, partials, len(matrices), sum_kind, ROWS, COLUMNS)
    return (
        [part.unsqueeze(1) for part in rows.split(heights.tolist())],
        [part.unsqueeze(0) for part in columns.split(widths.tolist())],
    )
