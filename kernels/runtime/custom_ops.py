"""The torch ops that take extents: their schema, their fake, and whether a kernel runs them.

A schema has no type for extents, so an op takes them as three lists: dimensions, sizes, batch dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from subtensors.kernels.runtime.valid_lengths import ValidLength

EXTENTS = "int[] dims, Tensor[] sizes, int[] batch_dims"
"""Extents, in a schema."""

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGER_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)


def apart(extents: Sequence[ValidLength]) -> tuple[list[int], list[Tensor], list[int]]:
    """Extents as arguments of an op."""
    return [e.dim for e in extents], [e.sizes for e in extents], [e.batch_dim for e in extents]


def together(dims: Sequence[int], sizes: Sequence[Tensor], batch_dims: Sequence[int]) -> list[ValidLength]:
    """The extents that an op was given."""
    return [ValidLength(*parts) for parts in zip(dims, sizes, batch_dims, strict=True)]


def has_kernel(x: Tensor, dtypes: Sequence[torch.dtype] = FLOAT_DTYPES) -> bool:
    """Return whether there is a kernel for this tensor; otherwise the reference runs."""
    return x.is_cuda and x.dtype in dtypes


def define(name: str, arguments: str, results: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Register `subtensors::name`, which computes with `run` and has the metadata of what `fake` gives."""
    torch.library.define(f"subtensors::{name}", f"({arguments}) -> {results}")
    torch.library.impl(f"subtensors::{name}", "CompositeExplicitAutograd")(run)
    torch.library.register_fake(f"subtensors::{name}")(fake)
