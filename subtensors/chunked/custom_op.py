"""A chunked program as one op that a compiler doesn't look into: its text, and the tensors and numbers that it reads.

The op runs the program as it runs without a compiler, on ChunkedTensors. The gradients of a number are computed with
it, for an upstream of one, and are further results of the op. Those of any other result, and in float16, which a loss
scale must reach before gradients are rounded, are computed at backward instead, by an op of their own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subtensors.chunked.chunked_tensor import ChunkedTensor, chunked_by
from subtensors.chunked.source_program import BREAK
from subtensors.dispatch.chunked.row_layout import Policy
from subtensors.dispatch.torch_internals.autograd import as_called_outside

Program = Callable[[Sequence[Tensor], Sequence[int], Sequence[float]], Any]


@functools.lru_cache(maxsize=256)
def _program(text: str) -> Program:
    """The function of a text: of tensors `t`, whole numbers `i` and other numbers `x`."""
    scope: dict[str, Any] = {
        "torch": torch,
        "F": F,
        "Tensor": Tensor,
        "autocast": torch.autocast,
        "put": put,
        "chunk": _chunk,
    }
    lines = ["def program(t, i, x):", *text.split(BREAK)]
    exec("\n    ".join(lines), scope)
    made: Program = scope["program"]
    return made


def put(x: Tensor, key: Any, value: Any) -> Tensor:
    """`x` after `x[key] = value`, in memory of its own."""
    written = x.clone()
    written[key] = value
    return written


def _chunk(x: Tensor, dim: int, *policy: Any) -> Any:
    return chunked_by(x, dim, Policy(*policy))


def _result(tensors: Sequence[Tensor], text: str, ints: Sequence[int], floats: Sequence[float]) -> Tensor:
    """Run the program and return its result; only the casts and modes that its text names apply, not the caller's."""
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        out = _program(text)(tensors, ints, floats)
    result: Tensor = out.realize() if isinstance(out, ChunkedTensor) else out
    return result


def _leaves(tensors: Sequence[Tensor], needs: Sequence[bool]) -> list[Tensor]:
    return [t.detach().requires_grad_(n) for t, n in zip(tensors, needs, strict=True)]


def _gradients(result: Tensor, leaves: Sequence[Tensor], upstream: Tensor) -> list[Tensor]:
    wanted = [t for t in leaves if t.requires_grad]
    if not result.requires_grad:
        return [torch.zeros_like(t) for t in wanted]
    found = torch.autograd.grad(result, wanted, upstream, allow_unused=True)
    own: list[Tensor] = []
    for t, g in zip(wanted, found, strict=True):
        own.append(_own(_laid_out_as(t, g), [upstream, *leaves, *own]))
    return own


def _laid_out_as(t: Tensor, gradient: Tensor | None) -> Tensor:
    """The gradient under the strides that the compiler was told."""
    if gradient is None:
        return torch.zeros_like(t)
    is_same = gradient.stride() == torch.empty_like(t, device="meta").stride()
    return gradient if is_same else torch.empty_like(t).copy_(gradient)


def _own(result: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """The result in memory of its own, as what an op gives has to be."""
    given = {t.untyped_storage().data_ptr() for t in tensors}
    return result.clone() if result.untyped_storage().data_ptr() in given else result


@torch.library.custom_op("subtensors::chunked_program", mutates_args=())
def chunked_program(
    tensors: list[Tensor],
    text: str,
    ints: list[int],
    floats: list[float],
    needs: list[bool],
    deferred: bool,
    sizes: list[int],
    dtype: torch.dtype,
) -> tuple[Tensor, list[Tensor]]:
    """Run a program, and return its result and those of its gradients that are computed now.

    Args:
        tensors: the tensors that it reads.
        text: its text; see `source_program.py`.
        ints, floats: the numbers that it reads.
        needs: for each tensor, whether its gradient is needed.
        deferred: whether gradients are computed at backward.
        sizes, dtype: those of its result, which is on the device of the first tensor.
    """
    now = [n and not deferred for n in needs]
    with as_called_outside(), torch.set_grad_enabled(any(now)):
        leaves = _leaves(tensors, now)
        result = _result(leaves, text, ints, floats)
        gradients = _gradients(result, leaves, torch.ones_like(result)) if any(now) else []
    return _own(result.detach().contiguous(), tensors), gradients


@chunked_program.register_fake
def _(
    tensors: list[Tensor],
    text: str,
    ints: list[int],
    floats: list[float],
    needs: list[bool],
    deferred: bool,
    sizes: list[int],
    dtype: torch.dtype,
) -> tuple[Tensor, list[Tensor]]:
    wanted = [t for t, n in zip(tensors, needs, strict=True) if n and not deferred]
    return tensors[0].new_empty(sizes, dtype=dtype), [torch.empty_like(t) for t in wanted]


@torch.library.custom_op("subtensors::chunked_program_gradients", mutates_args=())
def chunked_program_gradients(
    tensors: list[Tensor], text: str, ints: list[int], floats: list[float], needs: list[bool], upstream: Tensor
) -> list[Tensor]:
    """The gradients of a program for an upstream gradient of its result."""
    with as_called_outside(), torch.enable_grad():
        leaves = _leaves(tensors, needs)
        return _gradients(_result(leaves, text, ints, floats), leaves, upstream)


@chunked_program_gradients.register_fake
def _(
    tensors: list[Tensor], text: str, ints: list[int], floats: list[float], needs: list[bool], upstream: Tensor
) -> list[Tensor]:
    return [torch.empty_like(t) for t, n in zip(tensors, needs, strict=True) if n]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, list[Tensor]]) -> None:
    tensors, *ctx.program, ctx.needs, ctx.deferred, ctx.sizes, _ = inputs
    result, gradients = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*(tensors if ctx.deferred else gradients))
    fixed = [] if result.is_floating_point() else [result]
    ctx.mark_non_differentiable(*gradients, *fixed)


def _backward(ctx: Any, upstream: Tensor | None, *others: Any) -> tuple[Any, ...]:
    gradients: list[Tensor | None] = [None] * len(ctx.needs)
    if upstream is not None:
        kept = list(ctx.saved_tensors)
        if ctx.deferred:
            found = torch.ops.subtensors.chunked_program_gradients(kept, *ctx.program, ctx.needs, upstream)
        else:
            found = [_times(g, upstream) for g in kept]
        for place, gradient in zip((n for n, needed in enumerate(ctx.needs) if needed), found, strict=True):
            gradients[place] = gradient
    _, ints, floats = ctx.program
    # An empty list stands for tensors, each with its gradient.
    of_numbers: list[Any] = [None if numbers else [] for numbers in (ints, floats, ctx.sizes)]
    return gradients, None, *of_numbers[:2], None, None, of_numbers[2], None


def _times(gradient: Tensor, number: Tensor) -> Tensor:
    """The gradient times a number, which is not rounded to the gradient's dtype before."""
    return (gradient.to(number.dtype) * number).to(gradient.dtype) if gradient.itemsize == 2 else gradient * number


torch.library.register_autograd("subtensors::chunked_program", _backward, setup_context=_keep)
