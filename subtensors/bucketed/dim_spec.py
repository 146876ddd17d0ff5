"""The padded dims of a program's arguments, as given to `st.bucketed`, and example calls that warm up each bucket."""

from __future__ import annotations

import inspect
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeGuard, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from subtensors.arguments import shown
from subtensors.bucketed.call_key import flatten, has_parts, unflatten
from subtensors.bucketed.call_spec import LeafDims
from subtensors.bucketed.python_objects import flatten_argument_objects
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

    def of_leaves(self, args: Args, kwargs: Kwargs) -> list[LeafDims]:
        """Return for each leaf of a call its place in words and its padded dims, in the order of `flatten`.

        Raises:
            ValueError: the dims of a container name something that it does not hold.
            TypeError: they name an object that is no container.
        """
        found: list[LeafDims] = []
        named = [(self.positional[i] if i < len(self.positional) else i, x) for i, x in enumerate(args)]
        for name, x in [*named, *kwargs.items()]:
            given = self.everywhere or self.by_name.get(name)
            place = name if isinstance(name, str) else f"argument {name}"
            paths = _paths(flatten_argument_objects(x))
            if given and not self.everywhere and has_parts(x) and paths == [()]:
                raise TypeError(
                    f"dims name {place}, a {type(x).__name__} whose tensors are not seen: make it a dataclass or a "
                    f"pytree (torch.utils._pytree.register_pytree_node), or pass its tensors"
                )
            _check_names(given, paths, place)
            for path in paths:
                found.append((place + pytree.keystr(path), _dims_at(given, path)))
        return found


def dim_sizes(x: object, given: Mapping[int, Dim] | None) -> list[tuple[Dim, int]]:
    """Return the Dims of one leaf of a call, each with the leaf's size.

    Args:
        x: the leaf.
        given: the Dims on which it is padded, by dim.
    """
    if not isinstance(x, Tensor) or isinstance(x, PaddedTensor):
        return []
    if given and (type(x) in MAPPED_TYPES or x.is_nested):
        raise TypeError(f"an argument that is padded is a dense tensor, got {shown(x)}; hand it over as plain tensors")
    return [(dim, x.shape[d]) for d, dim in (given or {}).items() if -x.dim() <= d < x.dim()]


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


def _paths(x: PyTree) -> list[tuple[pytree.KeyEntry, ...]]:
    """Return the pytree paths of a container's leaves; parts of a class registered without names are numbered."""
    try:
        return [path for path, _ in pytree.tree_flatten_with_path(x)[0]]
    except ValueError:  # a class that was registered without names
        parts = pytree.tree_leaves(x, is_leaf=lambda part: part is not x)
        try:
            steps = [path[0] for path, _ in pytree.tree_flatten_with_path(x, is_leaf=lambda part: part is not x)[0]]
        except ValueError:
            steps = [pytree.SequenceKey(i) for i in range(len(parts))]
        return [(step, *path) for step, part in zip(steps, parts, strict=True) for path in _paths(part)]


def _all_dims(given: PyTree) -> list[Dim]:
    if isinstance(given, Dim):
        return [given]
    parts = given.values() if isinstance(given, Mapping) else given if isinstance(given, list) else ()
    return [dim for part in parts for dim in _all_dims(part)]


def _check_names(given: PyTree, paths: Sequence[Sequence[object]], place: str) -> None:
    """Raise an error if dims name a part that a container with leaves at these paths does not hold."""
    if given is None or _is_padded_dims(given) or not any(paths):
        return
    held = dict.fromkeys(_name_of(path[0]) for path in paths if path)
    for name, part in given.items() if isinstance(given, Mapping) else enumerate(given):
        if name not in held and part is not None:
            holds = ", ".join(map(repr, held))
            raise ValueError(f"dims name {place}[{name!r}], and the {place} of this call holds {holds}")
        _check_names(part, [path[1:] for path in paths if path and _name_of(path[0]) == name], f"{place}[{name!r}]")


def _name_of(step: object) -> object:
    return getattr(step, "key", getattr(step, "idx", getattr(step, "name", None)))


def _dims_at(given: PyTree, path: Sequence[object]) -> Mapping[int, Dim] | None:
    """Return the padded dims of the leaf at a path below an argument."""
    for step in path:
        if given is None or _is_padded_dims(given):
            break
        name = _name_of(step)
        if isinstance(given, Mapping):
            given = given.get(name)
        else:
            given = given[name] if isinstance(name, int) and name < len(given) else None
    return given if _is_padded_dims(given) else None


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

ExampleCall: TypeAlias = tuple[list[PyTree], Args, Kwargs]
"""The leaves, args and kwargs of a call."""

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


def warmup_calls(dims: ArgumentDims, max_calls: int | None, args: Args, kwargs: Kwargs) -> list[ExampleCall]:
    """Return calls like a given one, one per bucket, the largest first.

    Args:
        dims: which dims of the arguments are padded, and on which Dims.
        max_calls: the most calls to return; None for all.
        args, kwargs: those of the given call.
    """
    leaves, structure = flatten(args, kwargs)
    places = dims.of_leaves(args, kwargs)
    used = {dim: None for _, padded in places for dim in (padded or {}).values()}
    largest_first = sorted(itertools.product(*[dim.buckets for dim in used]), key=math.prod, reverse=True)
    calls = []
    for buckets in largest_first[:max_calls]:
        sizes = dict(zip(used, buckets, strict=True))
        resized = [
            repeat_to_sizes(x, {d: sizes[dim] for d, dim in padded.items()})
            if padded and _is_resized(x, place, padded)
            else x
            for x, (place, padded) in zip(leaves, places, strict=True)
        ]
        calls.append((resized, *unflatten(resized, structure, len(args), tuple(kwargs))))
    return calls


def _is_resized(x: object, place: str, padded: Mapping[int, Dim]) -> TypeGuard[Tensor]:
    """Return whether an example is a tensor that is padded in calls; raise an error if it can't be."""
    if not isinstance(x, Tensor) or isinstance(x, PaddedTensor):
        return False
    if type(x) in MAPPED_TYPES or x.layout is not torch.strided or x.is_nested:
        raise TypeError(f"{place} is padded, so the example is a dense tensor; got {shown(x)}")
    if wrong := [d for d in padded if not -x.dim() <= d < x.dim()]:
        raise ValueError(f"{place} is padded in dim {wrong[0]}, and the example has shape {tuple(x.shape)}")
    return True


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
