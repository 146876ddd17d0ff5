"""What every optimizer gets from the base class: groups, hooks, schedulers, loss scaling, and its refusals."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import lr_scheduler

import subtensors as st
from subtensors.dispatch.calls import kernels_on_cpu
from subtensors.kernels.launch import Grid


class MySGD(st.optim.Optimizer):
    def __init__(self, params: Any, lr: float = 1e-2, momentum: float = 0.9) -> None:
        super().__init__(params, dict(lr=lr, momentum=momentum))  # noqa: C408

    state = dict(buf=torch.zeros_like)  # noqa: C408, RUF012

    def update(self, p: Tensor, g: Tensor, buf: Tensor, *, lr: float, momentum: float) -> None:
        buf.mul_(momentum).add_(g)
        p.sub_(lr * buf)


def model(device: str = "cpu", seed: int = 0) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)).to(device)


def loss_of(net: torch.nn.Module, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(16, 4, generator=generator).to(next(net.parameters()).device)
    return ((net(x) - x.sum(1, keepdim=True)) ** 2).mean()


def ones(count: int, device: str = "cpu", grad: bool = True) -> list[Parameter]:
    params = [Parameter(torch.ones(i + 1, device=device)) for i in range(count)]
    for p in params if grad else []:
        p.grad = torch.ones_like(p)
    return params


# --- an optimizer of one's own -------------------------------------------------------------------------------------


def test_an_optimizer_of_ones_own_is_one_method(device: str) -> None:
    ours, theirs = model(device), model(device)
    own = MySGD(ours.parameters(), lr=0.1)
    plain = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)
    for number in range(10):
        for net, optimizer in ((ours, own), (theirs, plain)):
            optimizer.zero_grad()
            loss_of(net, number).backward()
            optimizer.step()
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())
    assert own.state[ours[0].weight].keys() == {"buf"}
    assert MySGD._fusion.traces <= 2  # one a device

    again = MySGD(ours.parameters())
    again.load_state_dict(own.state_dict())
    assert again.param_groups[0]["lr"] == 0.1
    assert torch.equal(again.state[ours[0].weight]["buf"], own.state[ours[0].weight]["buf"])


def test_update_may_keep_a_step_count_by_naming_it(device: str) -> None:
    class Decaying(st.optim.Optimizer):
        def update(self, p: Tensor, g: Tensor, step: Tensor, *, lr: float, power: float = 0.5) -> None:
            step.add_(1)
            p.sub_(lr / step**power * g)

    (p,) = ones(1, device)
    optimizer = Decaying([p], {"lr": 1.0})
    for _ in range(4):
        optimizer.step()
    assert p.item() == pytest.approx(1 - sum(n**-0.5 for n in range(1, 5)))
    assert optimizer.state[p]["step"].device.type == device
    optimizer.add_param_group({"params": ones(1, device), "power": 0.0})
    optimizer.step()
    assert optimizer.param_groups[1]["params"][0].item() == 0.0


def test_a_state_entry_may_have_a_shape_and_dtype_of_its_own() -> None:
    class Clipped(st.optim.Optimizer):
        state = dict(largest=lambda p: torch.zeros((), dtype=torch.float64, device=p.device))  # noqa: C408, RUF012

        def update(self, p: Tensor, g: Tensor, largest: Tensor, *, lr: float) -> None:
            largest.copy_(torch.maximum(largest, g.abs().max().double()))
            p.sub_(lr * g / largest)

    params = ones(3)
    params[1].grad = torch.tensor([-4.0, 2.0])
    optimizer = Clipped(params, {"lr": 1.0})
    optimizer.step()
    assert [p.tolist() for p in params] == [[0.0], [2.0, 0.5], [0.0, 0.0, 0.0]]
    other = Clipped(params, {"lr": 1.0})
    other.load_state_dict(optimizer.state_dict())
    assert [s["largest"].item() for s in other.state.values()] == [1.0, 4.0, 1.0]
    assert {s["largest"].dtype for s in other.state.values()} == {torch.float64}


def test_a_declaration_that_does_not_fit_update_is_refused_when_the_class_is_made() -> None:
    with pytest.raises(TypeError, match=r"takes the state entries \['buffer'\].*declares \['buf'\]"):

        class _Typo(st.optim.Optimizer):
            state = dict(buf=torch.zeros_like)  # noqa: C408, RUF012

            def update(self, p: Tensor, g: Tensor, buffer: Tensor, *, lr: float) -> None: ...

    with pytest.raises(TypeError, match="takes self, p and g first"):

        class _NoGradient(st.optim.Optimizer):
            def update(self, p: Tensor, *, lr: float) -> None: ...


def test_the_base_class_alone_is_no_optimizer() -> None:
    with pytest.raises(TypeError, match="Optimizer has no update method"):
        st.optim.Optimizer(ones(1), {"lr": 0.1})


def test_a_hyperparameter_without_a_value_is_refused_with_its_name() -> None:
    class Needy(st.optim.Optimizer):
        def update(self, p: Tensor, g: Tensor, *, lr: float, warmth: float) -> None: ...

    with pytest.raises(ValueError, match=r"Needy.update needs \['warmth'\]"):
        Needy(ones(1), {"lr": 0.1})


def test_update_that_reads_the_instance_is_refused() -> None:
    class Stateful(st.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1})
            self.warmth = 0.5

        def update(self, p: Tensor, g: Tensor, *, lr: float) -> None:
            p.sub_(lr * self.warmth * g)

    with pytest.raises(st.RuleError, match=r"Stateful.update reads self\.warmth.*keyword-only argument"):
        Stateful(ones(1)).step()


def test_a_decision_on_a_live_number_is_refused_with_its_line() -> None:
    class Deciding(st.optim.Optimizer):
        def update(self, p: Tensor, g: Tensor, *, lr: float) -> None:
            if lr > 0.5:
                p.sub_(g)

    with pytest.raises(st.RuleError, match=r"test_optim.py:\d+: if lr > 0.5:"):
        Deciding(ones(1), {"lr": 0.1}).step()


# --- groups and gradients ------------------------------------------------------------------------------------------


def test_parameters_without_a_gradient_are_left_alone_and_get_no_state(device: str) -> None:
    params = ones(3, device)
    params[1].grad = None
    optimizer = st.optim.Adam(params, lr=0.1)
    optimizer.step()
    assert params[1].tolist() == [1.0, 1.0]
    assert params[1] not in optimizer.state
    params[1].grad, params[2].grad = torch.ones(2, device=device), None
    optimizer.step()
    assert [int(optimizer.state[p]["step"]) for p in params] == [2, 1, 1]
    torch.testing.assert_close([p[0].item() for p in params], [0.8, 0.9, 0.9])


def test_a_step_without_any_gradient_does_nothing() -> None:
    params = ones(2, grad=False)
    optimizer = st.optim.Adam(params)
    optimizer.step()
    assert not optimizer.state
    assert torch.equal(params[1], torch.ones(2))


def test_each_group_has_its_own_hyperparameters(device: str) -> None:
    a, b, c = ones(3, device)
    optimizer = st.optim.SGD([{"params": [a], "lr": 1.0}, {"params": [b], "maximize": True}], lr=0.5)
    optimizer.step()
    optimizer.add_param_group({"params": [c], "lr": 0.25, "weight_decay": 1.0})
    optimizer.step()
    assert [p[0].item() for p in (a, b, c)] == [-1.0, 2.0, 0.5]


def test_named_parameters_are_taken_and_their_names_saved() -> None:
    net = model()
    optimizer = st.optim.AdamW(net.named_parameters())
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == [name for name, _ in net.named_parameters()]


def test_maximize_goes_the_other_way(device: str) -> None:
    for name in ("SGD", "Adam", "AdamW", "Lion"):
        up, down = ones(1, device)[0], ones(1, device)[0]
        getattr(st.optim, name)([up], lr=0.1, weight_decay=0.0, maximize=True).step()
        getattr(st.optim, name)([down], lr=0.1, weight_decay=0.0).step()
        assert up.item() - 1 == pytest.approx(1 - down.item())
        assert up.item() > 1


def test_gradients_are_read_and_never_written(device: str) -> None:
    params = ones(3, device)
    for name in ("SGD", "Adam", "AdamW", "Lion"):
        getattr(st.optim, name)(params, weight_decay=0.1, maximize=True).step()
    assert all(p.grad is not None and torch.equal(p.grad, torch.ones_like(p)) for p in params)


def test_sparse_gradients_are_refused_with_what_to_do() -> None:
    table = torch.nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match=r"parameter 0 .*sparse_coo.*SparseAdam"):
        st.optim.SGD(table.parameters()).step()


def test_a_gradient_that_turns_sparse_is_refused_too() -> None:
    (p,) = ones(1)
    optimizer = st.optim.SGD([p])
    optimizer.step()
    optimizer.step()
    p.grad = torch.ones(1).to_sparse()
    with pytest.raises(RuntimeError, match=r"parameter 0 .*sparse_coo.*SparseAdam"):
        optimizer.step()


@pytest.mark.parametrize("cls", [st.optim.SGD, st.optim.Adam, st.optim.AdamW])
def test_differentiable_is_refused(cls: Any) -> None:
    with pytest.raises(ValueError, match="differentiable=True is not supported"):
        cls(ones(1), differentiable=True)
    with pytest.raises(ValueError, match="differentiable=True is not supported"):
        cls([{"params": ones(1), "differentiable": True}])


def test_a_step_is_not_recorded_by_autograd_and_tells_it_what_was_written() -> None:
    p = ones(1)[0]
    twice = (p * p).sum()
    st.optim.SGD([p], lr=0.1).step()
    assert p.is_leaf
    assert p.requires_grad
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        twice.backward()


# --- hooks, closures, schedulers -----------------------------------------------------------------------------------


def test_a_closure_runs_with_gradients_enabled_and_its_loss_is_returned() -> None:
    net = model()
    optimizer = st.optim.SGD(net.parameters(), lr=0.1)

    def closure() -> float:
        optimizer.zero_grad()
        loss = loss_of(net)
        loss.backward()
        return loss.item()

    with torch.no_grad():
        losses = [optimizer.step(closure) for _ in range(20)]
    assert losses[-1] < losses[0]


def test_hooks_run_around_the_step_of_every_class() -> None:
    for cls in (st.optim.SGD, st.optim.AdamW, st.optim.Adam, MySGD):
        (p,) = ones(1)
        optimizer = cls([p], lr=1.0)
        seen: list[float] = []
        optimizer.register_step_pre_hook(lambda *_, p=p, seen=seen: seen.append(p.item()))
        optimizer.register_step_post_hook(lambda *_, p=p, seen=seen: seen.append(p.item()))
        optimizer.step()
        assert seen == [1.0, p.item()]
        assert p.item() != 1.0


def test_a_step_is_a_span_of_the_profiler() -> None:
    optimizer = st.optim.AdamW(ones(1))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        optimizer.step()
    assert "Optimizer.step#AdamW.step" in {event.name for event in profile.events()}


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda o: lr_scheduler.StepLR(o, step_size=2, gamma=0.5),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=10),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=20),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, base_lr=0.01, max_lr=0.1, step_size_up=3, cycle_momentum=True),
    "warm-up": lambda o: lr_scheduler.LinearLR(o, start_factor=0.1, total_iters=5),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.5, threshold=1.0),
}


@pytest.mark.parametrize("tensor_lr", [False, True], ids=["number", "tensor"])
@pytest.mark.parametrize("name", ["SGD", "Adam"])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_scheduler_moves_the_step_as_in_torch_and_nothing_is_traced_again(
    scheduler: str, name: str, tensor_lr: bool, device: str
) -> None:
    kwargs: dict[str, Any] = {"momentum": 0.9} if name == "SGD" else {"betas": (0.9, 0.99)}

    def train(package: Any) -> tuple[torch.nn.Module, list[float]]:
        net = model(device)
        lr = torch.tensor(0.1, device=device if package is st.optim else "cpu") if tensor_lr else 0.1
        optimizer = getattr(package, name)(net.parameters(), lr=lr, **kwargs)
        schedule = SCHEDULERS[scheduler](optimizer)
        rates, traces = [], 0
        for number in range(12):
            optimizer.zero_grad()
            loss = loss_of(net, number)
            loss.backward()
            optimizer.step()
            if package is st.optim and number == 0:
                traces = optimizer._fusion.traces
            schedule.step(*([loss.item()] if scheduler == "plateau" else []))
            rates.append(float(optimizer.param_groups[0]["lr"]))
        if package is st.optim:
            assert optimizer._fusion.traces == traces
        return net, rates

    (ours, our_rates), (theirs, their_rates) = train(st.optim), train(torch.optim)
    assert len(set(our_rates)) > 1
    assert our_rates == pytest.approx(their_rates)
    # Two trainings apart by rounding stay as near as float32 lets them.
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())


def test_a_number_that_changes_its_kind_or_reaches_zero_is_not_traced_again() -> None:
    class Own(st.optim.Adam):
        pass

    optimizer = Own(ones(4), lr=1, weight_decay=1)
    optimizer.step()
    for lr, decay, betas in [(0.5, 0.1, (0.9, 0.99)), (0, 1, (0, 0.9)), (1e-3, 0.1, (0.5, 0.5))]:
        optimizer.param_groups[0].update(lr=lr, weight_decay=decay, betas=betas)
        optimizer.step()
    assert Own._fusion.traces == 1
    # Without a weight decay it is other maths, traced once.
    for decay in (0, 0.0, 0.1, 0, 0.2, -0.0):
        optimizer.param_groups[0]["weight_decay"] = decay
        optimizer.step()
    assert Own._fusion.traces == 2


def test_an_optional_number_is_none_while_it_is_zero() -> None:
    class Decaying(st.optim.Optimizer):
        optional = ("decay",)

        def update(self, p: Tensor, g: Tensor, *, lr: float, decay: float | None) -> None:
            p.sub_(lr * g)
            if decay is not None:
                p.mul_(1 - decay)

    (p,) = ones(1)
    optimizer = Decaying([p], {"lr": 0, "decay": 0.5})
    for decay, expected in [(0.5, 0.5), (0, 0.5), (0.0, 0.5), (0.5, 0.25), (torch.tensor(0.0), 0.25), (False, 0.25)]:
        optimizer.param_groups[0]["decay"] = decay
        optimizer.step()
        assert p.item() == expected


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("SGD", {}),
        ("SGD", {"momentum": 0.9}),
        ("Adam", {}),
        ("AdamW", {"weight_decay": 0}),
        ("Lion", {}),
    ],
)
def test_an_infinite_parameter_stays_infinite_without_weight_decay(
    name: str, kwargs: dict[str, Any], device: str
) -> None:
    p = Parameter(torch.tensor([float("inf"), -float("inf"), 1.0], device=device))
    p.grad = torch.ones_like(p)
    getattr(st.optim, name)([p], lr=0.5, **kwargs).step()
    assert p.tolist() == pytest.approx([float("inf"), -float("inf"), 0.5])


# --- loss scaling ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
@pytest.mark.parametrize("unscale", [False, True], ids=["scaled", "unscaled first"])
def test_a_scaled_step_is_the_step_and_a_step_with_an_overflow_changes_nothing(
    name: str, unscale: bool, device: str
) -> None:
    kwargs: dict[str, Any] = {"momentum": 0.9, "dampening": 0.5} if name == "SGD" else {"amsgrad": True}
    net, reference = model(device), model(device)
    optimizer = getattr(st.optim, name)(net.parameters(), lr=0.1, **kwargs)
    plain = getattr(torch.optim, name)(reference.parameters(), lr=0.1, **kwargs)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**10)
    for number in range(8):
        overflows = number in (0, 3)
        before = copy.deepcopy((net.state_dict(), optimizer.state_dict()["state"]))
        optimizer.zero_grad()
        scaler.scale(loss_of(net, number)).backward()
        if overflows:
            assert net[2].weight.grad is not None
            net[2].weight.grad[0, 0] = float("inf")
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        if overflows:
            after = (net.state_dict(), optimizer.state_dict()["state"])
            torch.testing.assert_close(after[0], before[0], rtol=0, atol=0)
            if number > 0:
                torch.testing.assert_close(after[1], before[1], rtol=0, atol=0)
            assert scaler.get_scale() < 2.0**10
        else:
            plain.zero_grad()
            loss_of(reference, number).backward()
            plain.step()
    torch.testing.assert_close(net.state_dict(), reference.state_dict())
    counts = {int(s["step"]) for s in optimizer.state.values() if "step" in s}
    assert counts == {6}


def test_a_buffer_that_only_overflowing_steps_have_seen_is_not_saved() -> None:
    (p,) = ones(1)
    optimizer = st.optim.SGD([p], lr=1.0, momentum=0.5, dampening=0.5)
    optimizer.found_inf = torch.tensor(1.0)
    optimizer.step()
    assert optimizer.state_dict()["state"] == {0: {}}
    del optimizer.found_inf
    other = torch.optim.SGD([p], lr=1.0, momentum=0.5, dampening=0.5)
    other.load_state_dict(optimizer.state_dict())
    other.step()
    assert p.item() == 0.0


def test_masters_are_left_alone_by_an_overflow(device: str) -> None:
    p = Parameter(torch.ones(3, device=device, dtype=torch.float16))
    optimizer = st.optim.Adam([p], lr=0.1, master_weights=True)
    for found_inf, scale, grad in [(0.0, 4.0, 4.0), (1.0, 4.0, float("inf")), (0.0, 8.0, 8.0)]:
        optimizer.found_inf = torch.tensor(found_inf, device=device)
        optimizer.grad_scale = torch.tensor(scale, device=device)
        p.grad = torch.full_like(p, grad)
        optimizer.step()
    assert optimizer.state[p]["master_param"].tolist() == pytest.approx([0.8] * 3)
    assert p.tolist() == optimizer.state[p]["master_param"].half().tolist()
    assert int(optimizer.state[p]["step"]) == 2


@pytest.mark.gpu
def test_a_step_reads_nothing_back_to_the_host() -> None:
    params = ones(5, "cuda")
    optimizer = st.optim.Adam(params, lr=torch.tensor(0.1, device="cuda"))
    scaler_state = torch.zeros((), device="cuda"), torch.full((), 2.0, device="cuda")
    optimizer.found_inf, optimizer.grad_scale = scaler_state
    optimizer.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for number in range(10):
            optimizer.param_groups[0]["betas"] = (0.9 - number / 100, 0.99)
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert {int(s["step"]) for s in optimizer.state.values()} == {11}


@pytest.mark.gpu
def test_a_step_can_be_captured_and_the_learning_rate_stays_live() -> None:
    params = ones(5, "cuda")
    lr = torch.tensor(0.5, device="cuda")
    optimizer = st.optim.SGD(params, lr=lr)
    optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    lr.fill_(0.25)
    graph.replay()
    assert [p[0].item() for p in params] == [0.25] * 5


@pytest.mark.gpu
def test_parameters_on_two_kinds_of_device_are_updated_in_one_group() -> None:
    params = [*ones(2, "cuda"), *ones(2)]
    optimizer = st.optim.Adam(params, lr=0.5)
    optimizer.step()
    assert [p[0].item() for p in params] == pytest.approx([0.5] * 4)


# --- host time -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Lion"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="its launches are stubbed where Triton interprets")
def test_a_step_runs_as_much_python_for_a_thousand_tensors_as_for_ten(
    name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Grid, "launch", lambda *_: None)

    def calls(count: int) -> int:
        params = [Parameter(torch.ones(i % 3 + 1, device=device)) for i in range(count)]
        optimizer = getattr(st.optim, name)(params)
        seen = 0

        def count_call(frame: FrameType, event: str, arg: Any) -> None:
            nonlocal seen
            seen += event == "call"

        with kernels_on_cpu():
            for number in range(4):
                for p in params:
                    p.grad = torch.ones_like(p) if p.grad is None or number < 2 else p.grad
                seen = 0
                sys.setprofile(count_call)
                try:
                    optimizer.step()
                finally:
                    sys.setprofile(None)
        return seen

    assert 0 < calls(1000) == calls(10)


@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_parameters_that_lie_where_others_lay_are_updated_as_what_they_are(name: str, device: str) -> None:
    memory, gradients = torch.zeros(64, device=device), torch.zeros(64, device=device)
    with kernels_on_cpu():
        for dtype, size in [(torch.float32, 3), (torch.float32, 5), (torch.bfloat16, 5), (torch.float16, 5)] * 2:
            p = Parameter(memory.view(dtype)[:size].fill_(1))
            p.grad = gradients.view(dtype)[:size].fill_(1)
            optimizer = getattr(st.optim, name)([p], lr=0.25)
            for _ in range(2):
                optimizer.step()
            assert p.tolist() == pytest.approx([0.5] * size)


def test_the_lists_of_a_group_are_made_once_while_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    params = ones(8)
    optimizer = st.optim.Adam(params)
    optimizer.step()
    batches = optimizer._lists[0].batches
    for _ in range(3):
        optimizer.zero_grad()
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
    assert optimizer._lists[0].batches is batches
    params[3].grad = None
    optimizer.step()
    assert optimizer._lists[0].batches is not batches
    assert re.fullmatch(r"\[0, 1, 2, 4, 5, 6, 7\]", str(optimizer._lists[0].batches[0].indices))
