"""Writes to a number of chunked rows are seen by the numbers made of it, as in plain torch, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import subtensors as st


def tensors() -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, weights and targets."""
    g = torch.Generator().manual_seed(0)
    h, w = (torch.randn(n, 6, generator=g, dtype=torch.float64).requires_grad_() for n in (12, 20))
    return h, w, torch.randint(0, 20, (12,), generator=g)


def losses_of(c: Callable[..., Tensor], h: Tensor, w: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    logits = F.linear(c(h), w)
    return F.cross_entropy(logits, t), logits.logsumexp(-1).mean()


def scaled_after_a_read(*given: Any) -> Tensor:
    loss, _ = losses_of(*given)
    loss.item()
    total = loss * 3
    loss *= 0.5
    return total


def clamped_beside_a_multiple(*given: Any) -> Tensor:
    loss, _ = losses_of(*given)
    total = loss * 3
    loss.clamp_(max=1)
    return total


def divided_through_a_detached_one(*given: Any) -> Tensor:
    loss, _ = losses_of(*given)
    log, mean = loss.detach(), loss / 4
    log.div_(2)
    return mean


def hooked_after_a_write_to_a_part_of_the_whole(*given: Any) -> Tensor:
    loss, z = losses_of(*given)
    total = loss + 2 * z
    total.item()
    loss.detach().div_(2)
    loss.exp()
    loss.register_hook(lambda g: g * 0)  # type: ignore[no-untyped-call]
    return total


def hooked_after_the_whole_was_read(*given: Any) -> Tensor:
    loss, z = losses_of(*given)
    total = loss + 2 * z
    total.item()
    z.register_hook(lambda g: g * 0)  # type: ignore[no-untyped-call]
    return total


def differentiated_by_a_part_after_the_whole_was_read(*given: Any) -> Tensor:
    loss, z = losses_of(*given)
    total = loss + 2 * z
    total.item()
    return total * torch.autograd.grad(total, z, retain_graph=True)[0]


def hooked_through_a_view(*given: Any) -> Tensor:
    loss, _ = losses_of(*given)
    same = loss.squeeze()
    same.register_hook(lambda g: g * 0)  # type: ignore[no-untyped-call]
    return loss + same


REFUSED = [
    hooked_through_a_view,
    hooked_after_a_write_to_a_part_of_the_whole,
    clamped_beside_a_multiple,
    hooked_after_the_whole_was_read,
    differentiated_by_a_part_after_the_whole_was_read,
]


def written_after_a_part_was_read(*given: Any) -> Tensor:
    loss, z = losses_of(*given)
    total = loss * z.exp() + 1
    half = total / 2
    total.item()
    total.detach().zero_()
    return half


def part_used_after_a_write_through_a_detached_one(*given: Any) -> Tensor:
    loss, z = losses_of(*given)
    total, before = loss + 2 * z, loss * 5
    total.item()
    loss.detach().div_(2)
    assert loss.item() < total.item()
    return loss * 3 + z + total + before


def part_used_between_writes_through_a_detached_one(*given: Any) -> Tensor:
    loss, z = losses_of(*given)
    half = (loss + 2 * z) / 2
    half.item()
    alias = loss.detach()
    first = loss.exp()
    alias.div_(2)
    second = (loss + 1).exp()
    alias.div_(2)
    loss.data.add_(1)
    return first + second + loss * 3 + loss.cos() + alias


def whole_used_after_a_write_through_a_detached_one(*given: Any) -> Tensor:
    loss, z = losses_of(*given)
    total = loss + 2 * z
    half = total / 2
    half.item()
    total.detach().div_(2)
    total.data.add_(1)
    return total * 3 + half


def part_written_before_the_backward_of_the_whole(*given: Any) -> Tensor:
    loss, z = losses_of(*given)
    total = loss + 2 * z
    total.item()
    loss.detach().div_(2)
    part = (loss * 3).exp()
    total.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    loss.add_(1)
    return total * part + loss


def used_after_a_write(*given: Any) -> Tensor:
    loss, z = losses_of(*given)
    loss.item()
    loss.clamp_(max=3.5)
    return loss * 3 + z


def used_after_a_write_through_a_view(*given: Any) -> Tensor:
    loss, z = losses_of(*given)
    same = loss.squeeze()
    loss.item()
    same *= 2
    return loss * 3 + same + z


def added_to_its_own_multiple(*given: Any) -> Tensor:
    loss, _ = losses_of(*given)
    part = loss * 0.1
    loss += part
    assert loss.item() > part.item()
    return loss + part


def increased_beside_a_multiple(*given: Any) -> Tensor:
    loss, z = losses_of(*given)
    total = loss * 3 + z
    loss += 1
    return loss + torch.tensor(loss.item() + total.item())


def hooked_before_the_whole_is_read(*given: Any) -> Tensor:
    loss, z = losses_of(*given)
    total = loss + 2 * z
    z.register_hook(lambda g: g * 0)  # type: ignore[no-untyped-call]
    return total


def differentiated_by_a_part(*given: Any) -> Tensor:
    loss, z = losses_of(*given)
    total = loss + 2 * z
    return total * torch.autograd.grad(total, z, retain_graph=True)[0]


def differentiated_by_a_part_with_backward(*given: Any) -> Tensor:
    loss, z = losses_of(*given)
    total = loss + 2 * z
    torch.autograd.backward([total], inputs=[z], retain_graph=True)
    total.backward(inputs=z, retain_graph=True)  # type: ignore[no-untyped-call]
    assert given[1].grad is None
    return total


def retained(*given: Any) -> Tensor:
    loss, z = losses_of(*given)
    total = loss + 2 * z
    z.retain_grad()  # type: ignore[no-untyped-call]
    total.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    assert z.grad is not None
    return total * z.grad


def read_in_inference_mode(*given: Any) -> Tensor:
    loss, z = losses_of(*given)
    with torch.inference_mode():
        assert z.item() + loss.detach() > 0
    return loss + z


def combined_in_inference_mode(*given: Any) -> Tensor:
    loss, z = losses_of(*given)
    with torch.inference_mode():
        assert (loss * 2 + z).item() > 0
    return loss + z


USED = [
    scaled_after_a_read,
    divided_through_a_detached_one,
    part_used_after_a_write_through_a_detached_one,
    part_used_between_writes_through_a_detached_one,
    whole_used_after_a_write_through_a_detached_one,
    part_written_before_the_backward_of_the_whole,
    written_after_a_part_was_read,
    used_after_a_write,
    used_after_a_write_through_a_view,
    added_to_its_own_multiple,
    increased_beside_a_multiple,
    hooked_before_the_whole_is_read,
    differentiated_by_a_part,
    differentiated_by_a_part_with_backward,
    retained,
    read_in_inference_mode,
    combined_in_inference_mode,
]


def value_and_gradients(program: Callable[..., Tensor], is_chunked: bool) -> list[Tensor]:
    h, w, target = tensors()
    result = program((lambda x: st.chunk(x, rows=5)) if is_chunked else lambda x: x, h, w, target)
    return [*torch.autograd.grad(result, [h, w]), result.detach()]


@pytest.mark.parametrize("program", USED)
def test_what_is_done_to_a_number_is_what_plain_torch_does(program: Callable[..., Tensor]) -> None:
    for mine, theirs in zip(*(value_and_gradients(program, chunks) for chunks in (True, False)), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("program", REFUSED)
def test_what_another_number_would_not_see_is_refused(program: Callable[..., Tensor]) -> None:
    value_and_gradients(program, False)
    with pytest.raises(st.RuleError, match=r"realize\(\)"):
        value_and_gradients(program, True)


def test_the_parts_of_a_number_are_shown_and_compared_after_its_backward() -> None:
    loss, z = losses_of(lambda x: st.chunk(x, rows=5), *tensors())
    total = loss + z
    total.backward()  # type: ignore[no-untyped-call]
    loss.detach().div_(2)
    value = loss.item()
    assert repr(loss) == repr(torch.tensor(value, dtype=torch.float64))
    assert [bool(x) for x in (loss > 1, loss == value, loss.ne(value), loss.lt(value + 1))] == [True, True, False, True]
    assert loss.cpu().item() == loss.data.item() == value
