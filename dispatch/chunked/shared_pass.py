"""Numbers that wait for others, since they may share a pass over the chunks.

    ce = F.cross_entropy(logits, target)               # waits
    z = logits.logsumexp(-1).square().mean()           # waits
    (ce + 1e-4 * z).backward()                         # one pass: logits once, and one gradient of them

A number that requires grad is not computed when it is recorded, but when something reads it that can't be recorded. By
then it may be part of another number, affine in several. Where two of these read the same product, all are computed in
one pass, by the recorded ops. Where they share nothing, each has the pass that is best for it alone.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from subtensors.dispatch.chunked.evaluation import evaluate, takes_one_pass
from subtensors.dispatch.chunked.lazy_graph import (
    LazyNode,
    LazyValue,
    RowSlice,
    Waiting,
    known_tensor,
    version_and_address,
)
from subtensors.dispatch.chunked.row_layout import LimitError
from subtensors.dispatch.ops.errors import RuleError

aten = torch.ops.aten

_PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)


def evaluate_number(requested: LazyValue) -> Tensor:
    """Compute a number, together with those that it is made of, in as few passes as they need.

    Args:
        requested: a number that waits, or one that replicated ops make of such numbers.

    Returns:
        a plain tensor, which requires grad.
    """
    if requested.tensor is not None:
        return requested.tensor
    if torch.is_inference_mode_enabled():  # what is computed there never has a backward
        with torch.inference_mode(False), torch.no_grad():
            return evaluate_number(requested)
    if requested.waiting is not None:
        return _compute_alone(requested, requested.waiting)
    numbers = _numbers(requested)
    is_joined = len(numbers) > 1 and _join(requested, numbers)
    with torch.enable_grad():  # they may be read again, with gradients
        if not is_joined:
            _compute_apart(numbers)
    tensor = evaluate(requested)
    requested.node, requested.recorded = None, version_and_address(tensor)  # the node keeps what it reads
    if is_joined:
        tensor.register_hook(functools.partial(_release, [weakref.ref(number) for number in numbers]))
    return tensor


def _release(numbers: Sequence[weakref.ref[LazyValue]], grad: Tensor) -> None:
    """Release what numbers read, once the backward of the one that they are part of begins."""
    for reference in numbers:
        number = reference()
        if number is not None:
            number.node = number.waiting = None


def _numbers(requested: LazyValue) -> list[LazyValue]:
    """Return the numbers that wait, among those that a number is made of."""
    found: dict[int, LazyValue] = {}
    seen, stack = set[int](), [requested]
    while stack:
        value = stack.pop()
        if id(value) in seen or value.tensor is not None:
            continue
        seen.add(id(value))
        if value.waiting is not None:
            found[id(value)] = value
        elif value.node is not None:
            stack.extend(x.value if isinstance(x, RowSlice) else x for x in value.node.operands())
        else:
            raise RuleError(
                "a number of chunked rows was computed as part of another one, whose backward has run: what it read is "
                "released; realize() it before it becomes part of another number, if it needs a backward of its own"
            )
    return list(found.values())


def _compute_apart(numbers: Sequence[LazyValue]) -> None:
    """Compute numbers one by one. Raises LimitError with what all need at least, where one can't meet its limit."""
    refused: list[LimitError] = []
    for number in numbers:
        assert number.waiting is not None
        try:
            _compute_alone(number, number.waiting)
        except LimitError as error:
            refused.append(error)
    if refused:
        raise max(refused, key=lambda error: error.least)


def _compute_alone(number: LazyValue, waiting: Waiting) -> Tensor:
    tensor = None if waiting.alone is None else waiting.alone()
    if tensor is None:
        recorded = number if waiting.shared is None else waiting.shared()
        assert recorded is not None
        tensor = evaluate(recorded)
    number.tensor, number.recorded = tensor, version_and_address(tensor)
    number.node = number.waiting = None  # which keep what they read
    return tensor


def _join(requested: LazyValue, numbers: list[LazyValue]) -> bool:
    """Make numbers that read the same product those of recorded ops, if one pass computes them all then."""
    recorded: list[LazyValue] = []
    for number in numbers:
        waiting = number.waiting
        assert waiting is not None
        value = number if number.node is not None or waiting.shared is None else waiting.shared()
        if value is None:
            return False
        recorded.append(value)
    products = [_products(value) for value in recorded]
    if sum(map(len, products)) == len(set().union(*products)):
        return False
    joined = [(n, v) for n, v in zip(numbers, recorded, strict=True) if n is not v]
    for number, value in joined:
        node = LazyNode(aten.alias.default, (value,), {}, None, grad=True)
        node.add_output(number)
        number.node = node
    is_one = takes_one_pass(requested)
    if not is_one:
        for number, _ in joined:
            number.node = None
    return is_one


def _products(value: LazyValue) -> set[int]:
    """Return the ids of the chunked products that a value depends on."""
    found, seen, stack = set[int](), set[int](), [value]
    while stack:
        node = stack.pop()
        if node.node is None or known_tensor(node) is not None or id(node.node) in seen:
            continue
        seen.add(id(node.node))
        if node.node.op in _PRODUCTS and node.node.axis is not None:
            found.add(id(node.node))
        stack.extend(x.value if isinstance(x, RowSlice) else x for x in node.node.operands())
    return found
