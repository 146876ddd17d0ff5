"""Partition a joint graph, which computes a program and its gradients, into a forward and a backward graph.

The saved values are those that torch's compiler would choose: the cut of least memory traffic, where the backward
recomputes cheap values. Random values are never recomputed.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from collections.abc import Set as AbstractSet

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from subtensors.dispatch.tracing import aten_trace
from subtensors.dispatch.tracing.aten_trace import NotFunctional, mutates, returned_nodes

_VIEWS = (torch.ops.aten.permute.default, torch.ops.aten.view.default)
_ALIASES = (torch.ops.aten.alias.default, torch.ops.aten.detach.default)


class ForwardBackward:
    """The forward and the backward graph of a joint graph.

    Args:
        joint: returns results, then gradients, then the tangents (the gradients of results), which are inputs of the
            backward.
        results, gradients: the number of each.
        traces: the nodes of the joint graph at each of the traced sizes, with their values.

    Raises:
        NotFunctional: the graph writes to tensors in place.
    """

    def __init__(
        self, joint: fx.GraphModule, results: int, gradients: int, traces: Sequence[Sequence[fx.Node]]
    ) -> None:
        if (written := next(filter(mutates, joint.graph.nodes), None)) is not None:
            raise NotFunctional(f"{written.target} writes in place")
        own = dict(zip(traces[-1], traces[0], strict=True))
        chosen = [own[n] for n in aten_trace.saved_for_backward(traces[-1][0].graph, joint, results, gradients)]
        # The compiler chose among values; a backward that computes one of them in another node must find it.
        first = _merge_equals(joint.graph, distinct=returned_nodes(joint.graph)[results + gradients :])
        chosen = [first[n] for n in chosen]
        outs = returned_nodes(joint.graph)
        wanted, tangents = outs[results : results + gradients], outs[results + gradients :]
        inputs = [n for n in joint.graph.nodes if n.op == "placeholder"]
        # A backward may be random itself, or tagged so, as some of attention's are.
        not_saved = {*inputs, *_downstream(joint.graph, tangents)}
        saved = [n for n in dict.fromkeys([*chosen, *_random(joint.graph)]) if n not in not_saved]
        needed = _needed(wanted, [*saved, *inputs, *tangents])
        saved = [n for n in saved if n in needed]
        self.backward_inputs = [i for i, n in enumerate(inputs) if n in needed]
        """The indices of the inputs that the backward takes, after the saved values and before the tangents."""
        _cast_in_products(joint.graph, wanted, distinct={*saved, *tangents})
        outs = returned_nodes(joint.graph)
        wanted = outs[results : results + gradients]
        self.forward = _extracted(joint, inputs, [*outs[:results], *saved])
        self.backward = _extracted(joint, [*saved, *[inputs[i] for i in self.backward_inputs], *tangents], wanted)
        places = {node: i for i, node in enumerate(traces[0])}
        self.varying = [_varying([trace[places[n]] for trace in traces]) for n in [*saved, *tangents]]
        """The dims that differ between sizes, of each saved value and of each tangent."""


def _first_argument(node: fx.Node) -> fx.Node:
    argument = node.args[0]
    assert isinstance(argument, fx.Node)
    return argument


def _merge_equals(graph: fx.Graph, distinct: Sequence[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Compute every value only once, except for random ones.

    Args:
        graph: writes nothing in place, so that an alias of a tensor is the same value.
        distinct: nodes whose value is not what they compute.

    Returns:
        For each node the first one of the same value.
    """
    chance, known = {*_random_ops(graph), *distinct}, dict[Hashable, fx.Node]()
    first: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        first[node] = node
        if node.op not in ("call_function", "get_attr") or node in chance:
            continue
        if node.target in _ALIASES:
            first[node] = _first_argument(node)
        else:
            first[node] = known.setdefault(_computation_key(node), node)
        if first[node] is not node:
            node.replace_all_uses_with(first[node])
    return first


def _cast_in_products(graph: fx.Graph, casts: Sequence[fx.Node], distinct: AbstractSet[fx.Node]) -> None:
    """Make products that are only cast to float32 return it directly: a GPU sums them in float32 anyway.

    The gradients of weights that autocast rounds are such products. This saves a kernel and a rounding for each. A
    cast whose result is not an output is left alone: the compiler fuses it into what follows, which then reads half as
    much.

    Args:
        graph: computes nothing twice.
        casts: the casts, among other nodes.
        distinct: nodes that must not change.
    """
    graph.eliminate_dead_code()
    ends = {graph.output_node()}
    for cast in dict.fromkeys(casts):
        if cast.target is not torch.ops.prims.convert_element_type.default or set(cast.users) != ends:
            continue
        node = _first_argument(cast)
        views: list[fx.Node] = []
        while node.target in _VIEWS and len(node.users) == 1:
            views.append(node)
            node = _first_argument(node)
        value = node.meta.get("val")
        is_product = node.target is torch.ops.aten.mm.default and len(node.users) == 1
        is_on_gpu = isinstance(value, Tensor) and value.is_cuda
        if (
            cast.args[1] != torch.float32
            or not (is_product and is_on_gpu)
            or not distinct.isdisjoint([cast, node, *views])
        ):
            continue
        with graph.inserting_before(node):
            wide = graph.call_function(torch.ops.aten.mm.dtype, (*node.args, torch.float32))
            wide.meta = dict(node.meta)
        node.replace_all_uses_with(wide)
        cast.replace_all_uses_with(views[0] if views else wide)
        graph.erase_node(cast)
        graph.erase_node(node)


def _computation_key(node: fx.Node) -> Hashable:
    leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
    return node.target, spec, tuple((type(x), repr(x) if isinstance(x, float) else x) for x in leaves)


def _random_ops(graph: fx.Graph) -> list[fx.Node]:
    return [
        n
        for n in graph.nodes
        if isinstance(n.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in n.target.tags
    ]


def _random(graph: fx.Graph) -> list[fx.Node]:
    """The nodes of the tensors that random ops return."""
    return [
        part for n in _random_ops(graph) for part in (n.users if isinstance(n.meta.get("val"), (tuple, list)) else [n])
    ]


def _downstream(graph: fx.Graph, sources: Iterable[fx.Node]) -> set[fx.Node]:
    """Some nodes, and all nodes computed from them."""
    nodes = set(sources)
    for node in graph.nodes:
        if node.op != "output" and not nodes.isdisjoint(node.all_input_nodes):
            nodes.add(node)
    return nodes


def _needed(wanted: Iterable[fx.Node], given: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes that `wanted` are computed from, themselves included; the search stops at `given` ones."""
    ends, nodes = set(given), set()
    todo = list(wanted)
    while todo:
        node = todo.pop()
        if node not in nodes:
            nodes.add(node)
            todo.extend(() if node in ends else node.all_input_nodes)
    return nodes


def _extracted(joint: fx.GraphModule, given: Sequence[fx.Node], wanted: Sequence[fx.Node]) -> fx.GraphModule:
    """The part of a graph that computes the `wanted` nodes from the `given` ones."""
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for i, node in enumerate(given):
        made[node] = graph.placeholder(f"given_{i}")
        made[node].meta = dict(node.meta)
    needed = _needed(wanted, given)
    for node in joint.graph.nodes:
        if node in needed and node not in made:
            made[node] = graph.node_copy(node, made.__getitem__)
    graph.output([made[node] for node in wanted])
    return fx.GraphModule(joint, graph)


def _varying(at_sizes: Sequence[fx.Node]) -> list[int]:
    values = [node.meta.get("val") for node in at_sizes]
    shapes = [value.shape if isinstance(value, Tensor) else () for value in values]
    return [d for d, sizes in enumerate(zip(*shapes, strict=True)) if len(set(sizes)) > 1]
