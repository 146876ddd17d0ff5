"""Torch ops that kernels compute: their registration, the dtypes that they take, and those that they compute in."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGER_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)


def has_kernel(x: Tensor, dtypes: Sequence[torch.dtype] = FLOAT_DTYPES) -> bool:
    """Return whether there is a kernel for this tensor; otherwise the reference runs, as on a fake tensor."""
    return x.is_cuda and x.dtype in dtypes and (type(x) is Tensor or x.untyped_storage().device.type != "meta")


def arithmetic_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which numbers of a dtype are computed and summed, as in torch's own kernels.

    Example:
        >>> arithmetic_dtype(torch.bfloat16), arithmetic_dtype(torch.float64)
        (torch.float32, torch.float64)
    """
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def define(
    name: str,
    arguments: str,
    results: str,
    run: Callable[..., object],
    fake: Callable[..., object],
    tags: Sequence[torch.Tag] = (),
) -> None:
    """Register the op `subtensors::name`.

    Args:
        name: without the namespace.
        arguments, results: as a schema writes them, without parentheses around the arguments.
        run: computes the results.
        fake: returns tensors with the results' metadata.
        tags: what a compiler must know of it.
    """
    torch.library.define(f"subtensors::{name}", f"({arguments}) -> {results}", tags=tags)
    torch.library.impl(f"subtensors::{name}", "CompositeExplicitAutograd")(run)
    torch.library.register_fake(f"subtensors::{name}")(fake)


def materialize(x: Tensor) -> Tensor:
    """Return the same values in contiguous memory of their own, in compiled code too; no gradient goes through.

    A compiler recomputes cheap values wherever they are read. Where a library's kernel reads them, each such read costs
    one more kernel, which writes them to memory first. So values that several ops read are written once.

    Example:
        >>> materialize(torch.ones(1, 2).expand(2, 2)).stride()
        (2, 1)
    """
    out: Tensor = torch.ops.subtensors.materialize(x)
    return out


def _materialize(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _materialize_fake(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


define("materialize", "Tensor x", "Tensor", _materialize, _materialize_fake)
