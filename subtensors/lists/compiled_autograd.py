"""Lists in compiled code, and gradients through them.

In eager mode gradients flow through the elements, and the list itself takes no part. Compiled code is given the list
alone, so two autograd functions connect it to the elements: `JoinElements` leads from the elements to the list and,
in compiled code, `SplitElements` leads from the list to stand-ins for the elements. Between the two, results are lists
of stand-ins that autograd tracks one by one, as in eager mode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch._ops import OpOverload

from subtensors.dispatch.lists.list_call import ListCall, list_call
from subtensors.dispatch.ops.errors import RuleError
from subtensors.dispatch.ops.plain_types import PLAIN_TYPES
from subtensors.dispatch.torch_internals.dispatcher import is_traced, is_transforming
from subtensors.dispatch.torch_internals.dynamo_rules import meet
from subtensors.dispatch.torch_internals.ops import is_in_compiler
from subtensors.lists import torch_function

if TYPE_CHECKING:
    from subtensors.lists.tensor_list import TensorList

_QUESTIONS = frozenset(
    """
    size stride dim ndimension numel nelement element_size storage_offset is_contiguous is_complex is_floating_point
    is_signed is_conj is_neg is_inference is_coalesced is_same_size is_shared is_pinned data_ptr untyped_storage
    get_device requires_grad_ register_hook retain_grad type __len__ __hash__ _is_view _is_zerotensor is_sparse
    sym_size __get__ __set__ __delete__ grad
    """.split()
)
"""Functions that the compiler calls on a list itself, those for its gradients included."""

_WRITING = frozenset(
    "__iadd__ __isub__ __imul__ __itruediv__ __ifloordiv__ __imod__ __ipow__ __iand__ __ior__ __ixor__".split()
)


def run_in_compiler(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a call that the compiler makes on lists: a traced one, or a metadata query of its own."""
    from subtensors.lists.tensor_list import TensorList

    name = getattr(func, "__name__", "")
    if func == torch.Tensor.grad.__get__:  # type: ignore[union-attr]
        return None  # torch would warn that a list, which is no leaf, has none
    if name not in _QUESTIONS:
        call = list_call(func, args, kwargs, TensorList)
        if any(map(records, call.lists)):
            return _run_recorded(call, name)
    # The rest reaches __torch_dispatch__, where a packed list is its flats.
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _run_recorded(call: ListCall, name: str) -> Any:
    from subtensors.lists.tensor_list import TensorList

    writes = isinstance(call.func, OpOverload) and call.func._schema.is_mutable
    writes |= name in _WRITING or (name.endswith("_") and not name.endswith("__")) or "out" in call.kwargs
    if writes:
        raise RuleError(
            f"{name} has no rule that writes where a TensorList requires grad under torch.compile: give a new list, "
            "or write under torch.no_grad()"
        )
    args, kwargs = call.with_lists(map(parted, call.lists))
    return torch_function.run(list_call(call.func, args, kwargs, TensorList))


def is_followed(x: TensorList) -> bool:
    """Return whether the list itself requires grad."""
    with torch._C.DisableTorchFunctionSubclass():
        return x.requires_grad


def refuse_lost_gradients(call: ListCall) -> None:
    """Raise if an overload acts on lists themselves, and the gradients of their elements would be lost."""
    if call.func not in _HARMLESS and any(map(records, call.lists)):
        raise RuleError(
            f"{call.func} has no rule that gradients flow through a TensorList by under torch.compile: compute under "
            "torch.no_grad(), or hand it the elements, tl.tree()"
        )


_HARMLESS = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


def marked(x: TensorList) -> TensorList:
    """Mark the list as requiring grad if an element does, and return it.

    Compiled code guards on the mark before it reads the elements; `follow` connects the list to them in the autograd
    graph. A list that compiled code makes holds stand-ins, which autograd tracks one by one.
    """
    elements = x.elements()
    if stands_in(x):
        if is_in_compiler():
            meet(type(x))  # the first list that it meets may be one that it makes
        return x
    if torch.is_grad_enabled() and any(t.requires_grad for t in elements) and not is_transforming():
        with torch._C.DisableTorchFunctionSubclass():
            x.requires_grad_(elements[0].is_floating_point())
    return x


def follow(x: TensorList) -> bool:
    """Connect the list to its current elements in the autograd graph; return False if that is impossible."""
    if not x[0].is_floating_point() or any(type(t) not in PLAIN_TYPES for t in x):
        return False
    edges = [t.grad_fn if t.grad_fn is not None else t for t in x.tensors]
    if is_followed(x) and len(edges) == len(x._edges) and all(a is b for a, b in zip(edges, x._edges, strict=True)):
        return True
    with torch._C.DisableTorchFunctionSubclass():
        x.detach_()
        JoinElements.apply(x, *x.tensors)  # type: ignore[no-untyped-call]
    x._edges = edges
    return True


def parted(x: TensorList) -> TensorList:
    """Split a compiler's list that requires grad into a list of stand-ins that autograd tracks one by one."""
    if not torch.is_grad_enabled():
        return x
    refuse_to_record(x)
    if not is_followed(x):
        return x
    with torch._C.DisableTorchFunctionSubclass():
        int(x.shape[0])  # how many elements there are is no size that the compiler may leave open
    return x.holding(list(SplitElements.apply(x)))  # type: ignore[no-untyped-call]


def stands_in(x: TensorList) -> bool:
    """Return whether a list holds the compiler's stand-ins."""
    held = x.held()
    return bool(held) and type(held[0]) not in PLAIN_TYPES and is_traced(held[0])


def records(x: TensorList) -> bool:
    """Return whether autograd would record a call on the compiler's stand-in for a list."""
    return torch.is_grad_enabled() and (x._records or is_followed(x) or any(t.requires_grad for t in x.held()))


def refuse_to_record(x: TensorList) -> None:
    """Raise if autograd should track a list and can't."""
    if x._records:
        raise RuleError(
            "torch.compile can't differentiate through a TensorList whose first element holds no floats, or that holds "
            "tensors of a subclass: compute under torch.no_grad(), or hand it the elements, tl.tree()"
        )


def unrecorded(x: TensorList, index: int) -> torch.Tensor:
    """Return element `index` for the compiler, as a detached alias if it requires grad.

    The compiler refuses inner tensors that require grad. Aliases are cached, since the compiler also asks in its fake
    mode, where detach() on a real tensor is refused.
    """
    element = x.elements()[index]
    if not element.requires_grad or stands_in(x):
        return element
    alias = x._aliases.get(index)
    if alias is None or alias.data_ptr() != element.data_ptr() or alias.shape != element.shape:
        alias = x._aliases[index] = element.detach()
    return alias


class JoinElements(torch.autograd.Function):
    """An autograd function from elements to their list."""

    @staticmethod
    def forward(ctx: Any, x: Any, *elements: torch.Tensor) -> Any:
        """Return the list."""
        ctx.mark_dirty(x)
        ctx.set_materialize_grads(False)  # torch would make a vector of zeros for a list
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradient of each element."""
        if gradients[0] is None:
            return None, *[None for _ in ctx.needs_input_grad[1:]]
        parts = gradients[0].tensors
        return None, *[g if need else None for g, need in zip(parts, ctx.needs_input_grad[1:], strict=True)]


class SplitElements(torch.autograd.Function):
    """An autograd function from a list to aliases of the tensors that it holds, elements or flats."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        """Return aliases of the tensors."""
        ctx.like = x
        return tuple(t.view_as(t) for t in x.held())  # views of a function: torch refuses to write to them

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Return the list of the gradients."""
        return ctx.like.holding(list(gradients))
