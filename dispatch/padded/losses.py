"""Losses, computed element by element and reduced over valid elements, and the cosine of vectors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from subtensors.dispatch.ops import sample_dims
from subtensors.dispatch.ops.errors import UnsupportedCall
from subtensors.dispatch.ops.sample_dims import MEAN, NONE
from subtensors.dispatch.ops.tree import PyTree, tree_map_only
from subtensors.dispatch.padded.interpreter import PaddedCall, apply, run, table
from subtensors.dispatch.padded.padded_value import PaddedValue, result, unpadded_value
from subtensors.dispatch.padded.pointwise import broadcast_dim

aten = torch.ops.aten


@table.register(sample_dims.loss, across=True)
def elementwise_loss(call: PaddedCall, reduction: int) -> PaddedValue:
    """Compute an elementwise loss, then reduce it over valid elements."""
    each = run(call.op, (), {**call.arguments, "reduction": NONE})
    return _reduced(each, reduction)


def _reduced(each: PaddedValue, reduction: int) -> PaddedValue:
    """Reduce the losses of elements or samples as a call asks for it."""
    if reduction == NONE:
        return each
    return apply(aten.mean.default if reduction == MEAN else aten.sum.default, each)


@table.register(aten.cross_entropy_loss, aten.nll_loss_nd, aten.nll_loss, aten.nll_loss2d, aten.nll_loss_forward,
                aten.nll_loss2d_forward)  # fmt: skip
def cross_entropy(
    call: PaddedCall, x: PaddedValue, target: PaddedValue, weight: PaddedValue | None, reduction: int, ignore_index: int
) -> PyTree:
    """Compute a cross entropy; padded targets become ignored ones, which no mean counts."""
    at, sizes = min(x.dim() - 1, 1), call.sizes()
    smoothing = call.get("label_smoothing", 0)
    if x.is_padded(at) and (weight is not None or smoothing):
        raise UnsupportedCall("the classes themselves are padded, and weighted or smoothed over")
    if weight is not None and weight.padded_dims:
        raise UnsupportedCall("the weight of the classes is padded")
    if target.dense.is_floating_point():
        # -sum(weight * target * log_softmax(x)) over the classes; its mean divides by the number of positions.
        if smoothing:
            target = apply(aten.add.Tensor, apply(aten.mul.Tensor, target, 1 - smoothing), smoothing / x.shape[at])
        each = apply(aten.mul.Tensor, apply(aten.log_softmax.int, x, at), target)
        if weight is not None:
            by_class = weight.dense.view([-1 if d == at else 1 for d in range(x.dim())])
            each = apply(aten.mul.Tensor, each, unpadded_value(by_class))
        return _reduced(apply(aten.neg.default, apply(aten.sum.dim_IntList, each, [at])), reduction)
    without_classes = [*x.dims[:at], *x.dims[at + 1 :]]
    dims = [broadcast_dim([a, b], sizes) for a, b in zip(without_classes, target.dims, strict=True)]
    ignored = PaddedValue(target.dense, tuple(dims), sizes).filled(ignore_index)
    scored = PaddedValue(x.dense, (*dims[:at], x.dims[at], *dims[at:]), sizes, x.fill)
    # Ignored targets give finite scores a gradient of zero.
    scores = scored.with_finite_padding() if scored.dims == x.dims else scored.filled(0)
    x.gradient_is_zero_if()
    valid_classes = x.mask([at])
    if valid_classes is not None and call.op is aten.cross_entropy_loss.default:
        # A padded class has no probability.
        scores = torch.where(valid_classes, scores, -math.inf)
    is_each = reduction == NONE

    def loss(out: Tensor) -> PaddedValue:
        return result(out, dims, sizes) if is_each and out.dim() == len(dims) else unpadded_value(out)

    return tree_map_only(Tensor, loss, call.dense({"self": scores, "target": ignored}))


@table.register(aten.multi_margin_loss, aten.multilabel_margin_loss)
def margin_loss(
    call: PaddedCall, x: PaddedValue, target: PaddedValue, reduction: int, weight: PaddedValue | None = None
) -> PaddedValue:
    """Compute a margin loss of each sample, then reduce it over valid samples."""
    if x.dim() != 2 or x.is_padded(1):
        raise UnsupportedCall("the classes themselves are padded")
    sizes = call.sizes()
    samples = broadcast_dim([x.dims[0], target.dims[0]], sizes)
    filled = {
        name: PaddedValue(t.dense, (samples, *t.dims[1:]), sizes).filled(0)
        for name, t in (("self", x), ("target", target))
    }
    given = {} if weight is None else {"weight": weight.dense}
    each = result(call.dense({**filled, **given, "reduction": NONE}), [samples], sizes)
    return _reduced(each.gradient_masked(), reduction)


@table.register(aten.ctc_loss)
def ctc_loss(
    call: PaddedCall,
    log_probs: PaddedValue,
    targets: PaddedValue,
    input_lengths: PaddedValue | Sequence[int],
    target_lengths: PaddedValue | Sequence[int],
    reduction: int,
) -> PaddedValue:
    """Compute a CTC loss; torch reads nothing beyond the lengths that the caller gives."""
    x, lengths = log_probs, {"input_lengths": input_lengths, "target_lengths": target_lengths}
    if x.is_padded(x.dim() - 1):
        raise UnsupportedCall("the classes themselves are padded")
    counts = [n.dense.numel() if isinstance(n, PaddedValue) else len(n) for n in lengths.values()]
    if targets.dim() == 2:
        counts.append(targets.shape[0])
    if any(count != math.prod(x.shape[1:-1]) for count in counts):
        raise UnsupportedCall("the batch is padded in some of its tensors only")
    # Labels beyond a target's length and lengths of padded sequences may hold any valid value.
    safe = {name: n.filled(1) for name, n in lengths.items() if isinstance(n, PaddedValue)}
    each = call.dense({"log_probs": x.filled(0), "targets": targets.filled(0), "reduction": NONE, **safe})
    samples = unpadded_value(each) if x.dim() == 2 else result(each, [x.dims[1]], x.sizes)
    if reduction == NONE:
        return samples.gradient_masked()
    if reduction == MEAN:
        counted = safe.get("target_lengths")
        if counted is None:
            counted = torch.tensor(target_lengths, device=each.device).view(each.shape)
        samples = samples.like(each / counted.to(each).clamp(min=1))
    return _reduced(samples, reduction)


@table.register(aten.dist)
def dist(call: PaddedCall, x: PaddedValue, other: PaddedValue, p: float) -> PaddedValue:
    """The p-norm of a difference."""
    return apply(aten.linalg_vector_norm.default, apply(aten.sub.Tensor, x, other), p)


@table.register(aten.cosine_similarity)
def cosine(call: PaddedCall, x1: PaddedValue, x2: PaddedValue, dim: int, eps: float) -> PaddedValue:
    """The cosine of the angle between vectors along a dim, their norms at least eps."""
    a, b = run(aten.broadcast_tensors.default, ([x1, x2],), {})
    product = apply(aten.sum.dim_IntList, apply(aten.mul.Tensor, a, b), [dim])
    for x in (a, b):
        norm = apply(aten.linalg_vector_norm.default, x, 2, [dim])
        # As in torch, the norm's gradient ignores the lower bound.
        bounded = torch.where(norm.dense < eps, norm.dense - norm.dense.detach() + eps, norm.dense)
        product = apply(aten.div.Tensor, product, norm.like(bounded))
    return product
