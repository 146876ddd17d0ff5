"""Chunked losses of sharded weights (DTensor, FSDP): the number of gathers and reductions a step."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from language_model import LanguageModel, batches
from process_end import end_of_process
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

import subtensors as st

STEPS = 2


class Collectives(TorchDispatchMode):
    """Counts what is sent between processes, by op and by the elements of the whole."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks = ranks
        self.seen: Counter[tuple[str, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            shards = {"_allgather_base_": args[1], "_reduce_scatter_base_": args[0]}
            name = func.overloadpacket.__name__
            self.seen[name, shards[name].numel() * self.ranks if name in shards else 0] += 1
        return func(*args, **(kwargs or {}))


class Gathers(TorchDispatchMode):
    """Notes what DTensors send."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes here again as what it does
        name = func.overloadpacket.__name__
        if func.namespace == "_c10d_functional" and name.startswith(("all_", "reduce_", "broadcast")):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def sharded(tied: bool, device: str) -> LanguageModel:
    model = LanguageModel(tied).to(device)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    fully_shard(model.layer, mesh=mesh)
    if not tied:
        fully_shard(model.head, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh)
    return model


def stepped(model: nn.Module, data: list[Tensor]) -> None:
    """A step on the mean of the losses of some batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    torch.stack([model(tokens) for tokens in data]).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def a_head_divided_by_classes_is_not_gathered(device: str, ranks: int) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(2, 6, 8, device=device), torch.randn(20, 8, device=device)
    target = torch.randint(20, (12,), device=device)
    mesh = init_device_mesh(device, (ranks,))
    x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    expected = torch.autograd.grad(F.cross_entropy(F.linear(x, w).flatten(0, 1), target), (x, w))
    for placement in (None, Replicate()):
        head = distribute_tensor(weight.clone(), mesh, [Shard(0)]).requires_grad_()
        here = hidden if placement is None else distribute_tensor(hidden, mesh, [placement])
        here = here.detach().requires_grad_()
        with Gathers() as gathers:
            F.cross_entropy(F.linear(st.chunk(here, rows=1, dim=1), head).flatten(0, 1), target).backward()
        assert gathers.seen == [], gathers.seen
        for leaf, e in zip((here, head), expected, strict=True):
            assert type(leaf.grad) is type(leaf)
            actual = leaf.grad.full_tensor() if hasattr(leaf.grad, "full_tensor") else leaf.grad
            torch.testing.assert_close(actual, e)


def _process(rank: int, ranks: int, folder: str, device: str, tied: bool) -> None:
    torch.set_num_threads(1)
    backend = "nccl" if device == "cuda" else "gloo"
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    data = [tokens.to(device) for tokens in batches()[:ranks]]
    plain, model = LanguageModel(tied, chunked=False).to(device), sharded(tied, device)
    with Collectives(ranks) as sent:
        for _ in range(STEPS):
            stepped(model, [data[rank]])
    for _ in range(STEPS):
        stepped(plain, data)
    for a, e in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.full_tensor(), e.detach())
    if ranks > 1:  # a process alone has all of a shard, and sends nothing
        layer, embedding = (sum(p.numel() for p in module.parameters()) for module in (plain.layer, plain.embedding))
        heads = 1 if tied else 2  # the embedding has the sizes of the head
        expected = Counter({("_allgather_base_", embedding): heads, ("_reduce_scatter_base_", embedding): heads})
        # The layer is let go of after forward, and gathered again for backward.
        expected += Counter({("_allgather_base_", layer): 2, ("_reduce_scatter_base_", layer): 1})
        assert sent.seen == Counter({sizes: STEPS * count for sizes, count in expected.items()})
    a_head_divided_by_classes_is_not_gathered(device, ranks)
    end_of_process()


@pytest.mark.parametrize("tied", [False, True])
def test_a_sharded_weight_is_gathered_once_a_step_and_its_gradient_reduced_once(
    tied: bool, device: str, tmp_path: Path
) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    ranks = 2 if device == "cpu" else min(2, torch.cuda.device_count())
    mp.spawn(_process, args=(ranks, str(tmp_path), device, tied), nprocs=ranks)
