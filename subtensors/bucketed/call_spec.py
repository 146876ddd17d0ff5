"""The analysis of a call: its form, the size of each Dim, the bucket, and the static input of each tensor.

An argument is copied into a static input, is read in place, or is a part of the bucket's key. A call is looked up by
its key (`call_key.py`), and each key is analyzed once, into a `CallSpec`. Equal calls share a bucket, however their
arguments are named and ordered: their `CallFormat` runs the program with its arguments in the caller's form.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from operator import is_
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from subtensors.bucketed.call_key import (
    READ_IN_PLACE,
    Modes,
    Structure,
    flatten,
    flatten_argument_objects,
    has_parts,
    leaf_key,
    parts_of,
    unflatten,
)
from subtensors.bucketed.program_state import State
from subtensors.bucketed.side_effects import ObjectSnapshot
from subtensors.dispatch.ops.errors import RuleError, SizeError
from subtensors.dispatch.ops.tree import Args, Kwargs, PyTree
from subtensors.dispatch.padded.size_conditions import HostSize
from subtensors.dispatch.padded.true_sizes import TrueSizes
from subtensors.dispatch.sizes.dim_factors import Factors
from subtensors.padded.padded_tensor import PaddedTensor
from subtensors.padded.padding import pad
from subtensors.sizes.dims import Dim, SizeAgreement

if TYPE_CHECKING:
    import sympy

T = TypeVar("T")
FormatKey: TypeAlias = tuple[tuple[str | int, Structure], ...]

inside_program: ContextVar[bool] = ContextVar("inside a bucketed program", default=False)
"""True while a bucketed program runs: calls that it makes of another one are a part of it."""


@dataclass(frozen=True)
class CallFormat:
    """The form in which a call gives its arguments: by position or by name, and in which order.

    Args:
        order: for each leaf, in the order of the parameters, its index among those of `flatten`; None if the same.
        key: equal for calls that differ in nothing but their form.
        structure, count, names: what `flatten` found, the number of positional arguments, the others' names.
    """

    order: tuple[int, ...] | None
    key: FormatKey
    structure: Structure
    count: int
    names: tuple[str, ...]

    @staticmethod
    def of(parameters: Sequence[str], args: Args, kwargs: Kwargs, structure: Structure) -> CallFormat:
        """Return the form of a call.

        Args:
            parameters: the names of the parameters that can be given by position.
            args, kwargs: the call's arguments.
            structure: the structure that `flatten` found.

        Example:
            >>> CallFormat.of(["x", "y"], (), {"y": 1, "x": 2}, None).order
            (1, 0)
        """
        names = [*parameters[: len(args)], *range(len(parameters), len(args)), *kwargs]
        given = [*args, *kwargs.values()]
        structures = [None if structure is None else pytree.tree_structure(flatten_argument_objects(x)) for x in given]
        counts = [1 if own is None else own.num_leaves for own in structures]
        ends = list(itertools.accumulate(counts))

        def rank(i: int) -> tuple[int, str]:
            """Return a sort key: first the parameters in their order, then others by name."""
            name = names[i]
            if isinstance(name, int):
                return name, ""
            return (parameters.index(name), "") if name in parameters else (len(names) + len(parameters), name)

        ranked = sorted(range(len(names)), key=rank)
        order = tuple(leaf for i in ranked for leaf in range(ends[i] - counts[i], ends[i]))
        key = tuple((names[i], structures[i]) for i in ranked)
        is_ordered = order == tuple(range(len(order)))
        return CallFormat(None if is_ordered else order, key, structure, len(args), tuple(kwargs))

    def ordered(self, leaves: list[T]) -> list[T]:
        """Return the leaves that `flatten` found, in the order of the parameters."""
        return leaves if self.order is None else [leaves[i] for i in self.order]

    def program_on_leaves(self, program: Callable[..., PyTree], state: State) -> Callable[[Sequence[PyTree]], PyTree]:
        """Return a function that runs the program on the leaves of its arguments, in the order of the parameters.

        It raises a RuleError if the program wrote to an object among the arguments (which is restored) or to a
        container of the caller's, or if it returns an iterator or an object that hides tensors.
        """

        def run(leaves: Sequence[PyTree]) -> PyTree:
            token = inside_program.set(True)
            try:
                with state.guard.during_run():
                    return self._run(program, leaves)
            finally:
                inside_program.reset(token)

        return run

    def _run(self, program: Callable[..., PyTree], leaves: Sequence[PyTree]) -> PyTree:
        if self.order is not None:
            leaves = [leaf for _, leaf in sorted(zip(self.order, leaves, strict=True), key=lambda pair: pair[0])]
        args, kwargs = unflatten(leaves, self.structure, self.count, self.names)
        objects = ObjectSnapshot([x.__self__ if isinstance(x, types.MethodType) else x for x in leaves if has_parts(x)])
        try:
            result = program(*args, **kwargs)
        except BaseException:  # the caller may then run the program in another way
            objects.restore()
            raise
        if written := objects.restore():
            raise RuleError(f"it writes to an argument, a {written}, which a graph holds as a constant")
        if self.structure is not None:
            now, structure = flatten(args, kwargs)
            if structure != self.structure or not all(map(is_, now, leaves)):
                raise RuleError("it writes to a container among its arguments, of which it has a copy")
        for x in pytree.tree_leaves(result):
            if isinstance(x, Iterator):
                raise RuleError(f"it returns a {type(x).__name__}, which gives its values once: return a list")
            if _hides_tensors(x):
                raise RuleError(f"it returns a {type(x).__name__} with tensors in it: return a container")
        return result


def _hides_tensors(x: object) -> bool:
    """Return whether a leaf of a result holds tensors that cannot be replaced by others."""
    if isinstance(x, functools.partial):
        return any(isinstance(part, Tensor) for part in pytree.tree_leaves((x.args, x.keywords)))
    if isinstance(x, types.FunctionType):
        return any(isinstance(value, Tensor) for _, value in parts_of(x))
    return isinstance(x, (set, frozenset)) and any(isinstance(part, Tensor) for part in x)


AS_GIVEN = CallFormat(None, (), None, 0, ())
"""The form that reorders nothing, for calls whose form does not matter."""

BucketKey: TypeAlias = tuple[object, ...]
LeafDims: TypeAlias = tuple[str, Mapping[int, Dim]]
"""The place of one leaf of a call among the arguments, in words, and its padded dims; none if it is no tensor."""


class NotCacheable(Exception):
    """These arguments have no bucket.

    Args:
        reason: the reason, in words.
        error: the error of a size that is out of its Dim's range, if that is the reason.
    """

    def __init__(self, reason: str, error: SizeError | None = None) -> None:
        super().__init__(reason)
        self.error = error


@dataclass(frozen=True)
class InputSpec:
    """One tensor that is copied into a static input.

    Args:
        leaf: the index of the call's leaf that holds it.
        shape: the shape of the static input.
        dtype: the dtype of both.
        device: the device of both.
        size_index: for each dim the index of its size among the call's true sizes, -1 for a dim without padding.
        dims: the padded dims of a PaddedTensor that the caller made, whose storage this is.
        caller_index: the index of its true sizes among the spec's `caller_sizes`; -1 for the call's own.
        requires_grad: whether it requires grad.
    """

    leaf: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    size_index: tuple[int, ...]
    dims: tuple[Factors, ...] | None = None
    caller_index: int = -1
    requires_grad: bool = False


@dataclass(frozen=True)
class CallerSizes:
    """The true sizes of a PaddedTensor that the caller made.

    Args:
        leaf: the index of a leaf that has them.
        symbols, buckets: the symbols and buckets of these sizes.
        shape: the shape of the tensor that holds them.
    """

    leaf: int
    symbols: tuple[sympy.Symbol, ...]
    buckets: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class CallSpec:
    """The analysis of the calls of one key: their Dims' sizes, their bucket and their static inputs.

    Args:
        dims: the Dims that are padded in the call.
        sizes: their true sizes.
        buckets: their buckets.
        inputs: the tensors that are copied into static inputs.
        caller_sizes: the true sizes of the caller's own PaddedTensors.
        host: every symbol's true size.
        bucket_key: the key of the bucket, unique to it.
        family_key: the key without the Dims' sizes, shared by all buckets of a program that differ only in these.
        modes: that the call is made in.
    """

    dims: tuple[Dim, ...]
    sizes: tuple[int, ...]
    buckets: tuple[int, ...]
    inputs: tuple[InputSpec, ...]
    caller_sizes: tuple[CallerSizes, ...]
    host: dict[sympy.Symbol, HostSize]
    bucket_key: BucketKey
    family_key: BucketKey
    modes: Modes

    @functools.cached_property
    def true_sizes(self) -> tuple[HostSize, ...]:
        """The true size of every symbol."""
        return tuple(self.host.values())

    def elements(self) -> tuple[int, int]:
        """Return the number of elements along all Dims: at the true sizes, of each row those of its own, and padded."""
        real, padded = math.prod(self.sizes), math.prod(self.buckets)
        counted = {dim.symbol for dim in self.dims}
        for caller in self.caller_sizes:
            new = [i for i, symbol in enumerate(caller.symbols) if symbol not in counted]
            counted.update(caller.symbols)
            rows = math.prod(caller.shape[1:])
            sizes = [self.host[caller.symbols[i]] for i in new]
            each = [(size,) * rows if isinstance(size, int) else size for size in sizes]
            if new:
                real *= sum(map(math.prod, zip(*each, strict=True)))
                padded *= rows * math.prod(caller.buckets[i] for i in new)
        return real, padded


def analyze(leaves: Sequence[PyTree], places: Sequence[LeafDims], form: tuple[FormatKey, Modes]) -> CallSpec:
    """Analyze the leaves of a call.

    Args:
        leaves: the arguments' leaves.
        places: for each leaf its place and padded dims.
        form: further parts of the bucket's key: the format of the call, and its modes.

    Raises:
        SizeError: one Dim has two sizes.
        NotCacheable: a size is out of its Dim's range, or a leaf can't be part of a graph.
    """
    agreed = SizeAgreement()
    padded: dict[int, dict[int, Dim]] = {}
    caller: dict[int, CallerSizes] = {}
    host: dict[sympy.Symbol, HostSize] = {}
    for i, (x, (place, given)) in enumerate(zip(leaves, places, strict=True)):
        if isinstance(x, PaddedTensor):
            _take_caller_sizes(i, x, place, caller, host)
        elif isinstance(x, Tensor) and given:
            padded[i] = {
                d: dim for d, dim in given.items() if _is_padded(dim, x.shape[d], f"dim {d} of {place}", agreed)
            }
    varying = {dim for found in padded.values() for dim in found.values()}
    dims = tuple(dim for dim in agreed.sizes if dim in varying)
    sizes = tuple(int(agreed.sizes[dim]) for dim in dims)  # type: ignore[arg-type]
    buckets = tuple(dim.bucket(size) for dim, size in zip(dims, sizes, strict=True))
    for dim, size in zip(dims, sizes, strict=True):
        if host.setdefault(dim.symbol, size) != size:
            raise SizeError(f"{dim.name} is {size} in one argument and {host[dim.symbol]} in a PaddedTensor")
    caller_indices = {key: n for n, key in enumerate(caller)}
    found = [_input_spec(i, x, padded.get(i, {}), dims, buckets, caller_indices) for i, x in enumerate(leaves)]
    sources = [source for source in found if source is not None]
    rest = [(i, leaf_key(x)) for i, (x, source) in enumerate(zip(leaves, found, strict=True)) if source is None]
    key = tuple(sources), tuple(caller.values()), tuple(dims), tuple(rest), form
    open_sources = tuple(
        replace(s, shape=tuple(-1 if k >= 0 else n for n, k in zip(s.shape, s.size_index, strict=True)))
        for s in sources
    )
    keys = key, (open_sources, *key[1:])
    return CallSpec(dims, sizes, buckets, tuple(sources), tuple(caller.values()), host, *keys, modes=form[1])


def padded_leaves(leaves: Sequence[PyTree], spec: CallSpec, device: torch.device) -> list[PyTree]:
    """Return a call's leaves padded to their bucket; like those of a graph, they share one `TrueSizes`."""
    dims = {s.leaf: {d: spec.dims[k] for d, k in enumerate(s.size_index) if k >= 0} for s in spec.inputs}
    values = torch.tensor(spec.sizes, dtype=torch.int64, device=device)
    sizes = TrueSizes(tuple(dim.symbol for dim in spec.dims), spec.buckets, values, spec.sizes)
    found = [pad(x, dims[i]) if dims.get(i) else x for i, x in enumerate(leaves)]
    for x, given in zip(found, leaves, strict=True):
        if x is not given and isinstance(x, PaddedTensor):
            x._sizes = sizes
    return found


def device_of(spec: CallSpec, state: Iterable[Tensor]) -> torch.device:
    """Return the device of a call: its arguments', else the state's, else the CPU.

    Raises:
        NotCacheable: there are several.
    """
    devices = {source.device for source in spec.inputs} or {t.device for t in state}
    if len(devices) > 1:
        raise NotCacheable(f"arguments are on several devices: {', '.join(sorted(map(str, devices)))}")
    return devices.pop() if devices else torch.device("cpu")


def _input_spec(
    leaf: int,
    x: PyTree,
    padded: Mapping[int, Dim],
    dims: tuple[Dim, ...],
    buckets: tuple[int, ...],
    caller_indices: dict[int, int],
) -> InputSpec | None:
    """Return the static input that a leaf is copied into; None if the leaf is part of the key."""
    if isinstance(x, PaddedTensor):
        n = caller_indices[id(x._sizes)] if x._sizes is not None else -1
        return InputSpec(leaf, tuple(x.shape), x.dtype, x.device, (-1,) * x.dim(), x._dims, n, x.requires_grad)
    if isinstance(x, Tensor) and not isinstance(x, READ_IN_PLACE):
        if type(x) is not Tensor:
            raise NotCacheable(f"an argument is a {type(x).__name__}")
        if x.layout is not torch.strided or x.is_nested:
            raise NotCacheable(f"an argument has the layout {x.layout}" + ", nested" * x.is_nested)
        size_index = tuple(dims.index(padded[d]) if d in padded else -1 for d in range(x.dim()))
        shape = tuple(n if k < 0 else buckets[k] for n, k in zip(x.shape, size_index, strict=True))
        return InputSpec(leaf, shape, x.dtype, x.device, size_index, requires_grad=x.requires_grad)
    if getattr(x, "is_compileable", True) is False:
        raise NotCacheable(f"an argument is a {type(x).__name__}, whose tensors are replaced in each call")
    if isinstance(x, Iterator):
        raise NotCacheable(f"an argument is a {type(x).__name__}, which gives its values once: give a list")
    return None


def _is_padded(dim: Dim, size: int, place: str, agreed: SizeAgreement) -> bool:
    """Return whether a tensor of this true size is padded on a Dim."""
    if not dim.admits(size):
        try:
            dim.bucket(size)  # which refuses or notes it
        except SizeError as error:
            # Without the size, so that all sizes share one reason.
            raise NotCacheable(re.sub(r" is \d+,", " is", str(error)), error) from None
        return False
    if not agreed.bind(dim, size, place):
        return False
    # A size that is the only one of its bucket has no padding in any call.
    return size != dim.bucket(size) or (size > dim.min and dim.bucket(size - 1) == size)


def _take_caller_sizes(
    leaf: int, x: PaddedTensor, place: str, caller: dict[int, CallerSizes], host: dict[sympy.Symbol, HostSize]
) -> None:
    sizes = x._sizes
    if sizes is None:
        return
    for symbol, size in zip(sizes.symbols, sizes.host(), strict=True):
        if host.setdefault(symbol, size) != size:
            raise SizeError(f"{symbol} is {size} in {place} and {host[symbol]} in another argument")
    caller.setdefault(id(sizes), CallerSizes(leaf, sizes.symbols, sizes.buckets, tuple(sizes.values.shape)))
