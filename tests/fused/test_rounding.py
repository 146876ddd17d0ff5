"""Stochastic rounding: unbiased, between the two neighbours, with fresh bits that follow torch's seed."""

from __future__ import annotations

import math

import pytest
import torch
from programs import SMALL_TILES, Lowering, each_lowering
from torch import Tensor

import subtensors as st
from subtensors.dispatch.fused.fused_function import FusedFunction
from subtensors.dispatch.fused.tensor_columns import TensorColumn

INF = float("inf")


def rounded(lowering: Lowering, *sources: Tensor) -> list[Tensor]:
    """Round each source in fused math."""
    targets = TensorColumn(torch.empty_like(s, dtype=torch.bfloat16, device=lowering.device) for s in sources)
    with lowering.running():
        FusedFunction(st.stochastic_round_, SMALL_TILES)(targets, TensorColumn(s.to(lowering.device) for s in sources))
    return [t.cpu() for t in targets]


def neighbours(x: Tensor) -> tuple[Tensor, Tensor]:
    """The bfloat16 numbers next to float32 values, towards zero and away from it."""
    below = (x.view(torch.int32) & -65536).view(torch.float32)
    above = ((x.view(torch.int32) & -65536) + 65536).view(torch.float32)
    return below, torch.where(below == x, below, above)


def random_values(count: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, generator=generator) * 10.0 ** torch.randint(-20, 20, (count,), generator=generator)


@each_lowering
def test_a_value_becomes_one_of_its_two_neighbours(lowering: Lowering) -> None:
    x = random_values(1000)
    below, above = neighbours(x)
    (result,) = rounded(lowering, x)
    assert ((result.float() == below) | (result.float() == above)).all()
    assert (result.float() == below).any()
    assert (result.float() == above).any()


@pytest.mark.parametrize("part", [0.0625, 0.25, 0.5, 0.9])
@each_lowering
def test_the_expectation_of_the_result_is_the_value(part: float, lowering: Lowering) -> None:
    count = 6400
    step = 2.0**-7
    for sign in (1.0, -1.0):
        x = torch.full((count,), sign * (1 + part * step))
        (result,) = rounded(lowering, x)
        up = (result.float().abs() > 1).double().mean().item()
        # Five standard deviations of a mean of `count` coin tosses.
        assert abs(up - part) < 5 * math.sqrt(part * (1 - part) / count)


@each_lowering
def test_values_that_bfloat16_represents_are_kept_exactly(lowering: Lowering) -> None:
    kept = random_values(200).bfloat16()
    odd = torch.tensor([0.0, -0.0, INF, -INF, torch.finfo(torch.bfloat16).max, 2.0**-126], dtype=torch.bfloat16)
    results = rounded(lowering, kept.float(), odd.float(), torch.tensor(-3.5))
    assert torch.equal(results[0], kept)
    assert torch.equal(results[1].view(torch.int16), odd.view(torch.int16))
    assert results[2] == -3.5


@each_lowering
def test_nan_stays_nan(lowering: Lowering) -> None:
    (result,) = rounded(lowering, torch.full((70,), float("nan")))
    assert result.isnan().all()


@each_lowering
def test_a_number_per_tensor_is_rounded_too(lowering: Lowering) -> None:
    results = rounded(lowering, *[torch.tensor(1 + 2.0**-8)] * 300)
    assert {t.item() for t in results} == {1.0, 1.0078125}


@each_lowering
def test_each_call_element_tensor_and_rounding_draws_different_bits(lowering: Lowering) -> None:
    def twice(a: Tensor, b: Tensor, x: Tensor) -> None:
        st.stochastic_round_(a, x)
        st.stochastic_round_(b, x)

    x = torch.full((128,), 1 + 2.0**-8, device=lowering.device)
    fusion = FusedFunction(twice, SMALL_TILES)
    drawn = []
    for _ in range(2):
        a, b = (TensorColumn(torch.empty_like(x, dtype=torch.bfloat16) for _ in range(2)) for _ in range(2))
        with lowering.running():
            fusion(a, b, TensorColumn([x, x]))
        drawn += [*a, *b]
    tiles = [part for t in drawn for part in t.cpu().float().split(64)]
    patterns = {tuple(t.tolist()) for t in tiles}
    assert len(patterns) == len(tiles)


@each_lowering
def test_the_bits_follow_the_seed_of_torch(lowering: Lowering) -> None:
    x = torch.full((200,), 1 + 2.0**-8)
    results = []
    for seed in (0, 1, 0):
        torch.manual_seed(seed)
        results.append(rounded(lowering, x)[0])
    assert torch.equal(results[0], results[2])
    assert not torch.equal(results[0], results[1])


@each_lowering
def test_updates_below_half_a_step_are_not_lost(lowering: Lowering) -> None:
    def step(p: Tensor, lr: float) -> None:
        st.stochastic_round_(p, p.float() + lr)

    p = torch.ones(640, dtype=torch.bfloat16, device=lowering.device)
    fusion = FusedFunction(step, SMALL_TILES)
    with lowering.running():
        for _ in range(32):
            fusion(TensorColumn([p]), 2.0**-10)
    # Rounded to nearest, p would never leave 1. A step moves it with probability 1/8, by 1/128.
    deviation = 2.0**-7 * math.sqrt(32 * 1 / 8 * 7 / 8 / 640)
    assert abs(p.double().mean().item() - (1 + 32 * 2.0**-10)) < 5 * deviation
    assert fusion.traces == 1


def test_targets_other_than_bfloat16_are_refused() -> None:
    with pytest.raises(TypeError, match=r"writes to a target of bfloat16, got torch\.float16"):
        st.stochastic_round_(torch.ones(2, dtype=torch.float16), torch.ones(2))


def test_the_sources_of_elements_keep_their_strides() -> None:
    x = random_values(60).view(6, 10).t()
    target = torch.empty_like(x, dtype=torch.bfloat16)
    st.stochastic_round_(target, x)
    below, above = neighbours(x.contiguous())
    assert ((target.float() == below) | (target.float() == above)).all()
