"""One compilation for all buckets of a program.

The program is traced on padded tensors at two or three sizes, what differs between the traces becomes arithmetic on the
bucket's size, and that one graph is compiled with the size left open. Capturing a further bucket then takes a run or
two of compiled code. A program whose graphs differ in more than numbers is compiled once a bucket.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from subtensors.bucketed.outputs import Output, Outputs
from subtensors.dispatch import compiler_private
from subtensors.dispatch.compiler_private import CompiledGraph
from subtensors.dispatch.errors import SizeError
from subtensors.dispatch.shape_template import NoTemplate, Place, Template, grid
from subtensors.dispatch.size_factors import Factor
from subtensors.sizes.dims import Dim

if TYPE_CHECKING:
    from subtensors.bucketed.arguments import Reading
    from subtensors.bucketed.bucket import Bucket

_log = logging.getLogger("subtensors.bucketed")


class Compiled:
    """The buckets of one program that differ in nothing but sizes.

    Args:
        bucket: any of them.
        options: of `torch.compile`.
    """

    def __init__(self, bucket: Bucket, options: dict[str, Any]) -> None:
        self.options = options
        self.dims = bucket.reading.dims
        self.places = places_of(bucket.reading)
        self._one: Template | None = None
        self._each: dict[tuple[int, ...], Template] = {}
        self._is_one: bool | None = None
        self._written: set[int] = set()
        self._code: list[CompiledGraph] = []
        self._of_sizes: dict[tuple[int, ...], CompiledGraph] = {}
        if bucket.device.type == "cuda":
            compiler_private.start_workers()

    @property
    def compilations(self) -> int:
        """How many there were."""
        return len(self._code)

    def run(self, bucket: Bucket) -> Outputs:
        """The program, compiled, on a bucket's static inputs."""
        sizes = bucket.reading.buckets
        template = self._template(bucket)
        # Casts are in the graph: in the caller's autocast there would be more.
        with torch.autocast(bucket.device.type, enabled=False, cache_enabled=False):
            if sizes not in self._of_sizes:
                self._of_sizes[sizes] = self._compiled(template, bucket)
            tensors = self._of_sizes[sizes](*bucket.inputs())
        bucket.written |= self._written
        return assembled(tensors, template.extra(sizes))

    def _template(self, bucket: Bucket) -> Template:
        sizes = bucket.reading.buckets
        if self._is_one is None:
            self._one = self._make_one(bucket)
            self._is_one = self._one is not None
        if self._one is not None:
            return self._one
        if sizes not in self._each:
            self._each[sizes] = self._traced(bucket, [sizes])
        return self._each[sizes]

    def _make_one(self, bucket: Bucket) -> Template | None:
        points = trace_points(self.dims, bucket.reading.buckets)
        if points is None or self.options.get("dynamic") is False:
            return None
        try:
            return self._traced(bucket, points)
        except NoTemplate as difference:
            _log.warning("compiled once a bucket: %s", difference)
            return None

    def _traced(self, bucket: Bucket, points: Sequence[tuple[int, ...]]) -> Template:
        made = Template(lambda inputs: taken_apart(bucket.run_on(inputs)), bucket.zeros, points, self.places)
        self._written |= bucket.written
        return made

    def _compiled(self, template: Template, bucket: Bucket) -> CompiledGraph:
        """The code for a bucket: that of another one where it serves."""
        inputs = bucket.inputs()
        found = next((code for code in self._code if self._one is not None and code.serves(inputs)), None)
        if found is None:
            open_dims = [(i, d) for i, s in enumerate(bucket.reading.sources) for d, k in enumerate(s.which) if k >= 0]
            found = CompiledGraph(template.module, inputs, open_dims if self._one is not None else [], self.options)
            self._code.append(found)
        return found


def places_of(reading: Reading) -> list[Place]:
    """For each size of some calls where it can be read: which of their inputs has it, in which of its dims."""
    found: dict[int, Place] = {}
    for i, source in enumerate(reading.sources):
        for d, k in enumerate(source.which):
            if k >= 0:
                found.setdefault(k, (i, d))
    return [found[k] for k in range(len(reading.dims))]


def trace_points(dims: Sequence[Dim], buckets: tuple[int, ...]) -> list[tuple[int, ...]] | None:
    """The sizes to trace a program at: those that fix its numbers, and one to check with; None for too few or many.

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

    Not 1, which is a size like no other; and the largest at last, since what a program slices to its size is often just
    as large, and then isn't sliced.
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


def taken_apart(outputs: Outputs) -> tuple[list[Tensor], Any]:
    """The tensors that a program returned, and the rest of it, with every bucket as a number."""
    tensors: list[Tensor] = []
    rest: list[tuple[Any, ...]] = []
    for leaf in outputs.leaves:
        if not isinstance(leaf.value, Tensor):
            rest.append(("value", leaf.value))
            continue
        tensors.append(leaf.value)
        dims = leaf.dims and [[(f.bucket, f.size) for f in factors] for factors in leaf.dims]
        rest.append(("tensor", dims, list(leaf.symbols), list(leaf.buckets), leaf.rows))
    return tensors, (rest, outputs.spec, outputs.is_leaf)


def assembled(tensors: Sequence[Tensor], extra: Any) -> Outputs:
    """The outputs that `taken_apart` took apart."""
    rest, spec, is_leaf = extra
    left = iter(tensors)
    leaves = []
    for kind, *fields in rest:
        if kind == "value":
            leaves.append(Output(fields[0]))
            continue
        dims, symbols, buckets, rows = fields
        padded = None if dims is None else tuple(tuple(Factor(*f) for f in factors) for factors in dims)
        leaves.append(Output(next(left), padded, tuple(symbols), tuple(buckets), rows))
    return Outputs(leaves, spec, is_leaf)
