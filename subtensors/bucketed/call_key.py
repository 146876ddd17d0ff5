"""The key of a call: calls with equal keys share one `CallSpec`, and replay the same graph.

A key holds the metadata of tensors, and other arguments themselves; objects that are equal only to themselves count by
their identity, together with the values that they hold now. All of it is computed on every call.

An object that holds tensors is no container to torch's pytrees: `FlattenedObject` makes it one, by its attributes.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from subtensors.arguments import shown
from subtensors.bucketed.program_state import State
from subtensors.bucketed.reachable_state import attributes_of
from subtensors.bucketed.state_guard import StateGuard
from subtensors.dispatch.fused.read_values import is_filled
from subtensors.dispatch.graphs.guards import exact, is_plain, tensor_properties
from subtensors.dispatch.ops.tree import Args, Kwargs, PyTree
from subtensors.dispatch.torch_internals import ops
from subtensors.padded.padded_tensor import PaddedTensor
from subtensors.static.static_tensor import StaticAddressTensor

READ_IN_PLACE = (torch.nn.Parameter, StaticAddressTensor)
"""Tensors at a stable address, which a graph reads without a copy."""

SETTINGS = (
    torch.get_default_dtype, ops.default_device, torch.are_deterministic_algorithms_enabled,
    ops.matmul_precision,
    torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.mem_efficient_sdp_enabled,
    torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.math_sdp_enabled,
)  # fmt: skip
"""Global torch settings that decide what a graph does; a graph is captured for the settings of its call."""

CODE = (types.FunctionType, types.MethodType, functools.partial)
"""Callables that hold values: in a closure, in the object of a method, or as arguments of a partial."""

_LEAVES = (Tensor, type(None), bool, int, float, complex, str, torch.dtype, torch.device)

_HOLDS_ITSELF = "an argument of a bucketed program is a container that holds itself"

_MAX_DEPTH = 2
"""Steps from the argument: values in the containers and objects that it holds count, and nothing beyond."""
_MAX_PARTS = 100
"""A container with more parts than this is data."""
_MAX_SEARCHED_PARTS = 10_000
"""The search for tensors in arguments ends after this many parts."""

Structure: TypeAlias = pytree.TreeSpec | None
"""The structure of a call's arguments; None if no argument is a container."""

Dtypes: TypeAlias = tuple[torch.dtype | None, ...]

Modes: TypeAlias = tuple[tuple[bool, ...] | None, Dtypes, object, tuple[bool, ...], object, object]
"""The modes that a call is made in: `grad_flags` of the state, None if autograd does not track the call; the dtypes of
autocast on GPU and CPU; torch's settings; training flags; the keys of dicts; and the user's key."""

SharedKey: TypeAlias = tuple[int, tuple[str, ...], Structure, Modes]
"""The number of positional arguments, the names of the others, the structure of all, and the modes."""

CallKey: TypeAlias = tuple[object, ...]


class FlattenedObject:
    """The attributes of an object, as a pytree node; unflattening it makes a new object of the same class."""

    def __init__(self, kind: type, attributes: dict[str, object]) -> None:
        self.kind, self.attributes = kind, attributes


def _flattened_parts(x: FlattenedObject) -> tuple[list[object], pytree.Context]:
    return list(x.attributes.values()), (x.kind, tuple(x.attributes))


def _named_parts(x: FlattenedObject) -> tuple[list[tuple[pytree.KeyEntry, object]], pytree.Context]:
    return [(pytree.GetAttrKey(name), part) for name, part in x.attributes.items()], _flattened_parts(x)[1]


def _object_of(attributes: Iterable[object], context: pytree.Context) -> object:
    kind, names = context
    try:
        made = object.__new__(kind)
    except TypeError:  # of a class that is written in C
        made = kind.__new__(kind)
    for name, value in zip(names, attributes, strict=True):
        object.__setattr__(made, name, value)
    return made


pytree.register_pytree_node(FlattenedObject, _flattened_parts, _object_of, flatten_with_keys_fn=_named_parts)


def flatten_result_objects(result: PyTree, given: Collection[int]) -> PyTree:
    """Return a result with objects that hold tensors flattened.

    Args:
        result: any pytree.
        given: ids of the program's arguments, which are not flattened.
    """
    return _flatten_objects(result, lambda x: id(x) not in given, _has_tensors)


def flatten_argument_objects(arguments: PyTree) -> PyTree:
    """Return arguments with those dataclasses flattened that hold tensors, or cannot be hashed for a key.

    Example:
        >>> Options = dataclasses.make_dataclass("Options", ["scale"])
        >>> pytree.tree_leaves(flatten_argument_objects([Options(2.0)]))
        [2.0]
    """
    try:
        return _flatten_objects(
            arguments, dataclasses.is_dataclass, lambda x, parts: type(x).__hash__ is None or _has_tensors(x, parts)
        )
    except RecursionError:
        raise ValueError(_HOLDS_ITSELF) from None


def _has_tensors(x: object, parts: list[object]) -> bool:
    return any(isinstance(part, Tensor) for part in parts)


def _flatten_objects(
    tree: PyTree, may_open: Callable[[object], bool], is_flattened: Callable[[object, list[object]], bool]
) -> PyTree:
    def opened(x: object) -> object:
        if isinstance(x, (Tensor, torch.nn.Module, type, int)) or not may_open(x):
            return x
        own: dict[str, object] = (
            {f.name: getattr(x, f.name) for f in dataclasses.fields(x)} if dataclasses.is_dataclass(x) else {}
        )
        own |= attributes_of(x)
        if not own:
            return x
        attributes = {name: pytree.tree_map(opened, value) for name, value in own.items()}
        parts = [part for value in attributes.values() for part in pytree.tree_leaves(value)]
        return FlattenedObject(type(x), attributes) if is_flattened(x, parts) else x

    return pytree.tree_map(opened, tree)


def is_part_of(x: PyTree) -> Callable[[PyTree], bool]:
    """Return an `is_leaf` by which a container is opened once: true of its parts.

    It holds no reference to the container, since torch's `tree_flatten` leaves it in a cycle.
    """
    container = id(x)
    return lambda part: id(part) != container


def flatten(args: Args, kwargs: Kwargs) -> tuple[list[PyTree], Structure]:
    """Return the leaves of a call's arguments and their structure, which is None if no argument is a container."""
    leaves = [*args, *kwargs.values()]
    if all([isinstance(x, _LEAVES) for x in leaves]):  # noqa: C419  # `all` of a generator takes longer
        return leaves, None
    try:
        found, structure = pytree.tree_flatten((args, kwargs))
    except RecursionError:
        raise ValueError(_HOLDS_ITSELF) from None
    if any(map(dataclasses.is_dataclass, found)):
        found, structure = pytree.tree_flatten(flatten_argument_objects((args, kwargs)))
    return found, structure


def unflatten(leaves: Sequence[PyTree], structure: Structure, count: int, names: Sequence[str]) -> tuple[Args, Kwargs]:
    """Return the arguments with these leaves; the inverse of `flatten`."""
    if structure is not None:
        args, kwargs = pytree.tree_unflatten(list(leaves), structure)
        return args, kwargs
    return tuple(leaves[:count]), dict(zip(names, leaves[count:], strict=True))


def shared_key(state: State, leaves: Sequence[object], structure: Structure, args: Args, kwargs: Kwargs) -> SharedKey:
    """Return the part of a call's key that belongs to no single leaf: its structure, and the modes it is made in.

    Args:
        state: of the program, with the user's `key`.
        leaves, structure: as `flatten` gives them.
        args, kwargs: the call's.
    """
    cast = autocast_dtype("cuda"), autocast_dtype("cpu")
    settings = tuple([ask() for ask in SETTINGS])
    own = None if state.key is None else user_key(state.key, args, kwargs)
    state.guard.user_key = own
    modes = state.guard.grad_flags(leaves), cast, settings, state.guard.training(), _dict_keys(structure), own
    return len(args), tuple(kwargs), structure, modes


@contextmanager
def in_modes(modes: Modes, guard: StateGuard) -> Iterator[None]:
    """A context with the modes of a call: autocast, training, and which tensors require grad.

    Args:
        modes: as `shared_key` gives them.
        guard: of the program's state, as it was in the call.
    """
    flags, dtypes, _, training, _, guard.user_key = modes
    casts = [torch.autocast(x, dtype, dtype is not None) for x, dtype in zip(("cuda", "cpu"), dtypes, strict=True)]
    with casts[0], casts[1], guard.in_modes(flags or (), training):
        yield


def autocast_dtype(device: str) -> torch.dtype | None:
    """Return the dtype that autocast casts to on a type of device, or None outside of it."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _dict_keys(structure: Structure) -> tuple[object, ...]:
    """Return the exact keys of the dicts in a structure, unless they are strings: 1, 1.0 and True are equal there."""
    found: list[object] = []
    todo = [] if structure is None else [structure]
    while todo:
        node = todo.pop()
        if not node.is_leaf():
            if node.type in (dict, OrderedDict, defaultdict):
                keys = node.context[1] if node.type is defaultdict else node.context
                found += [exact(key) for key in keys if type(key) is not str]
            todo += node.children()
    return tuple(found)


def user_key(key: object, args: Args, kwargs: Kwargs) -> tuple[object, ...]:
    """Return the part of a call's key that the user gives: a value, or what a callable returns for the arguments.

    Raises:
        TypeError: a part of it has no hash, or is a tensor.

    Example:
        >>> import torch, types
        >>> user_key(lambda x, scale: scale > 1, (torch.ones(2),), {"scale": 2})[2:]
        ((<class 'bool'>, True),)
        >>> user_key(types.SimpleNamespace(scale=2), (), {})[2:]
        ((<class 'types.SimpleNamespace'>, ((('scale',), (<class 'int'>, 2)),)),)
    """
    found, structure = flatten((key(*args, **kwargs) if callable(key) else key,), {})
    own = [(type(x), object_key(x)) if type(x).__hash__ is None and has_parts(x) else leaf_key(x) for x in found]
    parts = (structure, _dict_keys(structure), *own)
    try:
        hash(parts)
    except TypeError as error:
        raise TypeError(f"key gives what can be part of a graph's key, got {shown(key)}: {error}") from None
    if any(isinstance(x, Tensor) for x in found):
        raise TypeError(f"key gives plain values, got a tensor of {shown(key)}: pass tensors as arguments")
    return parts


def leaf_key(x: PyTree) -> tuple[object, ...]:
    """Return the part of a call's key for one leaf: metadata for a tensor, otherwise the value with its type."""
    kind = type(x)
    if kind is Tensor:
        return x.shape, x.dtype, x.get_device(), x.requires_grad, x.layout
    if kind is PaddedTensor:
        sizes = x._sizes
        known = None if sizes is None else (sizes.symbols, sizes.buckets, sizes.host())
        return x.shape, x.dtype, x.get_device(), x.requires_grad, x._dims, known
    if issubclass(kind, READ_IN_PLACE):
        # A gradient belongs to the tensor itself, even if others share its memory.
        return kind, x.requires_grad, x.requires_grad and x.is_leaf and id(x), tensor_properties(x) or id(x)
    return (kind, x, object_key(x)) if has_parts(x) else exact(x)


def sizes_sharing(leaves: Sequence[PyTree]) -> tuple[int, ...]:
    """Return for each of the caller's PaddedTensors the index of the first one that shares its true sizes."""
    found = [id(x._sizes) for x in leaves if type(x) is PaddedTensor]
    return tuple(map(found.index, found))


def has_parts(x: object) -> bool:
    """Return whether an argument has parts that may change while its identity stays the same.

    These are functions with a closure, and objects that are told by their identity or, as dataclasses are, by nothing.
    """
    kind = type(x)
    if isinstance(x, CODE):
        return True
    if kind.__hash__ not in (None, object.__hash__) or issubclass(kind, (type, Tensor)):
        return False
    return hasattr(x, "__dict__") or hasattr(kind, "__slots__")


def object_key(x: object) -> tuple[object, ...]:
    """Return the plain values, functions and tensors that an object holds, or a function reads, with their paths.

    >>> options = type("Options", (), {})()
    >>> options.scale, options.shifts = 2, ["up"]
    >>> object_key(options)
    ((('scale',), (<class 'int'>, 2)), (('shifts',), <class 'list'>), (('shifts', 0), (<class 'str'>, 'up')))
    """
    return tuple(_part_keys(x, (), _MAX_DEPTH))


def _part_keys(x: object, path: tuple[object, ...], depth: int) -> Iterator[tuple[object, ...]]:
    for name, value in parts_of(x):
        if isinstance(value, Tensor):
            yield (*path, name), id(value), value.requires_grad, tensor_properties(value)
        elif is_plain(value) or isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
            yield (*path, name), exact(value)
        elif isinstance(value, (list, tuple, dict)) or has_parts(value):
            if depth > 1:
                yield (*path, name), type(value)
                yield from _part_keys(value, (*path, name), depth - 1)
        elif isinstance(value, set):
            yield (*path, name), exact(frozenset(value))
        elif isinstance(value, np.ndarray):
            contents = value.tobytes() if value.size <= _MAX_PARTS else id(value)
            yield (*path, name), value.dtype.str, value.shape, contents
        elif type(value).__hash__ is not None:  # such as the members of an enum
            yield (*path, name), type(value), value


def callers_tensors(leaves: Iterable[object]) -> Iterator[Tensor]:
    """Yield the tensors that a program may read and write in place through these arguments.

    Args:
        leaves: the leaves of the arguments, without those that are copied.

    Example:
        >>> cache = type("Cache", (), {})()
        >>> cache.layers = [{"count": torch.zeros(2)}]
        >>> [*callers_tensors([cache, 3])]
        [tensor([0., 0.])]
    """
    todo = [x for x in leaves if isinstance(x, Tensor) or has_parts(x)]
    seen = set(map(id, todo))
    while todo and len(seen) < _MAX_SEARCHED_PARTS:
        part = todo.pop()
        if isinstance(part, Tensor):
            yield part
        elif not isinstance(part, (type, types.ModuleType)):
            new = {id(value): value for _, value in parts_of(part, _MAX_SEARCHED_PARTS) if id(value) not in seen}
            seen |= new.keys()
            todo += new.values()


def parts_of(x: object, max_parts: int = _MAX_PARTS) -> Iterator[tuple[object, object]]:
    """Yield the parts that an object, a container or a callable holds directly, each after its name.

    Args:
        x: the object.
        max_parts: the maximum size of a container; a larger one is data, and yields nothing.
    """
    if isinstance(x, (list, tuple, dict)):
        if len(x) <= max_parts:
            yield from x.items() if isinstance(x, dict) else enumerate(x)
        return
    if isinstance(x, types.FunctionType):
        yield from ((i, cell.cell_contents) for i, cell in enumerate(x.__closure__ or ()) if is_filled(cell))
    elif isinstance(x, types.MethodType):
        yield from (("self", x.__self__), ("function", x.__func__))
        return
    elif isinstance(x, functools.partial):
        yield from (("function", x.func), ("arguments", x.args), ("named", x.keywords))
    elif isinstance(x, torch.nn.Module):
        yield "training", tuple([module.training for module in x.modules()])
        yield from (*x.named_parameters(), *x.named_buffers())
    yield from attributes_of(x).items()
