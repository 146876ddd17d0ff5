"""Writes to what a chunked program reads, before its result and before backward: seen, or without effect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import subtensors as st

Recorded = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Asked = Callable[[Tensor, Tensor], Tensor]

PROGRAMS: dict[str, tuple[Recorded, Asked]] = {
    "cross entropy": (lambda h, w, b, y: F.linear(h, w, b), F.cross_entropy),
    "losses": (lambda h, w, b, y: F.linear(h, w, b), lambda z, y: F.cross_entropy(z, y, reduction="none").sum()),
    "mean": (lambda h, w, b, y: F.linear(h, w, b).exp(), lambda z, y: z.mean()),
    "norm": (lambda h, w, b, y: F.linear(h, w, b), lambda z, y: torch.linalg.vector_norm(z)),
    "targets": (lambda h, w, b, y: F.linear(h, w, b).log_softmax(-1).gather(1, y[:, None]), lambda z, y: z.mean()),
    "arithmetic": (lambda h, w, b, y: h @ w.t() * b + y[:, None], lambda z, y: z.square().sum()),
    "realized": (lambda h, w, b, y: F.linear(h, w, b), lambda z, y: z[:].detach().sum() + torch.exp(z).sum()),
}


def in_place(x: Tensor) -> None:
    with torch.no_grad():
        x.add_(1)


def through_a_view(x: Tensor) -> None:
    with torch.no_grad():
        x[0].add_(1)


def other_memory(x: Tensor) -> None:
    x.data = x.data + 1


def results(program: tuple[Recorded, Asked], name: str, write: Any, when: str, chunks: bool) -> list[Any]:
    torch.manual_seed(0)
    h, w, b = torch.randn(17, 8), torch.randn(23, 8), torch.randn(23)
    tensors = {"h": h, "w": w, "b": b, "y": torch.randint(0, 22, (17,))}
    leaves = [t.requires_grad_() for t in (h, w, b)]
    record, ask = program
    recorded = record(st.chunk(h, rows=5) if chunks else h, w, b, tensors["y"])
    if when == "before the result":
        write(tensors[name])
    out = ask(recorded, tensors["y"])
    if when == "before backward":
        write(tensors[name])
    out.backward()
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def outcome(call: Callable[..., Any], *args: Any) -> Any:
    try:
        return call(*args)
    except RuntimeError as error:
        return error


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
@pytest.mark.parametrize("name", ["h", "w", "b", "y"])
@pytest.mark.parametrize(
    ("write", "when"),
    [
        (in_place, "before the result"),
        (in_place, "before backward"),
        (through_a_view, "before the result"),
        (through_a_view, "before backward"),
        (other_memory, "before the result"),
    ],
)
def test_a_write_is_refused_or_the_numbers_are_those_of_the_plain_program(
    write: Any, when: str, name: str, program: tuple[Recorded, Asked]
) -> None:
    found = outcome(results, program, name, write, when, True)
    if isinstance(found, Exception):
        assert isinstance(found, st.RuleError) or "modified by an inplace operation" in str(found)
        return
    expected = outcome(results, program, name, write, when, False)
    if isinstance(expected, Exception):  # plain torch saved what a chunked pass no longer needs
        expected = results(program, name, lambda x: None, when, False)
    for f, e in zip(found, expected, strict=True):
        torch.testing.assert_close(f, e, rtol=1e-4, atol=1e-5)


def test_a_weight_whose_memory_was_replaced_is_refused_with_the_way_out() -> None:
    weight = torch.ones(5, 3)
    logits = F.linear(st.chunk(torch.ones(4, 3), rows=2), weight)
    weight.data = torch.zeros(5, 3)
    with pytest.raises(st.RuleError, match=r"given other memory.*realize\(\)"):
        F.cross_entropy(logits, torch.zeros(4, dtype=torch.int64)).item()


@pytest.mark.parametrize("when", ["before the result", "before backward", "before a second backward"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("squash", [lambda z: z, lambda z: z + z.detach().mean()], ids=["linear", "by rows"])
def test_a_write_to_class_weights_is_refused_or_without_effect(squash: Any, dtype: torch.dtype, when: str) -> None:
    torch.manual_seed(0)
    h, w = torch.randn(17, 8).to(dtype), torch.randn(23, 8).to(dtype).requires_grad_()
    y, weight = torch.randint(0, 22, (17,)), torch.linspace(0.5, 2, 23).to(dtype)

    def gradient(chunks: bool, when: str) -> Tensor:
        logits, own = F.linear(st.chunk(h, rows=5) if chunks else h, w), weight.clone()
        loss = F.cross_entropy(squash(logits), y, own, reduction="sum")
        if when == "before the result":
            in_place(own)
        loss.item()
        if when == "before backward":
            in_place(own)
        out = torch.autograd.grad(loss, w, retain_graph=True)[0]
        if when == "before a second backward":
            in_place(own)
            out = torch.autograd.grad(loss, w)[0]
        return out

    found = outcome(gradient, True, when)
    if isinstance(found, Exception):
        assert isinstance(found, st.RuleError) or "modified by an inplace operation" in str(found)
        return
    torch.testing.assert_close(found, gradient(False, "never"), rtol=1e-2, atol=1e-2)


READERS: list[Asked] = [
    F.cross_entropy,
    lambda z, y: F.cross_entropy(z, y) + z.logsumexp(-1).mean(),
    lambda z, y: z.logsumexp(-1).square().mean(),
    lambda z, y: F.nll_loss(z.log_softmax(-1), y),
    lambda z, y: z.square().sum(),
    lambda z, y: F.cross_entropy(z, y, reduction="none").mean(),
]


@pytest.mark.parametrize("ask", READERS)
@pytest.mark.parametrize("name", ["w", "b", "h"])
def test_a_leaf_that_is_frozen_or_trained_later_stays_as_it_was_recorded(ask: Asked, name: str) -> None:
    torch.manual_seed(0)
    leaves = {"h": torch.randn(17, 8), "w": torch.randn(23, 8), "b": torch.randn(23)}
    y = torch.randint(0, 22, (17,))
    changed = leaves.pop(name)
    for leaf in leaves.values():
        leaf.requires_grad_()
    h, w, b = (changed if x == name else leaves[x] for x in "hwb")
    plain = torch.autograd.grad(ask(F.linear(h, w, b), y), list(leaves.values()))
    loss = ask(F.linear(st.chunk(h, rows=5), w, b), y)
    changed.requires_grad_()
    loss.backward()  # type: ignore[no-untyped-call]
    assert changed.grad is None
    for leaf, gradient in zip(leaves.values(), plain, strict=True):
        torch.testing.assert_close(leaf.grad, gradient, rtol=1e-4, atol=1e-5)
    loss = ask(F.linear(st.chunk(h, rows=5), w, b), y)
    changed.requires_grad_(False)
    found = outcome(loss.item)
    if isinstance(found, Exception):
        assert "requires grad no longer" in str(found)
        return
    changed.requires_grad_()
    loss.backward()  # type: ignore[no-untyped-call]
    assert changed.grad is not None


UNSEEN: dict[str, Callable[[Tensor], object]] = {
    "x.data": lambda t: t.data.mul_(2),
    "x.numpy()": lambda t: np.multiply(t.detach().numpy(), 2, out=t.detach().numpy()),
    "torch.from_numpy": lambda t: torch.from_numpy(t.detach().numpy()).mul_(2),
    "DLPack": lambda t: torch.from_dlpack(t.detach()).mul_(2),
}
"""Writes that torch does not count."""


def logits_and_gradients(h: Tensor, weight: Tensor, target: Tensor) -> list[Tensor]:
    logits = F.linear(h, weight)
    loss = F.cross_entropy(logits, target)
    return [logits.detach(), loss.detach(), *torch.autograd.grad(loss, [h, weight])]


@pytest.mark.parametrize("written", ["hidden states", "weight"])
@pytest.mark.parametrize("name", UNSEEN)
def test_a_write_that_torch_does_not_count_is_read_by_what_is_still_recorded(name: str, written: str) -> None:
    def operands() -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        sizes = ((17, 8), (23, 8))
        return [torch.randn(size, dtype=torch.float64, generator=generator).requires_grad_() for size in sizes]

    (h, weight), target = operands(), torch.arange(17)
    old = logits_and_gradients(*operands(), target)
    logits = F.linear(st.chunk(h, rows=5), weight)
    loss = F.cross_entropy(F.linear(st.chunk(h, rows=5), weight), target)
    kept = F.linear(st.chunk(h, rows=5), weight).realize()
    kept_loss = F.cross_entropy(F.linear(st.chunk(h, rows=5), weight), target)
    kept_value = kept_loss.realize().detach()
    UNSEEN[name](h if written == "hidden states" else weight)
    new = logits_and_gradients(h, weight, target)
    assert not torch.allclose(new[1], old[1])
    found = [logits.realize().detach(), loss.detach(), *torch.autograd.grad(loss, [h, weight])]
    torch.testing.assert_close(found, new)
    torch.testing.assert_close([kept.detach(), kept_value], old[:2])
