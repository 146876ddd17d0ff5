"""Programs captured with gradients run on aliases of the parameters; the caller's parameters stay as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from bucketed_rows import DIMS, assert_same_gradients
from pretend_graphs import PretendPool, pretend
from torch import Tensor, nn

import subtensors as st
from subtensors.bucketed.program_state import State, leaf_ids_of
from subtensors.bucketed.trained_bucket import TrainedBucket


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.unused = (nn.Linear(4, 4) for _ in range(3))
        self.last.weight = self.first.weight
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh()).softmax(0)  # type: ignore[no-any-return]


class Listed(Tied):
    """Reads its weight from a list of its own, as recurrent layers do, and its bias from the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.flat = [self.first.weight]

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x @ self.flat[0]).softmax(0)  # type: ignore[no-any-return]


def rows(n: int) -> Tensor:
    return torch.randn(n, 4, dtype=torch.float64)


def accumulators(*roots: Tensor) -> dict[Any, Tensor]:
    """The nodes behind some tensors that accumulate gradients, and of which leaf."""
    found: dict[Any, Tensor] = {}
    todo, seen = [root.grad_fn for root in roots], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if type(node).__name__ == "AccumulateGrad":
            found[node] = node.variable  # type: ignore[attr-defined]
        todo.extend(behind for behind, _ in node.next_functions)
    return found


@pytest.fixture
def met(monkeypatch: pytest.MonkeyPatch) -> list[dict[Any, Tensor]]:
    """The accumulating nodes behind each run of a bucket that autograd tracks."""
    found: list[dict[Any, Tensor]] = []
    forward = TrainedBucket._forward

    def watched(bucket: TrainedBucket) -> Any:
        outputs = forward(bucket)
        found.append(accumulators(*[leaf.value for leaf in outputs.leaves]))
        return outputs

    monkeypatch.setattr(TrainedBucket, "_forward", watched)
    return found


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[PretendPool]:
    """Where a CPU pretends to capture: without graphs nothing has aliases."""
    return pretend(monkeypatch, trained=True)


Of = Callable[[Any], Callable[[Tensor], Tensor]]


def same_gradients(net: nn.Module, alone: nn.Module, sizes: tuple[int, ...], program: Of = lambda net: net) -> Any:
    """Train one net bucketed and the other plainly, and compare; gives what ran the first."""
    run, plain = st.bucketed(program(net), DIMS), program(alone)
    for n in sizes:
        x, cotangent = rows(n), rows(n)
        for model in (run, plain):
            model(x).backward(cotangent)
        assert_same_gradients(net, alone)
    return run


@pytest.mark.usefixtures("pools")
def test_a_capture_avoids_the_nodes_of_a_graph_that_the_caller_keeps(met: list[dict[Any, Tensor]]) -> None:
    net, alone = Tied(), Tied()
    earlier = net(rows(3)).sum()
    callers = accumulators(earlier)
    same_gradients(net, alone, (5, 7, 6, 20))
    assert len(met) == 3  # a warm-up and two recordings
    used = [net.first.weight, net.first.bias, net.last.bias]
    for nodes in met:
        assert not nodes.keys() & callers.keys()
        assert not {id(t) for t in nodes.values()} & {id(p) for p in net.parameters()}
        # The weight that two layers share has one alias, in the memory of the weight.
        assert sorted(t.data_ptr() for t in nodes.values()) == sorted(p.data_ptr() for p in used)
    assert earlier.requires_grad


@pytest.mark.usefixtures("pools")
def test_parameters_are_restored_after_each_call_even_if_it_raises() -> None:
    net = Tied()
    held = [m._parameters.copy() for m in net.modules()]
    seen: list[bool] = []
    first = id(net.first.weight)  # the tensor itself would be one that the program closes over

    def program(x: Tensor) -> Tensor:
        out = net(x)
        seen.append(id(net.first.weight) == first)
        if len(seen) == 2:
            raise ValueError("no")
        return out  # type: ignore[no-any-return]

    run = st.bucketed(program, DIMS, check=False)
    run(rows(5))
    # The first call is on the parameters themselves, and the warm-up that fails on others.
    assert seen == [True, False]
    run(rows(5))
    assert run.stats().fallbacks == {"ValueError: no": 2}
    for _ in range(3):
        run(rows(20))
        for m, before in zip(net.modules(), held, strict=True):
            assert list(m._parameters) == list(before)
            assert all(m._parameters[name] is p for name, p in before.items())
    assert False in seen[3:]


@pytest.mark.parametrize("captures", [False, True])
def test_parameter_hooks_run_once_per_backward(captures: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if captures:
        pretend(monkeypatch, trained=True)
    net, alone = Tied(), Tied()
    ran = []
    for model in (net, alone):
        model.first.weight.register_hook(lambda g: 2 * g)
        model.last.bias.register_post_accumulate_grad_hook(lambda p, model=model: ran.append(model))  # type: ignore[misc]
    same_gradients(net, alone, (5, 7, 6, 20, 18))
    assert ran.count(net) == ran.count(alone) == 5


@pytest.mark.usefixtures("pools")
def test_a_parameter_that_is_also_read_from_a_list_gets_its_gradients(met: list[dict[Any, Tensor]]) -> None:
    net, alone = Listed(), Listed()
    same_gradients(net, alone, (5, 7, 6))
    for nodes in met[1:]:
        leaves = {id(t) for t in nodes.values()}
        assert id(net.first.weight) in leaves
        assert id(net.first.bias) not in leaves

    net, alone = Tied(), Tied()

    def with_weight(model: Tied) -> Callable[[Tensor], Tensor]:
        weight = model.first.weight
        return lambda x: model(x) @ weight

    same_gradients(net, alone, (5, 7, 6), with_weight)


def test_parameters_of_another_class_and_those_without_gradients_have_no_alias() -> None:
    class Own(nn.Parameter):
        pass

    net = Tied()
    net.last.bias = Own(torch.ones(4))
    net.unused.requires_grad_(False)
    net.first.weight.scale = 2.0  # type: ignore[attr-defined]
    state = State(net)
    aliases = state.aliases()
    assert aliases.keys() == {id(net.first.weight), id(net.first.bias)}
    weight = aliases[id(net.first.weight)]
    assert weight.scale == 2.0  # type: ignore[attr-defined]
    bias = aliases[id(net.first.bias)]
    with state.swapped_parameters(aliases):
        assert net.first.weight is net.last.weight is weight
        assert leaf_ids_of([net.first(rows(2))]) == {id(weight), id(bias)}
    assert net.first.weight is not weight


def test_a_whole_step_runs_on_the_parameters_themselves(met: list[dict[Any, Tensor]]) -> None:
    net, held = Tied(), []
    opt = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        held.append(net.first.weight)
        loss = (net(x) ** 2).sum()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    run = st.bucketed(step, DIMS, check=False)
    for n in (5, 6, 7):
        run(rows(n))
    assert len(held) == 3
    assert all(p is net.first.weight for p in held)
    assert run.stats().hits == 2


def test_a_program_that_accumulates_gradients_and_returns_a_loss_falls_back() -> None:
    net, alone = Tied(), Tied()

    def program(model: nn.Module) -> Callable[[Tensor], Tensor]:
        def both(x: Tensor) -> Tensor:
            model(x).square().sum().backward()
            return model(x)  # type: ignore[no-any-return]

        return both

    run = same_gradients(net, alone, (5, 7, 6), program)
    assert list(run.stats().fallbacks.values()) == [3]  # of the first call the plain program's gradients are taken
