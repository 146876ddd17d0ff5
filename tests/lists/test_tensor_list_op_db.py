"""Map semantics over torch's own op_db: every overridable function, its in-place form, and its gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import optree
import torch
from conformance import check_call, copy_of

import subtensors as st
from subtensors.dispatch.lists.batched import ROWS as BATCHED

if TYPE_CHECKING:
    from torch.testing._internal.opinfo.core import OpInfo, SampleInput

OVERRIDABLE = set(chain.from_iterable(torch.overrides.get_overridable_functions().values()))

# Their results are uninitialized memory.
UNINITIALIZED = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted", "resize_"}


def samples(op: OpInfo, count: int, requires_grad: bool) -> Iterable[SampleInput]:
    dtypes = op.supported_dtypes("cpu")
    if not dtypes:
        return []
    dtype = torch.float64 if torch.float64 in dtypes else next(iter(sorted(dtypes, key=str)))
    grad = requires_grad and (dtype.is_floating_point or dtype.is_complex)
    return islice(op.sample_inputs("cpu", dtype, requires_grad=grad), count)


def as_lists(tree: Any) -> Any:
    """The arguments with every tensor replaced by a list of it and a copy."""

    def leaf(x: Any) -> Any:
        return st.TensorList([x, copy_of(x)]) if isinstance(x, torch.Tensor) else x

    return optree.tree_map(leaf, tree, none_is_leaf=True)


def has_list(tree: Any) -> bool:
    return any(isinstance(x, st.TensorList) for x in optree.tree_leaves(tree))


def any_requires_grad(tree: Any) -> bool:
    return any(isinstance(x, st.TensorList) and any(x.requires_grad) for x in optree.tree_leaves(tree))


def overridable(func: Callable[..., Any] | None) -> bool:
    try:
        return func is not None and func in OVERRIDABLE
    except TypeError:
        return False


def test_every_function_of_op_db_maps_over_a_list() -> None:
    from torch.testing._internal.common_methods_invocations import op_db  # which takes seconds

    failures, covered = [], 0
    for op in op_db:
        forms = [f for f in (op.op, op.method_variant, op.inplace_variant) if overridable(f)]
        if not forms:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                inputs = list(samples(op, 2, requires_grad=False))
            except RuntimeError:
                continue
            for sample in inputs:
                call = as_lists(((sample.input, *sample.args), sample.kwargs))
                if not has_list(call):
                    continue
                for form in forms:
                    covered += 1
                    try:
                        check_call(form, *call, values=op.name not in UNINITIALIZED and form not in BATCHED)
                    except Exception as error:  # reported at the end, with the rest
                        failures.append(f"{op.formatted_name} {form}: {type(error).__name__} {str(error)[:200]}")
    assert not failures, "\n".join(failures)
    assert covered > 1000


def test_gradients_flow_through_the_elements() -> None:
    from torch.testing._internal.common_methods_invocations import op_db  # which takes seconds

    failures, covered = [], 0
    for op in op_db:
        if not overridable(op.op) or not op.supports_autograd:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for sample in samples(op, 1, requires_grad=True):
                call = as_lists(((sample.input, *sample.args), sample.kwargs))
                if not any_requires_grad(call):
                    continue
                try:
                    covered += check_call(
                        lambda *a, op=op, **k: gradients(op, a, k),
                        *call,
                        strides=False,
                        # The last bits of its backward depend on where a matrix lies in memory.
                        values=op.name != "linalg.det",
                    )
                except Exception as error:  # reported at the end, with the rest
                    failures.append(f"{op.formatted_name}: {type(error).__name__} {str(error)[:300]}")
    assert not failures, "\n".join(failures)
    assert covered > 300


def gradients(op: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The gradients of every input, of an element or of a list: one function of plain tensors and of lists alike."""
    torch.manual_seed(0)
    leaves = [x for x in optree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    out = op.op(*args, **kwargs)
    for part in optree.tree_leaves(out):
        for y in part if isinstance(part, st.TensorList) else [part]:
            if isinstance(y, torch.Tensor) and y.requires_grad:
                (y.real if y.is_complex() else y).sum().backward(retain_graph=True)
    return [x.grad for x in leaves]
