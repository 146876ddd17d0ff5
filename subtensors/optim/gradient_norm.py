"""The norm of all gradients of an optimizer, taken before its step and left on the device for it.

    squares = sum over all gradients of all their elements' squares     in float64

It is fused math, a sum for each gradient and then the sum of these, whatever the dtypes and groups. Shards are then
summed over processes, and the sums of several devices are added up, in further kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import torch
from torch import Tensor

from subtensors.dispatch.fused.bound_call import FusedCall, interprets_kernels
from subtensors.dispatch.fused.fused_function import FusedFunction
from subtensors.dispatch.fused.tensor_columns import TensorColumn
from subtensors.dispatch.graphs.dynamic_scalars import NotRecordable
from subtensors.dispatch.graphs.fused_graph import current_recording
from subtensors.dispatch.graphs.guards import AddressSnapshot, are_same
from subtensors.kernels.runtime import graph_lifetime
from subtensors.kernels.runtime.launcher import is_capturing
from subtensors.optim.batches import GRADIENTS, Batch, as_real
from subtensors.optim.dtensor import Sharding, shard

Part = tuple[torch.device, Sharding | None]
"""The device and sharding of gradients that are added up together."""

BatchGradients = list[tuple[Batch, TensorColumn]]
"""Batches, each with its gradients."""


def gradient_squares(squares: Tensor, g: Tensor) -> None:
    """Write the sum of the squares of a gradient's elements."""
    wide = g.double()
    squares.copy_((wide * wide).sum())


def sum_of_squares(total: Tensor, squares: Tensor) -> None:
    """Write the sum over all gradients."""
    total.copy_(squares.sum())


class GradientNorm:
    """The sum of the squares of an optimizer's gradients, on each device of its parameters.

    Its memory never moves, so that a graph may read it.
    """

    def __init__(self) -> None:
        self._memory: dict[object, Tensor] = {}
        """The sum of each device, of each part where there are several, and of each gradient."""
        self._square, self._add_up = FusedFunction(gradient_squares), FusedFunction(sum_of_squares)
        self._calls: dict[Part, _Calls] = {}

    def sum_of_squares(self, device: torch.device) -> Tensor:
        """The last sum: float64, 0-d."""
        return self._zeros(device, device)

    def _zeros(self, key: object, device: torch.device, *size: int) -> Tensor:
        """The memory of this key: float64, zeros at first."""
        if key not in self._memory:
            with torch.inference_mode(False):  # steps in either mode write it
                self._memory[key] = torch.zeros(size, dtype=torch.float64, device=device)
        return self._memory[key]

    def take(self, gradients: BatchGradients) -> None:
        """Add up the squares of the gradients of each batch."""
        parts: dict[Part, BatchGradients] = {}
        for batch, own in gradients:
            is_local = batch.kind.sharding is None or batch.sees_shards
            local = own if is_local else as_real(map(shard, own))
            parts.setdefault((batch.kind.device, batch.kind.sharding), []).append((batch, local))
        if len(parts) == 1:
            ((part, all_gradients),) = parts.items()
            self._take_part(part, all_gradients, self.sum_of_squares(part[0]))
            return
        if current_recording() is not None and any(device.type == "cpu" for device, _ in parts):
            raise NotRecordable("gradients of several shardings are not summed by fused calls alone")
        totals = {part: self._zeros(part, part[0]) for part in parts}
        for part, gradients_of_part in parts.items():
            self._take_part(part, gradients_of_part, totals[part])
        for device in {device for device, _ in parts}:
            torch.sum(torch.stack([t.to(device) for t in totals.values()]), 0, out=self.sum_of_squares(device))

    def _take_part(self, part: Part, gradients: BatchGradients, total: Tensor) -> None:
        """Write the sum of one part to `total`."""
        device, sharding = part
        if device.type == "cuda" or interprets_kernels():
            calls = self._calls.get(part)
            if calls is None or not calls.fit(gradients, total):
                count = sum(len(own) for _, own in gradients)
                calls = self._calls[part] = _Calls(gradients, self._zeros((part, count), device, count), total)
            for call in calls.with_gradients(gradients):
                self._square.run(call)
            self._add_up.run(calls.last())
            if is_capturing(device):
                graph_lifetime.keep_with_graph(calls.memory)
        else:
            norms = [torch.linalg.vector_norm(g, dtype=torch.float64) for _, own in gradients for g in own]
            total.copy_(torch.stack(norms).square().sum())
        if sharding is not None:
            sharding.all_reduce(total)


class _Calls:
    """The fused calls over the gradients of some batches, of which only addresses are read again in each step.

    Args:
        gradients: the batches, each with its gradients.
        squares: (gradients,) float64, for the sum of each.
        total: 0-d float64, for the sum of all.
    """

    def __init__(self, gradients: BatchGradients, squares: Tensor, total: Tensor) -> None:
        self.memory = squares, total
        self._total = TensorColumn([total], is_fixed=True)
        self._last = FusedCall((self._total, TensorColumn([squares], is_fixed=True)), {})
        self._batches = [batch for batch, _ in gradients]
        self._holders = [own.holder for _, own in gradients]
        # A gradient has another layout at an old address only where its parameter has moved to another one.
        self._guards = [AddressSnapshot(holder or (), with_layout=False) for holder in self._holders]
        self._likes = [None if holder is None else TensorColumn(keeps_layout=True) for holder in self._holders]
        views = iter(squares.unbind())
        columns = [TensorColumn(islice(views, len(own)), is_fixed=True) for _, own in gradients]
        self._templates = [FusedCall((column, TensorColumn()), {}) for column in columns]

    def fit(self, gradients: BatchGradients, total: Tensor) -> bool:
        """Return whether these are calls for these batches, whose parameters have not moved, and for this total."""
        return (
            total is self.memory[1]
            and are_same([batch for batch, _ in gradients], self._batches)
            and are_same([own.holder for _, own in gradients], self._holders)
            and all(map(AddressSnapshot.matches, self._guards, [holder or () for holder in self._holders]))
        )

    def with_gradients(self, gradients: BatchGradients) -> Iterator[FusedCall]:
        """The calls that sum the squares of each gradient."""
        for template, like, (_, own) in zip(self._templates, self._likes, gradients, strict=True):
            yield template.with_list(GRADIENTS, TensorColumn(own, like=like))

    def last(self) -> FusedCall:
        """The call that adds up the sums, in the current modes of torch."""
        return self._last.with_list(0, self._total)
