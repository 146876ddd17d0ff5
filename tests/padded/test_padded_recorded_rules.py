"""Recorded rules: repeated calls that autograd doesn't track give what their rules give, for other values and sizes."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as some
from padded_conformance import Plan, plans, poison_for, samples
from padded_table import OPS, WITHOUT_VALUES
from python_calls import python_calls
from test_padded_programs import ENDS, STEPS, run
from torch import Tensor

import subtensors as st
from subtensors.dispatch.padded import interpreter
from subtensors.dispatch.padded.size_conditions import SizeConditions
from subtensors.padded import fast_path
from subtensors.padded.padded_tensor import unwrap

SEQ = st.Dim("seq", max=16, buckets=8)
NAN = float("nan")


def lacks_weights(plan: Plan) -> bool:
    return (0, 1) not in plan and (1, 0) in plan


def lacks_a_class(plan: Plan) -> bool:
    return (0, 2) in plan


UNCHECKED: dict[str, Callable[[Plan], bool]] = {
    "native_batch_norm": lacks_weights,
    "_native_batch_norm_legit": lacks_weights,
    "nn.functional.ctc_loss": lacks_a_class,
}
"""Ops that read past the end of an input whose dim is a position shorter, by plan: torch checks no sizes there."""
W, B = torch.randn(6, dtype=torch.float64), torch.randn(6, dtype=torch.float64)


def padded_call(leaves: list[Any], plan: Plan, turn: int) -> list[Any]:
    """The leaves of a call, padded by a plan: at an odd turn with other values, a position fewer, another poison."""
    given: list[Any] = []
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            given.append(leaf)
            continue
        i = next(j for j, t in enumerate(tensors) if t is leaf)
        t = leaf.detach().clone()
        if turn % 2:
            t = t * 0.75 if t.is_floating_point() or t.is_complex() else t.roll(1, 0) if t.dim() else t
        named = {}
        for (j, d), extra in plan.items():
            if i == j:
                n = leaf.shape[d]
                named[d] = st.Dim(f"n{n}", max=n + extra, buckets=[n + extra])
                t = t.narrow(d, 0, n - turn % 2)
        given.append(st.pad(t, named, value=poison_for(t, turn)) if named else t)
    return given


def result_of(op: Callable[..., Any], call: Any) -> Any:
    """Unpadded results, or the type of the error."""
    torch.manual_seed(0)
    first, args, kwargs = call
    try:
        out = optree.tree_leaves(op(first, *args, **kwargs))
        return [x.unpad() if isinstance(x, st.PaddedTensor) else x for x in out], [type(x) for x in out]
    except Exception as error:
        return type(error)


def differing(op: Any, count: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The calls of an op that give something else when they are repeated than by the dispatcher."""
    for sample in samples(op, count):
        leaves, spec = optree.tree_flatten((sample.input, sample.args, sample.kwargs), none_is_leaf=True)
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        if any(t.layout != torch.strided for t in tensors):
            continue
        for plan in plans(tensors)[:6]:
            if op.name in UNCHECKED and UNCHECKED[op.name](plan):
                continue
            for turn in (0, 1, 0, 1, 0, 1):
                try:
                    calls = [optree.tree_unflatten(spec, padded_call(leaves, plan, turn)) for _ in range(2)]
                except Exception:
                    break
                repeated = result_of(op.op, calls[0])
                with monkeypatch.context() as patched:
                    patched.setattr(fast_path, "try_fast_path", lambda *_: NotImplemented)
                    wanted = result_of(op.op, calls[1])
                try:
                    torch.testing.assert_close(repeated[0], wanted[0], rtol=0, atol=0, equal_nan=True) if isinstance(
                        wanted, tuple
                    ) else None
                    assert repeated == wanted if isinstance(wanted, type) else repeated[1] == wanted[1]
                except (AssertionError, TypeError, ValueError) as error:
                    yield f"{op.formatted_name} {plan} {turn}: {str(error)[:200]}"
                    break


@torch.no_grad()
@pytest.mark.parametrize("part", range(2))
def test_repeated_calls_give_what_the_dispatcher_gives(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ops = [op for op in OPS[part::8] if op.name not in WITHOUT_VALUES]
        wrong = [line for op in ops for line in differing(op, 2, monkeypatch)]
    assert not wrong, "\n".join(wrong)


@dataclass(frozen=True)
class Run:
    """One run of a program: what may differ between two calls of the same shapes."""

    lengths: tuple[int, ...]
    dtype: torch.dtype
    mode: str
    requires_grad: bool
    weight_requires_grad: bool
    is_transposed: bool
    poison: float
    is_noted: bool


RUNS = some.builds(
    Run,
    some.one_of(some.tuples(some.integers(1, 8)), some.tuples(some.integers(1, 8), some.integers(1, 8))),
    some.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    some.sampled_from(["no_grad", "no_grad", "grad", "inference"]),
    some.booleans(),
    some.booleans(),
    some.booleans(),
    some.sampled_from([NAN, float("inf"), -1e30, 0.0]),
    some.booleans(),
)


def run_of(names: list[str], end: str, given: Run, seed: int) -> list[Any]:
    """Everything that a run gives: values, padding where it is known, dims, layout, and what it needs of sizes."""
    torch.manual_seed(seed)
    modes = {"no_grad": torch.no_grad, "grad": torch.enable_grad, "inference": torch.inference_mode}
    w = torch.randn(6, dtype=given.dtype).requires_grad_(given.weight_requires_grad)
    made = [torch.randn(2, n, 6).to(given.dtype) for n in given.lengths]
    if len(made) > 1:
        made = [t[0] for t in made]
    noting = SizeConditions()
    with modes[given.mode]():
        if given.is_transposed and len(made) == 1:
            x = st.pad(made[0].transpose(0, 2).contiguous(), {1: SEQ}, value=given.poison).transpose(0, 2)
        else:
            x = st.pad(made if len(made) > 1 else made[0], {0 if len(made) > 1 else 1: SEQ}, value=given.poison)
        if given.mode == "grad" and given.requires_grad:
            x = x.detach().requires_grad_()
        try:
            with noting.noted() if given.is_noted else contextlib.nullcontext():
                out = run(names, end, x, w)
        except Exception as error:
            return [type(error), noting.found]
        found: list[Any] = [out.dtype, out.requires_grad, out.shape, noting.found]
        if isinstance(out, st.PaddedTensor):
            value, own = unwrap(out), out.unpad()
            found += [value.dims, value.fill, value.view, value.dense.stride()]
            out = own
        values = list(out) if isinstance(out, list) else [out]
    return [*found, *(t.detach().clone() for t in values)]


@example(["shifted"], "last", [Run((n,), torch.float64, "grad", False, False, False, NAN, True) for n in (5, 5, 1, 1)])
@given(
    some.lists(some.sampled_from(sorted(STEPS)), min_size=1, max_size=4),
    some.sampled_from(sorted(ENDS)),
    some.lists(RUNS, min_size=1, max_size=4),
)
def test_any_program_gives_bit_for_bit_in_every_call_what_a_first_call_gives(
    names: list[str], end: str, runs: list[Run]
) -> None:
    for seed, given_run in enumerate([*runs, *runs, *reversed(runs)]):
        found = run_of(names, end, given_run, seed)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(fast_path, "try_fast_path", lambda *_: NotImplemented)
            wanted = run_of(names, end, given_run, seed)
        torch.testing.assert_close(
            [x for x in found if isinstance(x, Tensor)],
            [x for x in wanted if isinstance(x, Tensor)],
            rtol=0,
            atol=0,
            equal_nan=True,
        )
        assert [x for x in found if not isinstance(x, Tensor)] == [x for x in wanted if not isinstance(x, Tensor)]


CALLS: list[Callable[[Tensor], Any]] = [
    lambda x: x.sum(1),
    lambda x: x.sum(),
    lambda x: x.mean(1),
    lambda x: x.mean((0, 1), keepdim=True),
    lambda x: x.std(1),
    lambda x: x.amax(1),
    lambda x: x.max(1),
    lambda x: x.argmin(1),
    lambda x: x.logsumexp(1),
    lambda x: x.softmax(1),
    lambda x: F.log_softmax(x, 1),
    lambda x: x.cumsum(1).flip(1),
    lambda x: x.sort(1, descending=True),
    lambda x: x.median(1),
    lambda x: x.norm(dim=1),
    lambda x: x[:, :3],
    lambda x: x[:, 1::2],
    lambda x: x[:, -1],
    lambda x: x.chunk(2, -1),
    lambda x: F.layer_norm(x, (6,), W, B),
    lambda x: x @ x.transpose(1, 2) @ x,
    lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
    lambda x: F.cross_entropy(x.flatten(0, 1), x.argmax(-1).flatten()),
]


@torch.no_grad()
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("lengths", [(), (3, 5)], ids=["one length", "ragged"])
def test_repeated_calls_give_what_plain_tensors_give(call: Callable[[Tensor], Any], lengths: tuple[int, ...]) -> None:
    for n in (5, 5, 5, 7, 5, 7, 8, 8, 8):
        rows = [torch.randn(min(n, m), 6, dtype=torch.float64) for m in lengths]
        t = torch.randn(2, n, 6, dtype=torch.float64)
        out = call(st.pad(rows or t, {0 if rows else 1: SEQ}, value=NAN))
        if not rows:
            found = [x.unpad() if isinstance(x, st.PaddedTensor) else x for x in optree.tree_leaves(out)]
            torch.testing.assert_close(found, optree.tree_leaves(call(t)))
        elif isinstance(out, st.PaddedTensor) and isinstance(found := out.unpad(), list):
            torch.testing.assert_close(found, [call(row[None])[0] for row in rows])


@torch.no_grad()
@pytest.mark.parametrize("call", [lambda x: x.sum(1), lambda x: x.softmax(1), lambda x: x.amax(1), lambda x: x[:, :3]])
def test_a_recorded_rule_runs_no_more(call: Callable[[Tensor], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def pad(n: int) -> Tensor:
        return st.pad(torch.randn(2, n, 6), {1: SEQ}, value=NAN)

    for _ in range(5):
        call(pad(5))
    monkeypatch.setattr("subtensors.dispatch.padded.rules.run_call", lambda call: pytest.fail(f"{call.op} ran"))
    x = pad(5)
    call(x)
    assert python_calls(lambda: call(x)) <= 24


@torch.no_grad()
def test_a_rule_that_reads_true_sizes_is_repeated_for_these_alone() -> None:
    for n in (5, 5, 5, 0, 5, 0, 0, 0):
        x = st.pad(torch.randn(2, n, 6), {1: SEQ})
        if n:
            assert x.amax(1).shape == (2, 6)
        else:
            with pytest.raises(IndexError, match="non-zero size"):
                x.amax(1)


TOO_SHORT: dict[str, Callable[[Tensor], Any]] = {
    "unfold": lambda x: x.unfold(1, 4, 1),
    "topk": lambda x: x.topk(4, 1),
    "kthvalue": lambda x: x.kthvalue(4, 1),
    "index": lambda x: x[:, 5],
    "narrow": lambda x: x.narrow(1, 1, 4),
    "negative border": lambda x: F.pad(x, (0, 0, -2, -3), value=0.5),
}


@torch.no_grad()
@pytest.mark.parametrize("call", TOO_SHORT.values(), ids=TOO_SHORT)
def test_a_repeated_call_of_too_short_sizes_raises(call: Callable[[Tensor], Any]) -> None:
    for n in (6, 6, 6, 6, 3, 3, 3, 6, 3, 7, 7, 7, 3):
        t = torch.randn(2, n, 6, dtype=torch.float64)
        x = st.pad(t, {1: SEQ}, value=NAN)
        if n > 3:
            found = [y.unpad() if isinstance(y, st.PaddedTensor) else y for y in optree.tree_leaves(call(x))]
            torch.testing.assert_close(found, optree.tree_leaves(call(t)))
            continue
        with pytest.raises((IndexError, RuntimeError)) as wanted:
            call(t)
        with pytest.raises(wanted.type):
            call(x)


@torch.no_grad()
@pytest.mark.parametrize("call", TOO_SHORT.values(), ids=TOO_SHORT)
def test_a_repeated_call_notes_the_sizes_that_it_needs(call: Callable[[Tensor], Any]) -> None:
    needed: list[object] = []
    for _ in range(6):
        noting = SizeConditions()
        with noting.noted():
            call(st.pad(torch.randn(2, 6, 6), {1: SEQ}))
        call(st.pad(torch.randn(2, 6, 6), {1: SEQ}))
        needed.append(noting.found)
    assert needed[0]
    assert needed == needed[:1] * 6


@torch.no_grad()
def test_a_repeated_call_compares_padded_sizes_of_other_tensors() -> None:
    def pad(n: int) -> Tensor:
        return st.pad(torch.randn(2, n, 6), {1: SEQ})

    for n in (5, 5, 5, 7, 5, 7):
        x = pad(5)
        if n == 5:
            assert x.reshape(2, pad(n).shape[1], 3, 2).unpad().shape == (2, 5, 3, 2)
        else:
            with pytest.raises(st.SizeError):
                x.reshape(2, pad(n).shape[1], 3, 2)


@torch.no_grad()
def test_a_repeated_call_asks_for_masks_anew() -> None:
    x = st.pad(torch.randn(2, 5, 6, dtype=torch.float64), {1: SEQ}, value=NAN)
    assert isinstance(x, st.PaddedTensor)
    for n in (5, 5, 5, 3, 8):
        assert x._sizes is not None
        x._sizes.set([n])
        torch.testing.assert_close(x._dense.nan_to_num(0)[:, :n].sum(1), x.nan_to_num(0).sum(1))


@torch.no_grad()
def test_two_tensors_of_one_storage_are_no_two_tensors() -> None:
    for _ in range(4):
        t, u = torch.randn(2, 5, 6), torch.randn(2, 5, 6)
        x = st.pad(t, {1: SEQ})
        for y, wanted in ((x.contiguous(), t), (x, t), (st.pad(u, {1: SEQ}), u)):
            torch.testing.assert_close((x + y).unpad(), t + wanted)
            torch.testing.assert_close((x @ y.transpose(1, 2)).unpad(), t @ wanted.transpose(1, 2))


@torch.no_grad()
def test_a_selection_by_other_values_has_its_own_size() -> None:
    x, t = torch.randn(6, 5), torch.arange(6)
    for count in (2, 2, 2, 4, 0, 6):
        found = st.pad(x, {1: SEQ})[t < count]
        torch.testing.assert_close(found.unpad(), x[:count])


@torch.no_grad()
@pytest.mark.parametrize("call", [lambda x: torch.where(x)[0], torch.nonzero, torch.unique, lambda x: x[x > 0]])
def test_positions_in_a_flattened_dim_are_counted_in_each_call(call: Callable[[Tensor], Any]) -> None:
    for n in (5, 5, 5, 7, 5, 7, 7):
        t = torch.randint(0, 3, (2, n))
        out = call(st.pad(t, {1: SEQ}, value=1).flatten())
        torch.testing.assert_close(out.unpad() if isinstance(out, st.PaddedTensor) else out, call(t.flatten()))


@torch.no_grad()
def test_a_repeated_call_follows_the_default_dtype() -> None:
    counts = st.pad(torch.arange(10).view(2, 5), {1: SEQ})
    for dtype in (torch.float32, torch.float32, torch.float32, torch.float64, torch.float32):
        torch.set_default_dtype(dtype)
        try:
            half = counts / 2
            assert (counts.logsumexp(1).dtype, half.dtype, (half + half).dtype) == (dtype, dtype, dtype)
            torch.testing.assert_close(half.softmax(1).unpad(), (torch.arange(10).view(2, 5) / 2).softmax(1))
        finally:
            torch.set_default_dtype(torch.float32)


@torch.no_grad()
def test_a_repeated_call_draws_new_numbers() -> None:
    x = st.pad(torch.ones(8, 8), {1: SEQ})
    drawn = {tuple(F.dropout(x, 0.5).unpad().flatten().tolist()) for _ in range(6)}
    assert len(drawn) == 6


def test_observed_calls_run_their_rules() -> None:
    x = st.pad(torch.randn(2, 5), {1: SEQ})
    for _ in range(3):
        x.sum(1)
    with interpreter.observed() as lines:
        x.sum(1)
    assert len(lines) == 1


@pytest.mark.parametrize("grad", [True, False])
def test_a_repeated_view_may_take_its_tensor_by_name(grad: bool) -> None:
    with torch.set_grad_enabled(grad):
        for _ in range(5):
            t = torch.randn(2, 5, 6)
            x = st.pad(t, {1: SEQ})
            torch.testing.assert_close(torch.transpose(input=x, dim0=0, dim1=1).unpad(), t.transpose(0, 1))


def test_a_view_that_is_retaken_has_the_shape_that_it_was_asked_for() -> None:
    for _ in range(5):
        t, shape = torch.randn(2, 5, 6), [2, 8, 3, 2]
        x = st.pad(t, {1: SEQ}) * 1
        view = x.view(shape)
        shape[2:] = [2, 3]
        x.mul_(2)
        torch.testing.assert_close(view.unpad(), 2 * t.view(2, 5, 3, 2))


@torch.no_grad()
@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.gather(1, torch.full((2, 1, 6), 7)),
        lambda x: x.index_select(1, torch.tensor([7])),
        lambda x: x[:, torch.tensor([7])],
    ],
    ids=["gather", "index_select", "index"],
)
def test_the_debug_mode_sees_positions_in_padding_in_repeated_calls(call: Callable[[Tensor], Any]) -> None:
    for _ in range(5):
        call(st.pad(torch.randn(2, 5, 6), {1: SEQ}))
    with pytest.warns(st.PaddedSizeWarning, match="position 7"), st.watch_size_arithmetic():
        call(st.pad(torch.randn(2, 5, 6), {1: SEQ}))


@torch.no_grad()
@pytest.mark.parametrize(
    "call",
    [
        lambda x: torch.where(x > 1, x, 0.5),
        lambda x: torch.where(x > 1, 0.5, x),
        lambda x: x.bool().masked_fill(x > 1, 1),
        lambda x: (x / 2).cumsum(1),
        lambda x: x.softmax(1, dtype=torch.float64),
        lambda x: x.clamp_min(0.5),
    ],
)
def test_a_repeated_call_promotes_dtypes_as_the_first(call: Callable[[Tensor], Any]) -> None:
    for n in (5, 5, 5, 7, 5):
        t = torch.randint(0, 4, (2, n, 6))
        torch.testing.assert_close(call(st.pad(t, {1: SEQ}, value=9)).unpad(), call(t))


@torch.no_grad()
def test_repeated_calls_in_threads_give_what_one_thread_gives() -> None:
    def calls(seed: int) -> list[Tensor]:
        generator, found = torch.Generator().manual_seed(seed), []
        for turn in range(40):
            t = torch.randn(2, 1 + (seed + turn) % 8, 6, generator=generator)
            x = st.pad(t, {1: SEQ}, value=NAN)
            found += [x.softmax(1).unpad(), (x * (1 + turn % 3 / 4)).unpad(), x.amax(1), x.sum(1), x[:, -1]]
        return found

    wanted = [calls(seed) for seed in range(4)]
    fast_path._calls.clear()
    with ThreadPoolExecutor(4) as pool:
        for found, own in zip(pool.map(calls, range(4)), wanted, strict=True):
            torch.testing.assert_close(found, own, rtol=0, atol=0)
