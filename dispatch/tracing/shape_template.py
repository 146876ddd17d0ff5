"""One graph of aten ops for every size, found by tracing a program at a few.

A program over padded tensors sees its bucket as numbers: in views, in `arange`, in `expand`. Traced at two sizes it
gives two graphs that differ in those numbers alone. A number that is `v` at size `s`, and `w` at size `t`, is assumed
to be

    a * s + b,    a = (w - v) / (t - s),    b = v - a * s,

for several sizes a sum over their products. A further trace, at another size, must match the template; if it doesn't,
or if the graphs differ in more than numbers, there is no template.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from operator import attrgetter

import torch
from torch import Tensor, fx
from torch.fx.node import Argument
from torch.utils import _pytree as pytree

from subtensors.dispatch.ops.tree import PyTree
from subtensors.dispatch.tracing import aten_trace

Sizes = tuple[int, ...]
Place = tuple[int, int]
"""The input, and the dim of it, that a size is read from."""


class NoTemplate(Exception):
    """The graphs of a program at several sizes have no common template; the message names a difference."""


@dataclass(frozen=True, eq=False)
class Number:
    """An integer as a polynomial of sizes, linear in each.

    Args:
        terms: the coefficient of each product of sizes, which is given as their indices.

    Example:
        >>> number = Number.through([(4,), (6,)], [9, 13])
        >>> number.at((10,))
        21
    """

    terms: dict[tuple[int, ...], int]

    @staticmethod
    def through(points: Sequence[Sizes], values: Sequence[int]) -> Number:
        """The polynomial through the points of a `grid`.

        Raises:
            NoTemplate: a coefficient is no integer.
        """
        terms = _terms(points, [Fraction(v) for v in values], 0)
        if any(c.denominator != 1 for c in terms.values()):
            raise NoTemplate(f"{list(values)} at the sizes {list(points)} is no polynomial")
        return Number({p: int(c) for p, c in terms.items() if c})

    def at(self, sizes: Sizes) -> int:
        """Its value."""
        return sum(c * _product(sizes, p) for p, c in self.terms.items())


class ShapeTemplate:
    """A program's graph with dynamic sizes.

    Args:
        program: a function of tensors, which returns a list of tensors and a pytree of ints and other values, which may
            depend on the sizes, too.
        make: returns the inputs at some sizes, tensors of any values, which are not computed with.
        points: the sizes to trace at: `points_needed` of them, and any number more to check the template with.
        places: the source of each size.
        simplified: see `decomposed` of `trace_aten`.

    Raises:
        NoTemplate: the graphs have no common template.
    """

    def __init__(
        self,
        program: Callable[[Sequence[Tensor]], tuple[list[Tensor], PyTree]],
        make: Callable[[Sizes], list[Tensor]],
        points: Sequence[Sizes],
        places: Sequence[Place],
        simplified: bool = False,
    ) -> None:
        extras: list[PyTree] = []

        def traced(*inputs: Tensor) -> list[Tensor]:
            tensors, extra = program(inputs)
            extras.append(extra)
            return tensors

        graphs = []
        for point in points:
            graphs.append(aten_trace.trace_aten(traced, make(point), simplified))
        self.traces = [list(graph.graph.nodes) for graph in graphs]
        """The nodes of the trace at each point; those at the first are the module's own."""
        self.points = list(points)
        self._fitted = points_needed(len(places))
        self.module = self._merge_graphs(graphs, self.traces, places)
        self._extra = self._merge(extras, "the results that are no tensors")

    def extra(self, sizes: Sizes) -> PyTree:
        """Return the program's results at some sizes that are no tensors."""
        return pytree.tree_map_only(Number, lambda n: n.at(sizes), self._extra, is_leaf=lambda x: isinstance(x, Number))

    def _merge(self, values: Sequence[PyTree], where: str) -> PyTree:
        """Merge the values at the points into one: equal parts unchanged, numbers that differ as polynomials."""
        leaves, specs = zip(*[pytree.tree_flatten(value) for value in values], strict=True)
        if any(spec != specs[0] for spec in specs):
            raise NoTemplate(f"{where} has another structure at another size")
        merged = [self._merge_leaves(parts, where) for parts in zip(*leaves, strict=True)]
        return pytree.tree_unflatten(merged, specs[0])

    def _merge_leaves(self, parts: Sequence[PyTree], where: str) -> PyTree:
        if all(type(p) is int for p in parts):
            if len(set(parts)) == 1:
                return parts[0]
            number = Number.through(self.points[: self._fitted], parts[: self._fitted])
            if any(number.at(point) != p for point, p in zip(self.points, parts, strict=True)):
                raise NoTemplate(f"{where} has the numbers {list(parts)} at the sizes {self.points}")
            return number
        if any(type(p) is not type(parts[0]) or not _equal(p, parts[0]) for p in parts):
            raise NoTemplate(f"{where} differs between sizes: {parts[0]} and {parts[-1]}")
        return parts[0]

    def _merge_graphs(
        self, graphs: Sequence[fx.GraphModule], traces: Sequence[Sequence[fx.Node]], places: Sequence[Place]
    ) -> fx.GraphModule:
        """Return the first graph, with the numbers that differ between graphs computed from the sizes."""
        if len({len(nodes) for nodes in traces}) > 1:
            raise NoTemplate(f"the graphs have {[len(nodes) for nodes in traces]} nodes")
        first = graphs[0]
        order = [{node: _Reference(i) for i, node in enumerate(nodes)} for nodes in traces]
        numbers = _SizeNodes(first.graph, [node for node in traces[0] if node.op == "placeholder"], places)

        def restore(x: PyTree) -> PyTree:
            if isinstance(x, Number):
                return numbers.node(x)
            return traces[0][x.index] if isinstance(x, _Reference) else x

        for nodes in zip(*traces, strict=True):
            head = nodes[0]
            where = f"{head.op} {head.target}"
            is_named = head.op in ("placeholder", "get_attr")  # by the trace, each time anew
            if any(node.op != head.op or (node.target != head.target and not is_named) for node in nodes):
                raise NoTemplate(f"{where} is {nodes[-1].op} {nodes[-1].target} at another size")
            if head.op == "get_attr":
                constants = [attrgetter(str(n.target))(graph) for graph, n in zip(graphs, nodes, strict=True)]
                if any(not _equal(c, constants[0]) for c in constants):
                    raise NoTemplate(f"a constant of shape {list(constants[0].shape)} differs between sizes")
                continue
            arguments = [
                pytree.tree_map_only(fx.Node, at.__getitem__, (node.args, node.kwargs))
                for node, at in zip(nodes, order, strict=True)
            ]
            merged = self._merge(arguments, where)
            head.args, head.kwargs = pytree.tree_map(restore, merged)
        first.graph.lint()
        first.recompile()
        return first


class _SizeNodes:
    """The nodes of a graph that compute numbers from the sizes of its inputs, each once; they follow the inputs."""

    def __init__(self, graph: fx.Graph, inputs: Sequence[fx.Node], places: Sequence[Place]) -> None:
        self._graph = graph
        self._last = inputs[-1]
        self._sizes = [self._add(torch.ops.aten.sym_size.int, inputs[source], dim) for source, dim in places]
        self._made: dict[tuple[tuple[tuple[int, ...], int], ...], fx.Node | int] = {}

    def node(self, number: Number) -> fx.Node | int:
        """Return the node that computes a number; a number without sizes itself."""
        key = tuple(sorted(number.terms.items()))
        if key not in self._made:
            total: fx.Node | int = 0
            for product, factor in key:
                term: fx.Node | int = factor
                for i in product:
                    term = self._sizes[i] if term == 1 else self._add(operator.mul, self._sizes[i], term)
                total = term if total == 0 else self._add(operator.add, term, total)
            self._made[key] = total
        return self._made[key]

    def _add(self, function: Callable[..., object], *arguments: Argument) -> fx.Node:
        """Insert one more node, after the others."""
        with self._graph.inserting_after(self._last):
            self._last = self._graph.call_function(function, arguments)
        return self._last


@dataclass(frozen=True)
class _Reference:
    """A node of a graph, by its index."""

    index: int


def points_needed(sizes: int) -> int:
    """Return the number of traces that determine a number which depends on `sizes` sizes.

    >>> points_needed(1), points_needed(2)
    (2, 4)
    """
    return int(2**sizes)


def grid(near: Sizes, far: Sizes) -> list[Sizes]:
    """Return points that determine a polynomial linear in each size: every choice of near and far sizes.

    >>> grid((4,), (8,))
    [(4,), (8,)]
    """
    return [tuple(pair) for pair in itertools.product(*zip(near, far, strict=True))]


def _product(sizes: Sizes, indices: tuple[int, ...]) -> int:
    return math.prod(sizes[i] for i in indices)


def _terms(points: Sequence[Sizes], values: Sequence[Fraction], size: int) -> dict[tuple[int, ...], Fraction]:
    """Return the coefficients through values on a grid, whose first half has the near value of a size."""
    if len(values) == 1:
        return {(): values[0]}
    half = len(values) // 2
    near, far = points[0][size], points[half][size]
    if near == far:
        raise NoTemplate("the traced sizes don't determine the numbers")
    low, high = (_terms(points[part], values[part], size + 1) for part in (slice(half), slice(half, None)))
    slopes = {p: (high[p] - low[p]) / (far - near) for p in low}
    return {p: low[p] - slopes[p] * near for p in low} | {(size, *p): slope for p, slope in slopes.items()}


def _equal(a: object, b: object) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a is b or (a.shape == b.shape and a.dtype == b.dtype and bool(torch.equal(a, b)))
    return bool(a == b) or (a != a and b != b)
