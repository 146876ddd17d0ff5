"""The choice of how each element runs, from its tensors' types, devices, dtypes and layouts.

Elements with the same key run together, in one group of a plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor

from subtensors.dispatch.fused.bound_call import interprets_kernels
from subtensors.dispatch.fused.tensor_columns import BlockScales, BroadcastColumn, Columns
from subtensors.dispatch.ops.plain_types import PLAIN_TYPES
from subtensors.kernels.fused.lowering import DTYPES
from subtensors.kernels.fused.program import Parameter, Shape
from subtensors.kernels.runtime.custom_ops import is_dense

NOT_STRIDED = "an element is not a plain strided tensor"

_layout = attrgetter("layout")
_properties = attrgetter("device", "dtype", "layout", "shape")


@dataclass(frozen=True)
class ExecutionKey:
    """The properties that all elements of one group share."""

    reason: str = ""
    """The reason to call the function itself; empty when the traced program will do."""
    device: str = "cpu"
    parameters: tuple[Parameter, ...] = ()
    triton: bool = False
    copies: bool = False


def group_elements(columns: Columns) -> dict[ExecutionKey, list[int]]:
    """The indices of the elements by execution key, in order; elements that are alike are examined once."""
    alike: dict[tuple[object, ...], list[int]] = {}
    for index, row in enumerate(zip(*map(_metadata, columns), strict=True)):
        alike.setdefault(row, []).append(index)
    groups: dict[ExecutionKey, list[int]] = {}
    for indices in alike.values():
        groups.setdefault(execution_key([c[indices[0]] for c in columns], columns), []).extend(indices)
    return {key: sorted(indices) for key, indices in groups.items()}


def _metadata(column: Sequence[Tensor]) -> list[tuple[object, ...]]:
    """For each tensor of a column, everything that its execution key depends on."""
    if isinstance(column, BroadcastColumn):
        return _metadata(column[:1]) * len(column)
    strides: Iterable[tuple[int, ...]] = map(Tensor.stride, column)
    if set(map(_layout, column)) != {torch.strided}:
        strides = [t.stride() if t.layout is torch.strided else () for t in column]
    lazy = map(Tensor.is_conj, column), map(Tensor.is_neg, column)
    return list(zip(map(type, column), map(_properties, column), strides, *lazy, strict=True))


def execution_key(row: Sequence[Tensor], columns: Columns) -> ExecutionKey:
    """The execution key of the element with these tensors."""
    if any(type(t) not in PLAIN_TYPES or t.layout != torch.strided for t in row):
        return ExecutionKey(NOT_STRIDED)
    if any(map(Tensor.is_conj, row)) or any(map(Tensor.is_neg, row)):
        return ExecutionKey("an element is a conjugated or negated view")
    on_host = [
        t.dim() == 0 and t.device.type == "cpu" and isinstance(c, BroadcastColumn)
        for t, c in zip(row, columns, strict=True)
    ]
    devices = {t.device for t, host in zip(row, on_host, strict=True) if not host} or {torch.device("cpu")}
    if len(devices) > 1:
        return ExecutionKey(reason="an element's tensors are on several devices")
    shapes = [_granularity(t, c) for t, c in zip(row, columns, strict=True)]
    sized = [t for t, shape in zip(row, shapes, strict=True) if shape is Shape.PER_ELEMENT]
    if any(t.shape != sized[0].shape for t in sized):
        return ExecutionKey(reason="an element's tensors have several shapes")
    expanded = [_expanded_dim(t) if shape is Shape.PER_ELEMENT else "" for t, shape in zip(row, shapes, strict=True)]
    dense = [t for t, shape, e in zip(row, shapes, expanded, strict=True) if shape is Shape.PER_ELEMENT and not e]
    if not dense or not all(map(Tensor.is_contiguous, dense)):
        expanded, dense = [""] * len(row), sized
    device = devices.pop()
    triton = device.type == "cuda" or (device.type == "cpu" and interprets_kernels())
    parameters = tuple(
        Parameter(f"x{i}", t.dtype, shapes[i], expanded[i], on_host=on_host[i] and device.type != "cpu")
        for i, t in enumerate(row)
    )
    triton = triton and all(p.dtype in DTYPES for p in parameters)
    alike = all(t.stride() == dense[0].stride() for t in dense) and (not dense or is_dense(dense[0]))
    return ExecutionKey("", str(device), parameters, triton, copies=triton and not alike)


def _granularity(t: Tensor, column: Sequence[Tensor]) -> Shape:
    """The granularity of a tensor's numbers."""
    if isinstance(column, BlockScales):
        return Shape.PER_BLOCK
    return Shape.PER_ELEMENT if t.dim() else Shape.PER_TENSOR


def _expanded_dim(t: Tensor) -> str:
    """The dim, "row" or "column", over which a tensor expands one value of contiguous matrices; "" for neither."""
    for kind, dim in (("row", -1), ("column", -2)):
        if t.dim() > 1 and t.shape[dim] > 1 and t.stride(dim) == 0 and t.select(dim, 0).is_contiguous():
            return kind
    return ""
