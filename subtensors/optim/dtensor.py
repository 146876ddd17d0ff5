"""Parameters that are spread over processes: DTensors, as FSDP2 makes them. A step sees the shard that is here.

What is element by element happens to each shard alone. What adds up over all elements is added up over the mesh too.
Maths of whole matrices is done by every process to all of them, each of which keeps its own part of the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from subtensors.dispatch.fused.tensor_columns import TensorColumn
from subtensors.dispatch.torch_internals import ops as ops_internals


class Sharding(NamedTuple):
    """How a tensor is spread: over which dimensions of which mesh; over others it is repeated."""

    mesh: Any
    dims: tuple[int, ...]

    @property
    def is_repeated(self) -> bool:
        """Do several processes have the same shard?"""
        return any(self.mesh.size(i) > 1 for i in range(self.mesh.ndim) if i not in self.dims)

    def bring_together(self, results: Tensor, kind: str = "sum") -> None:
        """Make what every process has of its shards into what the whole tensors have, on each of them.

        Args:
            results: of the shards of this process; written in place.
            kind: "sum", "prod", "amax" or "amin".
        """
        for dim in self.dims:
            torch.distributed.all_reduce(results, op=_TOGETHER[kind], group=self.mesh.get_group(dim))


_TOGETHER: dict[str, Any] = {}
if torch.distributed.is_available():
    ops = torch.distributed.ReduceOp
    _TOGETHER |= {"sum": ops.SUM, "prod": ops.PRODUCT, "amax": ops.MAX, "amin": ops.MIN}


def is_sharded(t: Tensor) -> bool:
    """Is this a DTensor?"""
    return hasattr(t, "to_local") and hasattr(t, "placements")


def sharding_of(t: Any) -> Sharding | None:
    """How the tensor is spread; None when it is not."""
    if not is_sharded(t):
        return None
    return Sharding(t.device_mesh, tuple([i for i, place in enumerate(t.placements) if not place.is_replicate()]))


def shard(t: Any) -> Tensor:
    """The part of a DTensor that this process has, sharing its memory; another tensor itself."""
    return t.to_local() if is_sharded(t) else t  # type: ignore[no-any-return]


def spread_like(local: Tensor, like: Any) -> Tensor:
    """What each process has here of a tensor that is spread as `like` is; of one that is not, the tensor itself."""
    if not is_sharded(like):
        return local
    whole: Tensor = type(like).from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return whole


def whole(t: Any) -> Tensor:
    """All of a DTensor, gathered from the processes that have its parts; another tensor itself."""
    return t.full_tensor() if is_sharded(t) else t  # type: ignore[no-any-return]


def write_part(t: Any, value: Tensor) -> None:
    """Write into a DTensor, without a message, the part of the whole `value` that this process has."""
    from torch.distributed.tensor import distribute_tensor  # here, so that without DTensors nobody waits for it

    part = distribute_tensor(value, t.device_mesh, t.placements, src_data_rank=None)
    shard(t).copy_(shard(part))


class LocalShards:
    """The shards that parameters have here, and those of their gradients, as lists that a step knows again.

    Args:
        params: DTensors.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.params = params
        self.own = TensorColumn()
        """The parameters', as last looked at."""
        self._have_plain_gradients = all(getattr(p, "grad_dtype", p.dtype) == p.dtype for p in params)

    def have_changed(self) -> bool:
        """Are the parameters' shards others than at the last look? `own` then holds those."""
        now = ops_internals.local_tensors(self.params)
        if len(self.own) == len(now) and all(map(is_, self.own, now)):
            return False
        self.own = TensorColumn(now, keeps_layout=True)
        return True

    def of_gradients(self, gradients: Sequence[Tensor]) -> TensorColumn:
        """What of these gradients belongs to the parameters' shards."""
        if not ops_internals.are_spread_alike(gradients, self.params):
            return TensorColumn([_shard_like(g, p) for g, p in zip(gradients, self.params, strict=True)])
        parts = ops_internals.local_tensors(gradients)
        return TensorColumn(parts, like=self.own if self._have_plain_gradients else None)


def _shard_like(t: Any, p: Any) -> Tensor:
    if is_sharded(t) and t.placements != p.placements:
        t = t.redistribute(placements=p.placements)
    return shard(t)
