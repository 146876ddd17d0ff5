"""Checks the class table by running ops: each claim of it is put to a probe on calls that really happened.

A `Recorder` keeps calls of every overload that passes under it. `validate` runs the probe of the claimed class on each
of them and reports

- *wrong*: the property fails on a call, so a rule for the class would compute something else there;
- *missing*: an op in `OpClass.OTHER` that has the property of a class on every call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from class_evidence.calls import Call, copy_with_storage
from class_evidence.probes import PROBES, SaysNothing
from subtensors.dispatch.ops.op_classes import OpClass, is_in_place, op_class, overload_name

# Properties that no op has by accident. Averages and selections look alike on few calls, so the rest only test claims.
DISCOVERABLE = (OpClass.POINTWISE, OpClass.VIEW, OpClass.COPY)


class Recorder(TorchDispatchMode):
    """Keeps the first calls of every aten overload that runs under it, one for each outline of arguments.

    Args:
        calls_per_overload: how many to keep of each.
        largest: calls with a tensor of more elements are let through and not kept.

    Example:
        >>> with Recorder() as recorder:
        ...     _ = torch.ones(3) + 1
        >>> sorted(str(op) for op in recorder.calls)
        ['aten.add.Tensor', 'aten.ones.default']
    """

    def __init__(self, calls_per_overload: int = 8, largest: int = 60000) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: dict[OpOverload, list[Call]] = {}
        self._described: set[str] = set()
        self._limit = calls_per_overload
        self._largest = largest

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Keep the call, then run it."""
        kwargs = kwargs or {}
        kept = self.calls.setdefault(func, []) if func.namespace == "aten" else []
        call = Call(func, args, kwargs)
        # A call of single elements tells little: one is enough, and none once a better one is there.
        limit = self._limit if any(t.numel() > 1 for t in call.tensors()) else 1
        if func.namespace == "aten" and len(kept) < limit and self._fits(call) and self._is_new(call):
            kept.append(call.with_tensors(copy_with_storage))
        return func(*args, **kwargs)

    def _fits(self, call: Call) -> bool:
        return all(t.layout == torch.strided and t.numel() <= self._largest for t in call.tensors())

    def _is_new(self, call: Call) -> bool:
        outline = tree_map(lambda x: (x.shape, x.dtype) if isinstance(x, torch.Tensor) else x, (call.args, call.kwargs))
        described = f"{call.op}{outline}"
        new = described not in self._described
        self._described.add(described)
        return new


@dataclass
class Report:
    """What the probes found.

    Args:
        wrong: for each overload whose claimed property failed, how.
        missing: for each overload of `OpClass.OTHER` that has a class's property, that class.
        probed: overloads whose claim was tested on at least one call.
        unprobed: for each other overload, why no call could test it.
    """

    wrong: dict[str, str] = field(default_factory=dict)
    missing: dict[str, OpClass] = field(default_factory=dict)
    probed: set[str] = field(default_factory=set)
    unprobed: dict[str, str] = field(default_factory=dict)


def validate(
    calls: Mapping[OpOverload, Sequence[Call]], claimed_class: Callable[[OpOverload], OpClass] = op_class
) -> Report:
    """Test every claim of a class table on recorded calls.

    Args:
        calls: what a `Recorder` kept.
        claimed_class: the table to test.

    Returns:
        A `Report`; the table stands where `wrong` and `missing` are empty.

    Example:
        >>> with Recorder() as recorder:
        ...     _ = torch.arange(4.0).cumsum(0)
        >>> report = validate(recorder.calls, lambda op: OpClass.POINTWISE)
        >>> report.wrong["cumsum.default"]
        'not pointwise: a choice of its elements gives other values'
    """
    report = Report()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for op, kept in calls.items():
            claimed, name = claimed_class(op), overload_name(op)
            if claimed is OpClass.OTHER:
                _look_for_a_class(report, name, kept)
            else:
                _test_claim(report, name, claimed, kept)
    return report


def _test_claim(report: Report, name: str, claimed: OpClass, calls: Sequence[Call]) -> None:
    why = "no call was kept"
    for call in calls:
        try:
            failure = _probed(claimed, call)
        except SaysNothing as nothing:
            why = str(nothing)
            continue
        report.probed.add(name)
        if failure is not None:
            report.wrong[name] = f"not {claimed.value}: {failure}"
            return
    if name not in report.probed:
        report.unprobed[name] = why


def _look_for_a_class(report: Report, name: str, calls: Sequence[Call]) -> None:
    # Some kernels trust an index or pivot operand, and write out of bounds when a probe gives them other shapes. An
    # output of equal elements, and the tensor that was written to, have any property.
    calls = [call for call in calls if not call.has_index_operand() and _tells_elements_apart(call)]
    for klass in DISCOVERABLE:
        failures = []
        for call in calls:
            with contextlib.suppress(SaysNothing):
                failures.append("" if klass is OpClass.VIEW and is_in_place(call.op) else _probed(klass, call))
                report.probed.add(name)
        if failures and all(failure is None for failure in failures):
            report.missing[name] = klass
            return
    if name not in report.probed:
        report.unprobed[name] = "no call could tell"


def _tells_elements_apart(call: Call) -> bool:
    try:
        outputs = call.run()
    except Exception:  # whatever the op says of its inputs: then it tells nothing apart
        return False
    dense = [t for t in outputs if t.layout == torch.strided and t.numel() > 1]
    return any(bool((t != t.reshape(-1)[0]).any()) for t in dense)


def _probed(klass: OpClass, call: Call) -> str | None:
    try:
        call.run()
    except Exception as error:  # any op of torch may be here
        raise SaysNothing(f"it does not run again on copies: {error}") from error
    try:
        return PROBES[klass](call)
    except SaysNothing:
        raise
    except Exception as error:  # it took its own inputs above, so to refuse is to behave otherwise
        return f"it refuses related inputs: {error}"
