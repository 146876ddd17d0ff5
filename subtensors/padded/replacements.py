"""Functions of torch that compute with sizes, written in others that have rules."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from subtensors.dispatch.ops import linear_cross_entropy as torchs
from subtensors.dispatch.ops.errors import RuleError
from subtensors.dispatch.padded.padded_value import PaddedValue, result, unpadded_value
from subtensors.dispatch.padded.pointwise import broadcast_dim
from subtensors.dispatch.padded.true_sizes import merge_sizes
from subtensors.padded.autograd import followed, wrapped
from subtensors.padded.inplace import write_view
from subtensors.padded.padded_tensor import PaddedTensor

_log = logging.getLogger("subtensors.padded")


def embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """The sum, mean or maximum of a table's rows over each bag of indices."""
    if isinstance(weight, PaddedTensor) or isinstance(offsets, PaddedTensor) or mode not in ("sum", "mean", "max"):
        raise RuleError("PaddedTensor has no rule for embedding_bag with a padded table, padded offsets or this mode")
    if scale_grad_by_freq:
        raise RuleError(
            "PaddedTensor has no rule for embedding_bag by frequency, which torch counts otherwise on a CPU"
        )
    rows = functional.embedding(input, weight, padding_idx, max_norm, norm_type, sparse=sparse)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    if padding_idx is None:
        counts = torch.ones_like(input, dtype=torch.bool)
    else:
        counts = input != padding_idx % weight.shape[0]
        rows = rows.masked_fill(~counts.unsqueeze(-1), -math.inf if mode == "max" else 0)
    if input.dim() == 2:
        if mode == "max":
            return torch.where(counts.any(1, keepdim=True), rows.max(1).values, 0)
        total, size = rows.sum(1), counts.sum(1, keepdim=True)
    else:
        if mode == "max" or offsets is None:
            raise RuleError("PaddedTensor has no rule for embedding_bag with offsets in this mode")
        offsets = offsets[:-1] if include_last_offset else offsets
        bag = torch.searchsorted(offsets, torch.arange(input.shape[0], device=input.device), right=True) - 1
        total = rows.new_zeros(len(offsets), rows.shape[1]).index_add(0, bag, rows)
        size = rows.new_zeros(len(offsets)).index_add(0, bag, counts.to(rows.dtype)).unsqueeze(1)
    return total / size.clamp(min=1) if mode == "mean" else total


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    options: Any = None,
) -> Tensor:
    """A linear layer and its cross entropy; by torch's own chunks where `options` ask for them."""
    named: dict[str, Any] = {"linear_bias": linear_bias, "weight": weight, "ignore_index": ignore_index}
    if options is not None:
        known = (linear_weight, linear_bias, weight)
        if label_smoothing == 0 and linear_weight.dim() == 2 and not any(isinstance(x, PaddedTensor) for x in known):
            loss = _in_torchs_chunks(input, linear_weight, target, reduction, {**named, "options": options})
            if loss is not None:
                return loss
        _note_options()
    return torchs.composed(input, linear_weight, target, **named, reduction=reduction, label_smoothing=label_smoothing)


def _in_torchs_chunks(
    input: Tensor, linear_weight: Tensor, target: Tensor, reduction: str, named: dict[str, Any]
) -> Tensor | None:
    """Torch's own function on storages whose padding adds nothing; None where more than the rows is padded."""
    x, wanted = (followed(t) if isinstance(t, PaddedTensor) else unpadded_value(t) for t in (input, target))
    if x.dim() != 2 or x.is_padded(1) or wanted.dim() < 1 or any(d > 0 for d in wanted.padded_dims):
        return None
    sizes = merge_sizes([t.sizes for t in (x, wanted) if t.sizes is not None])
    rows = broadcast_dim([x.dims[0], wanted.dims[0]], sizes)
    is_soft = wanted.dense.is_floating_point()
    padding = 0 if is_soft else -100 if named["ignore_index"] is None else named["ignore_index"]
    states = x.with_bounded_padding() if x.dims[0] == rows else PaddedValue(x.dense, (rows, x.dims[1]), sizes).filled(0)
    targets = PaddedValue(wanted.dense, (rows, *wanted.dims[1:]), sizes).filled(padding)
    x.gradient_is_zero_if()
    # The mean over probabilities is that over rows, those of padding among them.
    by_hand = is_soft and reduction == "mean"
    assert torchs.FUNCTION is not None
    loss = torchs.FUNCTION(states, linear_weight, targets, reduction="sum" if by_hand else reduction, **named)
    if by_hand:
        real = PaddedValue(targets, (rows, *wanted.dims[1:]), sizes).mask()
        return loss / (len(targets) if real is None else real.sum())
    return wrapped(result(loss, [rows], sizes).gradient_masked()) if reduction == "none" else loss


@functools.cache
def _note_options() -> None:
    _log.warning("linear_cross_entropy of a PaddedTensor passes options over here: its logits are there in full")


def _scattered(view: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A copy of a tensor with other values where a view lies."""

    def scattered(input: Tensor, src: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not isinstance(input, PaddedTensor):
            raise RuleError("PaddedTensor has no rule for scattering padded values into a plain tensor")
        whole: Any = input.clone()
        new = followed(src) if isinstance(src, PaddedTensor) else unpadded_value(src)
        write_view(whole, lambda x: view(x, *args, **kwargs), new)
        return whole  # type: ignore[no-any-return]

    return scattered


def _slice(x: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Tensor:
    return x[(slice(None),) * (dim % x.dim()) + (slice(start, end, step),)]


REWRITTEN: dict[Callable[..., Any], Callable[..., Any]] = {
    functional.embedding_bag: embedding_bag,
    **({} if torchs.FUNCTION is None else {torchs.FUNCTION: linear_cross_entropy}),
    **dict.fromkeys([torch.select_scatter, Tensor.select_scatter], _scattered(torch.select)),
    **dict.fromkeys([torch.slice_scatter, Tensor.slice_scatter], _scattered(_slice)),
    **dict.fromkeys([torch.diagonal_scatter, Tensor.diagonal_scatter], _scattered(torch.diagonal)),
}
"""Python functions by the ones that take their place."""
