"""References that a step keeps, and hooks that it runs only if there are any."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from kernels_on_cpu import kernels_on_cpu
from small_models import ones
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import subtensors as st
from subtensors.dispatch.torch_internals import memory


def parameters(device: torch.device, count: int = 3) -> list[torch.nn.Parameter]:
    made = [torch.nn.Parameter(torch.arange(4.0, device=device) + i) for i in range(count)]
    for p in made:
        p.grad = torch.ones_like(p)
    return made


def test_no_gradient_lives_longer_than_its_step(device: torch.device) -> None:
    params = parameters(device)
    opt = st.optim.AdamW(params)
    opt.step()
    opt.step()
    gone = [weakref.ref(p.grad) for p in params]
    opt.zero_grad(set_to_none=True)
    gc.collect()
    assert [reference() for reference in gone] == [None] * len(params)


@pytest.mark.parametrize("betas", [(0.9, 0.99), [0.9, 0.99]], ids=["tuple", "list"])
def test_a_beta_changed_between_steps_is_used_by_the_next(betas: Any, device: torch.device) -> None:
    ours, theirs = parameters(device), parameters(device)
    opt, ref = st.optim.Adam(ours, lr=0.1, betas=betas), torch.optim.Adam(theirs, lr=0.1, betas=betas)
    for step in range(6):
        for optimizer in (opt, ref):
            group = optimizer.param_groups[0]
            if step == 3 and isinstance(betas, list):
                group["betas"] = list(group["betas"])
            if step > 3 and isinstance(betas, list):
                group["betas"][0] = 0.3 + 0.1 * step  # in place: the list is the same object
            elif step > 3:
                group["betas"] = (0.3 + 0.1 * step, 0.99)
            optimizer.step()
    for ours_p, theirs_p in zip(ours, theirs, strict=True):
        torch.testing.assert_close(ours_p, theirs_p)


def test_an_option_that_appears_between_steps_is_used_by_the_next(device: torch.device) -> None:
    params = parameters(device, 1)
    opt = st.optim.SGD(params, lr=1.0)
    opt.step()
    opt.step()
    opt.param_groups[0]["maximize"] = True
    opt.step()
    torch.testing.assert_close(params[0].detach(), torch.arange(4.0, device=device) - 1)


def test_a_step_shows_in_a_profile_only_while_one_is_taken(device: torch.device) -> None:
    params = parameters(device, 1)
    opt = st.optim.SGD(params, lr=1.0)
    opt.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        opt.step()
    names = [event.key for event in profile.key_averages()]
    assert names.count("Optimizer.step#SGD.step") == 1


def test_hooks_of_an_optimizer_and_of_all_of_them_run_around_each_step(device: torch.device) -> None:
    seen: list[str] = []
    opt = st.optim.SGD(parameters(device, 1), lr=1.0)
    opt.step()
    handles = [
        opt.register_step_pre_hook(lambda *_: seen.append("before")),
        opt.register_step_post_hook(lambda *_: seen.append("after")),
        register_optimizer_step_pre_hook(lambda *_: seen.append("before any")),
        register_optimizer_step_post_hook(lambda *_: seen.append("after any")),
    ]
    opt.step()
    for handle in handles:
        handle.remove()
    opt.step()
    assert seen == ["before any", "before", "after", "after any"]


@pytest.mark.parametrize("with_kernels", [False, True], ids=["torch", "kernels"])
def test_steps_in_inference_mode_and_outside_of_it_take_turns(with_kernels: bool) -> None:
    (p,) = params = ones(1)
    optimizer = st.optim.SGD(params, max_norm=1.0)
    with kernels_on_cpu() if with_kernels else nullcontext():
        for lr, is_inference in zip((0.25, 0.5, 1.0, 0.5), (True, False, True, False), strict=True):
            optimizer.param_groups[0]["lr"] = lr
            with torch.inference_mode(is_inference):
                optimizer.step()
    assert p.item() == pytest.approx(1 - 2.25, abs=1e-4)


def test_parameters_that_move_between_steps_are_updated_at_their_new_addresses(device: torch.device) -> None:
    ours, theirs = parameters(device), parameters(device)
    opt, ref = st.optim.Adam(ours, lr=0.1), torch.optim.Adam(theirs, lr=0.1)
    left: list[Tensor] = []
    for step in range(5):
        for optimizer in (opt, ref):
            optimizer.step()
        if step == 2:
            left = [p.data for p in ours]
            for p in ours:
                p.data = p.data.clone()
    for ours_p, theirs_p, old in zip(ours, theirs, left, strict=True):
        torch.testing.assert_close(ours_p, theirs_p)
        assert not torch.equal(ours_p, old)


def test_the_old_memory_of_a_parameter_that_moved_is_given_back(device: torch.device) -> None:
    params = parameters(device)
    opt = st.optim.Adam(params)
    for _ in range(3):
        opt.step()
        old = memory.StorageUseCounts(params)
        for p in params:
            p.data = p.data.clone()
        # No one but this test holds it, so that an offload to the host frees memory of the device.
        assert old.counts() == [1] * len(params)


def test_a_parameter_can_be_swapped_where_modules_ask_for_it() -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        net = torch.nn.Linear(3, 2)
        optimizer = st.optim.Adam(net.parameters(), lr=0.1)
        net(torch.ones(4, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        net.to(torch.float64)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert net.weight.dtype == torch.float64
