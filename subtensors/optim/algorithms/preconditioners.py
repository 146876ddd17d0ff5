"""Shared by Shampoo and SOAP: sides of a parameter, second moments of rows and columns, step counts.

A parameter of two or more dimensions is seen as the matrix (shape[0], the rest); one of fewer has no sides. A side is
left out where it is longer than the group's `max_size`: its second moments would be a matrix of that many rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from subtensors.fused.fuse import fused
from subtensors.kernels.runtime.custom_ops import arithmetic_dtype
from subtensors.lists.tensor_list import TensorList
from subtensors.optim.algorithms.matrix_optimizer import by_shape

SIDES = ("left", "right")


def matrix_shape(p: Tensor) -> tuple[int, int]:
    """Rows and columns of a parameter of two or more dimensions."""
    return p.shape[0], p.numel() // max(p.shape[0], 1)


def sides_of(p: Tensor, max_size: float) -> tuple[str, ...]:
    """The sides of a parameter that are preconditioned.

    Example:
        >>> sides_of(torch.empty(10, 4, 5), max_size=12), sides_of(torch.empty(10), max_size=12)
        (('left',), ())
    """
    if p.dim() < 2:
        return ()
    return tuple(side for side, size in zip(SIDES, matrix_shape(p), strict=True) if 0 < size <= max_size)


def square(p: Tensor, side: str) -> Tensor:
    """Zeros for a matrix over one side of a parameter, in the dtype that its state is computed in."""
    size = matrix_shape(p)[SIDES.index(side)]
    return torch.zeros(size, size, device=p.device, dtype=arithmetic_dtype(p.dtype))


def host_count(p: Tensor) -> Tensor:
    """A count of steps on the CPU, where the host reads it to decide what a step does."""
    return torch.zeros((), dtype=torch.float32, device="cpu")


def parts_by_count(step: TensorList) -> dict[int, list[int]]:
    """Count one more step for each parameter, and return the parameters' indices by their count."""
    parts: dict[int, list[int]] = {}
    for i, count in enumerate(step.tensors):
        parts.setdefault(int(count.add_(1)), []).append(i)
    return parts


def select(x: Any, indices: Sequence[int]) -> Any:
    """The elements of a list at these indices; the list itself if they are all."""
    if x is None or len(indices) == len(x):
        return x
    return TensorList([x.tensors[i] for i in indices])


def as_matrices(x: Any) -> Any:
    """Each element seen as a matrix."""
    return x.like([t if t.dim() == 2 else t.reshape(matrix_shape(t)) for t in x.tensors])


def as_shaped(x: Any, like: TensorList) -> Any:
    """Matrices in the shapes of the parameters they came from."""
    return x.like([t.reshape(p.shape) for t, p in zip(x.tensors, like.tensors, strict=True)])


@fused
def widened(p: Tensor, g: Tensor, weight_decay: float | None) -> Tensor:
    """The gradient in the dtype that state is computed in, with the L2 penalty where there is one."""
    wide = arithmetic_dtype(p.dtype)
    g = g.to(wide)
    return g.clone() if weight_decay is None else g + weight_decay * p.to(wide)


@fused
def accumulate(total: Tensor, more: Tensor, beta: float, share: float) -> None:
    """total <- beta total + share more."""
    total.copy_(beta * total + share * more)


def accumulate_moment(moment: Any, side: str, matrices: Any, beta: float, share: float) -> None:
    """moment <- beta moment + share X X^T over rows, or X^T X over columns."""
    # The product has no name, so that it is freed after the call: it is as large as the state.
    accumulate(moment, by_shape(lambda x: x @ x.mT if side == "left" else x.mT @ x, matrices), beta, share)


@fused
def descend(p: Tensor, direction: Tensor, lr: float, decay: float | None) -> None:
    """p <- p - lr direction, then p <- p - lr decay p."""
    w = p.to(arithmetic_dtype(p.dtype))
    w = w - lr * direction.to(w.dtype)
    p.copy_(w if decay is None else w * (1 - lr * decay))
