"""Reductions and other composite ops, written in the few ops that have a formula of their own.

Torch decomposes most ops that are not in the table of formulas; these are ops that it does not decompose, because it
has kernels for them. Half precision is summed in float32, as torch's kernels do.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch._ops import OpOverload

from subtensors.kernels.runtime.custom_ops import arithmetic_dtype, define

aten = torch.ops.aten

Dims = int | list[int] | None


class DimensionError(NotImplementedError):
    """A reduction over some dimensions only: elements of different ranks have none in common."""


def _check_is_full(dim: Dims, keepdim: bool) -> None:
    """Raise DimensionError unless the reduction is over the whole tensor."""
    if (dim is not None and dim != []) or keepdim:
        raise DimensionError("it reduces over named dimensions; inside fused math a reduction is over the whole tensor")


def _add_up(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return aten.sum.default(x, dtype=dtype)  # type: ignore[no-any-return]


def _numel_of(x: Tensor) -> Tensor:
    return torch.ops.subtensors.numel(x)  # type: ignore[no-any-return]


def _sum(x: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    _check_is_full(dim, keepdim)
    return _add_up(x, dtype)


def _mean(x: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    _check_is_full(dim, keepdim)
    result = dtype or x.dtype
    return (_add_up(x.to(arithmetic_dtype(result))) / _numel_of(x)).to(result)


def _vector_norm(
    x: Tensor, order: float = 2, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    _check_is_full(dim, keepdim)
    result = dtype or x.dtype
    x = x.to(arithmetic_dtype(result))
    if order == 2:
        norm = (x * x).sum().sqrt()
    elif order == 1:
        norm = x.abs().sum()
    elif order == 0:
        norm = (x != 0).sum().to(x.dtype)
    elif order == float("inf"):
        norm = x.abs().amax()
    elif order == float("-inf"):
        norm = x.abs().amin()
    else:
        norm = (x.abs() ** order).sum() ** (1 / order)
    return norm.to(result)


def _wide_variance(x: Tensor, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False) -> Tensor:
    """The variance in the dtype of sums: its square root may fit in float16 where the variance overflows."""
    _check_is_full(dim, keepdim)
    if not (x.is_floating_point() or x.is_complex()):  # torch's check, which its meta function leaves out
        raise RuntimeError("std and var only support floating point and complex dtypes")
    wide = x.to(arithmetic_dtype(x.dtype))
    count = _numel_of(x)
    deviation = wide - wide.sum() / count
    degrees = count - (1 if correction is None else correction)
    return (deviation * deviation).sum() / degrees.clamp(min=0)


def _truth(dtype: torch.dtype) -> torch.dtype:
    """The dtype that torch's `any` and `all` return: uint8 for uint8, its first boolean type, else bool."""
    return torch.uint8 if dtype == torch.uint8 else torch.bool


EXPANSIONS: dict[OpOverload, Callable[..., Tensor]] = {
    aten.sum.dim_IntList: _sum,
    aten.mean.default: _mean,
    aten.mean.dim: _mean,
    aten.linalg_vector_norm.default: _vector_norm,
    aten.norm.Scalar: lambda x, p=2: _vector_norm(x, p),
    aten.var.correction: lambda x, *dim, **options: _wide_variance(x, *dim, **options).to(x.dtype),
    aten.std.correction: lambda x, *dim, **options: _wide_variance(x, *dim, **options).sqrt().to(x.dtype),
    aten.max.default: lambda x: aten.amax.default(x),
    aten.min.default: lambda x: aten.amin.default(x),
    aten.empty_like.default: lambda x, **options: aten.zeros_like.default(x, **options),
    aten.any.default: lambda x: (_add_up(x != 0) != 0).to(_truth(x.dtype)),
    aten.all.default: lambda x: (_add_up(x == 0) == 0).to(_truth(x.dtype)),
    aten.count_nonzero.default: lambda x, dim=None: _add_up(x != 0),
}
"""Overload -> the same math in simpler ops."""


def _numel(x: Tensor) -> Tensor:
    return torch.scalar_tensor(x.numel(), dtype=torch.int64, device=x.device)


# The number of elements of the tensor, as a number per tensor: the one fact about its shape that math may use.
define("numel", "Tensor x", "Tensor", _numel, _numel)
