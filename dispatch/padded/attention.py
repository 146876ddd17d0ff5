"""Scaled dot product attention: padded keys get no weight, and padded queries give no gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from subtensors.dispatch.ops.errors import UnsupportedCall
from subtensors.dispatch.padded.interpreter import PaddedCall, table
from subtensors.dispatch.padded.padded_value import FINITE_FILL, PaddedValue, result, unpadded_value
from subtensors.dispatch.padded.pointwise import broadcast_dim
from subtensors.dispatch.sizes.dim_factors import bucket_of, is_padded
from subtensors.dispatch.torch_internals.dispatcher import is_traced
from subtensors.kernels.runtime.custom_ops import materialize

aten = torch.ops.aten

MAX_SHARED_MASKS = 4
"""The most masks that one run keeps for later layers: a model has one or two kinds of attention."""


@table.register(aten.scaled_dot_product_attention)
def attention(
    call: PaddedCall,
    query: PaddedValue,
    key: PaddedValue,
    value: PaddedValue,
    attn_mask: PaddedValue | None,
    is_causal: bool,
    enable_gqa: bool,
) -> PaddedValue:
    """Compute softmax(q @ k.T * scale + mask) @ v over valid keys.

    Where queries and keys are one sequence a causal mask hides the padded keys from every valid query, so none is made
    and torch may choose a kernel that takes none.
    """
    given, sizes = {"query": query, "key": key, "value": value}, call.sizes()
    if any(x.is_padded(x.dim() - 1) for x in given.values()):
        raise UnsupportedCall("the features of a head are padded")
    if enable_gqa and any(x.is_padded(x.dim() - 3) for x in given.values()):
        raise UnsupportedCall("the heads are padded")
    keys = broadcast_dim([key.dims[-2], value.dims[-2]], sizes)
    batch = []
    for back in range(max(x.dim() for x in given.values()), 2, -1):
        factors = [x.dims[-back] for x in given.values() if x.dim() >= back]
        batch.append(query.dims[-3] if enable_gqa and back == 3 else broadcast_dim(factors, sizes))
    hides_keys = is_padded(keys) and not (is_causal and query.dims[-2] == keys)
    mask = None
    if hides_keys or attn_mask is not None:
        scores = PaddedValue(query.dense, (*batch, query.dims[-2], keys), sizes)
        mask = _mask(scores, attn_mask, is_causal, hides_keys)
    # The result of a padded query stays in its own row, but its gradient would reach all keys.
    operands = {
        name: x.with_bounded_padding() if call.is_tracked else x.dense if name == "query" else x.with_finite_padding()
        for name, x in given.items()
    }
    out = call.dense({**operands, "attn_mask": mask, "is_causal": is_causal and not hides_keys})
    for x in given.values():
        # Padded queries have no gradient to pass to keys, and only padded queries attend to padded keys.
        x.gradient_is_zero_if()
    # A padded query that may attend to some key yields a mean of finite numbers.
    is_mean = call.is_tracked and (attn_mask is None or attn_mask.shape[-2] == 1)
    dims = [*batch, query.dims[-2], value.dims[-1]]
    return result(out, dims, sizes, FINITE_FILL if is_mean else None).gradient_masked()


def _mask(scores: PaddedValue, attn_mask: PaddedValue | None, causal: bool, hides_keys: bool) -> Tensor:
    """Return the caller's mask or a causal one, combined with the mask of valid keys where some keys are padding.

    Args:
        scores: the queries' storage, with the dims of the scores.
        attn_mask, causal: as the caller gives them.
        hides_keys: whether some keys are padding.
    """
    sizes, dtype = scores.sizes, scores.dense.dtype
    if sizes is None or not sizes.serves_one_run or (attn_mask is not None and attn_mask.dense.is_inference()):
        return _expand_queries(_combined_mask(scores, attn_mask, causal, hides_keys), scores)
    # Layers share a mask: it is made once a run, in the additive form that kernels take, so no layer converts it.
    mask_id = None if attn_mask is None else (id(attn_mask.dense), attn_mask.dense._version)
    key, masks = (dtype, scores.dims, causal, mask_id), sizes.attention_masks
    if key not in masks:
        mask = _combined_mask(scores, attn_mask, causal, hides_keys)
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, float("-inf"))
        while len(masks) >= MAX_SHARED_MASKS:
            masks.pop(next(iter(masks)))
        if is_traced(mask) and not mask.requires_grad:
            mask = materialize(_expand_queries(mask, scores))
        # Keeping the caller's mask alive keeps its id unique.
        masks[key] = mask, attn_mask.dense if attn_mask is not None else None
    return _expand_queries(masks[key][0], scores)


def _expand_queries(mask: Tensor, scores: PaddedValue) -> Tensor:
    """Expand a mask over the queries, as kernels require."""
    return mask.expand(*mask.shape[:-2], bucket_of(scores.dims[-2]), mask.shape[-1])


def _combined_mask(scores: PaddedValue, attn_mask: PaddedValue | None, causal: bool, hides_keys: bool) -> Tensor:
    given = None
    if attn_mask is not None:
        if not attn_mask.padded_dims:
            # Not expanded over its leading dims.
            part = attn_mask.dense
            for d in range(part.dim() - 2):
                part = part if part.stride(d) else part.narrow(d, 0, 1)
            attn_mask = unpadded_value(part)
        # Its own padding hides nothing: a row of NaN would leak into gradients.
        given = attn_mask.filled(attn_mask.dense.dtype == torch.bool)
    keys = scores.mask([len(scores.dims) - 1]) if hides_keys else None
    if keys is None:
        assert given is not None
        return given
    if causal:
        shape = bucket_of(scores.dims[-2]), bucket_of(scores.dims[-1])
        return keys & torch.ones(shape, dtype=torch.bool, device=keys.device).tril()
    if given is None:
        return keys
    return keys & given if given.dtype == torch.bool else torch.where(keys, given, float("-inf"))
