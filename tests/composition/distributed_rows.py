"""Rows that two processes run together, each with data of its own."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import subtensors as st
from composition.subjects import Subject
from composition.table import Column, Meaningless, Refused, Slower, row

GROUP = "two ranks"


def own_data(subject: Subject) -> None:
    """Give each rank other inputs."""
    with torch.no_grad():
        for x in subject.leaves:
            x.mul_(1 + dist.get_rank())


def mesh(subject: Subject) -> Any:
    """Return the mesh of all ranks."""
    return init_device_mesh(subject.device, (dist.get_world_size(),))


def full(tensors: list[Tensor]) -> list[Tensor]:
    """Return DTensors as plain tensors."""
    return [x.full_tensor() if hasattr(x, "full_tensor") else x for x in tensors]


def again(subject: Subject) -> None:
    """Make the runner or the optimizer of a model whose parameters were replaced."""
    if subject.column in (Column.BUCKETED, Column.OPTIM):
        subject.prepare()


@row(GROUP, "DDP", ranks=2)
def data_parallel(subject: Subject) -> list[Tensor]:
    """`DistributedDataParallel` around the model."""
    own_data(subject)
    subject.module = nn.parallel.DistributedDataParallel(subject.module)
    again(subject)
    return subject.trained()


class Calls(nn.Module):
    """A module that runs another one by a runner of it."""

    def __init__(self, net: nn.Module, run: Any) -> None:
        super().__init__()
        self.net, self.run = net, (run,)  # a tuple holds no modules

    def forward(self, x: Tensor) -> Tensor:
        return self.run[0](x)


@data_parallel.cell(Column.BUCKETED)
def runner_in_data_parallel(subject: Subject) -> list[Tensor]:
    """`DistributedDataParallel` around a module that calls a runner."""
    own_data(subject)
    repeated = nn.parallel.DistributedDataParallel(Calls(subject.module, subject.run))
    return subject.trained(repeated)


ELEMENT_BY_ELEMENT = Refused(st.RuleError, "autograd.Function", "call the module for each element")
COLLECTIVES = Slower("it calls c10d._allgather_base_")


@row(GROUP, "FSDP2", ranks=2, slow=True, lists=ELEMENT_BY_ELEMENT, bucketed=COLLECTIVES)
def fully_sharded(subject: Subject) -> list[Tensor]:
    """`fully_shard` of the model, whose parameters are kept for the backward."""
    own_data(subject)
    fully_shard(subject.module, mesh=mesh(subject), reshard_after_forward=False)
    again(subject)
    return full(subject.trained())


@row(
    GROUP,
    "FSDP2, resharded after forward",
    ranks=2,
    slow=True,
    lists=ELEMENT_BY_ELEMENT,
    bucketed=COLLECTIVES,
)
def resharded(subject: Subject) -> list[Tensor]:
    """`fully_shard` of each layer and of the model, resharded after forward."""
    own_data(subject)
    for layer in (subject.module[0], subject.module[2]):
        fully_shard(layer, mesh=mesh(subject), reshard_after_forward=True)
    fully_shard(subject.module, mesh=mesh(subject))
    again(subject)
    return full(subject.trained())


@row(
    GROUP,
    "`parallelize_module`",
    ranks=2,
    slow=True,
    padded=Refused(st.RuleError, "unpad before them", "unpad before the module"),
    lists=Refused(TypeError, "call it for each element", "or hand over `x.tree()`"),
    chunked=Refused(st.RuleError, "leave the module out of the plan", "`output_layouts=Replicate()` for the head"),
    bucketed=Slower("met a PaddedTensor below autograd"),
)
def tensor_parallel(subject: Subject) -> list[Tensor]:
    """A layer by columns, and the next by rows."""
    parallelize_module(subject.module, mesh(subject), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    again(subject)
    return full(subject.trained())


@row(
    GROUP,
    "weights that are DTensors",
    ranks=2,
    slow=True,
    padded=Refused(TypeError, "to_local()", "pad its `to_local()`"),
    bucketed=Slower("an argument is a DTensor"),
)
def dtensor_weights(subject: Subject) -> list[Tensor]:
    """Weights divided over the ranks, and inputs that are DTensors, too."""
    devices = mesh(subject)
    for layer in (subject.module[0], subject.module[2]):
        for name, p in list(layer.named_parameters()):
            setattr(layer, name, nn.Parameter(distribute_tensor(p.detach(), devices, [Shard(0)])))
    if subject.plain and subject.column is Column.CHUNKED:
        subject.target = distribute_tensor(subject.target, devices, [Replicate()])
    subject.leaves = [distribute_tensor(x.detach(), devices, [Replicate()]).requires_grad_() for x in subject.leaves]
    again(subject)
    return full(subject.trained())


NO_STATE = Meaningless("it has no state of its own")


@row(
    GROUP,
    "distributed checkpoint",
    ranks=2,
    slow=True,
    padded=NO_STATE,
    lists=NO_STATE,
    chunked=NO_STATE,
    bucketed=NO_STATE,
)
def checkpointed(subject: Subject) -> list[Tensor]:
    """`torch.distributed.checkpoint` of model and optimizer, loaded into others."""
    parts = []
    for _ in range(2):
        new = type(subject)(subject.device, subject.dtype, subject.plain)
        fully_shard(new.module, mesh=mesh(subject))
        again(new)
        parts.append((new, getattr(new, "optimizer", None) or torch.optim.SGD(new.module.parameters(), momentum=0.9)))
    (old, optimizer), (new, other) = parts
    for x, y in parts:
        x.trained()
        y.step()
    optimizer.step()
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    for each, save in ((old, optimizer), (new, other)):
        model_state, optimizer_state = get_state_dict(each.module, save)
        state = {"model": model_state, "optimizer": optimizer_state}
        if each is old:
            dcp.save(state, checkpoint_id=folder[0])
        else:
            dcp.load(state, checkpoint_id=folder[0])
            set_state_dict(each.module, save, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    new.trained()
    return full(new.gradients())
