"""Padding a tensor to its buckets and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from subtensors.dispatch.ops.errors import RuleError
from subtensors.dispatch.padded.padded_value import Number, PaddedValue
from subtensors.dispatch.padded.true_sizes import HostSize, TrueSizes, rows_symbol
from subtensors.dispatch.sizes.dim_factors import bucket_of, padded_dim, static_dims
from subtensors.dispatch.sizes.expressions import size_on_host
from subtensors.dispatch.torch_internals import dispatcher, dynamo
from subtensors.kernels.padded.padding_ops import pad_list, pad_to
from subtensors.kernels.runtime.valid_lengths import ValidLength
from subtensors.padded.padded_tensor import PaddedTensor, value_of
from subtensors.sizes.dims import Dim, SizeAgreement


def pad(t: Tensor | Sequence[Tensor], dims: Mapping[int, Dim | int], value: Number = 0) -> PaddedTensor:
    """Pad a tensor to its buckets, or several to those of a batch.

    Args:
        t: a tensor; or a list of tensors that agree in all but the padded dims, for a ragged batch with a new first
            dim, one row a tensor.
        dims: for each padded dim (of one tensor, from the end if negative) its `Dim`, or an int: the bucket size.
        value: what the padding holds.

    Returns:
        The padded tensor, in memory of its own; gradients lead back to `t`.

    Raises:
        SizeError: a size is out of its Dim's range, or one Dim has two sizes.
        TypeError, ValueError: `t` is no tensor, a dim is none of its dims, or the rows differ elsewhere.

    Example:
        >>> import subtensors as st
        >>> seq = st.Dim("seq", max=512, buckets=64)
        >>> st.pad(torch.ones(2, 77), {1: seq})
        PaddedTensor([2, 128], true shape (2, 77), padded on {1: seq}, float32 cpu)
        >>> st.pad([torch.ones(3), torch.ones(5)], {0: st.Dim("n", max=8, buckets=4)})
        PaddedTensor([2, 8], true shape (2, (3, 5)), padded on {0: rows, 1: n}, float32 cpu)
    """
    from subtensors.padded.autograd import wrapped

    if dispatcher.is_transforming():
        raise RuleError(
            "pad has no rule inside a transform of torch.func or forward-mode differentiation: pad before it"
        )
    if torch.compiler.is_dynamo_compiling():
        raise RuleError("pad before compiled code: in it a true size is a constant, and each would be compiled anew")
    if isinstance(t, PaddedTensor):
        return _repad(t, dims)
    if isinstance(t, Tensor):
        return wrapped(_padded(t, _named(dims, t.dim()), value))  # type: ignore[return-value]
    rows = list(t)
    if not rows or not all(isinstance(row, Tensor) for row in rows):
        raise TypeError("pad takes a tensor or a list of at least one tensor")
    return wrapped(_ragged(rows, _named(dims, rows[0].dim()), value))  # type: ignore[return-value]


# Where compiled code breaks its graph at a call, the call is one of eager mode.
dynamo.compile_only_inlined(pad)


def unpad(x: PaddedTensor) -> Any:
    """`PaddedTensor.unpad`."""
    from subtensors.padded.autograd import followed
    from subtensors.padded.views import note_plain

    value = followed(x)
    sizes = value.sizes
    if sizes is None:
        return value.dense
    if sizes.is_captured or (not sizes.known_on_host and dispatcher.is_traced(sizes.values)):
        raise RuleError("unpad needs the true sizes on the host: return the PaddedTensor and unpad it outside")
    data = logical(value)
    note_plain(x, data if isinstance(data, list) else [data])
    return data


def logical(value: PaddedValue) -> Any:
    """The real part of a value: a tensor, or a list of one a row."""
    sizes = value.sizes
    ragged = sizes is not None and any(sizes.is_ragged(f.size) for factors in value.dims for f in factors)
    if not ragged or sizes is None:
        return _cut(value, row=0)
    for d, factors in enumerate(value.dims):
        if len(factors) == 1 and factors[0].size == rows_symbol():
            rest = value.dims[:d] + value.dims[d + 1 :]
            return [_cut(PaddedValue(row, rest, sizes), i) for i, row in enumerate(value.dense.unbind(d))]
    raise RuleError("the rows of this ragged batch are part of a flattened dim; unflatten it before unpad")


def _cut(value: PaddedValue, row: int) -> Tensor:
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
    shape = [_product(counts) for counts in true]
    return dense if list(dense.shape) == shape else dense.reshape(shape)


def _product(counts: Sequence[int]) -> int:
    out = 1
    for count in counts:
        out *= count
    return out


def _padded(t: Tensor, dims: Mapping[int, Dim], value: Number) -> PaddedValue:
    agreed = SizeAgreement()
    kept = {d: dim for d, dim in dims.items() if agreed.bind(dim, t.shape[d], f"dim {d}")}
    if not kept:
        return PaddedValue(t, static_dims(t.shape))
    distinct = list(dict.fromkeys(kept.values()))
    host = tuple(agreed.sizes[dim] for dim in distinct)
    buckets = tuple(dim.bucket(int(n)) for dim, n in zip(distinct, host, strict=True))  # type: ignore[arg-type]
    sizes = true_sizes(distinct, buckets, host, t.device)
    factors = list(static_dims(t.shape))
    for d, dim in kept.items():
        factors[d] = padded_dim(buckets[distinct.index(dim)], dim.symbol)
    shape = tuple(map(bucket_of, factors))
    return PaddedValue(extended(t, shape, value), tuple(factors), sizes, None if value != value else value)


def extended(t: Tensor, shape: Sequence[int], value: Number) -> Tensor:
    """`t` at the start of a tensor of a larger shape, `value` elsewhere; differentiable."""
    return pad_to(t, shape, value)


def _ragged(rows: Sequence[Tensor], dims: Mapping[int, Dim], value: Number) -> PaddedValue:
    first = rows[0]
    agreed = SizeAgreement()
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
        if not agreed.bind(dim, lengths, f"dim {d}"):
            # What a hint doesn't fit has a bucket of its own.
            longest = max(*lengths, 1)
            dims = {**dims, d: Dim(f"{dim.name}_{d}_of_{longest}", max=longest, buckets=[longest])}
            agreed.bind(dims[d], lengths, f"dim {d}")
    distinct = list(dict.fromkeys(dims.values()))
    host = tuple(agreed.sizes[dim] for dim in distinct)
    buckets = tuple(dim.bucket(max(lengths)) for dim, lengths in zip(distinct, host, strict=True))  # type: ignore[arg-type]
    sizes = true_sizes(distinct, buckets, host, first.device)
    factors = list(static_dims(first.shape))
    for d, dim in dims.items():
        factors[d] = padded_dim(buckets[distinct.index(dim)], dim.symbol)
    shape = tuple(map(bucket_of, factors))
    padding = [ValidLength(d + 1, sizes.of(dim.symbol)) for d, dim in dims.items()]
    dense = pad_list(rows, (len(rows), *shape), padding, value)
    return PaddedValue(
        dense, (padded_dim(len(rows), rows_symbol()), *factors), sizes, None if value != value else value
    )


def true_sizes(
    dims: Sequence[Dim], buckets: Sequence[int], host: Sequence[HostSize], device: torch.device
) -> TrueSizes:
    """The sizes of some Dims as a tensor on a device."""
    values = torch.tensor(host, dtype=torch.int64)
    if device.type == "cuda":
        values = values.pin_memory().to(device, non_blocking=True)
    return TrueSizes(tuple(dim.symbol for dim in dims), tuple(buckets), values.to(device), tuple(host))


def _named(dims: Mapping[int, Dim | int], rank: int) -> dict[int, Dim]:
    named: dict[int, Dim] = {}
    for d, dim in dims.items():
        if not isinstance(d, int) or not -rank <= d < rank:
            raise ValueError(f"dim {d!r} to pad is none of a tensor with {rank} dims")
        if not isinstance(dim, Dim | int):
            raise TypeError(f"dim {d} is padded on a st.Dim or an int, the bucket size; got {dim!r}")
        named[d % rank] = dim if isinstance(dim, Dim) else Dim(f"dim{d % rank}", max=dim, buckets=[dim])
    if not named:
        raise ValueError("pad needs at least one dim: {dim: st.Dim(...)}")
    return named


def _repad(x: PaddedTensor, dims: Mapping[int, Dim | int]) -> PaddedTensor:
    """Padding twice on the same Dims changes nothing."""
    have = value_of(x)
    ragged = have.sizes is not None and have.sizes.rows is not None
    for d, dim in _named(dims, x.dim() - ragged).items():
        factors = have.dims[d + ragged]
        if isinstance(dim, Dim) and (len(factors) != 1 or factors[0].size != dim.symbol):
            raise RuleError(f"dim {d} of this PaddedTensor is padded on {factors}, not on {dim}; unpad it first")
    return x
