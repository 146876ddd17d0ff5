"""The padded dims of a program's arguments, as given to `st.bucketed`, and example calls that warm up each bucket."""

from __future__ import annotations

import inspect
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from subtensors.arguments import shown
from subtensors.bucketed.call_key import flatten, flatten_argument_objects, has_parts, is_part_of, unflatten
from subtensors.bucketed.call_spec import LeafDims
from subtensors.counts import counted
from subtensors.dispatch.ops.errors import SizeError
from subtensors.dispatch.ops.plain_types import MAPPED_TYPES
from subtensors.dispatch.ops.tree import Args, Kwargs, PyTree
from subtensors.padded.padded_tensor import PaddedTensor
from subtensors.sizes.dims import Dim


class ArgumentDims:
    """The padded dims of a program's arguments.

    Args:
        program: the function or module.
        dims: for each argument, by name or position, its padded dims: `{1: seq}`; for a container the same for every
            tensor in it, or a dict or list like it. Padded dims alone hold for every tensor among the arguments.

    Raises:
        TypeError, ValueError: `dims` is none of these, or names an argument that the program doesn't take.
    """

    def __init__(self, program: Callable[..., object], dims: Mapping[Any, object]) -> None:
        if not isinstance(dims, Mapping) or not dims:
            raise TypeError(f"dims are given by argument, such as {{'input_ids': {{1: seq}}}}; got {dims!r}")
        self.everywhere = _padded_dims(dims) if _is_padded_dims(dims) else None
        self.names, self.positional, takes_any, takes_more = _parameter_names(program)
        self.by_name: dict[str | int, PyTree] = {}
        for key, given in {} if self.everywhere else dims.items():
            if isinstance(key, str) and not takes_any and key not in self.names:
                raise ValueError(f"dims name an argument {key!r}, and {_name(program)} takes {', '.join(self.names)}")
            if not isinstance(key, (str, int)) or isinstance(key, bool):
                raise TypeError(f"an argument is named by a str or its position; got {key!r}")
            if isinstance(key, int) and not (0 <= key < len(self.positional) or (takes_more and key >= 0)):
                takes = f"{counted(len(self.positional), 'argument')} by position"
                raise ValueError(f"dims name the argument at position {key}, and {_name(program)} takes {takes}")
            name = self.positional[key] if isinstance(key, int) and key < len(self.positional) else key
            self.by_name[name] = _checked(given, f"argument {key!r}")
        self.distinct: dict[str, Dim] = {}
        for dim in _all_dims(self.everywhere or self.by_name):
            if self.distinct.setdefault(dim.name, dim) != dim:
                raise SizeError(f"two Dims are named {dim.name!r}: {self.distinct[dim.name]} and {dim}")

    def not_given(self, args: Args, kwargs: Kwargs) -> str:
        """Return a note on a named argument that the program has no parameter for, and that a call lacks; else ""."""
        lacking = [name for name in self.by_name if isinstance(name, str) and name not in (*self.names, *kwargs)]
        if not lacking:
            return ""
        given = ", ".join([*self.positional[: len(args)], *kwargs]) or "arguments by position"
        return f"dims name an argument {lacking[0]!r}, which is not given: the call has {given}"

    def of_leaves(self, args: Args, kwargs: Kwargs) -> list[LeafDims]:
        """Return for each leaf of a call its place and its padded dims, in the order of `flatten`.

        Raises:
            ValueError: the dims of a container name something that it does not hold, or a leaf lacks a dim.
            TypeError: they name an object that is no container, or a leaf that is no dense tensor.
        """
        found: list[LeafDims] = []
        named = [(self.positional[i] if i < len(self.positional) else i, x) for i, x in enumerate(args)]
        for name, x in [*named, *kwargs.items()]:
            given = self.everywhere or self.by_name.get(name)
            place = name if isinstance(name, str) else f"argument {name}"
            opened = flatten_argument_objects(x)
            if given and not self.everywhere and has_parts(x) and _parts(opened) is None:
                raise TypeError(
                    f"dims name {place}, a {type(x).__name__} whose tensors are not seen: make it a dataclass or a "
                    f"pytree (torch.utils._pytree.register_pytree_node), or pass its tensors"
                )
            found += _leaf_dims(opened, given, place)
        return found


def _is_padded_dims(given: object) -> TypeGuard[Mapping[int, Dim]]:
    return (
        isinstance(given, Mapping)
        and bool(given)
        and all(
            isinstance(d, int) and not isinstance(d, bool) and isinstance(dim, (Dim, int)) for d, dim in given.items()
        )
    )


def _padded_dims(given: Mapping[int, Dim | int]) -> dict[int, Dim]:
    return {d: dim if isinstance(dim, Dim) else Dim(f"dim{d}", max=dim, buckets=[dim]) for d, dim in given.items()}


def _checked(given: PyTree, place: str) -> PyTree:
    """Return a pytree of padded dims with every one given as a Dim."""
    if given is None or (isinstance(given, Mapping) and not given):
        return None
    if _is_padded_dims(given):
        return _padded_dims(given)
    if isinstance(given, Mapping):
        return {key: _checked(value, f"{place}[{key!r}]") for key, value in given.items()}
    if isinstance(given, (list, tuple)):
        return [_checked(value, f"{place}[{i}]") for i, value in enumerate(given)]
    raise TypeError(f"{place} is padded on {{dim: st.Dim(...)}} or a pytree of those; got {given!r}")


def _all_dims(given: PyTree) -> list[Dim]:
    if isinstance(given, Dim):
        return [given]
    parts = given.values() if isinstance(given, Mapping) else given if isinstance(given, list) else ()
    return [dim for part in parts for dim in _all_dims(part)]


def _leaf_dims(x: PyTree, given: PyTree, place: str) -> Iterator[LeafDims]:
    """Yield the place and the padded dims of each leaf of an argument.

    Args:
        x: the argument, or a part of it.
        given: the padded dims of all its tensors, or of those of its parts that a dict or list names.
        place: of it, in words.
    """
    parts = _parts(x)
    if parts is None:
        yield place, _dims_of_tensor(x, given, place) if isinstance(x, Tensor) and _is_padded_dims(given) else {}
        return
    is_of_all = given is None or _is_padded_dims(given)
    named = {} if is_of_all else dict(given.items() if isinstance(given, Mapping) else enumerate(given))
    held = [name for name, *_ in parts]
    unknown = [name for name, part in named.items() if name not in held and part is not None]
    if unknown and parts:
        holds = ", ".join(map(repr, held))
        raise ValueError(f"dims name {place}[{unknown[0]!r}], and the {place} of this call holds {holds}")
    for name, step, part in parts:
        yield from _leaf_dims(part, given if is_of_all else named.get(name), place + str(step))


def _parts(x: PyTree) -> list[tuple[object, pytree.KeyEntry, PyTree]] | None:
    """Return the parts of a container, each after its name and the step of a path to it; None if it is a leaf.

    Those of a class that is registered without names are numbered.
    """
    parts, structure = pytree.tree_flatten(x, is_leaf=is_part_of(x))
    if structure.is_leaf():
        return None
    steps: list[pytree.KeyEntry] = [pytree.SequenceKey(i) for i in range(len(parts))]
    with suppress(ValueError):  # raised for a class that is registered without names
        steps = [path[0] for path, _ in pytree.tree_flatten_with_path(x, is_leaf=is_part_of(x))[0]]
    names = [getattr(step, "key", getattr(step, "idx", getattr(step, "name", None))) for step in steps]
    return list(zip(names, steps, parts, strict=True))


def _dims_of_tensor(x: Tensor, given: Mapping[int, Dim], place: str) -> dict[int, Dim]:
    """Return the padded dims of a tensor, counted from the front."""
    if not isinstance(x, PaddedTensor):
        if type(x) in MAPPED_TYPES or x.is_nested:
            raise TypeError(
                f"{place} is padded, so it is a dense tensor; got {shown(x)}: hand it over as plain tensors"
            )
        if wrong := [d for d in given if not -x.dim() <= d < x.dim()]:
            raise ValueError(f"{place} is padded in dim {wrong[0]}, and has shape {tuple(x.shape)}")
    return {d % x.dim(): dim for d, dim in given.items()}


def _parameter_names(program: Callable[..., object]) -> tuple[list[str], list[str], bool, bool]:
    """Return a program's parameter names, the positional ones, and whether it takes more.

    The last two values say whether it takes any others by name, and by position.
    """
    called = program.forward if isinstance(program, torch.nn.Module) else program
    try:
        parameters = inspect.signature(called).parameters.values()
    except (TypeError, ValueError):
        return [], [], True, True
    named = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    kinds = {p.kind for p in parameters}
    return named, positional, inspect.Parameter.VAR_KEYWORD in kinds, inspect.Parameter.VAR_POSITIONAL in kinds


def _name(program: Callable[..., object]) -> str:
    return getattr(program, "__name__", type(program).__name__)


T = TypeVar("T")

_log = logging.getLogger(__name__)


def repeat_to_sizes(x: Tensor, sizes: Mapping[int, int]) -> Tensor:
    """Return a tensor of other sizes that repeats the values of `x`.

    Args:
        x: any tensor.
        sizes: the new size of each dim that changes.

    Example:
        >>> repeat_to_sizes(torch.tensor([1, 2, 3]), {0: 5})
        tensor([1, 2, 3, 1, 2])
    """
    for d, size in sizes.items():
        if not x.shape[d]:
            shape = list(x.shape)
            shape[d] = size
            x = x.new_zeros(shape)
        x = x.index_select(d, torch.arange(size, device=x.device) % x.shape[d])
    return x


def warmup_calls(dims: ArgumentDims, max_calls: int | None, args: Args, kwargs: Kwargs) -> list[tuple[Args, Kwargs]]:
    """Return calls like a given one, one per bucket, the largest first.

    Args:
        dims: which dims of the arguments are padded, and on which Dims.
        max_calls: the most calls to return; None for all.
        args, kwargs: those of the given call.
    """
    leaves, structure = flatten(args, kwargs)
    places = dims.of_leaves(args, kwargs)
    for x, (place, padded) in zip(leaves, places, strict=True):
        if padded and x.layout is not torch.strided:
            raise TypeError(f"{place} is padded, so the example is a dense tensor; got {shown(x)}")
    used = {dim: None for _, padded in places for dim in padded.values()}
    largest_first = sorted(itertools.product(*[dim.buckets for dim in used]), key=math.prod, reverse=True)
    calls = []
    for buckets in largest_first[:max_calls]:
        sizes = dict(zip(used, buckets, strict=True))
        resized = [
            repeat_to_sizes(x, {d: sizes[dim] for d, dim in padded.items()})
            if padded and not isinstance(x, PaddedTensor)
            else x
            for x, (_, padded) in zip(leaves, places, strict=True)
        ]
        calls.append(unflatten(resized, structure, len(args), tuple(kwargs)))
    return calls


def with_progress(steps: Sequence[T], description: str, visible: bool) -> Iterator[T]:
    """Iterate over the steps, with a progress bar on stderr."""
    if not visible:
        yield from steps
        return
    try:
        from rich.console import Console
        from rich.progress import track
    except ImportError:
        _log.info("a progress bar needs rich: pip install rich")
        yield from steps
        return
    yield from track(steps, description, console=Console(stderr=True))
