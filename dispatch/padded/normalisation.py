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

from subtensors.dispatch.ops.tree import PyTree
from subtensors.dispatch.padded import kernels
from subtensors.dispatch.padded.interpreter import PaddedCall, refuse, table
from subtensors.dispatch.padded.padded_value import EDGE_FILL, PaddedValue, known_sizes, result
from subtensors.dispatch.padded.pointwise import same_factors
from subtensors.dispatch.sizes.dim_factors import Factors, static_dims
from subtensors.kernels.runtime.custom_ops import arithmetic_dtype

aten = torch.ops.aten


@table.register(aten.layer_norm, aten.native_layer_norm)
def layer_norm(call: PaddedCall) -> PyTree:
    """Normalize over the last dims."""
    x: PaddedValue = call["input"]
    first = x.dim() - len(call["normalized_shape"])
    over = range(first, x.dim())
    weight, bias = (_parameter(call, call[name], x, first) for name in ("weight", "bias"))
    if call.op.overloadpacket is aten.layer_norm:
        by_kernel = kernels.normed(x, len(over), weight, bias, call["eps"], is_rms=False)
        if by_kernel is not None:
            x.gradient_is_zero_if()
            return by_kernel
    if not any(x.is_padded(d) for d in over):
        return _by_torch(call, x, first)
    if call.op.overloadpacket is aten.native_layer_norm:
        raise refuse(call, "its statistics are over padded dims")
    normal, _, _ = _normalised(call, x, list(over))
    return _scaled(x, normal, weight, bias, [1] * first + list(x.shape[first:]))


@table.register(aten.rms_norm)
def rms_norm(call: PaddedCall) -> PaddedValue:
    """x / sqrt(mean(x^2) + eps) * weight, over the last dims."""
    x: PaddedValue = call["input"]
    first = x.dim() - len(call["normalized_shape"])
    over = list(range(first, x.dim()))
    weight = _parameter(call, call["weight"], x, first)
    eps = torch.finfo(x.dense.dtype).eps if call["eps"] is None else call["eps"]
    by_kernel = kernels.normed(x, len(over), weight, None, eps, is_rms=True)
    if by_kernel is not None:
        x.gradient_is_zero_if()
        return by_kernel
    if not any(x.is_padded(d) for d in over):
        return _by_torch(call, x, first)  # type: ignore[no-any-return]
    values = x.filled(0).to(arithmetic_dtype(x.dense.dtype))
    normal = values * torch.rsqrt((values * values).sum(over, keepdim=True) / _count(x, over) + eps)
    return _scaled(x, _without_padding(x, normal), weight, None, [1] * first + list(x.shape[first:]))


@table.register(aten.group_norm)
def group_norm(call: PaddedCall) -> PaddedValue:
    """Normalize over the channels of a group and the positions of an image."""
    x: PaddedValue = call["input"]
    if x.is_padded(1):
        raise refuse(call, "the channels are padded")
    if not any(x.is_padded(d) for d in range(1, x.dim())):
        return _by_torch(call, x, 1)  # type: ignore[no-any-return]
    groups = call["num_groups"]
    split = x.dense.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])
    grouped = PaddedValue(split, (x.dims[0], *static_dims(split.shape[1:3]), *x.dims[2:]), x.sizes)
    normal, _, _ = _normalised(call, grouped, list(range(2, grouped.dim())))
    return _scaled(x, normal.reshape(x.shape), call["weight"], call["bias"], _channels(x))


@table.register(aten.batch_norm)
def batch_norm(call: PaddedCall) -> PaddedValue:
    """Normalize each channel over the batch and the positions; update running statistics from valid elements."""
    x: PaddedValue = call["input"]
    average, spread = call["running_mean"], call["running_var"]
    if x.is_padded(1) and any(call[name] is not None for name in ("weight", "bias", "running_mean", "running_var")):
        raise refuse(call, "the channels are padded")
    is_tracked = torch.is_grad_enabled() and any(value.dense.requires_grad for value in call.values)
    if not call["training"] and not is_tracked:
        return result(call.dense(), x.dims, x.sizes)
    if not call["training"]:
        return _scaled(x, _with_statistics(x, average, spread, call["eps"]), call["weight"], call["bias"], _channels(x))
    over = [d for d in range(x.dim()) if d != 1]
    normal, mean, squares = _normalised(call, x, over)
    if average is not None:
        _require_several(x, over)
        count = _count(x, over)
        unbiased = squares * count / (count - 1)  # in the dtype of the squares, not torch's default one
        for running, seen in ((average.dense, mean), (spread.dense, unbiased)):
            with torch.no_grad():
                new = _statistics(seen, running.view(seen.shape), count).flatten()
                running.lerp_(new.to(running.dtype), call["momentum"])
    return _scaled(x, normal, call["weight"], call["bias"], _channels(x))


def _statistics(seen: Tensor, running: Tensor, count: Tensor | int) -> Tensor:
    """Return statistics to add to the running ones: these themselves where no element was seen."""
    return seen.detach() if isinstance(count, int) else torch.where(count > 0, seen.detach(), running)


def _require_several(x: PaddedValue, over: list[int]) -> None:
    """Raise what torch raises for a variance of a single value, where the host knows the true sizes."""
    true = [known_sizes(x, d) if x.is_padded(d) else (x.shape[d],) for d in over]
    if all(len(sizes) == 1 for sizes in true) and math.prod(size for sizes in true for size in sizes) == 1:
        raise ValueError("Expected more than 1 value per channel when training: the true sizes leave one")


@table.register(aten.instance_norm)
def instance_norm(call: PaddedCall) -> PaddedValue:
    """Normalize each channel of each sample over the positions; running statistics are means over the samples."""
    x: PaddedValue = call["input"]
    if x.is_padded(1):
        raise refuse(call, "the channels are padded")
    average, spread = call["running_mean"], call["running_var"]
    if not call["use_input_stats"]:
        return _scaled(x, _with_statistics(x, average, spread, call["eps"]), call["weight"], call["bias"], _channels(x))
    over = list(range(2, x.dim()))
    _require_several(x, over)
    normal, mean, squares = _normalised(call, x, over)
    if average is not None:
        count = _count(x, over)
        for running, seen in ((average.dense, mean), (spread.dense, squares * count / (count - 1))):
            dims = (x.dims[0], *static_dims([x.shape[1]]))
            own = running.view(1, -1, *[1] * len(over))
            samples = PaddedValue(_statistics(seen, own, count).reshape(x.shape[:2]), dims, x.sizes)
            with torch.no_grad():
                share = samples.filled(0).sum(0, keepdim=True) / _count(samples, [0])
                running.lerp_(share[0].to(running.dtype), call["momentum"])
    return _scaled(x, normal, call["weight"], call["bias"], _channels(x))


def _parameter(call: PaddedCall, weight: PaddedValue | None, x: PaddedValue, first: int) -> PaddedValue | None:
    """Return a weight or bias; one that is padded must be padded as its input, and scales by zero there."""
    if weight is None:
        return None
    if weight.shape != x.shape[first:]:
        raise refuse(call, "the size of its weight is not that of its input's bucket")
    if not weight.padded_dims:
        return weight
    if not all(same_factors(a, b, call.sizes()) for a, b in zip(weight.dims, x.dims[first:], strict=True)):
        raise refuse(call, "the padding of its weight differs from its input's")
    return weight.cleaned()


def _by_torch(call: PaddedCall, x: PaddedValue, rows: int) -> PyTree:
    """Run torch's kernel; with gradients, fill padded rows with valid ones, since a constant row may have none."""
    is_tracked = torch.is_grad_enabled() and any(value.dense.requires_grad for value in call.values)
    if not is_tracked:
        out = call.dense()
        if not isinstance(out, tuple):
            return result(out, x.dims, x.sizes).cleaned()
        return tuple(result(o, d, x.sizes) for o, d in zip(out, _dims_of(x, out, rows), strict=True))
    # The gradient of the results is masked, and a norm maps a gradient row of zeros to zeros.
    x.gradient_is_zero_if()
    out = call.dense({"input": x.edge_filled(is_zero=lambda: True)})
    if not isinstance(out, tuple):
        return result(out, x.dims, x.sizes, EDGE_FILL).gradient_masked()
    return tuple(result(o, d, x.sizes).gradient_masked() for o, d in zip(out, _dims_of(x, out, rows), strict=True))


def _dims_of(x: PaddedValue, outs: Sequence[Tensor], rows: int) -> list[Sequence[Factors]]:
    """The dims of a norm's results: its own, and the statistics of each row."""
    return [x.dims, *[[*x.dims[:rows], *static_dims(o.shape[rows:])] for o in outs[1:]]]


def _normalised(call: PaddedCall, x: PaddedValue, over: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """(x - mean) / sqrt(var + eps), mean and var over the valid elements of some dims, which are kept."""
    if not x.dense.is_floating_point():
        call.dense()
        raise refuse(call, "it is not floating point")
    eps = call["eps"]
    dtype = arithmetic_dtype(x.dense.dtype)
    values = x.filled(0).to(dtype)
    count = _count(x, over)
    mean = values.sum(over, keepdim=True) / count
    mask = x.mask(over)
    distance = values - mean if mask is None else torch.where(mask, values - mean, 0)
    squares = (distance * distance).sum(over, keepdim=True) / count
    return _without_padding(x, distance * torch.rsqrt(squares + eps)), mean, squares


def _without_padding(x: PaddedValue, normal: Tensor) -> Tensor:
    """Return zeros in padded rows, which may be NaN: the weight's gradient multiplies with them."""
    mask = x.mask()
    return normal if mask is None else torch.where(mask, normal, 0)


def _count(x: PaddedValue, over: list[int]) -> Tensor | int:
    return x.valid_count(over) if x.mask(over) is not None else math.prod(x.shape[d] for d in over)


def _scaled(
    x: PaddedValue, normal: Tensor, weight: PaddedValue | None, bias: PaddedValue | None, shape: Sequence[int]
) -> PaddedValue:
    """Scale and shift in the input's dtype; the result's gradient is masked for weight and bias."""
    out = normal if weight is None else normal * weight.dense.view(shape)
    out = out if bias is None else out + bias.dense.view(shape)
    return result(out.to(x.dense.dtype), x.dims, x.sizes).gradient_masked()


def _channels(x: PaddedValue) -> list[int]:
    return [1, x.shape[1]] + [1] * (x.dim() - 2)


def _with_statistics(x: PaddedValue, mean: PaddedValue, var: PaddedValue, eps: float) -> Tensor:
    """(x - mean) / sqrt(var + eps) with the given statistics of the channels."""
    average, spread = (statistic.dense.view(_channels(x)) for statistic in (mean, var))
    return (x.filled(0) - average) * torch.rsqrt(spread + eps)
