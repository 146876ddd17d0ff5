"""State, parameters and options that a program replaces, moves or removes between steps are those of the next step."""

from __future__ import annotations

import collections

import pytest
import torch
from torch.nn import Parameter

import subtensors as st


def stepped() -> tuple[list[Parameter], st.optim.SGD]:
    params = [Parameter(torch.zeros(2)), Parameter(torch.zeros(3))]
    optimizer = st.optim.SGD(params, lr=1.0, momentum=0.5)
    for _ in range(2):
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
    assert [p[0].item() for p in params] == [-2.5, -2.5]
    return params, optimizer


def test_a_replaced_state_entry_is_the_one_that_the_next_step_uses() -> None:
    params, optimizer = stepped()
    optimizer.state[params[1]]["momentum_buffer"] = torch.zeros(3)
    optimizer.step()
    assert [p[0].item() for p in params] == [-2.5 - 1.75, -2.5 - 1.0]
    assert optimizer.state[params[1]]["momentum_buffer"].tolist() == [1.0, 1.0, 1.0]


def test_a_removed_state_starts_again() -> None:
    params, optimizer = stepped()
    del optimizer.state[params[0]]
    optimizer.state[params[1]] = {}
    optimizer.step()
    assert [p[0].item() for p in params] == [-3.5, -3.5]
    del optimizer.state[params[0]]["momentum_buffer"]
    optimizer.step()
    assert [p[0].item() for p in params] == [-4.5, -5.0]


def test_replacing_the_state_dict_of_an_optimizer_starts_its_state_again() -> None:
    params, optimizer = stepped()
    optimizer.state = collections.defaultdict(dict)
    optimizer.step()
    assert [p[0].item() for p in params] == [-3.5, -3.5]
    for p, entry in optimizer.state.items():
        # As libraries do that move a state to another device.
        optimizer.state[p] = type(entry)({name: torch.zeros_like(t) for name, t in entry.items()})
    optimizer.step()
    assert [p[0].item() for p in params] == [-4.5, -4.5]


def test_state_whose_memory_moved_is_found_where_it_is_now() -> None:
    params, optimizer = stepped()
    old = [optimizer.state[p]["momentum_buffer"].data for p in params]
    for p in params:
        optimizer.state[p]["momentum_buffer"].data = torch.zeros_like(p)
    optimizer.step()
    assert [p[0].item() for p in params] == [-3.5, -3.5]
    assert [t[0].item() for t in old] == [1.5, 1.5]


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.usefixtures("kernels")
def test_state_that_is_transposed_where_it_lies_is_read_as_it_is_now(dtype: torch.dtype, device: str) -> None:
    # A class of its own has plans of its own, which are met by identity.
    class Momentum(st.optim.SGD):
        pass

    trained = []
    for cls in (Momentum, torch.optim.SGD):
        params = [Parameter(torch.zeros(s, dtype=dtype, device=device)) for s in [(0,), (9,), (1, 9), (3, 3)]]
        optimizer = cls(params, lr=0.5, momentum=0.5)
        for _ in range(4):
            for p in params:
                p.grad = torch.arange(p.numel(), device=device).to(dtype).view(p.shape)
            optimizer.step()
            buffer = optimizer.state[params[-1]]["momentum_buffer"]
            buffer.data = buffer.data.t()
        trained.append([p.detach() for p in params])
    torch.testing.assert_close(*trained)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.usefixtures("kernels")
def test_captured_state_that_is_transposed_in_place_is_read_as_it_is_now(packed: bool, device: str) -> None:
    trained = []
    for cls in (st.optim.SGD, torch.optim.SGD):
        p = Parameter(torch.zeros(3, 3, dtype=torch.float64, device=device))
        p.grad = torch.arange(9.0, dtype=torch.float64, device=device).view(3, 3)
        optimizer = cls([p], lr=0.5, momentum=0.5)
        if isinstance(optimizer, st.optim.SGD):
            optimizer.capture(packed=packed)
        for _ in range(4):
            optimizer.step()
            optimizer.state[p]["momentum_buffer"].t_()
        trained.append(p.detach())
    torch.testing.assert_close(*trained)


def test_a_parameter_whose_memory_moved_is_updated_where_it_is_now() -> None:
    params, optimizer = stepped()
    old = params[0].data
    params[0].data = torch.zeros(2)
    optimizer.step()
    assert params[0].tolist() == [-1.75, -1.75]
    assert old.tolist() == [-2.5, -2.5]


def test_a_parameter_put_in_the_place_of_another_starts_without_state() -> None:
    params, optimizer = stepped()
    fresh = Parameter(torch.zeros(2))
    fresh.grad = torch.ones(2)
    optimizer.param_groups[0]["params"][0] = fresh
    optimizer.step()
    assert [fresh[0].item(), params[0][0].item(), params[1][0].item()] == [-1.0, -2.5, -4.25]


@pytest.mark.parametrize("place", [0, 1, 2, 3])
@pytest.mark.parametrize("shape", [(), (1,), (2,), (3,), (0,)], ids=str)
@pytest.mark.parametrize("in_place", [True, False], ids=["list changed", "list replaced"])
def test_a_parameter_that_takes_any_place_of_another_is_the_one_that_is_updated(
    place: int, shape: tuple[int, ...], in_place: bool
) -> None:
    params = [Parameter(torch.zeros(s)) for s in ((2,), (), (3,), (1,))]
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer = st.optim.SGD(params, lr=1.0)
    optimizer.step()
    old = params[place]
    # Equal in value to what it replaces, where the shapes agree.
    fresh = Parameter(torch.full(shape, -1.0))
    fresh.grad = torch.ones(shape)
    now = optimizer.param_groups[0]["params"]
    now[place] = fresh
    if not in_place:
        optimizer.param_groups[0]["params"] = list(now)
    optimizer.step()
    assert torch.equal(fresh, torch.full(shape, -2.0))
    assert torch.equal(old, torch.full_like(old, -1.0))
    assert all(torch.equal(p, torch.full_like(p, -2.0)) for p in now)
    del now[place]
    optimizer.param_groups[0]["params"] = now
    optimizer.step()
    assert torch.equal(fresh, torch.full(shape, -2.0))
    assert all(torch.equal(p, torch.full_like(p, -3.0)) for p in now)


def test_options_changed_between_steps_make_the_state_they_need() -> None:
    p = Parameter(torch.zeros(2))
    optimizer = st.optim.SGD([p], lr=1.0)
    p.grad = torch.ones(2)
    optimizer.step()
    assert optimizer.state_dict()["state"] == {}
    optimizer.param_groups[0]["momentum"] = 0.5
    optimizer.step()
    optimizer.step()
    assert p.tolist() == [-1 - 1 - 1.5] * 2
    # The buffer has been written before: from here on every step is damped.
    optimizer.param_groups[0]["dampening"] = 0.5
    optimizer.step()
    assert p.tolist() == [-3.5 - (0.75 + 0.5)] * 2


def test_a_momentum_that_comes_to_averages_starts_undamped() -> None:
    p = Parameter(torch.zeros(2))
    optimizer = st.optim.SGD([p], lr=1.0, dampening=0.5, ema=0.5)
    for momentum in (0.0, 0.5):
        optimizer.param_groups[0]["momentum"] = momentum
        p.grad = torch.ones(2)
        optimizer.step()
    assert p.tolist() == [-2.0] * 2
