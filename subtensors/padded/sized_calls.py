"""Calls that get a padded size as a number: `x[..., : h.shape[-1]]`, `x.expand(2, n)`, `x / n`.

A padded size is an int, and torch's parser would make the bucket's number of it. So the functions here skip the parser,
and their rules get the sizes themselves. Where a size is a value, as in a division, the true size takes its place, as
a tensor on the device. A function that is not listed runs at the true sizes (`fallback.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn import functional

from subtensors.dispatch.ops.errors import RuleError
from subtensors.dispatch.ops.tree import Args, Kwargs, PyTree, tree_has, tree_map_only
from subtensors.dispatch.padded import rules
from subtensors.dispatch.padded.padded_size import PaddedSize, map_sizes, true_expression
from subtensors.dispatch.padded.padded_value import PaddedValue, unpadded_value
from subtensors.dispatch.padded.resampling import resampled
from subtensors.padded.autograd import unwrap_with_grad, wrap_with_grad
from subtensors.padded.inplace import assign_at_index
from subtensors.padded.padded_tensor import PaddedTensor
from subtensors.padded.views import remember_views

aten = torch.ops.aten

SHAPE_OPS: dict[Callable[..., PyTree], OpOverload] = {
    Tensor.view: aten.view.default,
    Tensor.reshape: aten.reshape.default,
    torch.reshape: aten.reshape.default,
    Tensor.expand: aten.expand.default,
    Tensor.repeat: aten.repeat.default,
    Tensor.new_zeros: aten.new_zeros.default,
    Tensor.new_ones: aten.new_ones.default,
    Tensor.new_empty: aten.new_empty.default,
}
"""Functions of a list of sizes, or of as many arguments, and the op that each is."""

OPS: dict[Callable[..., PyTree], OpOverload] = {
    **dict.fromkeys([torch.narrow, Tensor.narrow], aten.narrow.default),
    **dict.fromkeys([torch.select, Tensor.select], aten.select.int),
    **dict.fromkeys([torch.broadcast_to, Tensor.broadcast_to], aten.expand.default),
    Tensor.new_full: aten.new_full.default,
    functional.pad: aten.pad.default,
}
"""Functions whose arguments are those of one op."""

OF_BUCKETS: frozenset[Callable[..., PyTree]] = frozenset(
    [
        functional.layer_norm,
        functional.rms_norm,
        torch.layer_norm,
        torch.rms_norm,
        Tensor.unflatten,
        torch.unflatten,
    ]
)
"""Functions that compare sizes with those of the buckets, and do not compute with them."""

WHOLE_MEANS: dict[Callable[..., PyTree], int] = {
    functional.avg_pool1d: 1,
    functional.avg_pool2d: 2,
    functional.avg_pool3d: 3,
}
"""Functions that pool the last dims, and how many: over all of these, the result is their mean."""

WHOLE_MAXIMA: dict[Callable[..., PyTree], int] = {
    functional.max_pool1d: 1,
    functional.max_pool2d: 2,
    functional.max_pool3d: 3,
    torch.max_pool1d: 1,
    torch.max_pool2d: 2,
    torch.max_pool3d: 3,
}
"""The same, of maxima."""

_VALUES = frozenset(
    """add sub subtract mul multiply div divide true_divide floor_divide pow remainder fmod rsub eq ne lt le gt ge
    maximum minimum where masked_fill clamp clamp_min clamp_max clip less greater less_equal greater_equal not_equal
    float_power __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __div__ __rdiv__ __pow__
    __rpow__ __floordiv__ __rfloordiv__ __mod__ __rmod__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __iadd__ __isub__
    __imul__ __itruediv__ __idiv__""".split()
)


def run_with_sizes(func: Callable[..., PyTree], args: Args, kwargs: Kwargs) -> PyTree:
    """Run a function that has a PaddedTensor and a padded size among its arguments.

    Raises:
        RuleError: no rule takes the size.
    """
    name = getattr(func, "__name__", "")
    if func is functional.interpolate:
        return _resampled(*args, **kwargs)
    if args and isinstance(args[0], PaddedTensor):
        if func is Tensor.__getitem__:
            return _indexed(*args)
        if func is Tensor.__setitem__ and not tree_has(PaddedSize, args[2:]):
            return assign_at_index(*args)
        if func in SHAPE_OPS:
            if len(args) > 1 and isinstance(args[1], int):
                args = args[0], args[1:]
            return _run(SHAPE_OPS[func], args, kwargs)
        if func in OPS:
            return _run(OPS[func], args, kwargs)
    is_pool = (func in WHOLE_MEANS or func in WHOLE_MAXIMA) and len(args) == 2
    if is_pool and {name: x for name, x in kwargs.items() if x} in ({}, {"dilation": 1}):
        pooled = _pooled_over_all(func, *args)
        if pooled is not None:
            return pooled
    if func in OF_BUCKETS:
        return func(*map_sizes(args, int), **map_sizes(kwargs, int))
    if name in _VALUES or name.removesuffix("_") in _VALUES:
        return func(*map_sizes(args, PaddedSize.on_device), **map_sizes(kwargs, PaddedSize.on_device))
    raise RuleError(f"PaddedTensor has no rule for {name} with a padded size among its arguments")


def run_on_plain_tensor(func: Callable[..., PyTree], args: Args, kwargs: Kwargs) -> PyTree:
    """Run a function that has a padded size among its arguments, and no PaddedTensor.

    Returns:
        The result; NotImplemented for a function that isn't known to take sizes.

    Raises:
        RuleError: no rule takes the size.
    """
    name = getattr(func, "__name__", "")
    if func is Tensor.__getitem__:
        return _indexed(*args)
    if func in SHAPE_OPS:
        listed = (args[0], args[1:]) if len(args) > 1 and isinstance(args[1], int) else args
        return _run(SHAPE_OPS[func], listed, kwargs)
    if func in OPS:
        return _run(OPS[func], args, kwargs)
    if name in _VALUES or name.removesuffix("_") in _VALUES:
        return func(*map_sizes(args, PaddedSize.on_device), **map_sizes(kwargs, PaddedSize.on_device))
    return NotImplemented


def _pooled_over_all(func: Callable[..., PyTree], x: Tensor, kernel: int | Sequence[int]) -> Tensor | None:
    """Pool the last dims over a window of their own sizes; None for another window."""
    count = WHOLE_MEANS.get(func) or WHOLE_MAXIMA[func]
    window = [kernel] * count if isinstance(kernel, int) else [*kernel]
    if list(map(true_expression, window)) != list(map(true_expression, x.shape[-count:])):
        return None
    if func in WHOLE_MEANS:
        return x.mean([*range(-count, 0)], keepdim=True)
    # The gradient goes to one of several equal maxima, as in a pool.
    return x.flatten(-count).max(-1).values[(..., *[None] * count)]


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
    return wrap_with_grad(resampled(_value(x), target, mode, align_corners, antialias))


def _run(op: OpOverload, args: Args, kwargs: Kwargs) -> Tensor:
    """Run the rule of an op that returns one tensor, of which the first argument may be the base."""
    inner_args, inner_kwargs = tree_map_only(Tensor, _value, (args, kwargs))
    with torch._C.DisableTorchFunctionSubclass():
        out: PaddedValue = rules.run(op, inner_args, inner_kwargs)
    result: Tensor = wrap_with_grad(out)
    if out.view:
        is_plain_view = out.view == "alias" and not isinstance(result, PaddedTensor)

        def view(base: Tensor) -> Tensor:
            return _run(op, (base, *args[1:]), kwargs)

        remember_views(view, args[:1], {}, result, [result] if is_plain_view else [])
    return result


def _value(t: Tensor) -> PaddedValue:
    return unwrap_with_grad(t) if isinstance(t, PaddedTensor) else unpadded_value(t)


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
            x = _run(aten.slice.Tensor, (x, d, part.start, part.stop, 1 if part.step is None else part.step), {})
            rest.append(slice(None))
            d += 1
            taken += 1
        elif isinstance(part, PaddedSize):
            x = _run(aten.select.int, (x, d, part), {})
        else:
            raise RuleError("PaddedTensor has no rule for a list of positions with a padded size in it")
    is_whole = all(part is Ellipsis or (isinstance(part, slice) and part == slice(None)) for part in rest)
    return x if is_whole else x[tuple(rest)]


def _dims_taken(part: PyTree) -> int:
    """The number of dims that a part of an index is about."""
    if isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8):
        return part.dim()
    return 0 if part is None or part is Ellipsis or isinstance(part, bool) else 1
