"""Numbers of chunked rows keep to torch through writes, modes, hooks and empty batches before their backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from chunked_programs import Doubled
from torch import Tensor

import subtensors as st

Chunk = Callable[[Tensor], Tensor]


class Case:
    """Hidden states and a head with gradients, targets, and a mask of rows."""

    def __init__(self, chunk: Chunk, rows: int = 12, ignores: bool = False) -> None:
        g = torch.Generator().manual_seed(0)
        self.h, self.w = (torch.randn(n, 6, generator=g, dtype=torch.float64).requires_grad_() for n in (rows, 20))
        self.t = torch.randint(0, 20, (rows,), generator=g)
        self.t[:: 1 if ignores else 3] = -100
        self.mask = self.t != -100
        self.x = chunk(self.h)

    def logits(self) -> Tensor:
        """The logits of the rows."""
        return F.linear(self.x, self.w)


def outcomes(program: Callable[[Case], Tensor | None], *args: Any) -> list[list[Tensor | None]]:
    """Return the result and the gradients of a program on chunked and on plain rows."""
    found = list[list[Tensor | None]]()
    for chunk in (lambda h: st.chunk(h, rows=5), lambda h: h):
        case = Case(chunk, *args)
        out = program(case)
        if out is not None:
            out.backward()  # type: ignore[no-untyped-call]
        found.append([None if out is None else out.detach(), case.h.grad, case.w.grad])
    return found


def divided_by_no_tokens(c: Case) -> Tensor:
    return F.cross_entropy(c.logits(), c.t, reduction="sum") / c.mask.sum()


def chosen_rows_divided_by_no_tokens(c: Case) -> Tensor:
    return torch.where(c.mask, c.logits().logsumexp(-1), 0).sum() / c.mask.sum()


def weighted_rows_divided_by_no_tokens(c: Case) -> Tensor:
    return (F.cross_entropy(c.logits(), c.t, reduction="none") * c.mask).sum() / c.mask.sum()


@pytest.mark.parametrize("rows", [0, 12])
@pytest.mark.parametrize(
    "program", [divided_by_no_tokens, chosen_rows_divided_by_no_tokens, weighted_rows_divided_by_no_tokens]
)
def test_a_batch_whose_tokens_are_all_ignored_has_gradients_of_zero(program: Callable[..., Tensor], rows: int) -> None:
    mine, theirs = outcomes(program, rows, True)
    assert theirs[2] is not None
    assert not theirs[2].any()
    torch.testing.assert_close(mine, theirs, equal_nan=True)


EMPTY: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda z, t: torch.linalg.vector_norm(z),
    lambda z, t: z.logsumexp(-1).prod(),
    lambda z, t: z.logsumexp(0).sum(),
    lambda z, t: F.cross_entropy(z[t > 0], t[t > 0]),
]


@pytest.mark.parametrize("of", EMPTY)
def test_a_number_of_no_rows_is_that_of_plain_torch(of: Callable[[Tensor, Tensor], Tensor]) -> None:
    mine, theirs = outcomes(lambda c: of(c.logits(), c.t), 0)
    torch.testing.assert_close(mine, theirs, equal_nan=True)


def test_a_head_that_is_written_to_is_seen_by_numbers_that_still_wait() -> None:
    c = Case(lambda h: st.chunk(h, rows=5))
    z = c.logits()
    z.logsumexp(-1).var().backward()  # type: ignore[no-untyped-call]
    mean = z.log_softmax(-1).mean()
    torch.optim.SGD([c.w], lr=0.1).step()
    with pytest.raises(st.RuleError, match=r"modified in place.*realize\(\)"):
        mean.item()


def measured_by_what_is_written_to(c: Case) -> Tensor:
    z = c.logits()
    loss, accuracy = z.logsumexp(-1).square().mean(), (z.argmax(-1) == c.t).float().mean()
    assert loss.item() > accuracy.item() >= 0
    c.t.zero_()
    return loss


def beside_rows_of_inference_mode(c: Case) -> Tensor:
    z = c.logits()
    loss = (F.cross_entropy(z, c.t, reduction="none") * 2).sum()
    with torch.inference_mode():
        chosen = z.log_softmax(-1).gather(-1, c.t.clamp(min=0)[:, None]).squeeze(-1)
    (loss / 2).backward()
    assert chosen.shape == c.t.shape
    return F.cross_entropy(c.logits(), c.t)


def after_rows_of_inference_mode(c: Case) -> Tensor:
    z = c.logits()
    loss, entropy = F.cross_entropy(z, c.t), z.logsumexp(-1).mean()
    with torch.inference_mode():
        assert z.logsumexp(-1)[c.mask].mean().item() > 0
    return loss + entropy


def beside_an_average_that_goes_on(c: Case) -> Tensor:
    z, average = c.logits(), torch.ones((), dtype=torch.float64)
    total = F.cross_entropy(z, c.t) + z.logsumexp(-1).mean() + average
    value = total.item()
    average.mul_(0.9).add_(value)
    return total


def divided_by_a_view_without_a_gradient(c: Case) -> Tensor:
    loss = F.cross_entropy(c.logits(), c.t)
    with torch.no_grad():
        scale = loss.view(())
    return loss / scale.exp().detach() + scale.detach().exp() + (scale.exp() - scale.exp().detach())


def a_part_of_stacked_losses(c: Case) -> Tensor:
    z = c.logits()
    loss, other = F.cross_entropy(z, c.t), z.logsumexp(-1).mean()
    part = torch.stack([loss, other])[1]
    assert loss.item() > 0
    return part * part


def the_backward_of_a_function_of_it_and_its_own(c: Case) -> Tensor:
    loss = F.cross_entropy(c.logits(), c.t)
    Doubled.apply(loss).backward(retain_graph=True)  # type: ignore[no-untyped-call]
    return loss


def a_part_after_a_backward_that_retains(c: Case) -> Tensor:
    z = c.logits()
    loss, other = F.cross_entropy(z, c.t), z.logsumexp(-1).mean()
    (loss + 2 * other).backward(retain_graph=True)
    return other


def kept_beside_a_read_without_gradients(c: Case) -> Tensor:
    z = c.logits()
    total = F.cross_entropy(z, c.t) + 2 * z.logsumexp(-1).mean()
    kept, half = total.detach(), total / 2
    half.backward()
    del total
    with torch.no_grad():
        st.chunk(c.h, rows=5)
    return F.cross_entropy(c.logits(), c.t) * kept.clone()


def a_detached_one_that_requires_grad(c: Case) -> Tensor:
    loss = F.cross_entropy(c.logits(), c.t)
    leaf = loss.detach()
    leaf.requires_grad_()
    assert leaf.requires_grad
    assert leaf.is_leaf
    (leaf * 3).exp().backward()
    Doubled.apply(leaf).backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    return loss * leaf.grad + loss.detach().requires_grad_(False)


def added_to_a_detached_one(c: Case) -> Tensor:
    z = c.logits()
    total = F.cross_entropy(z, c.t).detach()
    total += z.logsumexp(-1).mean()
    assert total.requires_grad
    return total * 2


def one_logit(c: Case) -> None:
    torch.autograd.backward([c.logits()[3, 2]], inputs=[c.w])
    (c.h.grad,) = torch.autograd.grad(c.logits()[3, 2], [c.h])


SURROUNDED: list[Callable[[Case], Tensor | None]] = [
    measured_by_what_is_written_to,
    beside_rows_of_inference_mode,
    after_rows_of_inference_mode,
    beside_an_average_that_goes_on,
    divided_by_a_view_without_a_gradient,
    a_part_of_stacked_losses,
    the_backward_of_a_function_of_it_and_its_own,
    a_part_after_a_backward_that_retains,
    kept_beside_a_read_without_gradients,
    a_detached_one_that_requires_grad,
    added_to_a_detached_one,
    one_logit,
]


@pytest.mark.parametrize("program", SURROUNDED)
def test_what_is_done_around_a_number_is_what_plain_torch_does(program: Callable[[Case], Tensor | None]) -> None:
    torch.testing.assert_close(*outcomes(program))


def test_hidden_states_that_are_read_without_a_gradient_get_none() -> None:
    def program(c: Case) -> Tensor:
        c.h.register_hook(lambda g: g.clone())  # type: ignore[no-untyped-call]
        c.w.register_hook(lambda g: g.clone())  # type: ignore[no-untyped-call]
        v = c.w.detach().clone().requires_grad_()
        return F.linear(c.x.detach(), v).logsumexp(-1).square().mean()

    mine, theirs = outcomes(program)
    assert mine[1:] == theirs[1:] == [None, None]
    torch.testing.assert_close(mine[0], theirs[0])


def test_an_integer_number_takes_no_write_of_a_float() -> None:
    for chunk in (lambda h: st.chunk(h, rows=5), lambda h: h):
        z = Case(chunk).logits()
        hits = (z.argmax(-1) == 3).sum()
        with pytest.raises(RuntimeError, match=r"result type .* can't be cast to the desired output type"):
            hits.mul_(z.logsumexp(-1).mean().detach())


def test_a_number_that_can_not_be_computed_is_refused_where_it_is_read() -> None:
    z = F.linear(st.chunk(torch.ones(4, 3), rows=2), torch.ones(5, 3, requires_grad=True))
    wrong = z.exp().gather(-1, torch.full((4, 1), 5)).mean().detach()
    st.chunk(torch.ones(4, 3), rows=2)
    with pytest.raises(RuntimeError, match="out of bounds"):
        wrong.item()
