"""A chunked program as one op that a compiler treats as opaque: its source, and the tensors and numbers that it reads.

The op runs the program eagerly, on ChunkedTensors. The gradients of a number are computed with it, for an upstream
gradient of one, and are further results of the op. Those of any other result, and in float16, where a loss scale must
apply before gradients are rounded, are computed at backward instead, by an op of their own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx

from subtensors.chunked.lazy_tensor import LazyTensor
from subtensors.chunked.source_program import BREAK
from subtensors.dispatch.ops.lazy_storage import fill_padding, mask_gradient
from subtensors.dispatch.ops.tree import PyTree
from subtensors.dispatch.torch_internals.autograd import reenable_autograd

Program: TypeAlias = Callable[[Sequence[Tensor], Sequence[int], Sequence[float]], Tensor]
"""A function of tensors, whole numbers and other numbers."""


def put(x: Tensor, key: PyTree, value: PyTree) -> Tensor:
    """Return `x` after `x[key] = value`, in memory of its own."""
    written = x.clone()
    written[key] = value
    return written


def copied(x: Tensor, source: Tensor) -> Tensor:
    """Return `x` after `x.copy_(source)`."""
    return source.to(x.dtype).expand(x.shape)


def overwritten(x: Tensor, numbers: Tensor) -> Tensor:
    """Return `x` after a write of other numbers that takes no part in its gradient, in memory of its own."""
    written = x.clone()
    with torch.no_grad():
        written.copy_(numbers)
    return written


PROGRAM_SCOPE: dict[str, object] = {
    "torch": torch,
    "F": F,
    "Tensor": Tensor,
    "autocast": torch.autocast,
    "put": put,
    "copied": copied,
    "overwritten": overwritten,
    "fill_padding": fill_padding,
    "mask_gradient": mask_gradient,
}
"""The names that the source of a program uses; `chunked_tensor.py` adds `chunk`."""


def chunk_in_program(x: Tensor, *where: int | bool | None) -> Tensor:
    """Return a tensor, chunked eagerly along a dim by the fields of a policy."""
    chunk: Callable[..., Tensor] = PROGRAM_SCOPE["chunk"]  # type: ignore[assignment]
    return chunk(x, *where)


@functools.lru_cache(maxsize=256)
def _program(source: str) -> Program:
    """Compile the source of a program to a function of tensors `t`, whole numbers `i` and other numbers `x`."""
    scope: dict[str, PyTree] = dict(PROGRAM_SCOPE)
    lines = ["def program(t, i, x):", *source.split(BREAK)]
    exec("\n    ".join(lines), scope)
    program: Program = scope["program"]
    return program


def _result(tensors: Sequence[Tensor], source: str, ints: Sequence[int], floats: Sequence[float]) -> Tensor:
    """Run the program and return its result, under the casts and modes that its source names, not the caller's."""
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        out = _program(source)(tensors, ints, floats)
    return out.realize() if isinstance(out, LazyTensor) else out


def _leaves(tensors: Sequence[Tensor], needs: Sequence[bool]) -> list[Tensor]:
    return [t.detach().requires_grad_(n) for t, n in zip(tensors, needs, strict=True)]


def _gradients(result: Tensor, leaves: Sequence[Tensor], upstream: Tensor) -> list[Tensor]:
    inputs = [t for t in leaves if t.requires_grad]
    if not result.requires_grad:
        return [torch.zeros_like(t) for t in inputs]
    found = torch.autograd.grad(result, inputs, upstream, allow_unused=True)
    own: list[Tensor] = []
    for t, g in zip(inputs, found, strict=True):
        own.append(_own(_with_strides_of(t, g), [upstream, *leaves, *own]))
    return own


def _with_strides_of(t: Tensor, gradient: Tensor | None) -> Tensor:
    """Return the gradient with the strides that the compiler was told."""
    if gradient is None:
        return torch.zeros_like(t)
    is_same = gradient.stride() == torch.empty_like(t, device="meta").stride()
    return gradient if is_same else torch.empty_like(t).copy_(gradient)


def _own(result: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """Return the result in memory of its own, as the result of an op has to be."""
    given = {t.untyped_storage().data_ptr() for t in tensors}
    return result.clone() if result.untyped_storage().data_ptr() in given else result


@torch.library.custom_op("subtensors::chunked_program", mutates_args=())
def chunked_program(
    tensors: list[Tensor],
    source: str,
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
        source: its source; see `source_program.py`.
        ints, floats: the numbers that it reads.
        needs: for each tensor, whether its gradient is needed.
        deferred: whether gradients are computed at backward.
        sizes, dtype: those of its result, which is on the device of the first tensor.
    """
    now = [n and not deferred for n in needs]
    with reenable_autograd(), torch.set_grad_enabled(any(now)):
        leaves = _leaves(tensors, now)
        result = _result(leaves, source, ints, floats)
        gradients = _gradients(result, leaves, torch.ones_like(result)) if any(now) else []
    return _own(result.detach().contiguous(), tensors), gradients


@chunked_program.register_fake
def _(tensors: list[Tensor], *others: PyTree) -> tuple[Tensor, list[Tensor]]:
    *_, needs, deferred, sizes, dtype = others
    inputs = [t for t, n in zip(tensors, needs, strict=True) if n and not deferred]
    return tensors[0].new_empty(sizes, dtype=dtype), [torch.empty_like(t) for t in inputs]


@torch.library.custom_op("subtensors::chunked_program_gradients", mutates_args=())
def chunked_program_gradients(
    tensors: list[Tensor], source: str, ints: list[int], floats: list[float], needs: list[bool], upstream: Tensor
) -> list[Tensor]:
    """Compute the gradients of a program for an upstream gradient of its result."""
    with reenable_autograd(), torch.enable_grad():
        leaves = _leaves(tensors, needs)
        return _gradients(_result(leaves, source, ints, floats), leaves, upstream)


@chunked_program_gradients.register_fake
def _(tensors: list[Tensor], *others: PyTree) -> list[Tensor]:
    return [torch.empty_like(t) for t, n in zip(tensors, others[-2], strict=True) if n]


class _ProgramContext(FunctionCtx):
    """The state that forward keeps for backward: the saved tensors are the gradients, or the inputs if deferred."""

    saved_tensors: tuple[Tensor, ...]
    program: tuple[str, list[int], list[float]]
    needs: list[bool]
    deferred: bool
    sizes: list[int]


def _setup_context(
    ctx: _ProgramContext,
    inputs: tuple[list[Tensor], str, list[int], list[float], list[bool], bool, list[int], torch.dtype],
    output: tuple[Tensor, list[Tensor]],
) -> None:
    tensors, source, ints, floats, ctx.needs, ctx.deferred, ctx.sizes, _ = inputs
    ctx.program = source, ints, floats
    result, gradients = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*(tensors if ctx.deferred else gradients))
    fixed = [] if result.is_floating_point() else [result]
    ctx.mark_non_differentiable(*gradients, *fixed)


def _backward(ctx: _ProgramContext, upstream: Tensor | None, *others: object) -> tuple[PyTree, ...]:
    gradients: list[Tensor | None] = [None] * len(ctx.needs)
    if upstream is not None:
        saved = list(ctx.saved_tensors)
        if ctx.deferred:
            found = torch.ops.subtensors.chunked_program_gradients(saved, *ctx.program, ctx.needs, upstream)
        else:
            found = [_times(g, upstream) for g in saved]
        for place, gradient in zip((n for n, needed in enumerate(ctx.needs) if needed), found, strict=True):
            gradients[place] = gradient
    # An empty list is taken for a list of tensors, whose gradients are a list.
    ints, floats, sizes = (None if x else list[Tensor]() for x in (*ctx.program[1:], ctx.sizes))
    return gradients, None, ints, floats, None, None, sizes, None


def _times(gradient: Tensor, number: Tensor) -> Tensor:
    """Multiply a gradient by a number in the number's dtype, and round once."""
    return (gradient.to(number.dtype) * number).to(gradient.dtype) if gradient.itemsize == 2 else gradient * number


torch.library.register_autograd("subtensors::chunked_program", _backward, setup_context=_setup_context)
