"""Norms over all the tensors of a list, without waiting for the device."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch import Tensor

from subtensors.arguments import shown
from subtensors.dispatch.fused.fused_function import FusedFunction
from subtensors.dispatch.fused.tensor_columns import TensorColumn
from subtensors.lists.tensor_list import TensorList


def total_norm(tensors: object, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
    """Return the norm of all elements of all tensors, as if they were one vector.

    Args:
        tensors: real or complex floating-point tensors of any shapes and dtypes: a TensorList, or what one is made of.
        norm_type: the p of the p-norm; inf is the largest magnitude.
        error_if_nonfinite: raise when the norm is NaN or inf; that waits for the device.

    Returns:
        0-d tensor on the first tensor's device; 0 for an empty list.

    Raises:
        RuntimeError: the norm is not finite and `error_if_nonfinite` is set.

    Example:
        >>> import torch, subtensors as st
        >>> st.total_norm(st.TensorList([torch.tensor([3.0]), torch.tensor([[4.0]])]))
        tensor(5.)

    Source: `torch.nn.utils.get_total_norm`, with the same results.
    """
    return _total_norm(_elements("tensors", tensors), _order(norm_type), error_if_nonfinite)


@torch.no_grad()
def clip_grad_norm_(
    parameters: object, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale the gradients of all parameters so that their total norm is at most `max_norm`.

    Args:
        parameters: tensors whose `.grad` is scaled in place, those without one skipped: a TensorList, or what one
            is made of, such as `model.parameters()`.
        max_norm: the largest total norm.
        norm_type: the p of the p-norm.
        error_if_nonfinite: raise when the norm is NaN or inf; that waits for the device.

    Returns:
        The total norm before scaling, 0-d.

    Raises:
        RuntimeError: the norm is not finite and `error_if_nonfinite` is set.

    Example:
        >>> import torch, subtensors as st
        >>> p = torch.zeros(2, requires_grad=True)
        >>> p.grad = torch.tensor([3.0, 4.0])
        >>> st.clip_grad_norm_(st.TensorList([p]), max_norm=1.0), p.grad
        (tensor(5.), tensor([0.6000, 0.8000]))

    Source: `torch.nn.utils.clip_grad_norm_`, with the same results.
    """
    is_number = isinstance(max_norm, int | float) or (isinstance(max_norm, Tensor) and max_norm.dim() == 0)
    if not is_number or isinstance(max_norm, bool):
        raise TypeError(f"max_norm is a number, got {shown(max_norm)}")
    max_norm = max_norm if isinstance(max_norm, Tensor) else float(max_norm)
    gradients = [t.grad for t in _elements("parameters", parameters) if t.grad is not None]
    norm = _total_norm(gradients, _order(norm_type), error_if_nonfinite)
    coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    if torch.compiler.is_compiling():
        for g in gradients:
            g.mul_(coefficient.to(g.device))
        return norm
    for device in dict.fromkeys(g.device for g in gradients):
        _scale(TensorColumn(g for g in gradients if g.device == device), coefficient.to(device))
    return norm


@torch.no_grad()
def _total_norm(tensors: list[Tensor], norm_type: float, error_if_nonfinite: bool) -> Tensor:
    if not tensors:
        return torch.tensor(0.0)
    norms: Iterable[Tensor]
    if torch.compiler.is_compiling():
        norms = [torch.linalg.vector_norm(_as_real(t, norm_type), norm_type) for t in tensors]
    else:
        norms = _norm(float(norm_type))(TensorColumn(_as_real(t, norm_type) for t in tensors))
    total: Tensor = torch.linalg.vector_norm(torch.stack([n.to(tensors[0].device) for n in norms]), norm_type)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"the total norm of order {norm_type} is {total.item()}, not finite; "
            "pass error_if_nonfinite=False to scale by it all the same"
        )
    return total


def _order(norm_type: float) -> float:
    try:
        return float(norm_type)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor of several elements
        raise TypeError(f"norm_type is a number, got {shown(norm_type)}") from None


def _elements(name: str, tensors: object) -> list[Tensor]:
    if torch.compiler.is_compiling() and isinstance(tensors, list | tuple):
        return list(tensors)
    try:
        return (tensors if isinstance(tensors, TensorList) else TensorList(tensors)).tensors
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from None


def _as_real(tensor: Tensor, norm_type: float) -> Tensor:
    """Return real numbers of the same norm: the real and imaginary parts for order 2, otherwise the magnitudes."""
    if not tensor.is_complex():
        return tensor
    return torch.view_as_real(tensor.resolve_conj()) if norm_type == 2 else tensor.abs()


@functools.cache
def _norm(order: float) -> FusedFunction:
    return FusedFunction(lambda x: torch.linalg.vector_norm(x, order))


_scale = FusedFunction(lambda gradient, coefficient: gradient.mul_(coefficient))
