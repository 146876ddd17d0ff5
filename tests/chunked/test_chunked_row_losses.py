"""Cross entropy of rows as an op of the region: any reduction, weights, targets and source of the logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from chunked_programs import allocations, check_chunked, check_results, linear_case
from hypothesis import given
from hypothesis import strategies as some
from programs import Lowering, each_kernel_lowering
from torch import Tensor

import subtensors as st
from subtensors.kernels.cross_entropy import logits_block
from subtensors.kernels.cross_entropy.cross_entropy import CrossEntropy
from subtensors.kernels.cross_entropy.row_cross_entropy import row_cross_entropy


def as_it_is(h: Tensor, w: Tensor) -> Tensor:
    return h


def computed(h: Tensor, w: Tensor) -> Tensor:
    return F.gelu(h @ w[:6])


SQUASHES: list[Any] = [
    lambda x: x,
    lambda x: x / 0.7,
    lambda x: 5 * torch.tanh(x / 5),
    lambda x: x.float().reshape(3, -1, x.shape[-1]).flatten(0, 1) if x.dtype != torch.float64 else x,
    lambda x: (x + 1) * 0.5,
]


@given(
    some.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    some.sampled_from([as_it_is, computed]),
    some.sampled_from(SQUASHES),
    some.sampled_from(["none", "mean", "sum"]),
    some.sampled_from(["hard", "ignored", "soft", "chunked"]),
    some.booleans(),
    some.sampled_from([0.0, 0.1]),
    some.sampled_from([4, 5, 12]),
)
def test_a_cross_entropy_with_any_options_equals_the_plain_one(
    dtype: torch.dtype,
    hidden: Any,
    squash: Any,
    reduction: str,
    kind: str,
    weighed: bool,
    smoothing: float,
    rows: int,
) -> None:
    case = linear_case()
    class_weight = torch.linspace(0.5, 2, 20) if weighed else None
    token_weight = torch.linspace(-1, 2, 12)
    if kind == "soft":
        case["target"] = (case.pop("b")[:, None] * torch.linspace(0.1, 1, 12)).t().softmax(1)
    elif kind == "ignored":
        case["target"][::3] = -100

    def program(h: Tensor, w: Tensor, target: Tensor, b: Tensor | None = None) -> Tensor:
        logits = squash(F.linear(hidden(h, w), w, b))
        classes = None if class_weight is None else class_weight.to(logits.dtype)
        loss = F.cross_entropy(logits, target, classes, reduction=reduction, label_smoothing=smoothing)
        if reduction != "none":
            return loss
        assert isinstance(loss, st.ChunkedTensor) == isinstance(h, st.ChunkedTensor)
        assert "cross_entropy" in st.explain(loss) or not isinstance(loss, st.ChunkedTensor)
        return (loss * token_weight.to(loss.dtype)).sum() / 7

    chunks: dict[str, dict[str, Any]] = {"h": {"rows": rows}}
    if kind == "chunked":
        chunks["target"] = {"rows": rows}
    check_chunked(program, case, chunks, dtype=dtype, needs={"h", "w", "b"} & set(case), passes=2)


def z_loss(h: Tensor, w: Tensor, target: Tensor) -> Tensor:
    logits = 5 * torch.tanh(F.linear(h, w) / 5)
    ce = F.cross_entropy(logits.flatten(0, -2), target.flatten(), reduction="none")
    return (ce + 1e-2 * logits.logsumexp(-1).flatten() ** 2).mean()


def log_probabilities(h: Tensor, w: Tensor, target: Tensor) -> Tensor:
    scores = F.log_softmax(F.linear(h, w) / 0.7, -1, dtype=torch.float32 if h.dtype != torch.float64 else None)
    kept = torch.gather(scores, -1, target[..., None]).squeeze(-1)
    return (kept * torch.linspace(-1, 2, kept.shape[-1])).sum(-1)


def nll(h: Tensor, w: Tensor, target: Tensor) -> Tensor:
    return F.nll_loss(F.linear(h, w).flatten(0, -2).log_softmax(-1), target.flatten(), ignore_index=3)


def nll_a_row(h: Tensor, w: Tensor, target: Tensor) -> Tensor:
    return F.nll_loss(F.linear(h, w).flatten(0, -2).log_softmax(-1), target.flatten(), reduction="none") ** 2


OPS = {z_loss: "row_statistics", log_probabilities: "row_statistics", nll: "linear + cross", nll_a_row: "cross_entropy"}


@pytest.mark.parametrize("program", OPS)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_log_sum_exps_and_log_probabilities_of_rows_run_kernels(program: Any, dim: int, dtype: torch.dtype) -> None:
    case = linear_case(24)
    del case["b"]
    case |= {"h": case["h"].view(4, 6, 6), "target": case["target"].view(4, 6)}

    def told(h: Tensor, w: Tensor, target: Tensor) -> Tensor:
        out: Tensor = program(h, w, target)
        assert not isinstance(h, st.ChunkedTensor) or OPS[program] in st.explain(out)
        return out

    check_chunked(told, case, {"h": {"rows": 3, "dim": dim}}, dtype=dtype, passes=2)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("whole", [False, True])
def test_the_log_sum_exp_of_infinite_logits_is_torch_s(value: float, whole: bool) -> None:
    x = torch.randn(4, 5)
    x[1, slice(None) if whole else slice(2, 3)] = value
    results = []
    for chunked in (True, False):
        leaf = x.clone().requires_grad_()
        sums = torch.logsumexp(st.chunk(leaf, rows=3) if chunked else leaf, -1)
        sums = sums.realize() if isinstance(sums, st.ChunkedTensor) else sums
        sums.sum().backward()
        results.append((sums.detach(), leaf.grad))
    for a, e in zip(*results, strict=True):
        torch.testing.assert_close(a, e, equal_nan=True)


def test_losses_of_rows_take_any_upstream_gradient_and_a_second_backward() -> None:
    case = linear_case()
    h, w = case["h"].requires_grad_(), case["w"].requires_grad_()
    losses = F.cross_entropy(F.linear(st.chunk(h, rows=5), w), case["target"], reduction="none")
    assert isinstance(losses, st.ChunkedTensor)
    whole = losses.realize()
    plain = F.cross_entropy(F.linear(h, w), case["target"], reduction="none")
    for upstream in (torch.randn(12), torch.zeros(12), torch.randn(12)):
        mine = torch.autograd.grad(whole, [h, w], upstream, retain_graph=True)
        expected = torch.autograd.grad(plain, [h, w], upstream, retain_graph=True)
        for a, e in zip(mine, expected, strict=True):
            torch.testing.assert_close(a, e)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_losses_of_rows_equal_the_plain_ones_in_every_mode(mode: Any) -> None:
    case = linear_case()
    h, w, target = case["h"], case["w"], case["target"]
    with mode():
        logits = F.linear(st.chunk(h, rows=5), w)
        plain = F.linear(h, w)
        scores = logits.log_softmax(-1)
        for mine, theirs in (
            (F.cross_entropy(logits, target, reduction="none"), F.cross_entropy(plain, target, reduction="none")),
            (logits.logsumexp(-1), plain.logsumexp(-1)),
            (logits.logsumexp(-1, keepdim=True), plain.logsumexp(-1, keepdim=True)),
            (scores.gather(dim=-1, index=target[:, None]), plain.log_softmax(-1).gather(-1, target[:, None])),
            (
                scores.gather(-1, target[:, None].expand(-1, 3)),
                plain.log_softmax(-1).gather(-1, target[:, None].expand(-1, 3)),
            ),
            (F.nll_loss(scores, target, reduction="sum"), F.nll_loss(plain.log_softmax(-1), target, reduction="sum")),
        ):
            torch.testing.assert_close(mine.realize() if isinstance(mine, st.ChunkedTensor) else mine, theirs)
    out = torch.empty(12)
    torch.logsumexp(F.linear(st.chunk(h, rows=5), w), -1, out=out)
    torch.testing.assert_close(out, F.linear(h, w).logsumexp(-1))


def test_weighted_losses_hold_one_chunk_of_logits_in_their_own_dtype() -> None:
    case = linear_case(64, 4, 96)
    h, w = case["h"].bfloat16().requires_grad_(), case["w"].bfloat16().requires_grad_()
    mask = (torch.arange(64) % 3 > 0).float()
    with allocations() as seen:
        losses = F.cross_entropy(F.linear(st.chunk(h, rows=8), w).float(), case["target"], reduction="none")
        loss = (losses * mask).sum() / mask.sum()
        assert "_to_copy" not in st.explain(loss)
        loss.backward()
    assert seen.largest <= 8 * 96


def test_soft_targets_run_the_linear_kernels_unless_they_require_grad() -> None:
    case = linear_case()
    h, w = case["h"].requires_grad_(), case["w"].requires_grad_()
    soft = torch.randn(12, 20).softmax(1).requires_grad_()
    loss = F.cross_entropy(F.linear(st.chunk(h, rows=5), w), soft.detach())
    assert st.explain(loss).startswith("linear + cross entropy")
    flowing = F.cross_entropy(F.linear(st.chunk(h, rows=5), w), soft)
    plain = F.cross_entropy(F.linear(h, w), soft)
    mine, expected = (torch.autograd.grad(x, [h, w, soft]) for x in (flowing, plain))
    for a, e in zip(mine, expected, strict=True):
        torch.testing.assert_close(a, e)


def test_logits_widened_to_float64_are_computed_in_float64() -> None:
    case = linear_case()
    h = st.chunk(case["h"], rows=5)
    for reduction in ("mean", "none"):
        loss = F.cross_entropy(F.linear(h, case["w"]).double(), case["target"], reduction=reduction)
        loss = loss.realize() if isinstance(loss, st.ChunkedTensor) else loss

        def plain(t: dict[str, Tensor], reduction: str = reduction) -> list[Tensor]:
            return [F.cross_entropy(F.linear(t["h"], t["w"]).double(), t["target"], reduction=reduction)]

        assert loss.dtype == torch.float64
        check_results([loss], plain, case)


def test_an_invalid_target_is_torchs_own_error() -> None:
    case = linear_case()
    case["target"][7] = 20
    losses = F.cross_entropy(F.linear(st.chunk(case["h"], rows=5), case["w"]), case["target"], reduction="none")
    assert isinstance(losses, st.ChunkedTensor)
    with pytest.raises(IndexError, match="Target 20 is out of bounds"):
        losses.realize()


@each_kernel_lowering
@given(data=some.data())
def test_the_row_kernels_err_no_more_than_plain_torch(lowering: Lowering, data: some.DataObject) -> None:
    rows, columns = data.draw(some.tuples(some.integers(1, 6), some.integers(2, 300)))
    generator = torch.Generator().manual_seed(data.draw(some.integers(0, 99)))
    values = torch.randn(rows, columns, generator=generator) * data.draw(some.sampled_from([1.0, 20.0]))
    for value in data.draw(some.lists(some.sampled_from([torch.inf, -torch.inf, torch.nan]), max_size=1)):
        values[data.draw(some.integers(0, rows - 1)), data.draw(some.integers(0, columns - 1))] = value
    target = torch.randint(columns, (rows,), generator=generator)
    target[0] = data.draw(some.sampled_from([-100, 0]))
    smoothing, upstream = data.draw(some.sampled_from([0.0, 0.1])), torch.randn(rows, generator=generator)
    values, target, upstream = (t.to(lowering.device) for t in (values, target, upstream))

    def plain(x: Tensor) -> Tensor:
        return F.cross_entropy(x, target, label_smoothing=smoothing, reduction="none")

    runs = []
    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
        patch.setattr(logits_block, "uses_kernels", lambda *_: True)
        ways = (
            (lambda x: row_cross_entropy(x, target, CrossEntropy(label_smoothing=smoothing)), values),
            (plain, values),
            (plain, values.double()),
        )
        for way, given_values in ways:
            x = given_values.clone().requires_grad_()
            losses = way(x)
            losses.backward(upstream.to(losses.dtype))
            runs.append((losses.detach(), x.grad))
    for mine, theirs, truth in zip(*runs, strict=True):
        finite = truth.isfinite()
        torch.testing.assert_close(mine[~finite].double(), truth[~finite], equal_nan=True)
        error, allowed = ((t.double() - truth)[finite].abs().amax() if finite.any() else 0 for t in (mine, theirs))
        size = float(truth[finite].abs().amax()) if finite.any() else 0.0
        assert error <= 1.5 * allowed + 8 * 2**-24 * max(size, float(values[values.isfinite()].abs().max()))
