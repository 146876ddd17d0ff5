"""One compilation for all buckets of a program, or one per bucket.

A program is traced on padded tensors at two or three sizes, what differs between the traces becomes arithmetic on the
bucket's size, and that one graph is compiled with the size left open. Capturing a further bucket then takes a run or
two of compiled code. A program whose graphs differ in more than numbers is compiled once per bucket.

A `CompiledBucket` runs such code, a `CompiledTrainedBucket` (`compiled_gradients.py`) with gradients.
"""

from __future__ import annotations

import itertools
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import Any, Generic, TypeAlias, TypeVar, cast

import torch
from torch import Tensor, fx

from subtensors.bucketed.bucket import Bucket, HostSizes
from subtensors.bucketed.call_spec import BucketKey, CallSpec
from subtensors.bucketed.outputs import Output, Outputs
from subtensors.dispatch.ops.errors import SizeError
from subtensors.dispatch.ops.tree import PyTree
from subtensors.dispatch.padded.size_conditions import SizeConditions
from subtensors.dispatch.sizes.dim_factors import Factor
from subtensors.dispatch.torch_internals import compiler
from subtensors.dispatch.torch_internals.compiler import CompiledGraph
from subtensors.dispatch.tracing.shape_template import NoTemplate, Place, ShapeTemplate, grid
from subtensors.dispatch.tracing.shared_inputs import share_inputs
from subtensors.sizes.dims import Dim

_log = logging.getLogger("subtensors.bucketed")

CompileOptions: TypeAlias = dict[str, object]
"""The options of `torch.compile`."""


T = TypeVar("T")
B = TypeVar("B", bound=Bucket)
Code: TypeAlias = "SizePolymorphic[Any, Any]"
C = TypeVar("C", bound=Code)


class CompileCache:
    """The compiled code of each family of calls seen so far, whose members differ in sizes alone.

    Args:
        options: of `torch.compile`.
    """

    def __init__(self, options: CompileOptions) -> None:
        self.options = options
        self.by_family: dict[BucketKey, Code] = {}
        self._dropped_compilations = 0

    def code_for(self, spec: CallSpec, device: torch.device, make: Callable[[CallSpec, CompileOptions], C]) -> C:
        """Return the code of a family of calls.

        Args:
            spec: of a call of the family.
            device: of the call.
            make: makes the code if there is none yet.
        """
        if spec.family_key not in self.by_family:
            if device.type == "cuda":
                compiler.start_compile_workers(self.options)
            self.by_family[spec.family_key] = make(spec, self.options)
        return cast("C", self.by_family[spec.family_key])

    @property
    def recompiles(self) -> int:
        """Compilations after the first of each family."""
        return self._dropped_compilations + sum(max(code.compilations - 1, 0) for code in self.by_family.values())

    def drop(self) -> None:
        """Drop the code, which holds the tensors that it was compiled with."""
        self._dropped_compilations += sum(code.compilations for code in self.by_family.values())
        self.by_family.clear()


class DynamicCode:
    """A graph as compiled code for many sizes: one compilation for all sizes that it serves.

    Args:
        module: as `CompiledGraph` takes it.
        options: of `torch.compile`.
    """

    def __init__(self, module: fx.GraphModule, options: CompileOptions) -> None:
        self.module, self.options = module, options
        self.compiled: list[CompiledGraph] = []
        self._by_sizes: dict[tuple[int, ...], CompiledGraph] = {}

    def compiled_for(
        self, sizes: tuple[int, ...], inputs: Sequence[Tensor], dynamic_dims: Collection[tuple[int, int]]
    ) -> CompiledGraph:
        """Return the code for inputs of some sizes; compile it if it is new.

        Args:
            sizes: the bucket's.
            inputs: of these sizes.
            dynamic_dims: the (input, dim) pairs that depend on the sizes; empty if the graph serves one bucket.
        """
        found = self._by_sizes.get(sizes)
        if found is None:
            found = next((code for code in self.compiled if dynamic_dims and code.serves(inputs)), None)
        if found is None:
            found = CompiledGraph(self.module, inputs, dynamic_dims, self.options)
            self.compiled.append(found)
        self._by_sizes[sizes] = found
        return found


class SizePolymorphic(ABC, Generic[B, T]):
    """The traces of a program: one for all buckets, if these differ in nothing but sizes, or one per bucket.

    Args:
        spec: of any call of the program.
        options: of `torch.compile`.
    """

    def __init__(self, spec: CallSpec, options: CompileOptions) -> None:
        self.options = options
        self.dims, self.dim_inputs = spec.dims, dim_inputs(spec)
        self.shared_trace: T | None = None
        """The trace that serves all buckets, if there is one."""
        self.trace_by_sizes: dict[tuple[int, ...], T] = {}
        """The traces that serve one bucket each, by its sizes."""
        self._is_known, self._conditions = False, SizeConditions()

    @property
    @abstractmethod
    def compilations(self) -> int:
        """The number of compilations, each of a forward and perhaps a backward."""

    @abstractmethod
    def trace(self, bucket: B, points: Sequence[tuple[int, ...]]) -> T:
        """Trace the program at some sizes.

        Raises:
            NoTemplate: the graphs at these sizes differ in more than numbers.
        """

    def trace_for(self, bucket: B) -> T:
        """Return the trace that serves a bucket; make it if it is new."""
        if not self._is_known:
            self._is_known = True
            self.shared_trace, self._conditions = self._trace_for_all(bucket), bucket.conditions
        if self.shared_trace is not None:
            bucket.conditions = self._conditions
            return self.shared_trace
        sizes = bucket.spec.buckets
        if sizes not in self.trace_by_sizes:
            self.trace_by_sizes[sizes] = self.trace(bucket, [sizes])
        return self.trace_by_sizes[sizes]

    def traces(self) -> list[T]:
        """Return all traces."""
        return [*self.trace_by_sizes.values(), *([] if self.shared_trace is None else [self.shared_trace])]

    def _trace_for_all(self, bucket: B) -> T | None:
        points = trace_points(self.dims, bucket.spec.buckets)
        if points is None or self.options.get("dynamic") is False:
            return None
        try:
            return self.trace(bucket, points)
        except NoTemplate as difference:
            _log.warning("compiled once per bucket: %s", difference)
            bucket.conditions.clear()  # of these sizes
            return None

    def dynamic_dims(self, bucket: B) -> list[tuple[int, int]]:
        """Return the (input, dim) pairs of a bucket's inputs whose size is dynamic."""
        if self.shared_trace is None:
            return []
        return [
            (i, d) for i, source in enumerate(bucket.spec.inputs) for d, k in enumerate(source.size_index) if k >= 0
        ]


def dim_inputs(spec: CallSpec) -> list[Place]:
    """Return where each Dim's size can be read: the first input that has it, and in which of its dims."""
    found: dict[int, Place] = {}
    for i, source in enumerate(spec.inputs):
        for d, k in enumerate(source.size_index):
            if k >= 0:
                found.setdefault(k, (i, d))
    return [found[k] for k in range(len(spec.dims))]


def trace_points(dims: Sequence[Dim], buckets: tuple[int, ...]) -> list[tuple[int, ...]] | None:
    """Return the sizes to trace a program at, the last as a check; None for too few sizes, or not one or two Dims.

    Args:
        dims: the program's Dims.
        buckets: of some call.

    Example:
        >>> trace_points([Dim("seq", max=512, buckets=64)], (128,))
        [(448,), (384,), (64,)]
        >>> trace_points([Dim("a", max=3, buckets=[1, 3])], (3,))
    """
    if not 1 <= len(dims) <= 2:
        return None
    each = [_some_buckets(dim, bucket) for dim, bucket in zip(dims, buckets, strict=True)]
    if any(len(found) < 2 for found in each):
        return None
    points = grid(tuple(found[0] for found in each), tuple(found[1] for found in each))
    check = tuple(found[2] for found in each if len(found) > 2)
    return [*points, check] if len(check) == len(dims) else points


def _some_buckets(dim: Dim, bucket: int) -> list[int]:
    """Return up to three sizes on the buckets' grid, which need not be buckets.

    Size 1 is left out, since programs treat it specially. The largest comes last: a table that a program slices to its
    input's size is often exactly that large, and then isn't sliced.
    """
    try:
        every = list(dim.buckets)
    except SizeError:
        every = list(itertools.accumulate(range(2), lambda b, _: dim.bucket(b + 1), initial=bucket))
    usable = [b for b in every if b > 1]
    if not usable:
        return []
    step, largest = math.gcd(*usable), max(usable)
    wanted = (largest - step, largest - 2 * step, min(usable), largest)
    return list(dict.fromkeys(size for size in wanted if size > 1))[:3]


class Compiled(SizePolymorphic[Bucket, tuple[ShapeTemplate, DynamicCode]]):
    """A program as compiled code; its arguments are those of `SizePolymorphic`."""

    _written_inputs: frozenset[int] = frozenset()

    @property
    def compilations(self) -> int:
        """See `SizePolymorphic`."""
        return sum(len(code.compiled) for _, code in self.traces())

    def run(self, bucket: Bucket) -> Outputs:
        """Run the compiled program on a bucket's static inputs."""
        template, code = self.trace_for(bucket)
        sizes, inputs = bucket.spec.buckets, bucket.inputs()
        # Casts are in the graph: in the caller's autocast there would be more.
        with torch.autocast(bucket.device.type, enabled=False, cache_enabled=False):
            tensors = code.compiled_for(sizes, inputs, self.dynamic_dims(bucket))(*inputs)
        bucket.written_inputs |= self._written_inputs
        return join_outputs(tensors, template.extra(sizes))

    def trace(self, bucket: Bucket, points: Sequence[tuple[int, ...]]) -> tuple[ShapeTemplate, DynamicCode]:
        """See `SizePolymorphic`."""
        template = ShapeTemplate(
            lambda inputs: split_outputs(bucket.run_on(inputs)), bucket.zero_inputs, points, self.dim_inputs
        )
        self._written_inputs |= bucket.written_inputs
        share_inputs(template.module)
        return template, DynamicCode(template.module, self.options)


class CompiledBucket(Bucket):
    """A bucket that runs compiled code, which it takes from a cache."""

    has_compiled_code = True
    code: Compiled

    def take_code(self, cache: CompileCache) -> None:
        """Take the code from the cache."""
        self.code = cache.code_for(self.spec, self.device, Compiled)

    def _run(self, host: HostSizes | None) -> Outputs:
        return self.code.run(self)


def split_outputs(outputs: Outputs) -> tuple[list[Tensor], PyTree]:
    """Split a program's outputs into their tensors and a pytree of the rest, with every bucket as a number.

    The rest of a tensor is its dims, and the symbols, buckets and rows of its true sizes; of another leaf its value.
    """
    tensors: list[Tensor] = []
    rest: list[PyTree] = []
    for leaf in outputs.leaves:
        if not isinstance(leaf.value, Tensor):
            rest.append((leaf.value,))
            continue
        tensors.append(leaf.value)
        dims = None if leaf.dims is None else [[(f.bucket, f.size) for f in factors] for factors in leaf.dims]
        rest.append((dims, list(leaf.symbols), list(leaf.buckets), leaf.rows))
    return tensors, (rest, outputs.structure, outputs.is_leaf)


def join_outputs(tensors: Sequence[Tensor], extra: PyTree) -> Outputs:
    """Rebuild the outputs that `split_outputs` split."""
    rest, structure, is_leaf = extra
    remaining = iter(tensors)
    leaves = []
    for fields in rest:
        if len(fields) == 1:
            leaves.append(Output(fields[0]))
            continue
        dims, symbols, buckets, rows = fields
        padded = None if dims is None else tuple(tuple(Factor(*f) for f in factors) for factors in dims)
        leaves.append(Output(next(remaining), padded, tuple(symbols), tuple(buckets), rows))
    return Outputs(leaves, structure, is_leaf)
