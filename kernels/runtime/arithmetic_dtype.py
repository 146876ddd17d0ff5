"""The dtype in which floats are computed and summed: wider than the stored one for half precision."""

from __future__ import annotations

import torch


def arithmetic_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that numbers of a dtype are computed and added up in, as in torch's own kernels.

    Example:
        >>> arithmetic_dtype(torch.bfloat16), arithmetic_dtype(torch.float64)
        (torch.float32, torch.float64)
    """
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
