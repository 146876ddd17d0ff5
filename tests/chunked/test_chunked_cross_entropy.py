"""Cross entropy of chunked hidden states: its kernels, torch's own samples, and random numbers before it."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from chunked_programs import allocations, assert_errs_as_plain, check_chunked, linear_case
from hypothesis import given
from hypothesis import strategies as some
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db

import subtensors as st


def plain(logits: Tensor) -> Tensor:
    return logits


def capped(logits: Tensor) -> Tensor:
    return 5 * torch.tanh(logits / 5)


def capped_and_heated(logits: Tensor) -> Tensor:
    return torch.tanh(logits * 0.125) * 8.0 / 0.7


def heated(logits: Tensor) -> Tensor:
    return logits * 2.5


def widened(logits: Tensor) -> Tensor:
    return logits.float() if logits.dtype == torch.bfloat16 else logits


def shifted(logits: Tensor) -> Tensor:
    return logits + 1


def negated(logits: Tensor) -> Tensor:
    return logits * -1.0


def switched_off(logits: Tensor) -> Tensor:
    return 5 * torch.tanh(logits * 0.0)


@pytest.mark.parametrize(
    ("change", "lowered"),
    [
        (plain, True),
        (capped, True),
        (capped_and_heated, True),
        (heated, True),
        (widened, True),
        (shifted, False),
        (negated, False),
        (switched_off, False),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("biased", [True, False])
def test_a_linear_layer_with_softcap_and_temperature_runs_the_kernels_and_is_correct(
    change: Any, lowered: bool, dtype: torch.dtype, biased: bool
) -> None:
    def program(h: Tensor, w: Tensor, b: Tensor, target: Tensor) -> Tensor:
        loss = F.cross_entropy(change(F.linear(h, w, b) if biased else h @ w.t()), target, label_smoothing=0.1)
        assert isinstance(h, st.ChunkedTensor) <= (st.explain(loss).startswith("linear + cross entropy") == lowered)
        return loss

    check_chunked(program, linear_case(), {"h": {"rows": 5}}, dtype=dtype)


@given(
    some.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    some.sampled_from([1.0, 0.3, 1 / 3, 4096.0]),
    some.sets(some.sampled_from(["h", "w", "b"]), min_size=1),
)
def test_the_upstream_gradient_of_the_loss_scales_its_gradients(
    dtype: torch.dtype, scale: float, needs: set[str]
) -> None:
    def program(h: Tensor, w: Tensor, b: Tensor, target: Tensor) -> Tensor:
        loss = F.cross_entropy(F.linear(h, w, b), target)
        # Float16 gradients of a mean are small: a scaler multiplies them here, before they are rounded.
        return loss * scale * (1024 if dtype == torch.float16 else 1)

    # The gradients are scaled after they were made: a rounding more, where the scale is no power of two.
    check_chunked(program, linear_case(), {"h": {"rows": 5}}, dtype=dtype, needs=needs, passes=2)


def test_logits_that_were_recorded_without_gradients_have_none() -> None:
    t = linear_case()
    h, w = st.chunk(t["h"].requires_grad_(), rows=5), t["w"].requires_grad_()
    with torch.no_grad():
        logits = F.linear(h, w)
    assert not F.cross_entropy(logits, t["target"]).requires_grad
    assert not F.cross_entropy(F.linear(h, w).detach(), t["target"]).requires_grad
    assert F.cross_entropy(F.linear(h, w.detach()), t["target"]).requires_grad


def test_hidden_states_computed_by_chunks_are_not_materialized_for_the_kernels() -> None:
    def program(h: Tensor, w: Tensor, b: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(F.gelu(h @ w[:6]), w, b), target)

    check_chunked(program, linear_case(), {"h": {"rows": 5}})


def test_a_gradient_scaler_sees_the_same_float16_gradients_as_without_chunks() -> None:
    t = linear_case(64, 6, 500)
    h, w = t["h"].half(), (t["w"] / 8).half()

    def gradient(h: Tensor, w: Tensor) -> Tensor:
        w = w.detach().requires_grad_()
        return torch.autograd.grad(F.cross_entropy(F.linear(h, w), t["target"]) * 1024.0, w)[0]

    truth = gradient(h.double(), w.double())
    assert_errs_as_plain([gradient(st.chunk(h, rows=16), w)], [gradient(h, w)], [truth])


def test_torchs_own_cross_entropy_samples_pass_through_a_chunked_linear() -> None:
    (info,) = [op for op in op_db if op.name == "nn.functional.cross_entropy"]
    covered = 0
    for sample in islice(info.sample_inputs("cpu", torch.float64, requires_grad=False), 200):
        logits, (target, *_) = sample.input, sample.args
        options = dict(sample.kwargs)
        if logits.ndim == 1:
            continue  # one sample: no rows to chunk
        classes = logits.shape[1]
        generator = torch.Generator().manual_seed(0)
        head = torch.randn(classes, classes, dtype=torch.float64, generator=generator)
        runs = []
        for chunked in (False, True):
            x, w = logits.clone().requires_grad_(), head.clone().requires_grad_()
            h = st.chunk(x, rows=2) if chunked else x
            mixed = F.linear(h.movedim(1, -1), w).movedim(-1, 1)
            loss = F.cross_entropy(mixed, target, **options)
            loss = loss.realize() if isinstance(loss, st.ChunkedTensor) else loss
            loss.sum().backward()
            runs.append((loss.detach(), x.grad, w.grad))
        for a, e in zip(runs[1], runs[0], strict=True):
            torch.testing.assert_close(a, e, equal_nan=True)
        covered += 1
    assert covered > 20


@pytest.mark.parametrize("p", [0.0, 0.4, 1.0])
def test_dropout_of_a_chunked_input_draws_the_same_mask_as_without_chunks(p: float) -> None:
    def program(h: Tensor, w: Tensor, b: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(F.dropout(h, p), w, b), target) + torch.rand(())

    check_chunked(program, linear_case(), {"h": {"rows": 5}})


def test_dropout_of_logits_draws_the_same_in_forward_and_backward_and_never_holds_all_of_them() -> None:
    t = linear_case(64, 4, 96)
    h, w = t["h"].double().requires_grad_(), t["w"].double()
    with allocations() as seen:
        dropped = F.dropout(F.linear(st.chunk(h, rows=8), w), 0.5)
        assert isinstance(dropped, st.ChunkedTensor)
        rows = dropped.sum(1).realize()
        rows.sum().backward()
    assert seen.largest == 8 * 96
    # The gradient is through the mask that forward used: it takes the rows to their sum.
    torch.testing.assert_close((h.grad * h).sum(), rows.sum())
    torch.manual_seed(3)
    first = F.dropout(F.linear(st.chunk(h, rows=8), w), 0.5).realize()
    torch.manual_seed(3)
    again = F.dropout(F.linear(st.chunk(h, rows=8), w), 0.5).realize()
    assert torch.equal(first, again)
    assert 0.4 < float((first == 0).float().mean()) < 0.6


def test_an_op_that_falls_back_has_drawn_no_random_numbers() -> None:
    def program(h: Tensor, w: Tensor, b: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        pooled = F.fractional_max_pool2d(F.linear(h, w)[None, :, :].expand(2, -1, -1), 2, output_size=(3, 4))
        return pooled.sum(), torch.rand(())

    check_chunked(program, linear_case(), {"h": {"rows": 5}})


@pytest.mark.gpu
@pytest.mark.parametrize("accumulate", ["exact", "fast"])
def test_on_a_gpu_peak_memory_is_gradients_and_a_chunk_of_logits(accumulate: str) -> None:
    count, width, classes, rows = 4096, 256, 32000, 512
    h = torch.randn(count, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(classes, width, device="cuda", dtype=torch.bfloat16).mul_(0.05).requires_grad_()
    target = torch.randint(0, classes, (count,), device="cuda")
    expected = torch.autograd.grad(F.cross_entropy(F.linear(h, w).float(), target), [h, w])
    found = []
    for programs in (lambda x: F.cross_entropy(x.float(), target), lambda x: F.cross_entropy(x.float() + 0, target)):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        loss = programs(F.linear(st.chunk(h, rows=rows, accumulate=accumulate), w))  # type: ignore[arg-type]
        grads = torch.autograd.grad(loss, [h, w])
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        gradients = 2 * (count + 2 * classes) * width
        assert peak < gradients + 20 * rows * classes  # all the logits in float32 would take 4 * 4096 * 32000
        assert peak < 4 * count * classes
        found.append(grads)
        del grads, loss
    wide = [x.detach().double().requires_grad_() for x in (h, w)]
    truth = torch.autograd.grad(F.cross_entropy(F.linear(*wide), target), wide)
    if accumulate == "exact":
        for grads in found:
            assert_errs_as_plain(grads, expected, truth)


@given(data=some.data())
def test_a_slice_of_the_rows_of_logits_runs_the_kernels_and_is_correct(data: some.DataObject) -> None:
    batch, length, width = data.draw(some.tuples(some.integers(2, 4), some.integers(3, 6), some.integers(1, 4)))
    first, skipped = data.draw(some.tuples(some.integers(0, 1), some.integers(0, 1)))
    case = linear_case(batch * length, width, data.draw(some.sampled_from([length, 7])))
    case["h"] = case["h"].view(batch, length, width)
    case["target"] = case["target"].view(batch, length)
    kept = case["target"][first:, skipped:-1].clone()

    def program(h: Tensor, w: Tensor, b: Tensor, target: Tensor) -> Tensor:
        logits = F.linear(h, w, b)[first:, skipped:-1]
        loss = F.cross_entropy(logits.flatten(0, 1), kept.flatten(), reduction="sum")
        assert not isinstance(h, st.ChunkedTensor) or st.explain(loss).startswith("linear + cross entropy")
        return loss

    check_chunked(program, case, {"h": {"rows": data.draw(some.integers(1, 3)), "dim": data.draw(some.integers(0, 1))}})


def test_logits_with_split_classes_are_not_matched_as_a_linear_layer() -> None:
    def program(h: Tensor, w: Tensor, b: Tensor, target: Tensor) -> Tensor:
        logits = F.linear(h, w, b).view(-1, 10)
        loss = F.cross_entropy(logits, target.repeat_interleave(2) % 10)
        assert not st.explain(loss).startswith("linear + cross entropy")
        return loss

    check_chunked(program, linear_case(), {"h": {"rows": 5}})


@pytest.mark.parametrize("head", ["function", "module", "product"])
def test_under_autocast_a_linear_layer_of_float32_states_runs_the_kernels(head: str) -> None:
    case = linear_case()
    module = torch.nn.Linear(6, 20)

    def program(h: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            if head == "module":
                logits = module(F.layer_norm(h, [6]) if not isinstance(h, st.ChunkedTensor) else h)
            else:
                logits = F.linear(h, module.weight) if head == "function" else h @ module.weight.t()
            return F.cross_entropy(logits.float(), case["target"])

    runs = []
    for chunked in (True, False):
        h = case["h"].clone().requires_grad_()
        normed = F.layer_norm(h, [6]) if head == "module" and chunked else h
        loss = program(st.chunk(normed, rows=5) if chunked else normed)
        if chunked:
            assert st.explain(loss).startswith("linear + cross entropy")
        runs.append([loss, *torch.autograd.grad(loss, [h, module.weight])])
    wide = [case["h"].double().requires_grad_(), module.weight.detach().double().requires_grad_()]
    states = F.layer_norm(wide[0], [6]) if head == "module" else wide[0]
    bias = module.bias.detach().double() if head == "module" else None
    true = F.cross_entropy(F.linear(states, wide[1], bias), case["target"])
    assert_errs_as_plain(*runs, [true, *torch.autograd.grad(true, wide)])


@pytest.mark.parametrize("rows", [5, 64])
def test_the_exact_gradient_of_a_float32_weight_under_autocast_is_not_rounded_on_the_way(rows: int) -> None:
    case = linear_case(64, 6, 50)
    h, target = case["h"].bfloat16(), case["target"]
    true = case["w"].bfloat16().double().requires_grad_()
    F.cross_entropy(h.double() @ true.t(), target).backward()
    errors = []
    for chunked in (True, False):
        w = case["w"].clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            logits = F.linear(st.chunk(h, rows=rows) if chunked else h, w)
            loss = F.cross_entropy(logits.float(), target)
        if chunked:
            assert st.explain(loss).startswith("linear + cross entropy")
        loss.backward()
        assert w.grad is not None
        assert true.grad is not None
        assert w.grad.dtype == torch.float32
        assert torch.equal(w.grad, w.grad.bfloat16().float()) != chunked
        errors.append(float((w.grad - true.grad).norm()))
    assert errors[0] <= errors[1]
