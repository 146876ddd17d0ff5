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
    counted = np.concatenate([[0], np.cumsum(counts)])
    summed = np.concatenate([[0], np.cumsum(counts * sizes)])
    # Without buckets only the empty sample is covered; 2**62 is an infinity that can be added to without overflow.
    waste = np.full(number + 1, 1 << 62, dtype=np.int64)
    waste[0] = 0
    tables, starts = [waste], []
    for _ in range(min(max_runs, number)):
        following, start = waste.copy(), np.full(number + 1, -1)
        for j in range(1, number + 1):
            padding = sizes[j - 1] * (counted[j] - counted[:j]) - (summed[j] - summed[:j])
            total = waste[:j] + padding
            i = int(np.argmin(total))
            if total[i] < following[j]:
                following[j], start[j] = total[i], i
        waste = following
        tables.append(waste)
        starts.append(start)
    buckets = int(np.argmin([table[number] for table in tables]))
    ends, j = [], number
    while j:
        # If one more bucket gained nothing, the cut is that of one bucket less.
        while starts[buckets - 1][j] < 0:
            buckets -= 1
        ends.append(j - 1)
        j = int(starts[buckets - 1][j])
        buckets -= 1
    return ends[::-1]
