"""Two processes whose batches have other lengths train through a runner as one process does on both batches."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from process_end import end_of_process
from torch import Tensor, nn

import subtensors as st

LENGTHS = [(5, 5, 6, 6, 6, 13), (5, 13, 7, 5, 1, 13)]
"""Of each process its batches: one meets a new size where the other doesn't."""

DIMS = {"x": {0: st.Dim("n", max=16, buckets=8)}}


def batch(rank: int, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * number + rank)
    return torch.randn(LENGTHS[rank][number], 3, dtype=torch.float64, generator=generator)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


class Bucketed(nn.Module):
    """A module that calls a runner of its part."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.run = [st.bucketed(lambda x: self.net(x).square().sum(), DIMS)]

    def forward(self, x: Tensor) -> Tensor:
        return self.run[0](x)  # type: ignore[no-any-return]


def trained_by_one_process() -> list[Tensor]:
    model = net()
    for number in range(len(LENGTHS[0])):
        model.zero_grad()
        (sum(model(batch(rank, number)).square().sum() for rank in range(2)) / 2).backward()  # type: ignore[union-attr]
        _step(model)
    return [p.detach() for p in model.parameters()]


def _step(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.01 * p.grad  # type: ignore[operator]


def runner_inside(rank: int) -> tuple[nn.Module, Any]:
    """Make a runner that DDP's module calls: its gradients are reduced as any others."""
    own = Bucketed()
    model = nn.parallel.DistributedDataParallel(own)
    for number in range(len(LENGTHS[0])):
        model.zero_grad()
        model(batch(rank, number)).backward()
        _step(own)
    return own.net, own.run[0].stats()


def runner_around(rank: int) -> tuple[nn.Module, Any]:
    """Make a runner of DDP itself, which reduces in Python."""
    model = nn.parallel.DistributedDataParallel(net())
    run = st.bucketed(lambda x: model(x).square().sum(), DIMS)
    for number in range(len(LENGTHS[0])):
        model.zero_grad()
        run(batch(rank, number)).backward()
        _step(model)
    return model, run.stats()


def reduced_in_the_program(rank: int) -> tuple[nn.Module, Any]:
    """Make a runner of a whole step, which reduces its gradients itself."""
    model = net()

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().sum()
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                assert p.grad is not None
                dist.all_reduce(p.grad)
                p.grad /= 2
        _step(model)
        model.zero_grad()
        return loss.detach()  # type: ignore[no-any-return]

    run = st.bucketed(step, DIMS)
    for number in range(len(LENGTHS[0])):
        run(batch(rank, number))
    return model, run.stats()


def reduced_after_the_call(rank: int) -> tuple[nn.Module, Any]:
    """Make a runner of the loss alone."""
    model = net()
    run = st.bucketed(lambda x: model(x).square().sum(), DIMS)
    for number in range(len(LENGTHS[0])):
        model.zero_grad()
        run(batch(rank, number)).backward()
        for p in model.parameters():
            assert p.grad is not None
            dist.all_reduce(p.grad)
            p.grad /= 2
        _step(model)
    return model, run.stats()


def sum_in_the_program(rank: int) -> tuple[nn.Module, Any]:
    """Make a runner of a program without gradients that adds up over processes."""

    def total(x: Tensor) -> Tensor:
        out = x.sum(0)
        dist.all_reduce(out)
        return out

    run = st.bucketed(total, DIMS)
    for number in range(len(LENGTHS[0])):
        torch.testing.assert_close(run(batch(rank, number)), batch(0, number).sum(0) + batch(1, number).sum(0))
    return net(), run.stats()


WAYS: list[tuple[Callable[[int], tuple[nn.Module, Any]], str, bool]] = [
    (runner_inside, "", True),
    (runner_around, "calls collectives in Python", True),
    (reduced_in_the_program, "it calls c10d", True),
    (reduced_after_the_call, "", True),
    (sum_in_the_program, "it calls c10d", False),
]


def _process(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    expected = trained_by_one_process()
    for way, reason, trains in WAYS:
        model, stats = way(rank)
        if trains:
            torch.testing.assert_close([p.detach() for p in model.parameters()], expected)
        assert stats.calls == len(LENGTHS[0]), way
        assert bool(stats.fallbacks) == bool(reason), (way, stats)
        assert all(reason in fallback for fallback in stats.fallbacks), (way, stats)
        assert (stats.hits > 0) == (not reason), (way, stats)
        assert bool(stats.checked) == (not reason), (way, stats)
    end_of_process()


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")
def test_processes_that_meet_sizes_at_other_times_agree(tmp_path: Path) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    mp.spawn(_process, args=(str(tmp_path),), nprocs=2)
