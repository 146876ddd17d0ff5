"""Softmax of what is real along a dimension of a padded tensor, forward and backward.

Over the real elements `i` of a row,

    softmax(x)[i] = exp(x[i] - m) / sum over j of exp(x[j] - m),   m = max over j of x[j],
    gradient[i]   = y[i] * (g[i] - sum over j of g[j] * y[j])

and everything else is a given fill, or zero in the gradient: also the whole of a row without real elements, where the
formula is 0/0. What padding holds is never computed with.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from subtensors.kernels.padded.masked_layout import plan, with_strides_of
from subtensors.kernels.runtime.current_device import launching_on
from subtensors.kernels.runtime.valid_lengths import ValidLength, valid_mask

ONE_PASS = 16384
"""The largest tile of whole rows that a program holds; longer rows are read twice."""


def masked_softmax_reference(
    x: Tensor, dim: int, extents: Sequence[ValidLength], fill: float = 0.0, is_log: bool = False
) -> Tensor:
    """Compute `masked_softmax` in torch ops: the readable definition."""
    real = valid_mask(x.shape, extents, x.device).expand(x.shape)
    # A row of nothing but -inf would be NaN, also in the gradient; one without real elements is all fill.
    neutral = x.masked_fill(~real, float("-inf")).masked_fill(~real.any(dim, keepdim=True), 0)
    y = torch.log_softmax(neutral, dim) if is_log else torch.softmax(neutral, dim)
    return y.masked_fill(~real, fill)


def masked_softmax_backward_reference(
    gradient: Tensor, y: Tensor, dim: int, extents: Sequence[ValidLength], is_log: bool = False
) -> Tensor:
    """Compute `masked_softmax_backward` in torch ops."""
    padding = ~valid_mask(y.shape, extents, y.device)
    gradient, y = gradient.masked_fill(padding, 0), y.masked_fill(padding, 0)
    if is_log:
        result = gradient - y.exp() * gradient.sum(dim, keepdim=True)
    else:
        result = y * (gradient - (gradient * y).sum(dim, keepdim=True))
    return result.masked_fill(padding, 0)


def masked_softmax_forward(
    x: Tensor, dim: int, extents: Sequence[ValidLength], fill: float = 0.0, is_log: bool = False
) -> Tensor:
    """`masked_softmax` by its kernel; arguments as there."""
    from subtensors.kernels.padded.masked_softmax_kernel import softmax_kernel

    x, layout = plan(x, [dim], extents)
    y = torch.empty_like(x)
    if not x.numel():
        return y
    one_pass = layout.fits_whole_rows(ONE_PASS)
    high, wide, many = layout.whole_rows() if one_pass else (*layout.tile(), 4)
    programs = layout.rows[0] * -(-layout.rows[1] // high)
    with launching_on(x.device):
        softmax_kernel[(programs,)](
            x, y, layout.slot_arguments(extents), *layout.sizes, layout.statics, layout.row_slots, is_log, one_pass,
            high, wide, float(fill), num_warps=many,
        )  # fmt: skip
    return y


def masked_softmax_backward(
    gradient: Tensor, y: Tensor, dim: int, extents: Sequence[ValidLength], is_log: bool = False
) -> Tensor:
    """The gradient of `masked_softmax` by its kernel.

    Args:
        gradient: of the result, in its shape; what it holds in padding has no effect.
        y: the result.
        dim, extents, is_log: as in the forward.

    Returns:
        The gradient of the input, zero in padding.
    """
    from subtensors.kernels.padded.masked_softmax_kernel import softmax_backward_kernel

    y, layout = plan(y, [dim], extents)
    gradient = with_strides_of(gradient, y)
    result = torch.empty_like(y)
    if not y.numel():
        return result
    one_pass = layout.fits_whole_rows(ONE_PASS)
    high, wide, many = layout.whole_rows() if one_pass else (*layout.tile(), 4)
    programs = layout.rows[0] * -(-layout.rows[1] // high)
    with launching_on(y.device):
        softmax_backward_kernel[(programs,)](
            gradient, y, result, layout.slot_arguments(extents), *layout.sizes, layout.statics, layout.row_slots,
            is_log, one_pass, high, wide, num_warps=many,
        )  # fmt: skip
    return result
