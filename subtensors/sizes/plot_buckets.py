"""A figure of sizes and their buckets: how often each size occurs, and what padding it to its bucket wastes."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from subtensors.sizes.bucket_policies import BucketPolicy, bucket_policy
from subtensors.sizes.dims import Dim
from subtensors.sizes.fit_buckets import sample_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_buckets(lengths: Iterable[int] | Tensor, policy: Dim | BucketPolicy | int | Iterable[int]) -> Figure:
    """Draw how often each length occurs, the buckets of a policy, and the part of each bucket that padding wastes.

    Args:
        lengths: a sample of the sizes to come, each a positive int, or a Counter of them; a tensor is read on the host.
        policy: a Dim, or what a Dim takes as buckets: a policy, the step of a linear one, a list. Lengths beyond the
            last bucket are drawn unpadded.

    Returns:
        A matplotlib figure: a notebook shows it, `figure.savefig(path)` writes it.

    Raises:
        ImportError: matplotlib is not installed.
        TypeError, ValueError: the lengths or the policy are none of these.

    Example:
        >>> import subtensors as st
        >>> lengths = [10, 11, 12, 60, 64, 64, 500]
        >>> figure = plot_buckets(lengths, st.fit_buckets(lengths, max_graphs=3))
        >>> figure.axes[0].get_title()
        '7 sizes in 3 buckets, 1% waste'
    """
    counted = Counter(sample_of("plot_buckets", lengths).tolist())
    dim = policy if isinstance(policy, Dim) else Dim("length", buckets=bucket_policy(policy), strict=False)
    return plot_sizes({dim.name: counted}, {dim.name: dim})


def plot_sizes(sizes: Mapping[str, Mapping[int, int]], dims: Mapping[str, Dim]) -> Figure:
    """Draw one row per Dim: counts over the size as bars, buckets as lines, and the waste of each bucket.

    Args:
        sizes: how often each size occurs, by Dim.
        dims: by name.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("a plot needs matplotlib: pip install matplotlib") from error

    class NotebookFigure(Figure):
        def _repr_png_(self) -> bytes:
            png = io.BytesIO()
            self.savefig(png, format="png")
            return png.getvalue()

    figure = NotebookFigure(figsize=(8, 3 * max(len(dims), 1)), layout="constrained")
    for i, (name, dim) in enumerate(dims.items()):
        axes = figure.add_subplot(max(len(dims), 1), 1, i + 1)
        counted = sizes.get(name, {})
        # A bar of one size among thousands is narrower than a pixel: its edge is not.
        axes.bar(
            list(counted), list(counted.values()), color="tab:blue", edgecolor="tab:blue", linewidth=0.8, label="calls"
        )
        axes.set_xlabel(f"true size of {name}")
        axes.set_ylabel("calls")
        bucket_of = {size: dim.bucket(size) if dim.admits(size) else size for size in counted}
        used = sorted(set(bucket_of.values()))
        for bucket in used:
            axes.axvline(bucket, color="gray", linewidth=0.8)
        waste = axes.twinx()
        waste.set_ylim(0, 1)
        waste.set_ylabel("wasted part of a bucket")
        wasted = []
        for bucket in used:
            inside = {size: n for size, n in counted.items() if bucket_of[size] == bucket}
            wasted.append(1 - sum(size * n for size, n in inside.items()) / (bucket * sum(inside.values())))
        waste.step([0, *used], [*wasted, wasted[-1]] if used else [0], where="post", color="tab:red", label="waste")
        padded = sum(bucket_of[size] * n for size, n in counted.items())
        total = 1 - sum(size * n for size, n in counted.items()) / padded if padded else 0.0
        axes.set_title(f"{sum(counted.values())} sizes in {len(used)} buckets, {total:.0%} waste")
    return figure
