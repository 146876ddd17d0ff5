"""`st.optim.convert`: training continues with the other class as if it had never changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from optim_oracle import assert_as_accurate, exact_maker, flat, makers, start, take_steps, train
from optimizers import STATE_SHAPES, TORCH_NAMES, VARIANTS, supported_arguments
from torch.nn import Parameter
from torch.optim.lr_scheduler import OneCycleLR, StepLR

import subtensors as st


@pytest.mark.parametrize("steps", [0, 4])
@pytest.mark.parametrize(("name", "kwargs"), VARIANTS)
def test_a_converted_optimizer_goes_on_where_torch_left_off(
    name: str, kwargs: dict[str, Any], steps: int, device: str
) -> None:
    kwargs = supported_arguments(device, name, kwargs)
    make_theirs = makers(name, kwargs)[1]
    values = [v.contiguous() for v in start(device, torch.float32, STATE_SHAPES)]
    params, optimizer = train(make_theirs, values, torch.float32, steps)
    ours = st.optim.convert(optimizer)
    assert type(ours) is getattr(st.optim, name)
    assert [g["params"] for g in ours.param_groups] == [g["params"] for g in optimizer.param_groups]
    assert ours.defaults == optimizer.defaults
    take_steps(ours, params, values, range(steps, steps + 4))
    theirs, _ = train(make_theirs, values, torch.float32, steps + 4)
    truth, _ = train(exact_maker(name, kwargs), values, torch.float64, steps + 4)
    assert_as_accurate(params, theirs, truth, torch.float32)


@pytest.mark.parametrize("name", [*TORCH_NAMES, "Adafactor"])
def test_every_shared_class_has_a_counterpart(name: str) -> None:
    params = [Parameter(torch.ones(2, 2))]
    assert type(st.optim.convert(getattr(torch.optim, name)(params))) is getattr(st.optim, name)


def test_groups_keep_their_own_values_and_names() -> None:
    a, b = Parameter(torch.ones(2)), Parameter(torch.ones(3))
    lr = torch.tensor(0.5)
    theirs = torch.optim.SGD([{"params": [("a", a)], "lr": lr}, {"params": [("b", b)], "momentum": 0.5}], lr=0.1)
    theirs.param_groups[1]["tag"] = "own"
    ours = st.optim.convert(theirs)
    assert ours.param_groups[0]["lr"] is lr
    assert [g["param_names"] for g in ours.param_groups] == [["a"], ["b"]]
    assert (ours.param_groups[1]["momentum"], ours.param_groups[1]["tag"]) == (0.5, "own")
    theirs.param_groups[1]["momentum"] = 0.0
    assert ours.param_groups[1]["momentum"] == 0.5


def test_the_old_optimizer_is_left_as_it_was() -> None:
    params, theirs = train(lambda p: torch.optim.Adam(p), start("cpu", torch.float32, STATE_SHAPES), torch.float32, 2)
    before = flat(s["exp_avg"] for s in theirs.state.values())
    ours = st.optim.convert(theirs)
    take_steps(ours, params, [p.detach().clone() for p in params], range(3))
    assert torch.equal(flat(s["exp_avg"] for s in theirs.state.values()), before)


def test_options_of_this_package_may_be_added() -> None:
    p = Parameter(torch.ones(3, dtype=torch.bfloat16))
    p.grad = torch.ones_like(p)
    theirs = torch.optim.AdamW([p], lr=1e-3)
    theirs.step()
    ours = st.optim.convert(theirs, master_weights=True)
    ours.step()
    assert ours.state[p]["master_param"].dtype == torch.float32
    assert ours.state[p]["exp_avg"].dtype == torch.float32
    assert int(ours.state[p]["step"]) == 2


def test_options_of_the_whole_optimizer_may_be_added() -> None:
    p = Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    theirs = torch.optim.AdamW([p], lr=1e-3)
    theirs.step()
    arena = st.Arena("cpu")
    ours = st.optim.convert(theirs, graph=True, arena=arena)
    ours.step()
    assert ours.replays is not None
    assert ours.state[p]["exp_avg"] in arena
    assert int(ours.state[p]["step"]) == 2


@pytest.mark.parametrize("schedule", [lambda o: StepLR(o, 2, 0.5), lambda o: OneCycleLR(o, 0.5, total_steps=12)])
def test_a_scheduler_that_is_given_the_new_optimizer_schedules_it(schedule: Any) -> None:
    values = start("cpu", torch.float64, STATE_SHAPES)

    def trained(is_converted: bool) -> list[Parameter]:
        params = [Parameter(v.clone()) for v in values]
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(params, lr=0.1)
        scheduler = schedule(optimizer)
        for number in range(10):
            if is_converted and number == 5:
                optimizer = scheduler.optimizer = st.optim.convert(optimizer)
            take_steps(optimizer, params, values, [number])
            scheduler.step()
        return params

    torch.testing.assert_close(trained(True), trained(False))


@pytest.mark.parametrize("cls", [torch.optim.LBFGS, torch.optim.SparseAdam, type("Own", (torch.optim.SGD,), {})])
def test_a_class_without_a_counterpart_is_refused_with_those_that_have_one(cls: Any) -> None:
    with pytest.raises(TypeError, match=rf"one of torch.optim's .*AdamW.*; got one of .*{cls.__name__}"):
        st.optim.convert(cls([Parameter(torch.ones(2))]))
