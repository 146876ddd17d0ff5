"""`torch.nn.functional.linear_cross_entropy` as a linear layer and its cross entropy, which types have rules for.

    linear_cross_entropy(x, W, t) = cross_entropy(x W^T, t)

With a weight of (classes, *d, features) each input has one loss per position of d: the rows of W are flattened for the
layer, and its result is reshaped to (rows, classes, *d). Torch has the function since 2.13.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from subtensors.dispatch.ops.errors import RuleError

FUNCTION: Callable[..., Tensor] | None = getattr(F, "linear_cross_entropy", None)
"""Torch's own function; None where this torch has none."""


class NotComposed(RuleError):
    """A call that the two functions might compute differently, or that torch's own function refuses."""


class TooManyDims(RuleError):
    """An input that torch's own function refuses, whatever its tensor type."""


def composed(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    options: object = None,
) -> Tensor:
    """The loss, by `F.linear` and `F.cross_entropy`.

    Args:
        input: (features,) or (rows, features).
        linear_weight: (classes, *d, features).
        target: classes, of the input's shape without features and with d; or probabilities, with classes too.
        linear_bias: (classes, *d).
        weight, reduction, ignore_index, label_smoothing: see `F.cross_entropy`.
        options: how torch's own function divides the rows; ignored.

    Raises:
        NotComposed: the sizes do not agree, or `ignore_index` is given with probabilities.
        TooManyDims: the input has more than 2 dims.
    """
    _check(input, linear_weight, target, linear_bias, ignore_index)
    outputs = linear_weight.shape[:-1]
    if len(outputs) > 1:
        linear_weight = linear_weight.flatten(0, -2)
        linear_bias = None if linear_bias is None else linear_bias.flatten()
    logits = F.linear(input, linear_weight, linear_bias)
    if len(outputs) > 1:
        logits = logits.reshape(*input.shape[:-1], *outputs)
    return F.cross_entropy(
        logits,
        target,
        weight=weight,
        reduction=reduction,
        ignore_index=-100 if ignore_index is None else ignore_index,
        label_smoothing=label_smoothing,
    )


def composed_op(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    *rest: object,
) -> Tensor | tuple[Tensor]:
    """Return what an op behind the function does, without gradients: the loss of each row, or a tuple of a number.

    Raises:
        NotComposed: see `composed`.
    """
    reduction, ignored = (rest[0], rest[1]) if isinstance(rest[0], str) else ("none", rest[0])
    named = {"linear_bias": linear_bias, "weight": weight, "reduction": reduction, "ignore_index": ignored}
    loss = composed(input, linear_weight, target, **named)  # type: ignore[arg-type]
    return loss if reduction == "none" else (loss,)


def _check(
    input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None, ignore_index: int | None
) -> None:
    """Raise for calls that torch's own function may refuse and the two functions might not."""
    if input.dim() > 2:
        raise TooManyDims(
            f"linear_cross_entropy takes an input of (features,) or (rows, features), got {input.dim()} dims: flatten "
            f"those before the features, input.flatten(0, -2), and those of the target with them"
        )
    advice = "where one of them is padded, pad the other on the same Dim"
    if input.dim() < 1 or linear_weight.dim() < 2 or (linear_weight.dim() > 2 and input.dim() == 1):
        reason = f"an input of {input.dim()} dims and a weight of {linear_weight.dim()} have no scores of classes"
    elif input.shape[-1] != linear_weight.shape[-1]:
        reason = f"the input has {input.shape[-1]} features, and the weight {linear_weight.shape[-1]}: {advice}"
    elif linear_bias is not None and linear_bias.shape != linear_weight.shape[:-1]:
        sizes = tuple(linear_bias.shape), tuple(linear_weight.shape[:-1])
        reason = f"the bias is of {sizes[0]}, and the weight's outputs have {sizes[1]}: {advice}"
    elif ignore_index is not None and target.is_floating_point():
        reason = "ignore_index is for classes, and the target holds probabilities"
    else:
        return
    raise NotComposed(f"no rule for this linear_cross_entropy: {reason}")
