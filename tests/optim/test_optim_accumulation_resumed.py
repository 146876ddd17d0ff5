"""A save in the middle of an accumulation: what is loaded or copied goes on as if it had never stopped."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from kernels_on_cpu import kernels_on_cpu
from optimizers import CASES
from small_models import loss_of, model, ones
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import subtensors as st

PASSES = 3

Optimizer = st.optim.Optimizer
Pair = tuple[nn.Module, Optimizer]
Make = Callable[[Any], Optimizer]


def train(net: nn.Module, optimizer: torch.optim.Optimizer, losses: range) -> None:
    for number in losses:
        loss_of(net, number).backward()
        optimizer.step()
        optimizer.zero_grad()


def by_state_dict(net: nn.Module, optimizer: Optimizer, make: Make) -> Pair:
    saved = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
    again = model(seed=1)
    again.load_state_dict(saved[0])
    other = make(again.parameters())
    other.load_state_dict(saved[1])
    return again, other


def by_file(net: nn.Module, optimizer: Optimizer, make: Make) -> Pair:
    buffer = io.BytesIO()
    torch.save((net.state_dict(), optimizer.state_dict()), buffer)
    buffer.seek(0)
    weights, state = torch.load(buffer, weights_only=True)
    again = model(seed=1)
    again.load_state_dict(weights)
    other = make(again.parameters())
    other.load_state_dict(state)
    return again, other


def by_deepcopy(net: nn.Module, optimizer: Optimizer, make: Make) -> Pair:
    return copy.deepcopy((net, optimizer))


def by_pickle(net: nn.Module, optimizer: Optimizer, make: Make) -> Pair:
    return pickle.loads(pickle.dumps((net, optimizer)))  # type: ignore[no-any-return]


def on_the_same_parameters(net: nn.Module, optimizer: Optimizer, make: Make) -> Pair:
    other = make(net.parameters())
    other.load_state_dict(optimizer.state_dict())
    return net, other


def by_checkpoint(net: nn.Module, optimizer: Optimizer, make: Make, flat: bool = False) -> Pair:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    saved = copy.deepcopy(get_optimizer_state_dict(net, optimizer, options=options))
    again = model(seed=1)
    again.load_state_dict(net.state_dict())
    other = make(again.parameters())
    set_optimizer_state_dict(again, other, saved, options=options)
    return again, other


def by_flat_checkpoint(net: nn.Module, optimizer: Optimizer, make: Make) -> Pair:
    return by_checkpoint(net, optimizer, make, flat=True)


WAYS = [
    by_state_dict,
    by_file,
    by_deepcopy,
    by_pickle,
    on_the_same_parameters,
    by_checkpoint,
    by_flat_checkpoint,
]


def assert_resumed(make: Make, way: Callable[[nn.Module, Optimizer, Make], Pair], stops: list[int]) -> None:
    whole = model()
    train(whole, make(whole.parameters()), range(9))
    for stop in stops:
        net = model()
        optimizer = make(net.parameters())
        train(net, optimizer, range(stop))
        again, other = way(net, optimizer, make)
        assert type(other) is type(optimizer)
        train(again, other, range(stop, 9))
        torch.testing.assert_close(again.state_dict(), whole.state_dict(), rtol=0, atol=0, msg=f"stopped at {stop}")


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("name", ["SGD", "AdamW", "Rprop"])
def test_a_load_in_mid_accumulation_goes_on_as_if_it_had_never_stopped(name: str, way: Any) -> None:
    def make(params: Any) -> Optimizer:
        return getattr(st.optim, name)(params, lr=0.01, accumulate=PASSES)  # type: ignore[no-any-return]

    assert_resumed(make, way, [2, 4])  # before the first update, and after it


@pytest.mark.parametrize("way", [by_state_dict, by_deepcopy, by_checkpoint], ids=lambda way: way.__name__)
@pytest.mark.parametrize("packed", [False, True], ids=["graph", "packed"])
def test_a_captured_step_goes_on_from_a_load_in_mid_accumulation(packed: bool, way: Any, device: str) -> None:
    if device != "cpu" or torch.cuda.is_available():
        pytest.skip("kernels run on the CPU where there is no GPU")

    def make(params: Any) -> Optimizer:
        optimizer = st.optim.AdamW(params, lr=0.01, accumulate=PASSES)
        optimizer.capture(packed=packed)
        return optimizer

    with kernels_on_cpu():
        assert_resumed(make, way, [4])


def test_a_flat_checkpoint_whose_names_torch_does_not_find_is_refused() -> None:
    net, again = model(), model()
    optimizer, other = (st.optim.AdamW(n.parameters(), lr=0.01) for n in (net, again))
    train(net, optimizer, range(2))
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    saved = get_optimizer_state_dict(net, optimizer, options=options)
    other.capture(packed=True)  # gradients are always there, so torch asks for no state
    with pytest.raises(RuntimeError, match="looks for the names of state entries in this optimizer, which has none"):
        set_optimizer_state_dict(again, other, saved, options=options)


def test_masters_averages_and_clipping_go_on_with_it() -> None:
    def make(params: Any) -> Optimizer:
        return st.optim.Adam(params, lr=0.01, accumulate=PASSES, ema=0.9, max_norm=0.1, amsgrad=True)

    assert_resumed(make, by_state_dict, [1, 2, 3, 4, 5])


def test_a_count_of_passes_is_in_the_saved_state_and_the_gradients_are_while_it_is_not_0() -> None:
    (p,) = ones(1)
    optimizer = st.optim.SGD([p], lr=1.0, accumulate=2)
    assert optimizer.state_dict()["param_groups"][0]["accumulated"] == 0
    optimizer.step()
    saved = optimizer.state_dict()
    assert saved["param_groups"][0]["accumulated"] == 1
    assert torch.equal(saved["state"][0]["accumulated_grad"], torch.ones(1))
    optimizer.step()
    saved = optimizer.state_dict()
    assert saved["param_groups"][0]["accumulated"] == 0
    assert saved["state"] == {}
    assert "accumulated" not in st.optim.SGD([p]).param_groups[0]


@pytest.mark.parametrize("name", ["SGD", "Adam", "Rprop", "NAdam"])
@pytest.mark.parametrize("stop", [2, 5])
def test_torch_loads_a_state_of_mid_accumulation_and_goes_on(name: str, stop: int) -> None:
    net = model()
    optimizer = getattr(st.optim, name)(net.parameters(), lr=0.01, accumulate=PASSES)
    train(net, optimizer, range(stop))
    theirs = getattr(torch.optim, name)(net.parameters())
    theirs.load_state_dict(optimizer.state_dict())
    before = copy.deepcopy(net.state_dict())
    train(net, theirs, range(stop, stop + 2))
    assert not torch.equal(before["0.weight"], net.state_dict()["0.weight"])


def test_a_state_that_torch_made_starts_a_new_accumulation() -> None:
    (p,) = ones(1)
    theirs = torch.optim.SGD([p], lr=1.0)
    optimizer = st.optim.SGD([{"params": [p], "accumulate": 2}], lr=1.0)
    optimizer.step()
    optimizer.load_state_dict(theirs.state_dict())
    assert p.grad is None
    for expected in (1.0, 0.0):
        optimizer.zero_grad()
        (2 * p if expected else 0 * p).sum().backward()
        optimizer.step()
    assert p.item() == 0.0  # one update, by the mean of 2 and 0


def test_a_state_without_its_gradients_starts_a_new_accumulation_and_says_so() -> None:
    (p,) = ones(1)
    optimizer = st.optim.SGD([p], lr=1.0, accumulate=2)
    optimizer.step()
    saved = optimizer.state_dict()
    del saved["state"][0]
    (q,) = ones(1, grad=False)
    other = st.optim.SGD([q], lr=1.0, accumulate=2)
    with pytest.warns(UserWarning, match="saved after 1 of 2 passes, and their gradients were not"):
        other.load_state_dict(saved)
    q.grad = torch.ones(1)
    other.step()
    assert q.item() == 1.0
    third = st.optim.SGD([q], lr=1.0, accumulate=2)
    third.load_state_dict(saved)  # here the parameter has a gradient
    third.step()
    assert q.item() == 0.5


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_checkpoint_of_mid_accumulation_that_loads_into_an_optimizer_without_one_says_so(tmp_path: Path) -> None:
    def make(params: Any) -> Optimizer:
        return st.optim.AdamW(params, lr=0.01, accumulate=PASSES)

    net, again = model(), model()
    optimizer, other = make(net.parameters()), make(again.parameters())
    train(net, optimizer, range(4))
    dcp.save({"optimizer": get_optimizer_state_dict(net, optimizer)}, checkpoint_id=tmp_path, no_dist=True)
    state = get_optimizer_state_dict(again, other)
    dcp.load({"optimizer": state}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.warns(UserWarning, match="AdamW: the loaded state was saved after 1 of 3 passes"):
        set_optimizer_state_dict(again, other, state)
    assert other.param_groups[0]["accumulated"] == 0


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_asking_for_a_checkpoint_before_the_first_step_changes_nothing(case: Any, accumulate: int) -> None:
    ends = []
    for asked in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(2)])
        optimizer = case.cls(net.parameters(), accumulate=accumulate, **case.options)
        if asked:
            saved = get_optimizer_state_dict(net, optimizer)
            assert {int(state["step"]) for state in saved["state"].values() if "step" in state} <= {0}
            set_optimizer_state_dict(net, optimizer, copy.deepcopy(saved))
            assert all(p.grad is None for p in net.parameters())
        train(net, optimizer, range(7))
        ends.append(net.state_dict())
    torch.testing.assert_close(*ends, rtol=0, atol=0)


def test_a_first_step_at_a_learning_rate_of_0_counts_as_ever() -> None:
    (p,) = ones(1)
    optimizer = st.optim.AdamW([p], lr=0.0)
    optimizer.step()
    assert optimizer.state[p]["step"].item() == 1.0


def test_the_mean_is_over_the_passes_that_were_when_their_number_is_changed_in_between() -> None:
    (p,) = ones(1)
    optimizer = st.optim.SGD([p], lr=1.0, accumulate=4)
    for gradient in (1.0, 2.0, 3.0):
        p.grad = torch.full((1,), gradient)
        optimizer.step()
    p.grad = torch.full((1,), 8.0)
    optimizer.param_groups[0]["accumulate"] = 1
    optimizer.step()
    assert p.item() == 1 - 8 / 4
    optimizer.zero_grad()
    assert p.grad is None
    p.grad = torch.ones(1)
    optimizer.step()
    assert p.item() == -2.0


def test_steps_go_on_when_the_number_of_passes_becomes_one_after_an_update() -> None:
    (p,) = ones(1)
    optimizer = st.optim.SGD([p], lr=1.0, accumulate=2)
    for passes in (2, 2, 1, 1):
        optimizer.param_groups[0]["accumulate"] = passes
        p.grad = torch.ones(1)
        optimizer.step()
    assert p.item() == 1 - 1 / 2 - 1 - 1


def test_a_step_that_raises_is_not_counted() -> None:
    (p,) = ones(1)
    optimizer = st.optim.SGD([p], lr=1.0, accumulate=2)
    optimizer.step()
    dense, p.grad = p.grad, torch.ones(1).to_sparse()
    with pytest.raises(RuntimeError, match="dense gradients"):
        optimizer.step()
    p.grad = dense
    optimizer.step()
    assert p.item() == 0.5


def test_a_load_that_is_refused_changes_nothing() -> None:
    p, q = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    p.grad, q.grad = torch.ones(2), torch.ones(3)
    optimizer, other = st.optim.AdamW([p], lr=0.5), st.optim.AdamW([q], lr=0.1)
    for own in (optimizer, other):
        own.step()
    with pytest.raises(ValueError, match="has shape"):
        other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["lr"] == 0.1
    assert other.state[q]["exp_avg"].shape == (3,)
    other.step()
    assert other.state[q]["step"].item() == 2.0


def test_options_of_a_group_stay_when_a_state_is_loaded_that_has_none() -> None:
    (p,) = ones(1)
    optimizer = st.optim.SGD([{"params": [p], "max_norm": 2.0, "ema": 0.5}], lr=1.0, max_norm=1.0)
    optimizer.load_state_dict(torch.optim.SGD([p], lr=0.5).state_dict())
    group = optimizer.param_groups[0]
    assert (group["lr"], group["max_norm"], group["ema"]) == (0.5, 2.0, 0.5)
