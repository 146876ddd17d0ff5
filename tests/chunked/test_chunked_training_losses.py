"""Losses of policies, preferences, teachers and several heads on chunked rows, beside those on plain rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import subtensors as st

ROWS, CLASSES, WIDTH = 12, 20, 6


@dataclass
class Case:
    """Hidden states and heads, each with a gradient, targets, advantages, older log-probabilities and a mask."""

    chunk: Callable[[Tensor], Tensor]

    def __post_init__(self) -> None:
        g = torch.Generator().manual_seed(0)

        def drawn(*sizes: int) -> Tensor:
            return torch.randn(*sizes, generator=g, dtype=torch.float64)

        self.h, self.w, self.teacher = (drawn(n, WIDTH).requires_grad_() for n in (ROWS, CLASSES, CLASSES))
        self.value = drawn(1, WIDTH).requires_grad_()
        self.t = torch.randint(0, CLASSES, (ROWS,), generator=g)
        self.advantage, self.old = drawn(ROWS), drawn(ROWS) - 3
        self.mask = torch.rand(ROWS, generator=g) > 0.3
        self.x = self.chunk(self.h)

    def logits(self) -> Tensor:
        """The logits of the rows."""
        return F.linear(self.x, self.w)

    def chosen(self, head: Tensor) -> Tensor:
        """The log-probabilities of the targets."""
        return F.linear(self.x, head).log_softmax(-1).gather(-1, self.t[:, None])[:, 0]


def clipped_policy_with_entropy_and_values(c: Case) -> Tensor:
    log_p = c.logits().log_softmax(-1)
    ratio = (log_p.gather(-1, c.t[:, None])[:, 0] - c.old).exp()
    gain = torch.min(ratio * c.advantage, ratio.clamp(0.8, 1.2) * c.advantage)
    entropy = -(log_p.exp() * log_p).sum(-1)
    value = F.linear(c.x, c.value)[:, 0]
    clipped = (c.old + (value - c.old).clamp(-0.2, 0.2) - c.advantage).square()
    fit = torch.max((value - c.advantage).square(), clipped).mean()
    return fit - ((gain + 0.01 * entropy) * c.mask).sum() / c.mask.sum()


def group_relative_policy(c: Case) -> Tensor:
    own = c.chosen(c.w)
    with torch.no_grad():
        reference = c.chosen(c.teacher)
    ratio = (own - own.detach()).exp()
    gain = torch.min(ratio * c.advantage, ratio.clamp(0.8, 1.2) * c.advantage)
    divergence = (reference - own).exp() - (reference - own) - 1
    mask = c.mask.view(3, 4)
    return -(((gain - 0.04 * divergence).view(3, 4) * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()


def preferences(c: Case) -> Tensor:
    own = (c.chosen(c.w) * c.mask).view(4, 3).sum(1)
    with torch.no_grad():
        reference = (c.chosen(c.teacher) * c.mask).view(4, 3).sum(1)
    gap = own - reference
    return -F.logsigmoid(0.1 * (gap[:2] - gap[2:])).mean() + (gap - gap.mean().clamp(min=0).detach()).sigmoid().mean()


def odds_of_preferences(c: Case) -> Tensor:
    mean = c.chosen(c.w).view(4, 3).mean(1)
    odds = mean - torch.log1p(-mean.exp())
    return -mean[:2].mean() - 0.1 * F.logsigmoid(odds[:2] - odds[2:]).mean()


def actor_and_critic_with_a_learned_temperature(c: Case) -> Tensor:
    z, q, alpha = c.logits(), F.linear(c.x, c.teacher), c.value.exp().mean()
    p, log_p = z.softmax(-1), z.log_softmax(-1)
    actor = (p * (alpha.detach() * log_p - q.detach())).sum(-1).mean()
    soft = (p.detach() * (q - alpha.detach() * log_p.detach())).sum(-1)
    return actor + (soft - c.advantage).square().mean() - (alpha * ((p * log_p).sum(-1).detach() + 0.5)).mean()


def double_q_learning(c: Case) -> Tensor:
    chosen = c.logits().gather(-1, c.t[:, None])[:, 0]
    with torch.no_grad():
        following = c.chunk(c.h.roll(-1, 0))
        best = F.linear(following, c.w).argmax(-1, keepdim=True)
        target = F.linear(following, c.teacher).gather(-1, best)[:, 0]
    return F.smooth_l1_loss(chosen, c.advantage + 0.9 * target * c.mask)


def distillation(c: Case) -> Tensor:
    z, q = c.logits(), F.linear(c.x, c.teacher)
    forward = F.kl_div((z / 2).log_softmax(-1), (q.detach() / 2).log_softmax(-1), log_target=True, reduction="sum")
    log_p, log_q = z.log_softmax(-1), q.log_softmax(-1)
    return forward + (log_p.exp() * (log_p - log_q)).sum(-1).mean() + F.cross_entropy(z, c.t)


def smoothing_and_z_loss(c: Case) -> Tensor:
    z, target = c.logits(), torch.where(c.mask, c.t, -100)
    total = (z.logsumexp(-1).square() * c.mask).sum() / c.mask.sum()
    return F.cross_entropy(z, target, label_smoothing=0.1) + 1e-2 * total - z.log_softmax(-1).mean(-1).mean()


def several_heads_and_later_tokens(c: Case) -> Tensor:
    a, b = c.logits(), F.linear(c.x.tanh(), c.teacher)
    later = F.cross_entropy(a[:-1], c.t[1:]) + 0.3 * F.cross_entropy(a[:-2], c.t[2:])
    return F.cross_entropy(a, c.t) + 0.5 * F.cross_entropy(b, c.t) + 0.1 * F.cross_entropy(a + b, c.t) + later


def learned_weights_of_losses(c: Case) -> Tensor:
    z, s = c.logits(), c.value[0]
    losses = F.cross_entropy(z, c.t), z.logsumexp(-1).mean(), z.square().mean()
    weighted = sum((-s[k]).exp() * loss + s[k] for k, loss in enumerate(losses))
    return weighted + torch.stack(losses).softmax(0)[0] + losses[0] / losses[1].detach()


def gradients_that_weigh_losses(c: Case) -> Tensor:
    z = c.logits()
    loss, total = F.cross_entropy(z, c.t), z.logsumexp(-1).mean()
    a, b = (torch.autograd.grad(x, c.w, retain_graph=True)[0].norm() for x in (loss, total))
    return loss * (b / a) + total


def accumulated(c: Case) -> Tensor:
    parts = zip(c.h.split(4), c.t.split(4), strict=True)
    losses = [F.cross_entropy(F.linear(c.chunk(h), c.w), t, reduction="sum") for h, t in parts]
    return sum(losses) / ROWS  # type: ignore[return-value]


def one_statistic_twice_and_in_place(c: Case) -> Tensor:
    s = c.logits().logsumexp(-1)
    q = s * 1
    q[:3] = 0
    q *= c.advantage
    q.clamp_(min=-1).add_(s)
    return q.square().sum() + s.sum() * s.detach().mean() + (s * s.flip(0)).mean()


def writes_to_logits_between_losses(c: Case) -> Tensor:
    z = c.logits()
    first = F.cross_entropy(z, c.t)
    z = z * 2
    z[:, 10:] = -torch.inf
    return first + F.cross_entropy(z, c.t % 10) + z[:, :10].log_softmax(-1)[:, 3].mean()


def weights_without_gradients(c: Case) -> Tensor:
    z = c.logits() / 0.7
    with torch.no_grad():
        p = z.softmax(-1)
        entropy = z.logsumexp(-1) - (p * z).sum(-1)
        sure = p.gather(-1, c.t[:, None])[:, 0]
    keep = entropy >= entropy.quantile(0.5)
    losses = F.cross_entropy(z, c.t, reduction="none")
    return (losses * sure * keep).sum() / keep.sum() + ((1 - (-losses).exp()) ** 2 * losses)[c.mask].mean()


def standardized(c: Case) -> Tensor:
    losses = F.cross_entropy(c.logits(), c.t, reduction="none")
    return ((losses - losses.mean()) / (losses.std() + 1e-6) * c.advantage).mean() + (losses.cumsum(0) / 9).exp().sum()


def straight_through(c: Case) -> Tensor:
    z = c.logits()
    p, best = z.softmax(-1), z.argmax(-1)
    hard = F.one_hot(best.realize() if isinstance(best, st.ChunkedTensor) else best, CLASSES).double()
    return ((hard - p.detach() + p) @ c.teacher).square().mean()


def contrastive(c: Case) -> Tensor:
    z = c.chunk(F.normalize(c.h, dim=-1)) @ F.normalize(c.w[:ROWS], dim=-1).t() * c.value.sum().exp()
    return F.cross_entropy(z, torch.arange(ROWS)) + F.cross_entropy(z.t(), torch.arange(ROWS))


def checkpointed(c: Case) -> Tensor:
    def part(h: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        log_p = F.linear(c.chunk(h), w).log_softmax(-1)
        return log_p.gather(-1, c.t[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)

    chosen, entropy = checkpoint(part, c.h, c.w, use_reentrant=False)
    again, _ = checkpoint(part, c.h * 2, c.teacher, use_reentrant=False)
    return (chosen.exp() * c.advantage).mean() + entropy.square().mean() + again.mean()  # type: ignore[no-any-return]


def hooked(c: Case) -> Tensor:
    h, w = c.h * 1, c.w * 1
    h.register_hook(lambda g: g * 2)  # type: ignore[no-untyped-call]
    w.register_hook(lambda g: g.clamp(-0.01, 0.01))  # type: ignore[no-untyped-call]
    loss = F.cross_entropy(F.linear(c.chunk(h), w), c.t)
    loss.register_hook(lambda g: g * 3)  # type: ignore[no-untyped-call]
    return loss + 0


PROGRAMS = [
    clipped_policy_with_entropy_and_values,
    group_relative_policy,
    preferences,
    odds_of_preferences,
    actor_and_critic_with_a_learned_temperature,
    double_q_learning,
    distillation,
    smoothing_and_z_loss,
    several_heads_and_later_tokens,
    learned_weights_of_losses,
    gradients_that_weigh_losses,
    accumulated,
    one_statistic_twice_and_in_place,
    writes_to_logits_between_losses,
    weights_without_gradients,
    standardized,
    straight_through,
    contrastive,
    checkpointed,
    hooked,
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_loss_and_every_gradient_are_those_of_plain_rows(program: Any) -> None:
    found = []
    for chunk in (lambda h: h, lambda h: st.chunk(h, rows=5)):
        case = Case(chunk)
        loss = program(case)
        leaves = [case.h, case.w, case.teacher, case.value]
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
        found.append([loss.detach(), *gradients])
    expected, mine = found
    assert expected[1].any()
    torch.testing.assert_close(mine, expected)
