"""`F.linear_cross_entropy` of padded and chunked tensors: the loss and the gradients of the valid rows."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from chunked_programs import check_chunked, check_results
from hypothesis import given
from hypothesis import strategies as some
from torch import Tensor, nn

import subtensors as st
from subtensors.chunked import record_call as chunked_calls
from subtensors.padded import torch_function as padded_calls

LOSS: Any = getattr(F, "linear_cross_entropy", None)

pytestmark = pytest.mark.skipif(LOSS is None, reason="torch has no F.linear_cross_entropy before 2.13")

TOKENS = st.Dim("tokens", max=32, buckets=8)
CLASSES = st.Dim("classes", max=32, buckets=8)
FEATURES = 4
NEED = {"x", "w", "b", "scale"}


@dataclasses.dataclass(frozen=True)
class Case:
    """A call: sizes, and what it is told.

    Args:
        rows, classes, outputs: the input is (rows, FEATURES), the weight (classes, *outputs, FEATURES).
        soft: whether targets are probabilities.
        biased, weighed: whether there is a bias, and a weight of each class.
        chunk: rows of a chunk of torch's own; None without its options.
        named: arguments by name.
    """

    rows: int
    classes: int
    outputs: tuple[int, ...]
    soft: bool
    biased: bool
    weighed: bool
    chunk: int | None
    named: dict[str, Any]

    def tensors(self) -> dict[str, Tensor]:
        """Values of the tensors, in float64."""
        g = torch.Generator().manual_seed(self.rows * 31 + self.classes)

        def drawn(*sizes: int) -> Tensor:
            return torch.randn(*sizes, generator=g, dtype=torch.float64)

        target = torch.randint(0, self.classes, (self.rows, *self.outputs), generator=g)
        if self.soft:
            target = 1.5 * drawn(self.rows, self.classes, *self.outputs).softmax(1)
        made = {"x": drawn(self.rows, FEATURES), "w": drawn(self.classes, *self.outputs, FEATURES), "target": target}
        made["scale"] = torch.ones(FEATURES, dtype=torch.float64)
        if self.biased:
            made["b"] = drawn(self.classes, *self.outputs)
        if self.weighed:
            made["c"] = drawn(self.classes).abs() + 0.1
        return made

    def keywords(self) -> dict[str, Any]:
        """Arguments by name, without tensors."""
        if self.chunk is None:
            return self.named
        options = nn.LinearCrossEntropyOptions(batch_chunk_size=self.chunk, chunking_method=None)
        return {**self.named, "options": options}

    def loss(self, x: Any, w: Any, target: Any, scale: Any = None, b: Any = None, c: Any = None) -> Any:
        """The call, perhaps of inputs that are scaled first: every row adds to the gradient of that."""
        return LOSS(x if scale is None else x * scale, w, target, linear_bias=b, weight=c, **self.keywords())


@some.composite
def cases(draw: Callable[..., Any], outputs: bool = True) -> Case:
    """Calls of every kind that torch takes."""
    soft = draw(some.booleans())
    named: dict[str, Any] = {"reduction": draw(some.sampled_from(["mean", "sum", "none"]))}
    smoothing = draw(some.sampled_from([0.0, 0.1]))
    if smoothing:
        named["label_smoothing"] = smoothing
    if not soft and draw(some.booleans()):
        named["ignore_index"] = draw(some.sampled_from([-100, 1]))
    return Case(
        rows=draw(some.integers(1, 17)),
        classes=draw(some.integers(2, 9)),
        outputs=draw(some.sampled_from([(), (), (3,), (2, 2)])) if outputs else (),
        soft=soft,
        biased=draw(some.booleans()),
        weighed=draw(some.booleans()),
        chunk=draw(some.sampled_from([None, 2, 5])),
        named=named,
    )


def leaves(case: Case, dtype: torch.dtype) -> dict[str, Tensor]:
    """Fresh values; those that have gradients ask for them."""
    floating = {n: t.to(dtype) if t.is_floating_point() else t.clone() for n, t in case.tensors().items()}
    return {n: t.requires_grad_(n in NEED) for n, t in floating.items()}


def upstream(loss: Tensor) -> Tensor:
    """What comes in from behind a loss, or each of several."""
    return torch.linspace(0.5, 2.0, loss.numel(), dtype=torch.float64).view(loss.shape).to(loss.dtype)


def results(given: dict[str, Tensor], loss: Tensor) -> list[Tensor]:
    """A loss and its gradients; a plain loss, so that it is the same whatever its operands are."""
    wanted = [t for t in given.values() if t.requires_grad]
    return [loss, *torch.autograd.grad(loss, wanted, upstream(loss))]


def poisoned(t: Tensor, dims: dict[int, st.Dim], turn: int = 0) -> Any:
    """A tensor with padding that no result survives."""
    return st.pad(t, dims, value=(math.nan, math.inf, 1e30, 0.0)[turn % 4] if t.is_floating_point() else 10**6)  # type: ignore[arg-type]


def matched(found: list[Tensor], case: Case, dtype: torch.dtype) -> None:
    """Compare with the call on plain tensors: in float64 as numbers, else by what torch errs in that dtype."""
    given = leaves(case, dtype)
    if dtype != torch.float64:
        # Torch's own chunks err by less, in wider sums.
        check_results(found, lambda t: results(t, case.loss(**t)), given)
        return
    for f, e in zip(found, results(given, case.loss(**given)), strict=True):
        torch.testing.assert_close(f, e, equal_nan=True)


@pytest.mark.filterwarnings("ignore:linear_cross_entropy")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@given(cases(), some.integers(0, 3))
def test_padded_rows_add_nothing(dtype: torch.dtype, case: Case, turn: int) -> None:
    given = leaves(case, dtype)
    padded_calls.fallbacks.clear()
    rows = {n: poisoned(t, {0: TOKENS}, turn) if n in ("x", "target") else t for n, t in given.items()}
    loss = case.loss(**rows)
    assert not padded_calls.fallbacks
    matched(results(given, loss.unpad() if isinstance(loss, st.PaddedTensor) else loss), case, dtype)


@pytest.mark.filterwarnings("ignore:linear_cross_entropy")
@given(cases(), some.sampled_from(["x", "target"]), some.booleans())
def test_one_of_input_and_target_may_be_plain(case: Case, padded: str, is_whole: bool) -> None:
    case = dataclasses.replace(case, rows=8) if is_whole else case
    given = leaves(case, torch.float64)
    loss = case.loss(**{n: poisoned(t, {0: TOKENS}) if n == padded else t for n, t in given.items()})
    matched(results(given, loss.unpad() if isinstance(loss, st.PaddedTensor) else loss), case, torch.float64)


@pytest.mark.filterwarnings("ignore:linear_cross_entropy")
@given(cases(), some.sets(some.sampled_from("wbcx"), min_size=1))
def test_classes_may_be_padded_in_some_tensors_or_in_all(case: Case, padded: set[str]) -> None:
    given = leaves(case, torch.float64)
    dims = {"w": {0: CLASSES}, "b": {0: CLASSES}, "c": {0: CLASSES}, "x": {0: TOKENS}, "target": {0: TOKENS}}
    padded |= {"target"} & ({"target"} if "x" in padded else set())
    loss = case.loss(**{n: poisoned(t, dims[n]) if n in padded else t for n, t in given.items()})
    matched(results(given, loss.unpad() if isinstance(loss, st.PaddedTensor) else loss), case, torch.float64)


@pytest.mark.parametrize("together", [True, False])
def test_features_may_be_padded(together: bool) -> None:
    case = Case(5, 7, (), False, True, False, None, {})
    given, width = leaves(case, torch.float64), st.Dim("width", max=8, buckets=8)
    padded = {
        n: poisoned(t, {t.dim() - 1: width}) if n == "x" or (n in ("w", "scale") and together) else t
        for n, t in given.items()
    }
    matched(results(given, case.loss(**padded)), case, torch.float64)


@pytest.mark.filterwarnings("ignore:linear_cross_entropy")
@pytest.mark.parametrize("dims", [0, 1])
def test_a_single_row_has_a_loss(dims: int) -> None:
    case = Case(1, 7, (), False, True, True, 2, {})
    given = leaves(case, torch.float64)
    row = {n: t[0] if n in ("x", "target") else t for n, t in given.items()}
    row["w"] = poisoned(row["w"], {0: CLASSES}) if dims == 0 else row["w"]
    row["x"] = st.chunk(row["x"], rows=2) if dims == 1 else row["x"]
    matched(results(given, case.loss(**row)), case, torch.float64)


@pytest.mark.parametrize("chunk", [None, 3])
@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.filterwarnings("ignore:linear_cross_entropy")
def test_the_rows_of_a_ragged_batch_are_flattened_first(chunk: int | None, soft: bool, reduction: str) -> None:
    lengths = (5, 2, 7)
    case = Case(sum(lengths), 7, (), soft, True, False, chunk, {"reduction": reduction})
    given = leaves(case, torch.float64)
    x, target = (
        st.pad(list(given[n].split(lengths)), {0: TOKENS}, value=math.nan if n == "x" or soft else -5)
        for n in ("x", "target")
    )
    with pytest.raises(st.RuleError, match=r"linear_cross_entropy .* flatten"):
        case.loss(**{**given, "x": x, "target": target})
    padded_calls.fallbacks.clear()
    loss = case.loss(**{**given, "x": x.flatten(0, 1), "target": target.flatten(0, 1)})
    assert not padded_calls.fallbacks
    matched(results(given, loss), case, torch.float64)


def test_torchs_options_keep_their_chunks_of_padded_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(5, 7, (), False, True, True, 2, {})
    given = leaves(case, torch.float64)
    monkeypatch.setattr(F, "cross_entropy", None)
    case.loss(**{n: poisoned(t, {0: TOKENS}) if n in ("x", "target") else t for n, t in given.items()}).backward()


@pytest.mark.filterwarnings("ignore:linear_cross_entropy")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@given(cases(), some.sampled_from([{"rows": 2}, {"chunks": 3}, {}]), some.booleans(), some.booleans())
def test_chunked_rows_have_the_same_loss(
    dtype: torch.dtype, case: Case, division: dict[str, Any], both: bool, scaled: bool
) -> None:
    tensors = case.tensors()
    if not scaled:
        del tensors["scale"]
    chunks = {"x": division, "target": division} if both else {"x": division}

    def program(**given: Any) -> Any:
        loss = case.loss(**given)
        # What is divided already is not divided by torch.
        return loss if isinstance(given["x"], st.ChunkedTensor) else dataclasses.replace(case, chunk=None).loss(**given)

    if "ignore_index" not in case.named or (tensors["target"] != case.named["ignore_index"]).any():
        check_chunked(program, tensors, chunks, dtype=dtype, needs=NEED & set(tensors))


def test_a_chunked_loss_runs_the_kernels_and_materializes_nothing() -> None:
    case = Case(9, 7, (), False, True, False, 2, {"label_smoothing": 0.1})
    given = leaves(case, torch.float32)
    del given["scale"]
    chunked_calls.fallbacks.clear()
    loss = case.loss(**{**given, "x": st.chunk(given["x"], rows=2)})
    assert st.explain(loss).startswith("linear + cross entropy of 9 rows")
    assert not chunked_calls.fallbacks


def test_calls_that_torch_refuses_are_refused() -> None:
    case = Case(5, 7, (), False, False, False, None, {})
    x, w, target, _ = case.tensors().values()
    calls = [(x, w[0], None), (x, w[:, :3], None), (x, w, w[:1, 0]), (x[0, 0], w, None)]
    for states, matrix, bias in calls:
        for whole in (lambda t: t, lambda t: st.chunk(t, rows=2), lambda t: poisoned(t, {0: TOKENS})):
            given = whole(states) if states.dim() else states
            with pytest.raises(RuntimeError):
                LOSS(given, matrix, whole(target), linear_bias=bias)
    soft = torch.full((5, 7), 1 / 7, dtype=torch.float64)
    for kind in (lambda t: st.chunk(t, rows=2), lambda t: poisoned(t, {0: TOKENS})):
        with pytest.raises(RuntimeError, match="ignore_index"):
            LOSS(kind(x), w, kind(soft), ignore_index=1)
        with pytest.raises(st.RuleError, match=r"linear_cross_entropy .* flatten"):
            LOSS(kind(x.expand(2, 5, 4).transpose(0, 1)), w, target)


COMPILED = [
    Case(5, 7, (), False, True, True, None, {"label_smoothing": 0.1}),
    Case(5, 7, (), False, True, False, None, {"reduction": "sum", "ignore_index": 1}),
    Case(5, 7, (), True, False, True, None, {}),
    Case(5, 7, (3,), False, True, False, None, {}),
]


@pytest.mark.parametrize("case", COMPILED)
def test_compiled_code_has_the_loss_of_padded_rows(case: Case) -> None:
    compiled = torch.compile(lambda given: case.loss(**given), fullgraph=True, backend="aot_eager")
    for i, rows in enumerate((5, 8, 3)):
        sized = dataclasses.replace(case, rows=rows)
        given = leaves(sized, torch.float64)
        padded = {n: poisoned(t, {0: TOKENS}) if n in ("x", "target") else t for n, t in given.items()}
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            found = results(given, compiled(padded))
        matched(found, sized, torch.float64)


@pytest.mark.filterwarnings("ignore:linear_cross_entropy", "ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("chunk", [None, 2])
@pytest.mark.parametrize("case", COMPILED)
def test_compiled_code_has_the_loss_of_chunked_rows(case: Case, chunk: int | None) -> None:
    given = leaves(case, torch.float64)
    told = dataclasses.replace(case, chunk=chunk)

    def program(given: dict[str, Tensor]) -> Any:
        return told.loss(**{**given, "x": st.chunk(given["x"], rows=2)})

    # Torch warns of its own options there, which breaks a graph.
    found = results(given, torch.compile(program, fullgraph=chunk is None, backend="aot_eager")(given))
    matched(found, case, torch.float64)


@pytest.mark.parametrize(
    "case",
    [
        Case(5, 7, (), False, True, False, None, {"reduction": "sum", "ignore_index": 1}),
        Case(5, 7, (), False, False, True, None, {}),
        Case(5, 7, (), False, True, True, None, {"reduction": "none", "ignore_index": 1}),
    ],
)
def test_one_graph_passes_over_torchs_options_where_it_does_not_warn_of_them(case: Case) -> None:
    given = leaves(case, torch.float64)
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=4, chunking_method=None, allow_retain_graph=True)
    told = dataclasses.replace(case, named={**case.named, "options": options})
    before = sum(chunked_calls.fallbacks.values())

    def program(given: dict[str, Tensor]) -> Any:
        return told.loss(**{**given, "x": st.chunk(given["x"], rows=2)})

    found = results(given, torch.compile(program, fullgraph=True, backend="aot_eager")(given))
    assert sum(chunked_calls.fallbacks.values()) == before
    matched(found, case, torch.float64)


def test_compiled_code_takes_torchs_options_for_padded_rows() -> None:
    case = Case(5, 7, (), False, True, False, 2, {})
    given = leaves(case, torch.float64)
    padded = {n: poisoned(t, {0: TOKENS}) if n in ("x", "target") else t for n, t in given.items()}
    found = results(given, torch.compile(lambda given: case.loss(**given), backend="aot_eager")(padded))
    matched(found, case, torch.float64)


class Head(nn.Module):
    """A program with its loss, by a call of one kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.inner = nn.Linear(FEATURES, FEATURES)
        self.head = nn.Linear(FEATURES, 7)

    def forward(self, x: Tensor, target: Tensor) -> Any:
        h = self.inner(x).tanh()
        options = nn.LinearCrossEntropyOptions(batch_chunk_size=2, chunking_method=None)
        named: dict[str, Any] = {"options": options} if self.kind == "torch's chunks" else {}
        h = st.chunk(h, rows=2) if self.kind == "chunked" else h
        return LOSS(h, self.head.weight, target, linear_bias=self.head.bias, **named)


@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize("kind", ["plain", "torch's chunks", "chunked"])
def test_a_bucketed_program_has_the_loss(device: str, kind: str) -> None:
    torch.manual_seed(0)
    ours = Head(kind).to(device, torch.float64)
    theirs = copy.deepcopy(ours)
    run = st.bucketed(ours, {"x": {0: TOKENS}, "target": {0: TOKENS}})
    for rows in (5, 7, 8, 3, 12, 5):
        x = torch.randn(rows, FEATURES, dtype=torch.float64, device=device)
        target = torch.randint(0, 7, (rows,), device=device)
        for program in (run, theirs):
            program(x, target).backward()
        torch.testing.assert_close(run(x, target), theirs(x, target))
        for ours_, theirs_ in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(ours_.grad, theirs_.grad)
    assert not run.stats().fallbacks
