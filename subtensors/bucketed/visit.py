"""What a runner knows of the calls of one key."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from subtensors.bucketed.bucket import Bucket
from subtensors.bucketed.calls.arguments import Reading
from subtensors.bucketed.calls.outputs import Cut, Outputs
from subtensors.bucketed.state.program_state import State


@dataclass(slots=True)
class Visit:
    """One key, its bucket, and how a result of the bucket is cut for it."""

    reading: Reading | None
    bucket: Bucket | None
    refusal: str = ""
    """Why such calls have no graph; "" where they do."""
    error: Exception | None = None
    calls: int = 0
    elements: tuple[int, int] = (0, 0)
    """Along the Dims: real ones, and the bucket's."""
    order: tuple[int, ...] | None = None
    """See `CallStyle`."""
    outputs: Outputs | None = None
    cuts: list[Cut] = field(default_factory=list)

    def ordered(self, leaves: list[Any]) -> list[Any]:
        """The leaves of a call as its bucket takes them."""
        return leaves if self.order is None else [leaves[i] for i in self.order]


def shared_key(
    state: State, leaves: Sequence[Any], spec: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    """What of a call's key is not of one leaf: the form of the call, and the modes it is made in.

    Args:
        state: of the program.
        leaves, spec: as `flatten` gives them.
        args, kwargs: the call's.
    """
    cast = torch.is_autocast_enabled("cuda"), torch.is_autocast_enabled("cpu")
    types = (torch.get_autocast_dtype("cuda"), torch.get_autocast_dtype("cpu")) if any(cast) else None
    return len(args), tuple(kwargs), spec, (state.followed(leaves), cast, types, state.training())


def add_sizes(visit: Visit, sizes: dict[str, Counter[int]]) -> None:
    """Count how often each true size was seen, by Dim."""
    if visit.reading is not None:
        for dim, size in zip(visit.reading.dims, visit.reading.sizes, strict=True):
            sizes.setdefault(dim.name, Counter())[size] += visit.calls
