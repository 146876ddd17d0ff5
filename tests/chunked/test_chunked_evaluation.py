"""Passes over chunks run the requested rows only, and all of them draw the same random numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import subtensors as st


class Products(TorchDispatchMode):
    """The rows of the products beneath it."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            self.rows.append(args[0].shape[0])
        return func(*args, **(kwargs or {}))


def dense(x: Tensor) -> Tensor:
    return x.realize() if hasattr(x, "realize") else x


@pytest.mark.parametrize(
    ("pick", "rows"),
    [
        (lambda x: x[:, 5], [1]),
        (lambda x: x[:, -1].log_softmax(-1), [1]),
        (lambda x: x[:, 3:9], [4, 2]),
        (lambda x: x[:, 2:][:, 1:4].transpose(0, 1), [3]),
        (lambda x: x.unflatten(1, (6, 2))[:, 4], [2]),
        (lambda x: x[:, 4:7].amax(1), [3]),
        (lambda x: x[:, 4:7].sum(), [3]),
    ],
)
def test_only_the_requested_rows_are_computed(pick: Any, rows: list[int]) -> None:
    # A sum of few terms may nearly vanish, and is then known to few digits.
    h = torch.randn(3, 12, 6, dtype=torch.float64, requires_grad=True)
    w = torch.randn(20, 6, dtype=torch.float64, requires_grad=True)
    with Products() as products, torch.no_grad():
        dense(pick(F.linear(st.chunk(h, 1, rows=4), w)))
    assert [count // 3 for count in products.rows] == rows
    picked = dense(pick(F.linear(st.chunk(h, 1, rows=4), w)))
    actual = torch.autograd.grad(picked.square().sum(), [h, w])
    expected = torch.autograd.grad(pick(F.linear(h, w)).square().sum(), [h, w])
    for mine, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("division", [{}, {"rows": 7}, {"memory_limit": "240KB"}], ids=str)
@pytest.mark.parametrize("change", [lambda x: x, lambda x: x.flatten(0, 1)], ids=["as it is", "flat"])
def test_every_pass_over_dropped_logits_reads_the_same_mask(change: Any, division: dict[str, Any]) -> None:
    h, w = torch.randn(3, 150, 4, requires_grad=True), torch.randn(96, 4)
    dropped = F.dropout(change(F.linear(st.chunk(h, 1, **division), w)), 0.5)
    # By chunks that are as long as the values of each pass allow.
    zeros = (dropped == 0).sum(-1).realize()
    assert torch.equal(((dropped.exp() * dropped).softmax(-1) * 0 + (dropped == 0)).sum(-1).realize(), zeros)
    assert torch.equal((dropped.realize() == 0).sum(-1), zeros)
    assert (dropped[..., 5:90, :] == 0).sum(-1).tolist() == zeros[..., 5:90].tolist()


def test_drawing_the_numbers_of_chunks_leaves_the_generators_of_other_devices_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(seed: int) -> None:
        raise AssertionError("the generators of all devices are seeded")

    h, w = torch.randn(150, 4), torch.randn(96, 4)
    dropped = F.dropout(F.linear(st.chunk(h, rows=7), w), 0.5)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", refuse)
    place = torch.get_rng_state()
    dropped.realize()
    assert torch.get_rng_state().equal(place)


@pytest.mark.parametrize(
    ("block", "again"),
    [
        # the last product is not computed again: no gradient reads it
        (lambda x, a, b: F.linear(F.silu(F.linear(x, a)), b), 1),
        (lambda x, a, b: (x + F.linear(F.silu(F.linear(x, a)), b).view(x.shape)).transpose(0, 1), 1),
        # a gradient reads it, though nothing but the result does
        (lambda x, a, b: F.linear(F.silu(F.linear(x, a)), b) * x, 2),
        (lambda x, a, b: F.linear(F.silu(F.linear(x, a)), b).sigmoid() + x, 2),
        (lambda x, a, b: x / (2 + F.linear(F.silu(F.linear(x, a)), b).square()), 2),
    ],
)
@pytest.mark.parametrize("frozen", [False, True])
def test_a_product_that_no_gradient_reads_is_not_computed_again(block: Any, again: int, frozen: bool) -> None:
    x = torch.randn(12, 6, dtype=torch.float64, requires_grad=True)
    a, b = (torch.randn(n, m, dtype=torch.float64, requires_grad=not frozen) for n, m in ((9, 6), (6, 9)))
    leaves = [x] if frozen else [x, a, b]
    given = torch.randn_like(block(x, a, b))
    result = dense(block(st.chunk(x, rows=4), a, b))
    torch.use_deterministic_algorithms(True)  # fills what is not computed with NaN
    try:
        with Products() as counted:
            actual = torch.autograd.grad(result, leaves, given)
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(counted.rows) == 3 * (again + 2)  # and two for the gradients of what they read
    for mine, theirs in zip(actual, torch.autograd.grad(block(x, a, b), leaves, given), strict=True):
        torch.testing.assert_close(mine, theirs)
