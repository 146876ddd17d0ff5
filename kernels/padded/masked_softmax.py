"""Softmax of the valid elements along a dimension of a padded tensor, forward and backward.

Over the valid elements `i` of a row,

    softmax(x)[i] = exp(x[i] - m) / sum over j of exp(x[j] - m),   m = max over j of x[j],
    gradient[i]   = y[i] * (g[i] - sum over j of g[j] * y[j])

and `fill` in padding, zero in the gradient; rows without valid elements, where the formula is 0/0, are all `fill`. The
contents of the padding never enter a result.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from subtensors.kernels.padded.masked_layout import plan, with_strides_of
from subtensors.kernels.runtime.custom_ops import arithmetic_dtype
from subtensors.kernels.runtime.launcher import launching_on
from subtensors.kernels.runtime.valid_lengths import ValidLength, valid_mask

MAX_ONE_PASS_ELEMENTS = 16384
"""The largest tile of whole rows that a program holds; longer rows are read twice."""


def masked_softmax_reference(
    x: Tensor, dim: int, lengths: Sequence[ValidLength], fill: float = 0.0, is_log: bool = False
) -> Tensor:
    """Compute `masked_softmax` in torch ops: the readable definition."""
    valid = valid_mask(x.shape, lengths, x.device).expand(x.shape)
    # A row of only -inf would give NaN, in the gradient too, so rows without valid elements get zeros first.
    neutral = x.masked_fill(~valid, float("-inf")).masked_fill(~valid.any(dim, keepdim=True), 0)
    y = torch.log_softmax(neutral, dim) if is_log else torch.softmax(neutral, dim)
    return y.masked_fill(~valid, fill)


def masked_softmax_backward_reference(
    gradient: Tensor, y: Tensor, dim: int, lengths: Sequence[ValidLength], is_log: bool = False
) -> Tensor:
    """Compute `masked_softmax_backward` in torch ops."""
    dtype, padding = y.dtype, ~valid_mask(y.shape, lengths, y.device)
    gradient, y = (t.to(arithmetic_dtype(t.dtype)).masked_fill(padding, 0) for t in (gradient, y))
    if is_log:
        result = gradient - y.exp() * gradient.sum(dim, keepdim=True)
    else:
        result = y * (gradient - (gradient * y).sum(dim, keepdim=True))
    return result.masked_fill(padding, 0).to(dtype)


def masked_softmax_forward(
    x: Tensor, dim: int, lengths: Sequence[ValidLength], fill: float = 0.0, is_log: bool = False
) -> Tensor:
    """Compute `masked_softmax` with its kernel."""
    x, layout = plan(x, [dim], lengths)
    y = torch.empty_like(x)
    if not x.numel():
        return y
    one_pass = layout.fits_whole_rows(MAX_ONE_PASS_ELEMENTS)
    block_rows, block_columns, num_warps = layout.whole_rows() if one_pass else (*layout.tile(), 4)
    programs = layout.rows[0] * -(-layout.rows[1] // block_rows)
    from subtensors.kernels.padded.masked_softmax_kernel import softmax_kernel

    with launching_on(x.device):
        softmax_kernel[(programs,)](
            x, y, layout.slot_arguments(lengths), *layout.sizes, layout.statics, layout.row_slots, is_log, one_pass,
            block_rows, block_columns, float(fill), num_warps=num_warps,
        )  # fmt: skip
    return y


def masked_softmax_backward(
    gradient: Tensor, y: Tensor, dim: int, lengths: Sequence[ValidLength], is_log: bool = False
) -> Tensor:
    """Compute the gradient of `masked_softmax` with its kernel.

    Args:
        gradient: the gradient of the result, in its shape; its padding has no effect.
        y: the result.
        dim, lengths, is_log: as in the forward.

    Returns:
        The gradient of the input, zero in padding.
    """
    y, layout = plan(y, [dim], lengths)
    gradient = with_strides_of(gradient, y)
    result = torch.empty_like(y)
    if not y.numel():
        return result
    one_pass = layout.fits_whole_rows(MAX_ONE_PASS_ELEMENTS)
    block_rows, block_columns, num_warps = layout.whole_rows() if one_pass else (*layout.tile(), 4)
    programs = layout.rows[0] * -(-layout.rows[1] // block_rows)
    from subtensors.kernels.padded.masked_softmax_kernel import softmax_backward_kernel

    with launching_on(y.device):
        softmax_backward_kernel[(programs,)](
            gradient, y, result, layout.slot_arguments(lengths), *layout.sizes, layout.statics, layout.row_slots,
            is_log, one_pass, block_rows, block_columns, num_warps=num_warps,
        )  # fmt: skip
    return result
