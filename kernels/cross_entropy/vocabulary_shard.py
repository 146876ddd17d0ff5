"""A head whose classes are divided over processes: each folds the columns of its own, and the folds are folded.

    logits = hidden @ weight.T            rank 0        rank 1
                                      +-----------+-----------+
        the same hidden in each     N | columns   | columns   |     a block of columns, as any other
                                      +-----------+-----------+
        sums of rows                    m, s, ...   m, s, ...       MAX of m, then SUM of the sums relative to it
        gradients                       dW rows     dW rows         stay
                                        dX part     dX part         SUM

So a loss sends a few numbers a row, forward, and its dX, N x H; no logit and no part of the head leaves its rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

MODULUS = 65521
"""Below 2**24, so that a remainder is exact in float32."""


@dataclass(frozen=True)
class VocabularyShard:
    """The classes of this process, among those of all.

    Args:
        first: its first class; the others follow.
        classes: the number of all classes, V.
        group: the processes that have them.
    """

    first: int
    classes: int
    group: ProcessGroup

    def reduced(self, tensor: Tensor, op: Literal["SUM", "MAX", "MIN"]) -> Tensor:
        """Reduce a contiguous tensor over the processes, in place, and return it."""
        torch.distributed.all_reduce(tensor, getattr(torch.distributed.ReduceOp, op), group=self.group)
        return tensor

    def largest(self, row_max: Tensor, targets: Tensor) -> Tensor:
        """Return the largest logit of each row over all classes, (N,).

        Args:
            row_max: (N,), the largest of its own.
            targets: (T, N) int64, the given classes of the rows, which must be the same in each process.

        Raises:
            ValueError: they are not, on a CPU; on a GPU torch's device assertion.
        """
        order = torch.arange(1, targets.numel() + 1, device=targets.device)
        digest = ((targets.flatten() * order).sum() % MODULUS).to(row_max.dtype)[None]
        found = self.reduced(torch.cat([row_max, digest, -digest]), "MAX")
        top, bottom = found[-2:].split(1)
        if targets.device.type != "cpu":
            digest.new_zeros(1).gather(0, (top != -bottom).long())
        elif top != -bottom:
            raise ValueError(
                "processes that share a head have other targets each; where their tokens differ, chunk hidden states "
                "that say so: DTensor.from_local(hidden, mesh, [Shard(0)]), and the targets alike"
            )
        return found[:-2]
