"""Recognition of logits of a linear layer of an input in the lazy graph.

Ops are matched backwards from the logits: casts to a wider dtype, a temperature, a softcap, reshapes and slices of
rows, then a product of hidden states with a weight that is whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from subtensors.dispatch.chunked.evaluation import evaluate
from subtensors.dispatch.chunked.lazy_graph import LazyValue, gathered
from subtensors.dispatch.chunked.logit_transforms import TransformedLogits, squashed_logits

aten = torch.ops.aten


@dataclass(frozen=True)
class LinearLogits:
    """Logits that are hidden states times a weight, perhaps capped and divided.

    Args:
        hidden: (N, H), an input of the region or a view of one.
        weight: (H, V), whole.
        bias: (V,), whole, or None.
        squashed: the transforms of the product.
    """

    hidden: LazyValue
    weight: LazyValue
    bias: LazyValue | None
    squashed: TransformedLogits

    def rows_of(self, hidden: Tensor) -> Tensor:
        """The rows of hidden states that the logits are of: (N, H)."""
        views = self.squashed.views
        if not any(isinstance(view, tuple) for view in views):
            return hidden
        for view in views:
            if isinstance(view, tuple):
                hidden = aten.slice.Tensor(hidden, *view)
            else:
                hidden = hidden.reshape(*view, hidden.shape[-1])
        return hidden


def linear_logits(logits: LazyValue) -> LinearLogits | None:
    """Match logits that a linear layer of an input computes; return None for others."""
    found = squashed_logits(logits)
    node = found.base.node
    if node is None or node.name not in ("mm.default", "addmm.default"):
        return None
    args = node.args
    bias, hidden, weight = (None, *args) if node.name == "mm.default" else args[:3]
    plain = all(isinstance(x, LazyValue) for x in (hidden, weight)) and not node.kwargs and len(args) in (2, 3, 5)
    if not plain or weight.layout is not None or not is_input(hidden) or hidden.layout.dim != 0:
        return None
    if bias is not None and (not isinstance(bias, LazyValue) or bias.layout is not None or bias.ndim != 1):
        return None
    return LinearLogits(hidden, weight, bias, found)


_OF_INPUTS = ("reshape", "_to_copy.default", "alias.default")


def is_input(value: LazyValue) -> bool:
    """Return whether a value is a chunked input, or a reshape, a cast or an alias of one, as autocast makes it."""
    while value.node is not None and value.tensor is None and value.node.name in _OF_INPUTS:
        value = value.node.args[0]
    return value.tensor is not None and value.layout is not None


def whole_input(value: LazyValue) -> Tensor:
    """The tensor of an input, reshaped and cast as it was recorded."""
    node = value.node
    if node is None or value.tensor is not None:
        return evaluate(gathered(value))
    operand = whole_input(node.args[0])
    with torch.set_grad_enabled(torch.is_grad_enabled() and node.grad):
        return operand.reshape(value.shape).to(value.dtype)
