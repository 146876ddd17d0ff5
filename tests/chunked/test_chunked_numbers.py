"""Numbers of the same chunked rows wait for each other: one pass over the chunks computes them and their gradients."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from chunked_programs import Doubled, Products, check_chunked
from chunked_programs import linear_tensors as tensors
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import subtensors as st


def with_z_loss(h: Tensor, w: Tensor, v: Tensor, target: Tensor) -> Tensor:
    logits = F.linear(h, w)
    return F.cross_entropy(logits, target) + 1e-4 * logits.logsumexp(-1).square().mean()


def with_z_loss_in_place(h: Tensor, w: Tensor, v: Tensor, target: Tensor) -> Tensor:
    logits = F.linear(h, w)
    loss, penalty = F.cross_entropy(logits, target), logits.logsumexp(-1).square().mean()
    penalty *= 1e-4
    loss += penalty
    loss /= 2
    return loss


def with_entropy(h: Tensor, w: Tensor, v: Tensor, target: Tensor) -> Tensor:
    logits = F.linear(h, w)
    log_p = logits.log_softmax(-1)
    policy = -log_p.gather(-1, target[:, None]).mean()
    entropy = -(log_p.exp() * log_p).sum(-1).mean()
    return (policy - 0.01 * entropy) / 2


def of_several_tokens(h: Tensor, w: Tensor, v: Tensor, target: Tensor) -> Tensor:
    logits = F.linear(h, w).float()
    total = F.cross_entropy(logits[:-1], target[1:])
    for k in (2, 3):
        total = total + 0.3**k * F.cross_entropy(logits[:-k], target[k:])
    return total


def losses_of_several_tokens(h: Tensor, w: Tensor, target: Tensor) -> list[Tensor]:
    logits = F.linear(h, w)
    return [F.cross_entropy(logits[:-k], target[k:]) for k in (1, 2, 3)]


def stacked(h: Tensor, w: Tensor, v: Tensor, target: Tensor) -> Tensor:
    return torch.stack(losses_of_several_tokens(h, w, target), dim=0).mean()


def weighted(h: Tensor, w: Tensor, v: Tensor, target: Tensor) -> Tensor:
    return (torch.stack(losses_of_several_tokens(h, w, target)) * torch.tensor([1, 0.5, 0.25])).sum()


def concatenated(h: Tensor, w: Tensor, v: Tensor, target: Tensor) -> Tensor:
    one, two, three = losses_of_several_tokens(h, w, target)
    return torch.cat([one[None], two.unsqueeze(0), three.reshape(1)]).sum() / 3


def of_a_layer_written_twice(h: Tensor, w: Tensor, v: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(h, w), target) + 1e-2 * F.linear(h, w).logsumexp(-1).square().mean()


def beside_a_frozen_head(h: Tensor, w: Tensor, v: Tensor, target: Tensor) -> Tensor:
    log_p = F.linear(h, w).log_softmax(-1)
    with torch.no_grad():
        reference = F.linear(h, v).log_softmax(-1)
    loss = F.nll_loss(log_p, target)
    return loss + 0.1 * F.kl_div(log_p, reference, reduction="batchmean", log_target=True)


def of_heads_that_agree(h: Tensor, w: Tensor, v: Tensor, target: Tensor) -> Tensor:
    one, two = F.linear(h, w), F.linear(h, v)
    losses = [F.cross_entropy(one, target), F.cross_entropy(two, target)]
    return sum(losses) + (one - two).square().mean()  # type: ignore[return-value]


SHARED: dict[Callable[..., Tensor], int] = {
    with_z_loss: 3,
    with_z_loss_in_place: 3,
    with_entropy: 4,  # by columns, of which one is computed again
    of_several_tokens: 3,
    stacked: 3,
    weighted: 3,
    concatenated: 3,
    of_a_layer_written_twice: 3,
    beside_a_frozen_head: 4,
    of_heads_that_agree: 6,
}
"""Programs, and the products that their numbers take together."""


@pytest.mark.parametrize("program", SHARED, ids=lambda p: p.__name__)
def test_numbers_that_are_added_take_the_products_of_one_pass(program: Callable[..., Tensor]) -> None:
    t = tensors()
    with Products() as products:
        program(st.chunk(t["h"], rows=8), t["w"], t["v"], t["target"]).backward()  # type: ignore[no-untyped-call]
    assert products.count <= SHARED[program]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("program", SHARED, ids=lambda p: p.__name__)
def test_numbers_that_share_a_pass_equal_the_plain_ones(program: Callable[..., Tensor], dtype: torch.dtype) -> None:
    check_chunked(program, tensors(), {"h": {"rows": 7}}, dtype=dtype)


def heads_of_their_own(h: Tensor, w: Tensor, v: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(h, w), target) + F.cross_entropy(F.linear(h, v), target)


def not_affine(h: Tensor, w: Tensor, v: Tensor, target: Tensor) -> Tensor:
    logits = F.linear(h, w)
    return F.cross_entropy(logits, target) * logits.logsumexp(-1).mean()


def rows_of_their_own(h: Tensor, w: Tensor, v: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(h, w), target) + F.linear(v, w).square().mean()


@pytest.mark.parametrize("program", [heads_of_their_own, not_affine, rows_of_their_own], ids=lambda p: p.__name__)
def test_numbers_that_share_nothing_have_a_pass_each(program: Callable[..., Tensor]) -> None:
    chunks = {"h": {"rows": 7}, **({"v": {"rows": 9}} if program is rows_of_their_own else {})}
    check_chunked(program, tensors(), chunks, dtype=torch.float32)


def losses(t: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    logits = F.linear(st.chunk(t["h"], rows=8), t["w"])
    loss, z = F.cross_entropy(logits, t["target"]), logits.logsumexp(-1).square().mean()
    return loss, z, loss + 1e-2 * z


@pytest.mark.parametrize("when", ["before the backward", "after the backward"])
def test_the_parts_of_a_number_are_read_without_another_pass(when: str) -> None:
    t = tensors()
    logits = F.linear(t["h"], t["w"]).detach()
    with Products() as products:
        loss, z, total = losses(t)
        if when == "after the backward":
            total.backward()  # type: ignore[no-untyped-call]
        read = torch.tensor([loss.item(), z.item(), total.item()])
        if when == "before the backward":
            total.backward()  # type: ignore[no-untyped-call]
    assert products.count == 3
    plain = F.cross_entropy(logits, t["target"]), logits.logsumexp(-1).square().mean()
    torch.testing.assert_close(read, torch.stack([*plain, plain[0] + 1e-2 * plain[1]]))


def test_a_part_of_a_number_has_a_gradient_of_its_own_until_the_backward_of_the_whole() -> None:
    t = tensors()
    loss, z, total = losses(t)
    whole = torch.autograd.grad(total.realize(), t["w"], retain_graph=True)[0]  # type: ignore[attr-defined]
    retained = torch.autograd.grad(z, t["w"], retain_graph=True)[0]
    torch.autograd.grad(total, t["w"])
    with pytest.raises(st.RuleError, match=r"part of another one.*realize\(\)"):
        loss.backward()  # type: ignore[no-untyped-call]
    loss, z, total = losses(t)
    total.item()
    parts = [torch.autograd.grad(x, t["w"])[0] for x in (loss, z)]
    torch.testing.assert_close(parts[0] + 1e-2 * parts[1], whole)
    torch.testing.assert_close(retained, parts[1])


def test_what_the_parts_of_a_number_read_is_released_by_its_backward() -> None:
    t = tensors()
    h = t["h"].sin()
    watched = weakref.ref(h)
    gc.disable()
    try:
        loss, z, total = losses({**t, "h": h})
        total.backward()  # type: ignore[no-untyped-call]
        del h
        assert watched() is None
        assert loss.item() + 1e-2 * z.item() == pytest.approx(total.item(), rel=1e-6)
    finally:
        gc.enable()


class Passed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def added_in_place(loss: Tensor) -> Tensor:
    same = loss
    loss += 1
    assert same.item() == loss.item()
    return loss


def added_to_a_plain_one(loss: Tensor) -> Tensor:
    total = torch.zeros(())
    total += loss
    return total


def averaged_without_gradients(loss: Tensor) -> Tensor:
    with torch.no_grad():
        average = 0.9 * torch.ones(()) + 0.1 * loss
    assert not average.requires_grad
    torch.testing.assert_close(average, 0.9 + 0.1 * loss.detach())
    return loss


READS: list[Callable[[Tensor], Tensor]] = [
    lambda loss: loss,
    lambda loss: loss / 4,
    lambda loss: 3 - loss * torch.tensor(2.0),
    lambda loss: loss.float().sum(),
    lambda loss: loss.exp(),
    lambda loss: torch.stack([loss, 2 * loss]).mean(),
    lambda loss: Passed.apply(loss),  # type: ignore[no-untyped-call, no-any-return]
    lambda loss: Doubled.apply(loss) / 3,  # type: ignore[no-untyped-call, no-any-return]
    lambda loss: loss.where(loss > 0, 0.0),
    added_in_place,
    added_to_a_plain_one,
    averaged_without_gradients,
]


def penalty(logits: Tensor, target: Tensor) -> Tensor:
    return (logits.logsumexp(-1) / 8).square().mean()


@pytest.mark.parametrize("number", [F.cross_entropy, penalty], ids=["cross entropy", "penalty"])
@pytest.mark.parametrize("read", READS)
def test_a_number_is_used_like_any_tensor(read: Callable[[Tensor], Tensor], number: Callable[..., Tensor]) -> None:
    found: list[list[Tensor]] = []
    for is_chunked in (True, False):
        t = tensors()
        h = st.chunk(t["h"], rows=8) if is_chunked else t["h"]
        result = read(number(F.linear(h, t["w"]), t["target"]))
        assert result.requires_grad
        result.backward()  # type: ignore[no-untyped-call]
        assert t["h"].grad is not None
        assert t["w"].grad is not None
        found.append([result.detach(), t["h"].grad, t["w"].grad])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_number_leaves_a_checkpoint(reentrant: bool) -> None:
    gradients = []
    for is_chunked in (True, False):
        t = tensors()

        def loss(h: Tensor, is_chunked: bool = is_chunked, t: dict[str, Tensor] = t) -> Tensor:
            h = st.chunk(h.tanh(), rows=8) if is_chunked else h.tanh()
            return F.cross_entropy(F.linear(h, t["w"]), t["target"])

        (checkpoint(loss, t["h"], use_reentrant=reentrant) / 2).backward()
        gradients.append([t["h"].grad, t["w"].grad])
    torch.testing.assert_close(*gradients)


def test_a_number_shows_its_value_and_how_it_was_computed() -> None:
    t = tensors()
    loss = F.cross_entropy(F.linear(st.chunk(t["h"], rows=8), t["w"]), t["target"])
    assert repr(loss) == repr(loss.realize())  # type: ignore[attr-defined]
    assert f"{loss:.2f}" == f"{loss.item():.2f}"
    assert st.explain(loss).startswith("linear + cross entropy of 24 rows")
    assert loss.grad_fn is not None
    assert not loss.is_leaf


def test_a_target_that_is_written_to_before_the_loss_is_read_is_refused() -> None:
    t = tensors()
    loss = F.cross_entropy(F.linear(st.chunk(t["h"], rows=8), t["w"]), t["target"])
    t["target"].zero_()
    with pytest.raises(st.RuleError, match=r"modified in place.*realize\(\)"):
        loss.backward()  # type: ignore[no-untyped-call]


def test_a_sum_of_hundreds_of_terms_takes_one_pass() -> None:
    def total(h: Tensor, w: Tensor, target: Tensor) -> Tensor:
        logits = F.linear(h, w)
        out, penalty = F.cross_entropy(logits, target), logits.logsumexp(-1).square().mean()
        for k in range(400):
            out = out + penalty / (400 + k)
        return out

    t, plain = tensors(), tensors()
    with Products() as products:
        total(st.chunk(t["h"], rows=8), t["w"], t["target"]).backward()  # type: ignore[no-untyped-call]  # torch's
    total(plain["h"], plain["w"], plain["target"]).backward()  # type: ignore[no-untyped-call]  # torch's
    assert products.count == 3
    torch.testing.assert_close([t["h"].grad, t["w"].grad], [plain["h"].grad, plain["w"].grad])
