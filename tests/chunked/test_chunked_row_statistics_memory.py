"""Memory and products of row statistics: what is freed after a step, and blocks of logits in place of all of them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from chunked_programs import allocations, linear_case
from cross_entropy_cases import Sizes
from row_statistics_programs import entropy, expectation, hits, of_a_sequence, selected, several_classes
from torch import Tensor

import subtensors as st


@pytest.mark.parametrize("program", [entropy, expectation, selected, hits, several_classes, of_a_sequence])
@pytest.mark.usefixtures("blocks")
def test_a_step_leaves_no_tensors_to_the_garbage_collector(program: Any) -> None:
    case = linear_case()
    leaves = [case[name].requires_grad_() for name in ("h", "w", "b")]

    def step() -> int:
        program(F.linear(st.chunk(leaves[0], rows=5), *leaves[1:]), case["target"]).sum().backward()
        return sum(issubclass(type(x), Tensor) for x in gc.get_objects())

    step()
    gc.collect()
    gc.disable()
    try:
        assert step() == step()
    finally:
        gc.enable()


@pytest.mark.parametrize("program", [entropy, selected])
@pytest.mark.usefixtures("blocks")
def test_a_loss_that_is_kept_after_its_backward_keeps_no_operands(program: Any) -> None:
    case = linear_case()

    def step() -> tuple[Tensor, int]:
        hidden, weight = case["h"].requires_grad_().sin(), case["w"].requires_grad_().cos()
        addresses = {x.untyped_storage().data_ptr() for x in (hidden, weight)}
        loss = program(F.linear(st.chunk(hidden), weight), case["target"]).square().mean().realize()
        loss.backward()
        sizes = {hidden.shape, weight.shape}
        del hidden, weight
        plain = [x for x in gc.get_objects() if type(x) is Tensor and x.layout is torch.strided and not x.is_nested]
        found = [x for x in plain if x.shape in sizes and x.device.type == "cpu"]
        return loss, sum(x.untyped_storage().data_ptr() in addresses for x in found)

    step()  # whose imports leave cycles
    assert step()[1] == 0


def by_entropy(z: Tensor, t: Tensor) -> Tensor:
    return entropy(z, t).sum()


def by_mean_of_sequences(z: Tensor, t: Tensor) -> Tensor:
    return (selected(z, t).view(4, 8).mean(-1) ** 2).sum()


def by_masked_entropy(z: Tensor, t: Tensor) -> Tensor:
    warm = z / torch.linspace(0.5, 1.5, 32)[:, None].requires_grad_()
    return by_entropy(warm.masked_fill(torch.arange(80) % 7 == 3, -1e4), t)


@pytest.mark.parametrize("loss", [by_entropy, by_mean_of_sequences, by_masked_entropy])
def test_a_loss_of_statistics_takes_four_products_at_most_and_a_block_of_logits(
    loss: Any, have_blocks: Callable[[list[int]], None]
) -> None:
    have_blocks([8])
    case = linear_case(32, 4, 80)
    h, w = case["h"].requires_grad_(), case["w"].requires_grad_()
    with Sizes() as seen, allocations() as made:
        loss(F.linear(st.chunk(h, memory_limit=9400), w), case["target"]).backward()
    assert 80 < sum(classes for classes, rows in seen.products if rows == 32) <= 2 * 80, "the logits, once more at most"
    assert sum(rows for rows, width in seen.products if width == 4 and rows != 32) == 80, "the gradient of the weight"
    assert 2 < seen.products.count((32, 4)) <= 80 // 8, "the gradient of the hidden states, by what is there at once"
    assert made.largest < 32 * 80


def test_a_frozen_head_stays_by_rows_and_takes_no_product_for_its_gradient(
    have_blocks: Callable[[list[int]], None],
) -> None:
    have_blocks([8])
    case = linear_case()
    h, w = case["h"].requires_grad_(), case["w"]
    with Sizes() as seen:
        entropy(F.linear(st.chunk(h, rows=5), w), case["target"]).sum().backward()
    assert (20, 6) not in seen.products
    assert h.grad is not None
