"""Programs of many kinds of ops on chunked values give the values and gradients that they give on plain tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from chunked_programs import Allocations, check_chunked, linear_case
from torch import Tensor

import subtensors as st
from subtensors.chunked import record_call


def softmax_of_rows(h: Tensor, w: Tensor, b: Tensor, target: Tensor) -> Tensor:
    return (F.linear(h, w, b).softmax(0) * torch.linspace(-1, 1, 20)).sum(1).pow(2).mean()


def spread(h: Tensor, w: Tensor, b: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    logits = F.linear(h, w, b)
    return logits.var(0), logits.std(0, correction=0), *torch.std_mean(logits, (0, 1)), logits.norm(dim=0)


def extremes(h: Tensor, w: Tensor, b: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    logits = F.linear(h, w, b)
    return logits.amax(0), logits.max(), logits.min(0).values, logits.argmax(0), logits.relu().amin((0, 1))


def merged(h: Tensor, w: Tensor, b: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    logits = F.linear(h, w, b)
    return logits.logsumexp(0), logits.sigmoid().prod(0), (logits > 3).any(0), (logits > -9).all(), logits.mean(0)


def picked(h: Tensor, w: Tensor, b: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    log_probs = F.linear(h, w, b).log_softmax(-1)
    rows = torch.arange(len(target))
    return (
        log_probs[rows, target],
        log_probs[rows.flip(0)[:3], target[:3]],
        log_probs[-1],
        log_probs[2:5].sum(0),
        log_probs.gather(1, target[:, None]),
        log_probs[:, 3],
        log_probs.index_select(0, rows[:2]),
        log_probs.index_select(0, rows[3]),
        log_probs[:, rows[:3, None]],
    )


def in_place(h: Tensor, w: Tensor, b: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    logits = F.linear(h, w, b)
    logits[:, 2] = -5.0
    logits.mul_(2)
    view = logits.t()[4:7]
    view.add_(1)
    logits[:, 8:10] += 3
    return logits.logsumexp(-1), view.sum(), logits.view(-1, 2, 10)[:, 0].sum(0)


def shared_parts(h: Tensor, w: Tensor, b: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    logits = F.linear(h, w, b)
    ce = F.cross_entropy(logits, target, reduction="none")
    z = logits.logsumexp(-1).square()
    return (ce + 1e-2 * z).mean() * 3 + w.sum(), ce.sum() / 7, ce.detach().exp() * ce


def laid_out(h: Tensor, w: Tensor, b: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    logits = F.linear(h, w, b)
    left, right = logits.chunk(2, dim=-1)
    both = torch.cat([right, left], 1)
    stacked = torch.stack([left, right], 1)
    return (
        both.cumsum(1).sum(),
        stacked.flip(2).softmax(1).sum((0, 2)),
        torch.where(logits > 0, logits, 0).tril(1).sum(0),
        logits.unflatten(1, (4, 5)).transpose(1, 2).reshape(len(target), 20).topk(3).values,
        logits.sort(dim=-1, descending=True).values[:, 0].mean(),
        F.pad(logits, (1, 2)).sum(0),
        logits.expand(2, -1, -1).sum(0).mean(),
        logits[None].squeeze().masked_fill(logits > 1, 0.0).mean(),
    )


def normalised(h: Tensor, w: Tensor, b: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    logits = F.linear(h, w, b)
    return (
        F.layer_norm(logits, (20,), b).square().sum(),
        F.rms_norm(logits, (20,), b).sum(0),
        F.group_norm(logits, 4, b).square().mean(),
        F.normalize(logits, dim=-1).mean(),
    )


def squared(h: Tensor, w: Tensor, b: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    features = F.linear(h, w, b).tanh()
    return features.t() @ features, (features @ features.t()).logsumexp(1).mean(), (features * features).sum()


def looked_up(h: Tensor, w: Tensor, b: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    best = F.linear(h, w, b).argmax(-1)
    return (
        F.embedding(best, w).sum(0),
        (best == target).float().mean(),
        w[best].mean(),
        F.one_hot(best, 20).sum(0),
        w[best, target[:1] % 6].sum(0),
        w.index_select(0, best).sum(0),
        w.t()[:, best].sum(1),
        w.take(best[:, None] * 6 + torch.arange(6)).sum(0),
        w.new_zeros(3) + best.new_ones(len(best), 2).sum(0)[0],
    )


def losses(h: Tensor, w: Tensor, b: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    out = F.linear(h, w, b)
    wanted = torch.linspace(0, 1, 20).to(out).expand_as(out)
    return (
        F.mse_loss(out, wanted),
        F.l1_loss(out, wanted, reduction="sum"),
        F.smooth_l1_loss(out, wanted),
        F.huber_loss(out, wanted),
        F.binary_cross_entropy_with_logits(out, wanted),
        F.kl_div(out.log_softmax(-1), wanted, reduction="batchmean"),
        F.cross_entropy(out, wanted),
    )


PROGRAMS = [softmax_of_rows, spread, extremes, merged, picked, in_place, shared_parts, laid_out, normalised, squared]
PROGRAMS += [looked_up, losses]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
@pytest.mark.parametrize("rows", [1, 5, 12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_programs_of_many_kinds_of_ops_are_right_in_value_and_gradient(
    program: Any, rows: int, dtype: torch.dtype
) -> None:
    # A softmax over the rows finds its statistics in a pass of its own.
    passes = 2 if program is softmax_of_rows else 1
    check_chunked(program, linear_case(), {"h": {"rows": rows}}, dtype=dtype, passes=passes)


def divergence(h: Tensor, w: Tensor, b: Tensor, target: Tensor) -> Tensor:
    return F.kl_div(F.linear(h, w, b).log_softmax(-1), WANTED.to(h), reduction="batchmean")


def angles(h: Tensor, w: Tensor, b: Tensor, target: Tensor) -> Tensor:
    return F.cosine_similarity(F.linear(h, w, b), WANTED.to(h), dim=-1).mean()


def of_known_spread(h: Tensor, w: Tensor, b: Tensor, target: Tensor) -> Tensor:
    return F.gaussian_nll_loss(F.linear(h, w), WANTED.to(h), F.softplus(F.linear(h, w, b)))


WANTED = torch.randn(12, 20, generator=torch.Generator().manual_seed(2)).softmax(-1)


@pytest.mark.parametrize("program", [divergence, angles, of_known_spread], ids=lambda p: p.__name__)
def test_ops_of_a_loss_on_its_targets_alone_run_by_rows(program: Any) -> None:
    check_chunked(program, linear_case(), {"h": {"rows": 5}})
    record_call.fallbacks.clear()
    h, w, b = (torch.randn(sizes, requires_grad=True) for sizes in ((12, 6), (20, 6), (20,)))
    with Allocations() as seen:
        program(st.chunk(h, rows=1), w, b, None).backward()
    assert seen.largest < 12 * 20
    assert not record_call.fallbacks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_of_extremes_are_shared_by_ties_across_chunks_under_a_memory_limit(dtype: torch.dtype) -> None:
    def program(h: Tensor, w: Tensor, b: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        logits = F.linear(h, w, b)
        return logits.amax(0), logits.max(0).values, logits.softmax(0).amin(0)

    check_chunked(program, linear_case(), {"h": {"memory_limit": 8192}}, dtype=dtype, passes=3)
