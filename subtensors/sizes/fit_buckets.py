"""Fit of buckets to a sample of sizes, so that padding wastes least.

A set of buckets cuts the sorted sizes into runs, each padded to its largest. The smallest waste of the first `j` sizes
with `k` buckets is

    waste[k, j] = min over i < j of  waste[k - 1, i] + padding(i, j),

where `padding(i, j)` is the padding of sizes `i ... j - 1` up to the last of them. With sorted sizes `s` and their
counts `c`, `padding(i, j) = s[j - 1] * sum(c[i:j]) - sum((c * s)[i:j])`, a difference of prefix sums.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import torch

from subtensors.arguments import LARGEST_SIZE, shown, whole_number
from subtensors.sizes.bucket_policies import Sizes


def fit_buckets(lengths: Iterable[int] | torch.Tensor, max_graphs: int = 8, multiple_of: int = 1) -> Sizes:
    """Return the policy of at most `max_graphs` buckets that pads a sample of lengths least.

    Args:
        lengths: a sample of the sizes to come, each a positive int, or a Counter of them; a tensor is read on the host.
        max_graphs: the most buckets, each of which costs a captured graph or a compilation.
        multiple_of: every bucket is a multiple of this.

    Returns:
        The policy; its last bucket holds the longest of the lengths. No other choice of as many buckets pads less; of
        several equally good ones it has the fewest buckets.

    Raises:
        ValueError: there are no lengths, one is no positive int, or a number is below 1.
        TypeError: `max_graphs` or `multiple_of` is no int.

    Example:
        >>> fit_buckets([10, 11, 12, 60, 64, 64, 500], max_graphs=3)
        Sizes(sizes=(12, 64, 500))

    Source: optimal one-dimensional clustering by dynamic programming, after Wang & Song, "Ckmeans.1d.dp", 2011.
    """
    sample = sample_of("fit_buckets", lengths)
    max_graphs = whole_number("max_graphs", max_graphs, at_least=1)
    multiple_of = whole_number("multiple_of", multiple_of, at_least=1)
    if int(sample.max()) + multiple_of > LARGEST_SIZE:
        raise ValueError(f"multiple_of is small enough for a bucket to be a size, got {multiple_of}")
    candidates = -(-sample.astype(np.int64) // multiple_of) * multiple_of
    sizes, counts = np.unique(candidates, return_counts=True)
    return Sizes(sizes[_ends_of_runs(sizes, counts, max_graphs)].tolist())


def sample_of(name: str, lengths: Iterable[int] | torch.Tensor) -> np.ndarray:
    """Return the lengths that the function `name` was given as a vector of positive integers."""
    try:
        if isinstance(lengths, Mapping):  # such as a Counter
            lengths = Counter(lengths).elements()
        sample = np.asarray(lengths.tolist() if isinstance(lengths, torch.Tensor) else list(lengths))
    except (TypeError, ValueError, RuntimeError):  # nothing to go through, lists that differ, a tensor without values
        sample = np.empty(0)
    if not sample.size or sample.dtype.kind not in "iu" or sample.ndim != 1 or sample.min() < 1:
        advice = (
            "; of a file, [int(n) for n in Path(path).read_text().split()]" if isinstance(lengths, str | Path) else ""
        )
        raise ValueError(f"{name} takes one or more lengths, each an int of at least 1, got {shown(lengths)}{advice}")
    return sample


def _ends_of_runs(sizes: np.ndarray, counts: np.ndarray, max_runs: int) -> list[int]:
    """Return the ends of the best cut's runs: increasing indices into `sizes`, (n,) int64, the last of them n - 1."""
    number = len(sizes)
    counted, summed = (np.concatenate([[0], np.cumsum(each)]) for each in (counts, counts * sizes))
    # The waste of the first j sizes in one bucket, then in two: one more wastes less, as all sizes differ and occur.
    waste = np.concatenate([[0], sizes * counted[1:] - summed[1:]])
    starts = []
    for k in range(1, min(max_runs, number)):
        following, start = np.zeros_like(waste), np.zeros_like(waste)
        for j in range(k + 1, number + 1):
            padding = sizes[j - 1] * (counted[j] - counted[k:j]) - (summed[j] - summed[k:j])
            total = waste[k:j] + padding
            start[j] = k + np.argmin(total)
            following[j] = total.min()
        waste = following
        starts.append(start)
    ends = [number - 1]
    for start in reversed(starts):
        ends.append(int(start[ends[-1] + 1]) - 1)
    return ends[::-1]
