"""Rows of a varying number, in float64: what tests of bucketed programs' state and results are run on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import subtensors as st

SEQ = st.Dim("seq", max=32, buckets=8)
DIMS = {"x": {0: SEQ}}


def rows(n: int, device: str) -> Tensor:
    return torch.randn(n, 3, dtype=torch.float64, device=device)


def assert_same(found: Any, expected: Any) -> None:
    """The same but for roundings: products over padded rows add up in another order."""
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
