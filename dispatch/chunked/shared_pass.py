"""Passes that compute all that is waiting for them.

    ce = F.cross_entropy(logits, target)               # waits
    z = logits.logsumexp(-1).square().mean()           # waits
    accuracy = (logits.argmax(-1) == target).float().mean()        # waits
    (ce + 1e-4 * z).backward()                         # one pass: logits once, and one gradient of them

A number is not computed when it is recorded, but when something reads it that can't be recorded. By then it may be part
of another number, affine in several. Where two of these read the same product, all are computed in one pass, by the
recorded ops. Where they share nothing, each has the pass that is best for it alone.

A pass over a product also computes the other values of it that someone holds: numbers, and numbers of each row. A
number that requires grad, but isn't the one that is differentiated, is `observed`: its value is known then, and its
gradient, should it be asked for, takes a pass of its own.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Collection, Sequence
from typing import TypeAlias, cast

import torch
from torch import Tensor

from subtensors.dispatch.chunked.evaluation import evaluate, evaluate_together, may_ride, takes_one_pass
from subtensors.dispatch.chunked.lazy_graph import LazyNode, LazyValue, computation, version_and_address
from subtensors.dispatch.chunked.row_layout import ChunkAxis, LimitError
from subtensors.dispatch.ops.errors import RuleError
from subtensors.dispatch.torch_internals.autograd import retains_graph

aten = torch.ops.aten

_PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)


class Holder:
    """The object that a user holds a value by."""

    __slots__ = ("__weakref__",)

    def pending(self) -> LazyValue | None:
        """Return the value; None where its numbers are known."""
        raise NotImplementedError

    def take_notice(self) -> None:
        """Take notice that the value may be known now."""

    @property
    def may_be_differentiated(self) -> bool:
        """True if the user can ask for the gradient of the value, which is a number then."""
        return False


Held: TypeAlias = Sequence[tuple[Holder, LazyValue]]

UNSETTLED: dict[weakref.ref[Holder], None] = {}
"""The holders of numbers that nobody may be able to ask the gradient of."""


def hold(holder: Holder, value: LazyValue) -> None:
    """Add a value to what passes over the products that it reads compute."""
    for axis in _axes(value):
        axis.holders[weakref.ref(holder)] = None


def _pending(axes: Collection[ChunkAxis]) -> Held:
    """Return the holders along some axes, in the order in which they began to hold, with their values that wait."""
    found: dict[Holder, LazyValue] = {}
    for axis in axes:
        for reference in list(axis.holders):
            holder = cast("Holder | None", reference())
            value = None if holder is None else holder.pending()
            if holder is None or value is None:
                axis.holders.pop(reference, None)
            else:
                found[holder] = value
    return list(found.items())


def evaluate_number(requested: LazyValue, apart: Collection[LazyValue] = ()) -> Tensor:
    """Compute a number with its gradient, together with those that it is made of, in as few passes as they need.

    Args:
        requested: a number that waits, or one that replicated ops make of such numbers.
        apart: numbers that have passes of their own.

    Returns:
        a plain tensor, which requires grad where the number does.
    """
    if requested.tensor is not None:
        return requested.tensor
    if torch.is_inference_mode_enabled():  # what is computed there never has a backward
        with torch.inference_mode(False), torch.no_grad():
            return evaluate_number(requested)
    numbers = _numbers(requested)
    held = [(who, value) for who, value in _held_beside(requested) if value not in apart]
    refused = list[LimitError]()
    tensor = _compute_together(requested, numbers, held, refused) if _is_shared(numbers, held) else None
    if tensor is None:
        try:
            tensor = _compute_apart(requested, numbers)
        except LimitError as error:
            raise min([error, *refused], key=lambda refusal: refusal.least) from None
    _keep(requested, tensor)
    return tensor


def _compute_apart(requested: LazyValue, numbers: Sequence[LazyValue]) -> Tensor:
    """Compute a number by a pass of its own, or after those that it is made of, by a pass each.

    Raises:
        LimitError: with what all of them need at least.
    """
    tensor = None
    if requested.waiting is not None:
        tensor = None if requested.waiting.alone is None else requested.waiting.alone()
    else:
        refused = list[LimitError]()
        for number in numbers:
            try:
                with torch.set_grad_enabled(number.needs_grad):  # they may be read again, with gradients
                    evaluate_number(number, {requested, *numbers})
            except LimitError as error:
                refused.append(error)
        if refused:
            raise max(refused, key=lambda refusal: refusal.least)
    if tensor is None:
        _record(requested)
        tensor = evaluate(requested)
    return tensor


def observe(number: LazyValue, may_be_differentiated: bool = False) -> Tensor:
    """Compute a number without its gradient: in the pass of the number that can be differentiated, if there is one.

    Args:
        number: a number that waits, or one that replicated ops make of such numbers.
        may_be_differentiated: whether the user can ask for its gradient.

    Returns:
        its value, which doesn't require grad.
    """
    held = _held_beside(number)
    whole = _whole(number, held, may_be_differentiated)
    if whole is not None:
        with torch.enable_grad():
            evaluate_number(whole)
    known = number.observed if number.tensor is None else number.tensor.detach()
    if known is None:
        with torch.no_grad():
            known = _compute_observed(number, held)
        if number.needs_grad:
            number.observed = known
        else:
            _keep(number, known)
    return known


def _compute_observed(number: LazyValue, held: Held) -> Tensor:
    """Compute a number without gradients: by the pass that is best for it alone, if it shares none."""
    numbers = _numbers(number)
    if (_is_shared(numbers, held) or any(part.needs_grad for part in numbers)) and all(map(_record, numbers)):
        with contextlib.suppress(ValueError, RuleError):  # a limit, or a tensor that another one reads
            return _evaluate_beside(number, held)
    with torch.set_grad_enabled(number.needs_grad):  # it may be read again, with its gradient
        return evaluate_number(number).detach()


def has_gradients(value: LazyValue) -> bool:
    """Return whether anything that a value is to be computed from requires grad."""
    return value.needs_grad or any(part.needs_grad for part in computation([value]))


def evaluate_rows(value: LazyValue) -> Tensor:
    """Compute a chunked value, and in the same passes what is held beside it.

    Where such a pass has computed it, its tensor is handed out, once.
    """
    if value.node is not None and value.tensor is not None:
        tensor, value.tensor = value.tensor, None
        return tensor
    held = _held_beside(value)
    try:
        return _evaluate_beside(value, held)
    except (ValueError, RuleError):
        if not held:
            raise
        return evaluate(value)


def settle() -> None:
    """Compute the numbers that keep what they read in memory for themselves alone, since none has a gradient."""
    for reference in list(UNSETTLED):
        holder = reference()
        number = None if holder is None else holder.pending()
        if holder is not None and number is not None:
            beside = [(holder, number), *_held_beside(number)]
            if any(who.may_be_differentiated or other.layout is not None for who, other in beside):
                continue
            with contextlib.suppress(Exception):  # which is raised where the number is read
                observe(number)
        if holder is not None:
            holder.take_notice()
            if holder.may_be_differentiated:
                continue
        UNSETTLED.pop(reference, None)


def _compute_together(
    requested: LazyValue, numbers: Sequence[LazyValue], held: Held, refused: list[LimitError]
) -> Tensor | None:
    """Compute a number in one pass with those that it is made of and what is held beside it; None: they can't.

    Limits that such a pass can't meet, which each of them may meet alone, are added to `refused`.
    """
    if not all(map(_record, numbers)):
        return None
    parts = [weakref.ref(number) for number in numbers if number is not requested]
    if len(numbers) > 1:
        products = [_products(number).keys() for number in numbers]
        if sum(map(len, products)) == len(set[int]().union(*products)):
            return None
    for beside in (held, []) if held and len(numbers) > 1 else (held,):
        try:
            if parts and not takes_one_pass(requested):
                return None
            tensor = _evaluate_beside(requested, beside)
        except LimitError as error:
            refused.append(error)
            continue
        except RuleError:  # a tensor that another one reads was written to
            continue
        if parts and tensor.requires_grad:
            tensor.register_hook(functools.partial(_release, parts))
        return tensor
    return None


def _is_shared(numbers: Sequence[LazyValue], held: Held) -> bool:
    """Return whether a pass is for several numbers, or for what takes a pass of its own once they are known."""
    return len(numbers) > 1 or any(v.layout is not None or not {*_numbers(v)} <= {*numbers} for _, v in held)


def _evaluate_beside(value: LazyValue, held: Held) -> Tensor:
    """Compute a value, and in the same passes what is held beside it."""
    with_gradient = [
        other
        for _, other in held
        if value.layout is not None and other.layout is not None and other.needs_grad and torch.is_grad_enabled()
    ]
    together = [other for other in with_gradient if may_ride(other, value)]
    riders = [other for _, other in held if other.layout is None or not other.needs_grad]
    tensor, *tensors = evaluate_together([value, *together], riders)
    for other, its in zip(together, tensors, strict=True):
        other.tensor = its
    for holder, other in held:
        if other.layout is None and other.tensor is not None:
            _keep(other, other.tensor)
        holder.take_notice()
    return tensor


def _keep(number: LazyValue, tensor: Tensor) -> None:
    """Make a tensor that of a number, and release what this was to be computed from."""
    number.tensor, number.recorded = tensor, version_and_address(tensor)
    number.node = number.waiting = None


def _release(numbers: Sequence[weakref.ref[LazyValue]], grad: Tensor) -> None:
    """Release what numbers read, once the backward of the one that they are part of begins, unless it may run again."""
    for reference in () if retains_graph() else numbers:
        number = reference()
        if number is not None:
            number.node = number.waiting = None


def _record(number: LazyValue) -> bool:
    """Make a number that of recorded ops; return False where there are none for it."""
    if number.node is None and number.waiting is not None and number.waiting.shared is not None:
        value = None
        with contextlib.suppress(RuleError):  # of a tensor that was written to, raised where this number is computed
            value = number.waiting.shared()
        if value is not None:
            node = LazyNode(aten.alias.default, (value,), {}, grad=True)
            node.add_output(number)
            number.node = node
    return number.node is not None


def _numbers(requested: LazyValue) -> list[LazyValue]:
    """Return the numbers that wait, among those that a number is made of."""
    values = computation([requested], lambda value: value.waiting)
    if any(value.waiting is None and value.node is None for value in values):
        raise RuleError(
            "a number of chunked rows was computed as part of another one, whose backward has run: what it read is "
            "released; realize() it before it becomes part of another number, if it needs a backward of its own"
        )
    return [value for value in values if value.waiting is not None]


def _products(value: LazyValue) -> dict[int, torch.Size]:
    """Return the sizes of the chunked products that a value depends on, by id."""
    values = computation([value], lambda v: not _record(v))
    nodes = ((v.node, v.shape) for v in values if v.node is not None and v.node.axis is not None)
    return {id(node): sizes for node, sizes in nodes if node.op in _PRODUCTS}


def _axes(value: LazyValue) -> list[ChunkAxis]:
    """Return the axes of the chunks that a value is computed from."""

    def axis_of(value: LazyValue) -> ChunkAxis | None:
        return value.node.axis if value.node is not None else None if value.waiting is None else value.waiting.axis

    found = [axis_of(v) for v in computation([value], axis_of)]
    return list(dict.fromkeys(axis.root for axis in found if axis is not None))


def _held_beside(value: LazyValue) -> Held:
    """Return what is held of the products that a value reads: other numbers, and chunked values of a number a row."""
    pending = [(holder, other) for holder, other in _pending(_axes(value)) if other is not value]
    products = _products(value) if pending else {}
    found = []
    for holder, other in pending:
        shared = [products[key] for key in _products(other) if key in products]
        if shared and (other.layout is None or all(_is_narrow(other.shape, sizes) for sizes in shared)):
            found.append((holder, other))
    return found


def _is_narrow(sizes: torch.Size, product: torch.Size) -> bool:
    """Return whether a value has no more than one number for each row of a product, and none for each column."""
    return product[-1] not in sizes and sizes.numel() <= product[:-1].numel()


def _whole(number: LazyValue, held: Held, may_be_differentiated: bool) -> LazyValue | None:
    """Return the number that is differentiated in the pass for another one: which holds all others; None: none does."""
    can = [value for holder, value in held if holder.may_be_differentiated]
    can += [number] if may_be_differentiated else []
    parts = [{*computation([value])} - {value} for value in can]
    wholes = [value for value in can if not any(value in others for others in parts)]
    return wholes[0] if len(wholes) == 1 else number if number in wholes else None
