"""One compilation for all buckets of a program, or one per bucket.

A program is traced on padded tensors at two or three sizes, what differs between the traces becomes arithmetic on the
bucket's size, and that one graph is compiled with the size left open. Capturing a further bucket then takes a run or
two of compiled code. A program whose graphs differ in more than numbers is compiled once per bucket.
"""

from __future__ import annotations

import itertools
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from torch import Tensor, fx

from subtensors.dispatch.ops.errors import SizeError
from subtensors.dispatch.torch_internals import compiler
from subtensors.dispatch.torch_internals.compiler import CompiledGraph
from subtensors.dispatch.tracing.shape_template import NoTemplate, Place, grid
from subtensors.sizes.dims import Dim

if TYPE_CHECKING:
    from subtensors.bucketed.bucket import Bucket
    from subtensors.bucketed.calls.call_spec import CallSpec

_log = logging.getLogger("subtensors.bucketed")

T = TypeVar("T")


class DynamicCode:
    """A graph as compiled code for many sizes: one compilation for all sizes that it serves.

    Args:
        module: as `CompiledGraph` takes it.
        options: of `torch.compile`.
    """

    def __init__(self, module: fx.GraphModule, options: dict[str, Any]) -> None:
        self.module, self.options = module, options
        self.made: list[CompiledGraph] = []
        self._of_sizes: dict[tuple[int, ...], CompiledGraph] = {}

    def at(
        self, sizes: tuple[int, ...], inputs: Sequence[Tensor], open_dims: Collection[tuple[int, int]]
    ) -> CompiledGraph:
        """The code for inputs of some sizes.

        Args:
            sizes: the bucket's.
            inputs: of these sizes.
            open_dims: the (input, dim) pairs that depend on the sizes; empty if the graph serves one bucket.
        """
        found = self._of_sizes.get(sizes)
        if found is None:
            found = next((code for code in self.made if open_dims and code.serves(inputs)), None)
        if found is None:
            found = CompiledGraph(self.module, inputs, open_dims, self.options)
            self.made.append(found)
        self._of_sizes[sizes] = found
        return found


class SizePolymorphic(ABC, Generic[T]):
    """The traces of a program: one for all buckets, if these differ in nothing but sizes, or one per bucket.

    Args:
        bucket: any bucket of the program.
        options: of `torch.compile`.
    """

    def __init__(self, bucket: Bucket, options: dict[str, Any]) -> None:
        self.options = options
        self.dims, self.places = bucket.reading.dims, places_of(bucket.reading)
        self.one: T | None = None
        """The trace that serves all buckets, if there is one."""
        self.each: dict[tuple[int, ...], T] = {}
        """The traces that serve one bucket each, by its sizes."""
        self._is_known = False
        if bucket.device.type == "cuda":
            compiler.start_compile_workers(options)

    @abstractmethod
    def traced(self, bucket: Any, points: Sequence[tuple[int, ...]]) -> T:
        """Trace the program at some sizes.

        Raises:
            NoTemplate: the graphs at these sizes differ in more than numbers.
        """

    def at(self, bucket: Bucket) -> T:
        """Return the trace that serves a bucket; make it if it is new."""
        if not self._is_known:
            self._is_known = True
            self.one = self._of_all(bucket)
        if self.one is not None:
            return self.one
        sizes = bucket.reading.buckets
        if sizes not in self.each:
            self.each[sizes] = self.traced(bucket, [sizes])
        return self.each[sizes]

    def every(self) -> list[T]:
        """All traces."""
        return [*self.each.values(), *([] if self.one is None else [self.one])]

    def _of_all(self, bucket: Bucket) -> T | None:
        points = trace_points(self.dims, bucket.reading.buckets)
        if points is None or self.options.get("dynamic") is False:
            return None
        try:
            return self.traced(bucket, points)
        except NoTemplate as difference:
            _log.warning("compiled once a bucket: %s", difference)
            return None

    def open_dims(self, bucket: Bucket) -> list[tuple[int, int]]:
        """The (input, dim) pairs of a bucket's inputs whose size is left open."""
        if self.one is None:
            return []
        return [(i, d) for i, source in enumerate(bucket.reading.sources) for d, k in enumerate(source.which) if k >= 0]


def places_of(reading: CallSpec) -> list[Place]:
    """The place where each Dim's size can be read: the first input that has it, and in which of its dims."""
    found: dict[int, Place] = {}
    for i, source in enumerate(reading.sources):
        for d, k in enumerate(source.which):
            if k >= 0:
                found.setdefault(k, (i, d))
    return [found[k] for k in range(len(reading.dims))]


def trace_points(dims: Sequence[Dim], buckets: tuple[int, ...]) -> list[tuple[int, ...]] | None:
    """The sizes to trace a program at, the last one as a check; None for too few sizes, or not one or two Dims.

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
    """Up to three sizes on the buckets' grid, which need not be buckets.

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
