"""Replacements for torch functions that compute with sizes, written in functions that have rules."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from typing import TypedDict, Unpack

import torch
from torch import Tensor
from torch.nn import functional

from subtensors.dispatch.ops import linear_cross_entropy as torchs
from subtensors.dispatch.ops.errors import RuleError
from subtensors.dispatch.ops.tree import PyTree
from subtensors.dispatch.padded.padded_value import PaddedValue, result
from subtensors.dispatch.padded.pointwise import broadcast_dim
from subtensors.dispatch.padded.true_sizes import merge_sizes
from subtensors.padded.autograd import unwrap_with_grad, wrap_with_grad
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
    """Return the sum, mean or maximum of a table's rows over each bag of indices."""
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


class _Options(TypedDict, total=False):
    """Arguments that torch's function and its composition both take."""

    linear_bias: Tensor | None
    weight: Tensor | None
    ignore_index: int | None


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    options: object = None,
    **named: Unpack[_Options],
) -> Tensor:
    """Return the cross entropy of a linear layer; chunked by torch itself where `options` ask for it."""
    if options is not None:
        known = (linear_weight, named.get("linear_bias"), named.get("weight"))
        if label_smoothing == 0 and linear_weight.dim() == 2 and not any(isinstance(x, PaddedTensor) for x in known):
            loss = _chunked_by_torch(input, linear_weight, target, reduction, named, options)
            if loss is not None:
                return loss
        _warn_of_ignored_options()
    return torchs.composed(input, linear_weight, target, **named, reduction=reduction, label_smoothing=label_smoothing)


def _chunked_by_torch(
    input: Tensor, linear_weight: Tensor, target: Tensor, reduction: str, named: _Options, options: object
) -> Tensor | None:
    """Run torch's own function on storages whose padding adds nothing; None where more than the rows is padded."""
    x, labels = (unwrap_with_grad(t) for t in (input, target))
    if x.dim() != 2 or x.is_padded(1) or labels.dim() < 1 or any(d > 0 for d in labels.padded_dims):
        return None
    sizes = merge_sizes([t.sizes for t in (x, labels) if t.sizes is not None])
    rows = broadcast_dim([x.dims[0], labels.dims[0]], sizes)
    is_soft = labels.dense.is_floating_point()
    ignored = named.get("ignore_index")
    padding = 0 if is_soft else -100 if ignored is None else ignored
    states = x.with_bounded_padding() if x.dims[0] == rows else PaddedValue(x.dense, (rows, x.dims[1]), sizes).filled(0)
    targets = PaddedValue(labels.dense, (rows, *labels.dims[1:]), sizes).filled(padding)
    x.gradient_is_zero_if()
    # With probabilities torch's mean would divide by all rows, padding included.
    divides_here = is_soft and reduction == "mean"
    assert torchs.FUNCTION is not None
    loss = torchs.FUNCTION(
        states, linear_weight, targets, reduction="sum" if divides_here else reduction, **named, options=options
    )
    if divides_here:
        valid = PaddedValue(targets, (rows, *labels.dims[1:]), sizes).mask()
        return loss / (len(targets) if valid is None else valid.sum())
    return wrap_with_grad(result(loss, [rows], sizes).gradient_masked()) if reduction == "none" else loss


@functools.cache
def _warn_of_ignored_options() -> None:
    _log.warning("linear_cross_entropy of a PaddedTensor ignores its options here: the logits are materialized in full")


def _scattered(view: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function that returns a copy of a tensor with other values where a view lies."""

    def scattered(input: Tensor, src: Tensor, *args: PyTree, **kwargs: PyTree) -> Tensor:
        if not isinstance(input, PaddedTensor):
            raise RuleError("PaddedTensor has no rule for scattering padded values into a plain tensor")
        copy = input.clone()
        assert isinstance(copy, PaddedTensor)
        write_view(copy, lambda x: view(x, *args, **kwargs), unwrap_with_grad(src))
        return copy

    return scattered


def _slice(x: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Tensor:
    return x[(slice(None),) * (dim % x.dim()) + (slice(start, end, step),)]


REPLACEMENTS: dict[Callable[..., Tensor], Callable[..., Tensor]] = {
    functional.embedding_bag: embedding_bag,
    **({} if torchs.FUNCTION is None else {torchs.FUNCTION: linear_cross_entropy}),
    **dict.fromkeys([torch.select_scatter, Tensor.select_scatter], _scattered(torch.select)),
    **dict.fromkeys([torch.slice_scatter, Tensor.slice_scatter], _scattered(_slice)),
    **dict.fromkeys([torch.diagonal_scatter, Tensor.diagonal_scatter], _scattered(torch.diagonal)),
}
"""Functions of torch and what runs in their place."""
