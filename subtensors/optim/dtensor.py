"""Parameters that are sharded over processes: DTensors, as FSDP2 makes them. A step sees the local shards.

Pointwise math runs on each shard alone. Sums over all elements of a tensor are also summed over the mesh. Math of full
matrices is done by every process on the gathered tensors, and each process keeps its own part of the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeGuard

import torch
from torch import Tensor

from subtensors.dispatch.fused.tensor_columns import TensorColumn
from subtensors.dispatch.graphs.guards import are_same
from subtensors.dispatch.torch_internals import ops as ops_internals
from subtensors.dispatch.torch_internals.autograd import free_gathered

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


class Sharding(NamedTuple):
    """The mesh of a DTensor, and the mesh dims that it is sharded over; over the rest it is replicated."""

    mesh: DeviceMesh
    dims: tuple[int, ...]

    @property
    def is_replicated(self) -> bool:
        """Return whether several processes hold the same shard."""
        return any(self.mesh.size(i) > 1 for i in range(self.mesh.ndim) if i not in self.dims)

    def all_reduce(self, results: Tensor, kind: str = "sum") -> None:
        """Combine the results of all shards ("sum", "prod", "amax" or "amin"), in place and on each process."""
        for dim in self.dims:
            op = getattr(torch.distributed.ReduceOp, _REDUCE_OPS[kind])
            torch.distributed.all_reduce(results, op=op, group=self.mesh.get_group(dim))


_REDUCE_OPS = {"sum": "SUM", "prod": "PRODUCT", "amax": "MAX", "amin": "MIN"}


def is_sharded(t: Tensor) -> TypeGuard[DTensor]:
    """Return whether this is a DTensor."""
    return hasattr(t, "to_local") and hasattr(t, "placements")


def sharding_of(t: Tensor) -> Sharding | None:
    """The sharding of a DTensor; None for another tensor."""
    if not is_sharded(t):
        return None
    return Sharding(t.device_mesh, tuple([i for i, place in enumerate(t.placements) if not place.is_replicate()]))


def shard(t: Tensor) -> Tensor:
    """The local shard of a DTensor, sharing its memory; another tensor itself."""
    return t.to_local() if is_sharded(t) else t


def placed_like(gradients: Sequence[Tensor], params: Sequence[Tensor]) -> Sequence[Tensor]:
    """Gradients of DTensors, redistributed where their placements differ from the parameters'."""
    if ops_internals.have_same_placements(gradients, params):
        return gradients
    return [
        g.redistribute(placements=p.placements) if is_sharded(g) and is_sharded(p) else g
        for g, p in zip(gradients, params, strict=True)
    ]


def spread_like(local: Tensor, like: Tensor) -> Tensor:
    """Wrap a local shard as a DTensor that is sharded as `like` is; return it unchanged if `like` is no DTensor."""
    if not is_sharded(like):
        return local
    return type(like).from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def full_tensor(t: Tensor) -> Tensor:
    """The full tensor of a DTensor, gathered from all processes; another tensor itself."""
    return t.full_tensor() if is_sharded(t) else t


def distributed_like(value: Tensor, like: Tensor) -> Tensor:
    """Distribute a full tensor as a DTensor is, without communication; return it unchanged if `like` is none."""
    if not is_sharded(like) or is_sharded(value):
        return value
    from torch.distributed.tensor import distribute_tensor  # imported here: it takes long, and few need it

    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


def write_part(t: DTensor, value: Tensor) -> None:
    """Write this process's part of the full `value` into a DTensor, without communication."""
    own, part = shard(t), shard(distributed_like(value, t))
    if part.data_ptr() != own.data_ptr():  # the full tensor of what every process has is its own memory
        own.copy_(part)


def free_gathered_weights(params: Sequence[Tensor]) -> None:
    """Free what FSDP2 keeps gathered of these parameters, which were written outside of a step."""
    if any(map(is_sharded, params)):
        free_gathered(params)


class LocalShards:
    """The local shards of DTensors and of their gradients, as columns that are kept while the shards don't change."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.params = params
        self.own = TensorColumn()
        """The local shards of the parameters, as of the last call of `have_changed`."""
        self._have_plain_gradients = all(getattr(p, "grad_dtype", p.dtype) == p.dtype for p in params)

    def have_changed(self) -> bool:
        """Return whether the parameters' local shards changed since the last call; update `own` if they did."""
        now = ops_internals.local_tensors(self.params)
        if are_same(now, self.own):
            return False
        self.own = TensorColumn(now, keeps_layout=True)
        return True

    def of_gradients(self, gradients: Sequence[Tensor]) -> TensorColumn:
        """The local shards of these gradients, redistributed where their placements differ from the parameters'."""
        placed = placed_like(gradients, self.params)
        if placed is not gradients:
            return TensorColumn(map(shard, placed))
        parts = ops_internals.local_tensors(gradients)
        return TensorColumn(parts, like=self.own if self._have_plain_gradients else None)
