"""Lists in compiled code: gradients through them, and the shapes, strides and dtypes of their elements.

In eager mode gradients flow through the elements, and the list itself takes no part. Compiled code is given the list
alone, which `wrappers` connects to the elements: joined before the guards of compiled code look at it, and split
in compiled code. Between the two, results are lists of traced tensors, tracked one by one as in eager mode.

Dynamo does not ask the type for metadata: it answers from the one shape that it has for every tensor, which for a list
is the number of elements. So its answers are replaced by a list with one value per element. These are constants of the
graph, guarded by the layout of a packed list and by each element of an unpacked one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from subtensors.dispatch.lists.list_call import ElementList
from subtensors.dispatch.ops import wrappers
from subtensors.dispatch.ops.errors import RuleError
from subtensors.dispatch.ops.plain_types import PLAIN_TYPES
from subtensors.dispatch.torch_internals import dynamo, dynamo_rules
from subtensors.dispatch.torch_internals.autograd import is_transforming

Edge = Tensor | torch.autograd.graph.Node
"""The end of an edge from a list: an element, or the autograd node that made it."""


def check_connected(x: Tensor, joined: Sequence[Edge]) -> None:
    """Check that the gradients of a list reach its elements.

    Raises:
        RuleError: an autograd.Function returned the list, whose elements do not know of it.
    """
    with torch._C.DisableTorchFunctionSubclass():
        function = x.grad_fn
    if function is not None and not joined:
        raise RuleError(
            f"{function.name()} is of an autograd.Function that took and returned a TensorList, whose elements would "
            f"get no gradients: call it, or a module whose hooks do so (FSDP), for each element, [f(t) for t in x]"
        )


def mark_requires_grad(x: Tensor, elements: Sequence[Tensor]) -> None:
    """Mark a list as requiring grad if an element does."""
    if torch.is_grad_enabled() and any(t.requires_grad for t in elements) and not is_transforming():
        with torch._C.DisableTorchFunctionSubclass():
            x.requires_grad_(elements[0].is_floating_point())


def join_elements(x: Tensor, elements: Sequence[Tensor], joined: Sequence[Edge]) -> list[Edge] | None:
    """Connect a list to its elements in the autograd graph, unless it is connected to them already.

    Returns:
        What the list is connected to; None if that is impossible: its first element holds no floats, or one is a tensor
        of a subclass.
    """
    if not elements[0].is_floating_point() or any(type(t) not in PLAIN_TYPES for t in elements):
        return None
    edges = [t.grad_fn if t.grad_fn is not None else t for t in elements]
    is_joined = len(edges) == len(joined) and all(a is b for a, b in zip(edges, joined, strict=True))
    if not is_joined or not wrappers.requires_grad(x):
        wrappers.join(x, elements)
    return edges


def split_elements(x: Tensor, is_unconnected: bool) -> list[Tensor] | None:
    """Return aliases, which autograd tracks, of the tensors that a traced list stores.

    Returns:
        The aliases; None if the list does not require grad.

    Raises:
        RuleError: the list is unconnected.
    """
    if is_unconnected:
        raise RuleError(
            "torch.compile can't differentiate through a TensorList whose first element holds no floats, or that holds "
            "tensors of a subclass: compute under torch.no_grad(), or hand it the elements, tl.tree()"
        )
    if not wrappers.requires_grad(x):
        return None
    with torch._C.DisableTorchFunctionSubclass():
        int(x.shape[0])  # the compiler may not leave the number of elements open
    return wrappers.split(x)


def detached_alias(element: Tensor, index: int, aliases: dict[int, Tensor]) -> Tensor:
    """Return a detached alias of an element, from a cache, since the compiler asks in its fake mode, too.

    There `detach` of a tensor that is not fake is refused.
    """
    alias = aliases.get(index)
    if alias is None or alias.data_ptr() != element.data_ptr() or alias.shape != element.shape:
        alias = aliases[index] = element.detach()
    return alias


_ATTRIBUTES = "shape ndim dtype device layout is_cuda".split()
_METHODS = "size stride numel nelement dim ndimension is_contiguous element_size is_floating_point is_complex".split()

_FUNCTIONS = "numel is_floating_point is_complex".split()


def teach_compiler(kind: type[ElementList]) -> None:
    """Make compiled code answer metadata queries on lists of this type from their elements."""
    reason = (
        "compiled code is given fake tensors for the elements of a TensorList, which have no .grad: give it the "
        "gradients as a list of their own, or the parameters as a plain list"
    )
    methods = ["__len__", *_METHODS]
    rule = partial(dynamo.trace_as_list, kind, _answer, methods, _FUNCTIONS, _ATTRIBUTES, "tensors", reason)
    dynamo_rules.declare(kind, rule)


def _answer(elements: ElementList, name: str, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    if name == "__len__":
        return elements.treespec.num_leaves
    members = [getattr(t, name) for t in elements.tensors]
    answers = members if name in _ATTRIBUTES else [method(*args, **kwargs) for method in members]
    if any(map(dynamo.is_symbolic, answers)):
        raise RuleError(
            f"{name} of a TensorList has no rule where the compiler does not know the sizes of its elements: ask "
            "for it outside, pack() the list, or compile with dynamic=False"
        )
    return answers
