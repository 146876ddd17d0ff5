"""Tensors of one shape as one tensor with a leading dimension, so that a batched call takes them all at once.

Parts of one arena that follow each other at equal distances already are such a tensor: no copy is made of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def stacked(tensors: Sequence[Tensor]) -> Tensor:
    """The tensors along a new first dimension, without a copy where they lie at equal distances in one storage.

    Args:
        tensors: at least one; all of one shape, dtype and device.

    Returns:
        (len(tensors), *shape). Whether it shares memory with the tensors is not promised.

    Example:
        >>> arena = torch.arange(12.0)
        >>> parts = [arena[0:4].view(2, 2), arena[6:10].view(2, 2)]
        >>> stacked(parts)[1].data_ptr() == parts[1].data_ptr()
        True
        >>> stacked([torch.ones(2), torch.zeros(2)])
        tensor([[1., 1.],
                [0., 0.]])
    """
    first = tensors[0]
    if len(tensors) == 1:
        return first.unsqueeze(0)
    step = _distance(tensors)
    if step is None:
        return torch.stack(list(tensors))
    return first.as_strided((len(tensors), *first.shape), (step, *first.stride()), first.storage_offset())


def _distance(tensors: Sequence[Tensor]) -> int | None:
    """The distance in elements from each tensor to the next; None when a stack of them takes a copy."""
    first = tensors[0]
    addresses = list(map(Tensor.data_ptr, tensors))
    step = addresses[1] - addresses[0]
    reach = sum((n - 1) * s for n, s in zip(first.shape, first.stride(), strict=True)) + 1
    is_even = addresses == [addresses[0] + i * step for i in range(len(tensors))]
    if not is_even or not first.numel() or step % first.element_size() or step < reach * first.element_size():
        return None
    # Neighbours in memory may still be two allocations, and a view of one must not reach into the other.
    storage = first.untyped_storage()._cdata
    if any(t.untyped_storage()._cdata != storage or t.stride() != first.stride() for t in tensors):
        return None
    return None if any(t.requires_grad and torch.is_grad_enabled() for t in tensors) else step // first.element_size()


def shapes_of(columns: Sequence[Sequence[Tensor]]) -> list[list[int]]:
    """The places of the elements whose tensors are alike in shape, dtype and device, a list for each kind."""
    kinds: dict[Any, list[int]] = {}
    for i, row in enumerate(zip(*columns, strict=True)):
        kinds.setdefault(tuple([(t.shape, t.dtype, t.device) for t in row]), []).append(i)
    return list(kinds.values())


def run_by_shape(function: Callable[..., Any], columns: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """Call a function of stacked tensors once for each shape.

    Args:
        function: takes a stack of each column, (n, *shape), and returns a tensor, or a tuple of tensors, each with n
            as its first dimension.
        columns: one tensor an element each.

    Returns:
        For each tensor that the function returns, its part for each element, in order.

    Example:
        >>> squares = [torch.eye(2), torch.ones(3, 3), 2 * torch.eye(2)]
        >>> [t.tolist() for t in run_by_shape(lambda x: x.diagonal(dim1=1, dim2=2).sum(1), [squares])[0]]
        [2.0, 3.0, 4.0]
    """
    results: list[list[Any]] = []
    for places in shapes_of(columns):
        returned = function(*[stacked([column[i] for i in places]) for column in columns])
        parts = returned if isinstance(returned, tuple) else (returned,)
        results = results or [[None] * len(columns[0]) for _ in parts]
        for result, part in zip(results, parts, strict=True):
            for i, tensor in zip(places, part.unbind(), strict=True):
                result[i] = tensor
    return results
