"""Programs other than a cross entropy under torch.compile: each runs chunk by chunk, in an op of its own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from chunked_programs import check_results, chunking, loss_and_gradients, plainly
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

import subtensors as st
from subtensors.chunked.record_call import fallbacks

BATCH, LENGTH, HIDDEN, VOCAB = 3, 8, 6, 64


def tensors(device: str = "cpu") -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    t = {
        "h": torch.randn(BATCH, LENGTH, HIDDEN, generator=g),
        "w": torch.randn(VOCAB, HIDDEN, generator=g),
        "b": torch.randn(VOCAB, generator=g),
        "target": torch.randint(0, VOCAB, (BATCH, LENGTH), generator=g),
    }
    return {n: x.to(device).requires_grad_(x.is_floating_point()) for n, x in t.items()}


def z_loss(h: Tensor, w: Tensor, b: Tensor, target: Tensor) -> Tensor:
    logits = F.linear(h, w, b).flatten(0, 1).float()
    z = torch.logsumexp(logits, dim=-1)
    return F.cross_entropy(logits, target.flatten()) + 1e-2 * z.square().mean()


def log_probabilities(h: Tensor, w: Tensor, b: Tensor, target: Tensor) -> Tensor:
    return F.linear(h, w, b).log_softmax(-1).gather(-1, target[..., None]).squeeze(-1)


def preferences(h: Tensor, w: Tensor, b: Tensor, target: Tensor) -> Tensor:
    chosen = log_probabilities(h, w, b, target).sum(1)
    with torch.no_grad():
        reference = log_probabilities(h, w * 0.9, b, target).sum(1)
    rejected = log_probabilities(h, w, b, target.flip(1)).sum(1)
    return -F.logsigmoid(0.3 * (chosen - reference - rejected)).mean()


def distillation(h: Tensor, w: Tensor, b: Tensor, target: Tensor) -> Tensor:
    with torch.no_grad():
        wanted = F.softmax((h @ w.t() + b) / 2.0, dim=-1)
    return F.kl_div(F.log_softmax(F.linear(h, w) / 2.0, dim=-1), wanted, reduction="batchmean") + b.mean()


def entropy(h: Tensor, w: Tensor, b: Tensor, target: Tensor) -> Tensor:
    logits = torch.matmul(h, w.mT).add(b)
    log_probs = logits - logits.logsumexp(-1, keepdim=True)
    return -(log_probs.exp() * log_probs).sum(-1).mean() - 2 * log_probs[..., :3].mean()


def gated(h: Tensor, w: Tensor, b: Tensor, target: Tensor) -> Tensor:
    gate, up = F.linear(F.layer_norm(h, [HIDDEN]), w, b).chunk(2, dim=-1)
    out = F.linear(F.silu(gate) * up, w[: VOCAB // 2].t())
    return (out.realize() if hasattr(out, "realize") else out).square().mean()


def wide_regression(h: Tensor, w: Tensor, b: Tensor, target: Tensor) -> Tensor:
    wanted = F.one_hot(target, VOCAB).to(h.dtype)
    return F.mse_loss(F.linear(h, w, b), wanted) + 0.1 * F.binary_cross_entropy_with_logits(h @ w.t() - 1, wanted)


def picked(h: Tensor, w: Tensor, b: Tensor, target: Tensor) -> Tensor:
    scores = F.log_softmax(F.linear(h, w, b).view(-1, VOCAB), -1)
    rows = torch.arange(BATCH * LENGTH, device=target.device)
    return -scores[rows, target.flatten()].mean() + F.nll_loss(scores, target.flatten(), ignore_index=3)


def written(h: Tensor, w: Tensor, b: Tensor, target: Tensor) -> Tensor:
    logits = F.linear(h, w)
    logits += b
    logits = logits * 2
    logits.div_(0.7).clamp_(-4.0, 4.0)
    logits /= 3
    logits[..., 2] = 0.5
    return F.cross_entropy(logits.transpose(1, 2), target)


def contrastive(h: Tensor, w: Tensor, b: Tensor, target: Tensor) -> Tensor:
    rows = h.shape[0] * h.shape[1]
    similarity = F.normalize(h.flatten(0, 1), dim=-1) @ F.normalize(w[:rows], dim=-1).t() * b[0].exp()
    labels = torch.arange(rows, device=target.device)
    pairs = -F.logsigmoid(similarity * (2 * torch.eye(rows, device=w.device) - 1)).sum()
    return (F.cross_entropy(similarity, labels) + F.cross_entropy(similarity.T, labels)) / 2 + pairs


def masked(h: Tensor, w: Tensor, b: Tensor, target: Tensor) -> Tensor:
    logits = torch.where(b > 0, F.linear(h, w, b), -3.0).masked_fill(b > 1, -2.0)
    losses = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none", label_smoothing=0.1)
    right = (logits.argmax(-1) == target).to(h.dtype)
    first = [sequence.amax() for sequence in logits]
    return (losses * (1 + right.flatten())).sum() / 7 + first[0] * len(logits)


def compared(h: Tensor, w: Tensor, b: Tensor, target: Tensor) -> Tensor:
    logits = F.linear(h, w, b)
    kept = (b > 0) & (logits > 0) | (logits < -2)
    return torch.where(kept ^ (b == logits), logits, 0.0).square().mean()


def laid_together(h: Tensor, w: Tensor, b: Tensor, target: Tensor) -> Tensor:
    both = torch.cat([h, w[: BATCH * LENGTH].view(h.shape)], 0)
    chosen, rejected = log_probabilities(both, w, b, torch.cat([target, target.flip(1)], 0)).sum(1).chunk(2)
    return -F.logsigmoid(0.3 * (chosen - rejected)).mean()


PROGRAMS = [
    z_loss,
    preferences,
    distillation,
    entropy,
    gated,
    wide_regression,
    picked,
    written,
    contrastive,
    masked,
    compared,
    laid_together,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_a_compiled_program_runs_chunk_by_chunk_and_equals_the_plain_one(program: Callable[..., Tensor]) -> None:
    sizes: list[int] = []

    def look(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        sizes.extend(n.meta["val"].numel() for n in graph.graph.nodes if isinstance(n.meta.get("val"), Tensor))
        return make_boxed_func(graph.forward)

    t = tensors()
    compiled = torch.compile(chunking(program, rows=1), fullgraph=True, backend=aot_autograd(fw_compiler=look))
    check_results(loss_and_gradients(compiled, t), lambda t: loss_and_gradients(plainly(program), t), t)
    # Targets are as wide as logits, or as similarities.
    own = {wide_regression: BATCH * LENGTH * VOCAB, contrastive: (BATCH * LENGTH) ** 2}.get(program, VOCAB * HIDDEN)
    assert max(sizes) <= own


def test_a_compiled_program_of_dynamic_sizes_equals_the_plain_one() -> None:
    compiled = torch.compile(chunking(z_loss, rows=4, dim=1), fullgraph=True, backend="aot_eager", dynamic=True)
    for length in (8, 5):
        t = {n: (x.detach()[:, :length] if n in ("h", "target") else x.detach()) for n, x in tensors().items()}
        t = {n: x.requires_grad_(x.is_floating_point()) for n, x in t.items()}
        check_results(loss_and_gradients(compiled, t), lambda t: loss_and_gradients(plainly(z_loss), t), t)


def test_realized_values_in_compiled_code_are_plain_and_differentiable() -> None:
    def program(h: Tensor, w: Tensor, b: Tensor, target: Tensor) -> Tensor:
        tokens = log_probabilities(h, w, b, target)
        return (tokens * torch.linspace(0, 1, LENGTH, dtype=tokens.dtype)).sum() + tokens.min()

    t = tensors()
    found = loss_and_gradients(torch.compile(chunking(program, chunks=2), fullgraph=True, backend="aot_eager"), t)
    check_results(found, lambda t: loss_and_gradients(plainly(program), t), t)


def test_the_upstream_gradient_is_not_rounded_to_the_dtype_of_a_gradient() -> None:
    t = {n: x.detach().bfloat16() if n == "h" or n == "w" else x for n, x in tensors().items()}

    def loss(h: Tensor, w: Tensor, factor: float) -> Tensor:
        logits = F.linear(st.chunk(h, rows=1), w).flatten(0, 1).float()
        return F.cross_entropy(logits, t["target"].flatten()) * factor

    grads = []
    for factor in (1.0, 1 / 3):
        h, w = t["h"].clone().requires_grad_(), t["w"].clone().requires_grad_()
        grads.append(
            torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(h, w, factor), (h, w))
        )
    for one, third in zip(*grads, strict=True):
        wanted = (one.double() / 3).bfloat16()
        assert torch.equal(third, wanted)


def test_rows_are_selected_by_a_mask_inside_the_compiled_program() -> None:
    def program(h: Tensor, w: Tensor, b: Tensor, target: Tensor) -> Tensor:
        logits, counted = F.linear(h, w, b), target > 7
        return F.cross_entropy(logits[counted], target[counted]) + logits[logits > 0].sum()

    t = tensors()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        found = loss_and_gradients(torch.compile(chunking(program, rows=2), fullgraph=True, backend="aot_eager"), t)
    check_results(found, lambda t: loss_and_gradients(plainly(program), t), t)


def test_a_call_that_no_program_can_hold_is_computed_in_full_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    def program(h: Tensor, w: Tensor, b: Tensor, target: Tensor) -> Tensor:
        logits = F.linear(h, w, b)
        return logits.sort(-1).values[..., :2].mean() + logits.sum()

    t = tensors()
    fallbacks.clear()
    with (
        caplog.at_level(logging.WARNING, "subtensors"),
        torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True),
    ):
        found = loss_and_gradients(torch.compile(chunking(program, rows=2), fullgraph=True, backend="aot_eager"), t)
    check_results(found, lambda t: loss_and_gradients(plainly(program), t), t)
    assert caplog.text.count("sort on a ChunkedTensor: the program of a compiled graph can't hold it") == 1


def broken_before(h: Tensor, w: Tensor, b: Tensor, target: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return z_loss(h, w, b, target)


def broken_amid(h: Tensor, w: Tensor, b: Tensor, target: Tensor) -> Tensor:
    logits = F.linear(h, w) + b
    torch._dynamo.graph_break()
    return F.cross_entropy(logits.flatten(0, 1), target.flatten()) + logits.logsumexp(-1).square().mean() + h.mean()


def broken_after_a_write(h: Tensor, w: Tensor, b: Tensor, target: Tensor) -> Tensor:
    logits = F.linear(h, w)
    logits.mul_(0.5).add_(b)
    if logits.mean() > 1e3:
        logits = logits * 2
    return F.cross_entropy((logits * 3).flatten(0, 1), target.flatten())


@pytest.mark.parametrize("program", [broken_before, broken_amid, broken_after_a_write])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of any, where a graph begins
def test_chunked_values_cross_a_graph_break(program: Callable[..., Tensor], backend: str) -> None:
    t = tensors()
    found = loss_and_gradients(torch.compile(chunking(program, rows=2), backend=backend), t)
    check_results(found, lambda t: loss_and_gradients(plainly(program), t), t)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of any, where a graph begins
def test_a_chunked_tensor_goes_on_in_chunks_after_a_graph_break() -> None:
    sizes: list[int] = []

    def look(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        sizes.extend(n.meta["val"].numel() for n in graph.graph.nodes if isinstance(n.meta.get("val"), Tensor))
        return make_boxed_func(graph.forward)

    t = tensors()
    loss_and_gradients(torch.compile(chunking(broken_before, rows=1), backend=aot_autograd(fw_compiler=look)), t)
    assert len(sizes) > 10
    assert max(sizes) <= VOCAB * HIDDEN


def test_a_compiled_function_returns_the_full_value_of_chunked_rows() -> None:
    def logits(h: Tensor, w: Tensor) -> Tensor:
        return F.linear(st.chunk(h, rows=2), w) * 2

    t = tensors()
    given = t["h"], t["w"]
    found = torch.compile(logits, fullgraph=True, backend="aot_eager")(*given)
    expected = F.linear(*given) * 2
    torch.testing.assert_close(found + 0, expected)
    torch.testing.assert_close(
        torch.autograd.grad(found.square().sum(), given), torch.autograd.grad(expected.square().sum(), given)
    )


def test_chunked_values_of_compiled_code_are_tensors_with_the_operators_of_tensors() -> None:
    def program(h: Tensor, w: Tensor, b: Tensor, target: Tensor) -> Tensor:
        rows = h.flatten(0, 1)
        pairs = rows @ rows.mT
        total = pairs.logsumexp(-1).sum() + (w @ rows.T).T.logsumexp(-1).sum()
        return total if isinstance(pairs, Tensor) else pairs

    t = tensors()
    found = loss_and_gradients(torch.compile(chunking(program, rows=2), fullgraph=True, backend="aot_eager"), t)
    check_results(found, lambda t: loss_and_gradients(plainly(program), t), t)


def with_a_list(h: Tensor, w: Tensor, b: Tensor, target: Tensor) -> Tensor:
    heads = st.TensorList([w, w * 2])
    return sum(x.logsumexp(-1).sum() for x in F.linear(h, heads)) + b.sum()  # type: ignore[return-value]


def mapped(h: Tensor, w: Tensor, b: Tensor, target: Tensor) -> Tensor:
    return torch.vmap(lambda row: row.square().sum())(F.linear(h.flatten(0, 1), w, b)).mean()


def of_a_new_module(h: Tensor, w: Tensor, b: Tensor, target: Tensor) -> Tensor:
    return torch.nn.CrossEntropyLoss()(F.linear(h, w, b).flatten(0, 1), target.flatten())


@pytest.mark.parametrize("program", [with_a_list, mapped, of_a_new_module])
def test_chunked_values_meet_lists_transforms_and_modules_in_a_full_graph(program: Callable[..., Tensor]) -> None:
    t = tensors()
    found = loss_and_gradients(torch.compile(chunking(program, rows=2), fullgraph=True, backend="aot_eager"), t)
    check_results(found, lambda t: loss_and_gradients(plainly(program), t), t)


def test_a_padded_tensor_is_chunked_and_joins_chunks_in_full() -> None:
    rows = tensors()["h"].detach().flatten(0, 1)
    x = st.pad(rows[:13], {0: st.Dim("n", max=32, buckets=8)})
    w = tensors()["w"].detach()
    alone = torch.compile(
        lambda x, w: F.linear(st.chunk(x, rows=2), w).logsumexp(-1).sum(), fullgraph=True, backend="aot_eager"
    )
    joined = torch.compile(
        lambda h, x: (st.chunk(h, rows=2) @ x.T).logsumexp(-1).sum(), fullgraph=True, backend="aot_eager"
    )
    for found, expected in ((alone(x, w), rows[:13] @ w.T), (joined(rows, x), rows @ rows[:13].T)):
        torch.testing.assert_close(found, expected.logsumexp(-1).sum())


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * gradient * ctx.saved_tensors[0]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Dynamo makes an instance of the function
def test_a_chunked_value_out_of_an_autograd_function_is_refused() -> None:
    def loss(h: Tensor, w: Tensor) -> Tensor:
        out: Tensor = Square.apply(F.linear(st.chunk(h, rows=2), w))  # type: ignore[no-untyped-call]
        return out.sum()

    t = tensors()
    with pytest.raises(Exception, match=r"gradient would not go through that function's backward"):
        torch.compile(loss, fullgraph=True, backend="aot_eager")(t["h"], t["w"])


def test_an_mlp_of_compiled_code_is_realized_chunk_by_chunk() -> None:
    def mlp(h: Tensor, w: Tensor) -> Tensor:
        return F.linear(F.silu(F.linear(st.chunk(h, rows=1, dim=1), w)), w.t()).realize()  # type: ignore[attr-defined]

    t = tensors()
    calls: list[str] = []

    def look(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        calls.extend(str(n.target) for n in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    found = torch.compile(mlp, fullgraph=True, backend=aot_autograd(fw_compiler=look))(t["h"], t["w"])
    torch.testing.assert_close(found, F.linear(F.silu(F.linear(t["h"], t["w"])), t["w"].t()))
    assert [x for x in calls if "chunked_program" in x]
    assert not [x for x in calls if "silu" in x]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # torch 2.11's own, while Dynamo traces
@pytest.mark.parametrize("name", ["view", "hook"])
def test_a_write_that_another_value_would_not_see_is_refused(name: str) -> None:
    def through_a_view(h: Tensor, w: Tensor) -> Tensor:
        logits = F.linear(h, w)
        logits[..., :2].zero_()
        return logits.sum()

    def with_a_hook(h: Tensor, w: Tensor) -> Tensor:
        logits = F.linear(h, w)
        logits.register_hook(lambda gradient: gradient * 2)
        return logits.sum()

    program = {"view": through_a_view, "hook": with_a_hook}[name]
    t = tensors()
    with pytest.raises(Exception, match=r"take what zero returns|call it on that|the tensor's realize"):
        torch.compile(lambda h, w: program(st.chunk(h), w), fullgraph=True, backend="aot_eager")(t["h"], t["w"])


@pytest.mark.gpu
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_on_a_gpu_a_compiled_program_equals_the_plain_one(program: Callable[..., Tensor]) -> None:
    t = {n: x.detach().requires_grad_(x.requires_grad) for n, x in tensors("cuda").items()}
    found = loss_and_gradients(torch.compile(chunking(program, rows=1), fullgraph=True), t)
    check_results(found, lambda t: loss_and_gradients(plainly(program), t), t)
