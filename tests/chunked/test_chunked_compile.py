"""Chunked tensors under torch.compile: one opaque op for a head and its loss, plain tensors for the rest."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from chunked_programs import assert_errs_as_plain, check_results, chunking, in_dtype, loss_and_gradients, plainly
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

import subtensors as st
from subtensors.dispatch.chunked import compile_chunk

BATCH, LENGTH, HIDDEN, VOCAB = 3, 8, 6, 40


def tensors() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    return {
        "h": torch.randn(BATCH, LENGTH, HIDDEN, generator=g).requires_grad_(),
        "w": torch.randn(VOCAB, HIDDEN, generator=g).requires_grad_(),
        "b": torch.randn(VOCAB, generator=g).requires_grad_(),
        "target": torch.randint(0, VOCAB, (BATCH, LENGTH), generator=g),
    }


def language_model(h: Tensor, w: Tensor, b: Tensor, target: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    logits = F.linear(h, w, b)
    return F.cross_entropy(logits[..., :-1, :].contiguous().view(-1, VOCAB).to(dtype), target[..., 1:].reshape(-1)) * 2


def tied(h: Tensor, w: Tensor, b: Tensor, target: Tensor) -> Tensor:
    loss = F.cross_entropy((h @ w.t()).reshape(-1, VOCAB), target.flatten(), label_smoothing=0.1, reduction="sum")
    return loss / 7 + w.square().sum() + b.sum()


IGNORING = torch.nn.CrossEntropyLoss(ignore_index=3)


def module(h: Tensor, w: Tensor, b: Tensor, target: Tensor) -> Tensor:
    return IGNORING(F.linear(h, w.detach(), b).flatten(0, 1), target.flatten())


def capped(h: Tensor, w: Tensor, b: Tensor, target: Tensor) -> Tensor:
    logits = torch.tanh(F.linear(h, w, b).to(torch.float32) / 3.0) * 3.0
    return F.cross_entropy((logits / 0.7).view(-1, VOCAB), target.flatten())


def heated(h: Tensor, w: Tensor, b: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(2.5 * F.linear(h, w, b).flatten(0, 1), target.flatten()) + b.sum()


def weighed(h: Tensor, w: Tensor, b: Tensor, target: Tensor) -> Tensor:
    losses = F.cross_entropy((4 * (F.linear(h, w, b) * 0.25).tanh()).flatten(0, 1), target.flatten(), reduction="none")
    return (losses * torch.linspace(0, 2, len(losses))).square().mean()


def taught(h: Tensor, w: Tensor, b: Tensor, target: Tensor) -> Tensor:
    soft = torch.softmax(F.one_hot(target.flatten(), VOCAB).to(h.dtype), -1)
    return F.cross_entropy(F.linear(h, w, b).flatten(0, 1), soft)


def squares(h: Tensor, w: Tensor, b: Tensor, target: Tensor) -> Tensor:
    return torch.tanh(2 * F.linear(h, w, b) / 3).square().mean() - (w @ h.mT).mean()


LOSSES = [language_model, tied, module, capped, heated, weighed, taught]


DIVISIONS: list[dict[str, Any]] = [{"rows": 2}, {"chunks": 5, "dim": 1}, {"memory_limit": "64KiB"}, {}]


@pytest.mark.parametrize(
    ("program", "division"),
    [*((language_model, d) for d in DIVISIONS), *zip([*LOSSES[1:], squares], cycle(DIVISIONS), strict=False)],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_a_compiled_program_with_chunks_equals_the_plain_program(
    program: Callable[..., Tensor], division: dict[str, Any]
) -> None:
    t = tensors()
    found = loss_and_gradients(torch.compile(chunking(program, **division), fullgraph=True, backend="aot_eager"), t)
    check_results(found, lambda t: loss_and_gradients(plainly(program), t), t)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_compiled_loss_under_autocast_is_computed_in_its_dtype(dtype: torch.dtype) -> None:
    t = tensors()
    dtypes: list[torch.dtype] = []

    def look(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        programs = [n for n in graph.graph.nodes if "chunked_program" in str(n.target)]
        dtypes.extend(x.meta["val"].dtype for n in programs for x in n.args[0][1:3])
        return make_boxed_func(graph.forward)

    def program(h: Tensor, **others: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return language_model(h=F.layer_norm(h, [HIDDEN]), dtype=dtype, **others)

    def chunked(h: Tensor, **others: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return language_model(h=st.chunk(F.layer_norm(h, [HIDDEN]), rows=2), dtype=dtype, **others)

    expected = loss_and_gradients(program, t)
    found = loss_and_gradients(torch.compile(chunked, fullgraph=True, backend=aot_autograd(fw_compiler=look)), t)
    assert dtypes == [torch.bfloat16] * 2
    wide = in_dtype(t, torch.float64, {"h", "w", "b"})
    truth = loss_and_gradients(
        lambda h, **others: language_model(h=F.layer_norm(h, [HIDDEN]), dtype=torch.float64, **others), wide
    )
    assert_errs_as_plain(found, expected, truth)


def test_a_compiled_float16_loss_is_scaled_before_its_gradients_are_rounded() -> None:
    g = torch.Generator().manual_seed(0)
    h, w = torch.randn(64, 6, generator=g).half(), (torch.randn(500, 6, generator=g) / 8).half().requires_grad_()
    target = torch.randint(0, 500, (64,), generator=g)

    def loss(h: Tensor, w: Tensor, rows: int | None = None) -> Tensor:
        return F.cross_entropy(F.linear(h if rows is None else st.chunk(h, rows=rows), w), target) * 1024.0

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    wide = w.detach().double().requires_grad_()
    found, plain = (torch.autograd.grad(compiled(h, w, rows), w) for rows in (16, None))
    assert_errs_as_plain(found, plain, torch.autograd.grad(loss(h.double(), wide), wide))


@pytest.mark.parametrize("program", [program for program in LOSSES if program is not taught])
def test_the_compilers_graphs_hold_no_logits(program: Callable[..., Tensor]) -> None:
    sizes: list[int] = []

    def look(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        sizes.extend(n.meta["val"].numel() for n in graph.graph.nodes if isinstance(n.meta.get("val"), Tensor))
        return make_boxed_func(graph.forward)

    t = tensors()
    loss_and_gradients(
        torch.compile(chunking(program, rows=1), fullgraph=True, backend=aot_autograd(fw_compiler=look)), t
    )
    assert len(sizes) > 10
    assert max(sizes) <= VOCAB * HIDDEN


def test_a_compiled_loss_without_gradients_computes_none() -> None:
    t = tensors()
    step = torch.compile(chunking(language_model, rows=2), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        check_results([step(**t)], lambda t: [plainly(language_model)(**t)], t)


@pytest.mark.gpu
def test_on_a_gpu_the_peak_of_a_compiled_step_falls() -> None:
    count, width, classes = 4096, 256, 32000
    h = torch.randn(count, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(classes, width, device="cuda", dtype=torch.bfloat16).mul_(0.05).requires_grad_()
    target = torch.randint(0, classes, (count,), device="cuda")

    def loss(h: Tensor, w: Tensor, chunked: bool) -> Tensor:
        x = torch.sin(h)
        x = st.chunk(x, rows=512) if chunked else x
        return F.cross_entropy(F.linear(x, w).to(torch.promote_types(w.dtype, torch.float32)), target)

    peaks, grads = {}, {}
    for chunked in (False, True):
        step = torch.compile(loss, fullgraph=True)
        for _ in range(2):
            h.grad = w.grad = None
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            step(h, w, chunked).backward()
            torch.cuda.synchronize()
            peaks[chunked] = torch.cuda.max_memory_allocated() - before
        grads[chunked] = h.grad, w.grad
    assert peaks[True] < peaks[False] / 3
    wide = [x.detach().double().requires_grad_() for x in (h, w)]
    assert_errs_as_plain(grads[True], grads[False], torch.autograd.grad(loss(*wide, False), wide))


def entropies(h: Tensor, w: Tensor, b: Tensor, target: Tensor) -> Tensor:
    logits = F.linear(h, w, b)
    log_probs = torch.log_softmax(2 * logits, -1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    with torch.no_grad():
        weight = torch.sigmoid(logits.amax(-1) - 1)
    return (entropy * weight).mean() + F.linear(F.silu(logits), w.t()).square().mean()


@pytest.mark.parametrize("program", [entropies, squares, tied])
@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
def test_the_math_of_a_chunk_is_compiled_once_and_is_correct(
    program: Callable[..., Tensor], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_chunk, "BACKEND", backend)
    t = tensors()
    torch._dynamo.utils.counters.clear()
    found = [loss_and_gradients(chunking(program, rows=2, compile=True), t) for _ in range(3)]
    for results in found:
        check_results(results, lambda t: loss_and_gradients(plainly(program), t), t)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    # A run of ops is compiled for whole chunks and for the last, short one, with and without gradients; not again.
    assert graphs <= 4 * 3
    assert graphs > 0 or program is tied  # nothing is left of it beside the kernels of its loss


@pytest.mark.usefixtures("compiler")
def test_a_target_that_is_no_class_is_torchs_error_beside_compiled_math() -> None:
    x, target = torch.randn(8, 5, 3), torch.zeros(8, 3, dtype=torch.int64)
    target[1, 2] = 77
    with pytest.raises(IndexError, match="Target 77 is out of bounds"):
        F.cross_entropy((st.chunk(x, rows=4, compile=True).tanh() * 2).exp(), target) + 0


def test_compiled_math_has_the_sign_of_a_zero_and_knows_a_nan_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_chunk, "BACKEND", "eager")
    compile_chunk._function.cache_clear()
    h = torch.ones(4, 3)
    for number in (0.0, -0.0, float("nan"), float("-inf"), float("nan")):
        found = (st.chunk(h, rows=2, compile=True).exp() * number).clamp(min=-1.0)
        torch.testing.assert_close(found + 0, (h.exp() * number).clamp(min=-1.0), equal_nan=True)
        assert torch.equal(found.signbit() + 0, (h.exp() * number).clamp(min=-1.0).signbit())
    # The last number was compiled before.
    assert compile_chunk._function.cache_info().hits >= 1


@pytest.mark.gpu
def test_inductor_compiles_the_math_of_a_chunk() -> None:
    t = {n: x.detach().cuda().requires_grad_(x.requires_grad) for n, x in tensors().items()}
    check_results(
        loss_and_gradients(chunking(entropies, rows=2, compile=True), t),
        lambda t: loss_and_gradients(plainly(entropies), t),
        t,
    )
