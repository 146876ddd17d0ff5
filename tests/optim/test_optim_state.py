"""Saved states of the optimizers: interchange with torch.optim, loading, refusals, copies."""

from __future__ import annotations

import copy
import io
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from optim_oracle import assert_as_accurate, flat, makers, start, take_steps, train
from optimizers import STATE_SHAPES, VARIANTS, WITH_STATE, supported_arguments
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.nn import Parameter

import subtensors as st
from subtensors.optim.hyperparameters import COUNTERPARTS


@pytest.mark.parametrize("steps", [0, 1, 7])
@pytest.mark.parametrize(("name", "kwargs"), VARIANTS)
@pytest.mark.parametrize("ours_first", [True, False], ids=["ours to torch", "torch to ours"])
def test_training_goes_on_with_the_other_package_from_a_saved_state(
    name: str, kwargs: dict[str, Any], steps: int, ours_first: bool, device: str
) -> None:
    make, make_theirs = makers(name, supported_arguments(device, name, kwargs))
    first, second = (make, make_theirs) if ours_first else (make_theirs, make)
    # torch's fused step on a CPU takes a gradient to have the strides of its parameter.
    values = [v.contiguous() for v in start(device, torch.float32, STATE_SHAPES)]

    params, optimizer = train(first, values, torch.float32, steps)
    saved = copy.deepcopy(optimizer.state_dict())
    continued = second(params)
    continued.load_state_dict(saved)
    take_steps(continued, params, values, range(steps, steps + 5))

    theirs, _ = train(make_theirs, values, torch.float32, steps + 5)
    truth, _ = train(make_theirs, values, torch.float64, steps + 5)
    assert_as_accurate(params, theirs, truth, torch.float32)


@pytest.mark.parametrize("steps", [0, 1, 7])
@pytest.mark.parametrize(("name", "kwargs"), VARIANTS)
def test_a_saved_state_has_the_keys_dtypes_shapes_and_devices_that_torch_saves(
    name: str, kwargs: dict[str, Any], steps: int, device: str
) -> None:
    make, make_theirs = makers(name, supported_arguments(device, name, kwargs))
    values = start(device, torch.bfloat16 if not kwargs.get("fused") else torch.float32, STATE_SHAPES)
    if kwargs.get("fused"):  # torch's own wants parameters and gradients of one layout
        values = [v.contiguous() for v in values]
    ours = train(make, values, values[0].dtype, steps)[1].state_dict()
    theirs = train(make_theirs, values, values[0].dtype, steps)[1].state_dict()
    assert ours["param_groups"] == theirs["param_groups"]

    def described(saved: dict[str, Any]) -> dict[int, list[Any]]:
        return {
            index: [(name, t.shape, t.dtype, t.device) for name, t in state.items()]
            for index, state in saved["state"].items()
        }

    assert described(ours) == described(theirs)


def test_a_state_survives_torch_save_with_weights_only() -> None:
    params, optimizer = train(
        lambda p: st.optim.AdamW(p, lr=0.1), start("cpu", torch.float32, STATE_SHAPES), torch.float32, 3
    )
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    other = st.optim.AdamW(params)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    assert other.param_groups[0]["lr"] == 0.1
    for p in params:
        assert other.state[p].keys() == optimizer.state[p].keys()
        assert all(torch.equal(other.state[p][name], value) for name, value in optimizer.state[p].items())


def test_loading_copies_so_that_the_saved_state_is_left_alone() -> None:
    values = start("cpu", torch.float32, STATE_SHAPES)
    params, optimizer = train(lambda p: st.optim.Adam(p), values, torch.float32, 2)
    saved = optimizer.state_dict()
    before = copy.deepcopy(saved)
    other = st.optim.Adam(params)
    other.load_state_dict(saved)
    take_steps(other, params, values, range(3))
    for index, state in before["state"].items():
        assert all(torch.equal(saved["state"][index][name], value) for name, value in state.items())


def test_step_counts_are_float32_on_the_parameters_device_also_after_a_load(device: str) -> None:
    values = start(device, torch.float32, STATE_SHAPES)
    params, theirs = train(lambda p: torch.optim.Adam(p), values, torch.float32, 4)
    assert {s["step"].device.type for s in theirs.state.values()} == {"cpu"}
    ours = st.optim.Adam(params)
    ours.load_state_dict(theirs.state_dict())
    counts = [s["step"] for s in ours.state.values()]
    assert {(t.device.type, t.dtype, t.dim(), float(t)) for t in counts} == {(device, torch.float32, 0, 4.0)}


def test_options_that_an_older_save_does_not_know_keep_what_this_optimizer_was_made_with() -> None:
    params = [Parameter(torch.ones(3, dtype=torch.bfloat16))]
    saved = torch.optim.Adam(params).state_dict()
    del saved["param_groups"][0]["amsgrad"]
    optimizer = st.optim.Adam(params, amsgrad=True, master_weights=True)
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["amsgrad"] is True
    assert optimizer.param_groups[0]["master_weights"] is True


def test_a_state_of_another_optimizer_is_refused_and_changes_nothing() -> None:
    p, q = Parameter(torch.ones(2)), Parameter(torch.ones(2))
    other, optimizer = st.optim.SGD([p], lr=0.5, momentum=0.9), st.optim.AdamW([q], lr=1e-3)
    p.grad = torch.ones(2)
    other.step()
    with pytest.raises(KeyError, match="another optimizer: it has"):
        optimizer.load_state_dict(other.state_dict())
    assert optimizer.param_groups[0]["lr"] == 1e-3
    assert not optimizer.state


def test_adamw_stays_decoupled_when_it_loads_a_state_of_adam() -> None:
    params = [Parameter(torch.ones(3))]
    optimizer = st.optim.AdamW(params)
    optimizer.load_state_dict(torch.optim.Adam(params, weight_decay=0.1).state_dict())
    group = optimizer.param_groups[0]
    assert (group["decoupled_weight_decay"], group["weight_decay"]) == (True, 0.1)


def test_a_state_entry_of_another_shape_is_refused_with_both_shapes() -> None:
    saved = train(lambda p: st.optim.Adam(p), [torch.ones(3)], torch.float32, 1)[1].state_dict()
    with pytest.raises(ValueError, match=r"'exp_avg' has shape \(3,\), and \(4,\) is expected"):
        st.optim.Adam([Parameter(torch.ones(4))]).load_state_dict(saved)


def test_a_state_with_another_number_of_groups_is_refused() -> None:
    saved = st.optim.SGD([Parameter(torch.ones(1))]).state_dict()
    groups = [{"params": [Parameter(torch.ones(1))]} for _ in range(2)]
    with pytest.raises(ValueError, match="different number of parameter groups"):
        st.optim.SGD(groups).load_state_dict(saved)


def test_load_hooks_see_the_state_before_and_after_and_may_change_it() -> None:
    params, optimizer = train(lambda p: st.optim.Adam(p), [torch.ones(3)], torch.float32, 1)
    saved = optimizer.state_dict()
    seen: list[Tensor] = []

    def double_the_average(_: Any, given: dict[str, Any]) -> dict[str, Any]:
        entry = given["state"][0]
        return {**given, "state": {0: {**entry, "exp_avg": entry["exp_avg"] * 2}}}

    other = st.optim.Adam(params)
    other.register_load_state_dict_pre_hook(double_the_average)
    other.register_load_state_dict_post_hook(lambda o: seen.append(o.state[params[0]]["exp_avg"].clone()))
    other.load_state_dict(saved)
    assert torch.equal(seen[0], saved["state"][0]["exp_avg"] * 2)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["copy", "pickle"]
)
def test_a_copied_optimizer_goes_on_like_the_original(copied: Any) -> None:
    values = start("cpu", torch.float32, STATE_SHAPES)
    params, optimizer = train(lambda p: st.optim.Adam(p, lr=0.1), values, torch.float32, 3)
    params_too, optimizer_too = copied((params, optimizer))
    take_steps(optimizer, params, values, range(3, 6))
    assert not torch.equal(flat(params), flat(params_too))
    take_steps(optimizer_too, params_too, values, range(3, 6))
    assert torch.equal(flat(params), flat(params_too))


@pytest.mark.parametrize(
    ("saved", "into"),
    [
        ("Adam", "NAdam"),
        ("NAdam", "Adam"),
        ("Adam", "Adamax"),
        ("Adam", "Lion"),
        ("Adam", "AdamWScheduleFree"),
        ("RMSprop", "Adadelta"),
        ("Adadelta", "RMSprop"),
        ("SGD", "AdamW"),
        ("SOAP", "Shampoo"),
    ],
)
@pytest.mark.parametrize("checkpoint", [False, True], ids=["state_dict", "checkpoint"])
def test_a_state_that_shares_some_entries_is_refused_too(saved: str, into: str, checkpoint: bool) -> None:
    nets = [torch.nn.Linear(3, 3) for _ in range(2)]
    first = getattr(st.optim, saved)(nets[0].parameters(), **WITH_STATE[saved])
    second = getattr(st.optim, into)(nets[1].parameters(), **WITH_STATE[into])
    nets[0](torch.ones(2, 3)).sum().backward()
    first.step()
    lr = second.param_groups[0]["lr"]
    state = get_optimizer_state_dict(nets[0], first) if checkpoint else first.state_dict()
    load = partial(set_optimizer_state_dict, nets[1], second) if checkpoint else second.load_state_dict
    with pytest.raises(KeyError, match="the state of another optimizer: it has"):
        load(state)
    assert second.param_groups[0]["lr"] == lr
    nets[1](torch.ones(2, 3)).sum().backward()
    second.step()


@pytest.mark.parametrize(
    ("saved", "into"),
    [
        ("SGD", "AdamW"),
        ("AdamW", "SGD"),
        ("Adam", "LAMB"),
        ("LAMB", "Adam"),
        ("Adam", "RAdam"),
        ("Lion", "LAMB"),
        ("SGD", "SignSGD"),
        ("SignSGD", "SGD"),
        ("LAMB", "RAdam"),
    ],
)
@pytest.mark.parametrize("has_state", [False, True], ids=["new", "stepped"])
@pytest.mark.parametrize("package", ["st.optim", "torch.optim"])
def test_a_state_whose_options_are_another_class_s_is_refused(
    package: str, has_state: bool, saved: str, into: str
) -> None:
    p, q = Parameter(torch.ones(2, 2)), Parameter(torch.ones(2, 2))
    classes = st.optim if package == "st.optim" or not hasattr(torch.optim, saved) else torch.optim
    other, optimizer = getattr(classes, saved)([p], lr=0.5), getattr(st.optim, into)([q], lr=1e-3)
    if has_state:
        p.grad = torch.ones_like(p)
        other.step()
    with pytest.raises(KeyError, match="the state of another optimizer: it has"):
        optimizer.load_state_dict(other.state_dict())
    assert optimizer.param_groups[0]["lr"] == 1e-3
    assert not optimizer.state


@pytest.mark.parametrize("name", sorted(peer.__name__ for peer in COUNTERPARTS))
def test_a_state_from_before_torch_had_some_options_is_loaded(name: str) -> None:
    peer, p = getattr(torch.optim, name), Parameter(torch.ones(2, 2))
    arguments = {**WITH_STATE[name], "lr": 0.5}
    theirs, ours = peer([p], **arguments), getattr(st.optim, name)([p], lr=0.25)
    p.grad = torch.ones_like(p)
    theirs.step()
    saved = theirs.state_dict()
    filled: dict[str, object] = {"params": []}  # torch's class gives these to a group that lacks them
    peer.__new__(peer).__setstate__({"state": {}, "param_groups": [filled], "defaults": {}})
    for option in set(filled) - {"params"}:
        del saved["param_groups"][0][option]
    for state in saved["state"].values():
        if "step" in state:
            state["step"] = int(state["step"])  # as torch kept it then
    saved["param_groups"][0] |= {"initial_lr": 0.5, "name": "hidden"}
    ours.load_state_dict(saved)
    assert ours.param_groups[0]["lr"] == 0.5
    ours.step()


ALWAYS = {
    "Adam": ["exp_avg", "exp_avg_sq", "step"],
    "AdamW": ["exp_avg", "exp_avg_sq"],
    "Adagrad": ["sum", "step"],
    "RMSprop": ["square_avg"],
    "Adadelta": ["square_avg", "acc_delta"],
    "NAdam": ["mu_product"],
    "SOAP": ["left_basis", "step"],
}
"""Entries that every parameter has that took a step, whatever the options."""


@pytest.mark.parametrize(("name", "entry"), [(name, entry) for name, found in ALWAYS.items() for entry in found])
@pytest.mark.parametrize("options", [{}, {"master_weights": True}])
def test_a_state_that_lacks_an_entry_is_refused_by_its_name(name: str, entry: str, options: dict[str, bool]) -> None:
    params = [Parameter(torch.ones(3, 4, dtype=torch.bfloat16)) for _ in range(2)]
    optimizer = getattr(st.optim, name)(params, **options)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    saved = optimizer.state_dict()
    values = {key: value.clone() for key, value in optimizer.state[params[1]].items()}
    broken = {**saved, "state": {**saved["state"], 1: {k: v for k, v in saved["state"][1].items() if k != entry}}}
    with pytest.raises(KeyError, match=rf"the state of parameter 1 has .*, and lacks \['{entry}'\]"):
        optimizer.load_state_dict(broken)
    torch.testing.assert_close(dict(optimizer.state[params[1]]), values, rtol=0, atol=0)
    optimizer.load_state_dict(saved)
    named = getattr(st.optim, name)([("first", params[0]), ("second", params[1])], **options)
    with pytest.raises(KeyError, match="the state of parameter second has"):
        named.load_state_dict(broken)


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [("Adam", "amsgrad", True), ("RMSprop", "momentum", 0.5), ("RMSprop", "centered", True), ("SGD", "momentum", 0.5)],
)
def test_a_state_saved_between_a_change_of_an_option_and_its_first_step_is_loaded(
    name: str, option: str, value: float
) -> None:
    results = []
    for is_loaded in (False, True):
        w = Parameter(torch.ones(3))
        w.grad = torch.ones(3)
        optimizer = getattr(st.optim, name)([w], lr=0.1)
        optimizer.step()
        optimizer.param_groups[0][option] = value
        if is_loaded:
            saved = optimizer.state_dict()
            optimizer = getattr(st.optim, name)([w], lr=0.1)
            optimizer.load_state_dict(saved)
        optimizer.step()
        results.append(w.detach())
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


@pytest.mark.parametrize("state_dtype", [None, "int8"])
def test_parameters_that_took_no_step_lack_no_entry(state_dtype: str | None) -> None:
    params = [Parameter(torch.ones(64, 64)) for _ in range(3)]
    optimizer = st.optim.Adam(params, state_dtype=state_dtype, accumulate=2, ema=0.5)
    params[0].grad = torch.ones(64, 64)
    optimizer.step()  # the second one is the update
    for _ in range(3):
        params[1].grad = torch.ones(64, 64)
        other = st.optim.Adam(params, state_dtype=state_dtype, accumulate=2, ema=0.5)
        other.load_state_dict(optimizer.state_dict())
        optimizer.step()
