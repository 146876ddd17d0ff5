"""The four ways to run a torch call on TensorLists: on flats, as one foreach call, batched by shape, or mapped.

For every torch function, `torch.f(x, c)` on a list x means `[torch.f(t, c) for t in x]`. `plan` chooses the cheapest
way that computes just that, in this order:

    torch.f(x, c)
      |  packed alike, and f acts on each value alone     f(flat, c), once per flat
      |  torch has a foreach overload of f                torch._foreach_f(elements, c), once per device and dtype
      |  a matrix function, and shapes repeat             f(torch.stack(elements of a shape), c), once per shape
      v  anything else                                    f(element, c), once per element

Each way is a table in a file of `dispatch/lists/`: `flat_ops.py`, `foreach.py` and `batched.py`. Where a way would
change a result, its table returns None, and the next one is tried. Fused math (`@st.fused`) does not pass through here:
it compiles a function of whole lists to one kernel.

A call is intercepted above autograd, in `__torch_function__`, so gradients flow through the elements. In compiled code
autograd and the compiler see the list as one tensor, and it arrives as an overload in `__torch_dispatch__`: on flats or
mapped, where the op's class allows it, else refused by `RULES`. `run_in_compiler` comes between the two: it maps where
autograd must track the elements one by one (`compiled.py`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias, TypeGuard

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils.hooks import RemovableHandle

from subtensors.counts import counted
from subtensors.dispatch.lists.batched import batched_call
from subtensors.dispatch.lists.flat_ops import UNSUPPORTED_OPTIONS, acts_on_values, overload_acts_on_values
from subtensors.dispatch.lists.foreach import foreach_call
from subtensors.dispatch.lists.list_call import ListCall, ListPlan, PerElement, gather, list_call
from subtensors.dispatch.ops import wrappers
from subtensors.dispatch.ops.errors import RuleError
from subtensors.dispatch.ops.op_classes import OpClass
from subtensors.dispatch.ops.plain_types import MAPPED_TYPES
from subtensors.dispatch.ops.rule_table import RuleTable
from subtensors.dispatch.ops.tree import Args, Kwargs, PyTree
from subtensors.dispatch.torch_internals.autograd import is_module_tracker_hook
from subtensors.dispatch.torch_internals.ops import is_exporting
from subtensors.lists.packing import PackedLayout
from subtensors.lists.tensor_list import TensorList, list_of, of_flats
from subtensors.lists.tree_structure import first_difference, leaf_name

Call: TypeAlias = ListCall[TensorList]


def run(call: Call) -> PyTree:
    """Run a torch function called with TensorLists."""
    return plan(call).run()


def explain_call(func: Callable[..., PyTree], *args: PyTree, **kwargs: PyTree) -> str:
    """Describe how a torch function is run when it is called with these arguments.

    Args:
        func: a torch function or Tensor method, `torch.add` or `torch.Tensor.add_`.
        args, kwargs: its arguments, TensorLists among them; they are not changed.

    Returns:
        The way that applies: on the flats of packed lists, as a foreach call, batched by shape, or mapped; as plain
        torch where no argument is a TensorList.

    Raises:
        ValueError: the lists differ in structure.

    Example:
        >>> from subtensors import TensorList
        >>> explain_call(torch.add, TensorList([torch.ones(2), torch.ones(3)]), 1)
        'foreach aten._foreach_add.Scalar (1 group)'
    """
    call = list_call(func, args, kwargs, TensorList)
    if not call.positions:
        return "plain torch: no argument is of a type of subtensors"
    return plan(call).describe()


def plan(call: Call) -> ListPlan:
    """Choose the way a call is run."""
    lists = call.lists
    if (special := _SPECIAL.get(call.func)) and (way := special(call)) is not None:
        return way
    _check_same_structure(lists)
    if not len(lists[0]):
        return ListPlan(lambda: "nothing to do: the list is empty", lambda: _empty_result(call))
    if (layout := _common_layout(lists)) is not None and _can_run_on_flats(call, layout):
        groups = counted(len(layout.sizes), "group")
        return ListPlan(lambda: f"on the packed flats ({groups})", lambda: _run_on_flats(call, layout))
    # The elements of a foreach or batched call share a graph node, and one's backward would free all.
    way = None if _is_recorded(call) else foreach_call(call) or batched_call(call)
    if way is None:
        return ListPlan(lambda: "mapped element by element", lambda: _map(call))
    return ListPlan(way.describe, lambda: _gather_lists(way.run() or lists[0].tensors, lists))


RULES = RuleTable(
    "TensorList",
    dict.fromkeys(OpClass, "hand torch.compile and the transforms of torch.func the elements, tl.tree()"),
)
"""The rules for overloads that reach `__torch_dispatch__`; each rule takes the `ListCall`."""


def run_overload(call: Call) -> PyTree:
    """Run an overload called with TensorLists, as the compiler does: on flats or mapped, else by `RULES`.

    The compiler and the code above `__torch_dispatch__` see a list as a vector with one entry per element. An op that
    reads this shape (a view, a matrix product) no longer means the map when it arrives here, and is refused.
    """
    overload: OpOverload = call.func  # type: ignore[assignment]
    _refuse_lost_gradients(call)
    _check_same_structure(call.lists)
    if overload_acts_on_values(overload):
        layout = _common_layout(call.lists)
        on_flats = layout is not None and _plain_operands_allow_flats(call, layout)
        out = _run_on_flats(call, layout) if layout is not None and on_flats else _map(call)
    else:
        out = RULES.lookup(overload)(call)
    return return_and_correct_aliasing(overload, call.args, call.kwargs, out)


def _check_same_structure(lists: Sequence[TensorList]) -> None:
    first, *rest = lists
    for other in rest:
        if difference := first_difference(first.treespec, other.treespec):
            raise ValueError(f"TensorLists of different structure; first at {difference}")


def _common_layout(lists: Sequence[TensorList]) -> PackedLayout | None:
    layout = lists[0].arena
    return layout if all(x.arena is layout for x in lists) else None


def _is_recorded(call: Call) -> bool:
    """Return whether autograd records the call."""
    if not torch.is_grad_enabled():
        return False
    tensors = (t for x in call.leaves for t in (x.elements() if _is_list(x) else [x]))
    return any(isinstance(t, torch.Tensor) and t.requires_grad for t in tensors)


def _can_run_on_flats(call: Call, layout: PackedLayout) -> bool:
    if not acts_on_values(call.func) or any(call.kwargs.get(o) is not None for o in UNSUPPORTED_OPTIONS):
        return False
    if call.func in (torch.where, torch.Tensor.where) and len(call.args) + len(call.kwargs) < 3:
        return False
    if torch.is_grad_enabled() and any(x._elements is not None and x.any_requires_grad() for x in call.lists):
        return False
    return _plain_operands_allow_flats(call, layout)


def _plain_operands_allow_flats(call: Call, layout: PackedLayout) -> bool:
    """Return whether plain tensors act on a flat as they do on each element, and no element occurs twice."""
    if layout.has_ties:
        return False
    plain = [v for i, v in enumerate(call.leaves) if isinstance(v, torch.Tensor) and i not in call.positions]
    # A 0-d element and a 0-d tensor promote as equals; a flat and a 0-d tensor do not.
    if plain and layout.has_scalars:
        return False
    return all(t.dim() == 0 and not t.requires_grad for t in plain)


def _run_on_flats(call: Call, layout: PackedLayout) -> PyTree:
    lists = call.lists
    flats = [x.stored() for x in lists]
    results = [call.run(group) for group in zip(*flats, strict=True)]

    def wrap(parts: list[torch.Tensor]) -> TensorList:
        for x, x_flats in zip(lists, flats, strict=True):
            if all(a is b for a, b in zip(parts, x_flats, strict=True)):
                _bump_versions(x)
                return x
        with torch._C.DisableTorchFunctionSubclass():
            size = lists[0].shape  # symbolic where the compiler made it so
        return of_flats(parts, layout, size)

    return gather(results, wrap)


def _bump_versions(x: TensorList) -> None:
    """Increment the elements' version counters: packed elements do not share that of their flat."""
    if x._elements and not torch.compiler.is_compiling() and not x._elements[0].is_inference():
        torch.autograd.graph.increment_version(x._elements)


def _map(call: Call) -> PyTree:
    lists = call.lists
    results = []
    for index, elements in enumerate(zip(*[x.tensors for x in lists], strict=True)):
        try:
            results.append(call.run(elements))
        except Exception as error:  # raised by the function; add the element's name
            error.add_note(f"in element {leaf_name(lists[0].treespec, index)} of a TensorList")
            raise
    if all(r is None for r in results) and getattr(call.func, "__name__", "") != "__get__":
        return None
    return _gather_lists(results, lists)


RULES.register(OpClass.POINTWISE, OpClass.REDUCTION)(_map)


def _gather_lists(results: list[PyTree], lists: Sequence[TensorList]) -> PyTree:
    """Gather the results of the elements into lists; results that are an argument's elements give that argument."""
    return gather(results, lambda tensors: list_of(tensors, lists))


_RETURN_NO_TENSOR = wrappers.QUERIES | {"item", "tolist", "numpy", "equal", "allclose"}
_TENSOR_PROPERTIES = ("T", "mT", "H", "mH", "real", "imag", "data")


def _empty_result(call: Call) -> PyTree:
    """Return the result of a function on an empty list: the list itself if it is in place, else an empty list."""
    name = getattr(call.func, "__name__", "")
    first: TensorList = call.lists[0]
    if name in ("__set__", "__delete__"):
        return None
    if name == "__get__":
        tensor = any(call.func == getattr(torch.Tensor, p).__get__ for p in _TENSOR_PROPERTIES)
        return first.like([]) if tensor else PerElement()
    if name.endswith("_") and not name.endswith("__"):
        return first
    return PerElement() if name in _RETURN_NO_TENSOR else first.like([])


def _backward(call: Call) -> ListPlan | None:
    """`tl.backward()`: one pass from all elements, so that graphs they share are walked once and not freed between."""
    root, *rest = call.args
    names = ("gradient", "retain_graph", "create_graph", "inputs")
    options = {**dict(zip(names, rest, strict=False)), **call.kwargs}
    gradient = options.get("gradient")
    if not _is_list(root):
        return None
    gradients: Sequence[PyTree] = [gradient] * len(root)
    if gradient is not None and _is_list(gradient):
        _check_same_structure([root, gradient])
        gradients = gradient.tensors
    inputs = options.get("inputs")
    if inputs is not None:
        inputs = _all_tensors([inputs] if isinstance(inputs, torch.Tensor) else inputs)

    def run_backward() -> None:
        torch.autograd.backward(
            root.tensors, gradients, options.get("retain_graph"), options.get("create_graph") or False, inputs=inputs
        )

    return ListPlan(lambda: "one backward pass from all elements", run_backward)


def _grad(call: Call) -> ListPlan | None:
    """`torch.autograd.grad(loss, tl)`: one pass for all elements; lists among the outputs are mapped."""
    outputs, inputs = call.args[:2]
    inputs = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
    if len(call.positions) != sum(map(_is_list, inputs)):
        return None

    def run_backward() -> tuple[PyTree, ...]:
        grads = iter(torch.autograd.grad(outputs, _all_tensors(inputs), *call.args[2:], **call.kwargs))
        return tuple(_gather_lists([next(grads) for _ in x], [x]) if _is_list(x) else next(grads) for x in inputs)

    return ListPlan(lambda: "one backward pass to all elements", run_backward)


def _register_hook(call: Call) -> ListPlan | None:
    """`tl.register_hook(hook)`: each element gets the hook, but for those that count the tensors they are given to."""
    hook = call.args[1] if len(call.args) > 1 else call.kwargs.get("hook")
    if is_module_tracker_hook(hook):
        return ListPlan(lambda: "nothing to do: it reads no gradient", lambda: RemovableHandle(OrderedDict()))
    if getattr(hook, "__qualname__", "").startswith("register_multi_grad_hook."):
        raise RuleError("register_multi_grad_hook has no rule for a TensorList: give it the elements, tl.tensors")
    return None


def _all_tensors(values: Iterable[PyTree]) -> list[torch.Tensor]:
    return [t for x in values for t in (x.tensors if _is_list(x) else [x])]


def _is_list(value: object) -> TypeGuard[TensorList]:
    return isinstance(value, TensorList)


_SPECIAL: dict[Callable[..., PyTree], Callable[[Call], ListPlan | None]] = {
    torch.Tensor.backward: _backward,
    torch.autograd.grad: _grad,
    torch.Tensor.register_hook: _register_hook,
}

_ABOUT_THE_LIST = wrappers.QUERIES | {"is_sparse", "__get__", "__set__", "__delete__", "grad"}
"""Functions that the compiler calls on a list itself, those for its gradients included."""

_IN_PLACE_OPERATORS = frozenset(
    "__iadd__ __isub__ __imul__ __itruediv__ __ifloordiv__ __imod__ __ipow__ __iand__ __ior__ __ixor__".split()
)


def run_in_compiler(func: Callable[..., PyTree], args: Args, kwargs: Kwargs) -> PyTree:
    """Run a call that the compiler makes on lists: a traced one, or a metadata query of its own."""
    name = getattr(func, "__name__", "")
    if func == torch.Tensor.grad.__get__:  # type: ignore[union-attr]
        return None  # torch would warn that a list, which is no leaf, has none
    if name not in _ABOUT_THE_LIST:
        call = list_call(func, args, kwargs, TensorList)
        if any(map(_is_tracked, call.lists)):
            return _run_tracked(call, name)
    elif _is_list(args[0]) and not args[0].is_traced() and is_exporting():
        raise RuleError("a TensorList is no argument of torch.export: hand it x.tree(), and make the list within")
    # The rest reaches __torch_dispatch__, where a packed list is its flats.
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _run_tracked(call: Call, name: str) -> PyTree:
    writes = isinstance(call.func, OpOverload) and call.func._schema.is_mutable
    writes |= name in _IN_PLACE_OPERATORS or (name.endswith("_") and not name.endswith("__")) or "out" in call.kwargs
    if writes:
        raise RuleError(
            f"{name} has no rule that writes where a TensorList requires grad under torch.compile: give a new list, "
            "or write under torch.no_grad()"
        )
    args, kwargs = call.with_lists([x.split_elements() for x in call.lists])
    return run(list_call(call.func, args, kwargs, TensorList))


def _is_tracked(x: TensorList) -> bool:
    """Return whether autograd would record a call on a traced list."""
    return torch.is_grad_enabled() and (
        x._is_unconnected or wrappers.requires_grad(x) or any(t.requires_grad for t in x.stored())
    )


_KEEPS_GRADIENTS = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


def _refuse_lost_gradients(call: Call) -> None:
    """Raise if an overload acts on lists themselves, and the gradients of their elements would be lost."""
    if call.func not in _KEEPS_GRADIENTS and any(map(_is_tracked, call.lists)):
        raise RuleError(
            f"{call.func} has no rule that gradients flow through a TensorList by under torch.compile: compute under "
            "torch.no_grad(), or hand it the elements, tl.tree()"
        )


TensorList._run_function = run
TensorList._run_overload = run_overload
TensorList._run_in_compiler = run_in_compiler


MAPPED_TYPES.add(TensorList)
