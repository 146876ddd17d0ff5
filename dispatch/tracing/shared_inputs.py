"""Products of a traced graph that have their left operand in common, as one call for a few of them.

    addmm(b1, x, w1.t()), addmm(b2, x, w2.t()), addmm(b3, x, w3.t())

become grouped_linear(x, [w1, w2, w3], [b1, b2, b3]).
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from subtensors.dispatch.tracing.aten_trace import mutates
from subtensors.kernels.graph_inputs import grouped_linear

aten = torch.ops.aten

_PRODUCTS = {aten.addmm.default: 3, aten.mm.default: 2}
"""Those that are looked for, and how many operands they have, the weight last and the input before it."""
LARGEST = 1 << 23
"""Bytes of the weights of a call: to read more takes longer than to start a product."""


def share_inputs(
    module: fx.GraphModule, dtypes: Collection[torch.dtype] = grouped_linear.DTYPES, device: str = "cuda"
) -> None:
    """Compute the products of one matrix with several weights together.

    Args:
        module: a graph of aten ops that is not tracked by autograd; changed in place.
        dtypes, device: of the weights for which that is done.
    """
    nodes = list(module.graph.nodes)
    groups: dict[Any, list[fx.Node]] = {}
    steps = 0
    for node in nodes:
        # What is written to between two reads is two values.
        steps += mutates(node)
        if node.target in _PRODUCTS and not node.kwargs and len(node.args) == _PRODUCTS[node.target]:
            held = _held(module, node)
            if held and all(t.dtype in dtypes and t.device.type == device for t in held):
                groups.setdefault((steps, node.target, _value(node.args[-2])), []).append(node)
    for group in groups.values():
        for part in _parts(group):
            weights = [_held(module, node)[0] for node in part]
            if sum(w.nbytes for w in weights) <= LARGEST:
                _join(module.graph, part)
    module.graph.lint()
    module.recompile()


def _value(x: Any) -> Any:
    """A key that is equal for equal inputs: of a view, its base and its shape."""
    return (x.args[0], tuple(x.args[1])) if x.target is aten.view.default else x


def _held(module: fx.GraphModule, node: fx.Node) -> list[Tensor]:
    """The weight of a product, and its bias if it has one, where they are the module's own; else nothing."""
    turned: Any = node.args[-1]
    sources = _sources(node)
    if turned.target is not aten.t.default or any(source.op != "get_attr" for source in sources):
        return []
    weight, *bias = found = [operator.attrgetter(str(source.target))(module) for source in sources]
    is_plain = weight.is_contiguous() and all(b.shape == weight.shape[:1] and b.is_contiguous() for b in bias)
    return found if is_plain else []


def _sources(node: fx.Node) -> list[Any]:
    """The nodes of a product's weight, before it is transposed, and of its bias if it has one."""
    turned: Any = node.args[-1]
    return [*turned.args[:1], *node.args[:-2]]


def _parts(group: Sequence[fx.Node]) -> Iterator[Sequence[fx.Node]]:
    for i in range(0, len(group), grouped_linear.MAX_LAYERS):
        part = group[i : i + grouped_linear.MAX_LAYERS]
        if len(part) > 1:
            yield part


def _join(graph: fx.Graph, part: Sequence[fx.Node]) -> None:
    """Compute the products of a part at the first one's place."""
    with graph.inserting_before(part[0]):
        copies = [[graph.get_attr(str(source.target)) for source in _sources(node)] for node in part]
        weights, biases = [w for w, *_ in copies], [b for _, *bias in copies for b in bias]
        every = graph.call_function(torch.ops.subtensors.grouped_linear.default, (part[0].args[-2], weights, biases))
        for i, node in enumerate(part):
            node.replace_all_uses_with(graph.call_function(operator.getitem, (every, i)))
    for node in part:
        graph.erase_node(node)
