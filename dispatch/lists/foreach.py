"""The table of torch calls over lists that are one `torch._foreach_*` call, and the grouping that runs them.

A row names the parameters of a torch function and, for each combination of kinds of operands, the foreach overload
that computes the same: "L" a list, "S" a Python number, "0" a 0-d tensor. Overloads are resolved once, at the first
call: resolving a packet at every call costs more than the kernels it launches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch._ops import OpOverload

from subtensors.dispatch.lists.list_call import ElementList, ListCall, ListPlan
from subtensors.dispatch.ops.plain_types import PLAIN_TYPES
from subtensors.dispatch.ops.tree import Args, Kwargs, PyTree
from subtensors.dispatch.torch_internals.autograd import is_transforming
from subtensors.dispatch.torch_internals.ops import schema_of

_UNARY = (
    "abs acos asin atan ceil cos cosh erf erfc exp expm1 floor frac lgamma log log10 log1p log2 neg reciprocal round "
    "rsqrt sigmoid sign sin sinh sqrt tan tanh trunc"
).split()

_ALIASES = {
    "abs": ("absolute",),
    "acos": ("arccos",),
    "asin": ("arcsin",),
    "atan": ("arctan",),
    "neg": ("negative",),
    "trunc": ("fix",),
    "sub": ("subtract",),
    "mul": ("multiply",),
    "div": ("divide", "true_divide"),
}

# Not torch.special.round: it refuses integers, which torch.round and its foreach form accept.
_IN_SPECIAL = {"erf": "erf", "erfc": "erfc", "expm1": "expm1", "log1p": "log1p", "sigmoid": "expit"}


@dataclass(frozen=True)
class Row:
    """One foreach op: its operands in order, and its overloads by kinds of operand."""

    base: str
    operands: tuple[str, ...]
    overloads: dict[str, str]
    is_comparison: bool = False
    """True if the op compares values: torch refuses complex ones, for lists with another error than for tensors."""


_ROWS = [
    *(Row(name, ("input",), {"L": "default"}) for name in _UNARY),
    Row("add", ("input", "other"), {"LL": "List", "LS": "Scalar", "L0": "Tensor"}),
    Row("sub", ("input", "other"), {"LL": "List", "LS": "Scalar"}),
    Row("mul", ("input", "other"), {"LL": "List", "LS": "Scalar", "L0": "Tensor"}),
    Row("div", ("input", "other"), {"LL": "List", "LS": "Scalar", "L0": "Tensor"}),
    Row("maximum", ("input", "other"), {"LL": "List"}, is_comparison=True),
    Row("minimum", ("input", "other"), {"LL": "List"}, is_comparison=True),
    Row("clamp_min", ("input", "min"), {"LL": "List", "LS": "Scalar"}),
    Row("clamp_max", ("input", "max"), {"LL": "List", "LS": "Scalar"}),
    Row("pow", ("input", "exponent"), {"LL": "List", "LS": "Scalar", "SL": "ScalarAndTensor"}),
    Row("lerp", ("input", "end", "weight"), {"LLL": "List", "LLS": "Scalar"}),
    Row("addcmul", ("input", "tensor1", "tensor2"), {"LLL": "Scalar"}),
    Row("addcdiv", ("input", "tensor1", "tensor2"), {"LLL": "Scalar"}),
    Row("copy", ("input", "src"), {"LL": "default"}),
    Row("zero", ("input",), {"L": "default"}),
    Row("clone", ("input",), {"L": "default"}),
]


@dataclass(frozen=True)
class Target:
    """The foreach form of a torch function: a row, and the overloads of its functional or its in-place form."""

    row: Row
    overloads: dict[str, OpOverload]
    in_place: bool


@functools.cache
def targets() -> dict[Callable[..., object], Target]:
    """Return the foreach form of every torch function that has one."""
    forms: dict[Callable[..., object], Target] = {}
    for row in _ROWS:
        for in_place in (False, True):
            suffix = "_" if in_place else ""
            packet = getattr(torch.ops.aten, f"_foreach_{row.base}{suffix}", None)
            if packet is None:
                continue
            overloads = {k: getattr(packet, o) for k, o in row.overloads.items() if o in packet.overloads()}
            target = Target(row, overloads, in_place)
            names = [name + suffix for name in (row.base, *_ALIASES.get(row.base, ()))]
            spellings = [getattr(owner, name, None) for name in names for owner in (torch.Tensor, torch)]
            if not in_place and row.base in _IN_SPECIAL:
                spellings.append(getattr(torch.special, _IN_SPECIAL[row.base]))
            forms.update((func, target) for func in spellings if func is not None)
    return forms


def _run(overload: OpOverload, operands: Args, options: Kwargs, groups: list[list[int]] | None) -> list[PyTree]:
    """Run one foreach call, or one per group of elements; return the results in order, none of an in-place call."""
    if groups is None:
        return overload(*operands, **options) or []
    out: dict[int, PyTree] = {}
    for group in groups:
        part = [[x[i] for i in group] if isinstance(x, list) else x for x in operands]
        out.update(zip(group, overload(*part, **options) or (), strict=False))
    return [out[i] for i in sorted(out)]


def foreach_call(call: ListCall[ElementList]) -> ListPlan | None:
    """Return the foreach form of a call; None if torch has none that computes the same."""
    target = targets().get(call.func)
    if target is None or is_transforming():  # torch.vmap has no rule for foreach overloads
        return None
    options = dict(call.kwargs)
    named = [options.pop(name) for name in target.row.operands[len(call.args) :] if name in options]
    values: list[PyTree] = [*call.args, *named]
    kinds = "".join(map(_kind, values))
    overload = target.overloads.get(kinds)
    if overload is None or (options and not options.keys() <= _options_of(overload, len(kinds))):
        return None
    if any(isinstance(v, torch.Tensor | np.generic) for v in options.values()):
        return None  # foreach overloads take Python's own numbers
    operands = tuple(x.tensors if hasattr(x, "tensors") else x for x in values)
    lists = [x for x in operands if isinstance(x, list)]
    if "0" in kinds and values[-1].requires_grad and torch.is_grad_enabled():
        return None  # torch's backward of these overloads has no gradient for the tensor that all elements share
    signatures = list(zip(*[[(t.dtype, t.device, t.layout, type(t)) for t in x] for x in lists], strict=True))
    distinct = set(signatures)
    for signature in distinct:
        for dtype, device, layout, kind in signature:
            if target.row.is_comparison and dtype.is_complex:
                return None
            if layout is not torch.strided or kind not in PLAIN_TYPES:
                return None
            if "0" in kinds and (values[-1].device != device or values[-1].dtype != signature[0][0]):
                return None
    if target.in_place and any(s[0][1].type != "cpu" for s in distinct) and _repeats_memory(lists[0]):
        return None
    may_be_conjugated = any(signature[0][0].is_complex for signature in distinct)
    lazy = (torch.Tensor.is_neg, torch.Tensor.is_conj) if may_be_conjugated else (torch.Tensor.is_neg,)
    if target.in_place and any(any(map(is_lazy, lists[0])) for is_lazy in lazy):
        return None  # torch's foreach overloads don't write to views that are negated or conjugated
    groups = None
    if len(distinct) > 1:
        by_signature: dict[Hashable, list[int]] = {}
        for i, signature in enumerate(signatures):
            by_signature.setdefault(signature, []).append(i)
        groups = list(by_signature.values())
    count = len(groups or [0])
    return ListPlan(
        lambda: f"foreach {overload} ({count} group{'s' if count > 1 else ''})",
        functools.partial(_run, overload, operands, options, groups),
    )


@functools.cache
def _options_of(overload: OpOverload, operands: int) -> frozenset[str]:
    """Return the names of an overload's arguments after its operands."""
    return frozenset(argument.name for argument in schema_of(overload).arguments[operands:])


def _kind(value: object) -> str:
    if hasattr(value, "treespec"):
        return "L"
    if isinstance(value, (bool, int, float, complex)):
        return "S"
    return "0" if isinstance(value, torch.Tensor) and value.dim() == 0 else "?"


def _repeats_memory(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether an address occurs twice in the list: a foreach kernel would race, and a map would not."""
    addresses = [p for p in map(torch.Tensor.data_ptr, tensors) if p]
    return len(set(addresses)) < len(addresses)
