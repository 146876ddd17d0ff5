"""A tensor that stands for a value of a region: what its user holds, and what the ops beneath autograd see."""

from __future__ import annotations

import sys
from collections import OrderedDict
from typing import Any, NoReturn

import torch
from torch import Tensor

from subtensors.dispatch.chunked.aliasing import AliasRef
from subtensors.dispatch.ops.errors import RuleError
from subtensors.dispatch.ops.plain_types import PLAIN_TYPES
from subtensors.dispatch.torch_internals.autograd import hook_of_a_leaf, passes_gradients_on


class RecordedTensor(torch.Tensor):
    """A tensor without memory whose value is in its cell."""

    _cell: AliasRef

    def realize(self) -> Tensor:
        """The value as a plain tensor."""
        raise NotImplementedError


def cell_of(x: RecordedTensor) -> AliasRef:
    """The cell of what a user holds.

    Raises:
        RuleError: it is the result of an autograd.Function, whose backward the region knows nothing of.
    """
    with torch._C.DisableTorchFunctionSubclass():
        function = x.grad_fn
    if function is None:
        return x._cell
    if passes_gradients_on(function) and x._cell.base is not None:
        return x._cell.base
    raise RuleError(
        f"a ChunkedTensor came out of {function.name().removesuffix('Backward')}, an autograd.Function, and its "
        f"gradient would not go through that function's backward: give it the tensor's realize()"
    )


def whole_of(x: Tensor) -> Tensor:
    """A tensor that is spread over processes (a DTensor), gathered; another tensor itself.

    Its gradient is taken to be the same in each process, as torch's own `full_tensor` has it, and each keeps its part.
    """
    if type(x) in PLAIN_TYPES or "torch.distributed.tensor" not in sys.modules or not hasattr(x, "full_tensor"):
        return x
    whole: Tensor = x.full_tensor()
    return whole


def shell(kind: type[RecordedTensor], cell: AliasRef) -> RecordedTensor:
    """A tensor of the cell, as the ops beneath autograd see it."""
    return _made(kind, cell, False)


def outer(kind: type[RecordedTensor], cell: AliasRef) -> RecordedTensor:
    """A tensor of the cell, as its user sees it."""
    return _made(kind, cell, cell.needs_grad)


def _made(kind: type[RecordedTensor], cell: AliasRef, needs_grad: bool) -> RecordedTensor:
    sizes, strides, dtype, device = cell.geometry()
    with torch._C.DisableTorchFunctionSubclass():
        out: RecordedTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[assignment]
            kind, sizes, strides=strides, dtype=dtype, device=device, requires_grad=needs_grad
        )
        if needs_grad:
            hook_of_a_leaf(out, _REFUSING)
    out._cell = cell
    return out


def show_gradient(x: RecordedTensor) -> None:
    """Set whether the tensor requires grad, as its cell does, and refuse gradients that autograd itself would bring."""
    needs = x._cell.needs_grad
    with torch._C.DisableTorchFunctionSubclass():
        if needs != x.requires_grad:
            x.requires_grad_(needs)
            if needs:
                hook_of_a_leaf(x, _REFUSING)


def _unreachable(grad: Tensor) -> NoReturn:
    raise RuleError(
        "a gradient reached a ChunkedTensor from outside its region, through an autograd.Function of your own perhaps: "
        "give that function the tensor's realize()"
    )


_REFUSING: OrderedDict[int, Any] = OrderedDict({0: _unreachable})
