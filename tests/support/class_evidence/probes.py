"""The property of each op class, as a probe: a test that runs one recorded call on related inputs.

A probe compares the op with itself (on permuted, relabelled, cut or averaged inputs), so it needs no second
implementation. It returns None where the property holds and otherwise says how it fails; it raises `SaysNothing` where
the call cannot tell. Equal here means up to half of the dtype's digits: a probe tells different results apart, it does
not measure rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from class_evidence.calls import Call, Tensors, holds_values
from subtensors.dispatch.ops.op_classes import OpClass, overload_name
from subtensors.dispatch.torch_internals.ops import schema_of

_FIRST_LABEL = 1000  # beyond the constants that ops fill with

# They return a copy where the input's strides (or a lazy conjugate) allow no view.
_VIEWS_THAT_MAY_COPY = frozenset(
    "reshape reshape_as flatten ravel contiguous resolve_conj resolve_neg pin_memory".split()
)


class SaysNothing(Exception):
    """The call is too small, or of a kind on which the property holds for every op."""


def acts_element_by_element(call: Call) -> str | None:
    """f(x)[i] == f(x[i]) for positions i in another order, all and half: none sees another, nor how many there are."""
    if overload_name(call.op).startswith("_foreach_"):
        call = _first_of_each_list(call)
    tensors = call.tensors()
    if not tensors:
        raise SaysNothing("no tensor argument")
    try:
        shape = torch.broadcast_shapes(*(t.shape for t in tensors))
    except RuntimeError:
        return "its operands do not broadcast"
    size = shape.numel()
    if size < 2:
        raise SaysNothing("fewer than two elements")
    whole = [t for t in call.run() if t.numel() > 0]
    if not whole or any(t.shape != shape for t in whole):
        return "an output has another shape than the broadcast operands"
    for positions in (torch.arange(size).flip(0), torch.randperm(size)[: max(1, size // 2)]):
        # 0-d operands stay 0-d (or dtypes would promote otherwise), and so does the rank (a memory format may need it).
        def select(t: torch.Tensor, positions: torch.Tensor = positions) -> torch.Tensor:
            return t if t.dim() == 0 else t.expand(shape).reshape(-1)[positions].reshape(-1, *[1] * (len(shape) - 1))

        part = [t.reshape(-1) for t in call.with_tensors(select).run() if t.numel() > 0]
        if not all_close(part, [t.reshape(-1)[positions] for t in whole]):
            return "a choice of its elements gives other values"
    return None


def ignores_the_order_of_what_it_reduces(call: Call) -> str | None:
    """f(x permuted along the reduced dims) == f(x), and is smaller; positions point at the same values as before."""
    if overload_name(call.op).startswith("_foreach_"):
        call = _first_of_each_list(call)
    named = call.arguments()
    if "reduction" in named:
        return _ignores_the_order_of_samples(call, named)
    operand = next(iter(call.tensors()), None)
    if operand is None or operand.numel() < 2:
        raise SaysNothing("fewer than two elements")
    if "size" in named or any(t.dim() > 0 and t.shape != operand.shape for t in call.tensors()):
        raise SaysNothing("what it reduces follows from several shapes")
    dims = _reduced_dims(named, operand.dim())
    if all(operand.shape[d] < 2 for d in dims):
        raise SaysNothing("the reduced dims have size one")
    # One permutation of the whole for a full reduction; otherwise one along each reduced dim.
    moved = torch.arange(operand.numel()).reshape(operand.shape)
    if len(dims) == operand.dim():
        moved = moved.reshape(-1)[torch.randperm(operand.numel())].reshape(operand.shape)
    else:
        for d in dims:
            moved = moved.index_select(d, torch.randperm(operand.shape[d]))
    shape = operand.shape

    def permute(t: torch.Tensor) -> torch.Tensor:
        return t.reshape(-1)[moved.reshape(-1)].reshape(shape) if t.shape == shape else t

    before, after = call.run(), call.with_tensors(permute).run()
    if any(t.numel() >= operand.numel() for t in before):
        return "the output is no smaller than what it reduces"
    before = _values_at_positions(call.op, before, operand, dims, named)
    after = _values_at_positions(call.op, after, permute(operand), dims, named)
    return None if all_close(before, after) else "the order of the reduced elements matters"


def _ignores_the_order_of_samples(call: Call, named: dict[str, Any]) -> str | None:
    operand = call.tensors()[0]
    others = [t for t in call.tensors()[1:] if t.dim() == operand.dim() or not t.is_floating_point()]
    samples = operand.shape[0] if operand.dim() else 0
    if samples < 2 or operand.numel() == samples or any(t.dim() == 0 or t.shape[0] != samples for t in others):
        raise SaysNothing("no batch of samples")
    order = torch.randperm(samples)
    per_class = named.get("weight") if operand.dim() > 1 else None

    def permute(t: torch.Tensor) -> torch.Tensor:
        is_weight = isinstance(per_class, torch.Tensor) and t.shape == per_class.shape and t.dim() == 1
        return t if t.dim() == 0 or t.shape[0] != samples or is_weight else t[order]

    before, after = call.run(), call.with_tensors(permute).run()
    before = [permute(t) for t in before]
    return None if all_close(before, after) else "the order of the samples matters"


def returns_its_inputs_storage(call: Call) -> str | None:
    """Every output lies in an input's storage; a view that may copy at least keeps the elements in order."""
    inputs, outputs = call.run_on_copies()
    outputs = [t for t in outputs if t.numel() > 0]
    if not outputs:
        raise SaysNothing("the output is empty")
    storages = {t.untyped_storage().data_ptr() for t in inputs}
    for output in outputs:
        if output.untyped_storage().data_ptr() in storages:
            continue
        if overload_name(call.op).split(".")[0] not in _VIEWS_THAT_MAY_COPY:
            return "an output has a storage of its own"
        if not torch.equal(output.reshape(-1), inputs[0].reshape(-1)):
            return "a copy has other elements than its input"
    return None


def is_affine_in_each_operand(call: Call) -> str | None:
    """f((x + y) / 2) == (f(x) + f(y)) / 2 in each floating-point operand, the others fixed."""
    if not call.values():
        raise SaysNothing("no floating-point operand")
    for operand in call.values():
        if not _is_affine_in(call, operand, outputs=None):
            return "it is not affine in an operand"
    return None


def ignores_tensor_values(call: Call) -> str | None:
    """f(x) == f(y) for x and y of one shape; what is not filled has only a shape."""
    first, second = call.run(), call.with_tensors(_other_values).run()
    if "empty" in overload_name(call.op):
        same = [(t.shape, t.dtype, t.stride()) for t in first] == [(t.shape, t.dtype, t.stride()) for t in second]
        return None if same else "its shape depends on its input's values"
    return None if all_close(first, second) else "its values depend on its input's"


def is_a_function_of_the_seed(call: Call) -> str | None:
    """Declared as drawing from a generator, and the same again from the same seed."""
    if torch.Tag.nondeterministic_seeded not in call.op.tags:
        return "torch does not declare it random"
    if any(isinstance(leaf, torch.Generator) for leaf in tree_leaves(call.kwargs)):
        raise SaysNothing("the generator it was given has moved on")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        first = call.run()
        torch.manual_seed(0)
        second = call.run()
    return None if all_close(first, second) else "the same seed gives other values"


def only_moves_elements(call: Call) -> str | None:
    """f(g(x)) == g(f(x)) for a g that renames every element; elements of the output not in x are constants."""
    originals = call.values()
    if not originals:
        raise SaysNothing("no floating-point operand")
    if any(t.is_complex() for t in originals):
        raise SaysNothing("complex elements")
    # Labels count on from FIRST over all operands; a random name each, so that no average of labels has a label's name.
    sizes = [t.numel() for t in originals]
    labels = torch.arange(_FIRST_LABEL, _FIRST_LABEL + sum(sizes))
    names = torch.rand(len(labels), dtype=torch.float64).to(originals[0].dtype)

    def with_elements(elements: torch.Tensor) -> Call:
        parts = zip(originals, elements.split(sizes), strict=True)
        swaps = {id(t): part.reshape(t.shape).to(t.dtype) for t, part in parts}
        return call.with_tensors(lambda t: swaps.get(id(t), t))

    moved = False
    for a, b in zip(with_elements(labels).run(), with_elements(names).run(), strict=True):
        is_label = (a >= labels[0]) & (a <= labels[-1]) & (a == a.round())
        moved |= bool(is_label.any())
        expected = torch.where(is_label, names[torch.where(is_label, a - _FIRST_LABEL, 0).long()].to(a.dtype), a)
        if a.shape != b.shape or not torch.equal(expected, b):
            return "an output element is not an input element"
    if not moved:
        raise SaysNothing("no input element reaches the output")
    return None


def normalises_a_slice(call: Call) -> str | None:
    """f(x + 1) == f(x) or f(2 x) == f(x) for a negligible eps; its derivative: affine in the gradient."""
    named = call.arguments()
    operand = next(iter(call.values()), None)
    if operand is None or operand.numel() < 2:
        raise SaysNothing("fewer than two elements")
    if "backward" in overload_name(call.op):
        return None if _is_affine_in(call, operand, outputs=1) else "it is not affine in the gradient"
    given = overload_name(call.op).split(".")[0].endswith(("no_training", "no_update"))
    if given or not all(named.get(flag, True) for flag in ("training", "train", "use_input_stats")):
        raise SaysNothing("the statistics are given")
    call = call.with_argument("eps", 1e-30)
    first = call.run()[:1]
    if first[0].shape != operand.shape:
        return "the output has another shape than the input"
    shifted, scaled = call.replacing(operand, operand + 1), call.replacing(operand, operand * 2)
    if not any(all_close(first, changed.run()[:1]) for changed in (shifted, scaled)):
        return "neither adding a constant nor scaling leaves the output as it was"
    return None


def depends_on_earlier_elements_only(call: Call) -> str | None:
    """f(x[:k]) is the beginning of f(x) along the scanned dim."""
    operand = call.tensors()[0]
    if operand.dim() == 0 or operand.numel() < 2:
        raise SaysNothing("fewer than two elements")
    dim = call.arguments().get("dim")
    if not isinstance(dim, int):
        return "it has no dim to scan"
    shape = operand.shape
    if any(t.dim() > 0 and t.shape != shape for t in call.tensors()):
        raise SaysNothing("operands of several shapes")
    if shape[dim] < 2:
        raise SaysNothing("the scanned dim has size one")

    def cut(t: torch.Tensor) -> torch.Tensor:
        return t.narrow(dim, 0, (shape[dim] + 1) // 2) if t.shape == shape else t

    whole, part = call.run(), call.with_tensors(cut).run()
    if any(t.dim() != operand.dim() for t in whole):
        return "the output has not the input's dims"
    expected = [t.narrow(dim, 0, p.shape[dim]) for t, p in zip(whole, part, strict=True)]
    return None if all_close(part, expected) else "an element depends on later ones"


def commutes_with_an_increasing_map(call: Call) -> str | None:
    """f(m(x)) == m(f(x)) for values and f(m(x)) == f(x) for positions, with m strictly increasing and m(0) == 0."""
    operands = [t for t in call.tensors() if t.dtype != torch.bool and not t.is_complex()]
    if not any(t.is_floating_point() and t.numel() > 1 for t in operands):
        raise SaysNothing("no floating-point operand with two elements")
    if any(str(a.type) == "number" for a in schema_of(call.op).arguments):
        raise SaysNothing("compares with a Python number")

    def grow(t: torch.Tensor) -> torch.Tensor:
        return t + t.pow(3) if t.is_floating_point() else t

    before, after = call.run(), call.with_tensors(grow).run()
    if len(before) != len(after):
        return "the number of outputs depends on the scale"
    same = [a.shape == b.shape and torch.equal(grow(a), b) for a, b in zip(before, after, strict=True)]
    return None if all(same) else "it depends on more than the order of its elements"


def moves_values_where_an_index_says(call: Call) -> str | None:
    """Has an integer or bool tensor operand, and is affine in each value operand while that is fixed."""
    if all(map(holds_values, call.tensors())):
        return "it has no index operand"
    named = call.arguments()
    if named.get("reduce", "sum") not in ("sum", "mean", "add", None) or named.get("mode", 0) == 2:
        raise SaysNothing("written values meet in a product or a maximum")
    return is_affine_in_each_operand(call)


PROBES: Mapping[OpClass, Callable[[Call], str | None]] = {
    OpClass.POINTWISE: acts_element_by_element,
    OpClass.REDUCTION: ignores_the_order_of_what_it_reduces,
    OpClass.VIEW: returns_its_inputs_storage,
    OpClass.CONTRACTION: is_affine_in_each_operand,
    OpClass.FACTORY: ignores_tensor_values,
    OpClass.RANDOM: is_a_function_of_the_seed,
    OpClass.COPY: only_moves_elements,
    OpClass.NORMALISATION: normalises_a_slice,
    OpClass.SCAN: depends_on_earlier_elements_only,
    OpClass.SORT_SELECT: commutes_with_an_increasing_map,
    OpClass.SCATTER_GATHER: moves_values_where_an_index_says,
}


def _is_affine_in(call: Call, operand: torch.Tensor, outputs: int | None) -> bool:
    other = _other_values(operand)
    middle = (operand + other) / 2
    first, second, between = (call.replacing(operand, x).run()[:outputs] for x in (operand, other, middle))
    averages = [(a + b) / 2 if holds_values(a) else a for a, b in zip(first, second, strict=True)]
    return all_close(between, averages)


def _first_of_each_list(call: Call) -> Call:
    args = tuple(x[:1] if isinstance(x, (list, tuple)) else x for x in call.args)
    return Call(call.op, args, {k: x[:1] if isinstance(x, (list, tuple)) else x for k, x in call.kwargs.items()})


def _reduced_dims(named: Mapping[str, Any], rank: int) -> list[int]:
    dim = named.get("dim")
    if dim is None or dim == []:
        return list(range(rank))
    return [d % rank for d in ([dim] if isinstance(dim, int) else dim)]


def _values_at_positions(
    op: OpOverload, outputs: Tensors, operand: torch.Tensor, dims: list[int], named: Mapping[str, Any]
) -> Tensors:
    # Which of equal elements is pointed at may differ, the element may not.
    name = overload_name(op).split(".")[0]
    pointers = {"argmax": 0, "argmin": 0, "max": 1, "min": 1}.get(name, len(outputs))
    found = list(outputs[:pointers])
    for position in outputs[pointers:]:
        if len(dims) == operand.dim():
            found.append(operand.reshape(-1)[position])
        else:
            index = position if named.get("keepdim") else position.unsqueeze(dims[0])
            found.append(operand.gather(dims[0], index))
    return found


def _other_values(t: torch.Tensor) -> torch.Tensor:
    if t.dtype == torch.bool:
        return ~t
    return torch.randn_like(t) if holds_values(t) else t + 1


def all_close(actual: Tensors, expected: Tensors) -> bool:
    if len(actual) != len(expected):
        return False
    for a, b in zip(actual, expected, strict=True):
        if a.shape != b.shape:
            return False
        if not holds_values(a):
            if not torch.equal(a, b):
                return False
            continue
        finite = b.abs()[b.isfinite()]
        half_the_digits = torch.finfo(a.dtype).eps ** 0.5
        scale = float(finite.max()) if finite.numel() else 1.0
        if not torch.allclose(a, b.to(a.dtype), rtol=half_the_digits, atol=half_the_digits * scale, equal_nan=True):
            return False
    return True
