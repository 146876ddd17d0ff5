"""Lists, fused functions and optimizers on a GPU that is not the current one, and over two of them."""

from __future__ import annotations

import copy

import pytest
import torch
from second_gpu import HERE, NEEDS_TWO, THERE, assert_alike, only_there
from torch import Tensor, nn

import subtensors as st

pytestmark = NEEDS_TWO

SHAPES = [(7,), (3, 5), (), (65, 33), (0,), (2000,)]


def values(*places: str, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator).to(places[i % len(places)]) for i, s in enumerate(SHAPES)]


@st.fused
def normalised(p: Tensor, g: Tensor, *, lr: float) -> Tensor:
    p.sub_(lr * g / (g.norm() + 1))
    return p.sum()


@pytest.mark.parametrize("places", [(THERE,), (HERE, THERE)], ids=["the other one", "both"])
@pytest.mark.parametrize("current", [0, 1])
def test_fused_maths_runs_where_its_tensors_are(places: tuple[str, ...], current: int) -> None:
    p, g = values(*places), values(*places, seed=1)
    expected = [t.clone() for t in p]
    sums = [normalised.function(t, d, lr=0.1) for t, d in zip(expected, g, strict=True)]
    with torch.cuda.device(current):
        for stream in (None, torch.cuda.Stream(THERE)):
            ours = [t.clone() for t in p]
            torch.cuda.synchronize(THERE)
            with torch.cuda.stream(stream):
                totals = normalised(st.TensorList(ours), st.TensorList(g), lr=0.1)
            torch.cuda.synchronize(THERE)
            assert torch.cuda.current_device() == current
            assert_alike(ours, expected)
            assert_alike(totals, sums)


def test_a_list_over_both_is_packed_on_each_and_maps() -> None:
    x, y = values(HERE, THERE), values(HERE, THERE, seed=1)
    packed, other = st.TensorList([t.clone() for t in x]).pack(), st.TensorList(y)
    assert sorted(str(flat.device) for flat in packed.flats) == [HERE, THERE]
    assert_alike(packed * 2 + other, [a * 2 + b for a, b in zip(x, y, strict=True)])
    assert_alike(packed.add_(other).exp(), [(a + b).exp() for a, b in zip(x, y, strict=True)])
    assert_alike(other.to(THERE), [t.to(THERE) for t in y])


def test_a_norm_over_both_is_torchs_and_clips_as_torchs_does() -> None:
    ours, theirs = ([nn.Parameter(v) for v in values(HERE, THERE)] for _ in range(2))
    for params in (ours, theirs):
        for p, g in zip(params, values(HERE, THERE, seed=1), strict=True):
            p.grad = g
    expected = nn.utils.clip_grad_norm_(theirs, 0.5)
    actual = st.clip_grad_norm_(ours, 0.5)
    assert actual.device == expected.device
    torch.testing.assert_close(actual, expected)
    assert_alike([p.grad for p in ours], [p.grad for p in theirs])


@pytest.mark.parametrize("packed", [False, True])
def test_a_step_is_captured_on_a_gpu_that_is_not_the_current_one(packed: bool, launched: list[int]) -> None:
    ours, theirs = ([nn.Parameter(v) for v in values(THERE)] for _ in range(2))
    optimizer, eager = (st.optim.AdamW(params, lr=0.1, max_norm=0.5) for params in (ours, theirs))
    capture = optimizer.capture(packed=packed)
    for number in range(6):
        for params in (ours, theirs):
            for p, g in zip(params, values(THERE, seed=number + 1), strict=True):
                p.grad = g
        for stepped in (optimizer, eager):
            stepped.param_groups[0]["lr"] = 0.1 / (number + 1)
            stepped.step()
    assert only_there(launched)
    assert capture.replays
    assert_alike(ours, list(theirs))


MIXED = {
    "AdamW, clipped": lambda params: st.optim.AdamW(params, lr=0.1, max_norm=0.5),
    "SGD with masters and averages": lambda params: st.optim.SGD(params, lr=0.1, master_weights=True, ema=0.9),
    "Adafactor": lambda params: st.optim.Adafactor(params, lr=0.1),
    "Muon": lambda params: st.optim.Muon([p for p in params if p.ndim == 2], lr=0.1),
}


@pytest.mark.parametrize("name", MIXED)
def test_parameters_of_several_dtypes_are_updated_as_on_the_current_gpu(name: str, launched: list[int]) -> None:
    dtypes = (torch.float32, torch.bfloat16)
    ended = []
    for place in (THERE, HERE):
        params = [nn.Parameter(v.to(dtypes[i % 2])) for i, v in enumerate(values(place))]
        optimizer = MIXED[name](params)
        for number in range(3):
            for p, g in zip(params, values(place, seed=number + 1), strict=True):
                p.grad = g.to(p.dtype)
            optimizer.step()
        if place == THERE:
            assert only_there(launched)
        ended.append([p.detach().to(HERE) for p in params])
    assert_alike(*ended)


def test_a_scaler_skips_the_step_on_both_where_one_overflows() -> None:
    params = [nn.Parameter(v) for v in values(HERE, THERE)]
    optimizer = st.optim.AdamW(params, lr=0.1)
    scaler = torch.amp.GradScaler("cuda", init_scale=4.0)
    scaler.scale(torch.ones((), device=HERE))
    for overflows in (False, True):
        before = copy.deepcopy([p.detach() for p in params])
        for p, g in zip(params, values(HERE, THERE, seed=1), strict=True):
            p.grad = 4 * g
        if overflows:
            params[1].grad[0, 0] = torch.inf  # type: ignore[index]
        scaler.step(optimizer)
        scaler.update()
        moved = [not torch.equal(p, b) for p, b in zip(params, before, strict=True) if p.numel()]
        assert moved == [not overflows] * len(moved)


def test_gradients_flow_through_a_list_over_both() -> None:
    x, y = ([v.requires_grad_() for v in values(HERE, THERE)] for _ in range(2))
    total = sum(t.to(HERE).sum() for t in (st.TensorList(x).pow(3) * 2))
    total.backward()  # type: ignore[union-attr]
    sum((2 * t.pow(3)).to(HERE).sum() for t in y).backward()  # type: ignore[union-attr]
    assert_alike([t.grad for t in x], [t.grad for t in y])  # type: ignore[misc]
