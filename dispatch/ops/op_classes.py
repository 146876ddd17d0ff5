"""The class of every aten op: the one table that every rule table is written against.

A class is an algebraic property (see `OpClass`), so a rule written for a class is right for every op in it. An op's
class is looked up in this order:

1. an in-place or `out=` overload has the class of its functional overload, `_foreach_` that of the single-tensor op;
2. the supplement (`op_class_overrides.py`), by overload (`max.other`) or by name (`cat`), grouped by reason;
3. what torch declares: `is_view`, then the tags `nondeterministic_seeded`, `pointwise`, `reduction`, `view_copy`;
4. otherwise `OpClass.OTHER`.

Tests prove the properties by running the ops of torch's own `op_db`.
"""

from __future__ import annotations

import functools

import torch
from torch._ops import OpOverload

from subtensors.dispatch.ops.op_class_overrides import FOREACH_TWINS, LISTED_CLASSES, OpClass
from subtensors.dispatch.torch_internals.ops import schema_of

__all__ = ["OpClass", "functional_form", "is_in_place", "op_class", "overload_name"]


@functools.cache
def op_class(op: OpOverload) -> OpClass:
    """The class of any overload; `OpClass.OTHER` where no property is known.

    Example:
        >>> op_class(torch.ops.aten.add_.Tensor).value
        'pointwise'
        >>> op_class(torch.ops.aten._foreach_norm.Scalar).value
        'reduction'
    """
    twin = functional_form(op)
    if twin is not None and twin is not op:
        return op_class(twin)
    listed = LISTED_CLASSES.get(overload_name(op)) or LISTED_CLASSES.get(_name(op))
    if listed is not None and op.namespace == "aten":
        return listed
    single = _single_tensor_form(op)
    if single is not None:
        return op_class(single)
    return _declared_class(op)


@functools.cache
def is_in_place(op: OpOverload) -> bool:
    """Return whether an op writes to a tensor it is given, as `batch_norm` does with running statistics.

    An `out=` argument does not count.

    Example:
        >>> is_in_place(torch.ops.aten.add_.Tensor), is_in_place(torch.ops.aten.add.out)
        (True, False)
    """
    arguments = schema_of(op).arguments
    return any(a.alias_info is not None and a.alias_info.is_write and not a.is_out for a in arguments)


@functools.cache
def functional_form(op: OpOverload) -> OpOverload | None:
    """The overload that computes the same values and writes to none of its arguments.

    Returns:
        `op` itself if it writes nothing; its twin, with arguments of the same names (less any `out=`) though perhaps in
        another order (`polygamma_`); None if it has no twin.

    Example:
        >>> functional_form(torch.ops.aten.mul_.Tensor)
        <OpOverload(op='aten.mul', overload='Tensor')>
        >>> functional_form(torch.ops.aten.sum.IntList_out)
        <OpOverload(op='aten.sum', overload='dim_IntList')>
    """
    if not _writes(op):
        return op
    candidates = [
        c for name in _functional_names(_name(op)) for c in _overloads_named(op.namespace, name) if not _writes(c)
    ]
    wanted = _signature(op)
    for extra in (frozenset[str](), _TENSOR_OPTIONS):
        for candidate in candidates:
            offered = _signature(candidate)
            if wanted <= offered and {name for name, _ in offered - wanted} <= extra:
                return candidate
    return None


def overload_name(op: OpOverload) -> str:
    """An overload's name without its namespace, as the supplement writes it.

    Example:
        >>> overload_name(torch.ops.aten.relu.default)
        'relu.default'
    """
    return f"{_name(op)}.{schema_of(op).overload_name or 'default'}"


def _declared_class(op: OpOverload) -> OpClass:
    # A view comes first: whoever writes to the output of `positive` writes to its input.
    if op.is_view:
        return OpClass.VIEW
    for tag, cls in (
        (torch.Tag.nondeterministic_seeded, OpClass.RANDOM),
        (torch.Tag.pointwise, OpClass.POINTWISE),
        (torch.Tag.reduction, OpClass.REDUCTION),
        (torch.Tag.view_copy, OpClass.COPY),
    ):
        if tag in op.tags:
            return cls
    return OpClass.OTHER


def _single_tensor_form(op: OpOverload) -> OpOverload | None:
    name = _name(op)
    if not name.startswith("_foreach_"):
        return None
    if name in FOREACH_TWINS:
        return FOREACH_TWINS[name]
    # All overloads of these ops share a class, so the first will do.
    candidates = _overloads_named(op.namespace, name.removeprefix("_foreach_"))
    return next((c for c in candidates if not _writes(c)), None)


def _overloads_named(namespace: str, name: str) -> list[OpOverload]:
    packet = getattr(getattr(torch.ops, namespace), name, None)
    return [] if packet is None else [getattr(packet, overload) for overload in packet.overloads()]


def _name(op: OpOverload) -> str:
    return schema_of(op).name.split("::")[1]


def _writes(op: OpOverload) -> bool:
    return any(a.alias_info is not None and a.alias_info.is_write for a in schema_of(op).arguments)


# Options that describe a factory's output, which an `out=` argument already does.
_TENSOR_OPTIONS = frozenset({"dtype", "layout", "device", "pin_memory"})


def _signature(op: OpOverload) -> frozenset[tuple[str, str]]:
    return frozenset((a.name, str(a.type)) for a in schema_of(op).arguments if not a.is_out)


def _functional_names(name: str) -> tuple[str, ...]:
    # `add_` -> `add`; `__iand__` -> `__and__`; `normal_` -> `normal_functional`; an `out=` overload keeps its name.
    if name.startswith("__i") and name.endswith("__"):
        return ("__" + name[3:],)
    base = name.removesuffix("_")
    return (base, f"{base}_functional")
