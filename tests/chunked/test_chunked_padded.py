"""Chunked padded tensors: the values and gradients of the unpadded program, padding neither counted nor computed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import subtensors as st
from subtensors.chunked import custom_op, record_call
from subtensors.dispatch.chunked import autograd, run_chunks
from subtensors.padded import fallback

WIDTH, CLASSES = 8, 30
SEQ = st.Dim("seq", max=64, buckets=16)
NAN = float("nan")

Program = Callable[..., Any]


def head(h: Any, weights: list[Tensor]) -> Any:
    return F.linear(h, weights[0], weights[1])


def mean_loss(h: Any, target: Any, weights: list[Tensor]) -> Any:
    return F.cross_entropy(head(h, weights).flatten(0, -2), target.flatten())


def summed_loss(h: Any, target: Any, weights: list[Tensor]) -> Any:
    return F.cross_entropy(
        head(h, weights).flatten(0, -2), target.flatten().clamp(min=0), reduction="sum", ignore_index=0
    )


def smoothed_loss(h: Any, target: Any, weights: list[Tensor]) -> Any:
    logits = 5 * torch.tanh(head(h, weights) / 5)
    return F.cross_entropy(logits.flatten(0, -2), target.flatten(), label_smoothing=0.1)


def row_losses(h: Any, target: Any, weights: list[Tensor]) -> Any:
    losses = F.cross_entropy(head(h, weights).flatten(0, -2), target.flatten(), reduction="none")
    return (losses * losses).mean()


def policy_loss(h: Any, target: Any, weights: list[Tensor], old: Any = -3.0) -> Any:
    log_probs = head(h, weights).log_softmax(-1)
    picked = log_probs.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    ratio = torch.exp(picked - old)
    gain = torch.minimum(ratio, ratio.clamp(0.8, 1.2))
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    return -(gain + 0.01 * entropy).mean()


def z_loss(h: Any, target: Any, weights: list[Tensor]) -> Any:
    return head(h, weights).logsumexp(-1).square().mean()


def mlp(h: Any, target: Any, weights: list[Tensor]) -> Any:
    wide = F.gelu(F.layer_norm(head(h, weights), (CLASSES,), weights[1] + 1, weights[1]))
    return (F.linear(wide, weights[0].t()) * h).square().sum()


def domains(h: Any, target: Any, weights: list[Tensor]) -> Any:
    logits = head(h, weights)
    return (logits.square().log() / (weights[1] + 2) + (logits.abs() + 1).rsqrt()).mean()


def over_rows(h: Any, target: Any, weights: list[Tensor]) -> Any:
    logits = head(h, weights)
    return logits.amax(-2).sum() + logits.softmax(-2).square().sum()


def in_place(h: Any, target: Any, weights: list[Tensor]) -> Any:
    logits = F.linear(h, weights[0])
    logits.mul_(2)
    logits += weights[1]
    return logits.logsumexp(-1).square().mean()


def detached(h: Any, target: Any, weights: list[Tensor]) -> Any:
    logits = head(h, weights)
    with torch.no_grad():
        p = logits.softmax(-1)
    return ((logits.softmax(-1).detach() + p) * logits).sum(-1).square().mean()


def in_parts(h: Any, target: Any, weights: list[Tensor]) -> Any:
    again = torch.cat([h[..., :4] * 2, h[..., 4:]], -1)
    return head(again, weights).logsumexp(-1).mean() + h[..., 4:].square().mean()


def shifted(h: Any, target: Any, weights: list[Tensor]) -> Any:
    logits = head(h, weights)[..., :-1, :]
    return F.cross_entropy(logits.flatten(0, -2), target[..., 1:].flatten())


def chosen(h: Any, target: Any, weights: list[Tensor]) -> Any:
    logits = head(h, weights)
    best = (logits.argmax(-1) == target).double().mean() + logits.amax(-1).mean()
    return best + torch.where((target > 10).unsqueeze(-1), logits, logits * 0.5).logsumexp(-1).mean()


PROGRAMS = [mean_loss, summed_loss, smoothed_loss, row_losses, policy_loss, z_loss, mlp, domains, over_rows]


def weights() -> list[Tensor]:
    made = torch.randn(CLASSES, WIDTH, dtype=torch.float64), torch.randn(CLASSES, dtype=torch.float64)
    return [w.requires_grad_() for w in made]


def tokens(*shape: int) -> Tensor:
    target = torch.randint(0, CLASSES, shape)
    target[..., 1] = -100
    return target


def hidden(*shape: int) -> Tensor:
    return torch.randn(*shape, WIDTH, dtype=torch.float64, requires_grad=True)


def assert_same(loss: Any, expected: Tensor, leaves: list[Tensor]) -> None:
    torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-10, atol=1e-12)
    own, plain = (torch.autograd.grad(x, leaves, allow_unused=True, retain_graph=True) for x in (loss, expected))
    for a, b in zip(own, plain, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.fixture(autouse=True)
def nothing_runs_whole() -> Iterator[None]:
    torch.manual_seed(0)
    before = record_call.fallbacks.copy(), fallback.fallbacks.copy()
    yield
    assert (record_call.fallbacks - before[0], fallback.fallbacks - before[1]) == ({}, {})


Way = Callable[[Program], Program]


def eager(program: Program) -> Program:
    return program


def compiled(program: Program) -> Program:
    function: Program = torch.compile(program, backend="aot_eager", fullgraph=True, dynamic=False)
    return function


WAYS = [eager, compiled]


@contextmanager
def counted_chunks() -> Iterator[list[tuple[int, int]]]:
    """The rows of each chunk that a pass runs."""
    spans: list[tuple[int, int]] = []
    run = run_chunks.run_chunk

    def counted(plan: Any, span: tuple[int, int], *args: Any) -> Any:
        spans.append(span)
        return run(plan, span, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(autograd, "run_chunk", counted)
        yield spans


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("rows", [5, 16])
@pytest.mark.parametrize("way", WAYS)
def test_rows_are_those_of_the_unpadded_program(way: Way, program: Program, rows: int) -> None:
    h, target, w = hidden(21), tokens(21), weights()
    x, t = st.pad(h, {0: SEQ}, value=NAN), st.pad(target, {0: SEQ}, value=CLASSES - 1)
    loss = way(lambda x, t: program(st.chunk(x, rows=rows), t, w))(x, t)
    assert_same(loss, program(h, target, w), [h, *w])


@pytest.mark.parametrize("program", [*PROGRAMS, in_place, detached, in_parts, shifted, chosen])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("way", WAYS)
def test_sequences_are_those_of_the_unpadded_program(way: Way, program: Program, dim: int) -> None:
    h, target, w = hidden(3, 21), tokens(3, 21), weights()
    x, t = st.pad(h, {1: SEQ}, value=NAN), st.pad(target, {1: SEQ})
    loss = way(lambda x, t: program(st.chunk(x, dim, rows=2), t, w))(x, t)
    assert_same(loss, program(h, target, w), [h, *w])


@pytest.mark.parametrize("program", [p for p in PROGRAMS if p is not over_rows])
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_ragged_rows_are_those_of_each_row_alone(way: Way, program: Program, flat: bool) -> None:
    hs, targets, w = [hidden(n) for n in (4, 20, 11)], [tokens(n) for n in (4, 20, 11)], weights()
    x, t = st.pad(hs, {0: SEQ}, value=NAN), st.pad(targets, {0: SEQ})

    def ragged(x: Any, t: Any) -> Any:
        if flat:
            return program(st.chunk(x.flatten(0, 1), rows=7), t.flatten(), w)
        return program(st.chunk(x, 1, rows=7), t, w)

    loss = way(ragged)(x, t)
    assert_same(loss, program(torch.cat(hs), torch.cat(targets), w), [*hs, *w])


def scaled_z_loss(h: Any, target: Any, weights: list[Tensor], scale: Any) -> Any:
    return (head(h, weights).logsumexp(-1) * scale).mean()


def scaled_row_losses(h: Any, target: Any, weights: list[Tensor], scale: Any) -> Any:
    return (F.cross_entropy(head(h, weights), target, reduction="none") * scale).mean()


@pytest.mark.parametrize("program", [policy_loss, scaled_z_loss, scaled_row_losses])
@pytest.mark.parametrize("division", [{"rows": 4}, {}])
@pytest.mark.parametrize("way", WAYS)
def test_operands_by_rows_may_hold_nan_in_their_padding(way: Way, program: Program, division: dict[str, Any]) -> None:
    h, target, old, w = hidden(21), tokens(21), torch.randn(21, dtype=torch.float64), weights()
    x, t, o = st.pad(h, {0: SEQ}, value=NAN), st.pad(target, {0: SEQ}), st.pad(old, {0: SEQ}, value=NAN)
    loss = way(lambda x, t, o: program(st.chunk(x, **division), t, w, o))(x, t, o)
    assert_same(loss, program(h, target, w, old), [h, *w])


@pytest.mark.parametrize("program", [mean_loss, policy_loss, mlp])
@pytest.mark.parametrize("way", WAYS)
def test_a_gradient_does_not_depend_on_what_padding_holds(way: Way, program: Program) -> None:
    """A frozen head, and hidden states that are padding in all of a chunk."""
    h, target, w = hidden(17), tokens(17), [p.detach() for p in weights()]
    for value in (NAN, float("inf"), 1e300):
        x, t = st.pad(h, {0: SEQ}, value=value), st.pad(target, {0: SEQ})
        loss = way(lambda x, t: program(st.chunk(x, rows=3), t, w))(x, t)
        assert_same(loss, program(h, target, w), [h])


def test_chunks_of_padding_are_not_run() -> None:
    h, w = hidden(21), weights()
    x = st.chunk(st.pad(h, {0: SEQ}, value=NAN), rows=4)
    with counted_chunks() as spans:
        z_loss(x, None, w).backward()
    assert [*dict.fromkeys(spans)] == [(0, 4), (4, 8), (8, 12), (12, 16), (16, 20), (20, 24)]
    assert x.shape[0] == 32


def test_chunks_of_padding_between_ragged_rows_are_not_run() -> None:
    x = st.pad([hidden(4), hidden(20), hidden(11)], {0: SEQ}, value=NAN).flatten(0, 1)  # 3 rows of 32 positions
    with counted_chunks() as spans:
        z_loss(st.chunk(x, rows=8), None, weights()).backward()
    assert [*dict.fromkeys(spans)] == [(0, 8), (32, 40), (40, 48), (48, 56), (64, 72), (72, 80)]


def test_the_kernels_of_a_linear_layer_take_valid_rows_alone() -> None:
    target, w = tokens(21), weights()
    x, t = st.pad(hidden(21), {0: SEQ}, value=NAN), st.pad(target, {0: SEQ})
    assert st.explain(mean_loss(st.chunk(x, rows=4), t, w)).startswith("linear + cross entropy of 21 rows,")
    x, t = st.pad([hidden(4), hidden(20)], {0: SEQ}), st.pad([tokens(4), tokens(20)], {0: SEQ})
    loss = mean_loss(st.chunk(x.flatten(0, 1), rows=4), t.flatten(), w)
    assert st.explain(loss).startswith("linear + cross entropy of 24 rows,")


def test_rows_joined_by_unpadded_ones_are_all_run() -> None:
    """The axis of both serves a result of the unpadded one alone, which has no padding."""
    h, plain = hidden(21), hidden(32)
    x, y = st.chunk(st.pad(h, {0: SEQ}, value=NAN), rows=4), st.chunk(plain, rows=4)
    assert_same((x * y).square().sum(), (h * plain[:21]).square().sum(), [h, plain])
    assert_same(y.square().sum(), plain.square().sum(), [plain])


def test_padded_and_chunked_tensors_meet_in_either_order() -> None:
    h, plain = hidden(21), hidden(32)
    x, y = st.pad(h, {0: SEQ}, value=NAN), st.chunk(plain, rows=4)
    for product in (x * y, y * x):
        assert type(product) is st.PaddedTensor
        assert_same(product.square().sum(), (h * plain[:21]).square().sum(), [h, plain])


def test_a_value_that_is_needed_in_full_is_padded() -> None:
    h, w = hidden(21), weights()
    logits = head(st.chunk(st.pad(h, {0: SEQ}, value=NAN), rows=4), w).exp()
    expected = head(h, w).exp()
    full = logits.realize()
    assert (full.logical_shape, full.unpad().shape) == ((21, CLASSES), expected.shape)
    assert_same(full.sum(), expected.sum(), [h, *w])
    assert_same(logits.unpad().square().sum(), expected.square().sum(), [h, *w])
    torch.testing.assert_close(torch.tensor(logits.tolist(), dtype=torch.float64), expected.detach())


def test_a_value_in_full_knows_what_skipped_chunks_hold() -> None:
    h = hidden(17)
    x = st.chunk(st.pad(h, {0: SEQ}, value=NAN), rows=4)
    assert_same(x.abs().realize().sum(), h.abs().sum(), [h])


def test_writes_reach_views_and_keep_padding_out() -> None:
    h, w = hidden(21), weights()
    logits, expected = head(st.chunk(st.pad(h, {0: SEQ}, value=NAN), rows=4), w), head(h, w).clone()
    shifted, expected_shifted = logits[2:], expected[2:]
    logits.mul_(2)
    logits += 1
    expected.mul_(2)
    expected += 1
    assert_same(shifted.square().sum(), expected_shifted.square().sum(), [h, *w])
    assert_same(logits.mean(), expected.mean(), [h, *w])


def test_no_valid_row_is_a_sum_of_nothing() -> None:
    seq = st.Dim("seq", min=0, max=32, buckets=16)
    h, w = hidden(0), weights()
    x = st.pad(h, {0: seq})
    assert x.shape[0] > 0
    assert_same(mlp(st.chunk(x, rows=4), None, w), mlp(h, None, w), [h, *w])


def test_functions_whose_backward_would_be_lost_are_refused() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            return gradients[0] * 2

    x = st.chunk(st.pad(hidden(21), {0: SEQ}), rows=4)
    assert x.requires_grad
    with pytest.raises(st.RuleError, match=r"give it the tensor's realize\(\)"):
        Doubled.apply(x).sum()
    with pytest.raises(st.RuleError, match="goes to the tensor that was chunked"):
        x.register_hook(lambda gradient: gradient)


@pytest.mark.parametrize("dim", [2, -3, "0"])
def test_a_dim_that_it_lacks_is_refused(dim: Any) -> None:
    with pytest.raises((IndexError, TypeError), match="dim"):
        st.chunk(st.pad(hidden(21), {0: SEQ}), dim)


def test_compiled_code_takes_no_chunked_argument() -> None:
    x = st.pad(hidden(21), {0: SEQ})
    with pytest.raises(Exception, match="no argument of compiled code: hand over"):
        torch.compile(lambda x: x.exp(), backend="aot_eager")(st.chunk(x, rows=4))


SCALE = torch.linspace(0.5, 2, 2 * CLASSES, dtype=torch.float64)

STEPS: list[Callable[[Any], Any]] = [
    torch.tanh,
    lambda x: x.tanh().exp(),
    lambda x: x.abs().log(),
    lambda x: (x.abs() + 0.1).rsqrt(),
    lambda x: x.softmax(-1),
    lambda x: x - x.mean(-1, keepdim=True),
    lambda x: x.cumsum(-1),
    lambda x: F.layer_norm(x, x.shape[-1:]),
    lambda x: x / x.norm(dim=-1, keepdim=True),
    lambda x: x - x.mean(0),
    lambda x: x * x.amax(0),
    lambda x: x[1:],
    lambda x: x.masked_fill(x > 1, 0.5),
    lambda x: torch.where(x > 0, x, x.sigmoid()),
    lambda x: x.flatten().reshape(-1, x.shape[-1]),
    lambda x: x * SCALE[: x.shape[-1]],
    lambda x: x / SCALE[: x.shape[-1]],
    lambda x: x.t() @ x / 10,
]
ENDS: list[Callable[[Any], Any]] = [
    lambda x: x.sum(),
    lambda x: x.mean(),
    lambda x: x.logsumexp(-1).mean(),
    lambda x: x.amax(),
    lambda x: x.std(),
    lambda x: x.logsumexp(0).sum(),
]


@pytest.mark.parametrize("seed", range(60))
def test_chains_of_ops_are_those_of_the_unpadded_rows(seed: int) -> None:
    draw = random.Random(seed)
    steps, end = [draw.choice(STEPS) for _ in range(draw.randint(1, 4))], draw.choice(ENDS)
    h, w, n, rows = hidden(21), weights(), draw.choice([16, 17, 21]), draw.choice([3, 5, 16])
    h = h[:n].detach().requires_grad_()

    def program(x: Any) -> Any:
        x = head(x, w)
        for step in steps:
            x = step(x)
        return end(x)

    expected = program(h)
    found = torch.autograd.grad(expected, h, retain_graph=True)[0]
    if not (expected.isfinite() and found.isfinite().all()):
        pytest.skip("not finite without padding")
    loss = program(st.chunk(st.pad(h, {0: SEQ}, value=NAN), rows=rows))
    torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-8, atol=1e-10)
    leaves = [h, *w]
    for own, plain in zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(expected, leaves), strict=True):
        torch.testing.assert_close(own, plain, rtol=1e-6, atol=1e-8 * max(1.0, float(plain.abs().max())))


@pytest.mark.parametrize("program", PROGRAMS)
def test_compiled_code_holds_programs_of_chunks(program: Program) -> None:
    sources: list[str] = []
    make = custom_op._program

    def noted(source: str) -> custom_op.Program:
        sources.append(source)
        return make(source)

    x, t, w = st.pad(hidden(21), {0: SEQ}), st.pad(tokens(21), {0: SEQ}), weights()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(custom_op, "_program", noted)
        compiled(lambda x, t: program(st.chunk(x, rows=5), t, w))(x, t)
    assert sources
    assert all("= chunk(t[0], i[0], None, i[1], None, True, False, )" in source for source in sources)
    assert all("linear" in source for source in sources)


def doubled(h: Any) -> Any:
    copy = h * 1.0
    copy.mul_(2)
    return copy


@pytest.mark.parametrize("first", [lambda h: h, lambda h: h * 2, doubled])
@pytest.mark.parametrize("broken", [False, True])
def test_a_chunked_padded_tensor_leaves_compiled_code_as_one(first: Callable[[Any], Any], broken: bool) -> None:
    h, w = hidden(21), weights()
    x = st.pad(h, {0: SEQ}, value=NAN)

    def halves(x: Any) -> Any:
        value = first(st.chunk(x, rows=5))
        torch._dynamo.graph_break()
        return z_loss(value * 3, None, w)

    if broken:
        loss = torch.compile(halves, backend="aot_eager")(x)
    else:
        loss = z_loss(compiled(lambda x: first(st.chunk(x, rows=5)))(x) * 3, None, w)
    assert_same(loss, z_loss(first(h) * 3, None, w), [h, *w])


@pytest.mark.parametrize("dynamic", [None, True])
def test_one_compiled_function_takes_several_buckets(dynamic: bool | None) -> None:
    w = weights()
    function = torch.compile(
        lambda x, t: mean_loss(st.chunk(x, 1, rows=5), t, w), backend="aot_eager", fullgraph=True, dynamic=dynamic
    )
    for n in (11, 13, 20, 40):
        h, target = hidden(3, n), tokens(3, n)
        assert_same(function(st.pad(h, {1: SEQ}), st.pad(target, {1: SEQ})), mean_loss(h, target, w), [h, *w])


def test_log_probabilities_leave_compiled_code_padded() -> None:
    h, target, w = hidden(3, 21), tokens(3, 21).clamp(min=0), weights()

    def log_probs(h: Any, target: Any) -> Any:
        return head(h, w).log_softmax(-1).gather(-1, target.unsqueeze(-1)).squeeze(-1)

    x, t = st.pad(h, {1: SEQ}, value=NAN), st.pad(target, {1: SEQ})
    found = compiled(lambda x, t: log_probs(st.chunk(x, 1, rows=5), t))(x, t)
    assert_same(found.unpad().sin().sum(), log_probs(h, target).sin().sum(), [h, *w])


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return 5 * gradient * ctx.saved_tensors[0]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Dynamo makes an instance of the function
@pytest.mark.parametrize("way", WAYS)
def test_what_an_autograd_function_returns_is_refused(way: Way) -> None:
    x, w = st.pad(hidden(21), {0: SEQ}), weights()
    with pytest.raises(Exception, match=r"came out of .*gradient would not go through"):
        way(lambda x: z_loss(Square.apply(st.chunk(x, rows=5)), None, w))(x)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("rows", [1, 2])
def test_a_sequence_without_tokens_that_is_a_chunk_of_its_own_has_its_results(rows: int) -> None:
    batch, w = [hidden(n) for n in (16, 0, 3)], weights()
    x = st.pad(batch, {0: SEQ}, value=NAN)
    for result in (lambda v: v.sum(-1).exp(), lambda v: v.mean(-1), lambda v: (v < 9).all(-1)):
        found = result(torch.tanh(head(st.chunk(x, rows=rows), w)).sum(-1)).realize()
        expected = torch.stack([result(torch.tanh(head(h, w)).sum(-1)) for h in batch])
        torch.testing.assert_close(found.dense, expected, equal_nan=True)
