"""Batches of two sequences of a varying length: what tests of a bucket's checks are run on."""

from __future__ import annotations

import torch
from torch import Tensor

import subtensors as st

SEQ = st.Dim("n", max=64, buckets=[8, 16])
DIMS = {"x": {1: SEQ}}


def rows(n: int, device: str, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(n)
    return torch.randn(2, n, 4, dtype=dtype, generator=generator).to(device)
