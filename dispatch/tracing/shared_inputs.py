"""Merge products of a traced graph that share their left operand into one call.

    addmm(b1, x, w1.t()), addmm(b2, x, w2.t()), addmm(b3, x, w3.t())

become grouped_linear(x, [w1, w2, w3], [b1, b2, b3]).
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Hashable, Iterator, Sequence

import torch
from torch import Tensor, fx
from torch.fx.node import Argument

from subtensors.dispatch.tracing.aten_trace import mutates
from subtensors.kernels.graph_inputs import grouped_linear

aten = torch.ops.aten

_PRODUCTS = {aten.addmm.default: 3, aten.mm.default: 2}
"""The products, with their number of operands: the weight is the last, the input the one before."""
MAX_WEIGHT_BYTES = 1 << 23
"""The largest total size of the weights of a call: reading more takes longer than launching a product."""


def share_inputs(
    module: fx.GraphModule, dtypes: Collection[torch.dtype] = grouped_linear.DTYPES, device: str = "cuda"
) -> None:
    """Compute the products of one matrix with several weights together.

    Args:
        module: a graph of aten ops that is not tracked by autograd; changed in place.
        dtypes, device: of the weights to merge.
    """
    nodes = list(module.graph.nodes)
    groups: dict[Hashable, list[fx.Node]] = {}
    writes_so_far = 0
    for node in nodes:
        # A tensor that is written to between two reads is two values.
        writes_so_far += mutates(node)
        if node.target in _PRODUCTS and not node.kwargs and len(node.args) == _PRODUCTS[node.target]:
            parameters = _own_parameters(module, node)
            if parameters and all(t.dtype in dtypes and t.device.type == device for t in parameters):
                groups.setdefault((writes_so_far, node.target, _input_key(node.args[-2])), []).append(node)
    for group in groups.values():
        for part in _parts(group):
            weights = [_own_parameters(module, node)[0] for node in part]
            if sum(w.nbytes for w in weights) <= MAX_WEIGHT_BYTES:
                _join(module.graph, part)
    module.graph.lint()
    module.recompile()


def _input_key(x: Argument) -> Hashable:
    """Return a key that is equal for equal inputs: the base and the shape of a view, else the node."""
    assert isinstance(x, fx.Node)
    return (x.args[0], tuple(x.args[1])) if x.target is aten.view.default else x  # type: ignore[arg-type]  # its shape


def _own_parameters(module: fx.GraphModule, node: fx.Node) -> list[Tensor]:
    """Return the weight of a product, and its bias if any, where both are the module's own; else nothing."""
    transposed = node.args[-1]
    assert isinstance(transposed, fx.Node)
    sources = _sources(node)
    if transposed.target is not aten.t.default or any(source.op != "get_attr" for source in sources):
        return []
    weight, *bias = parameters = [operator.attrgetter(str(source.target))(module) for source in sources]
    is_plain = weight.is_contiguous() and all(b.shape == weight.shape[:1] and b.is_contiguous() for b in bias)
    return parameters if is_plain else []


def _sources(node: fx.Node) -> list[fx.Node]:
    """Return the nodes of a product's weight, before it is transposed, and of its bias if any."""
    transposed = node.args[-1]
    assert isinstance(transposed, fx.Node)
    return [x for x in (*transposed.args[:1], *node.args[:-2]) if isinstance(x, fx.Node)]


def _parts(group: Sequence[fx.Node]) -> Iterator[Sequence[fx.Node]]:
    for i in range(0, len(group), grouped_linear.MAX_LAYERS):
        part = group[i : i + grouped_linear.MAX_LAYERS]
        if len(part) > 1:
            yield part


def _join(graph: fx.Graph, part: Sequence[fx.Node]) -> None:
    """Compute some products by one call, in place of the first."""
    with graph.inserting_before(part[0]):
        copies = [[graph.get_attr(str(source.target)) for source in _sources(node)] for node in part]
        weights, biases = [w for w, *_ in copies], [b for _, *bias in copies for b in bias]
        results = graph.call_function(torch.ops.subtensors.grouped_linear.default, (part[0].args[-2], weights, biases))
        for i, node in enumerate(part):
            node.replace_all_uses_with(graph.call_function(operator.getitem, (results, i)))
    for node in part:
        graph.erase_node(node)
