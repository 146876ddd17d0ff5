"""Scaled dot product attention: padded keys get no weight, and padded queries give no gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from subtensors.dispatch.padded.errors import UnsupportedCall
from subtensors.dispatch.padded.interpreter import PaddedCall, table
from subtensors.dispatch.padded.padded_value import FINITE_FILL, PaddedValue, result, unpadded_value
from subtensors.dispatch.padded.pointwise import broadcast_dim
from subtensors.dispatch.padded.true_sizes import TrueSizes
from subtensors.dispatch.sizes.dim_factors import Factors, bucket_of, is_padded
from subtensors.dispatch.torch_internals.dispatcher import is_traced
from subtensors.kernels.runtime.custom_ops import materialize

aten = torch.ops.aten

MAX_SHARED_MASKS = 4
"""The most masks that one run keeps for later layers: a model has one or two kinds of attention."""


@table.register(aten.scaled_dot_product_attention)
def attention(call: PaddedCall) -> PaddedValue:
    """Compute softmax(q @ k.T * scale + mask) @ v over valid keys.

    Where queries and keys are one sequence a causal mask hides the padded keys from every valid query, so none is made
    and torch may choose a kernel that takes none.
    """
    q, k, v = call["query"], call["key"], call["value"]
    attn_mask: PaddedValue | None = call["attn_mask"]
    sizes = call.sizes()
    if any(x.is_padded(x.dim() - 1) for x in (q, k, v)):
        raise UnsupportedCall("the features of a head are padded")
    if call["enable_gqa"] and any(x.is_padded(x.dim() - 3) for x in (q, k, v)):
        raise UnsupportedCall("the heads are padded")
    keys = broadcast_dim([k.dims[-2], v.dims[-2]], sizes)
    batch = _batch(q, k, v, sizes, call["enable_gqa"])
    scores = (*batch, q.dims[-2], keys)
    causal = call["is_causal"]
    hides_keys = is_padded(keys) and not (causal and q.dims[-2] == keys)
    mask = _mask(q, scores, sizes, attn_mask, causal, hides_keys) if hides_keys or attn_mask is not None else None
    # The result of a padded query stays in its own row, but its gradient would reach all keys.
    is_tracked = torch.is_grad_enabled() and any(x.dense.requires_grad for x in (q, k, v))
    if is_tracked:
        operands = {
            "query": q.with_bounded_padding(),
            "key": k.with_bounded_padding(),
            "value": v.with_bounded_padding(),
        }
    else:
        operands = {"query": q.dense, "key": k.with_finite_padding(), "value": v.with_finite_padding()}
    out = call.dense({**operands, "attn_mask": mask, "is_causal": causal and not hides_keys})
    for x in (q, k, v):
        # Padded queries have no gradient to pass to keys, and only padded queries attend to padded keys.
        x.gradient_is_zero_if()
    # A padded query that may attend to some key yields a mean of finite numbers.
    is_mean = is_tracked and (attn_mask is None or attn_mask.shape[-2] == 1)
    return result(out, (*batch, q.dims[-2], v.dims[-1]), sizes, FINITE_FILL if is_mean else None).gradient_masked()


def _batch(
    q: PaddedValue, k: PaddedValue, v: PaddedValue, sizes: TrueSizes | None, grouped: bool
) -> tuple[Factors, ...]:
    rank = max(x.dim() for x in (q, k, v)) - 2
    dims = []
    for back in range(rank, 0, -1):
        factors = [x.dims[-2 - back] for x in (q, k, v) if x.dim() - 2 >= back]
        dims.append(q.dims[-3] if grouped and back == 1 else broadcast_dim(factors, sizes))
    return tuple(dims)


def _mask(
    q: PaddedValue,
    scores: tuple[Factors, ...],
    sizes: TrueSizes | None,
    attn_mask: PaddedValue | None,
    causal: bool,
    hides_keys: bool,
) -> Tensor:
    """Return the caller's mask or a causal one, combined with the mask of valid keys where some keys are padding."""
    if sizes is None or not sizes.serves_one_run or (attn_mask is not None and attn_mask.dense.is_inference()):
        return _expand_queries(_combined_mask(q, scores, sizes, attn_mask, causal, hides_keys), scores)
    # Layers share a mask: it is made once a run, in the additive form that kernels take, so no layer converts it.
    mask_id = None if attn_mask is None else (id(attn_mask.dense), attn_mask.dense._version)
    key = q.dense.dtype, scores, causal, mask_id
    masks = sizes.attention_masks
    if key not in masks:
        mask = _combined_mask(q, scores, sizes, attn_mask, causal, hides_keys)
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=q.dense.dtype).masked_fill_(~mask, float("-inf"))
        while len(masks) >= MAX_SHARED_MASKS:
            masks.pop(next(iter(masks)))
        if is_traced(mask) and not mask.requires_grad:
            mask = materialize(_expand_queries(mask, scores))
        # Keeping the caller's mask alive keeps its id unique.
        masks[key] = mask, attn_mask.dense if attn_mask is not None else None
    return _expand_queries(masks[key][0], scores)


def _expand_queries(mask: Tensor, scores: tuple[Factors, ...]) -> Tensor:
    """Expand a mask over the queries, as kernels require."""
    return mask.expand(*mask.shape[:-2], bucket_of(scores[-2]), mask.shape[-1])


def _combined_mask(
    q: PaddedValue,
    scores: tuple[Factors, ...],
    sizes: TrueSizes | None,
    attn_mask: PaddedValue | None,
    causal: bool,
    hides_keys: bool,
) -> Tensor:
    attn_mask = _unexpanded(attn_mask) if attn_mask is not None else None
    if not hides_keys:
        assert attn_mask is not None
        return _clean(attn_mask)
    keys = PaddedValue(q.dense, scores, sizes).mask([len(scores) - 1])
    assert keys is not None
    if causal:
        shape = bucket_of(scores[-2]), bucket_of(scores[-1])
        return keys & torch.ones(shape, dtype=torch.bool, device=q.dense.device).tril()
    if attn_mask is None:
        return keys
    if attn_mask.dense.dtype == torch.bool:
        return keys & _clean(attn_mask)
    return torch.where(keys, _clean(attn_mask), float("-inf"))


def _unexpanded(attn_mask: PaddedValue) -> PaddedValue:
    """Undo the expansion of a mask's leading dims."""
    if attn_mask.padded_dims:
        return attn_mask
    part = attn_mask.dense
    for d in range(part.dim() - 2):
        part = part if part.stride(d) else part[(slice(None),) * d + (slice(0, 1),)]
    return unpadded_value(part)


def _clean(attn_mask: PaddedValue) -> Tensor:
    """Return the caller's mask, its own padding filled to hide nothing: a row of NaN would leak into gradients."""
    return attn_mask.filled(attn_mask.dense.dtype == torch.bool)
