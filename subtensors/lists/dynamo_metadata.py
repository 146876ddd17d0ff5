"""Shapes, strides and dtypes of a list's elements in compiled code.

Dynamo does not ask the type: it answers from the one shape that it has for every tensor, which for a list is the number
of elements. So its answers are replaced by a list with one value per element. These are constants of the graph, guarded
by the layout of a packed list and by each element of an unpacked one.
"""

from __future__ import annotations

from functools import partial

from subtensors.dispatch.lists.list_call import ElementList
from subtensors.dispatch.ops.errors import RuleError
from subtensors.dispatch.torch_internals import dynamo, dynamo_rules

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
