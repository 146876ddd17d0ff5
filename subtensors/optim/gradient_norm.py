"""The norm of all gradients of an optimizer, taken before its step and left on the device for it.

    squares = sum over all gradients of all their elements' squares     in float64

For each batch a fused reduction gives a number a tensor, and another one adds these up. Shards are then summed over
processes, and the sums of several devices are added up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from subtensors.dispatch.fused.bound_call import interprets_kernels
from subtensors.dispatch.fused.fused_function import FusedFunction
from subtensors.dispatch.fused.tensor_columns import TensorColumn
from subtensors.dispatch.graphs.fused_graph import current_recording
from subtensors.dispatch.graphs.protocols import NotRecordable
from subtensors.kernels.fused.launch import Tiling
from subtensors.optim.batches import Batch, as_real
from subtensors.optim.dtensor import Sharding, shard

K = TypeVar("K")

Part = tuple[torch.device, Sharding | None]
"""The device and sharding of gradients that are added up together."""

WIDE = Tiling(block=2048, warps=8)
"""The tiles of a sweep that reads one tensor: with fewer programs, fewer partial sums are to be added up."""


def _square_sum(g: Tensor, result: Tensor) -> None:
    wide = g.double()
    result.copy_((wide * wide).sum())


def _add_up(total: Tensor, parts: Tensor, is_first: bool) -> None:
    total.copy_(parts.sum() if is_first else total + parts.sum())


class GradientNorm:
    """The sum of the squares of an optimizer's gradients, on each device of its parameters.

    Its memory never moves, so that a graph may read it.
    """

    def __init__(self) -> None:
        self._sums: dict[torch.device, TensorColumn] = {}
        self._totals: dict[Part, TensorColumn] = {}
        self._square_sum, self._add_up = FusedFunction(_square_sum, WIDE), FusedFunction(_add_up, WIDE)

    def sum_of_squares(self, device: torch.device) -> Tensor:
        """The last sum: float64, 0-d."""
        return _total(self._sums, device, device)[0]

    def take(self, gradients: Sequence[tuple[Batch, TensorColumn]]) -> None:
        """Add up the squares of the gradients of each batch."""
        parts: dict[Part, list[tuple[Batch, TensorColumn]]] = {}
        for batch, own in gradients:
            parts.setdefault((batch.device, batch.sharding), []).append((batch, own))
        if current_recording() is not None and len(parts) > 1 and any(device.type == "cpu" for device, _ in parts):
            raise NotRecordable("the norm of the gradients is more than one kernel")
        for part, of_part in parts.items():
            total = _total(self._sums, part[0], part[0]) if len(parts) == 1 else _total(self._totals, part, part[0])
            self._take_part(part, of_part, total)
        for device in {device for device, _ in parts} if len(parts) > 1 else ():
            totals = [self._totals[part][0].to(device) for part in parts]
            torch.sum(torch.stack(totals), 0, out=self.sum_of_squares(device))

    def _take_part(self, part: Part, gradients: list[tuple[Batch, TensorColumn]], total: TensorColumn) -> None:
        """Write the sum of one part to `total`."""
        device, sharding = part
        has_kernels = device.type == "cuda" or interprets_kernels()
        if not has_kernels and current_recording() is not None:
            raise NotRecordable("the norm of the gradients is not a kernel here")
        for number, (batch, own) in enumerate(gradients):
            local = own if sharding is None else as_real(map(shard, own))
            if batch.squares is None:
                numbers = torch.zeros(len(local), dtype=torch.float64, device=device)
                batch.squares = TensorColumn(numbers.unbind(), is_fixed=True), TensorColumn([numbers], is_fixed=True)
            each, together = batch.squares
            if has_kernels:
                self._square_sum(local, each)
            else:
                norms = torch._foreach_norm(local, 2, dtype=torch.float64)
                together[0].copy_(torch.stack(norms).square())
            self._add_up(total, together, number == 0)
        if sharding is not None:
            sharding.all_reduce(total[0])


def _total(totals: dict[K, TensorColumn], key: K, device: torch.device) -> TensorColumn:
    """The 0-d float64 of this key, created if there is none, as a list of one."""
    if key not in totals:
        totals[key] = TensorColumn([torch.zeros((), dtype=torch.float64, device=device)], is_fixed=True)
    return totals[key]
