"""The norm of all gradients of an optimizer, taken before its step and left on the device for it.

    squares = sum over all gradients of all their elements' squares     in float64, across tensors

One sweep of a fused kernel over the gradients of a batch leaves a number for each of them; those are added up, also
over the processes that have the other shards.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from subtensors.dispatch.columns import Elements
from subtensors.dispatch.fusion import Fusion
from subtensors.dispatch.graph_capture import NotRecordable, recording_now
from subtensors.optim.group_lists import Batch, as_real
from subtensors.optim.shards import shard


def _square_sum(g: Tensor, squares: Tensor) -> None:
    g = g if g.dtype == torch.float64 else g.float()
    squares.copy_((g * g).sum())


_square_sums = Fusion(_square_sum)


class GradientNorm:
    """The sum of the squares of an optimizer's gradients, on each device that has parameters of its.

    Its memory stays where it is, so that a graph may read it.
    """

    def __init__(self) -> None:
        self._squares: dict[torch.device, Tensor] = {}

    def squares(self, device: torch.device) -> Tensor:
        """The sum that was last taken: float64, 0-d."""
        known = self._squares.get(device)
        if known is None:
            known = self._squares[device] = torch.zeros((), dtype=torch.float64, device=device)
        return known

    def take(self, gradients: Sequence[tuple[Batch, Elements]]) -> None:
        """Add up the squares.

        Args:
            gradients: of each batch.
        """
        if recording_now() is not None and any(batch.device.type == "cpu" for batch, _ in gradients):
            raise NotRecordable("the norm of the gradients is more than fused calls")
        sums: dict[torch.device, list[Tensor]] = {}
        for batch, own in gradients:
            each, parts = batch.squares
            if batch.sharding is None:
                _square_sums(own, parts)
            else:
                _square_sums(as_real(map(shard, own)), parts)
                each = batch.sharding.add_up(each.sum(0, keepdim=True))
            sums.setdefault(batch.device, []).append(each)
        totals = [torch.cat(own) if len(own) > 1 else own[0] for own in sums.values()]
        if len(totals) == 1:
            (device,) = sums
            torch.sum(totals[0], dim=0, out=self.squares(device))
            return
        for device in sums:
            torch.sum(torch.stack([t.sum().to(device) for t in totals]), dim=0, out=self.squares(device))
