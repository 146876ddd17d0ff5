"""The norm of all gradients of an optimizer, taken before its step and left on the device for it.

    squares = sum over all gradients of all their elements' squares     in float64

It is one kernel (`kernels.fused.grad_norm`), whatever the dtypes and groups, and the step counts of the first group
that is updated are part of it. Shards are then summed over processes, and the sums of several devices are added up, in
further kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from subtensors.dispatch.fused.bound_call import interprets_kernels
from subtensors.dispatch.fused.tensor_columns import TensorColumn
from subtensors.dispatch.graphs.dynamic_scalars import NotRecordable, Recordable
from subtensors.dispatch.graphs.fused_graph import current_recording
from subtensors.dispatch.graphs.guards import AddressSnapshot, are_same
from subtensors.kernels.fused.grad_norm import DTYPES, FusedGradNorm, GradNormGrid, reference
from subtensors.kernels.runtime import graph_lifetime
from subtensors.kernels.runtime.custom_ops import is_dense
from subtensors.kernels.runtime.graph_lifetime import to_device
from subtensors.kernels.runtime.launcher import current_stream, is_capturing
from subtensors.optim.batches import Batch, as_real
from subtensors.optim.dtensor import Sharding, shard

Part = tuple[torch.device, Sharding | None]
"""The device and sharding of the gradients that one kernel adds up."""


class GradientNorm:
    """The sum of the squares of an optimizer's gradients, on each device of its parameters.

    Its memory never moves, so that a graph may read it.
    """

    def __init__(self) -> None:
        self._totals: dict[torch.device | Part, Tensor] = {}
        """The sum on each device; where there are several parts, that of each."""
        self._sweeps: dict[Part, _Sweep] = {}

    def sum_of_squares(self, device: torch.device) -> Tensor:
        """The last sum: float64, 0-d."""
        return self._total(device, device)

    def _total(self, key: torch.device | Part, device: torch.device) -> Tensor:
        if key not in self._totals:
            with torch.inference_mode(False):  # steps in either mode write it
                self._totals[key] = torch.zeros((), dtype=torch.float64, device=device)
        return self._totals[key]

    def take(self, gradients: Sequence[tuple[Batch, TensorColumn]], is_followed: bool) -> FusedGradNorm | None:
        """Add up the squares.

        Args:
            gradients: the gradients of each batch.
            is_followed: whether a fused call for the first batch comes next.

        Returns:
            A launch that this call has to make first; None if the sum was launched.
        """
        parts: dict[Part, list[tuple[Batch, Sequence[Tensor]]]] = {}
        for batch, own in gradients:
            local = own if batch.kind.sharding is None else as_real(map(shard, own))
            parts.setdefault((batch.kind.device, batch.kind.sharding), []).append((batch, local))
        if len(parts) == 1:
            ((part, all_gradients),) = parts.items()
            return self._add_up(part, all_gradients, self.sum_of_squares(part[0]), is_followed)
        if current_recording() is not None and any(device.type == "cpu" for device, _ in parts):
            raise NotRecordable("the norm of the gradients is more than one kernel")
        for part, gradients_of_part in parts.items():
            self._add_up(part, gradients_of_part, self._total(part, part[0]), is_followed=False)
        for device in {device for device, _ in parts}:
            torch.sum(
                torch.stack([self._totals[part].to(device) for part in parts]), 0, out=self.sum_of_squares(device)
            )
        return None

    def _add_up(
        self, part: Part, gradients: list[tuple[Batch, Sequence[Tensor]]], total: Tensor, is_followed: bool
    ) -> FusedGradNorm | None:
        """Write the sum of one part to `total`, or return the launch that will."""
        device, sharding = part
        batches = [batch for batch, _ in gradients]
        tensors = [g for _, own in gradients for g in own]
        has_kernel = device.type == "cuda" or interprets_kernels()
        if has_kernel and all(g.dtype in DTYPES for g in tensors):
            sweep = self._sweeps.get(part)
            if sweep is None or not sweep.fits(batches, tensors, total):
                sweep = _Sweep(batches, tensors, total)
                if not is_capturing(device):  # the graph fills its chunks at replay
                    self._sweeps[part] = sweep
            prelude = sweep.prepare(tensors, is_followed and sharding is None)
            if is_followed and sharding is None:
                return prelude
            if prelude is not None:
                prelude.launch()
        elif current_recording() is not None:
            raise NotRecordable("the norm of the gradients is not a kernel here")
        else:
            total.copy_(reference(tensors))
        if sharding is not None:
            sharding.all_reduce(total)
        return None


class _Sweep(Recordable):
    """The kernel over the gradients of some batches, with their last addresses; a recording takes its launches."""

    grid: GradNormGrid

    def __init__(self, batches: list[Batch], gradients: list[Tensor], total: Tensor) -> None:
        self.batches, self.seed, self.device = batches, total, total.device
        self.dtypes, self.sizes = [g.dtype for g in gradients], list(map(Tensor.numel, gradients))
        self.grid = GradNormGrid(self.sizes, self.dtypes, self.device, total)
        self._guard: AddressSnapshot | None = None
        self._table = total
        self._is_followed = False
        self._copies: list[Tensor] = []
        """Copies that the next launch reads."""

    def fits(self, batches: list[Batch], gradients: list[Tensor], total: Tensor) -> bool:
        """Return whether this kernel was built for these batches and this total, and gradients of these sizes."""
        return (
            are_same(batches, self.batches)
            and total is self.seed
            and [g.dtype for g in gradients] == self.dtypes
            and list(map(Tensor.numel, gradients)) == self.sizes
        )

    def as_prelude(self, table: int, workspace: int) -> FusedGradNorm | None:
        """The launch of a recording, if the next one may be merged with it; else None."""
        return FusedGradNorm(self.grid, table, workspace) if self._is_followed else None

    def prepare(self, gradients: list[Tensor], is_followed: bool) -> FusedGradNorm | None:
        """The launch that adds up the squares, whatever their memory order; None if a recording took it."""
        own = [g if is_dense(g) else g.contiguous() for g in gradients]
        self._is_followed = is_followed
        if (recording := current_recording()) is not None:
            if not are_same(own, gradients):
                raise NotRecordable("a gradient that does not fill its memory is copied")
            recording.launch(self, [own], [])
            return None
        guard, table = self._guard, self._table
        if guard is None or not guard.matches(own):
            guard = AddressSnapshot(own, with_layout=False)
            table = to_device(self.grid.rows([guard.addresses]), self.device)
        self._copies = [g for g, given in zip(own, gradients, strict=True) if g is not given]
        if is_capturing(self.device):
            # The graph fills a table of its own at replay, so no eager call may use that.
            graph_lifetime.keep_with_graph((self.grid, table, self._copies))
            return FusedGradNorm(self.grid, table, None)
        self._guard, self._table = guard, table
        return FusedGradNorm(self.grid, table, current_stream(self.device))
