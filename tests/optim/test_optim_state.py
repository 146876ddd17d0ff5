"""State of the optimizers: interchange with torch.optim, loading, pickling, masters."""

from __future__ import annotations

import collections
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Lion"])
def test_master_weights_keep_what_rounding_each_step_would_lose(name: str, dtype: torch.dtype, device: str) -> None:
    values = start(device, dtype, STATE_SHAPES)
    cls = getattr(st.optim, name)

    def ending(dtype: torch.dtype, **kwargs: Any) -> tuple[list[Parameter], torch.optim.Optimizer]:
        return train(lambda p: cls(p, lr=1e-4, **kwargs), values, dtype, 60)

    truth = flat(ending(torch.float64)[0])
    with_masters, optimizer = ending(dtype, master_weights=True)
    masters = [optimizer.state[p]["master_param"] for p in with_masters]
    floats = [t for p in with_masters for n, t in optimizer.state[p].items() if n != "step"]
    assert {t.dtype for t in floats} == {torch.float32}
    assert all(torch.equal(p, m.to(dtype)) for p, m in zip(with_masters, masters, strict=True))
    error = (flat(masters) - truth).norm()
    in_float32 = (flat(ending(torch.float32)[0]) - truth).norm()
    assert error <= 1.5 * in_float32 + torch.finfo(torch.float32).eps * truth.norm()
    assert error < 0.1 * (flat(ending(dtype)[0]) - truth).norm()


def test_masters_are_kept_for_narrow_parameters_alone(device: str) -> None:
    params = [Parameter(torch.ones(3, device=device, dtype=d)) for d in (torch.bfloat16, torch.float32, torch.float64)]
    optimizer = st.optim.Adam(params, lr=0.1, master_weights=True)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert ["master_param" in optimizer.state[p] for p in params] == [True, False, False]
    assert [p.detach().float().round(decimals=2)[0].item() for p in params] == pytest.approx([0.9, 0.9, 0.9], rel=2**-8)


def test_masters_are_saved_and_loaded_in_float32(device: str) -> None:
    values = start(device, torch.bfloat16, STATE_SHAPES)
    make = lambda p: st.optim.AdamW(p, lr=1e-4, master_weights=True)  # noqa: E731
    params, optimizer = train(make, values, torch.bfloat16, 5)
    saved = copy.deepcopy(optimizer.state_dict())
    again = [Parameter(p.detach().clone()) for p in params]
    other = st.optim.AdamW(again)
    other.load_state_dict(saved)
    take_steps(optimizer, params, values, range(5, 10))
    take_steps(other, again, values, range(5, 10))
    assert torch.equal(flat(params), flat(again))
    for p, q in zip(params, again, strict=True):
        assert torch.equal(optimizer.state[p]["master_param"], other.state[q]["master_param"])


def test_masters_begin_when_a_state_without_them_is_loaded() -> None:
    values = start("cpu", torch.bfloat16, STATE_SHAPES)
    params, theirs = train(lambda p: torch.optim.Adam(p), values, torch.bfloat16, 2)
    optimizer = st.optim.Adam(params, master_weights=True)
    optimizer.load_state_dict(theirs.state_dict())
    before = copy.deepcopy(params)
    take_steps(optimizer, params, values, range(2, 3))
    for p, old in zip(params, before, strict=True):
        assert optimizer.state[p]["step"] == 3
        assert optimizer.state[p]["exp_avg"].dtype is torch.float32
        assert (optimizer.state[p]["master_param"] - old.float()).abs().max().item() <= 2e-3 if p.numel() else True


def test_masters_begin_when_parameters_are_cast_between_steps(device: str) -> None:
    p = Parameter(torch.ones(3, device=device))
    optimizer = st.optim.SGD([p], lr=2**-10, master_weights=True)
    for step in range(9):
        if step == 1:
            p.grad, p.data = None, torch.ones_like(p, dtype=torch.bfloat16)
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert p.detach().tolist() == [1 - 2**-7] * 3


def test_float32_parameters_take_bfloat16_gradients_in_float32(device: str) -> None:
    values = start(device, torch.float32, STATE_SHAPES)
    widened, mixed = [[Parameter(v.clone()) for v in values] for _ in range(2)]
    for p, q in zip(widened, mixed, strict=True):
        g = torch.randn_like(p).bfloat16()
        p.grad = g.float()
        q.grad_dtype = torch.bfloat16
        q.grad = g
    for params in (widened, mixed):
        st.optim.Adam(params, lr=0.1).step()
    assert torch.equal(flat(widened), flat(mixed))


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
