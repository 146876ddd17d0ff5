"""Padding tensors to their buckets and back: from a tensor or a list, a `torch.nested` one, or one with a mask."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from subtensors.arguments import shown
from subtensors.dispatch.graphs.host_reads import needs_host
from subtensors.dispatch.ops.errors import RuleError, SizeError
from subtensors.dispatch.ops.lazy_storage import realized
from subtensors.dispatch.ops.plain_types import LAZY_TYPES, MAPPED_TYPES, MASKED_TYPES, PLAIN_TYPES
from subtensors.dispatch.padded.padded_value import Number, PaddedValue
from subtensors.dispatch.padded.size_conditions import HostSize
from subtensors.dispatch.padded.true_sizes import TrueSizes, rows_symbol
from subtensors.dispatch.sizes.dim_factors import Factors, bucket_of, padded_dim, static_dims
from subtensors.dispatch.sizes.expressions import size_on_host
from subtensors.dispatch.torch_internals import dispatcher, dynamo
from subtensors.dispatch.torch_internals.autograd import is_transforming
from subtensors.kernels.padded.padding_ops import pad_list, pad_to
from subtensors.kernels.runtime.graph_lifetime import to_device
from subtensors.kernels.runtime.valid_lengths import ValidLength
from subtensors.padded.autograd import unwrap_with_grad, wrap_padded
from subtensors.padded.padded_tensor import PaddedTensor, handlers, unwrap
from subtensors.padded.views import track_plain_views
from subtensors.sizes.dims import Dim, SizeAgreement


def pad(t: Tensor | Sequence[Tensor], dims: Mapping[int, Dim | int], value: Number = 0) -> PaddedTensor:
    """Pad a tensor to its buckets, or a list of tensors to the buckets of a batch.

    Args:
        t: a tensor; or a list of tensors that agree in all but the padded dims, for a ragged batch with a new first
            dim, one row per tensor.
        dims: for each padded dim (of one tensor, from the end if negative) its `Dim`, or an int: the bucket size.
        value: what the padding holds.

    Returns:
        The padded tensor, in memory of its own; gradients flow back to `t`.

    Raises:
        SizeError: a size is out of its Dim's range, or one Dim has two sizes.
        TypeError, ValueError: `t` is no tensor, a dim is none of its dims, or the rows differ elsewhere.

    Example:
        >>> import subtensors as st
        >>> seq = st.Dim("seq", max=512, buckets=64)
        >>> st.pad(torch.ones(2, 77), {1: seq})
        PaddedTensor([2, 128], true shape (2, 77), padded on {1: seq}, float32 cpu)
        >>> st.pad([torch.ones(3), torch.ones(5)], {0: st.Dim("n", max=8, buckets=4)})
        PaddedTensor([2, 8], true shape (2, (3, 5)), padded on {0: (rows), 1: n}, float32 cpu)
    """
    if is_transforming():
        raise RuleError(
            "pad has no rule inside a transform of torch.func or forward-mode differentiation: pad before it"
        )
    if torch.compiler.is_exporting():
        raise RuleError("pad has no rule under torch.export: export the program of the unpadded tensors")
    if isinstance(t, PaddedTensor):
        return _check_padded_on(t, dims)
    if isinstance(t, Tensor):
        _check_can_be_padded(t)
        named = _named_dims(dims, t.dim())
        _check_value(value, t.dtype)
        return wrap_padded(_pad_one(t, named, value))
    rows = list(t) if isinstance(t, Iterable) else []
    if not rows or not all(isinstance(row, Tensor) for row in rows):
        what = "an empty list" if isinstance(t, Sequence) and not len(t) else shown(t)
        raise TypeError(f"pad takes a tensor or a list of at least one tensor, got {what}")
    for row in rows:
        _check_can_be_padded(row)
        _check_value(value, row.dtype)
    return wrap_padded(_pad_rows(rows, _named_dims(dims, rows[0].dim()), value))


# After a graph break inside compiled code the call runs eagerly, and must not be compiled by itself.
dynamo.call_eagerly(pad, "pad before compiled code: in it a true size is a constant, and each would be compiled anew")


def unpad(x: PaddedTensor) -> Tensor | list[Tensor]:
    """Return `PaddedTensor.unpad()`."""
    value = unwrap_with_grad(x)
    sizes = value.sizes
    if sizes is None:
        return value.dense
    if needs_host(sizes.values, "unpad, or numpy or tolist,") or (
        not sizes.known_on_host and dispatcher.is_traced(sizes.values)
    ):
        raise RuleError("unpad needs the true sizes on the host: return the PaddedTensor and unpad it outside")
    data = unpad_value(value)
    track_plain_views(x, data if isinstance(data, list) else [data])
    return data


handlers.pad, handlers.unpad = pad, unpad


def unpad_value(value: PaddedValue) -> Tensor | list[Tensor]:
    """Return the valid part of a value: a tensor, or a list with one per row."""
    sizes, value = value.sizes, replace(value, dense=realized(value.dense))
    ragged = sizes is not None and any(sizes.is_ragged(f.size) for factors in value.dims for f in factors)
    if not ragged or sizes is None:
        return _unpad_row(value, row=0)
    if (d := value.rows_dim) is None:
        raise RuleError("the rows of this ragged batch are part of a flattened dim; unflatten it before unpad")
    rest = value.dims[:d] + value.dims[d + 1 :]
    return [_unpad_row(PaddedValue(row, rest, sizes), i) for i, row in enumerate(value.dense.unbind(d))]


def _unpad_row(value: PaddedValue, row: int) -> Tensor:
    sizes = value.sizes.assignment(row) if value.sizes is not None else {}
    true = [[size_on_host(f.size, sizes) for f in factors] for factors in value.dims]
    dense = value.dense
    if any(len(factors) > 1 for factors in value.dims):
        dense = dense.reshape([f.bucket for factors in value.dims for f in factors])
    at = 0
    for factors, counts in zip(value.dims, true, strict=True):
        for factor, count in zip(factors, counts, strict=True):
            dense = dense if count == factor.bucket else dense.narrow(at, 0, count)
            at += 1
    shape = [math.prod(counts) for counts in true]
    return dense if list(dense.shape) == shape else dense.reshape(shape)


def _check_can_be_padded(t: Tensor) -> None:
    """Raise TypeError unless a tensor has one shape, and a dense storage that padding can be written to."""
    if type(t) in MAPPED_TYPES:
        raise TypeError("pad takes a tensor or a list of tensors; a TensorList has no one shape: give it x.tensors")
    if type(t) in MASKED_TYPES:
        raise TypeError("pad takes plain tensors, and a row is a PaddedTensor: unpad it first")
    if t.is_nested is True:
        raise TypeError("pad takes a dense tensor or a list; a nested one is for st.pad_nested")
    if type(t) not in PLAIN_TYPES and hasattr(t, "full_tensor"):
        raise TypeError("pad takes the values of one process: pad to_local() or full_tensor() of a DTensor")
    if t.layout is not torch.strided or t.is_quantized is True:
        kind = "quantized" if t.is_quantized is True else str(t.layout).removeprefix("torch.")
        raise TypeError(f"pad takes a dense tensor, got one that is {kind}; make it dense first")


def _check_value(value: object, dtype: torch.dtype) -> None:
    """Raise TypeError unless padding of a dtype can hold the value."""
    is_number = isinstance(value, int | float) or (isinstance(value, complex) and dtype.is_complex)
    if not is_number or (isinstance(value, int) and not -(1 << 63) <= value < 1 << 63):
        raise TypeError(f"value is the number that padding of {dtype} holds, got {shown(value)}")


def _check_dim(dim: object) -> None:
    if not isinstance(dim, Dim):
        raise TypeError(f"dim is the st.Dim that is padded on, got {shown(dim)}")


def _check_padded(function: str, x: object) -> None:
    if not isinstance(x, PaddedTensor):
        raise TypeError(f"{function} takes a PaddedTensor, got {shown(x)}")


def _pad_one(t: Tensor, dims: Mapping[int, Dim], value: Number) -> PaddedValue:
    agreement = SizeAgreement()
    padded = {d: dim for d, dim in dims.items() if agreement.bind(dim, t.shape[d], f"dim {d}")}
    if not padded:
        return PaddedValue(t, static_dims(t.shape))
    sizes, factors = _padded_dims(t, padded, agreement)
    dense = pad_to(t, tuple(map(bucket_of, factors)), value)
    return PaddedValue(dense, factors, sizes, None if value != value else value)


def _padded_dims(t: Tensor, dims: Mapping[int, Dim], agreement: SizeAgreement) -> tuple[TrueSizes, tuple[Factors, ...]]:
    """Return the true sizes of Dims, and the dims of a tensor of which some are padded on them."""
    distinct = list(dict.fromkeys(dims.values()))
    host = tuple(agreement.sizes[dim] for dim in distinct)
    largest = [n if isinstance(n, int) else max(n) for n in host]
    buckets = {dim: dim.bucket(n) for dim, n in zip(distinct, largest, strict=True)}
    factors = list(static_dims(t.shape))
    for d, dim in dims.items():
        factors[d] = padded_dim(buckets[dim], dim.symbol)
    return true_sizes(distinct, [*buckets.values()], host, t.device), tuple(factors)


def _pad_rows(rows: Sequence[Tensor], dims: Mapping[int, Dim], value: Number) -> PaddedValue:
    first = rows[0]
    agreement = SizeAgreement()
    for i, row in enumerate(rows):
        if row.dim() != first.dim() or any(row.shape[d] != first.shape[d] for d in range(first.dim()) if d not in dims):
            raise ValueError(
                f"row {i} has shape {tuple(row.shape)} and row 0 {tuple(first.shape)}; "
                f"they may differ in the padded dims {sorted(dims)} only"
            )
        if (row.dtype, row.device) != (first.dtype, first.device):
            raise ValueError(
                f"row {i} is of {row.dtype} on {row.device} and row 0 of {first.dtype} on {first.device}; "
                f"a batch has one dtype and device"
            )
    for d, dim in dims.items():
        lengths = tuple(row.shape[d] for row in rows)
        if not agreement.bind(dim, lengths, f"dim {d}"):
            # Lengths that don't fit a hint get a bucket of their own.
            longest = max(*lengths, 1)
            dims = {**dims, d: Dim(f"{dim.name}_{d}_of_{longest}", max=longest, buckets=[longest])}
            agreement.bind(dims[d], lengths, f"dim {d}")
    sizes, factors = _padded_dims(first, dims, agreement)
    shape = tuple(map(bucket_of, factors))
    padding = [ValidLength(d + 1, sizes.of(dim.symbol)) for d, dim in dims.items()]
    dense = pad_list(rows, (len(rows), *shape), padding, value)
    return PaddedValue(
        dense, (padded_dim(len(rows), rows_symbol()), *factors), sizes, None if value != value else value
    )


def true_sizes(
    dims: Sequence[Dim], buckets: Sequence[int], host: Sequence[HostSize], device: torch.device
) -> TrueSizes:
    """Return the sizes of some Dims, with their values on a device."""
    values = torch.tensor(host, dtype=torch.int64)
    if device.type == "cuda":
        values = values.pin_memory().to(device, non_blocking=True)
    return TrueSizes(tuple(dim.symbol for dim in dims), tuple(buckets), values.to(device), tuple(host))


def _ragged(
    dim: Dim, lengths: tuple[int, ...], rest: Sequence[int], device: torch.device
) -> tuple[TrueSizes, tuple[Factors, ...]]:
    """Return the true sizes of a batch whose rows have these lengths, (rows, bucket, *rest), and its dims."""
    bucket = max(map(dim.bucket, lengths))
    sizes = true_sizes([dim], [bucket], [lengths], device)
    return sizes, (padded_dim(len(lengths), rows_symbol()), padded_dim(bucket, dim.symbol), *static_dims(rest))


def _valid_places(lengths: Sequence[int], bucket: int, device: torch.device) -> Tensor:
    """Return the places of the valid elements of rows of these lengths, each padded to `bucket`: (valid,) int64."""
    return to_device(np.flatnonzero(np.arange(bucket) < np.asarray(lengths)[:, None]), device)


def _named_dims(dims: Mapping[int, Dim | int], rank: int) -> dict[int, Dim]:
    if isinstance(dims, Dim):
        raise TypeError(
            f"dims say which dim is padded on which st.Dim: {{dim: {dims.name}}}, "
            f"such as st.pad(x, {{{min(1, rank - 1)}: {dims.name}}}); got the Dim alone"
        )
    if not isinstance(dims, Mapping):
        raise TypeError(f"dims are {{dim: st.Dim(...)}}, such as st.pad(x, {{1: seq}}); got {shown(dims)}")
    named: dict[int, Dim] = {}
    for d, dim in dims.items():
        if type(d) is not int or not -rank <= d < rank:
            given = "; a dim is given by its number, such as st.pad(x, {1: seq})" if type(d) is not int else ""
            raise ValueError(f"cannot pad dim {shown(d)} of a tensor with {rank} dims{given}")
        if not isinstance(dim, Dim | int):
            raise TypeError(f"dim {d} is padded on a st.Dim or an int, the bucket size; got {shown(dim)}")
        named[d % rank] = dim if isinstance(dim, Dim) else Dim(f"dim{d % rank}", max=dim, buckets=[dim])
    if not named:
        raise ValueError("pad needs at least one dim: {dim: st.Dim(...)}")
    return named


def _check_padded_on(x: PaddedTensor, dims: Mapping[int, Dim | int]) -> PaddedTensor:
    """Return the same tensor if it is padded on these Dims already."""
    value = unwrap(x)
    ragged = value.sizes is not None and value.sizes.rows is not None
    for d, dim in _named_dims(dims, x.dim() - ragged).items():
        factors = value.dims[d + ragged]
        if isinstance(dim, Dim) and (len(factors) != 1 or factors[0].size != dim.symbol):
            raise RuleError(f"dim {d} of this PaddedTensor is padded on {factors}, not on {dim}; unpad it first")
    return x


def pad_nested(nested: Tensor, dim: Dim, value: Number = 0) -> PaddedTensor:
    """Turn a jagged nested tensor into a ragged batch.

    Args:
        nested: `torch.nested` with `layout=torch.jagged`, (rows, ragged, *rest).
        dim: the Dim of the ragged dim.
        value: what the padding holds.

    Returns:
        (rows, bucket, *rest), gradients flow back to `nested`.

    Raises:
        TypeError: it is not a jagged nested tensor.
        SizeError: a length is out of the Dim's range.

    Example:
        >>> import subtensors as st
        >>> nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
        >>> pad_nested(nested, st.Dim("n", max=8, buckets=4)).logical_shape
        (2, (2, 3))
    """
    if type(nested) in MAPPED_TYPES or not isinstance(nested, Tensor) or nested.layout != torch.jagged:
        raise TypeError(f"pad_nested takes a torch.nested tensor with layout=torch.jagged, got {shown(nested)}")
    _check_dim(dim)
    _check_value(value, nested.dtype)
    jagged: Any = nested
    # The values of a transposed one, or of one with holes between its rows, are not consecutive rows.
    if jagged._ragged_idx != 1 or jagged.lengths() is not None:
        return pad(list(nested.unbind()), {0: dim}, value)
    first, *ends = jagged.offsets().tolist()
    lengths = tuple(end - start for start, end in itertools.pairwise([first, *ends]))
    sizes, dims = _ragged(dim, lengths, nested.shape[2:], nested.device)
    values = nested.values()[first : first + sum(lengths)]  # memory before and after them holds no rows
    shape = [*map(bucket_of, dims)]
    dense = values.new_full((shape[0] * shape[1], *shape[2:]), value).index_copy(
        0, _valid_places(lengths, shape[1], values.device), values
    )
    return wrap_padded(PaddedValue(dense.view(shape), dims, sizes, None if value != value else value))


def to_nested(x: PaddedTensor) -> Tensor:
    """Turn a ragged batch into a jagged nested tensor.

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
    _check_padded("to_nested", x)
    batch = unwrap_with_grad(x)
    sizes, ragged = batch.sizes, batch.dims[1] if batch.dim() > 1 else ()
    is_jagged = batch.padded_dims == [0, 1] and batch.dims[0][0].size == rows_symbol() and len(ragged) == 1
    if not is_jagged or sizes is None or not sizes.is_ragged(ragged[0].size):
        raise RuleError("only a batch that is ragged in its second dim alone is a jagged nested tensor")
    lengths = [size_on_host(ragged[0].size, sizes.assignment(row)) for row in range(batch.shape[0])]
    index = _valid_places(lengths, batch.shape[1], batch.dense.device)
    values = batch.dense.flatten(0, 1).index_select(0, index)
    return torch.nested.nested_tensor_from_jagged(values, to_device(np.cumsum([0, *lengths]), values.device))


def pad_masked(t: Tensor, mask: Tensor, dim: Dim, value: Number | None = None) -> PaddedTensor:
    """Turn a tensor that is padded already, with its attention mask, into a ragged batch.

    Args:
        t: (rows, size, *rest).
        mask: (rows, size), nonzero at valid positions: in each row the first ones, as with right padding.
        dim: the Dim of the second dim.
        value: what the padding is to hold; by default it keeps its contents, and is 0 from there to the bucket.

    Returns:
        (rows, bucket, *rest), gradients flow back to `t`. Reading the mask waits for the device.

    Raises:
        SizeError: a row's valid positions are not its first ones, or a length is out of the Dim's range.

    Example:
        >>> import subtensors as st
        >>> t, mask = torch.ones(2, 3), torch.tensor([[1, 1, 0], [1, 1, 1]])
        >>> pad_masked(t, mask, st.Dim("n", max=8, buckets=4)).sum(1).tolist()
        [2.0, 3.0]
    """
    for name, given in (("t", t), ("mask", mask)):
        is_plain = isinstance(given, Tensor) and type(given) not in {*MAPPED_TYPES, *MASKED_TYPES, *LAZY_TYPES}
        if not is_plain or given.is_nested or given.layout is not torch.strided or given.is_quantized:
            raise TypeError(f"pad_masked takes two plain dense tensors; {name} is {shown(given)}")
    _check_dim(dim)
    if value is not None:
        _check_value(value, t.dtype)
    if mask.dim() != 2 or mask.shape != t.shape[:2]:
        raise ValueError(f"a mask is (rows, size), here {tuple(t.shape[:2])}; got {tuple(mask.shape)}")
    valid = mask != 0
    lengths = valid.sum(1)
    if not torch.equal(valid, torch.arange(mask.shape[1], device=mask.device) < lengths[:, None]):
        raise SizeError("a row of the mask has a gap or starts with padding: only right padding has a true size")
    host = tuple(lengths.tolist())
    sizes, dims = _ragged(dim, host, t.shape[2:], t.device)
    shape = [*map(bucket_of, dims)]
    dense = pad_to(t[:, : shape[1]], shape, 0 if value is None else value)
    batch = PaddedValue(dense, dims, sizes)
    return wrap_padded(batch if value is None else batch.cleaned(value))


def to_masked(x: PaddedTensor, value: Number = 0) -> tuple[Tensor, Tensor]:
    """Turn a padded tensor into a plain one with its attention mask.

    Args:
        x: any padded tensor of at least two dims, the first two of which decide what is valid.
        value: what the padding is to hold.

    Returns:
        The storage with `value` in its padding, and an int64 mask of its first two dims, 1 at valid positions.

    Example:
        >>> import subtensors as st
        >>> x = st.pad([torch.ones(1), torch.ones(3)], {0: st.Dim("n", max=8, buckets=4)})
        >>> to_masked(x)[1].tolist()
        [[1, 0, 0, 0], [1, 1, 1, 0]]
    """
    _check_padded("to_masked", x)
    _check_value(value, x.dtype)
    if x.dim() < 2:
        raise ValueError(f"to_masked takes a PaddedTensor of at least two dims, got one of {x.dim()}")
    mask = x.mask()
    first = mask.flatten(2)[..., 0] if mask.dim() > 2 else mask
    return torch.where(mask, x.dense, value), first.long()
