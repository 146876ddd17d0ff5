"""The choice of how much of the logits to hold at once, from shapes and memory, by a model fitted to measurements.

The model counts what each schedule of `kernels/cross_entropy/linear_cross_entropy.py` does:

    bytes    the gradients, the logits in memory at once, scratch extra a sum, and a few numbers a row
    seconds  flops / rate + bytes moved / bandwidth + launches

A GEMM of N x H x V is 2 N H V flops. By rows there are three, and every chunk reads and writes all of dW. By columns
there are three, and a share of a fourth for logits that were not kept; what is in memory at once reads and writes all
of dX. The loss reads the logits twice and writes them once.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from subtensors.kernels.cross_entropy.column_passes import ColumnSplit, logits_per_class
from subtensors.kernels.cross_entropy.compensated_sum import PIECE_BYTES
from subtensors.kernels.cross_entropy.cross_entropy_autograd import Schedule
from subtensors.kernels.cross_entropy.exp_passes import chunk_row_bytes, is_worth_exponentials
from subtensors.kernels.cross_entropy.linear_cross_entropy import Accumulate
from subtensors.kernels.cross_entropy.logits_block import (
    LOSS_PART_BYTES,
    STATISTICS_PART_BYTES,
    padded_rows,
    part_sums_bytes,
    reference_bytes,
)

ROW_BYTES = 56
"""The bytes of the statistics, factors and targets of one row."""

COLUMN_PASS = 1.4
"""The time of passes over logits that lie class by class, over that of copies of as many bytes."""

REFERENCE_ROW_BYTES = 96
"""The bytes of what the torch reference computes for each row of a block."""

MAX_SLOWDOWN = 0.1
"""How much slower than the fastest a schedule that takes less memory may be, where no limit was given."""

MAX_WASTE = 0.05
"""The share of memory above the least of these that a faster one may take."""

FREE_MEMORY_SHARE = 0.8
"""The share of the free memory that a schedule may take, where no limit was given."""


@dataclass(frozen=True)
class Rates:
    """The rates of a device.

    Args:
        flops: of large 16-bit GEMMs, a second.
        bandwidth: bytes a second, read or written by the passes between them.
        launch: seconds of overhead: one a chunk of rows; by columns two a product that adds to dX.
        multiprocessors: how many there are.
        device: its name; None where the tensors are on a CPU, of whose time the rates say nothing.
        has_kernels: whether Triton kernels run there; else the torch reference does, with temporaries of its own.
    """

    flops: float
    bandwidth: float
    launch: float
    multiprocessors: int = 132
    device: str | None = "NVIDIA H200"
    has_kernels: bool = True


H200 = Rates(flops=687e12, bandwidth=4.62e12, launch=23.6e-6)
"""Fitted to the rows of docs/benchmarks/chunked.json by `python -m subtensors bench fit-plan`."""

CPU = replace(H200, device=None, has_kernels=False)
"""The rates that compare schedules on a CPU: an H200's, without kernels."""

H200_PEAK = Rates(flops=132 * 1.98e9 * 4096, bandwidth=2 * 3.201e9 * 6144 / 8, launch=0.0)
"""The rates that the properties of an H200 promise; of another device the same share is expected."""

TENSOR_FLOPS = {7: 1024, 8: 1024, 9: 4096, 10: 8192, 12: 1024}
"""By major compute capability, flops of dense 16-bit products a clock and multiprocessor (NVIDIA's whitepapers)."""


@functools.cache
def device_rates(device: torch.device) -> Rates:
    """Return the rates of a GPU, from its properties; those of an H200 elsewhere, without a name on a CPU."""
    if device.type == "cpu":
        return CPU
    if device.type != "cuda" or torch.version.hip is not None:
        return H200
    found = torch.cuda.get_device_properties(device)
    # Not every build of torch has all of these.
    clock, memory_clock, width = (
        getattr(found, name, 0) for name in ("clock_rate", "memory_clock_rate", "memory_bus_width")
    )
    per_clock = 2048 if (found.major, found.minor) == (8, 0) else TENSOR_FLOPS.get(found.major, 0)
    if found.name == H200.device or not clock * memory_clock * width * per_clock:
        return H200
    count = found.multi_processor_count
    flops = H200.flops / H200_PEAK.flops * count * clock * 1e3 * per_clock
    bandwidth = H200.bandwidth / H200_PEAK.bandwidth * 2 * memory_clock * 1e3 * width / 8
    return Rates(flops, bandwidth, H200.launch, count, found.name)


@dataclass(frozen=True)
class LossShape:
    """The sizes that the cost of a linear layer + cross entropy depends on.

    Args:
        rows: N.
        width: H.
        classes: V.
        itemsize: bytes an element of hidden states, weight and logits.
        weight_grad_itemsize: bytes an element of the weight's gradient.
        needs_hidden, needs_weight: which gradients are needed.
        is_shard: whether other processes have more classes, so that no block holds complete rows.
        exponentials: whether products by rows give exponentials (`exp_passes.py`), so that logits are not read.
    """

    rows: int
    width: int
    classes: int
    itemsize: int = 2
    weight_grad_itemsize: int = 2
    needs_hidden: bool = True
    needs_weight: bool = True
    is_shard: bool = False
    exponentials: bool = False

    @property
    def gemm_flops(self) -> float:
        """The flops of one of the three products."""
        return 2.0 * self.rows * self.width * self.classes

    @property
    def logits_bytes(self) -> int:
        """The bytes of all logits."""
        return self.rows * self.classes * self.itemsize

    @property
    def hidden_grad_bytes(self) -> int:
        """The bytes of dX, 0 where it is not needed."""
        return self.rows * self.width * self.itemsize * self.needs_hidden

    @property
    def weight_grad_bytes(self) -> int:
        """The bytes of dW, 0 where it is not needed."""
        return self.classes * self.width * self.weight_grad_itemsize * self.needs_weight

    def temporary_bytes(self, rows: int, columns: int, rates: Rates) -> int:
        """Return the bytes of temporaries beside a block of logits: none by kernels."""
        if rates.has_kernels and self.itemsize < 8:
            return 0
        matrices = (rows, columns), (self.classes, self.width), (self.rows, self.width)
        return max(reference_bytes(*sizes, self.itemsize) for sizes in matrices) + REFERENCE_ROW_BYTES * rows


@dataclass(frozen=True)
class ChunkPlan:
    """A schedule, and its expected cost.

    Args:
        schedule: which part of the logits is in memory at once.
        bytes: of memory at the peak, extra the inputs and with the gradients.
        seconds: forward and backward.
        products: GEMMs of N x H x V.
        device: the one that takes these seconds; None on a CPU, where they only order the schedules.
    """

    schedule: Schedule
    bytes: int
    seconds: float
    products: float
    device: str | None = H200.device

    def __str__(self) -> str:
        """Describe the plan in a line.

        >>> print(ChunkPlan(Schedule(columns=8448), 1330 * 2**20, 0.0563, 3.72))
        8448 columns of the logits at once, 3.7 GEMMs: 1330 MiB, an estimated 56 ms (NVIDIA H200)
        """
        schedule = self.schedule
        if schedule.columns is None:
            part = (
                "all logits" if schedule.rows is None else f"{schedule.rows} rows of the logits, {schedule.accumulate},"
            )
        else:
            part = f"{schedule.columns} columns of the logits"
            if schedule.kept:
                part += f" and {schedule.kept} kept"
        time = "" if self.device is None else f", an estimated {self.seconds * 1e3:.2g} ms ({self.device})"
        return f"{part} at once, {self.products:.2g} GEMMs: {self.bytes / 2**20:.0f} MiB{time}"


def by_rows(shape: LossShape, rows: int, accumulate: Accumulate, rates: Rates = H200) -> ChunkPlan:
    """Return the schedule by chunks of some rows, and its expected cost."""
    rows = max(1, min(rows, shape.rows))
    chunks = max(1, math.ceil(shape.rows / rows))
    products = 1 + shape.needs_hidden + shape.needs_weight
    element = shape.weight_grad_itemsize
    is_widened = accumulate == "exact" and chunks > 1 and element == shape.itemsize and element < 8
    extra = 2 * shape.classes * shape.width * shape.needs_weight * is_widened
    memory = rows * shape.classes * shape.itemsize + shape.hidden_grad_bytes + shape.weight_grad_bytes + extra
    memory += shape.temporary_bytes(rows, shape.classes, rates)
    if is_widened and element == 4:  # products that are added to a compensated sum
        memory += min(PIECE_BYTES, shape.weight_grad_bytes)
    gives_exponentials = shape.exponentials and is_worth_exponentials(rows, shape.classes, shape.width)
    if gives_exponentials:
        memory += rows * chunk_row_bytes(shape.classes)
        memory += rows * shape.width * shape.itemsize * (not shape.needs_hidden)
    moved = (2.0 if gives_exponentials else 3.0) * shape.logits_bytes + shape.weight_grad_bytes
    moved += 2 * (chunks - 1) * (shape.weight_grad_bytes + extra) + 2 * extra
    seconds = products * shape.gemm_flops / rates.flops + moved / rates.bandwidth + chunks * rates.launch
    schedule = Schedule(rows=None if chunks == 1 else rows, accumulate=accumulate)
    return ChunkPlan(schedule, memory + shape.rows * ROW_BYTES, seconds, products, rates.device)


def by_columns(
    shape: LossShape, columns: int, kept: int, rates: Rates = H200, part_bytes: int = LOSS_PART_BYTES
) -> ChunkPlan:
    """Return the schedule by columns, and its expected cost.

    Args:
        shape: of the loss.
        columns: see `ColumnPasses`.
        kept: how many more columns have a buffer between the passes; no more than need it.
        rates: of the device.
        part_bytes: of the sums of a row that each part of the columns has.
    """
    columns, rows = min(columns, shape.classes), padded_rows(shape.rows)
    elements = logits_per_class(shape.width, shape.itemsize, shape.weight_grad_itemsize) * shape.needs_weight
    kept *= shape.needs_hidden or shape.needs_weight
    split = ColumnSplit.of(shape.classes, columns, kept, rows, elements)
    own = split.in_buffer[1] - split.in_buffer[0]
    most = max(own, split.in_gradient[1])
    kept = max(0, min(kept, own - columns))
    recomputed = (shape.classes - split.in_buffer[1]) / shape.classes
    products = 1 + recomputed + shape.needs_hidden + shape.needs_weight
    # The rows of dW that a product writes, and how many are written so.
    written = [(columns, split.in_gradient[1]), (own, shape.classes - split.in_gradient[1])]
    idle = sum(count * _idle(shape, size, rates) for size, count in written) / shape.classes * shape.needs_weight
    is_sum = split.products > 1 or shape.is_shard
    hidden_sum = shape.rows * shape.width * (max(4, shape.itemsize) if is_sum else shape.itemsize) * shape.needs_hidden
    logits = rows * own * shape.itemsize
    is_wide = split.has_wide_sum(shape.width, shape.itemsize) or shape.is_shard
    at_the_end = shape.hidden_grad_bytes if is_wide else 0
    sums = part_sums_bytes(rows, most, part_bytes) if rates.has_kernels else 0
    memory = shape.weight_grad_bytes + max(hidden_sum + max(logits, at_the_end), logits + sums)
    memory += shape.temporary_bytes(shape.rows, most, rates)
    moved = COLUMN_PASS * (3 + recomputed) * shape.logits_bytes
    moved += 2 * split.products * hidden_sum + shape.weight_grad_bytes
    launches = 2 * split.products + split.in_gradient[1] / columns / 4  # a product of dW alone takes a quarter
    seconds = (products + idle) * shape.gemm_flops / rates.flops + moved / rates.bandwidth + launches * rates.launch
    schedule = Schedule(columns=columns, kept=kept)
    return ChunkPlan(schedule, memory + shape.rows * ROW_BYTES, seconds, products, rates.device)


GRADIENT_TILE = 256, 128
"""The classes and the width of a tile of dW."""


def _idle(shape: LossShape, classes: int, rates: Rates) -> float:
    """Return the extra time of a product for some rows of dW, as a share: few tiles leave most multiprocessors idle."""
    tiles = math.ceil(classes / GRADIENT_TILE[0]) * math.ceil(shape.width / GRADIENT_TILE[1])
    return rates.multiprocessors / max(1, tiles) - 1 if 2 * tiles < rates.multiprocessors else 0.0


@functools.lru_cache(maxsize=256)
def plan_linear_cross_entropy(
    shape: LossShape,
    *,
    accumulate: Accumulate = "exact",
    rows: int | None = None,
    memory_limit: int | None = None,
    free_bytes: int | None = None,
    rates: Rates = H200,
) -> ChunkPlan:
    """Return the schedule that is expected to be fastest within some memory.

    Args:
        shape: of the loss.
        accumulate: "exact", or "fast" where dW may be rounded after every chunk.
        rows: the requested rows of a chunk; the schedule takes no more memory than chunks of this size would.
        memory_limit: bytes at the peak, extra the inputs and with the gradients.
        free_bytes: of the device. Where neither `rows` nor a limit is given, a schedule within this that takes less
            memory is preferred to a faster one, unless that is faster by more than a tenth or takes little more.
        rates: of the device.

    Returns:
        The plan; where nothing fits, the one that takes the least memory.

    Example:
        >>> plan_linear_cross_entropy(LossShape(4096, 4096, 128256)).schedule.columns
        4224
        >>> plan_linear_cross_entropy(LossShape(512, 64, 1000), rows=512).schedule
        Schedule(rows=None, columns=None, kept=0, accumulate='exact')
    """
    if rows is not None:
        memory_limit = _limit_of_rows(shape, rows, accumulate, rates)
    candidates = list(possible_plans(shape, accumulate, rows, memory_limit, rates))
    chosen = _chosen(candidates, memory_limit, free_bytes)
    return chosen or min(candidates, key=lambda plan: (plan.bytes, plan.seconds))


def _chosen(candidates: Iterable[ChunkPlan], memory_limit: int | None, free_bytes: int | None) -> ChunkPlan | None:
    """Return the fastest plan within a limit, or one that takes little more time and less memory; None: none fits."""
    limit = memory_limit
    if limit is None and free_bytes is not None:
        limit = int(FREE_MEMORY_SHARE * free_bytes)
    fitting = [plan for plan in candidates if limit is None or plan.bytes <= limit]
    fastest = min(fitting, key=lambda plan: (plan.seconds, plan.bytes), default=None)
    if fastest is None or memory_limit is not None:
        return fastest
    allowed = [plan for plan in fitting if plan.seconds <= (1 + MAX_SLOWDOWN) * fastest.seconds]
    most = (1 + MAX_WASTE) * min(plan.bytes for plan in allowed)
    return min((plan for plan in allowed if plan.bytes <= most), key=lambda plan: (plan.seconds, plan.bytes))


def _limit_of_rows(shape: LossShape, rows: int, accumulate: Accumulate, rates: Rates) -> int:
    """Return the bytes that a request for chunks of some rows allows: fewer rows never allow more.

    A chunk of a few rows needs a sum that all rows at once do without, and is slower than the plan without a request:
    that one's memory is enough then.
    """
    requested, whole = (by_rows(shape, count, accumulate, rates) for count in (rows, max(1, shape.rows)))
    usual = plan_linear_cross_entropy(shape, accumulate=accumulate, rates=rates)
    limit = min(requested.bytes, whole.bytes)
    return limit if requested.seconds < usual.seconds else min(limit, usual.bytes)


BLOCK_COLUMNS = (8, 16, 32, 64, 128)
"""Columns a multiprocessor of blocks whose GEMMs fill complete waves of tiles; powers of two are slower."""


def block_columns(rates: Rates) -> list[int]:
    """Return the widths of blocks to compare.

    >>> block_columns(H200)
    [1056, 2112, 4224, 8448, 16896]
    """
    return [count * rates.multiprocessors for count in BLOCK_COLUMNS]


def possible_plans(
    shape: LossShape, accumulate: Accumulate, rows: int | None, memory_limit: int | None, rates: Rates
) -> Iterator[ChunkPlan]:
    """Yield the schedules to compare, within the limit or not."""
    if shape.is_shard:
        yield by_columns(shape, shape.classes, 0, rates)
    else:
        sizes = {min(shape.rows, 2**k * odd) for k in range(4, 32) for odd in (1, 3)} | {max(1, shape.rows)}
        for size in sorted(sizes | ({rows} if rows is not None else set())):
            yield by_rows(shape, size, accumulate, rates)
        if not shape.needs_weight or not shape.rows:
            return  # without dW rows are as exact, and take one product less
    for columns in block_columns(rates):
        if columns >= shape.classes:
            return
        plan = by_columns(shape, columns, 0, rates)
        yield plan
        yield from _keeping(plan, shape, memory_limit, rates)


def _keeping(
    plan: ChunkPlan, shape: LossShape, memory_limit: int | None, rates: Rates, part_bytes: int = LOSS_PART_BYTES
) -> Iterator[ChunkPlan]:
    """Yield the plan by columns with as many kept ones as fit the limit, in whole tiles of a product, if any do."""
    columns = plan.schedule.columns
    if memory_limit is None or columns is None:
        return
    tile = GRADIENT_TILE[0]

    def keeping(tiles: int) -> ChunkPlan:
        return by_columns(shape, columns, tiles * tile, rates, part_bytes)

    tiles = bisect_right(range(1, shape.classes // tile + 1), memory_limit, key=lambda tiles: keeping(tiles).bytes)
    if tiles:
        yield keeping(tiles)


KEPT_SHARES = 8
"""The number of shares of the logits, equal ones, that row statistics may keep between their passes."""


@functools.lru_cache(maxsize=256)
def plan_row_statistics(
    shape: LossShape,
    *,
    rows: int | None = None,
    memory_limit: int | None = None,
    free_bytes: int | None = None,
    rates: Rates = H200,
) -> ChunkPlan | None:
    """Return the schedule by columns that is expected to be fastest within some memory, for statistics of rows.

    Arguments are those of `plan_linear_cross_entropy`.

    Returns:
        The plan; None where there are few classes, or no blocks of columns fit.

    Example:
        >>> print(plan_row_statistics(LossShape(8192, 2048, 151936)))
        2112 columns of the logits and 75776 kept at once, 3.2 GEMMs: 1875 MiB, an estimated 27 ms (NVIDIA H200)
    """
    if rows is not None:
        memory_limit = _limit_of_rows(shape, rows, "exact", rates)
    sizes = [columns for columns in block_columns(rates) if columns < shape.classes and shape.rows]
    tile = GRADIENT_TILE[0]
    candidates = [
        by_columns(shape, columns, shape.classes * share // KEPT_SHARES // tile * tile, rates, STATISTICS_PART_BYTES)
        for columns in sizes
        for share in range(KEPT_SHARES + 1)
    ]
    for plan in candidates[:: KEPT_SHARES + 1]:
        candidates += _keeping(plan, shape, memory_limit, rates, STATISTICS_PART_BYTES)
    return _chosen(candidates, memory_limit, free_bytes)
