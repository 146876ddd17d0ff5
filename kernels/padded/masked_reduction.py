"""Reductions of the valid elements of a padded tensor, along any of its dimensions, forward and backward.

The contents of the padding never enter a result, and counts are those of valid elements, computed on the device. The
result of a row without valid elements is that of an empty one: sum 0, prod 1, amax -inf, amin inf, logsumexp -inf,
norm 0, mean and var NaN; if the row itself is padding, it is `fill`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from subtensors.kernels.padded.masked_layout import plan, power_of_two
from subtensors.kernels.runtime.custom_ops import arithmetic_dtype, max_value, min_value
from subtensors.kernels.runtime.launcher import launching_on, multiprocessors
from subtensors.kernels.runtime.valid_lengths import ValidLength, valid_mask

KINDS = ("sum", "mean", "prod", "amax", "amin", "logsumexp", "var", "norm")

MAX_PARTS = 2048
"""The most parts that a row is cut into."""

THREADS_PER_PROGRAM = 128
"""The threads of a program."""

REGISTERS_PER_MULTIPROCESSOR = 65536
"""The registers of a multiprocessor, which runs as many programs at a time as its registers hold."""

MERGE_COST = 4
"""The cost of a second kernel, in units of the first kernel's time for a tile."""

MAX_MERGED_STATES = 2048
"""The number of states that a program of the second kernel holds, if a row has fewer parts."""


class Reduced(NamedTuple):
    """The result of a reduction, and values for its gradient.

    Args:
        out: the result, without the reduced dimensions.
        aux: one number a row in the dtype of the arithmetic: of var the mean, of amax, amin and an infinite norm how
            many elements are equal to it (counted for a gradient only), of prod the product of what is not zero.
        counts: int64, the number of valid elements in a row.
    """

    out: Tensor
    aux: Tensor
    counts: Tensor


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which numbers of this dtype are summed."""
    return arithmetic_dtype(dtype) if dtype.is_floating_point else torch.int64


def result_dtype(kind: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a reduction's result.

    Raises:
        TypeError: the reduction takes floating-point tensors only.
        ValueError: there is no such reduction.
    """
    if kind not in KINDS:
        raise ValueError(f"a masked reduction is one of {', '.join(KINDS)}; got {kind!r}")
    if dtype.is_floating_point or kind in ("amax", "amin"):
        return dtype
    if kind in ("sum", "prod"):
        return torch.int64
    raise TypeError(f"{kind} takes a floating-point tensor, got {dtype}")


def masked_reduction_reference(
    x: Tensor, kind: str, dims: Sequence[int], lengths: Sequence[ValidLength], p: float = 2.0, correction: float = 1.0,
    fill: float = 0.0, for_gradient: bool = True,
) -> Reduced:  # fmt: skip
    """Compute `masked_reduction` in torch ops: the readable definition."""
    dtype = result_dtype(kind, x.dtype)
    dims = [d % x.dim() for d in dims]
    valid = valid_mask(x.shape, lengths, x.device).expand(x.shape)
    counts = valid.sum(dims, keepdim=True)
    value = x.to(arithmetic_dtype(dtype))
    zeros = torch.zeros_like(value)
    aux = torch.zeros_like(counts)
    if kind in ("sum", "mean"):
        out = torch.where(valid, value, zeros).sum(dims, keepdim=True)
        out = out if kind == "sum" else torch.where(counts > 0, out / counts.clamp(min=1), float("nan"))
    elif kind == "prod":
        nonzero = torch.where(valid & (value != 0), value, zeros + 1)
        zeros_count = (valid & (value == 0)).sum(dims, keepdim=True)
        out = _product(torch.where(valid, value, zeros + 1), dims)
        aux = torch.where(zeros_count > 1, 0, _product(nonzero, dims))
    elif kind in ("amax", "amin"):
        bound = min_value(dtype) if kind == "amax" else max_value(dtype)
        out = getattr(value.masked_fill(~valid, bound), kind)(dims, keepdim=True)
        aux = (valid & (value == out)).sum(dims, keepdim=True)
        if dtype.is_floating_point:
            # Where all valid elements are infinite, as the fill of padding, only they share the gradient.
            mean = torch.where(valid, value, zeros).sum(dims, keepdim=True) / counts.clamp(min=1)
            out = torch.where((out == bound) & (counts > 0), mean, out)
    elif kind == "logsumexp":
        # logsumexp of only -inf has a NaN gradient, so empty rows get zeros first.
        neutral = value.masked_fill(~valid, float("-inf")).masked_fill(counts == 0, 0)
        out = neutral.logsumexp(dims, keepdim=True).masked_fill(counts == 0, float("-inf"))
    elif kind == "var":
        aux = torch.where(valid, value, zeros).sum(dims, keepdim=True) / counts.clamp(min=1)
        squares = torch.where(valid, value - aux, zeros).square().sum(dims, keepdim=True)
        out = squares / (counts - correction).clamp(min=0)
        out = torch.where(counts > 0, out, float("nan"))
    else:
        out = torch.linalg.vector_norm(torch.where(valid, value, zeros), p, dims, keepdim=True)
        if p == math.inf:
            aux = (valid & (value.abs() == out)).sum(dims, keepdim=True)
    in_rows = valid_mask(x.shape, [e for e in lengths if _is_of_rows(e, dims, x.dim())], x.device).expand(out.shape)
    results = [t.squeeze(dims) for t in (torch.where(in_rows, out.to(dtype), fill), aux, counts)]
    return Reduced(results[0].to(dtype), results[1].to(sum_dtype(x.dtype)), results[2])


def _product(value: Tensor, dims: Sequence[int]) -> Tensor:
    """Return the product along dimensions; no derivative of it waits for the device, as that of `torch.prod` does."""
    for dim in dims:
        while value.requires_grad and (n := value.shape[dim]) > 1:
            first, second, rest = value.split([n // 2, n // 2, n % 2], dim)
            value = torch.cat([first * second, rest], dim)
        value = value if value.shape[dim] == 1 else value.prod(dim, keepdim=True)
    return value


def _is_of_rows(length: ValidLength, dims: Sequence[int], ndim: int) -> bool:
    """Return whether a valid length determines valid rows, rather than valid elements within rows."""
    return length.dim % ndim not in dims and not (length.sizes.dim() and length.batch_dim % ndim in dims)


def masked_reduction_backward_reference(
    gradient: Tensor, x: Tensor, out: Tensor, aux: Tensor, counts: Tensor, kind: str, dims: Sequence[int],
    lengths: Sequence[ValidLength], p: float = 2.0, correction: float = 1.0,
) -> Tensor:  # fmt: skip
    """Compute `masked_reduction_backward` in torch ops."""
    g = _scaled(gradient, Reduced(out, aux, counts), kind, p, correction)
    g, out, aux = (_kept(t.to(g.dtype), dims, x.dim()) for t in (g, out, aux))
    value = x.to(g.dtype)
    formula = {
        "sum": lambda: g,
        "mean": lambda: g,
        "prod": lambda: g * torch.where(value == 0, aux, out / torch.where(value == 0, 1, value)),
        "amax": lambda: torch.where(value == out, g, g * 0),
        "amin": lambda: torch.where(value == out, g, g * 0),
        "logsumexp": lambda: g * (value - out).exp(),
        "var": lambda: g * (value - aux),
        "norm": lambda: _norm_gradient(value, out, g, p),
    }[kind]()
    # Padded rows may have a gradient, which goes nowhere.
    return torch.where(valid_mask(x.shape, lengths, x.device), formula, 0).expand(x.shape).to(x.dtype).contiguous()


def _norm_gradient(x: Tensor, out: Tensor, g: Tensor, p: float) -> Tensor:
    if p == math.inf:
        return torch.where(x.abs() == out, g * x.sign(), g * 0)
    return g * x.sign() * torch.where(x == 0, 0, x.abs() ** (p - 1))


def _kept(t: Tensor, dims: Sequence[int], ndim: int) -> Tensor:
    """Return a result with its reduced dimensions restored with size 1."""
    for dim in sorted(d % ndim for d in dims):
        t = t.unsqueeze(dim)
    return t


def _scaled(gradient: Tensor, reduced: Reduced, kind: str, p: float, correction: float) -> Tensor:
    """Return the factor of the elements' gradients that is the same for a whole row."""
    out, aux, counts = reduced
    g = gradient.to(aux.dtype)
    if kind == "mean":
        return g / counts
    if kind in ("amax", "amin") or (kind == "norm" and p == math.inf):
        return g / aux
    if kind == "var":
        return g * 2 / (counts - correction)
    if kind == "norm" and p not in (1, math.inf):
        # At zero the norm has no gradient; torch uses 0.
        return torch.zeros_like(g) if p == 0 else torch.where(out == 0, 0, g * out.to(g.dtype) ** (1 - p))
    return g


def masked_reduction_forward(
    x: Tensor, kind: str, dims: Sequence[int], lengths: Sequence[ValidLength], p: float = 2.0, correction: float = 1.0,
    fill: float = 0.0, for_gradient: bool = True,
) -> Reduced:  # fmt: skip
    """Compute `masked_reduction` with its kernels."""
    dtype = result_dtype(kind, x.dtype)
    if dtype == torch.bool:
        found = masked_reduction_forward(x.to(torch.uint8), kind, dims, lengths, p, correction, fill, for_gradient)
        return found._replace(out=found.out.bool())
    x, layout = plan(x, dims, lengths)
    accumulated = sum_dtype(x.dtype)
    out = x.new_empty(layout.row_shape, dtype=dtype)
    aux = x.new_empty(layout.row_shape, dtype=accumulated)
    counts = x.new_empty(layout.row_shape, dtype=torch.int64)
    if not out.numel():
        return Reduced(out, aux, counts)
    block_rows, block_columns = layout.tile()
    programs = layout.rows[0] * -(-layout.rows[1] // block_rows)
    tiles = layout.columns[0] * -(-layout.columns[1] // block_columns)
    # The state of lanes along contiguous columns is small, so twice as many programs fit, with more loads in flight.
    resident = 8 if layout.is_flat and kind != "var" and dtype != torch.float64 else 4
    parts = _parts(programs, tiles, multiprocessors(x.device) * resident) if tiles else 1
    registers = REGISTERS_PER_MULTIPROCESSOR // (THREADS_PER_PROGRAM * resident)
    grid = (programs, parts)
    statics = (
        layout.statics,
        layout.row_slots,
        "amax" if kind == "amin" else kind,
        float(p),
        kind == "amin",
        float(correction),
        fill if dtype.is_floating_point else int(fill),
    )
    slots = layout.slot_arguments(lengths)
    tile = (block_rows, block_columns, layout.lanes(block_columns, x.element_size()), for_gradient, layout.bounds_vary)
    results: tuple[Tensor, ...] = (out, aux, counts)
    from subtensors.kernels.padded import masked_reduction_kernel as kernels

    with launching_on(x.device):
        if parts > 1:
            states = [x.new_empty((parts, out.numel()), dtype=t.dtype) for t in (aux, aux, counts)]
            kernels.reduction_kernel[grid](
                x, *states, slots, parts, *layout.sizes, *statics, True, *tile, maxnreg=registers
            )
            merged = power_of_two(parts)
            block_rows = min(max(MAX_MERGED_STATES // merged, 1), power_of_two(layout.rows[1]))
            programs = layout.rows[0] * -(-layout.rows[1] // block_rows)
            kernels.merge_kernel[(programs,)](
                *states, *results, slots, parts, *layout.rows, *statics, block_rows, merged
            )
        else:
            kernels.reduction_kernel[grid](
                x, *results, slots, 1, *layout.sizes, *statics, False, *tile, maxnreg=registers
            )
    return Reduced(out, aux, counts)


@lru_cache(maxsize=4096)
def _parts(programs: int, tiles: int, slots: int) -> int:
    """Return the number of programs that share a row, chosen so that the last program finishes soonest.

    Args:
        programs: the number of programs without sharing.
        tiles: the number of tiles that each of these processes.
        slots: the number of programs that run at a time.
    """

    def rounds(parts: int) -> int:
        return -(-programs * parts // slots) * -(-tiles // parts) + MERGE_COST * (parts > 1)

    return min(range(1, min(tiles, MAX_PARTS) + 1), key=rounds)


def masked_reduction_backward(
    gradient: Tensor, x: Tensor, out: Tensor, aux: Tensor, counts: Tensor, kind: str, dims: Sequence[int],
    lengths: Sequence[ValidLength], p: float = 2.0, correction: float = 1.0,
) -> Tensor:  # fmt: skip
    """Compute the gradient of `masked_reduction` with its kernel.

    Args:
        gradient: the gradient of the result, in its shape.
        x, kind, dims, lengths, p, correction: as in the forward.
        out, aux, counts: the results of the forward.

    Returns:
        The gradient of `x`, zero in padding.
    """
    x, layout = plan(x, dims, lengths)
    g = _scaled(gradient, Reduced(out, aux, counts), kind, p, correction).contiguous()
    result = torch.empty_like(x)
    if not x.numel():
        return result
    block_rows, block_columns = layout.tile()
    tiles = layout.columns[0] * -(-layout.columns[1] // block_columns)
    programs = layout.rows[0] * -(-layout.rows[1] // block_rows) * tiles
    from subtensors.kernels.padded.masked_reduction_kernel import reduction_backward_kernel

    with launching_on(x.device):
        reduction_backward_kernel[(programs,)](
            x, out.contiguous(), aux.contiguous(), g, result, layout.slot_arguments(lengths),
            *layout.sizes, layout.statics, layout.row_slots, "amax" if kind == "amin" else kind, float(p),
            block_rows, block_columns,
        )  # fmt: skip
    return result
