"""Captured steps over packed memory: fast checks, and the full checks after something moved."""

from __future__ import annotations

import copy
from typing import Any
from weakref import ref

import pytest
import torch
from torch import nn

import subtensors as st
from subtensors.optim.flat_buffers import FlatBuffers

pytestmark = pytest.mark.usefixtures("kernels")


class Training:
    """The same model trained eagerly, and captured over packed memory."""

    def __init__(self, device: str, **options: Any) -> None:
        torch.manual_seed(0)
        self.device = device
        plain = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 1))
        self.models = [copy.deepcopy(plain).to(device) for _ in range(2)]
        self.eager, self.captured = (st.optim.AdamW(m.parameters(), lr=1e-2, **options) for m in self.models)
        self.capture = self.captured.capture(packed=True)

    @property
    def params(self) -> list[nn.Parameter]:
        return list(self.models[1].parameters())

    def backward(self, zero: bool = True) -> None:
        x = torch.randn(16, 4).to(self.device)
        for model, opt in zip(self.models, (self.eager, self.captured), strict=True):
            if zero:
                opt.zero_grad()
            model(x).square().mean().backward()

    def step(self, zero: bool = True) -> None:
        self.backward(zero)
        self.eager.step()
        self.captured.step()

    def assert_equal(self) -> None:
        for p, q in zip(*(m.parameters() for m in self.models), strict=True):
            assert torch.equal(p, q)


def looks(training: Training) -> int:
    return training.capture.full_checks


def test_training_over_packed_memory_is_training(device: str) -> None:
    training = Training(device)
    schedules = [
        torch.optim.lr_scheduler.OneCycleLR(o, 1e-2, total_steps=90) for o in (training.eager, training.captured)
    ]
    for step in range(80):
        training.step(zero=step % 3 != 0)  # gradients of two batches add up now and then
        for schedule in schedules:
            schedule.step()
    training.assert_equal()
    assert training.capture.stats() == {"recordings": 1, "replays": 80, "eager_steps": 0}
    assert looks(training) == 1
    assert "packed: 6 parameters in 1 flat tensor, the gradients in as many" in st.explain(training.captured)


def test_autograd_notices_a_replay_over_packed_memory(device: str) -> None:
    training = Training(device)
    for _ in range(5):
        training.step()
    loss = training.models[1](torch.ones(2, 4, device=device)).sum()
    training.captured.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_parameters_over_the_same_memory_are_refused_as_their_gradients_would_be_one() -> None:
    a = nn.Parameter(torch.ones(3))
    optimizer = st.optim.SGD([a, nn.Parameter(a.detach())])
    with pytest.raises(ValueError, match="the same memory"):
        optimizer.capture(packed=True)


def test_a_parameter_with_other_references_keeps_its_own_version_counter(device: str) -> None:
    w, v, u = (nn.Parameter(torch.ones(3, device=device)) for _ in range(3))
    loss = (w * w).sum()  # a graph of autograd holds w
    held = ref(v)
    w.marked = True  # type: ignore[attr-defined]
    u.marked = True  # type: ignore[attr-defined]
    packed = FlatBuffers([w, v, u])
    assert [p is w or p is v for p in packed.separate] == [True, True]
    assert held() is v
    assert u.marked  # type: ignore[attr-defined]
    before = [p._version for p in (w, v, u)]
    packed.increment_versions()
    assert [p._version for p in (w, v, u)] == [n + 1 for n in before]
    del loss


def test_gradient_hooks_go_on_after_packing(device: str) -> None:
    w = nn.Parameter(torch.ones(3, device=device))
    seen: list[float] = []
    w.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.sum().item()))  # type: ignore[union-attr]
    opt = st.optim.SGD([w], lr=1.0)
    opt.capture(packed=True)
    w.sum().backward()
    assert seen == [3.0]


def test_gradients_that_were_there_are_packed_with_their_values(device: str) -> None:
    w = nn.Parameter(torch.ones(3, device=device))
    w.grad = torch.full_like(w, 2.0)
    opt = st.optim.SGD([w], lr=1.0)
    opt.capture(packed=True)
    opt.step()
    assert torch.equal(w, torch.full_like(w, -1.0))


def test_gradients_that_the_model_dropped_are_read_at_their_new_addresses(device: str) -> None:
    training = Training(device)
    for step in range(8):
        if step in (5, 6):
            training.models[0].zero_grad()
            training.models[1].zero_grad()
        training.step(zero=step not in (5, 6))
    training.assert_equal()
    assert training.capture.recordings == 1


def test_a_parameter_without_a_gradient_is_skipped_by_a_captured_step(device: str) -> None:
    training = Training(device)
    for step in range(8):
        training.backward()
        if step in (4, 6):
            for model in training.models:
                list(model.parameters())[2].grad = None
        training.eager.step()
        training.captured.step()
    training.assert_equal()
    assert training.capture.recordings == 2


def test_a_gradient_that_is_assigned_is_read(device: str) -> None:
    training = Training(device)
    for step in range(8):
        training.backward()
        if step > 4:
            for model in training.models:
                p = list(model.parameters())[2]
                p.grad = p.grad * 0.5  # type: ignore[operator]
        training.eager.step()
        training.captured.step()
    training.assert_equal()


@pytest.mark.parametrize("packed", [False, True])
def test_a_parameter_that_no_backward_pass_reaches_is_updated_only_where_gradients_are_packed(
    device: str, packed: bool
) -> None:
    reached, other = (nn.Parameter(torch.ones(3, device=device)) for _ in range(2))
    opt = st.optim.AdamW([reached, other], lr=0.1)
    opt.capture(packed=packed)
    before = []
    for loss in (lambda: (reached + other).sum(), reached.sum):
        before.append(other.detach().clone())
        opt.zero_grad()
        loss().backward()
        opt.step()
    assert torch.equal(other, before[1]) != packed
    assert not torch.equal(*before)


class Many:
    """Equal parameters in any number, trained eagerly and captured over packed memory."""

    def __init__(self, device: str, count: int, check: bool = False) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.params = [[nn.Parameter(torch.ones(3, device=device)) for _ in range(count)] for _ in range(2)]
        self.opts = [st.optim.AdamW(params, lr=1e-2) for params in self.params]
        self.capture = self.opts[1].capture(packed=True, check=check)
        for _ in range(3):
            self.backward()
            self.step()

    def backward(self) -> None:
        for opt in self.opts:
            opt.zero_grad()
        for p, q in zip(*self.params, strict=True):
            factor = torch.randn(3, generator=self.generator).to(p.device)
            for t in (p, q):
                (t * factor).sum().backward()

    def step(self) -> None:
        for opt in self.opts:
            opt.step()

    def assert_equal(self) -> None:
        for p, q in zip(*self.params, strict=True):
            assert torch.equal(p, q)


def _delete_and_assign(p: Any, g: torch.Tensor) -> None:
    del p.grad
    p.grad = g


EXCHANGES: dict[str, Any] = {
    "p.grad = g": lambda p, g: setattr(p, "grad", g),
    "p._grad = g": lambda p, g: setattr(p, "_grad", g),
    "del p.grad": _delete_and_assign,
    "p.grad.data = g": lambda p, g: setattr(p.grad, "data", g),
    "p.grad.set_(g)": lambda p, g: p.grad.set_(g),
}


@pytest.mark.parametrize(("count", "index"), [(3, 1), (18, 12)])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_replaced_gradient_whose_memory_is_still_held_is_read_by_the_next_step(
    device: str, exchange: str, count: int, index: int
) -> None:
    many = Many(device, count)
    before = many.capture.replays
    many.backward()
    kept = [p.grad.data for p in many.params[1] if p.grad is not None]
    for params in many.params:
        EXCHANGES[exchange](params[index], torch.full_like(params[index], 0.25).detach())
    many.step()
    many.assert_equal()
    assert len(kept) == count
    many.backward()
    many.step()
    many.assert_equal()
    assert many.capture.replays == before + 2


def test_gradients_that_are_projected_while_all_old_ones_are_kept_are_read_in_each_step(device: str) -> None:
    many = Many(device, 18)
    for _ in range(6):
        many.backward()
        for params in many.params:
            kept = [p.grad for p in params]
            for p, g in zip(params, kept, strict=True):
                p.grad = g * 0.5  # type: ignore[operator]
        many.step()
        many.assert_equal()


@pytest.mark.filterwarnings("ignore:Using backward.* with create_graph:UserWarning")
def test_gradients_that_torch_replaces_to_differentiate_them_are_read(device: str) -> None:
    many = Many(device, 18)
    for _ in range(3):
        many.backward()
        kept = [p.grad for params in many.params for p in params]
        for params in many.params:
            loss = torch.stack([(p * p).sum() for p in params]).sum()
            loss.backward(create_graph=True)
        many.step()
        many.assert_equal()
        for p, g in zip([p for params in many.params for p in params], kept, strict=True):
            p.grad = g


def _swap(p: torch.Tensor) -> None:
    other = nn.Parameter(p.data.clone())
    other.grad = p.grad
    torch.utils.swap_tensors(p, other)


PARAMETER_MOVES: dict[str, Any] = {
    "p.data = t": lambda p: setattr(p, "data", p.data.clone()),
    "p.set_(t)": lambda p: p.set_(p.data.clone()),
    "swap_tensors": _swap,
}


@pytest.mark.parametrize(("count", "index"), [(3, 1), (18, 12)])
@pytest.mark.parametrize("move", PARAMETER_MOVES)
def test_a_moved_packed_parameter_whose_memory_is_still_held_is_an_error_in_the_next_step(
    device: str, move: str, count: int, index: int
) -> None:
    many = Many(device, count)
    kept = [p.data for p in many.params[1]]
    with torch.no_grad():
        PARAMETER_MOVES[move](many.params[1][index])
    for _ in range(2):
        with pytest.raises(st.AddressError, match=r"packed parameter \d+, of shape \(3,\), is not where it was packed"):
            many.opts[1].step()
    many.opts[1].capture(packed=True)
    many.backward()
    many.step()
    many.assert_equal()
    assert len(kept) == count


@pytest.mark.parametrize("index", [0, 2, 5])
def test_a_packed_parameter_that_moved_is_an_error_until_it_is_packed_again(device: str, index: int) -> None:
    training = Training(device)
    for _ in range(5):
        training.step()
    p = training.params[index]
    p.data = p.data.clone()
    training.backward()
    with pytest.raises(st.AddressError, match=f"packed parameter {index}, of shape .* is not where it was packed"):
        training.captured.step()
    training.capture = training.captured.capture(packed=True)
    training.captured.step()
    training.eager.step()
    training.assert_equal()


def test_views_that_come_and_go_cost_a_full_check_and_change_nothing(device: str) -> None:
    training = Training(device)
    for _ in range(5):
        training.step()
    before = looks(training)
    view = training.params[2].detach()
    training.step()
    training.step()
    assert looks(training) == before + 1
    del view
    training.step()
    training.step()
    assert looks(training) == before + 2
    training.assert_equal()


def test_an_added_group_causes_a_full_check(device: str) -> None:
    training = Training(device)
    for _ in range(5):
        training.step()
    new = [nn.Parameter(torch.ones(3, device=device)) for _ in range(2)]
    for p, opt in zip(new, (training.eager, training.captured), strict=True):
        opt.add_param_group({"params": [p]})
    for _ in range(5):
        training.backward()
        for p in new:
            p.grad = torch.full_like(p, 0.5)
        training.eager.step()
        training.captured.step()
    training.assert_equal()
    assert torch.equal(*new)
    assert not torch.equal(new[0], torch.ones_like(new[0]))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_of_parameters_that_were_added_later_are_freed_too(device: str, set_to_none: bool) -> None:
    training = Training(device)
    new = nn.Parameter(torch.ones(3, device=device))
    training.captured.add_param_group({"params": [new]})
    for _ in range(2):
        training.captured.zero_grad(set_to_none)
        new.sum().backward()
    assert torch.equal(new.grad, torch.ones_like(new))  # type: ignore[arg-type]


def test_a_frozen_parameter_is_not_updated_until_it_requires_grad_again(device: str) -> None:
    training = Training(device)
    frozen = [next(iter(model.parameters())) for model in training.models]
    for p in frozen:
        p.requires_grad_(False)
    training.capture = training.captured.capture(packed=True)
    before = frozen[1].detach().clone()
    for _ in range(5):
        training.step()
    assert torch.equal(frozen[1], before)
    for p in frozen:
        p.requires_grad_(True)
    for _ in range(3):
        training.step()
    training.assert_equal()
    assert not torch.equal(frozen[1], before)


def test_a_checked_replay_checks_packed_memory_each_time(device: str) -> None:
    training = Training(device)
    training.capture = training.captured.capture(packed=True, check=True)
    for _ in range(5):
        training.step()
    p = training.params[2]
    kept = p.data
    p.data = p.data.clone()  # as many tensors share the packed memory as before
    with pytest.raises(st.AddressError, match="packed parameter 2, of shape"):
        training.captured.step()
    assert kept.shape == p.shape


def test_a_checked_replay_reads_a_gradient_that_was_replaced_without_python(device: str) -> None:
    many = Many(device, 18, check=True)
    many.backward()
    kept = [p.grad for p in many.params[1]]
    for params in many.params:
        torch.Tensor.grad.__set__(params[12], torch.full_like(params[12], 0.25).detach())  # type: ignore[attr-defined]
    many.step()
    many.assert_equal()
    assert many.capture.full_checks == 4
    assert len(kept) == 18
