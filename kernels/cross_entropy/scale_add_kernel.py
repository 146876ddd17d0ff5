"""Triton kernels that update a gradient in place: an addition that keeps its rounding error, and a scale."""

from __future__ import annotations

from subtensors.kernels.runtime.triton_compat import tl, triton


@triton.jit
def compensated_add_kernel(partial, total, lost, count, FIRST: tl.constexpr, BLOCK: tl.constexpr):
    """Compute total + lost += partial in float32, where lost is the rounding error of the total."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    added = tl.load(partial + at, mask=inside, other=0.0)
    if FIRST:
        after, rounded_off = added, tl.zeros((BLOCK,), tl.float32)
    else:
        before = tl.load(total + at, mask=inside, other=0.0)
        added += tl.load(lost + at, mask=inside, other=0.0).to(tl.float32)
        after = before + added
        seen = after - before
        rounded_off = (before - (after - seen)) + (added - seen)
        rounded_off = tl.where(
            rounded_off == rounded_off, rounded_off, 0.0
        )  # the rounding error of an infinite sum is NaN
    tl.store(total + at, after, mask=inside)
    tl.store(lost + at, rounded_off.to(lost.dtype.element_ty), mask=inside)


@triton.jit
def scale_kernel(values, factor, count, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr):
    """Compute values *= factor, or nothing where the factor is one; zeros stay zeros."""
    scale = tl.load(factor).to(tl.float32)
    if scale != 1.0:
        for start in range(tl.program_id(0).to(tl.int64) * BLOCK, count, PROGRAMS * BLOCK):
            at = start + tl.arange(0, BLOCK)
            inside = at < count
            value = tl.load(values + at, mask=inside).to(tl.float32)
            scaled = tl.where(value == 0.0, value, value * scale)
            tl.store(values + at, scaled.to(values.dtype.element_ty), mask=inside)
