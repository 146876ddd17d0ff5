"""Lowering of the cross entropy of a linear layer of an input to its kernels.

Where `match_linear_logits` finds a linear layer, `kernels/cross_entropy/linear_cross_entropy.py` computes loss and
gradients in three products a chunk, the gradient of the logits written over the logits.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._ops import OpOverload

from subtensors.dispatch.chunked.evaluation import evaluate
from subtensors.dispatch.chunked.lazy_graph import LazyValue, recording, replicated
from subtensors.dispatch.chunked.linear_loss import chunk_plan, linear_cross_entropy_loss, loss_shape
from subtensors.dispatch.chunked.match_logits import match_linear_logits
from subtensors.dispatch.chunked.sharded_head import own_head
from subtensors.kernels.cross_entropy.cross_entropy import CrossEntropy
from subtensors.kernels.cross_entropy.exp_passes import head_has_exponentials
from subtensors.kernels.runtime.graph_lifetime import to_device


def lowered_cross_entropy(
    logits: LazyValue, target: Tensor, options: CrossEntropy, dtype: torch.dtype, grad: bool
) -> Tensor | None:
    """Compute the cross entropy of chunked logits by the kernels.

    Args:
        logits: (N, V), chunked along N, which `takes_targets` accepts with the target.
        target: (N,) class indices, or (N, V) distributions, plain.
        options: of the cross entropy.
        dtype: of the result.
        grad: whether gradients are recorded.

    Returns:
        a number; None where the logits are no linear layer of an input, or the kernels don't take the options.
    """
    layout, found = logits.row_layout, match_linear_logits(logits, through_padding=True)
    if found is None or not logits.shape[0]:
        return None
    needs_grad = grad and logits.needs_grad
    with recording(needs_grad), torch.set_grad_enabled(needs_grad):
        hidden = found.rows_of(evaluate(replicated(found.hidden, through_casts=True)), OpOverload.__call__)
        head = own_head(found.head_weight, found.bias)
        weight, bias = evaluate(head.weight), None if head.bias is None else evaluate(head.bias)
    if logits.dtype == torch.float64 != hidden.dtype:
        return None  # the kernels compute in a narrower dtype than was requested
    positions = layout.positions_with_values()
    if positions is not None and positions.size:
        valid = to_device(positions, hidden.device)  # which the host does not wait for
        hidden, target = hidden.index_select(0, valid), target.index_select(0, valid)
    options = found.transforms.applied_to(options)
    return linear_cross_entropy_loss(hidden, weight, bias, target, options, layout, needs_grad, dtype, head.shard)


def describe_expected_loss(logits: LazyValue) -> str | None:
    """Describe the cost of a cross entropy of these logits in a line; None where the kernels don't compute it."""
    found = match_linear_logits(logits, True) if logits.layout is not None and logits.ndim == 2 else None
    if found is None or logits.layout is None:
        return None
    hidden, (weight, _, shard) = found.hidden, own_head(found.head_weight, found.bias)
    needs = (logits.needs_grad and hidden.needs_grad, logits.needs_grad and weight.needs_grad)
    sizes = logits.shape[0], hidden.shape[1], weight.shape[0]
    plain = found.bias is None and found.transforms.softcap is None and shard is None
    exponentials = plain and any(needs) and head_has_exponentials(hidden.dtype, *sizes[1:], logits.device, False)
    shape = loss_shape(sizes, hidden.dtype, weight.dtype, needs, logits.layout, shard is not None, exponentials)
    chunks = chunk_plan(shape, logits.layout, logits.device)
    return f"their cross entropy would take {chunks}"
