"""Rows of a varying number, in float64: what tests of bucketed programs' state and results are run on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import subtensors as st

SEQ = st.Dim("seq", max=32, buckets=8)
DIMS = {"x": {0: SEQ}}


def rows(n: int, device: str) -> Tensor:
    return torch.randn(n, 3, dtype=torch.float64, device=device)


def assert_same(found: Any, expected: Any) -> None:
    """The same but for roundings: products over padded rows add up in another order."""
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def assert_same_gradients(net: nn.Module, other: nn.Module, rtol: float = 1e-9, atol: float = 1e-12) -> None:
    """The same parameters of both have a gradient, and the same one but for roundings."""
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        torch.testing.assert_close(p.grad, q.grad, rtol=rtol, atol=atol) if p.grad is not None else None
