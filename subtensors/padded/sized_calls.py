"""Calls that get a padded size as a number: `x[..., : h.shape[-1]]`, `x.expand(2, n)`, `x / n`.

A padded size is an int, and torch's parser would make the bucket's number of it. So the functions here skip the parser,
and their rules get the sizes themselves. Where a size is a value, as in a division, the true size takes its place, as
a tensor on the device. A function of a PaddedTensor that is not listed runs at the true sizes (`fallback.py`).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from subtensors.dispatch.ops.errors import RuleError
from subtensors.dispatch.ops.tree import Args, Kwargs, PyTree, tree_has
from subtensors.dispatch.padded.padded_size import (
    PaddedSize,
    dim_of,
    find_sizes,
    map_sizes,
    sizes_with,
    true_expression,
)
from subtensors.dispatch.padded.padded_value import PaddedValue
from subtensors.dispatch.padded.size_conditions import noting
from subtensors.dispatch.padded.spatial import resampled
from subtensors.dispatch.sizes.dim_factors import bucket_of
from subtensors.dispatch.sizes.expressions import added, floor_divided, largest, multiplied
from subtensors.padded.autograd import unwrap_with_grad, wrap_with_grad
from subtensors.padded.fast_path import SHAPE_OPS, run_op
from subtensors.padded.host_constants import HostConstants
from subtensors.padded.inplace import assign_at_index
from subtensors.padded.padded_tensor import PaddedTensor

aten = torch.ops.aten

OPS: dict[Callable[..., PyTree], OpOverload] = {
    **dict.fromkeys([torch.narrow, Tensor.narrow], aten.narrow.default),
    **dict.fromkeys([torch.select, Tensor.select], aten.select.int),
    **dict.fromkeys([torch.broadcast_to, Tensor.broadcast_to], aten.expand.default),
    Tensor.new_full: aten.new_full.default,
    functional.pad: aten.pad.default,
}
"""Functions whose arguments are those of one op."""

FILLED: dict[Callable[..., PyTree], float | None] = {
    torch.zeros: 0,
    torch.ones: 1,
    torch.empty: None,
    torch.rand: None,
    torch.randn: None,
}
"""Factories of a list of sizes, or of as many arguments, and what their results hold."""

OF_BUCKETS: frozenset[Callable[..., PyTree]] = frozenset(
    [functional.layer_norm, functional.rms_norm, torch.layer_norm, torch.rms_norm, Tensor.unflatten, torch.unflatten]
)
"""Functions that compare sizes with those of the buckets, and do not compute with them."""

VALUES = frozenset(
    """add sub subtract mul multiply div divide true_divide floor_divide pow remainder fmod rsub eq ne lt le gt ge
    maximum minimum where masked_fill clamp clamp_min clamp_max clip less greater less_equal greater_equal not_equal
    float_power __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __div__ __rdiv__ __pow__
    __rpow__ __floordiv__ __rfloordiv__ __mod__ __rmod__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __iadd__ __isub__
    __imul__ __itruediv__ __idiv__""".split()
)
"""The names of functions in which a size is a value, like any other number."""


def run_with_sizes(func: Callable[..., PyTree], args: Args, kwargs: Kwargs) -> PyTree:
    """Run a function that has a padded size among its arguments, of padded or plain tensors.

    Raises:
        RuleError: no rule takes the size.
    """
    name = getattr(func, "__name__", "")
    if func is functional.interpolate:
        return _resampled(*args, **kwargs)
    if func is torch.unravel_index:
        return _unraveled(*args, **kwargs)
    if args and isinstance(args[0], Tensor):
        if func is Tensor.__getitem__:
            return _indexed(*args)
        if func is Tensor.__setitem__ and isinstance(args[0], PaddedTensor):
            return assign_at_index(*args[:2], *map_sizes(args[2:], PaddedSize.on_device))
        if func in SHAPE_OPS:
            if len(args) > 1 and isinstance(args[1], int):
                args = args[0], args[1:]
            return _run(SHAPE_OPS[func], *args, **kwargs)
        if func in OPS:
            fills = (*args[2:], *kwargs.values()) if func in (Tensor.new_full, functional.pad) else ()
            if any(isinstance(x, PaddedSize) for x in fills):
                raise RuleError(f"{name} takes a padded size as a size, and not as the value to fill with")
            return _run(OPS[func], *args, **kwargs)
    pool = re.fullmatch(r"(avg|max)_pool([123])d", name)
    if pool and len(args) == 2 and {name: x for name, x in kwargs.items() if x} in ({}, {"dilation": 1}):
        pooled = _pooled_over_all(*args, is_mean=pool[1] == "avg", count=int(pool[2]))
        if pooled is not None:
            return pooled
    if func in OF_BUCKETS:
        return func(*map_sizes(args, int), **map_sizes(kwargs, int))
    if name in VALUES or name.removesuffix("_") in VALUES:
        return func(*map_sizes(args, PaddedSize.on_device), **map_sizes(kwargs, PaddedSize.on_device))
    raise RuleError(f"PaddedTensor has no rule for {name} with a padded size among its arguments")


def _pooled_over_all(x: Tensor, kernel: int | Sequence[int], is_mean: bool, count: int) -> Tensor | None:
    """Pool the last dims over a window of their own sizes; None for another window."""
    window = [kernel] * count if isinstance(kernel, int) else [*kernel]
    if list(map(true_expression, window)) != list(map(true_expression, x.shape[-count:])):
        return None
    if is_mean:
        return x.mean([*range(-count, 0)], keepdim=True)
    # The gradient goes to one of several equal maxima, as in a pool.
    return x.flatten(-count).max(-1).values[(..., *[None] * count)]


def _unraveled(indices: Tensor, shape: int | Sequence[int]) -> tuple[Tensor, ...]:
    """Return the coordinates of flat indices in a shape of which some sizes are padded."""
    if indices.is_floating_point() or indices.is_complex() or indices.dtype is torch.bool:
        raise RuleError(f"unravel_index takes no {indices.dtype}")
    found, rest = [], indices.long()
    for number in map(_on_device, [shape] if isinstance(shape, int) else reversed(shape)):
        found.append(rest % number)
        rest = rest // number
    return tuple(reversed(found))


def _resampled(
    x: Tensor,
    size: int | Sequence[int] | None = None,
    scale_factor: object = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Tensor:
    """Run `F.interpolate` to sizes of which some are padded, of any tensor."""
    if size is None or scale_factor is not None or recompute_scale_factor:
        raise RuleError("PaddedTensor has no rule for interpolate with a padded size and a factor")
    target = [size] * (x.dim() - 2) if isinstance(size, int) else [*size]
    return wrap_with_grad(resampled(unwrap_with_grad(x), target, mode, align_corners, antialias))


def _run(op: OpOverload, *args: PyTree, **kwargs: PyTree) -> Tensor:
    """Run the rule of an op that returns one tensor, of which an argument may be the base."""
    out: Tensor = run_op(op, functools.partial(_run, op), args, kwargs)
    return out


def _indexed(x: Tensor, index: PyTree) -> PyTree:
    """Return `x[index]`, with the slices and positions that are padded sizes taken first, one dim at a time."""
    parts = [*index] if isinstance(index, tuple) else [index]
    taken = sum(_dims_taken(part) for part in parts)
    rest, d = [], 0
    for part in parts:
        if not tree_has(PaddedSize, part):
            d += x.dim() - taken if part is Ellipsis else _dims_taken(part)
            rest.append(part)
            continue
        taken -= 1
        if isinstance(part, slice):
            x = _run(aten.slice.Tensor, x, d, part.start, part.stop, 1 if part.step is None else part.step)
            rest.append(slice(None))
            d += 1
            taken += 1
        elif isinstance(part, PaddedSize):
            x = _run(aten.select.int, x, d, part)
        else:
            raise RuleError("PaddedTensor has no rule for a list of positions with a padded size in it")
    is_whole = all(part is Ellipsis or (isinstance(part, slice) and part == slice(None)) for part in rest)
    return x if is_whole else x[tuple(rest)]


def _dims_taken(part: PyTree) -> int:
    """The number of dims that a part of an index is about."""
    if isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8):
        return part.dim()
    return 0 if part is None or part is Ellipsis or isinstance(part, bool) else 1


class SizedPlainCalls(TorchFunctionMode):
    """A mode in which calls without a PaddedTensor take padded sizes as true sizes too: `torch.arange(x.shape[1])`.

    An int has no `__torch_function__`, so what a program makes of sizes alone would be plain tensors of the bucket's
    size. In this mode, which is on while a bucketed program runs, factories make PaddedTensors of the true sizes, views
    and slices of plain tensors end there, and arithmetic computes with them. Whatever has no rule gets the bucket's
    number, as without the mode. `torch.tensor(0.5, device="cuda")` is filled on the device. The dtypes of results are
    noted.

    Args:
        constants: of a run that is captured; None for another.
    """

    def __init__(self, constants: HostConstants | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._constants = constants

    def _run(self, func: Callable[..., PyTree], args: Args, kwargs: Kwargs) -> PyTree:
        return func(*args, **kwargs) if self._constants is None else self._constants.run(func, args, kwargs)

    def __torch_function__(
        self, func: Callable[..., PyTree], types: Collection[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> PyTree:
        """Run one call."""
        kwargs = kwargs or {}
        if func is torch.tensor and len(args) == 1 and type(args[0]) in (bool, int, float, complex):
            return self._run(torch.full, ((), args[0]), kwargs)  # the same value without a copy from the host
        if tree_has(PaddedSize, (args, kwargs)) and not any(issubclass(kind, PaddedTensor) for kind in types):
            try:
                found = _at_true_sizes(func, args, {**kwargs})
            except RuleError:
                found = NotImplemented
            if found is not NotImplemented:
                return found
            noting.number_read()
        elif func is Tensor.__len__ and isinstance(args[0], PaddedTensor):
            noting.number_read()
        out = self._run(func, args, kwargs)
        if noting.into is not None and isinstance(out, Tensor):
            dtype = out._dense.dtype if isinstance(out, PaddedTensor) else out.dtype
            noting.into.dtypes.update(dtype if isinstance(dtype, list) else [dtype])  # one for each of a TensorList
        return out


def _at_true_sizes(func: Callable[..., PyTree], args: Args, kwargs: Kwargs) -> PyTree:
    """Run a call at true sizes; return NotImplemented for a function that isn't known to take them.

    Raises:
        RuleError: no rule takes the size.
    """
    if any(size.sizes.rows is not None for size in find_sizes((args, kwargs))):
        return NotImplemented
    if func is torch.arange:
        return _arange(*args, **kwargs)
    if func in (torch.tensor, torch.as_tensor) and not tree_has(PaddedSize, (args[1:], kwargs)):
        return _numbers(*args, **kwargs) if len(args) == 1 and kwargs.keys() <= {"dtype", "device"} else NotImplemented
    if func in FILLED:
        given = kwargs.pop("size") if "size" in kwargs else args
        return _made(func, given, FILLED[func], kwargs)
    if func is torch.full and not tree_has(PaddedSize, args[1:]):
        return _full(*args, **kwargs)
    return run_with_sizes(func, args, kwargs)


def _made(func: Callable[..., Tensor], given: Sequence[PyTree], fill: float | None, kwargs: Kwargs) -> Tensor:
    """Call a factory of a list of sizes."""
    sizes: list[int] = list(given[0]) if len(given) == 1 and not isinstance(given[0], int) else list(given)
    values = sizes_with(None, *sizes)
    dims = tuple(dim_of(size, values) for size in sizes)
    return wrap_with_grad(PaddedValue(func(list(map(bucket_of, dims)), **kwargs), dims, values, fill))


def _full(size: Sequence[int], fill_value: float, **kwargs: PyTree) -> Tensor:
    fill = None if isinstance(fill_value, Tensor) else fill_value
    return _made(functools.partial(torch.full, fill_value=fill_value), [size], fill, kwargs)


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


def _numbers(sizes: PyTree, **kwargs: PyTree) -> PyTree:
    """Return a size, or a list of sizes and other integers, as a tensor, with options of `torch.tensor`."""
    if isinstance(sizes, PaddedSize):
        return _number(sizes, **kwargs)
    if not isinstance(sizes, list | tuple) or any(not isinstance(n, int) or isinstance(n, bool) for n in sizes):
        return NotImplemented
    options = {"dtype": torch.int64, **kwargs}
    each = [_number(n, **kwargs) if isinstance(n, PaddedSize) else torch.full((), n, **options) for n in sizes]
    return torch.stack(each)


def _number(size: PaddedSize, **kwargs: PyTree) -> Tensor:
    """Return a size as a tensor, with options of `torch.tensor`."""
    like = torch.empty((), **{"dtype": torch.int64, **kwargs})  # torch.tensor copies from the host: no graph could
    return size.on_device().to(like.dtype, copy=True) if like.device.type == "cpu" else size.on_device().to(like)


def _on_device(number: int) -> Tensor | int:
    return number.on_device() if isinstance(number, PaddedSize) else number
