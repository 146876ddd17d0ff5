"""Inference of the sizes that a program accepts, from the branches that it takes on them."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from subtensors.arguments import shown
from subtensors.dispatch.ops.errors import SizeError
from subtensors.dispatch.ops.plain_types import LAZY_TYPES, MAPPED_TYPES, MASKED_TYPES
from subtensors.sizes.dims import Dim

if TYPE_CHECKING:
    from subtensors.dispatch.sizes.symbolic_sizes import ConcreteSizes
    from subtensors.sizes.accepted_sizes import AcceptedSizes, ConsideredSizes
    from subtensors.sizes.real_calls import Class

logger = logging.getLogger("subtensors.sizes")

MAX_SIZE = 512
"""The largest size that is considered for a Dim without a max."""

MAX_POINTS = 1 << 20
"""The most combinations of sizes considered; beyond it, the largest sizes of each Dim except its max are left out."""

MAX_CLASSES = 65
"""The most paths through the program that are searched for: one for each size from 0 to 64."""

DimsOf = Mapping[int, "Dim | str"]


def infer_sizes(
    fn: Callable[..., object], args: Sequence[object], dims: Sequence[DimsOf | None] | Mapping[str, DimsOf]
) -> AcceptedSizes:
    """Find the sizes that a program accepts, from its own guards: divisibility, bounds, equalities.

    The program runs on tensors without values, once for each path that sizes can take through it: the conditions met in
    a run tell which sizes would take the same path, and the first size that would not is tried next. Calls of empty
    tensors, which torch checks otherwise without values, are made once more on real ones. Errors that depend on values
    rather than sizes, such as an index out of range, are not found.

    Args:
        fn: a function or a module, whose parameters and buffers stay as they are; it should change no other tensor.
        args: example arguments. Their dtypes and devices count, and the sizes of dimensions that are not named.
        dims: which dimensions vary: for each argument `{dimension: Dim}` or None, or the same by parameter name. A
            string stands for a Dim of sizes from 0 to 512. One Dim in several places is one size.

    Returns:
        The sizes as sympy sets, with a minimal example of each class.

    Raises:
        SizeError: an argument is no tensor or has no such dimension, or two Dims have one name.
        ValueError: no dimension is named.
        TypeError: `fn` is no function, or an argument or its dims are of another type than these.

    Example:
        >>> import subtensors as st
        >>> def heads(x):
        ...     return x.view(-1, 8) if x.shape[0] > 16 else x
        >>> found = st.infer_sizes(heads, [torch.zeros(24)], [{0: st.Dim("n", max=64)}])
        >>> found.sizes
        Union(Range(0, 17, 1), Range(24, 72, 8))
        >>> [(c.example, c.refusal) for c in found.classes]
        [({'n': 0}, None), ({'n': 17}, "RuntimeError: shape '[-1, 8]' is invalid ..."), ({'n': 24}, None)]

    Source: the guards are those of `torch.export`; the search is that of Godefroid et al., "DART: directed automated
    random testing", 2005.
    """
    from subtensors.dispatch.sizes.shape_guards import trace_path
    from subtensors.sizes.accepted_sizes import ConsideredSizes
    from subtensors.sizes.real_calls import RealCalls

    places = _places(fn, args, dims)
    known = _distinct(places)
    grid = ConsideredSizes(known, _axes(known))

    def arguments(symbolic: ConcreteSizes) -> list[object]:
        return [
            _fake_argument(arg, {d: dim.name for d, dim in place.items()}, symbolic) if isinstance(arg, Tensor) else arg
            for arg, place in zip(args, places, strict=True)
        ]

    real_calls = RealCalls(fn, arguments, grid)
    paths: list[Class] = []
    unknown = np.ones(grid.shape, dtype=bool)
    while unknown.any() and len(paths) < MAX_CLASSES:
        point = np.unravel_index(int(np.argmax(unknown)), unknown.shape)
        path = trace_path(fn, arguments, grid.at(point))
        where = grid.where_all(path.conditions) & unknown
        where[point] = True  # also where a condition is not evaluated, or doubtful
        unknown &= ~where
        paths += real_calls.decide(path, where)
    if unknown.any():
        logger.info("%d classes of sizes found, and more not searched for", MAX_CLASSES)
    is_cut = any(len(axis) <= int(axis[-1] - axis[0]) for axis in grid.axes)
    if is_cut:
        logger.info("the Dims have more combinations of sizes than are looked at: %s", ", ".join(map(str, known)))
    return _summary(grid, paths, is_complete=real_calls.is_complete and not (is_cut or unknown.any()))


def _summary(grid: ConsideredSizes, paths: Sequence[Class], is_complete: bool) -> AcceptedSizes:
    import sympy

    from subtensors.sizes.accepted_sizes import AcceptedSizes, SizeClass

    classes = []
    for path, where in paths:
        condition = grid.condition(path.conditions, where)
        sizes, example = grid.size_set(condition, where), grid.at(np.argwhere(where)[0])
        classes.append(SizeClass(condition, sizes, example, path.refusal, path.is_decided))
    accepted = np.logical_or.reduce([w for path, w in paths if path.refusal is None] + [np.zeros(grid.shape, bool)])
    candidates = [c for path, _ in paths if path.refusal is None for c in path.conditions]
    # The accepted sizes do not meet the conditions of the refused ones.
    candidates += [sympy.Not(c) for path, _ in paths if path.refusal is not None for c in path.conditions]
    condition = grid.condition(list(dict.fromkeys(candidates)), accepted)
    is_complete = is_complete and all(path.is_decided for path, _ in paths)
    sizes = grid.size_set(condition, accepted)
    return AcceptedSizes(grid.dims, tuple(classes), condition, sizes, is_complete, grid.axes, accepted)


def _places(
    fn: Callable[..., object], args: Sequence[object], dims: Sequence[DimsOf | None] | Mapping[str, DimsOf]
) -> list[dict[int, Dim]]:
    """The varying dimensions of each argument, counted from the front."""
    if not callable(fn):
        raise TypeError(f"infer_sizes takes a function or a module as fn, got {shown(fn)}")
    if not isinstance(args, list | tuple):
        raise TypeError(f"args are a list of example arguments, got {shown(args)}")
    if not isinstance(dims, list | tuple | Mapping):
        raise TypeError(f"dims are a list with an entry for each argument, or a dict by their names; got {shown(dims)}")
    if isinstance(dims, Mapping):
        function = fn.forward if isinstance(fn, torch.nn.Module) else fn
        names = list(inspect.signature(function).parameters)[: len(args)]
        unknown = [name for name in dims if name not in names]
        if unknown:
            raise SizeError(f"there is no argument {unknown[0]!r}; the arguments given are {', '.join(names)}")
        dims = [dims.get(name) for name in names]
    if len(dims) != len(args):
        raise SizeError(f"{len(args)} arguments take {len(args)} entries of dims, one each; got {len(dims)}")
    places: list[dict[int, Dim]] = []
    for number, (arg, named) in enumerate(zip(args, dims, strict=True)):
        if not isinstance(arg, Tensor):
            if named:
                raise SizeError(f"argument {number} has varying dimensions but is no tensor: {type(arg).__name__}")
            places.append({})
            continue
        if not (named is None or isinstance(named, Mapping)):
            raise TypeError(f"the dims of argument {number} are {{dimension: st.Dim(...)}} or None, got {shown(named)}")
        if type(arg) in {*MASKED_TYPES, *LAZY_TYPES, *MAPPED_TYPES} or arg.layout is not torch.strided or arg.is_nested:
            raise TypeError(f"argument {number} is a plain dense tensor, got {shown(arg)}")
        for dim in (named or {}).values():
            if not isinstance(dim, Dim | str):
                raise TypeError(f"a dimension of argument {number} varies by a st.Dim or a name, got {shown(dim)}")
        wrong = [d for d in named or () if type(d) is not int or not -arg.dim() <= d < arg.dim()]
        if wrong:
            raise SizeError(f"argument {number} of shape {tuple(arg.shape)} has no dimension {wrong[0]!r}")
        places.append({d % arg.dim(): Dim(v) if isinstance(v, str) else v for d, v in (named or {}).items()})
    return places


def _distinct(places: Sequence[Mapping[int, Dim]]) -> tuple[Dim, ...]:
    found: dict[str, Dim] = {}
    for place in places:
        for dim in place.values():
            if found.setdefault(dim.name, dim) != dim:
                raise SizeError(f"two Dims are named {dim.name!r}: {found[dim.name]} and {dim}; make one and share it")
    if not found:
        raise ValueError("infer_sizes takes at least one varying dimension, got none in dims")
    return tuple(found.values())


def _axes(dims: Sequence[Dim]) -> tuple[np.ndarray, ...]:
    """The sizes of each Dim that are considered."""
    max_sizes = int(MAX_POINTS ** (1 / len(dims)))
    axes = []
    for dim in dims:
        largest = dim.max if dim.max is not None else max(dim.min, MAX_SIZE)
        axis = np.arange(dim.min, largest + 1)
        axes.append(axis if len(axis) <= max_sizes else np.append(axis[: max_sizes - 1], largest))
    return tuple(axes)


def _fake_argument(tensor: Tensor, names: Mapping[int, str], symbolic: ConcreteSizes) -> Tensor:
    """A tensor without values, contiguous, some of whose sizes are symbols."""
    size = [symbolic.numbers[names[d]] if d in names else n for d, n in enumerate(tensor.shape)]
    return torch.empty(size, dtype=tensor.dtype, device=tensor.device, requires_grad=tensor.requires_grad)
