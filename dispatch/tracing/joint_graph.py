"""A graph that computes a program and its gradients, cut into a forward and a backward one.

What the forward leaves for the backward is chosen as torch's compiler chooses it: the cut of least memory traffic,
where the backward computes cheap values again. Values that are random are never computed again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from subtensors.dispatch.tracing import aten_trace
from subtensors.dispatch.tracing.aten_trace import NotFunctional, mutates

_MOVES = (torch.ops.aten.permute.default, torch.ops.aten.view.default)
_SAME = (torch.ops.aten.alias.default, torch.ops.aten.detach.default)


class ForwardBackward:
    """The forward and the backward of a joint graph.

    Args:
        joint: returns results, then gradients, then the tensors that stand for the gradients of results, which the
            backward is given instead.
        results, gradients: how many of each.
        traces: the nodes of the joint graph as the program was traced at each of some sizes, with their values.

    Raises:
        NotFunctional: it writes to tensors in place.
    """

    def __init__(
        self, joint: fx.GraphModule, results: int, gradients: int, traces: Sequence[Sequence[fx.Node]]
    ) -> None:
        if (written := next(filter(mutates, joint.graph.nodes), None)) is not None:
            raise NotFunctional(f"{written.target} writes in place")
        own = dict(zip(traces[-1], traces[0], strict=True))
        chosen = [own[n] for n in aten_trace.saved_for_backward(traces[-1][0].graph, joint, results, gradients)]
        # The compiler has chosen among values; a backward that computes one of them under another name is to find it.
        first = _merge_equals(joint.graph, apart=_outs(joint.graph)[results + gradients :])
        chosen = [first[n] for n in chosen]
        outs = _outs(joint.graph)
        wanted, tangents = outs[results : results + gradients], outs[results + gradients :]
        inputs = [n for n in joint.graph.nodes if n.op == "placeholder"]
        # A backward may be random itself, or said to be, as some of attention's are.
        not_saved = {*inputs, *_downstream(joint.graph, tangents)}
        saved = [n for n in dict.fromkeys([*chosen, *_random(joint.graph)]) if n not in not_saved]
        needed = _needed(wanted, [*saved, *inputs, *tangents])
        saved = [n for n in saved if n in needed]
        self.read = [i for i, n in enumerate(inputs) if n in needed]
        """Which of the inputs the backward is given, after what was saved and before the gradients of results."""
        _cast_in_products(joint.graph, wanted, apart={*saved, *tangents})
        outs = _outs(joint.graph)
        wanted = outs[results : results + gradients]
        self.forward = _extracted(joint, inputs, [*outs[:results], *saved])
        self.backward = _extracted(joint, [*saved, *[inputs[i] for i in self.read], *tangents], wanted)
        places = {node: i for i, node in enumerate(traces[0])}
        self.varying = [_varying([trace[places[n]] for trace in traces]) for n in [*saved, *tangents]]
        """The dims that differ between sizes, of each tensor that was saved and of each gradient of a result."""


def _outs(graph: fx.Graph) -> list[fx.Node]:
    return list(graph.output_node().args[0])  # type: ignore[arg-type]


def _merge_equals(graph: fx.Graph, apart: Sequence[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Compute every value only once, except for random ones.

    Args:
        graph: in which nothing writes in place, so that the same tensor under another name is that tensor.
        apart: nodes that stand for something else than what they compute.

    Returns:
        For each node the first that has its value.
    """
    chance, known = {*_random_ops(graph), *apart}, dict[Any, fx.Node]()
    first: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        first[node] = node
        if node.op not in ("call_function", "get_attr") or node in chance:
            continue
        if node.target in _SAME:
            first[node] = node.args[0]
        else:
            first[node] = known.setdefault(_what_it_computes(node), node)
        if first[node] is not node:
            node.replace_all_uses_with(first[node])
    return first


def _cast_in_products(graph: fx.Graph, casts: Sequence[fx.Node], apart: AbstractSet[fx.Node]) -> None:
    """Make products that are only cast to float32 return it directly: a GPU sums them in float32 anyway.

    The gradients of weights that autocast rounds are such products. This saves a kernel for each, and a rounding. A
    cast whose result is not an output is left alone: the compiler fuses it into what follows, which then reads half as
    much.

    Args:
        graph: computes nothing twice.
        casts: what may be such, among other nodes.
        apart: nodes that are wanted as they are.
    """
    graph.eliminate_dead_code()
    ends = {graph.output_node()}
    for cast in dict.fromkeys(casts):
        if cast.target is not torch.ops.prims.convert_element_type.default or set(cast.users) != ends:
            continue
        node: Any = cast.args[0]
        moved: list[fx.Node] = []
        while node.target in _MOVES and len(node.users) == 1:
            moved.append(node)
            node = node.args[0]
        value = node.meta.get("val")
        is_product = node.target is torch.ops.aten.mm.default and len(node.users) == 1 and value.is_cuda
        if cast.args[1] != torch.float32 or not is_product or not apart.isdisjoint([cast, node, *moved]):
            continue
        with graph.inserting_before(node):
            wide = graph.call_function(torch.ops.aten.mm.dtype, (*node.args, torch.float32))
            wide.meta = dict(node.meta)
        node.replace_all_uses_with(wide)
        cast.replace_all_uses_with(moved[0] if moved else wide)
        graph.erase_node(cast)
        graph.erase_node(node)


def _what_it_computes(node: fx.Node) -> Any:
    leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
    return node.target, spec, tuple((type(x), repr(x) if isinstance(x, float) else x) for x in leaves)


def _random_ops(graph: fx.Graph) -> list[fx.Node]:
    return [
        n
        for n in graph.nodes
        if isinstance(n.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in n.target.tags
    ]


def _random(graph: fx.Graph) -> list[fx.Node]:
    """The tensors that random ops make."""
    found = _random_ops(graph)
    return [part for n in found for part in (n.users if isinstance(n.meta.get("val"), (tuple, list)) else [n])]


def _downstream(graph: fx.Graph, sources: Iterable[fx.Node]) -> set[fx.Node]:
    """Some nodes and all that is computed from them."""
    found = set(sources)
    for node in graph.nodes:
        if node.op != "output" and not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _needed(wanted: Iterable[fx.Node], given: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes that `wanted` are computed from, themselves included; the search stops at `given` ones."""
    ends, found = set(given), set()
    todo = list(wanted)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo.extend(() if node in ends else node.all_input_nodes)
    return found


def _extracted(joint: fx.GraphModule, given: Sequence[fx.Node], wanted: Sequence[fx.Node]) -> fx.GraphModule:
    """The part of a graph that computes some nodes from others, which are its inputs."""
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
    shapes: list[Any] = [getattr(node.meta.get("val"), "shape", ()) for node in at_sizes]
    return [d for d, sizes in enumerate(zip(*shapes, strict=True)) if len(set(sizes)) > 1]
