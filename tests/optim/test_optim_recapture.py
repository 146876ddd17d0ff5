"""A captured step is recaptured when a step no longer matches, and is never replayed over moved memory."""

from __future__ import annotations

import logging

import pytest
import torch
from captured_pairs import SHAPES, Pair
from torch import nn

import subtensors as st

pytestmark = pytest.mark.usefixtures("kernels")


def test_gradients_that_move_need_no_recapture(device: str) -> None:
    pair = Pair(device)
    kept = []
    for _ in range(4):
        pair.step()
        kept.append([p.grad for params in pair.params for p in params])  # so that each step's are somewhere else
    pair.assert_equal()
    assert pair.capture.stats() == {"recordings": 1, "replays": 4, "eager_steps": 0}


def test_each_set_of_parameters_with_gradients_is_captured_once(device: str, caplog: pytest.LogCaptureFixture) -> None:
    pair = Pair(device)
    pair.step()
    with caplog.at_level(logging.INFO, logger="subtensors.optim"):
        for without in ((1,), (), (1,), (0, 2), (), (1,)):
            pair.step(without)
    pair.assert_equal()
    assert pair.capture.stats() == {"recordings": 3, "replays": 7, "eager_steps": 0}
    assert pair.capture.reasons == {"other parameters have a gradient": 2}
    assert [r.message for r in caplog.records] == ["AdamW: a step is recaptured: other parameters have a gradient"]


def test_a_step_without_any_gradient_does_nothing(device: str) -> None:
    pair = Pair(device)
    pair.step(tuple(range(len(SHAPES))))
    pair.step()
    pair.assert_equal()
    assert pair.capture.replays == 1


def test_adding_a_group_recaptures_the_step(device: str) -> None:
    pair = Pair(device)
    pair.step()
    new = torch.ones(6, device=device)
    for params, opt in zip(pair.params, pair.both, strict=True):
        params.append(nn.Parameter(new.clone()))
        opt.add_param_group({"params": [params[-1]], "lr": 0.5})
    for _ in range(3):
        pair.step()
    pair.assert_equal()
    assert pair.capture.reasons == {"a parameter group was added or removed": 1}


def test_replacing_a_parameter_recaptures_the_step(device: str) -> None:
    pair = Pair(device)
    pair.step()
    for params, opt in zip(pair.params, pair.both, strict=True):
        params[3] = opt.param_groups[0]["params"][3] = nn.Parameter(torch.full((1,), 2.0, device=device))
    pair.step()
    pair.assert_equal()
    assert pair.capture.reasons == {"the parameters of group 0 were replaced": 1}


def test_replacing_a_parameter_of_a_later_group_recaptures_the_step(device: str) -> None:
    pair = Pair(device)
    for params, opt in zip(pair.params, pair.both, strict=True):
        params.append(nn.Parameter(torch.ones(6, device=device)))
        opt.add_param_group({"params": [params[-1]], "lr": 0.5})
    pair.step()
    for params, opt in zip(pair.params, pair.both, strict=True):
        params[-1] = opt.param_groups[1]["params"][0] = nn.Parameter(torch.full((2,), 2.0, device=device))
    pair.step()
    pair.assert_equal()
    assert pair.capture.reasons == {"the parameters of group 1 were replaced": 1}


def test_moving_a_parameter_recaptures_the_step_and_leaves_the_old_memory_unwritten(device: str) -> None:
    pair = Pair(device)
    pair.step()
    before = pair.params[1][1].data
    copied = before.clone()
    for params in pair.params:
        params[1].data = params[1].data.clone()
    pair.step()
    pair.assert_equal()
    assert torch.equal(before, copied)
    assert pair.capture.reasons == {"a parameter moved": 1}


def test_replacing_state_recaptures_the_step(device: str) -> None:
    pair = Pair(device)
    pair.step()
    for params, opt in zip(pair.params, pair.both, strict=True):
        opt.state[params[0]]["exp_avg"] = torch.ones_like(params[0])
    pair.step()
    pair.assert_equal()
    assert pair.capture.reasons == {"state was added or replaced": 1}


MOVES = {
    ".data =": lambda t: setattr(t, "data", t.data.clone()),
    "set_": lambda t: t.set_(t.data.clone()),
    "resize_": lambda t: t.resize_(1000),
    "torch.utils.swap_tensors": lambda t: torch.utils.swap_tensors(t, t.data.clone()),
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq", "step"])
@pytest.mark.parametrize("op", MOVES)
def test_state_of_a_captured_optimizer_is_static_and_refuses_to_be_moved(
    device: str, op: str, name: str, packed: bool
) -> None:
    pair = Pair(device)
    pair.captured.capture(packed=packed)
    pair.step()
    for p in pair.params[1]:
        entry = pair.captured.state[p][name]
        assert isinstance(entry, st.StaticAddressTensor)
        with pytest.raises(st.AddressError, match=f"^{op} would move a StaticAddressTensor"):
            MOVES[op](entry)
    pair.step()
    pair.assert_equal()


def test_state_that_was_there_stays_where_it_is_when_it_becomes_static(device: str) -> None:
    pair = Pair(device)
    opt = st.optim.AdamW(pair.params[1], lr=0.1)
    for p in pair.params[1]:
        p.grad = torch.ones_like(p)
    opt.step()
    before = [t.data_ptr() for p in pair.params[1] for t in opt.state[p].values()]
    opt.capture()
    opt.step()
    state = [t for p in pair.params[1] for t in opt.state[p].values()]
    assert [t.data_ptr() for t in state] == before
    assert all(isinstance(t, st.StaticAddressTensor) for t in state)
    saved = [t for entries in opt.state_dict()["state"].values() for t in entries.values()]
    assert all(type(t) is torch.Tensor for t in saved)


def test_a_gradient_of_another_layout_is_never_read_as_if_it_had_the_old_one(device: str) -> None:
    pair = Pair(device)
    pair.step()
    grad = pair.random((5, 3))
    for params, opt in zip(pair.params, pair.both, strict=True):
        for p in params:
            p.grad = torch.ones_like(p)
        params[0].grad = grad.clone().t()
        opt.step()
    pair.assert_equal()
    assert pair.capture.eager_steps == 1
    assert "strides of their own" in st.explain(pair.captured)
    pair.step()
    pair.assert_equal()


TRANSPOSES = {
    "p.grad = p.grad.t()": lambda p: setattr(p, "grad", p.grad.t()),
    "p.grad.t_()": lambda p: p.grad.t_(),
    "p.grad.data = p.grad.t()": lambda p: setattr(p.grad, "data", p.grad.t()),
    "p.data = p.data.t()": lambda p: setattr(p, "data", p.data.t()),
    "p.t_()": lambda p: p.t_(),
    "p.data as another matrix": lambda p: setattr(p, "data", p.data.as_strided((4, 4), (1, 4))),
}


def test_a_matrix_gradient_that_moved_and_is_then_transposed_where_it_is_is_read_in_its_new_layout(device: str) -> None:
    params = [nn.Parameter(torch.ones(3, 3, device=device)) for _ in range(2)]
    eager, captured = (st.optim.SGD([p], lr=1.0) for p in params)
    captured.capture()
    gradients = [torch.arange(9.0, device=device).reshape(3, 3) * scale for scale in (1, 2)]
    kept = []
    for g in (*gradients, gradients[1], gradients[1].t(), gradients[1]):
        for p, opt in zip(params, (eager, captured), strict=True):
            if p.grad is not None and p.grad.data_ptr() == g.data_ptr():
                p.grad.data = g  # the same tensor, at the same address
            else:
                p.grad = g.detach()
            opt.step()
        kept.append(params[1].detach().clone())
        assert torch.equal(*params)
    assert not torch.equal(kept[3] - kept[2], kept[2] - kept[1])


@pytest.mark.parametrize("how", ["eager", "captured", "packed"])
@pytest.mark.parametrize("count", [2, 20])
@pytest.mark.parametrize("transpose", TRANSPOSES)
def test_a_tensor_that_is_transposed_in_place_is_updated_in_its_new_layout(
    device: str, transpose: str, count: int, how: str
) -> None:
    values = torch.arange(16.0, device=device).view(4, 4)
    ours, theirs = ([nn.Parameter(values.sin()) for _ in range(count)] for _ in range(2))
    for p in (*ours, *theirs):
        p.grad = values.clone()
    opt, reference = (kind.SGD(p, lr=1.0, momentum=0.5) for kind, p in ((st.optim, ours), (torch.optim, theirs)))
    if how != "eager":
        opt.capture(packed=how == "packed")  # type: ignore[attr-defined]
    for step in range(4):
        if step == 2:
            with torch.no_grad():
                for params in (ours, theirs):
                    TRANSPOSES[transpose](params[1])
        opt.step()
        reference.step()
    assert all(map(torch.equal, ours, theirs))


def test_a_gradient_that_is_the_parameter_itself_is_updated_in_turn(device: str) -> None:
    pair = Pair(device)
    pair.step()
    for params, opt in zip(pair.params, pair.both, strict=True):
        params[1].grad = params[1].data
        opt.step()
    pair.assert_equal()
    assert pair.capture.eager_steps == 1


def test_a_sparse_gradient_is_refused_as_ever(device: str) -> None:
    w = nn.Parameter(torch.ones(3, 2, device=device))
    opt = st.optim.SGD([w], lr=1.0, graph=True)
    for dense in (False, True, False):
        w.grad = torch.ones_like(w) if dense else torch.ones_like(w).to_sparse()
        if dense:
            opt.step()
        else:
            with pytest.raises(RuntimeError, match="updates dense gradients, and parameter 0"):
                opt.step()


def test_autocast_around_the_step_changes_nothing(device: str) -> None:
    pair = Pair(device)
    pair.step()
    with torch.autocast(device, dtype=torch.bfloat16):
        pair.step()
    pair.assert_equal()


def test_memory_that_moves_during_a_capture_is_an_error(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    w = nn.Parameter(torch.ones(3, device=device))
    spare = [torch.ones(3, device=device) for _ in range(3)]

    opt = st.optim.SGD([w], lr=1.0, graph=True)
    update = opt._updater.update_all

    def update_and_move(optimizer: st.optim.SGD) -> None:
        update(optimizer)
        w.data = spare.pop()

    monkeypatch.setattr(opt._updater, "update_all", update_and_move)
    w.grad = torch.ones_like(w)
    with pytest.raises(st.AddressError, match="parameter 0 of the step moved while a step was captured"):
        opt.step()
    assert torch.equal(w, torch.ones_like(w))


def test_a_checked_replay_finds_state_that_was_moved_without_python(device: str) -> None:
    params = [nn.Parameter(torch.ones(3, device=device)) for _ in range(20)]
    opt = st.optim.AdamW(params, lr=0.1)
    opt.capture(check=True)
    for p in params:
        p.grad = torch.ones_like(p)
    opt.step()
    entry = opt.state[params[12]]["exp_avg"]
    torch.Tensor.set_(entry, torch.zeros_like(entry))  # no subclass is asked about it
    with pytest.raises(st.AddressError, match=r"state tensor \d+ of the step moved since it was captured"):
        opt.step()
    opt.state[params[12]]["exp_avg"] = torch.zeros_like(params[12])
    opt.step()


def test_replays_are_checked_where_the_environment_asks_for_it(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBTENSORS_CHECK_REPLAYS", "1")
    assert st.optim.SGD([nn.Parameter(torch.ones(3, device=device))], lr=1.0, graph=True).capture().check
