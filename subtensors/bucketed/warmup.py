"""Example calls that warm a runner up, one for each bucket."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias, TypeGuard, TypeVar

import torch
from torch import Tensor

from subtensors.arguments import shown
from subtensors.bucketed.calls.call_key import flatten, unflatten
from subtensors.bucketed.calls.dim_spec import ArgumentDims
from subtensors.dispatch.ops.plain_types import MAPPED_TYPES
from subtensors.dispatch.ops.tree import Args, Kwargs, PyTree
from subtensors.padded.padded_tensor import PaddedTensor
from subtensors.sizes.dims import Dim

T = TypeVar("T")

ExampleCall: TypeAlias = tuple[list[PyTree], Args, Kwargs]
"""The leaves, args and kwargs of a call."""

_log = logging.getLogger(__name__)


def repeat_to_sizes(x: Tensor, sizes: Mapping[int, int]) -> Tensor:
    """Return a tensor of other sizes that repeats the values of `x`.

    Args:
        x: any tensor.
        sizes: the new size of each dim that changes.

    Example:
        >>> repeat_to_sizes(torch.tensor([1, 2, 3]), {0: 5})
        tensor([1, 2, 3, 1, 2])
    """
    for d, size in sizes.items():
        if not x.shape[d]:
            shape = list(x.shape)
            shape[d] = size
            x = x.new_zeros(shape)
        x = x.index_select(d, torch.arange(size, device=x.device) % x.shape[d])
    return x


def warmup_calls(dims: ArgumentDims, max_calls: int | None, args: Args, kwargs: Kwargs) -> list[ExampleCall]:
    """Return calls like a given one, one per bucket, the largest first.

    Args:
        dims: which dims of the arguments are padded, and on which Dims.
        max_calls: the most calls to return; None for all.
        args, kwargs: those of the given call.
    """
    leaves, structure = flatten(args, kwargs)
    places = dims.of_leaves(args, kwargs)
    used = {dim: None for _, padded in places for dim in (padded or {}).values()}
    largest_first = sorted(itertools.product(*[dim.buckets for dim in used]), key=math.prod, reverse=True)
    calls = []
    for buckets in largest_first[:max_calls]:
        sizes = dict(zip(used, buckets, strict=True))
        resized = [
            repeat_to_sizes(x, {d: sizes[dim] for d, dim in padded.items()})
            if padded and _is_resized(x, place, padded)
            else x
            for x, (place, padded) in zip(leaves, places, strict=True)
        ]
        calls.append((resized, *unflatten(resized, structure, len(args), tuple(kwargs))))
    return calls


def _is_resized(x: object, place: str, padded: Mapping[int, Dim]) -> TypeGuard[Tensor]:
    """Return whether an example is a tensor that is padded in calls; raise an error if it can't be."""
    if not isinstance(x, Tensor) or isinstance(x, PaddedTensor):
        return False
    if type(x) in MAPPED_TYPES or x.layout is not torch.strided or x.is_nested:
        raise TypeError(f"{place} is padded, so the example is a dense tensor; got {shown(x)}")
    if wrong := [d for d in padded if not -x.dim() <= d < x.dim()]:
        raise ValueError(f"{place} is padded in dim {wrong[0]}, and the example has shape {tuple(x.shape)}")
    return True


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
