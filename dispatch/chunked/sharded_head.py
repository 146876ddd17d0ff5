"""Tensors that are sharded over processes (DTensors), as operands of chunked rows.

The gather of one is recorded, and does not run yet. Whatever reads a head in full gathers it once, when it is computed:

    DTensor (V, H), Shard(0) --> gather_shards --> t --> mm --> logits --> ...

Where the logits are a linear layer that only losses or statistics of rows read, these are computed from the shard that
each process has (`kernels/cross_entropy/vocabulary_shard.py`), and the gather never runs.
"""

from __future__ import annotations

import copy
import sys
from typing import TYPE_CHECKING, NamedTuple, TypeGuard

import torch
from torch import Tensor

from subtensors.dispatch.chunked.lazy_graph import LazyNode, LazyValue, constant, emit, known_tensor
from subtensors.dispatch.chunked.row_layout import meta_like
from subtensors.dispatch.ops.plain_types import PLAIN_TYPES
from subtensors.kernels.cross_entropy.vocabulary_shard import VocabularyShard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

aten = torch.ops.aten


def is_distributed(x: object) -> TypeGuard[DTensor]:
    """Return whether a tensor is a DTensor."""
    if type(x) in PLAIN_TYPES or "torch.distributed.tensor" not in sys.modules:
        return False
    return isinstance(x, torch.distributed.tensor.DTensor)


def full_tensor(x: Tensor) -> Tensor:
    """Return a DTensor gathered, and any other tensor unchanged.

    Its gradient is taken to be the same in each process, as torch's own `full_tensor` has it, and each keeps its part.
    """
    return x.full_tensor() if is_distributed(x) else x


class _FromShards:
    """An op without operands: a DTensor's full values, or its own shard."""

    is_own = False
    """True if it returns the shard."""
    __name__ = "gather_shards"

    def __init__(self, x: DTensor, grad: bool) -> None:
        self.x, self.grad = x, grad and x.requires_grad
        self.full, self.local = constant(x), constant(x.to_local().detach())

    def __call__(self) -> Tensor:
        """Compute it."""
        known_tensor(self.full)  # which checks that nothing was written to it
        x, local = self.x, known_tensor(self.local)  # and that it was not freed
        if local is not None and not (self.grad and torch.is_grad_enabled()):  # a copy, where FSDP2 freed its memory
            x = type(x).from_local(
                local, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride()
            )
        return x.to_local() if self.is_own else x.full_tensor()

    def of_own(self) -> _FromShards:
        """Return the op whose result is the shard, as it was when this one was recorded."""
        out = copy.copy(self)
        out.is_own, out.__name__ = True, "own_shard"
        return out


def _recorded(op: _FromShards) -> LazyValue:
    like = meta_like(op.local.like if op.is_own else op.x)
    node = LazyNode(op, (), {}, op.grad)
    value = LazyValue(like, op.x.device, None, node, op.grad)
    node.add_output(value)
    return value


def gathered(x: DTensor, grad: bool) -> LazyValue:
    """Record the gather of a DTensor of any placements."""
    is_divided = [any(placement.is_shard(dim) for placement in x.placements) for dim in range(x.ndim)]
    if is_divided == [False, True]:  # a transposed head, perhaps
        rows: DTensor = x.t()  # type: ignore[assignment]  # as ops on a DTensor are
        out: LazyValue = emit(aten.t.default, (gathered(rows, grad),), {}, meta_like(x), grad=grad)
        return out
    return _recorded(_FromShards(x, grad))


class OwnHead(NamedTuple):
    """The part of a linear layer that this process has.

    Args:
        weight: (V', H), its rows of the weight.
        bias: (V',), or None.
        shard: the classes of these rows; None: all, V' = V.
    """

    weight: LazyValue
    bias: LazyValue | None
    shard: VocabularyShard | None


def own_head(weight: LazyValue, bias: LazyValue | None) -> OwnHead:
    """Return the part of a linear layer that this process has; it is the same question in each, with one answer.

    Args:
        weight: (V, H), replicated.
        bias: (V,), replicated, or None.
    """
    parts = [_rows_of_shards(value) for value in (weight, bias) if value is not None]
    places = [None if op is None else _place(op.x) for op in parts]
    if places[0] is None or any(place != places[0] for place in places):
        return OwnHead(weight, bias, None)
    mesh, dim = places[0]
    ranks, classes = mesh.size(dim), weight.shape[0]
    size = -(-classes // ranks)
    if ranks == 1 or (ranks - 1) * size >= classes:  # one process has all, or some have none
        return OwnHead(weight, bias, None)
    shard = VocabularyShard(mesh.get_local_rank(dim) * size, classes, mesh.get_group(dim))
    own = [_recorded(op.of_own()) for op in parts if op is not None]
    return OwnHead(own[0], own[1] if bias is not None else None, shard)


def _rows_of_shards(value: LazyValue) -> _FromShards | None:
    """Return the gather that a value is the result of; None where it is none, or has run already."""
    op = None if value.node is None or value.tensor is not None else value.node.op
    return op if isinstance(op, _FromShards) and not op.is_own else None


def _place(x: DTensor) -> tuple[DeviceMesh, int] | None:
    """Return the mesh and its dim over which the rows of a DTensor are divided; None where anything else is."""
    kinds = torch.distributed.tensor
    dims = [dim for dim, placement in enumerate(x.placements) if type(placement) is not kinds.Replicate]
    is_rows = len(dims) == 1 and type(x.placements[dims[0]]) is kinds.Shard and x.placements[dims[0]].is_shard(0)
    return (x.device_mesh, dims[0]) if is_rows else None


def is_sharded(weight: LazyValue) -> bool:
    """Return whether this process has some of the rows of a (V, H) weight."""
    return own_head(weight, None).shard is not None
