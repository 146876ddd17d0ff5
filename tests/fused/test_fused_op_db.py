"""No op of op_db is silently wrong in fused math: it is right, or refused, in torch and in kernels."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from programs import Lowering, expected, fresh, tensors_of
from torch import Tensor

from subtensors.dispatch.fused.fused_function import FusedFunction
from subtensors.dispatch.fused.tensor_columns import TensorColumn
from subtensors.dispatch.ops.errors import RuleError

Function = Callable[..., Any]


def _run(op: Function, sample: Any, lowering: Lowering) -> tuple[str, str]:
    arguments = (sample.input, *sample.args), sample.kwargs
    listed = optree.tree_map(
        lambda v: TensorColumn([v.detach().clone()]) if isinstance(v, Tensor) else v, arguments, none_is_leaf=True
    )
    before = fresh(listed)
    plain = optree.tree_map(lambda v: v.detach().clone() if isinstance(v, Tensor) else v, arguments, none_is_leaf=True)
    fusion = FusedFunction(op)
    try:
        result = fusion(*listed[0], **listed[1])
    except RuleError:
        return "refused", ""
    except Exception as error:  # any error of an op, which torch must then raise too
        try:
            op(*plain[0], **plain[1])
        except Exception:  # as above
            return "refused by torch", ""
        # An error that is not our own refusal must name the source line.
        says_where = isinstance(error, TypeError) or "while the math was traced" in str(getattr(error, "__notes__", ""))
        return "raised", "" if says_where else repr(error)
    groups = [type(g).__name__ for plans in fusion._variant.plans.values() for plan in plans for _, g in plan.groups]
    if groups == ["EagerExecutor"]:
        return groups[0], ""  # the op itself ran
    wanted = expected(op, *before)
    got = [v[0] if isinstance(v, TensorColumn) else v for v in optree.tree_leaves(result)]
    got += tensors_of(listed)
    if len(got) != len(wanted):
        return groups[0], f"{len(got)} results and arguments, not {len(wanted)}"
    for a, e in zip(got, wanted, strict=True):
        if not isinstance(a, Tensor):
            return groups[0], f"a result that is no tensor: {a}"
        try:
            e.check(a, lowering.slack(a.dtype), lost=lowering.lost(a.dtype))
        except AssertionError as complaint:
            return groups[0], str(complaint) or "of another dtype or shape"
    return groups[0], ""


@pytest.mark.filterwarnings("ignore")
def test_no_op_of_op_db_is_silently_wrong() -> None:
    from torch.testing._internal.common_methods_invocations import op_db

    counts: Counter[str] = Counter()
    wrong: dict[str, str] = {}
    for info in op_db:
        # New memory holds arbitrary values.
        if torch.float32 not in info.dtypes or info.name.endswith("empty_like"):
            continue
        for sample in itertools.islice(info.sample_inputs("cpu", torch.float32), 2):
            if not isinstance(sample.input, Tensor) or sample.input.layout != torch.strided:
                continue
            how, complaint = _run(info.op, sample, Lowering.TORCH)
            counts[how] += 1
            if complaint:
                wrong[info.full_name] = complaint
            if how == "TorchExecutor" and info.inplace_variant is not None:
                in_place, complaint = _run(info.inplace_variant, sample, Lowering.TORCH)
                counts[f"in place: {in_place}"] += 1
                if complaint or in_place not in ("TorchExecutor", "refused by torch"):
                    wrong[f"{info.full_name} in place"] = complaint or in_place
            if how != "TorchExecutor" or torch.cuda.is_available():
                continue
            with Lowering.INTERPRETER.running():
                how, complaint = _run(info.op, sample, Lowering.INTERPRETER)
            counts[f"interpreter: {how}"] += 1
            if complaint:
                wrong[f"{info.full_name} in kernels"] = complaint
    assert not wrong
    assert counts["TorchExecutor"] > 250
    assert counts["in place: TorchExecutor"] > 100
    assert torch.cuda.is_available() or counts["interpreter: TritonExecutor"] > 200
