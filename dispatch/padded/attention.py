"""Scaled dot product attention: padded keys get no weight, and padded queries give no gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from subtensors.dispatch.padded.engine import Call, refuse, table
from subtensors.dispatch.padded.padded_value import Padded, is_padded, result
from subtensors.dispatch.padded.pointwise import met
from subtensors.dispatch.padded.true_sizes import TrueSizes
from subtensors.dispatch.size_factors import Factors, bucket_of

aten = torch.ops.aten


@table.register(aten.scaled_dot_product_attention)
def attention(call: Call) -> Padded:
    """softmax(q @ k.T * scale + mask) @ v over real keys.

    Where queries and keys are one sequence a causal mask hides the padded keys from every real query, so none is made
    and torch may choose a kernel that takes none.
    """
    q, k, v = call["query"], call["key"], call["value"]
    given: Padded | None = call["attn_mask"]
    sizes = call.sizes()
    if any(x.is_padded(x.dim() - 1) for x in (q, k, v)):
        raise refuse(call, "the features of a head are padded")
    if call["enable_gqa"] and any(x.is_padded(x.dim() - 3) for x in (q, k, v)):
        raise refuse(call, "the heads are padded")
    keys = met([k.dims[-2], v.dims[-2]], sizes)
    batch = _batch(q, k, v, sizes, call["enable_gqa"])
    scores = (*batch, q.dims[-2], keys)
    mask, causal = given, call["is_causal"]
    dense_mask: Tensor | None = None
    if is_padded(keys) and not (causal and q.dims[-2] == keys):
        dense_mask = _with_keys(q, scores, sizes, given, causal)
        causal = False
    elif mask is not None:
        dense_mask = _clean(mask)
    # What a padded query attends to stays in its own row; its gradient would not.
    followed = torch.is_grad_enabled() and any(x.dense.requires_grad for x in (q, k, v))
    operands = {"query": q.filled(0) if followed else q.dense, "key": k.finite(), "value": v.finite()}
    out = call.dense({**operands, "attn_mask": dense_mask, "is_causal": causal})
    return result(out, (*batch, q.dims[-2], v.dims[-1]), sizes).gradient_masked()


def _batch(q: Padded, k: Padded, v: Padded, sizes: TrueSizes | None, grouped: bool) -> tuple[Factors, ...]:
    rank = max(x.dim() for x in (q, k, v)) - 2
    dims = []
    for back in range(rank, 0, -1):
        held = [x.dims[-2 - back] for x in (q, k, v) if x.dim() - 2 >= back]
        dims.append(q.dims[-3] if grouped and back == 1 else met(held, sizes))
    return tuple(dims)


def _with_keys(
    q: Padded, scores: tuple[Factors, ...], sizes: TrueSizes | None, given: Padded | None, causal: bool
) -> Tensor:
    """The mask of the real keys, in one with the caller's."""
    keys = Padded(q.dense, scores, sizes).mask([len(scores) - 1])
    assert keys is not None
    if causal:
        shape = bucket_of(scores[-2]), bucket_of(scores[-1])
        return keys & torch.ones(shape, dtype=torch.bool, device=q.dense.device).tril()
    if given is None:
        if sizes is not None and sizes.serves_one_capture:
            keys = _added(keys, q.dense.dtype, scores, sizes)
        return keys.expand(*keys.shape[:-2], bucket_of(scores[-2]), keys.shape[-1])
    if given.dense.dtype == torch.bool:
        return keys & _clean(given)
    return torch.where(keys, _clean(given), float("-inf"))


def _added(keys: Tensor, dtype: torch.dtype, scores: tuple[Factors, ...], sizes: TrueSizes) -> Tensor:
    """The mask as what attention kernels add to the scores: made once a graph, and not by torch in every call."""
    key = ("added", dtype, scores)
    if key not in sizes.masks:
        sizes.masks[key] = torch.zeros_like(keys, dtype=dtype).masked_fill_(~keys, float("-inf"))
    return sizes.masks[key]


def _clean(given: Padded) -> Tensor:
    """The caller's mask, which lets everything through where it is padding itself: a row of NaN would leak back."""
    return given.filled(given.dense.dtype == torch.bool)
