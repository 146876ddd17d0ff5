"""FSDP2 with a head whose loss is chunked, between processes: what is gathered and reduced, and how often."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from test_chunked_training import LanguageModel, batches
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

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
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("tied", [False, True])
def test_a_chunked_head_is_gathered_once_a_step_and_its_gradient_reduced_once(
    tied: bool, device: str, tmp_path: Path
) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    ranks = 2 if device == "cpu" else min(2, torch.cuda.device_count())
    mp.spawn(_process, args=(ranks, str(tmp_path), device, tied), nprocs=ranks)
