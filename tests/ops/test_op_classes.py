"""The op class table, checked by running the ops that torch's own op_db runs."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from class_evidence.calls import Call
from class_evidence.dim_probes import acts_as_its_map_says, map_of
from class_evidence.evidence import DISCOVERABLE, Recorder, Report, validate
from class_evidence.probes import PROBES, SaysNothing
from class_evidence.sweep import attempt, quiet, recorded
from torch._ops import OpOverload

from subtensors.dispatch.ops.dims import map_function
from subtensors.dispatch.ops.op_class_overrides import LISTED_CLASSES, SUPPLEMENT
from subtensors.dispatch.ops.op_classes import OpClass, functional_form, is_in_place, op_class, overload_name

aten = torch.ops.aten

# Ops in OTHER that look like a class on the samples of op_db, and why they are not in it.
LOOK_ALIKES = {
    "prelu.default": "its weight lines up with dim 1, not with the last: its samples have the two in one place",
    "resize_.default": "it changes the shape of the tensor it is given, and may move its storage",
    "resize_as_.default": "it changes the shape of the tensor it is given, and may move its storage",
}

of_the_pinned_torch = pytest.mark.skipif(
    not torch.__version__.startswith("2.13"), reason="which overloads and samples there are differs between versions"
)


def aten_overloads() -> list[OpOverload]:
    """Every overload registered in the aten namespace."""
    overloads = []
    for qualified in torch._C._dispatch_get_all_op_names():
        namespace, _, name = qualified.partition("::")
        if namespace == "aten":
            packet, _, overload = name.partition(".")
            overloads.append(getattr(getattr(torch.ops.aten, packet), overload or "default"))
    return overloads


@functools.cache
def report() -> Report:
    with quiet():
        return validate(recorded()[0])


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_the_sweep_covers_most_ops_that_programs_call() -> None:
    calls, (ran, failed) = recorded()
    assert len(calls) > 900
    assert failed < 0.02 * ran
    names = {overload_name(op) for op in calls}
    assert {"convolution_backward.default", "add_.Tensor", "_foreach_mul_.List", "linear.default"} <= names


def test_every_claim_of_the_table_holds_on_every_recorded_call() -> None:
    assert report().wrong == {}


def test_no_op_without_a_class_has_the_property_of_one() -> None:
    assert {name: cls for name, cls in report().missing.items() if name not in LOOK_ALIKES} == {}


@of_the_pinned_torch
def test_each_listed_look_alike_still_looks_like_its_class() -> None:
    assert set(LOOK_ALIKES) == set(report().missing)


def test_most_claims_are_tested_by_a_call_that_could_refute_them() -> None:
    calls, _ = recorded()
    claims = [overload_name(op) for op in calls if op_class(op) is not OpClass.OTHER]
    tested = [name for name in claims if name in report().probed]
    assert len(tested) > 800
    assert len(tested) > 0.97 * len(claims)


def test_every_class_is_tested_on_several_ops() -> None:
    by_class = dict.fromkeys(OpClass, 0)
    for op in recorded()[0]:
        by_class[op_class(op)] += overload_name(op) in report().probed
    assert min(by_class.values()) >= 6, by_class


def map_failures() -> tuple[dict[str, str], set[str]]:
    """How the dimension map of each recorded op fails, and the ops whose map was put to a test."""
    wrong, tested = {}, set()
    with quiet(), torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for op, calls in recorded()[0].items():
            if map_function(op) is None or functional_form(op) is not op:
                continue
            for call in calls:
                if not attempt(call.run):
                    continue
                try:
                    why = acts_as_its_map_says(call)
                except SaysNothing:
                    continue
                tested.add(overload_name(op))
                if why is not None:
                    wrong[overload_name(op)] = why
                    break
    return wrong, tested


def test_every_dimension_map_holds_on_every_recorded_call() -> None:
    wrong, tested = map_failures()
    assert wrong == {}
    claimed = [op for op in recorded()[0] if map_function(op) is not None and functional_form(op) is op]
    assert len(tested) > 0.95 * len(claimed) > 300


FIRST, SECOND = torch.tensor([[2, 0, 1]]), torch.tensor([[1], [-1], [0], [1]])
READS: dict[str, tuple[OpOverload, tuple[Any, ...]]] = {
    "adjacent": (aten.index.Tensor, ([None, FIRST, SECOND % 2],)),
    "apart": (aten.index.Tensor, ([FIRST, None, SECOND % 2],)),
    "in the middle": (aten.index.Tensor, ([None, None, FIRST[0] % 2],)),
    "a position": (aten.index.Tensor, ([None, FIRST[0, 0]],)),
    "write adjacent": (aten.index_put.default, ([None, FIRST, SECOND % 2], torch.ones(1, 5).double())),
    "write apart": (aten.index_put.default, ([FIRST, None, SECOND % 2], torch.ones(4, 5).double(), True)),
}


@pytest.mark.parametrize("name", READS)
def test_the_map_of_a_read_or_write_at_indices_holds_wherever_these_stand(name: str) -> None:
    op, arguments = READS[name]
    call = Call(op, (torch.randn(3, 4, 2, 5, dtype=torch.float64), *arguments), {})
    assert acts_as_its_map_says(call) is None
    found, _ = map_of(call)
    assert len({label for labels in found.operands for label in labels} - found.combined) >= 2


x = torch.arange(120.0, dtype=torch.float64).sin().reshape(40, 3)
REFUTED = [
    (OpClass.POINTWISE, aten.cumsum.default, lambda: x.cumsum(0), "a choice of its elements gives other values"),
    (OpClass.POINTWISE, aten.flip.default, lambda: x.flip(0), "a choice of its elements gives other values"),
    (OpClass.POINTWISE, aten.sum.default, lambda: x.sum(), "another shape"),
    (OpClass.POINTWISE, aten.mse_loss_backward.default, lambda: mse_gradient(x), "a choice of its elements gives"),
    (OpClass.REDUCTION, aten.cumsum.default, lambda: x.cumsum(0), "no smaller than what it reduces"),
    (OpClass.REDUCTION, aten.select.int, lambda: x.select(0, 1), "the order of the reduced elements matters"),
    (OpClass.VIEW, aten.clone.default, lambda: x.clone(), "a storage of its own"),
    (OpClass.CONTRACTION, aten.sigmoid.default, lambda: x.sigmoid(), "not affine in an operand"),
    (OpClass.CONTRACTION, aten._softmax.default, lambda: x.softmax(0), "not affine in an operand"),
    (OpClass.FACTORY, aten.neg.default, lambda: -x, "its values depend on its input's"),
    (OpClass.RANDOM, aten.neg.default, lambda: -x, "does not declare it random"),
    (OpClass.COPY, aten.neg.default, lambda: -x, "an output element is not an input element"),
    (OpClass.COPY, aten.add.Tensor, lambda: x + x, "an output element is not an input element"),
    (OpClass.NORMALISATION, aten.sigmoid.default, lambda: x.sigmoid(), "neither adding a constant nor scaling"),
    (OpClass.SCAN, aten.flip.default, lambda: x.flip(0), "it has no dim to scan"),
    (OpClass.SCAN, aten._softmax.default, lambda: x.softmax(0), "an element depends on later ones"),
    (OpClass.SORT_SELECT, aten.cumsum.default, lambda: x.cumsum(0), "more than the order of its elements"),
    (OpClass.SCATTER_GATHER, aten.neg.default, lambda: -x, "it has no index operand"),
]


def mse_gradient(t: torch.Tensor) -> None:
    t = t.clone().requires_grad_()
    torch.nn.functional.mse_loss(t, torch.zeros_like(t)).backward()


@pytest.mark.parametrize(
    ("claimed", "op", "run", "how"), REFUTED, ids=[f"{overload_name(c[1])}-as-{c[0].value}" for c in REFUTED]
)
def test_a_wrong_claim_is_reported_with_how_it_fails(
    claimed: OpClass, op: OpOverload, run: Callable[[], Any], how: str
) -> None:
    with Recorder() as recorder:
        run()
    found = validate(recorder.calls, lambda o: claimed if o is op else op_class(o))
    assert list(found.wrong) == [overload_name(op)]
    assert f"not {claimed.value}" in found.wrong[overload_name(op)]
    assert how in found.wrong[overload_name(op)]


def test_each_class_but_other_has_a_refuted_claim_above() -> None:
    assert {claimed for claimed, *_ in REFUTED} == set(PROBES) == set(OpClass) - {OpClass.OTHER}


@pytest.mark.parametrize(
    ("op", "run", "cls"),
    [
        (aten.add.Tensor, lambda: x + x, OpClass.POINTWISE),
        (aten.add_.Tensor, lambda: x.clone().add_(x), OpClass.POINTWISE),
        (aten.view.default, lambda: x.view(120), OpClass.VIEW),
        (aten.flip.default, lambda: x.flip(0), OpClass.COPY),
    ],
)
def test_an_op_left_out_of_its_class_is_reported_missing(op: OpOverload, run: Callable[[], Any], cls: OpClass) -> None:
    assert cls in DISCOVERABLE
    with Recorder() as recorder:
        run()
    found = validate(recorder.calls, lambda o: OpClass.OTHER if o is op else op_class(o))
    assert found.missing == {overload_name(op): cls}


def test_a_table_patched_in_the_whole_sweep_is_caught() -> None:
    calls, _ = recorded()
    swapped = {aten.cumsum.default: OpClass.POINTWISE, aten.exp.default: OpClass.OTHER}
    some = {op: calls[op] for op in (aten.cumsum.default, aten.exp.default, aten.mul.Tensor)}
    with quiet():
        found = validate(some, lambda op: swapped.get(op, op_class(op)))
    assert set(found.wrong) == {"cumsum.default"}
    assert found.missing == {"exp.default": OpClass.POINTWISE}


@pytest.mark.parametrize(
    ("op", "cls"),
    [
        (aten.add.Tensor, OpClass.POINTWISE),
        (aten.lt_.Tensor, OpClass.POINTWISE),
        (aten.fill_.Tensor, OpClass.POINTWISE),
        (aten.gelu_backward.grad_input, OpClass.POINTWISE),
        (aten.__iand__.Tensor, OpClass.POINTWISE),
        (aten.max.other, OpClass.POINTWISE),
        (aten.max.dim, OpClass.REDUCTION),
        (aten.max.default, OpClass.REDUCTION),
        (aten._foreach_max.default, OpClass.REDUCTION),
        (aten._foreach_norm.Scalar, OpClass.REDUCTION),
        (aten._foreach_lerp_.ScalarList, OpClass.POINTWISE),
        (aten._foreach_copy_.default, OpClass.POINTWISE),
        (aten._foreach_zero_.default, OpClass.POINTWISE),
        (aten._foreach_mm.default, OpClass.CONTRACTION)
        if hasattr(aten, "_foreach_mm")
        else (
            aten.mm.default,
            OpClass.CONTRACTION,
        ),
        (aten.where.self, OpClass.POINTWISE),
        (aten.where.default, OpClass.SORT_SELECT),
        (aten.transpose_.default, OpClass.VIEW),
        (aten.transpose_copy.int, OpClass.COPY),
        (aten.rrelu.default, OpClass.RANDOM),
        (aten.native_dropout.default, OpClass.RANDOM),
        (aten.uniform_.default, OpClass.RANDOM),
        (aten.equal.default, OpClass.OTHER),
        (aten.set_.source_Tensor, OpClass.OTHER),
        (aten.mse_loss_backward.default, OpClass.OTHER),
        (torch.ops.prims.device_put.default, OpClass.OTHER),
    ],
)
def test_sampled_overloads_have_the_expected_class(op: OpOverload, cls: OpClass) -> None:
    assert op_class(op) is cls


def test_an_in_place_or_out_overload_has_the_class_of_its_functional_form() -> None:
    twins = {op: functional_form(op) for op in aten_overloads()}
    differing = {
        overload_name(op): (op_class(op), op_class(twin))
        for op, twin in twins.items()
        if twin is not None and op_class(op) is not op_class(twin)
    }
    assert differing == {}


def test_nearly_every_overload_that_writes_has_a_functional_form() -> None:
    writing = [op for op in aten_overloads() if functional_form(op) is not op]
    without = [op for op in writing if functional_form(op) is None]
    assert len(without) < 0.03 * len(writing)
    assert aten.set_.source_Tensor_storage_offset in without


def test_a_functional_form_returns_what_its_in_place_op_writes() -> None:
    compared = 0
    with quiet(), torch.no_grad():
        for op, calls in recorded()[0].items():
            twin = functional_form(op)
            skipped = op_class(op) in (OpClass.RANDOM, OpClass.OTHER) or overload_name(op).startswith("_foreach_")
            if twin is None or twin is op or skipped or not is_in_place(op) or not calls:
                continue
            written = calls[0].run()[0]
            torch.testing.assert_close(
                Call(twin, (), calls[0].arguments()).run()[0].to(written.dtype), written, equal_nan=True
            )
            compared += 1
    assert compared > 100


def test_an_op_of_another_library_never_takes_its_class_from_an_aten_op_of_that_name() -> None:
    with torch.library._scoped_library("subtensors_test", "FRAGMENT") as library:
        library.define("add_.Tensor(Tensor(a!) self, Tensor other, *, Scalar alpha=1) -> Tensor(a!)")
        library.define("scan(Tensor self) -> Tensor", tags=[torch.Tag.pointwise])
        named_like_aten = torch.ops.subtensors_test.add_.Tensor
        assert functional_form(named_like_aten) is None
        assert op_class(named_like_aten) is OpClass.OTHER
        assert op_class(torch.ops.subtensors_test.scan.default) is OpClass.POINTWISE


def test_in_place_means_writing_to_an_operand() -> None:
    assert is_in_place(aten.add_.Tensor)
    assert is_in_place(aten._foreach_add_.List)
    assert is_in_place(aten._native_batch_norm_legit.default)
    assert not is_in_place(aten.add.Tensor)
    assert not is_in_place(aten.add.out)
    assert not is_in_place(aten.view.default)


def test_every_aten_overload_has_a_name_of_its_own() -> None:
    names = [overload_name(op) for op in aten_overloads()]
    assert len(names) == len(set(names)) > 3000


@of_the_pinned_torch
def test_the_supplement_names_only_ops_that_exist() -> None:
    overloads = {overload_name(op) for op in aten_overloads()}
    known = overloads | {name.split(".")[0] for name in overloads}
    assert [name for name in LISTED_CLASSES if name not in known] == []


def test_every_group_of_the_supplement_gives_its_reason() -> None:
    reasons = re.findall(r"^# (.*)$", SUPPLEMENT, re.MULTILINE)
    assert len(reasons) > 30
    assert all(len(reason) > 15 for reason in reasons)
    assert len(set(reasons)) == len(reasons)


@of_the_pinned_torch
def test_the_docs_page_has_the_counts_of_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "op-classes.md").read_text()
    rows = dict(re.findall(r"^\| `([A-Z_]+)` \|.*\| (\d+) \|$", page, re.MULTILINE))
    counts = Counter(op_class(op) for op in aten_overloads())
    assert rows == {cls.name: str(counts[cls]) for cls in OpClass}
    assert f"{len(aten_overloads())} overloads" in page
