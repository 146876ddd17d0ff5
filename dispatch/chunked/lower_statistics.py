"""Lowering of row statistics of a linear layer that nothing else reads: by columns, once, instead of chunk by chunk.

    before    hidden rows --> mm --> row_statistics --> ops on rows        for each chunk, the weight's gradient summed
    after     linear_row_statistics(hidden, weight) --> by rows --> ops    once; the chunks are of numbers a row

Autograd then brings the gradients of the statistics to a second pass by columns, whatever the program made of them:
a loss that needs whole sequences costs no more than a mean. Each block of columns writes its rows of the weight's
gradient in one product, so that is exact without memory for a sum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from subtensors.dispatch.chunked.lazy_graph import (
    LazyNode,
    LazyValue,
    RowSlice,
    emit,
    identity,
    recording,
    replicated,
)
from subtensors.dispatch.chunked.linear_loss import chunk_plan, loss_shape, statistics_plan
from subtensors.dispatch.chunked.match_logits import (
    LinearLogits,
    match_linear_logits,
)
from subtensors.dispatch.chunked.record import record
from subtensors.dispatch.chunked.row_statistics import StatisticsOp
from subtensors.dispatch.chunked.sharded_head import is_sharded, own_head
from subtensors.dispatch.ops.tree import PyTree
from subtensors.kernels.cross_entropy.row_statistics import linear_row_statistics


def lower_statistics(requested: Sequence[LazyValue], grad: bool) -> None:
    """Lower the statistics that values depend on, where nothing else of them reads the linear layer of their logits."""
    nodes, read = _reachable(requested)
    matched = [(node, node.args[0], match_linear_logits(node.args[0])) for node in nodes]
    readers = Counter(found.transforms.base for _, _, found in matched if found is not None)
    for node, logits, found in matched:
        if found is None or found.transforms.base in read or readers[found.transforms.base] > 1:
            continue
        if found.transforms.key != (None, 1.0, found.transforms.views, ()):
            continue  # the op lacks what scales them: it has no gradient where the op's own scale has one
        if (grad and logits.needs_grad and found.weight.needs_grad) or is_sharded(found.head_weight):
            _lower(node, logits, found)


def _reachable(requested: Sequence[LazyValue]) -> tuple[list[LazyNode], set[LazyValue]]:
    """Return the statistics that values depend on, and the values that they read but for their logits."""
    nodes: dict[int, LazyNode] = {}
    read, stack = set[LazyValue](), [*requested]
    while stack:
        value = stack.pop()
        if value in read or value.node is None or value.tensor is not None:
            continue
        read.add(value)
        operands = value.node.operands()
        if isinstance(value.node.op, StatisticsOp):
            nodes[id(value.node)] = value.node
            operands = operands[1:]
        stack.extend(operands)
    return list(nodes.values()), read


def _lower(node: LazyNode, logits: LazyValue, found: LinearLogits) -> None:
    """Make the results of an op on chunks those of an op on the whole linear layer."""
    op, layout = node.op, logits.row_layout
    assert isinstance(op, StatisticsOp)
    with recording(True):
        hidden = found.rows_of(replicated(found.hidden, through_casts=True), record)
        weight, bias, shard = own_head(found.head_weight, found.bias)
    if logits.dtype is torch.float64 is not hidden.dtype:
        return  # the kernels compute in a narrower dtype than was requested
    sizes, needs = (*hidden.shape, weight.shape[0]), (hidden.needs_grad, weight.needs_grad)
    shape = loss_shape(sizes, hidden.dtype, weight.dtype, needs, layout, shard is not None)
    given = shape, layout, logits.device
    plan = statistics_plan(*given) if shard is None else chunk_plan(*given) if shape.rows else None
    if plan is None:
        return
    operands = [x and replicated(x.value if isinstance(x, RowSlice) else x) for x in node.args[1:]]
    columns, kept, lead = plan.schedule.columns, plan.schedule.kept, logits.shape[:-1]
    assert columns is not None

    def whole(hidden: Tensor, weight: Tensor, bias: Tensor | None, *operands: PyTree) -> list[Tensor]:
        call = partial(linear_row_statistics, hidden, weight, bias, columns=columns, kept=kept, shard=shard)
        return op.results_of(call, hidden, operands, lead)

    whole.__name__ = "linear_row_statistics"
    # A result that was freed is computed, too: the op on chunks does so.
    metas = [torch.empty(0, device="meta") if value is None else value.meta for value in node.outputs]
    values = emit(whole, (hidden, weight, bias, *operands), {}, metas, grad=node.grad)
    for result, value in zip(node.outputs, values, strict=True):
        if result is not None and result.layout is not None:
            result.node = LazyNode(identity, (RowSlice(value, result.layout),), {}, node.grad)
            result.node.add_output(result)
