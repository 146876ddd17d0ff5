"""Execution of torch calls over TensorLists: on flats, as one foreach call, batched by shape, or mapped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import return_and_correct_aliasing

from subtensors.dispatch.lists.batched import batched_call
from subtensors.dispatch.lists.flat_ops import FOREIGN_OPTIONS, acts_on_values, overload_acts_on_values
from subtensors.dispatch.lists.foreach import foreach_call
from subtensors.dispatch.lists.list_call import ListCall, gather, list_call
from subtensors.dispatch.ops.op_classes import OpClass
from subtensors.dispatch.ops.rule_table import RuleTable
from subtensors.lists.packing import PackedLayout
from subtensors.lists.tree_structure import first_difference, leaf_name

if TYPE_CHECKING:
    from subtensors.lists.tensor_list import TensorList


@dataclass(frozen=True)
class ListPlan:
    """A way to run a call: its description, and the function that runs it."""

    describe: Callable[[], str]
    run: Callable[[], Any]


def run(call: ListCall) -> Any:
    """Run a torch function called with TensorLists."""
    return plan(call).run()


def explain_call(func: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Describe how a torch function is run when it is called with these arguments.

    Args:
        func: a torch function or Tensor method, `torch.add` or `torch.Tensor.add_`.
        args, kwargs: its arguments, TensorLists among them; they are not changed.

    Returns:
        The way that applies: on the flats of packed lists, as a foreach call, batched by shape, or mapped.

    Raises:
        TypeError: no argument is a TensorList.
        ValueError: the lists differ in structure.

    Example:
        >>> from subtensors import TensorList
        >>> explain_call(torch.add, TensorList([torch.ones(2), torch.ones(3)]), 1)
        'foreach aten._foreach_add.Scalar (1 group)'
    """
    from subtensors.lists.tensor_list import TensorList

    call = list_call(func, args, kwargs, TensorList)
    if not call.positions:
        raise TypeError("explain_call expects a TensorList among the arguments")
    return plan(call).describe()


def plan(call: ListCall) -> ListPlan:
    """Choose the way a call is run."""
    lists: list[TensorList] = call.lists
    if special := _SPECIAL.get(call.func):
        found = special(call)
        if found is not None:
            return found
    _check_same_structure(lists)
    if not len(lists[0]):
        return ListPlan(lambda: "nothing to do: the list is empty", lambda: _of_nothing(call))
    if (arena := _common_arena(lists)) is not None and _fits_flats(call, arena):
        return ListPlan(lambda: _describe_flats(arena), lambda: _run_on_flats(call, arena))
    if foreach := foreach_call(call):
        return ListPlan(foreach.describe, lambda: _gathered(foreach.run() or lists[0].tensors, lists))
    if batched := batched_call(call):
        return ListPlan(batched.describe, lambda: _gathered(batched.run(), lists))
    return ListPlan(lambda: "mapped element by element", lambda: _map(call))


RULES = RuleTable(
    "TensorList",
    dict.fromkeys(OpClass, "hand torch.compile and the transforms of torch.func the elements, tl.tree()"),
)
"""The rules for overloads that reach `__torch_dispatch__`; each rule takes the `ListCall`."""


def run_overload(call: ListCall) -> Any:
    """Run an overload called with TensorLists, as the compiler does: on flats or mapped, else by `RULES`.

    The compiler and the code above `__torch_dispatch__` see a list as a vector with one entry an element; an op that
    reads that shape (a view, a matrix product) has lost its meaning by the time it arrives here, and is refused.
    """
    overload: OpOverload = call.func  # type: ignore[assignment]
    _check_same_structure(call.lists)
    if overload_acts_on_values(overload):
        arena = _common_arena(call.lists)
        on_flats = arena is not None and _plain_operands_fit(call, arena)
        out = _run_on_flats(call, arena) if arena is not None and on_flats else _map(call)
    else:
        out = RULES.lookup(overload)(call)
    return return_and_correct_aliasing(overload, call.args, call.kwargs, out)


def _check_same_structure(lists: Sequence[TensorList]) -> None:
    first, *others = lists
    for other in others:
        if difference := first_difference(first.treespec, other.treespec):
            raise ValueError(f"TensorLists of different structure; first at {difference}")


def _common_arena(lists: Sequence[TensorList]) -> PackedLayout | None:
    if any(x._arena is not lists[0]._arena for x in lists):
        return None
    return lists[0]._arena if all(x.arena is not None for x in lists) else None


def _fits_flats(call: ListCall, arena: PackedLayout) -> bool:
    if not acts_on_values(call.func) or any(call.kwargs.get(o) is not None for o in FOREIGN_OPTIONS):
        return False
    if call.func in (torch.where, torch.Tensor.where) and len(call.args) + len(call.kwargs) < 3:
        return False
    if torch.is_grad_enabled() and any(x._elements is not None and x.wants_grad() for x in call.lists):
        return False
    return _plain_operands_fit(call, arena)


def _plain_operands_fit(call: ListCall, arena: PackedLayout) -> bool:
    """Return whether plain tensors act on a flat as they do on each element, and no element occurs twice."""
    if arena.has_ties:
        return False
    plain = [v for i, v in enumerate(call.leaves) if isinstance(v, torch.Tensor) and i not in call.positions]
    # A 0-d element and a 0-d tensor promote as equals; a flat and a 0-d tensor do not.
    if plain and arena.has_scalars:
        return False
    return all(t.dim() == 0 and not t.requires_grad for t in plain)


def _describe_flats(arena: PackedLayout) -> str:
    count = len(arena.sizes)
    return f"on the packed flats ({count} group{'s' if count > 1 else ''})"


def _run_on_flats(call: ListCall, arena: PackedLayout) -> Any:
    from subtensors.lists.tensor_list import of_flats

    lists: list[TensorList] = call.lists
    flats = [x._flats or [] for x in lists]
    results = [call.run(group) for group in zip(*flats, strict=True)]

    def wrap(parts: list[torch.Tensor]) -> TensorList:
        for x, x_flats in zip(lists, flats, strict=True):
            if all(a is b for a, b in zip(parts, x_flats, strict=True)):
                _note_change(x)
                return x
        with torch._C.DisableTorchFunctionSubclass():
            size = lists[0].shape  # symbolic where the compiler made it so
        return of_flats(parts, arena, size)

    return gather(results, wrap)


def _note_change(x: TensorList) -> None:
    """Increment the elements' version counters: packed elements do not share that of their flat."""
    if x._elements and not torch.compiler.is_compiling() and not x._elements[0].is_inference():
        torch.autograd.graph.increment_version(x._elements)


def _map(call: ListCall) -> Any:
    lists: list[TensorList] = call.lists
    results = []
    for index, elements in enumerate(zip(*[x.tensors for x in lists], strict=True)):
        try:
            results.append(call.run(elements))
        except Exception as error:  # the function's own, with the element's name
            error.add_note(f"in element {leaf_name(lists[0].treespec, index)} of a TensorList")
            raise
    if all(r is None for r in results) and getattr(call.func, "__name__", "") != "__get__":
        return None
    return _gathered(results, lists)


RULES.register(OpClass.POINTWISE, OpClass.REDUCTION)(_map)


def _gathered(results: list[Any], lists: Sequence[TensorList]) -> Any:
    """Gather the results of each element into lists; results that are an argument's own elements give that argument."""

    def wrap(tensors: list[torch.Tensor]) -> TensorList:
        for x in lists:
            if all(a is b for a, b in zip(tensors, x.tensors, strict=True)):
                return x
        return lists[0].like(tensors)

    return gather(results, wrap)


_NUMBERS = frozenset(
    """
    dim size stride numel nelement ndimension item tolist numpy storage_offset data_ptr element_size is_contiguous
    is_complex is_floating_point is_signed is_conj is_neg is_inference is_pinned get_device equal allclose
    untyped_storage type
    """.split()
)
_TENSOR_PROPERTIES = ("T", "mT", "H", "mH", "real", "imag", "data")


def _of_nothing(call: ListCall) -> Any:
    """The result of a function on an empty list: the list itself for an in-place one, else an empty list."""
    name = getattr(call.func, "__name__", "")
    first: TensorList = call.lists[0]
    if name in ("__set__", "__delete__"):
        return None
    if name == "__get__":
        tensor = any(call.func == getattr(torch.Tensor, p).__get__ for p in _TENSOR_PROPERTIES)
        return first.like([]) if tensor else []
    if name in _NUMBERS:
        return []
    return first if name.endswith("_") and not name.endswith("__") else first.like([])


def _backward(call: ListCall) -> ListPlan | None:
    """`tl.backward()`: one pass from all elements, so that graphs they share are walked once and not freed between."""
    root, *rest = call.args
    names = ("gradient", "retain_graph", "create_graph", "inputs")
    options = {**dict(zip(names, rest, strict=False)), **call.kwargs}
    gradient = options.get("gradient")
    if not _is_list(root):
        return None
    gradients = [gradient] * len(root)
    if gradient is not None and _is_list(gradient):
        _check_same_structure([root, gradient])
        gradients = gradient.tensors
    inputs = options.get("inputs")
    if inputs is not None:
        inputs = _all_tensors([inputs] if isinstance(inputs, torch.Tensor) else inputs)

    def walk() -> None:
        torch.autograd.backward(
            root.tensors, gradients, options.get("retain_graph"), options.get("create_graph") or False, inputs=inputs
        )

    return ListPlan(lambda: "one backward pass from all elements", walk)


def _grad(call: ListCall) -> ListPlan | None:
    """`torch.autograd.grad(loss, tl)`: one pass for all elements; lists among the outputs are mapped."""
    outputs, inputs = call.args[:2]
    inputs = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
    if len(call.positions) != sum(map(_is_list, inputs)):
        return None

    def walk() -> tuple[Any, ...]:
        grads = iter(torch.autograd.grad(outputs, _all_tensors(inputs), *call.args[2:], **call.kwargs))
        return tuple(_gathered([next(grads) for _ in x], [x]) if _is_list(x) else next(grads) for x in inputs)

    return ListPlan(lambda: "one backward pass to all elements", walk)


def _all_tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    return [t for x in values for t in (x.tensors if _is_list(x) else [x])]


def _is_list(value: object) -> bool:
    return hasattr(value, "treespec") and isinstance(value, torch.Tensor)


_SPECIAL: dict[Callable[..., Any], Callable[[ListCall], ListPlan | None]] = {
    torch.Tensor.backward: _backward,
    torch.autograd.grad: _grad,
}
