"""ChunkedTensor: programs give the values and gradients of plain tensors, and never materialize all rows."""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from chunked_programs import allocations, check_chunked, check_results, linear_case
from hypothesis import given
from hypothesis import strategies as some
from torch import Tensor

import subtensors as st
from subtensors.chunked.record_call import fallbacks
from subtensors.dispatch.chunked.row_layout import ChunkAxis, Policy, RowLayout


def cross_entropy(h: Tensor, w: Tensor, b: Tensor, target: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(F.linear(h, w, b), target, **options)


options = some.fixed_dictionaries(
    {
        "reduction": some.sampled_from(["mean", "sum", "none"]),
        "label_smoothing": some.sampled_from([0.0, 0.1]),
        "ignore_index": some.sampled_from([-100, 3]),
    }
)
divisions = some.one_of(
    some.fixed_dictionaries({"chunks": some.integers(1, 9)}),
    some.fixed_dictionaries({"rows": some.integers(1, 9)}),
    some.fixed_dictionaries({"memory_limit": some.sampled_from(["20KB", "64KiB", 10**5])}),
    some.just({}),
)
needed = some.sets(some.sampled_from(["h", "w", "b"]))
dtypes = some.sampled_from([torch.float32, torch.bfloat16])


@given(options, divisions, needed, dtypes, some.integers(1, 9), some.booleans())
def test_cross_entropy_of_chunked_hidden_states_equals_the_plain_one(
    options: dict[str, Any], division: dict[str, Any], needs: set[str], dtype: torch.dtype, rows: int, weighted: bool
) -> None:
    given_tensors = linear_case(rows)

    def program(h: Tensor, w: Tensor, b: Tensor, target: Tensor) -> Tensor:
        weight = torch.linspace(0.5, 2, 20).to(h.dtype) if weighted else None
        return cross_entropy(h, w, b, target, weight=weight, **options)

    check_chunked(program, given_tensors, {"h": division}, dtype=dtype, needs=needs)


@given(some.sampled_from([0, 1]), divisions, some.integers(1, 4), some.integers(1, 5), some.booleans(), dtypes)
def test_batch_and_sequence_are_chunked_along_either_without_reshaping(
    dim: int, division: dict[str, Any], batch: int, length: int, shift: bool, dtype: torch.dtype
) -> None:
    given_tensors = linear_case(batch * length)
    given_tensors["h"] = given_tensors["h"].view(batch, length, -1)
    given_tensors["target"] = given_tensors["target"].view(batch, length)

    def program(h: Tensor, w: Tensor, b: Tensor, target: Tensor) -> Tensor:
        logits = F.linear(h, w, b)
        if shift and length > 1:
            logits, target = logits[:, :-1].contiguous(), target[:, 1:]
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), target.reshape(-1))

    check_chunked(program, given_tensors, {"h": {"dim": dim, **division}}, dtype=dtype)


def with_z_loss(h: Tensor, w: Tensor, b: Tensor, target: Tensor) -> Tensor:
    logits = F.linear(h, w, b)
    return (F.cross_entropy(logits, target, reduction="none") + 1e-2 * logits.logsumexp(-1).square()).mean() * 3


def test_logits_never_exist_in_full_forward_or_backward() -> None:
    rows, hidden, vocab = 64, 4, 96
    given_tensors = linear_case(rows, hidden, vocab)
    leaves = {n: t.requires_grad_(t.is_floating_point()) for n, t in given_tensors.items()}
    programs = [cross_entropy, with_z_loss, lambda **t: cross_entropy(**t, reduction="none").realize().exp().sum()]
    for program in programs:
        with allocations() as seen:
            h = st.chunk(leaves["h"], rows=8)
            out = program(**{**leaves, "h": h})
            torch.autograd.backward(
                [o.sum() if isinstance(o, st.ChunkedTensor) else o for o in (out if isinstance(out, tuple) else (out,))]
            )
        # A chunk of logits, or the gradient of the weight.
        assert seen.largest == max(8 * vocab, vocab * hidden)


def test_an_op_without_a_rule_materializes_its_operands_and_logs_it_once(caplog: pytest.LogCaptureFixture) -> None:
    fallbacks.clear()
    given_tensors = linear_case()

    def program(h: Tensor, w: Tensor, b: Tensor, target: Tensor) -> Tensor:
        return torch.linalg.svdvals(F.linear(h, w, b)).sum()

    with caplog.at_level(logging.WARNING, "subtensors"):
        check_chunked(program, given_tensors, {"h": {"rows": 5}}, dtype=torch.float32)
        check_chunked(program, given_tensors, {"h": {"rows": 5}}, dtype=torch.float32)
    assert [r.name for r in caplog.records] == ["subtensors.chunked"]
    assert "_linalg_svd" in caplog.text
    assert sum(fallbacks.values()) == 2


def test_the_loss_is_a_scalar_and_what_has_rows_stays_chunked() -> None:
    t = linear_case()
    h = st.chunk(t["h"].requires_grad_(), chunks=4)
    logits = h @ t["w"].t()
    assert type(logits) is st.ChunkedTensor
    assert logits.shape == (12, 20)
    assert logits.requires_grad
    loss = F.cross_entropy(logits, t["target"])
    assert loss.requires_grad
    assert loss.shape == ()
    assert type(loss.detach().realize()) is Tensor  # type: ignore[attr-defined]
    with torch.no_grad():
        plain = F.cross_entropy(logits, t["target"])
        assert type(plain.realize()) is Tensor  # type: ignore[attr-defined]
        assert not plain.requires_grad
        assert not (h @ t["w"].t()).requires_grad


def test_a_frozen_head_gets_no_gradient_and_costs_none() -> None:
    rows, hidden, vocab = 64, 4, 4096
    t = linear_case(rows, hidden, vocab)
    h = t["h"].requires_grad_()
    with allocations() as seen:
        cross_entropy(st.chunk(h, rows=1), t["w"], t["b"], t["target"]).backward()
    assert seen.largest == vocab
    assert t["w"].grad is None
    assert h.grad is not None


def test_a_second_backward_gives_the_same_gradients_again() -> None:
    t = linear_case()
    leaves = [t[n].requires_grad_() for n in ("h", "w", "b")]
    loss = cross_entropy(st.chunk(t["h"], rows=5), t["w"], t["b"], t["target"])
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    kept = [g.clone() for g in first]
    second = torch.autograd.grad(3 * loss, leaves, retain_graph=True)
    for a, b, c in zip(first, kept, second, strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(c, 3 * b)


def test_a_second_derivative_is_refused_where_it_is_asked_for() -> None:
    t = linear_case()
    w = t["w"].requires_grad_()
    (grad,) = torch.autograd.grad((st.chunk(t["h"], rows=5) @ w.t()).exp().mean(), w, create_graph=True)
    with pytest.raises(st.RuleError, match="differentiated twice"):
        grad.sum().backward()
    loss = cross_entropy(st.chunk(t["h"], rows=5), w, t["b"], t["target"])
    with pytest.raises(NotImplementedError, match="cannot be differentiated again"):
        torch.autograd.grad(loss, w, create_graph=True)


def test_gradients_accumulate_over_several_losses_and_steps() -> None:
    t = linear_case()
    plain, chunked = copy.deepcopy(t), copy.deepcopy(t)
    for leaves in (plain, chunked):
        leaves["w"].requires_grad_()
        for scale in (0.5, 2.0, 1e-3):
            h = leaves["h"] if leaves is plain else st.chunk(leaves["h"], rows=5)
            (cross_entropy(h, leaves["w"], leaves["b"], leaves["target"]) * scale).backward()
    torch.testing.assert_close(chunked["w"].grad, plain["w"].grad)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_recomputes_a_region(reentrant: bool) -> None:
    t = linear_case()

    def block(h: Tensor, chunked: bool) -> Tensor:
        hidden = torch.tanh(h * 2)
        return cross_entropy(st.chunk(hidden, rows=5) if chunked else hidden, t["w"], t["b"], t["target"])

    grads = []
    t["w"].requires_grad_()
    for chunked in (False, True):
        h = t["h"].clone().requires_grad_()
        loss = torch.utils.checkpoint.checkpoint(block, h, chunked, use_reentrant=reentrant)
        grads.append(torch.autograd.grad(loss, [h, t["w"]]) if not reentrant else _backward(loss, [h, t["w"]]))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


def _backward(loss: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    for leaf in leaves:
        leaf.grad = None
    loss.backward()
    return [leaf.grad.clone() for leaf in leaves]  # type: ignore[union-attr]


def test_inference_mode_and_no_grad_give_the_same_values() -> None:
    t = linear_case()
    expected = cross_entropy(t["h"], t["w"], t["b"], t["target"])
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            torch.testing.assert_close(cross_entropy(st.chunk(t["h"], rows=5), t["w"], t["b"], t["target"]), expected)


def test_values_recorded_under_no_grad_have_no_gradient() -> None:
    def program(h: Tensor, w: Tensor, b: Tensor, target: Tensor) -> Tensor:
        logits = F.linear(h, w, b)
        with torch.no_grad():
            log_sum = logits.logsumexp(-1, keepdim=True)
        return (logits - log_sum).square().mean() + (logits.detach() * logits).mean()

    check_chunked(program, linear_case(), {"h": {"rows": 5}})


def test_autocast_casts_as_without_chunks_and_gradients_reach_float32_weights() -> None:
    def results(t: dict[str, Tensor], chunked: bool = False) -> list[Any]:
        with torch.autocast("cpu", torch.bfloat16, enabled=t["h"].dtype == torch.float32):
            h = st.chunk(t["h"], rows=5) if chunked else t["h"]
            logits = F.linear(h, t["w"], t["b"])
            assert logits.dtype in (torch.bfloat16, torch.float64)
            loss = F.cross_entropy(logits, t["target"])
        loss.backward()
        return [loss.detach(), *(t[n].grad for n in ("h", "w", "b"))]

    t = {n: x.requires_grad_(x.is_floating_point()) for n, x in linear_case().items()}
    check_results(results(t, chunked=True), results, t)


def test_several_chunked_tensors_share_a_region_or_one_of_them_is_replicated() -> None:
    def program(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
        similarity = image @ text.t() * scale.exp()
        labels = torch.arange(len(image))
        return (F.cross_entropy(similarity, labels) + F.cross_entropy(similarity.t(), labels)) / 2

    g = torch.Generator().manual_seed(0)
    values = {"image": torch.randn(9, 4, generator=g), "text": torch.randn(9, 4, generator=g), "scale": torch.ones(())}
    for chunks in ({"image": {"rows": 4}, "text": {"rows": 2}}, {"text": {"rows": 4}}, {"image": {"chunks": 9}}):
        check_chunked(program, values, chunks)

    def joined(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
        return (image.softmax(-1) * text * scale).sum()

    for chunks in (
        {"image": {"rows": 4}, "text": {"rows": 2}},
        {"image": {"dim": 1, "rows": 3}, "text": {"rows": 2}},
    ):
        check_chunked(joined, values, chunks)


@pytest.mark.parametrize("chunks", [2, 64, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_exact_weight_gradients_err_no_more_than_an_unchunked_run_at_any_chunk_count(
    chunks: int, dtype: torch.dtype
) -> None:
    t = linear_case(256, 32, 64)
    rounded = {n: x.to(dtype) if x.is_floating_point() else x for n, x in t.items()}
    grads = {}
    for name in ("truth", "plain", "exact", "fast"):
        leaves = {n: x.double() if name == "truth" and x.is_floating_point() else x for n, x in rounded.items()}
        w = leaves["w"].clone().requires_grad_()
        h = leaves["h"]
        if name in ("exact", "fast"):
            h = st.chunk(h, chunks=chunks, accumulate=name)  # type: ignore[arg-type]
        cross_entropy(h, w, leaves["b"], leaves["target"], reduction="sum").backward()
        grads[name] = w.grad.double()  # type: ignore[union-attr]
    err = {n: float((g - grads["truth"]).norm()) for n, g in grads.items()}
    assert err["exact"] <= 1.2 * err["plain"]
    if dtype == torch.bfloat16 and chunks >= 64:
        assert err["fast"] > 1.5 * err["plain"]


def test_writing_to_a_tensor_that_was_recorded_is_refused() -> None:
    t = linear_case()
    logits = st.chunk(t["h"], rows=5) @ t["w"].t()
    t["w"].mul_(2)
    with pytest.raises(st.RuleError, match="modified in place"):
        logits.sum().item()


def test_in_place_ops_change_the_chunked_value_and_not_the_tensor_that_was_chunked() -> None:
    x = torch.arange(6.0)
    h = st.chunk(x, rows=2)
    h.mul_(2)
    h.sort(descending=True)
    assert h.realize().tolist() == [0, 2, 4, 6, 8, 10]
    h.cumsum_(0)
    assert h.realize().tolist() == [0, 2, 6, 12, 20, 30]
    assert x.tolist() == [0, 1, 2, 3, 4, 5]


def test_nan_and_infinite_logits_and_ignored_targets_give_what_plain_torch_gives() -> None:
    t = linear_case()
    bad = t["h"].clone()
    bad[3] = float("inf")
    bad[7] = float("nan")
    for h, target in ((bad, t["target"]), (t["h"], torch.full((12,), -100)), (bad, torch.full((12,), -100))):
        runs = []
        for chunked in (False, True):
            x, w = h.clone().requires_grad_(), t["w"].clone().requires_grad_()
            loss = cross_entropy(st.chunk(x, rows=5) if chunked else x, w, t["b"], target)
            runs.append([loss.detach(), *torch.autograd.grad(loss, [x, w])])
        for expected, found in zip(*runs, strict=True):
            torch.testing.assert_close(found, expected, equal_nan=True)


def test_a_target_out_of_range_is_the_same_error_as_without_chunks() -> None:
    t = linear_case()
    t["target"][5] = 20
    with pytest.raises(IndexError, match="Target 20 is out of bounds"):
        cross_entropy(st.chunk(t["h"], rows=5), t["w"], t["b"], t["target"]).item()
    with pytest.raises(IndexError, match="index 12 is out of bounds for dimension 0 with size 12"):
        (st.chunk(t["h"], rows=5) @ t["w"].t())[torch.arange(12) + 1, torch.arange(12)].sum().item()


def test_wrong_sizes_are_the_same_error_as_without_chunks() -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        st.chunk(torch.ones(4, 3), rows=2) @ torch.ones(4, 2)


def test_a_reshape_keeps_the_dim_that_holds_the_rows() -> None:
    middle = RowLayout(ChunkAxis(1, Policy()), 1, 1).reshaped((2, 1, 3), (2, 3))
    assert middle is not None
    assert (middle.dim, middle.runs, middle.unit) == (0, 2, 1)
    back = RowLayout(ChunkAxis(5, Policy()), 0, 5, runs=4).reshaped((20, 6), (4, 5, 6))
    assert back is not None
    assert (back.dim, back.runs, back.group) == (1, 1, 1)


def test_numbers_text_and_copies_match_the_values() -> None:
    h = st.chunk(torch.arange(4.0), rows=3)
    assert h.tolist() == [0, 1, 2, 3]
    assert h.sum().item() == 6
    assert h.numpy().sum() == 6
    assert [float(x) for x in h] == [0, 1, 2, 3]
    assert type(copy.deepcopy(h)) is Tensor
    assert f"{h.exp()}" == repr(h.exp()) == "ChunkedTensor((4,), float32, cpu, rows in dim 0, 1 op recorded)"


def test_chunks_without_any_of_the_reduced_rows_have_no_part() -> None:
    def program(h: Tensor) -> tuple[Tensor, ...]:
        return h[:2].amax(0), h[3:].logsumexp(0), h[2:4].softmax(0)[0], h[4:].max(0).indices, h[1:2].norm(dim=0)

    check_chunked(program, {"h": torch.randn(6, 3)}, {"h": {"rows": 1}}, passes=2)


def test_a_row_of_a_chunked_tensor_is_a_view_that_can_be_written_through() -> None:
    h = st.chunk(torch.arange(12.0).view(6, 2), rows=2) * 1
    row, rows = h[3], h[:2]
    row.mul_(10)
    rows[1] = -1.0
    assert row.realize().tolist() == [60, 70]
    assert h.realize().flatten().tolist() == [0, 1, -1, -1, 4, 5, 60, 70, 8, 9, 10, 11]


def test_chunks_begin_at_multiples_of_a_group_also_after_axes_are_merged() -> None:
    a, b = ChunkAxis(12, Policy(chunks=2)), ChunkAxis(12, Policy(rows=5))
    a.merge(b)
    assert b.spans(lambda limit: 0) == [(0, 5), (5, 10), (10, 12)]
    a.coarsen(4)
    assert b.spans(lambda limit: 0) == [(0, 4), (4, 8), (8, 12)]
    assert ChunkAxis(3, Policy(chunks=8)).spans(lambda limit: 0) == [(0, 1), (1, 2), (2, 3)]


def per_token(h: Tensor, w: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(h @ w.t(), target, reduction="none").realize()  # type: ignore[attr-defined]


def in_bfloat16(h: Tensor, w: Tensor, target: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return F.cross_entropy(F.linear(h, w).float(), target)


def squared(h: Tensor, w: Tensor, target: Tensor) -> Tensor:
    return F.linear(h, w).log_softmax(-1).gather(1, target[:, None]).square().mean()


@pytest.mark.parametrize("program", [per_token, in_bfloat16, squared], ids=lambda p: p.__name__)
def test_inputs_of_a_region_are_freed_after_its_backward_even_if_the_loss_is_kept(program: Any) -> None:
    program(
        st.chunk(torch.ones(12, 6, requires_grad=True), rows=5), torch.ones(20, 6), torch.arange(12)
    ).sum().backward()
    h, w = torch.randn(12, 6, requires_grad=True).sin(), torch.randn(20, 6, requires_grad=True).cos()
    watched = weakref.ref(h), weakref.ref(w)
    gc.disable()  # after the first call, whose imports leave cycles
    try:
        loss = program(st.chunk(h, rows=5), w, torch.arange(12))
        loss.sum().backward()
        del h, w
        assert [x() for x in watched] == [None, None]
        assert loss.grad_fn is not None
    finally:
        gc.enable()
