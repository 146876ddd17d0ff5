"""Example calls that warm a runner up, one for each bucket."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from subtensors.bucketed.calls.call_spec import flatten, unflatten
from subtensors.bucketed.calls.dim_spec import ArgumentDims
from subtensors.padded.padded_tensor import PaddedTensor

T = TypeVar("T")

_log = logging.getLogger(__name__)


def repeated(x: Tensor, sizes: Mapping[int, int]) -> Tensor:
    """A tensor of other sizes that repeats the values of `x`.

    Args:
        x: any tensor.
        sizes: the new size of each dim that changes.

    Example:
        >>> repeated(torch.tensor([1, 2, 3]), {0: 5})
        tensor([1, 2, 3, 1, 2])
    """
    for d, size in sizes.items():
        if not x.shape[d]:
            shape = list(x.shape)
            shape[d] = size
            x = x.new_zeros(shape)
        x = x.index_select(d, torch.arange(size, device=x.device) % x.shape[d])
    return x


def calls_to_warm(
    dims: ArgumentDims, most: int | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[tuple[list[Any], tuple[Any, ...], dict[str, Any]]]:
    """Calls like a given one, one per bucket, the largest first: the leaves, args and kwargs of each.

    Args:
        dims: which dims of the arguments are padded, and on which Dims.
        most: the most calls to return; None for all.
        args, kwargs: those of the given call.
    """
    leaves, spec = flatten(args, kwargs)
    places = dims.of_leaves(args, kwargs)
    used = {dim: None for _, padded in places for dim in (padded or {}).values()}
    largest = sorted(itertools.product(*[dim.buckets for dim in used]), key=math.prod, reverse=True)
    calls = []
    for buckets in largest[:most]:
        sizes = dict(zip(used, buckets, strict=True))
        moved = [
            repeated(x, {d: sizes[dim] for d, dim in (padded or {}).items()})
            if isinstance(x, Tensor) and padded and not isinstance(x, PaddedTensor)
            else x
            for x, (_, padded) in zip(leaves, places, strict=True)
        ]
        calls.append((moved, *unflatten(moved, spec, len(args), tuple(kwargs))))
    return calls


def with_progress(steps: Sequence[T], description: str, visible: bool) -> Iterator[T]:
    """Iterate over the steps, with a progress bar on stderr."""
    if not visible:
        yield from steps
        return
    try:
        from rich.console import Console
        from rich.progress import track
    except ImportError:
        _log.info('a progress bar needs rich: pip install "subtensors[plot]"')
        yield from steps
        return
    yield from track(steps, description, console=Console(stderr=True))
