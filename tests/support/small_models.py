"""Small models, losses and parameters that the tests of the optimizers train."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter


def model(device: str = "cpu", seed: int = 0) -> torch.nn.Sequential:
    """Two layers with a ReLU between them; the same values for the same seed."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)).to(device)


def loss_of(net: torch.nn.Module, seed: int = 1) -> Tensor:
    """How far the model is from adding up its inputs, on a batch that the seed chooses."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(16, 4, generator=generator).to(next(net.parameters()))
    return ((net(x) - x.sum(1, keepdim=True)) ** 2).mean()


def ones(count: int, device: str = "cpu", grad: bool = True) -> list[Parameter]:
    """Parameters of 1, 2, 3, ... ones, with gradients of ones."""
    params = [Parameter(torch.ones(i + 1, device=device)) for i in range(count)]
    for p in params if grad else []:
        p.grad = torch.ones_like(p)
    return params
