"""Layer, group, batch and instance norm: statistics of valid elements.

    y = (x - mean) / sqrt(var + eps) * weight + bias

If the dims of the statistics have no padding, torch's own kernels run on all rows. Otherwise the formula above is
computed with masked sums and with counts that the device computes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from subtensors.dispatch.ops.errors import UnsupportedCall
from subtensors.dispatch.ops.tree import PyTree
from subtensors.dispatch.padded import kernels
from subtensors.dispatch.padded.interpreter import PaddedCall, table
from subtensors.dispatch.padded.padded_value import EDGE_FILL, PaddedValue, known_sizes, result
from subtensors.dispatch.padded.pointwise import same_factors
from subtensors.dispatch.padded.reductions import deviations
from subtensors.dispatch.sizes.dim_factors import static_dims
from subtensors.kernels.runtime.custom_ops import arithmetic_dtype

aten = torch.ops.aten


@table.register(aten.layer_norm, aten.native_layer_norm, aten.rms_norm)
def layer_norm(
    call: PaddedCall,
    x: PaddedValue,
    normalized_shape: Sequence[int],
    weight: PaddedValue | None,
    eps: float | None,
    bias: PaddedValue | None = None,
) -> PyTree:
    """Normalize over the last dims; an rms norm is x / sqrt(mean(x^2) + eps) * weight."""
    packet, first = call.op.overloadpacket, x.dim() - len(normalized_shape)
    over, is_rms = list(range(first, x.dim())), packet is aten.rms_norm
    weight, bias = (_parameter(call, w, x, first) for w in (weight, bias))
    eps = torch.finfo(x.dense.dtype).eps if eps is None else eps
    if packet is not aten.native_layer_norm:
        by_kernel = kernels.normed(x, len(over), weight, bias, eps, is_rms)
        if by_kernel is not None:
            x.gradient_is_zero_if()
            return by_kernel
    if not any(map(x.is_padded, over)):
        return _by_torch(call, x, first)
    if packet is aten.native_layer_norm:
        raise UnsupportedCall("its statistics are over padded dims")
    if is_rms:
        values = x.filled(0).to(arithmetic_dtype(x.dense.dtype))
        mean_square = (values * values).sum(over, keepdim=True) / x.valid_count(over)
        normal = _without_padding(x, values * torch.rsqrt(mean_square + eps))
    else:
        normal, _, _ = _normalised(call, x, over, eps)
    return _scaled(x, normal, weight, bias, [1] * first + list(x.shape[first:]))


@table.register(aten.group_norm)
def group_norm(
    call: PaddedCall, x: PaddedValue, num_groups: int, weight: PaddedValue | None, bias: PaddedValue | None, eps: float
) -> PyTree:
    """Normalize over the channels of a group and the positions of an image."""
    if x.is_padded(1):
        raise UnsupportedCall("the channels are padded")
    if not any(map(x.is_padded, range(1, x.dim()))):
        return _by_torch(call, x, 1)
    split = x.dense.reshape(x.shape[0], num_groups, x.shape[1] // num_groups, *x.shape[2:])
    grouped = PaddedValue(split, (x.dims[0], *static_dims(split.shape[1:3]), *x.dims[2:]), x.sizes)
    normal, _, _ = _normalised(call, grouped, list(range(2, grouped.dim())), eps)
    return _scaled(x, normal.reshape(x.shape), weight, bias, _channels(x))


@table.register(aten.batch_norm, aten.instance_norm)
def batch_norm(
    call: PaddedCall,
    x: PaddedValue,
    weight: PaddedValue | None,
    bias: PaddedValue | None,
    running_mean: PaddedValue | None,
    running_var: PaddedValue | None,
    momentum: float,
    eps: float,
) -> PaddedValue:
    """Normalize each channel, of the batch or of each sample, by statistics of its positions or by running ones.

    Running statistics are updated from valid elements; those of samples by their mean.
    """
    by_sample = call.op.overloadpacket is aten.instance_norm
    given = [t for t in (weight, bias, running_mean, running_var) if t is not None]
    if x.is_padded(1) and (by_sample or given):
        raise UnsupportedCall("the channels are padded")
    if not call["use_input_stats" if by_sample else "training"]:
        if not (by_sample or call.is_tracked):
            return result(call.dense(), x.dims, x.sizes)
        assert running_mean is not None
        assert running_var is not None
        average, spread = (statistic.dense.view(_channels(x)) for statistic in (running_mean, running_var))
        return _scaled(x, (x.filled(0) - average) * torch.rsqrt(spread + eps), weight, bias, _channels(x))
    over = list(range(2, x.dim())) if by_sample else [d for d in range(x.dim()) if d != 1]
    if by_sample or running_mean is not None:
        _require_several(x, over)
    normal, mean, variance = _normalised(call, x, over, eps)
    if running_mean is not None and running_var is not None:
        count = x.valid_count(over)
        unbiased = variance * count / (count - 1)  # in the dtype of the variance, not torch's default one
        for running, seen in ((running_mean.dense, mean), (running_var.dense, unbiased)):
            # Where no element was seen, the running ones stay.
            new = torch.where(count > 0, seen, running.view(_channels(x))).flatten(1)
            samples = PaddedValue(new, (x.dims[0] if by_sample else static_dims([1])[0], x.dims[1]), x.sizes)
            with torch.no_grad():
                share = samples.filled(0).sum(0) / samples.valid_count([0]).flatten()
                running.lerp_(share.to(running.dtype), momentum)
    return _scaled(x, normal, weight, bias, _channels(x))


def _require_several(x: PaddedValue, over: list[int]) -> None:
    """Raise what torch raises for a variance of a single value, where the host knows the true sizes."""
    true = [known_sizes(x, d) if x.is_padded(d) else (x.shape[d],) for d in over]
    if all(len(sizes) == 1 for sizes in true) and math.prod(size for sizes in true for size in sizes) == 1:
        raise ValueError("Expected more than 1 value per channel when training: the true sizes leave one")


def _parameter(call: PaddedCall, weight: PaddedValue | None, x: PaddedValue, first: int) -> PaddedValue | None:
    """Return a weight or bias; one that is padded must be padded as its input, and scales by zero there."""
    if weight is None:
        return None
    if weight.shape != x.shape[first:]:
        raise UnsupportedCall("the size of its weight is not that of its input's bucket")
    if not weight.padded_dims:
        return weight
    if not all(same_factors(a, b, call.sizes()) for a, b in zip(weight.dims, x.dims[first:], strict=True)):
        raise UnsupportedCall("the padding of its weight differs from its input's")
    return weight.cleaned()


def _by_torch(call: PaddedCall, x: PaddedValue, rows: int) -> PyTree:
    """Run torch's kernel; with gradients, fill padded rows with valid ones, since a constant row may have none."""
    if call.is_tracked:
        # The gradient of the results is masked, and a norm maps a gradient row of zeros to zeros.
        x.gradient_is_zero_if()
    out = call.dense({"input": x.edge_filled(is_zero=lambda: True)} if call.is_tracked else None)
    if not isinstance(out, tuple):
        return x.like(out, EDGE_FILL).gradient_masked() if call.is_tracked else x.like(out).cleaned()
    dims = [x.dims, *[[*x.dims[:rows], *static_dims(o.shape[rows:])] for o in out[1:]]]
    return tuple(result(o, own, x.sizes).gradient_masked() for o, own in zip(out, dims, strict=True))


def _normalised(call: PaddedCall, x: PaddedValue, over: list[int], eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(x - mean) / sqrt(var + eps), mean and var over the valid elements of some dims, which are kept."""
    if not x.dense.is_floating_point():
        call.dense()
        raise UnsupportedCall("it is not floating point")
    distance, mean = deviations(x, x.filled(0).to(arithmetic_dtype(x.dense.dtype)), over)
    variance = (distance * distance).sum(over, keepdim=True) / x.valid_count(over)
    return _without_padding(x, distance * torch.rsqrt(variance + eps)), mean, variance


def _without_padding(x: PaddedValue, normal: Tensor) -> Tensor:
    """Return zeros in padded rows, which may be NaN: the weight's gradient multiplies with them."""
    mask = x.mask()
    return normal if mask is None else torch.where(mask, normal, 0)


def _scaled(
    x: PaddedValue, normal: Tensor, weight: PaddedValue | None, bias: PaddedValue | None, shape: Sequence[int]
) -> PaddedValue:
    """Scale and shift in the input's dtype; the result's gradient is masked for weight and bias."""
    out = normal if weight is None else normal * weight.dense.view(shape)
    out = out if bias is None else out + bias.dense.view(shape)
    return x.like(out.to(x.dense.dtype)).gradient_masked()


def _channels(x: PaddedValue) -> list[int]:
    return [1, x.shape[1]] + [1] * (x.dim() - 2)
