"""Second derivatives of the masked ops: gradients of their gradients.

No kernel is worth having for them. The gradient of a masked op is written as a differentiable function of its arguments
in torch ops, which autograd differentiates when it is asked to, and once more if need be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from subtensors.kernels.padded.masked_norm import masked_norm_reference
from subtensors.kernels.padded.masked_reduction import masked_reduction_reference
from subtensors.kernels.padded.masked_softmax import masked_softmax_backward_reference
from subtensors.kernels.runtime.valid_lengths import unpack_lengths

_SAVED = object()
"""In place of a tensor that autograd keeps."""


def differentiable(op: str, formula: Callable[..., tuple[Tensor, ...]]) -> None:
    """Register the gradient of an op, that of a formula for it.

    Args:
        op: its name.
        formula: takes the arguments of the op and gives its results, in torch ops.
    """

    def context(ctx: Any, inputs: Any, output: Any) -> None:
        listed = [x if _is_list(x) else [x] for x in inputs]
        ctx.save_for_backward(*(t for x in listed for t in x if isinstance(t, Tensor)))
        ctx.inputs = [_SAVED if isinstance(x, Tensor) else [_SAVED] * len(x) if _is_list(x) else x for x in inputs]

    def gradient(ctx: Any, *gradients: Tensor) -> Any:
        with torch.enable_grad():
            # One may be a function of another: of each only what the formula makes of it counts here.
            aliases = (t.view_as(t) for t in ctx.saved_tensors)
            inputs = [_restored(x, aliases) for x in ctx.inputs]
            outs = formula(*inputs)
        followed = {i: x for i, x in enumerate(inputs) if isinstance(x, Tensor) and x.requires_grad}
        pairs = [(out, g) for out, g in zip(outs, gradients, strict=True) if out.requires_grad]
        found = torch.autograd.grad(
            [out for out, _ in pairs],
            list(followed.values()),
            [g for _, g in pairs],
            create_graph=torch.is_grad_enabled(),
            allow_unused=True,
        )
        by_place = dict(zip(followed, found, strict=True))
        return tuple([None] * len(x) if _is_list(x) else by_place.get(i) for i, x in enumerate(inputs))

    torch.library.register_autograd(f"subtensors::{op}", gradient, setup_context=context)


def _is_list(x: Any) -> bool:
    """Return whether this is a list of tensors for torch."""
    return isinstance(x, (list, tuple)) and all(t is None or isinstance(t, Tensor) for t in x)


def _restored(x: Any, saved: Iterator[Tensor]) -> Any:
    """An argument with its tensors back."""
    return [next(saved) for _ in x] if isinstance(x, list) and _SAVED in x else next(saved) if x is _SAVED else x


def softmax_gradient(
    gradient: Tensor, y: Tensor, dim: int, d: list[int], s: list[Tensor], b: list[int], is_log: bool
) -> tuple[Tensor]:
    """Return the input gradient of a softmax from its result `y`, through which it depends on the input."""
    return (masked_softmax_backward_reference(gradient, y, dim, unpack_lengths(d, s, b), is_log),)


def reduction_gradient(
    gradient: Tensor, x: Tensor, out: Tensor, aux: Tensor, counts: Tensor, kind: str, dims: list[int],
    d: list[int], s: list[Tensor], b: list[int], p: float, correction: float,
) -> tuple[Tensor]:  # fmt: skip
    """Return the input gradient of a reduction, recomputed from `x` so that it is differentiable in `x`."""
    x = _followed(x)
    again = masked_reduction_reference(x, kind, dims, unpack_lengths(d, s, b), p, correction).out
    (gx,) = torch.autograd.grad(again, [x], gradient, create_graph=True)
    return (gx,)


def norm_gradient(
    gradient: Tensor, x: Tensor, mean: Tensor, scale: Tensor, weight: Tensor | None, normalized: int, eps: float,
    d: list[int], s: list[Tensor], b: list[int], is_rms: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of a norm's input, weight and bias; without a weight, those for a weight of ones."""
    shape = x.shape[x.dim() - normalized :]
    x = _followed(x)
    factor, shift = _followed(mean.new_ones(shape) if weight is None else weight), _followed(mean.new_zeros(shape))
    y = masked_norm_reference(x, normalized, factor, shift, eps, unpack_lengths(d, s, b), 0.0, is_rms).y
    gx, *rest = torch.autograd.grad(y, [x, factor, shift], gradient, create_graph=True)
    weight_gradient, bias_gradient = (g.to(mean.dtype) for g in rest)
    return gx, weight_gradient, bias_gradient


def _followed(t: Tensor) -> Tensor:
    """Return a tensor that requires grad: this one if it does, otherwise a detached alias of it."""
    return t if t.requires_grad else t.detach().requires_grad_()
