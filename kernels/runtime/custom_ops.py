"""Torch ops that kernels compute: their registration, the dtypes that they take, and those that they compute in."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from subtensors.kernels.runtime.async_compile import CompilePending
from subtensors.kernels.runtime.valid_lengths import LENGTHS_SCHEMA, unpack_lengths

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGER_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)


def has_kernel(x: Tensor, dtypes: Sequence[torch.dtype] = FLOAT_DTYPES) -> bool:
    """Return whether there is a kernel for this tensor; otherwise the reference runs, as on a fake tensor."""
    return x.is_cuda and x.dtype in dtypes and (type(x) is Tensor or x.untyped_storage().device.type != "meta")


def is_dense(x: Tensor) -> bool:
    """Return whether the elements fill a range of memory, each once, in some order."""
    if x.is_contiguous():
        return True
    reach = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) + 1
    in_order = sorted((s, n) for n, s in zip(x.shape, x.stride(), strict=True) if n > 1)
    return reach == x.numel() and all(a * n == b for (a, n), (b, _) in itertools.pairwise(in_order))


def arithmetic_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which numbers of a dtype are computed and summed, as in torch's own kernels.

    Example:
        >>> arithmetic_dtype(torch.bfloat16), arithmetic_dtype(torch.float64)
        (torch.float32, torch.float64)
    """
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


def min_value(dtype: torch.dtype) -> float:
    """Return the lower bound of the values of a dtype."""
    if dtype == torch.bool:
        return False
    return -math.inf if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).min


def max_value(dtype: torch.dtype) -> float:
    """Return the upper bound of the values of a dtype."""
    if dtype == torch.bool:
        return True
    return math.inf if dtype.is_floating_point else torch.iinfo(dtype).max


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


def define_kernel(
    name: str,
    arguments: str,
    results: str,
    kernel: Callable[..., object],
    reference: Callable[..., object],
    fake: Callable[..., object],
    dtypes: Sequence[torch.dtype] = FLOAT_DTYPES,
) -> None:
    """Register an op that a kernel computes, and its reference where no kernel runs.

    Args:
        name, arguments, results, fake: as `define` takes them.
        kernel, reference: take the arguments, with a list of `ValidLength` in place of the lists of `LENGTHS_SCHEMA`.
        dtypes: those of the first tensor for which there is a kernel.
    """
    before, schema, _ = arguments.partition(LENGTHS_SCHEMA)
    at = before.count(",")

    def run(*given: Any) -> object:
        x = given[0] if isinstance(given[0], Tensor) else given[0][0]
        if schema:
            given = (*given[:at], unpack_lengths(*given[at : at + 3]), *given[at + 3 :])
        if has_kernel(x, dtypes):
            with suppress(CompilePending):
                return _plain(kernel(*given))
        return _plain(reference(*given))

    define(name, arguments, results, run, fake)


def _plain(results: object) -> object:
    """Return an op's results, of which several are a plain tuple."""
    return tuple(results) if isinstance(results, tuple) else results


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


define(
    "materialize",
    "Tensor x",
    "Tensor",
    lambda x: x.clone(memory_format=torch.contiguous_format),
    lambda x: torch.empty_like(x, memory_format=torch.contiguous_format),
)
