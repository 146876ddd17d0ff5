"""One optimizer twice, eager and captured, over equal parameters: what tests of captured steps compare."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import subtensors as st

SHAPES: list[tuple[int, ...]] = [(3, 5), (700,), (), (1,), (4, 4)]

OPTIMIZERS: dict[str, Callable[..., st.optim.Optimizer]] = {
    "SGD": lambda params, **o: st.optim.SGD(params, lr=0.1, momentum=0.9, **o),
    "Adam": lambda params, **o: st.optim.Adam(params, lr=0.1, amsgrad=True, **o),
    "AdamW": lambda params, **o: st.optim.AdamW(params, lr=0.1, **o),
    "Lion": lambda params, **o: st.optim.Lion(params, lr=0.1, weight_decay=0.1, **o),
}


class Pair:
    """One optimizer twice, over equal parameters: eager, and captured."""

    def __init__(self, device: str, make: Callable[..., st.optim.Optimizer] = OPTIMIZERS["AdamW"], **options: Any):
        self.device = device
        self.generator = torch.Generator().manual_seed(0)
        start = [torch.randn(s, generator=self.generator) for s in SHAPES]
        self.params = [[nn.Parameter(t.to(device).clone()) for t in start] for _ in range(2)]
        self.eager, self.captured = (make(p, **options) for p in self.params)
        self.capture = self.captured.capture()

    @property
    def both(self) -> list[st.optim.Optimizer]:
        return [self.eager, self.captured]

    def random(self, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device)

    def step(self, without: tuple[int, ...] = (), scale: float = 1.0) -> None:
        grads = [None if i in without else self.random(s) * scale for i, s in enumerate(map(tuple, self.shapes()))]
        for params, opt in zip(self.params, self.both, strict=True):
            for p, g in zip(params, grads, strict=True):
                p.grad = None if g is None else g.clone()
            opt.step()

    def shapes(self) -> list[torch.Size]:
        return [p.shape for p in self.params[0]]

    def assert_equal(self) -> None:
        for p, q in zip(*self.params, strict=True):
            assert torch.equal(p, q)
            ours, theirs = (opt.state.get(t, {}) for opt, t in zip(self.both, (p, q), strict=True))
            assert list(ours) == list(theirs)
            assert all(torch.equal(ours[name], theirs[name]) for name in ours)
