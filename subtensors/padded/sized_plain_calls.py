"""A mode in which calls without a PaddedTensor take padded sizes as true sizes too: `torch.arange(x.shape[1])`.

An int has no `__torch_function__`, so what a program makes of sizes alone would be plain tensors of the bucket's size.
In this mode, which is on while a bucketed program runs, factories make PaddedTensors of the true sizes, views and
slices of plain tensors end there, and arithmetic computes with them. Whatever has no rule gets the bucket's number, as
without the mode.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from subtensors.dispatch.ops.errors import RuleError
from subtensors.dispatch.ops.tree import Args, Kwargs, PyTree, tree_has
from subtensors.dispatch.padded.padded_size import PaddedSize, dim_of, find_sizes, sizes_with, true_expression
from subtensors.dispatch.padded.padded_value import PaddedValue
from subtensors.dispatch.sizes.dim_factors import bucket_of
from subtensors.dispatch.sizes.expressions import added, floor_divided, largest, multiplied
from subtensors.padded.autograd import wrap_with_grad
from subtensors.padded.padded_tensor import PaddedTensor
from subtensors.padded.sized_calls import run_on_plain_tensor, run_with_sizes

_FILLED: dict[Callable[..., PyTree], float | None] = {
    torch.zeros: 0,
    torch.ones: 1,
    torch.empty: None,
    torch.rand: None,
    torch.randn: None,
}
"""Factories of a list of sizes, or of as many arguments, and what their results hold."""


class SizedPlainCalls(TorchFunctionMode):
    """Run calls without a PaddedTensor at the true sizes that their numbers stand for."""

    def __torch_function__(
        self, func: Callable[..., PyTree], types: Collection[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> PyTree:
        """Run one call."""
        kwargs = kwargs or {}
        if tree_has(PaddedSize, (args, kwargs)) and not any(issubclass(kind, PaddedTensor) for kind in types):
            try:
                found = _at_true_sizes(func, args, {**kwargs})
            except RuleError:
                found = NotImplemented
            if found is not NotImplemented:
                return found
        return func(*args, **kwargs)


def _at_true_sizes(func: Callable[..., PyTree], args: Args, kwargs: Kwargs) -> PyTree:
    """Run a call at true sizes; return NotImplemented for a function that isn't known to take them.

    Raises:
        RuleError: no rule takes the size.
    """
    if any(size.sizes.rows is not None for size in find_sizes((args, kwargs))):
        return NotImplemented
    if func is functional.interpolate:
        return run_with_sizes(func, args, kwargs)
    if func is torch.arange:
        return _arange(*args, **kwargs)
    if func in (torch.tensor, torch.as_tensor) and not tree_has(PaddedSize, (args[1:], kwargs)):
        return _number(*args, **kwargs) if len(args) == 1 and isinstance(args[0], PaddedSize) else NotImplemented
    if func in _FILLED:
        given = kwargs.pop("size") if "size" in kwargs else args
        return _made(func, given, _FILLED[func], kwargs)
    if func is torch.full and not tree_has(PaddedSize, args[1:]):
        return _full(*args, **kwargs)
    return run_on_plain_tensor(func, args, kwargs) if args and isinstance(args[0], Tensor) else NotImplemented


def _made(func: Callable[..., Tensor], given: Sequence[PyTree], fill: float | None, kwargs: Kwargs) -> Tensor:
    """Call a factory of a list of sizes."""
    sizes: list[int] = list(given[0]) if len(given) == 1 and not isinstance(given[0], int) else list(given)
    values = sizes_with(None, *sizes)
    dims = tuple(dim_of(size, values) for size in sizes)
    return wrap_with_grad(PaddedValue(func(list(map(bucket_of, dims)), **kwargs), dims, values, fill))


def _full(size: Sequence[int], fill_value: float, **kwargs: PyTree) -> Tensor:
    def full(shape: list[int], **options: PyTree) -> Tensor:
        return torch.full(shape, fill_value, **options)

    is_number = not isinstance(fill_value, Tensor)
    return _made(full, [size], fill_value if is_number else None, kwargs)


def _arange(*bounds: int, **kwargs: PyTree) -> PyTree:
    """Return the numbers from a start to an end that are padded sizes, a step apart."""
    given = [*bounds, *(kwargs.pop(name) for name in ("start", "end", "step") if name in kwargs)]
    start, end, step = (0, *given, 1) if len(given) == 1 else (*given, 1)[:3]
    if isinstance(step, float) and step.is_integer() and kwargs.get("dtype") is not None:
        step = int(step)
    if not all(isinstance(n, int) for n in (start, end, step)) or isinstance(step, PaddedSize) or step == 0:
        return NotImplemented
    values = sizes_with(None, start, end)
    span = added(true_expression(end), multiplied(-1, true_expression(start)))
    count = largest(0, floor_divided(added(multiplied(span, step // abs(step)), abs(step) - 1), abs(step)))
    dim = dim_of(1, values) if values is None else dim_of(PaddedSize(0, count, values), values)
    numbers = torch.arange(bucket_of(dim), **kwargs)
    numbers = numbers if step == 1 else numbers * step
    if not (type(start) is int and start == 0):
        numbers = numbers + (_on_device(start) if isinstance(start, PaddedSize) else start)
    return wrap_with_grad(PaddedValue(numbers, (dim,), values))


def _number(size: PaddedSize, **kwargs: PyTree) -> Tensor:
    """Return a size as a tensor, with options of `torch.tensor`."""
    like = torch.tensor(0, **kwargs)
    return size.on_device().to(like.dtype, copy=True) if like.device.type == "cpu" else size.on_device().to(like)


def _on_device(number: int) -> Tensor | int:
    return number.on_device() if isinstance(number, PaddedSize) else number
