"""Ways to take a step, measured in rounds of random order in one process."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import torch
from torch import Tensor

from demo.timing import Span, synchronize

Step = Callable[[], object]


def in_rounds(steps: Mapping[str, Step], device: str, repeats: int) -> dict[str, tuple[float, float, float]]:
    """Return the median time of each step in ms, and the interval that holds the middle half of its times.

    Each is taken once more before it is timed.

    Args:
        steps: by name.
        device: "cpu" or "cuda".
        repeats: rounds, in each of which every step is timed once.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats):
        for name in random.sample([*steps], len(steps)):
            steps[name]()
            with Span(device) as span:
                steps[name]()
            synchronize(device)
            times[name].append(span.ms())
    for taken in times.values():
        taken.sort()
    return {name: (median(t), t[len(t) // 4], t[-1 - len(t) // 4]) for name, t in times.items()}


def peak_mb(step: Step, leaves: Sequence[Tensor]) -> float | None:
    """Return the memory of a step above what is allocated before it, MiB, gradients of its leaves included.

    None on a CPU.
    """
    if not leaves[0].is_cuda:
        return None
    for leaf in leaves:
        leaf.grad = None
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20
