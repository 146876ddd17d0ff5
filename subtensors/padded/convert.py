"""Padded tensors from and to the other ways of writing one: `torch.nested` jagged, and a tensor with its mask."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from subtensors.dispatch.ops.errors import RuleError, SizeError
from subtensors.dispatch.padded.padded_value import Number, PaddedValue
from subtensors.dispatch.padded.true_sizes import rows_symbol
from subtensors.dispatch.sizes.dim_factors import padded_dim, static_dims
from subtensors.dispatch.sizes.expressions import size_on_host
from subtensors.kernels.padded.padding_ops import pad_values, unpad_values
from subtensors.kernels.runtime.graph_lifetime import to_device
from subtensors.kernels.runtime.valid_lengths import ValidLength
from subtensors.padded.padded_tensor import PaddedTensor
from subtensors.padded.padding import extended, pad, true_sizes
from subtensors.sizes.dims import Dim


def pad_nested(nested: Tensor, dim: Dim, value: Number = 0) -> PaddedTensor:
    """A ragged batch of a jagged nested tensor.

    Args:
        nested: `torch.nested` with `layout=torch.jagged`, (rows, ragged, *rest).
        dim: the Dim of the ragged dim.
        value: what the padding holds.

    Returns:
        (rows, bucket, *rest), gradients leading back to `nested`.

    Raises:
        TypeError: it is not a jagged nested tensor.
        SizeError: a length is out of the Dim's range.

    Example:
        >>> import subtensors as st
        >>> nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
        >>> pad_nested(nested, st.Dim("n", max=8, buckets=4)).logical_shape
        (2, (2, 3))
    """
    if not isinstance(nested, Tensor) or not nested.is_nested or nested.layout != torch.jagged:
        raise TypeError("pad_nested takes a torch.nested tensor with layout=torch.jagged")
    jagged: Any = nested
    values, rest = nested.values(), nested.shape[2:]
    # A transposed one, or one with holes between its rows, has no values row after row.
    if jagged._ragged_idx != 1 or jagged.lengths() is not None or not values.is_contiguous():
        return pad(list(nested.unbind()), {0: dim}, value)
    host = tuple(end - start for start, end in itertools.pairwise(jagged.offsets().tolist()))
    for length in host:
        dim.bucket(length)
    bucket = dim.bucket(max(host))
    sizes = true_sizes([dim], [bucket], [host], values.device)
    factors = (padded_dim(len(host), rows_symbol()), padded_dim(bucket, dim.symbol), *static_dims(rest))
    extent = ValidLength(1, sizes.of(dim.symbol))
    dense = pad_values(values.reshape(-1), (len(host), bucket, *rest), [extent], value)
    return _wrapped(PaddedValue(dense, factors, sizes, None if value != value else value))


def to_nested(x: PaddedTensor) -> Tensor:
    """A ragged batch as a jagged nested tensor.

    Args:
        x: (rows, ragged, *rest), padded on its second dim.

    Returns:
        The rows in one jagged tensor, tracked by autograd.

    Raises:
        RuleError: the tensor is not a ragged batch of that form.

    Example:
        >>> import subtensors as st
        >>> x = st.pad([torch.ones(2), torch.ones(3)], {0: st.Dim("n", max=8, buckets=4)})
        >>> to_nested(x).offsets()
        tensor([0, 2, 5])
    """
    from subtensors.padded.autograd import followed

    held = followed(x)
    sizes, ragged = held.sizes, held.dims[1] if held.dim() > 1 else ()
    is_jagged = held.padded_dims == [0, 1] and held.dims[0][0].size == rows_symbol() and len(ragged) == 1
    if not is_jagged or sizes is None or not sizes.is_ragged(ragged[0].size):
        raise RuleError("only a batch that is ragged in its second dim alone is a jagged nested tensor")
    lengths = [size_on_host(ragged[0].size, sizes.assignment(row)) for row in range(held.shape[0])]
    values = unpad_values(held.dense, [ValidLength(1, sizes.of(ragged[0].size))], sum(lengths) * held.shape[2:].numel())
    offsets = to_device(np.cumsum([0, *lengths]), values.device)
    return torch.nested.nested_tensor_from_jagged(values.view(-1, *held.shape[2:]), offsets)


def pad_masked(t: Tensor, mask: Tensor, dim: Dim, value: Number | None = None) -> PaddedTensor:
    """A ragged batch of a tensor that is padded already, and its attention mask.

    Args:
        t: (rows, size, *rest).
        mask: (rows, size), nonzero where data is real: in each row a beginning, as of right padding.
        dim: the Dim of the second dim.
        value: what the padding holds; by default what it held, and 0 up to the bucket.

    Returns:
        (rows, bucket, *rest), gradients leading back to `t`. Reading the mask waits for the device.

    Raises:
        SizeError: a row's real positions are not its beginning, or a length is out of the Dim's range.

    Example:
        >>> import subtensors as st
        >>> t, mask = torch.ones(2, 3), torch.tensor([[1, 1, 0], [1, 1, 1]])
        >>> pad_masked(t, mask, st.Dim("n", max=8, buckets=4)).sum(1).tolist()
        [2.0, 3.0]
    """
    if mask.dim() != 2 or mask.shape != t.shape[:2]:
        raise ValueError(f"a mask is (rows, size), here {tuple(t.shape[:2])}; got {tuple(mask.shape)}")
    real = mask != 0
    lengths = real.sum(1)
    if not torch.equal(real, torch.arange(mask.shape[1], device=mask.device) < lengths[:, None]):
        raise SizeError("a row of the mask has a gap or starts with padding: only right padding has a true size")
    host = tuple(lengths.tolist())
    for length in host:
        dim.bucket(length)
    bucket = dim.bucket(max(host))
    sizes = true_sizes([dim], [bucket], [host], t.device)
    factors = (padded_dim(t.shape[0], rows_symbol()), padded_dim(bucket, dim.symbol), *static_dims(t.shape[2:]))
    shape = (t.shape[0], bucket, *t.shape[2:])
    dense = extended(t[:, :bucket], shape, 0 if value is None else value)
    held = PaddedValue(dense, factors, sizes)
    return _wrapped(held if value is None else held.cleaned(value))


def to_masked(x: PaddedTensor, value: Number = 0) -> tuple[Tensor, Tensor]:
    """A padded tensor as a plain one with its attention mask.

    Args:
        x: any padded tensor of at least two dims, of which the first two say what is real.
        value: what the padding is to hold.

    Returns:
        The storage with `value` in its padding, and an int64 mask of its first two dims, 1 where data is real.

    Example:
        >>> import subtensors as st
        >>> x = st.pad([torch.ones(1), torch.ones(3)], {0: st.Dim("n", max=8, buckets=4)})
        >>> to_masked(x)[1].tolist()
        [[1, 0, 0, 0], [1, 1, 1, 0]]
    """
    mask = x.mask()
    first = mask.flatten(2)[..., 0] if mask.dim() > 2 else mask
    return torch.where(mask, x.dense, value), first.long()


def _wrapped(value: PaddedValue) -> PaddedTensor:
    from subtensors.padded.autograd import wrapped

    out: Any = wrapped(value)
    return out  # type: ignore[no-any-return]
