"""Optimizers whose state is kept in 8 bits a number or in bfloat16: they train, save, load and refuse."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernels_on_cpu import kernels_on_cpu
from optimizers import LOW_BIT
from torch import Tensor
from torch.nn import Parameter

import subtensors as st
from subtensors.kernels.fused import blockwise

SHAPES = [(64, 80), (4100,), (7,), (3, 37, 41)]
FORMS: list[Any] = ["int8", torch.bfloat16]


def start(device: str = "cpu", dtype: torch.dtype = torch.float32) -> list[Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [Parameter(torch.randn(s, generator=generator).to(device, dtype)) for s in SHAPES]


def take_steps(optimizer: torch.optim.Optimizer, params: list[Parameter], steps: range) -> None:
    for number in steps:
        generator = torch.Generator().manual_seed(number + 1)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(p.device, p.dtype)
        optimizer.step()


def flat(tensors: Any) -> Tensor:
    return torch.cat([t.detach().cpu().double().reshape(-1) for t in tensors])


def state_of(optimizer: torch.optim.Optimizer, params: list[Parameter]) -> list[Tensor]:
    return [value for p in params for value in optimizer.state[p].values()]


def final_losses(make: Callable[[Any], torch.optim.Optimizer], device: str, steps: int = 150) -> float:
    """What a small network knows, in the end, of the next symbol of a random Markov chain: the exact cross-entropy."""
    torch.manual_seed(0)
    symbols, width = 64, 96
    chain = torch.softmax(3 * torch.randn(symbols, symbols), 1)
    net = torch.nn.Sequential(
        torch.nn.Embedding(symbols, width),
        torch.nn.Linear(width, 192),
        torch.nn.GELU(),
        torch.nn.LayerNorm(192),
        torch.nn.Linear(192, 192),
        torch.nn.GELU(),
        torch.nn.Linear(192, symbols),
    ).to(device)
    optimizer = make(net.parameters())
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randint(symbols, (64,), generator=generator)
        y = torch.multinomial(chain[x], 1, generator=generator)[:, 0]
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x.to(device)), y.to(device)).backward()
        optimizer.step()
    with torch.no_grad():
        logits = net(torch.arange(symbols, device=device)).cpu()
        return float(-(chain * torch.log_softmax(logits, 1)).sum(1).mean())


@pytest.mark.parametrize(
    ("cls", "arguments"),
    [
        (st.optim.AdamW, {"lr": 3e-3}),
        pytest.param(st.optim.Adam, {"lr": 3e-3, "betas": (0.9, 0.95), "amsgrad": True}, marks=pytest.mark.slow),
        pytest.param(st.optim.Lion, {"lr": 5e-4}, marks=pytest.mark.slow),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_training_ends_within_one_percent_of_the_loss_that_float32_state_reaches(
    cls: Any, arguments: dict[str, Any], device: str
) -> None:
    untrained = final_losses(lambda params: cls(params, **arguments), device, steps=0)
    full = final_losses(lambda params: cls(params, **arguments), device)
    assert full < 0.7 * untrained
    for form in FORMS:
        low = final_losses(lambda params, form=form: cls(params, state_dtype=form, **arguments), device)
        assert low <= 1.01 * full, form


@pytest.mark.parametrize("cls", LOW_BIT)
def test_steps_stay_near_those_with_float32_state(cls: Any, device: str) -> None:
    full, low = start(device), start(device)
    take_steps(cls(full, lr=0.01), full, range(20))
    take_steps(cls(low, lr=0.01, state_dtype="int8"), low, range(20))
    moved = (flat(full) - flat(start())).norm()
    assert (flat(low) - flat(full)).norm() <= 0.1 * moved


def test_what_is_below_half_a_step_of_bfloat16_is_taken_now_and_then(device: str) -> None:
    p = Parameter(torch.zeros(20_000, device=device))
    optimizer = st.optim.AdamW([p], betas=(0.9, 0.999), weight_decay=0.0, state_dtype=torch.bfloat16)
    p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.state[p]["exp_avg_sq"].fill_(1.0)
    for _ in range(100):
        optimizer.step()
    v = optimizer.state[p]["exp_avg_sq"]
    assert v.dtype == torch.bfloat16
    # Rounded to the nearest, 0.999 would be 1 again, for ever.
    assert abs(v.float().mean().item() - 0.999**100) < 0.002


def test_state_is_codes_and_scales_and_small_tensors_keep_float32(device: str) -> None:
    params = start(device)
    optimizer = st.optim.AdamW(params, state_dtype="int8")
    take_steps(optimizer, params, range(2))
    for p in params:
        state = optimizer.state[p]
        if p.numel() < 4096:
            assert state.keys() == {"step", "exp_avg", "exp_avg_sq"}
            assert state["exp_avg"].dtype == torch.float32
            continue
        assert {name: t.dtype for name, t in state.items()} == {
            "step": torch.float32,
            "exp_avg": torch.int8,
            "exp_avg_absmax": torch.float32,
            "exp_avg_sq": torch.uint8,
            "exp_avg_sq_absmax": torch.float32,
        }
        assert state["exp_avg"].shape == p.shape
        assert state["exp_avg_absmax"].shape == (-(-p.numel() // 256),)


@pytest.mark.parametrize("cls", [st.optim.AdamW, st.optim.Lion])
def test_the_kernels_of_a_step_do_what_torch_does(cls: Any) -> None:
    ours, plain = start()[1:3], start()[1:3]
    first, second = cls(ours, lr=0.01, state_dtype="int8"), cls(plain, lr=0.01, state_dtype="int8")
    with kernels_on_cpu():
        take_steps(first, ours, range(2))
    take_steps(second, plain, range(2))
    # A number between two codes may be given either; the step of such an element is another by a code's width.
    apart = (flat(ours) - flat(plain)).abs()
    assert apart.max() <= 0.01
    rounding = 4 * torch.finfo(torch.float32).eps * flat(plain).abs().max()
    assert (apart > rounding).double().mean() <= 1e-3
    codes = [(a.int() - b.int()).abs() for a, b in zip(state_of(first, ours), state_of(second, plain), strict=True)]
    assert all(c.max() <= 1 for c in codes)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_an_overflow_changes_no_bit_of_the_state(form: Any, device: str) -> None:
    params = start(device)
    optimizer = st.optim.AdamW(params, lr=0.01, amsgrad=True, state_dtype=form)
    take_steps(optimizer, params, range(3))
    before = [t.clone() for t in (*params, *state_of(optimizer, params))]
    optimizer.grad_scale = torch.tensor(2.0, device=device)
    optimizer.found_inf = torch.tensor(1.0, device=device)
    for p in params:
        p.grad = torch.full_like(p, math.inf)
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip((*params, *state_of(optimizer, params)), before, strict=True))


def test_narrow_parameters_with_masters_keep_state_in_codes_too(device: str) -> None:
    params = start(device, torch.bfloat16)
    optimizer = st.optim.AdamW(params, lr=1e-4, master_weights=True, state_dtype="int8")
    take_steps(optimizer, params, range(3))
    state = optimizer.state[params[0]]
    assert state["exp_avg"].dtype == torch.int8
    assert torch.equal(params[0], state["master_param"].to(torch.bfloat16))


@pytest.mark.gpu
def test_a_step_makes_no_temporary_of_a_parameters_size() -> None:
    p = Parameter(torch.randn(1 << 24, device="cuda"))
    optimizer = st.optim.AdamW([p], state_dtype="int8")
    p.grad = torch.randn_like(p)
    for _ in range(2):
        optimizer.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer.step()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < p.numel() // 100


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_captured_step_is_the_step(form: Any) -> None:
    captured, plain = start("cuda"), start("cuda")
    ours = st.optim.AdamW(captured, lr=0.01, state_dtype=form)
    theirs = st.optim.AdamW(plain, lr=0.01, state_dtype=form)
    take_steps(ours, captured, range(2))
    take_steps(theirs, plain, range(2))
    ours.capture()
    take_steps(ours, captured, range(2, 6))
    take_steps(theirs, plain, range(2, 6))
    if form == "int8":
        assert torch.equal(flat(captured), flat(plain))
    else:
        assert (flat(captured) - flat(plain)).norm() <= 0.05 * (flat(plain) - flat(start())).norm()


@pytest.mark.parametrize("cls", LOW_BIT)
def test_a_saved_state_is_in_float32_and_loads_to_the_same_bits(cls: Any, device: str) -> None:
    params = start(device)
    optimizer = cls(params, state_dtype="int8")
    take_steps(optimizer, params, range(3))
    saved = copy.deepcopy(optimizer.state_dict())
    assert {t.dtype for state in saved["state"].values() for t in state.values()} == {torch.float32}
    again = cls(params, state_dtype="int8")
    again.load_state_dict(saved)
    for p in params:
        assert optimizer.state[p].keys() == again.state[p].keys()
        assert all(torch.equal(value, again.state[p][name]) for name, value in optimizer.state[p].items())


def test_training_goes_on_with_torch_from_a_saved_state_and_back(device: str) -> None:
    params = start(device)
    optimizer = st.optim.AdamW(params, lr=0.01, state_dtype="int8")
    take_steps(optimizer, params, range(3))
    theirs = torch.optim.AdamW(params, lr=0.01)
    theirs.load_state_dict(optimizer.state_dict())
    state = theirs.state[params[0]]
    assert state.keys() == {"step", "exp_avg", "exp_avg_sq"}
    codes, scales = optimizer.state[params[0]]["exp_avg"], optimizer.state[params[0]]["exp_avg_absmax"]
    assert torch.equal(state["exp_avg"], blockwise.dequantize(codes, scales, True))
    take_steps(theirs, params, range(3, 5))
    back = st.optim.AdamW(params, lr=0.01, state_dtype="int8")
    back.load_state_dict({**theirs.state_dict(), "param_groups": back.state_dict()["param_groups"]})
    assert back.state[params[0]]["exp_avg_sq"].dtype == torch.uint8
    take_steps(back, params, range(5, 6))
    assert back.state[params[0]]["step"].item() == 6


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"])
def test_a_copied_optimizer_goes_on_like_the_original(copied: Callable[[Any], Any]) -> None:
    params = start()
    optimizer = st.optim.AdamW(params, state_dtype="int8")
    take_steps(optimizer, params, range(2))
    other = copied(optimizer)
    others = other.param_groups[0]["params"]
    take_steps(optimizer, params, range(2, 4))
    take_steps(other, others, range(2, 4))
    assert torch.equal(flat(params), flat(others))


def test_the_form_may_change_between_steps(device: str) -> None:
    params = start(device)
    optimizer = st.optim.AdamW(params, lr=0.01)
    take_steps(optimizer, params, range(2))
    before = optimizer.state[params[0]]["exp_avg"].clone()
    optimizer.param_groups[0]["state_dtype"] = "int8"
    take_steps(optimizer, params, range(2, 3))
    assert optimizer.state[params[0]]["exp_avg"].dtype == torch.int8
    optimizer.param_groups[0]["state_dtype"] = None
    take_steps(optimizer, params, range(3, 4))
    state = optimizer.state[params[0]]
    assert state.keys() == {"step", "exp_avg", "exp_avg_sq"}
    plain = start(device)
    full = st.optim.AdamW(plain, lr=0.01)
    take_steps(full, plain, range(4))
    difference = (state["exp_avg"] - full.state[plain[0]]["exp_avg"]).norm()
    assert difference <= 0.05 * before.norm()


def test_an_instance_of_torchs_is_converted_to_fewer_bits(device: str) -> None:
    params = start(device)
    theirs = torch.optim.AdamW(params, lr=0.01)
    take_steps(theirs, params, range(3))
    ours = st.optim.convert(theirs, state_dtype="int8")
    codes, scales = ours.state[params[0]]["exp_avg"], ours.state[params[0]]["exp_avg_absmax"]
    assert codes.dtype == torch.int8
    difference = blockwise.dequantize(codes, scales, True) - theirs.state[params[0]]["exp_avg"]
    assert difference.norm() <= 0.02 * theirs.state[params[0]]["exp_avg"].norm()
    take_steps(ours, params, range(3, 4))
    assert ours.state[params[0]]["step"].item() == 4


def test_clipping_and_averaged_weights_go_with_codes(device: str) -> None:
    low, full = start(device), start(device)
    options: Any = {"lr": 0.01, "max_norm": 1.0, "ema": 0.9}
    take_steps(st.optim.AdamW(low, state_dtype="int8", **options), low, range(10))
    take_steps(st.optim.AdamW(full, **options), full, range(10))
    assert (flat(low) - flat(full)).norm() <= 0.1 * (flat(full) - flat(start())).norm()


@pytest.mark.parametrize("value", ["int4", torch.float16, 8])
def test_another_form_is_refused_where_it_is_given(value: Any) -> None:
    with pytest.raises(ValueError, match="expected 'int8'"):
        st.optim.AdamW(start(), state_dtype=value)


def test_an_optimizer_without_low_bit_state_refuses_a_state_dtype() -> None:
    with pytest.raises(ValueError, match="SGD keeps its state as it is"):
        st.optim.SGD(start(), momentum=0.9, state_dtype="int8")
