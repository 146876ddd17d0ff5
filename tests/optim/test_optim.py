"""The features that every optimizer has from the base class: one method, groups, hooks, and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from optimizers import CASES, TORCH_NAMES
from small_models import loss_of, model, ones
from torch import Tensor

import subtensors as st


class MySGD(st.optim.Optimizer):
    def __init__(self, params: Any, lr: float = 1e-2, momentum: float = 0.9) -> None:
        super().__init__(params, dict(lr=lr, momentum=momentum))  # noqa: C408

    state = dict(buf=torch.zeros_like)  # noqa: C408, RUF012

    def update(self, p: Tensor, g: Tensor, buf: Tensor, *, lr: float, momentum: float) -> None:
        buf.mul_(momentum).add_(g)
        p.sub_(lr * buf)


def test_a_user_defined_optimizer_is_one_method(device: str) -> None:
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

    with pytest.raises(TypeError, match="takes self, p and g first"):

        class _ParameterAlone(st.optim.Optimizer):
            def update(self, p: Tensor) -> None: ...


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


def test_a_decision_on_a_dynamic_number_is_refused_with_its_line() -> None:
    class Deciding(st.optim.Optimizer):
        def update(self, p: Tensor, g: Tensor, *, lr: float) -> None:
            if lr > 0.5:
                p.sub_(g)

    with pytest.raises(st.RuleError, match=r"test_optim.py:\d+: if lr > 0.5:"):
        Deciding(ones(1), {"lr": 0.1}).step()


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


def test_a_packed_list_of_parameters_is_accepted_alone_and_as_a_group() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    first, second = (st.TensorList(layer.parameters()).pack() for layer in model)
    alone = st.optim.SGD(first, lr=1.0)
    groups = st.optim.SGD([{"params": first}], lr=1.0)
    groups.add_param_group({"params": second, "lr": 0.5})
    assert alone.param_groups[0]["params"] == first.tensors
    assert [group["params"] for group in groups.param_groups] == [first.tensors, second.tensors]
    before = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    groups.step()
    for p, b, lr in zip(model.parameters(), before, (1.0, 1.0, 0.5, 0.5), strict=True):
        assert torch.equal(p, b - lr)
    assert first.arena is not None


def test_maximize_goes_the_other_way(device: str) -> None:
    for name in [*TORCH_NAMES, "Lion"]:
        up, down = ones(1, device)[0], ones(1, device)[0]
        # ASGD decays its parameters; without that, its way down mirrors its way up.
        kwargs: dict[str, Any] = {"AdamW": {"weight_decay": 0.0}, "ASGD": {"lambd": 0.0}}.get(name, {})
        getattr(st.optim, name)([up], lr=0.1, maximize=True, **kwargs).step()
        getattr(st.optim, name)([down], lr=0.1, **kwargs).step()
        assert up.item() - 1 == pytest.approx(1 - down.item(), abs=torch.finfo(torch.float32).eps)
        assert up.item() > 1


def test_gradients_are_read_and_never_written(device: str) -> None:
    params = ones(3, device)
    for name in [*TORCH_NAMES, "Lion"]:
        getattr(st.optim, name)(params, maximize=True).step()
    assert all(p.grad is not None and torch.equal(p.grad, torch.ones_like(p)) for p in params)


def test_sparse_gradients_are_refused_with_what_to_do() -> None:
    table = torch.nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match=r"parameter 0 .*sparse_coo.*SparseAdam"):
        st.optim.SGD(table.parameters()).step()


@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("change", [{}, {"maximize": True}], ids=["alone", "with an option"])
def test_a_gradient_that_turns_sparse_is_refused_too_and_changes_nothing(
    change: dict[str, Any], max_norm: float | None
) -> None:
    (p,) = ones(1)
    optimizer = st.optim.SGD([p], momentum=0.5, max_norm=max_norm)
    optimizer.step()
    optimizer.step()
    before = [t.clone() for t in (p, optimizer.state[p]["momentum_buffer"])]
    p.grad = torch.ones(1).to_sparse()
    optimizer.param_groups[0].update(change)
    with pytest.raises(RuntimeError, match=r"parameter 0 .*sparse_coo.*SparseAdam"):
        optimizer.step()
    assert [p, optimizer.state[p]["momentum_buffer"]] == before


@pytest.mark.parametrize("name", TORCH_NAMES)
def test_differentiable_is_refused(name: str) -> None:
    cls = getattr(st.optim, name)
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


@pytest.mark.gpu
def test_a_step_can_be_captured_and_the_learning_rate_stays_dynamic() -> None:
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


def test_every_optimizer_is_in_the_list_that_sweeps_run_over() -> None:
    public = [getattr(st.optim, name) for name in st.optim.__all__]
    classes = {cls for cls in public if isinstance(cls, type)} - {st.optim.Optimizer, st.optim.MatrixOptimizer}
    assert classes == {case.cls for case in CASES}
