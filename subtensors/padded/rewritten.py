"""Functions of torch that compute with sizes, written in others that have rules."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from subtensors.dispatch.errors import RuleError
from subtensors.dispatch.padded.padded_value import plain
from subtensors.padded.padded_tensor import PaddedTensor
from subtensors.padded.wrapping import followed
from subtensors.padded.writes import write_view


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


def _scattered(view: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A copy of a tensor with other values where a view lies."""

    def scattered(input: Tensor, src: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not isinstance(input, PaddedTensor):
            raise RuleError("PaddedTensor has no rule for scattering padded values into a plain tensor")
        whole: Any = input.clone()
        new = followed(src) if isinstance(src, PaddedTensor) else plain(src)
        write_view(whole, lambda x: view(x, *args, **kwargs), new)
        return whole  # type: ignore[no-any-return]

    return scattered


def _slice(x: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Tensor:
    return x[(slice(None),) * (dim % x.dim()) + (slice(start, end, step),)]


REWRITTEN: dict[Callable[..., Any], Callable[..., Any]] = {
    functional.embedding_bag: embedding_bag,
    **dict.fromkeys([torch.select_scatter, Tensor.select_scatter], _scattered(torch.select)),
    **dict.fromkeys([torch.slice_scatter, Tensor.slice_scatter], _scattered(_slice)),
    **dict.fromkeys([torch.diagonal_scatter, Tensor.diagonal_scatter], _scattered(torch.diagonal)),
}
"""Python functions by the ones that take their place."""
