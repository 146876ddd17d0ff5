"""The logits of a linear layer, a block at a time: computed, folded into row statistics, overwritten by their gradient.

A block is some rows and some columns of the matrix of logits. `row_sums.py` folds it into sums of its rows. The
operations on a block are Triton kernels or their torch reference, which the kernels are tested against and which runs
on a CPU and in float64. The kernels make no temporaries; the reference takes a few rows at a time, so that its own are
small beside a block (`reference_bytes`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from subtensors.kernels.cross_entropy.vocabulary_shard import VocabularyShard
from subtensors.kernels.runtime.custom_ops import has_kernel
from subtensors.kernels.runtime.launcher import cached_launcher

SCALE_BLOCK, SCALE_PROGRAMS = 4096, 1024
"""The elements of a tile, and the programs, of the kernel that scales a gradient in place."""


class LossAndGradients(NamedTuple):
    """The result of `linear_cross_entropy`: the loss, and each gradient that was requested."""

    loss: Tensor
    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


class GradFlags(NamedTuple):
    """The gradients to compute; one that is not needed costs nothing."""

    hidden: bool = True
    weight: bool = True
    bias: bool = True


class Block(NamedTuple):
    """A block of the logits.

    Args:
        logits: (rows, columns), row by row: adjacent columns, and rows of one stride; or class by class, the other way
            round.
        first_row, first_column: its position in the matrix of all logits.
        padded_rows: where logits lie class by class, the stride from one to the next, which is the number of rows or
            more; None: they lie row by row.
    """

    logits: Tensor
    first_row: int = 0
    first_column: int = 0
    padded_rows: int | None = None

    @property
    def rows(self) -> tuple[int, int]:
        """Its rows among all rows, [begin, end)."""
        return self.first_row, self.first_row + self.logits.shape[0]

    @property
    def columns(self) -> tuple[int, int]:
        """Its columns among all columns, [begin, end)."""
        return self.first_column, self.first_column + self.logits.shape[1]

    @property
    def is_by_class(self) -> bool:
        """True where the logits of a class are adjacent, rather than those of a row."""
        return self.padded_rows is not None

    def slices(self) -> list[Block]:
        """Return the rows that the reference takes at a time, or the columns where logits lie class by class."""
        dim = int(self.is_by_class)
        parts = self.logits.split(rows_at_once(self.logits.shape[dim], self.logits.shape[1 - dim]), dim)
        down, across = (0, parts[0].shape[1]) if dim else (parts[0].shape[0], 0)
        return [
            Block(part, self.first_row + n * down, self.first_column + n * across, self.padded_rows)
            for n, part in enumerate(parts)
        ]


REFERENCE_SHARE, REFERENCE_ELEMENTS = 64, 2**20
"""The reference takes a 64th of a matrix at a time, of no more than so many elements, but a row at least."""

REFERENCE_TEMPORARIES = 8
"""The most matrices of that size that the reference holds at once."""


def rows_at_once(rows: int, columns: int) -> int:
    """Return the rows of a matrix that the reference takes at a time.

    >>> rows_at_once(512, 1000), rows_at_once(16, 1000)
    (8, 1)
    """
    return max(1, min(rows * columns // REFERENCE_SHARE, REFERENCE_ELEMENTS) // max(columns, 1))


def reference_bytes(rows: int, columns: int, itemsize: int) -> int:
    """Return the bytes of the reference's temporaries for a matrix."""
    return REFERENCE_TEMPORARIES * max(4, itemsize) * rows_at_once(rows, columns) * columns


@dataclass(frozen=True)
class Tile:
    """The columns and rows that a program reads at once, and its warps."""

    columns: int
    warps: int
    rows: int = 1


WHOLE_ROWS, LONG_ROWS = Tile(8192, 16), Tile(16384, 32)
STATISTICS, GRADIENT = Tile(2048, 4, rows=2), Tile(1024, 4, rows=2)
STATISTICS_BY_CLASS, GRADIENT_BY_CLASS = Tile(16, 1, rows=256), Tile(16, 4, rows=256)
"""The fastest of those that were measured on an H200. A warp that holds all of a row's columns folds them alone."""

PROGRAMS_BY_CLASS, COLUMNS_OF_PART = (512, 4096), 256
"""The fewest and the most programs where logits lie class by class, and the columns of each between these."""

ROW_MULTIPLE = 16
"""Logits that lie class by class have memory for a multiple of so many rows, so that kernels read 16 bytes at once."""

MIN_LONG_COLUMNS = 2**16
"""The columns from which on a row is long."""


def padded_rows(rows: int) -> int:
    """Return the rows that logits take which lie class by class.

    >>> padded_rows(20)
    32
    """
    return -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE


def launch_options(tile: Tile, columns: int) -> dict[str, int]:
    """Return the block size and the warps; a block narrower than the tile gets a narrower tile."""
    width = min(tile.columns, max(128, 1 << (columns - 1).bit_length()))
    return {"BLOCK": width, "num_warps": max(1, tile.warps * width // tile.columns)}


def parts_of_columns(row_blocks: int, columns: int) -> int:
    """Return the number of parts of the columns where logits lie class by class, given that of blocks of rows.

    >>> parts_of_columns(16, 100_000), parts_of_columns(16, 10_000), parts_of_columns(16, 1000)
    (256, 40, 32)
    """
    fewest, most = (programs // row_blocks for programs in PROGRAMS_BY_CLASS)
    return max(1, min(max(fewest, -(-columns // COLUMNS_OF_PART)), most, -(-columns // STATISTICS_BY_CLASS.columns)))


LOSS_PART_BYTES, STATISTICS_PART_BYTES = 17, 30
"""The bytes a row and part while `RowSums` folds parts together: of a loss with one sum beside that of exponentials,
and of all statistics of rows; the largest class takes 8, and what sums are multiplied by takes 5."""


def part_sums_bytes(rows: int, columns: int, each: int) -> int:
    """Return the bytes of the sums that parts of the columns have, at `each` a row and part."""
    row_blocks = -(-rows // STATISTICS_BY_CLASS.rows)
    return each * rows * parts_of_columns(max(1, row_blocks), columns)


class BlockLaunch(NamedTuple):
    """The programs of a kernel that reads a block of logits.

    Args:
        grid: the number of blocks of rows, and of parts of the columns; launched as one dim, blocks of rows first.
        rows: of the block, and those that have memory.
        columns: of the block, and of a part.
        options: of the kernel.
    """

    grid: tuple[int, int]
    rows: tuple[int, int]
    columns: tuple[int, int]
    options: dict[str, int]

    @staticmethod
    def of(block: Block, by_row: Tile, by_class: Tile, is_sum: bool) -> BlockLaunch:
        """Return the programs for a block by the tile of its layout; is_sum: rows that lie as a whole are one part."""
        rows, columns = block.logits.shape
        options = launch_options(by_class if block.is_by_class else by_row, columns)
        width = options["BLOCK"]
        if block.padded_rows is not None:
            height = min(by_class.rows, max(ROW_MULTIPLE, 1 << (rows - 1).bit_length()))
            parts = parts_of_columns(-(-rows // height), columns)
            row_end, part = block.padded_rows, -(-columns // (parts * width)) * width
        else:
            height, row_end, part = by_row.rows, rows, columns if is_sum else width
            parts = -(-columns // part)
        return BlockLaunch((-(-rows // height), parts), (rows, row_end), (columns, part), {"ROWS": height, **options})


_DTYPES = torch.float16, torch.bfloat16, torch.float32
"""The dtypes that kernels take."""


def uses_kernels(tensor: Tensor, kernels: bool | None = None) -> bool:
    """Return `kernels`, or by default whether Triton kernels work on the tensor: on a GPU, except for float64.

    >>> uses_kernels(torch.ones(3))
    False
    """
    if kernels is not None or not tensor.is_cuda:
        return bool(kernels)
    if type(tensor) is Tensor:  # each step asks
        return tensor.dtype in _DTYPES
    return has_kernel(tensor, _DTYPES)


def check_differentiated_once() -> None:
    """Raise NotImplementedError in a backward whose gradients are to be differentiated: nothing here records them."""
    if torch.is_grad_enabled():
        raise NotImplementedError(
            "the gradient of chunked logits cannot be differentiated again (create_graph=True); compute from full "
            "logits instead"
        )


def scale_(tensor: Tensor, factor: Tensor) -> Tensor:
    """Multiply a gradient in place by a number on its device, in float32 or wider, without reading either on the host.

    Zeros stay zeros whatever the factor: rows that a loss ignores have no gradient where it is divided by no tokens.

    Args:
        tensor: floating point, of one dim at least.
        factor: 0-d, on the same device.

    Returns:
        The tensor.

    Example:
        >>> scale_(torch.arange(3.0), torch.tensor(float("inf")))
        tensor([0., inf, inf])
    """
    if uses_kernels(tensor) and tensor.is_contiguous():
        scale_by_kernel(tensor, factor)
        return tensor
    rows = len(tensor)
    for piece in tensor.split(rows_at_once(rows, tensor.numel() // max(rows, 1))):
        piece.copy_(torch.where(piece == 0, piece, piece * factor))
    return tensor


def scale_by_kernel(tensor: Tensor, factor: Tensor) -> None:
    """`scale_` of a contiguous tensor by the Triton kernel."""
    if tensor.numel():
        launch = cached_launcher("cross_entropy.scale_add_kernel", "scale_kernel")
        launch(SCALE_PROGRAMS, (tensor, factor), tensor.numel(), PROGRAMS=SCALE_PROGRAMS, BLOCK=SCALE_BLOCK)


def add_over_rows(total: Tensor, block: Block) -> None:
    """Add the sum over a block's rows to `total`, (columns,), in its dtype; on a CPU, which copies it, part by part."""
    for part in [block] if block.logits.is_cuda else block.slices():
        begin, end = (n - block.first_column for n in part.columns)
        total[begin:end] += part.logits.sum(0, dtype=total.dtype)


def product_into(result: Tensor, a: Tensor, b: Tensor, accumulate: bool) -> None:
    """Compute result = a @ b, or result += a @ b, each element summed in float32 (float64 for such operands).

    Args:
        result: (m, n), of the operands' dtype or float32.
        a: (m, k).
        b: (k, n).
        accumulate: whether to add to the values of the result.
    """
    if result.dtype == a.dtype:
        if accumulate:
            result.addmm_(a, b)
        else:
            torch.mm(a, b, out=result)
    elif result.is_cuda:
        if accumulate:
            torch.addmm(result, a, b, out_dtype=result.dtype, out=result)
        else:
            torch.mm(a, b, out_dtype=result.dtype, out=result)
    else:  # only GPUs have a GEMM with a wider result
        height = rows_at_once(*a.shape)
        depth = max(1, height * a.shape[1] // max(height, b.shape[1]))
        for row in range(0, a.shape[0], height):
            for k in range(0, a.shape[1], depth):
                left, right = a[row : row + height, k : k + depth], b[k : k + depth]
                wide = left.to(result.dtype), right.to(result.dtype)
                product_into(result[row : row + height], *wide, accumulate or k > 0)


@dataclass
class LinearHead:
    """A linear layer whose logits are computed a block at a time.

    Args:
        hidden: (N, H).
        weight: (V, H).
        bias: (V,), or None.
        needs: the gradients to compute.
        weight_grad_dtype: of the gradient of the weight.
        shard: the classes of weight and bias, where other processes have more; None: all.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    needs: GradFlags
    weight_grad_dtype: torch.dtype
    shard: VocabularyShard | None

    @property
    def classes(self) -> int:
        """V, those of other processes included."""
        return self.weight.shape[0] if self.shard is None else self.shard.classes

    @cached_property
    def compute_dtype(self) -> torch.dtype:
        """The dtype in which sums are kept: float32, or float64 for float64 operands."""
        return torch.promote_types(self.hidden.dtype, torch.float32)

    def block(self, memory: Tensor, columns: tuple[int, int]) -> Block:
        """Return the block of columns [begin, end) of its own, class by class at the beginning of some 1-d memory."""
        begin, end = columns
        rows = padded_rows(self.hidden.shape[0])
        first = begin if self.shard is None else self.shard.first + begin
        logits = memory[: (end - begin) * rows].view(end - begin, rows)[:, : self.hidden.shape[0]].t()
        return Block(logits, 0, first, rows)

    def logits(self, memory: Tensor, columns: tuple[int, int]) -> Block:
        """Compute the logits of columns [begin, end) of its own, class by class at the beginning of some 1-d memory."""
        block, (begin, end) = self.block(memory, columns), columns
        bias = None if self.bias is None else self.bias[begin:end, None]
        self._multiply(self.weight[begin:end], self.hidden.t(), bias, block.logits.t())
        return block

    def logits_of_rows(self, memory: Tensor, begin: int, end: int) -> Block:
        """Compute all logits of rows [begin, end) in memory of at least as many rows."""
        logits = memory if end - begin == memory.shape[0] else memory[: end - begin]
        self._multiply(self.hidden[begin:end], self._weight_by_column, self.bias, logits)
        return Block(logits, begin)

    @cached_property
    def _weight_by_column(self) -> Tensor:
        return self.weight.t()

    @staticmethod
    def _multiply(a: Tensor, b: Tensor, bias: Tensor | None, logits: Tensor) -> None:
        if bias is None:
            torch.mm(a, b, out=logits)
        else:
            torch.addmm(bias, a, b, out=logits)

    def weight_grad(self) -> Tensor | None:
        """Return memory for the gradient of the weight; None where it is not needed."""
        if not self.needs.weight:
            return None
        return torch.empty(self.weight.shape, dtype=self.weight_grad_dtype, device=self.weight.device)

    def bias_grad(self) -> Tensor | None:
        """Return zeros to add the gradient of the bias to; None where it is not needed."""
        if not self.needs.bias:
            return None
        return torch.zeros(self.weight.shape[0], dtype=self.compute_dtype, device=self.weight.device)
