"""A figure of how often each size was called, and how much its bucket wastes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from subtensors.bucketed.report.statistics import Statistics
from subtensors.dispatch.ops.errors import SizeError
from subtensors.sizes.dims import Dim

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def drawn(statistics: Statistics, dims: Mapping[str, Dim]) -> Figure:
    """Draw one row per Dim: calls over the true size as bars, buckets as lines, and the waste of each bucket.

    Args:
        statistics: the counters.
        dims: by name.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('a plot needs matplotlib: pip install "subtensors[plot]"') from error
    figure = Figure(figsize=(8, 3 * max(len(dims), 1)), layout="constrained")
    for i, (name, dim) in enumerate(dims.items()):
        axes = figure.add_subplot(max(len(dims), 1), 1, i + 1)
        counted = statistics.sizes.get(name, Counter())
        axes.bar(list(counted), list(counted.values()), color="tab:blue", label="calls")
        axes.set_xlabel(f"true size of {name}")
        axes.set_ylabel("calls")
        used = sorted({_bucket(dim, size) for size in counted})
        for bucket in used:
            axes.axvline(bucket, color="gray", linewidth=0.8)
        waste = axes.twinx()
        waste.set_ylim(0, 1)
        waste.set_ylabel("wasted part of a bucket")
        wasted = []
        for bucket in used:
            inside = {size: n for size, n in counted.items() if _bucket(dim, size) == bucket}
            wasted.append(1 - sum(size * n for size, n in inside.items()) / (bucket * sum(inside.values())))
        waste.step([0, *used], [*wasted, wasted[-1]] if used else [0], where="post", color="tab:red", label="waste")
    return figure


def _bucket(dim: Dim, size: int) -> int:
    try:
        return dim.bucket(size)
    except SizeError:
        return size
