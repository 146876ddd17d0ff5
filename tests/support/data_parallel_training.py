"""Training of a model that DistributedDataParallel repeats on every process, as one process would train it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import subtensors as st

STEPS = 5

Make = Callable[[nn.Module], torch.optim.Optimizer]


def eager(model: nn.Module) -> torch.optim.Optimizer:
    return st.optim.AdamW(model.parameters(), lr=0.05, max_norm=0.5)


def replayed(model: nn.Module) -> torch.optim.Optimizer:
    return st.optim.AdamW(model.parameters(), lr=0.05, max_norm=0.5, graph=True)


def packed(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = st.optim.AdamW(model.parameters(), lr=0.05, max_norm=0.5)
    optimizer.capture(packed=True)
    return optimizer


def matrices(model: nn.Module) -> torch.optim.Optimizer:
    return st.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=0.05)


WAYS: list[tuple[Make, dict[str, Any]]] = [
    (eager, {}),
    (eager, {"gradient_as_bucket_view": True}),
    (replayed, {}),
    (replayed, {"gradient_as_bucket_view": True, "static_graph": True}),
    (packed, {}),
    (matrices, {}),
]


def batches(number: int, device: torch.device) -> torch.Tensor:
    """One batch for each process."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(dist.get_world_size(), 8, 5, generator=generator).to(device)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, data: Callable[[int], torch.Tensor]) -> None:
    for number in range(STEPS):
        optimizer.zero_grad()
        x = data(number)
        (model(x) - x[..., :3]).square().mean().backward()
        optimizer.step()


def a_repeated_model_trains_as_one_does_on_all_data(model: Callable[[], nn.Module], device: torch.device) -> None:
    """Check it, in each of several processes.

    Args:
        model: makes the same one each time, on the device; 5 numbers in, 3 out.
        device: of this process.
    """
    for make, options in WAYS:
        alone, repeated = model(), model()
        optimizer = make(repeated)  # what is packed is packed before it is wrapped
        wrapped = nn.parallel.DistributedDataParallel(repeated, **options)
        trained(wrapped, optimizer, lambda number: batches(number, device)[dist.get_rank()])
        trained(alone, make(alone), lambda number: batches(number, device))
        for a, b in zip(repeated.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(a, b)
            copies = [torch.empty_like(a) for _ in range(dist.get_world_size())]
            dist.all_gather(copies, a.detach())
            assert all(torch.equal(copy, a) for copy in copies)
