"""The class of the page on writing an optimizer has the features that the page promises."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernels_on_cpu import kernels_on_cpu
from optim_oracle import assert_as_accurate, start, train
from own_optimizer import PAGE, own_optimizer, source
from small_models import loss_of, model
from torch import Tensor
from torch.nn import Parameter

import subtensors as st


@pytest.fixture(scope="module", name="cls")
def _cls() -> Any:
    return own_optimizer()


def test_it_is_as_short_as_the_page_says() -> None:
    assert len(source().splitlines()) == 10
    assert "ten lines" in PAGE.read_text()


class Plain(torch.optim.Optimizer):
    """AdaBelief by the paper, tensor by tensor."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.count += 1
        for group in self.param_groups:
            for p in group["params"]:
                g, kept = p.grad, self.state[p]
                m, s = kept.setdefault("m", torch.zeros_like(p)), kept.setdefault("s", torch.zeros_like(p))
                m.mul_(0.9).add_(g, alpha=1 - 0.9)
                s.mul_(0.999).add_((g - m) ** 2, alpha=1 - 0.999).add_(1e-16)
                p -= group["lr"] * (m / (1 - 0.9**self.count)) / ((s / (1 - 0.999**self.count)).sqrt() + 1e-16)


@pytest.mark.parametrize("kernels", [False, True], ids=["torch", "kernels"])
def test_it_follows_the_paper_on_kernels_too(cls: Any, kernels: bool) -> None:
    values = start("cpu", torch.float32, [(7,), (), (3, 5), (1030,)])

    def trained() -> list[Parameter]:
        return train(lambda p: cls(p, lr=0.1), values, torch.float32, 4)[0]

    if kernels:
        with kernels_on_cpu():
            ours = trained()
    else:
        ours = trained()
    theirs, _ = train(lambda p: Plain(p, lr=0.1), values, torch.float32, 4)
    truth, _ = train(lambda p: Plain(p, lr=0.1), values, torch.float64, 4)
    assert_as_accurate(ours, theirs, truth, torch.float32)


def test_a_captured_step_equals_an_eager_one_under_a_changing_learning_rate(cls: Any, device: str) -> None:
    if device == "cpu" and torch.cuda.is_available():
        pytest.skip("kernels run on the CPU where there is no GPU")

    def trained(captured: bool) -> tuple[dict[str, Tensor], Any]:
        net = model(device)
        optimizer = cls(net.parameters(), lr=0.1)
        capture = optimizer.capture() if captured else None
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        with kernels_on_cpu():
            for number in range(6):
                optimizer.zero_grad()
                loss_of(net, number).backward()
                optimizer.step()
                schedule.step()
        return net.state_dict(), capture

    (ours, capture), (eager, _) = trained(True), trained(False)
    torch.testing.assert_close(ours, eager, rtol=0, atol=0)
    assert capture.replays >= 5, capture.explain()


def test_every_line_of_it_is_element_by_element_so_that_shards_are_updated_alone(cls: Any) -> None:
    optimizer = cls([Parameter(torch.ones(2))])
    assert optimizer._updater.shard_mode(optimizer, optimizer.param_groups[0], torch.device("cpu")) == (True, False)


def test_a_state_that_is_no_dict_and_math_of_matrices_are_refused_in_words() -> None:
    with pytest.raises(TypeError, match=r"Listed.state is a dict, such as dict\(m=torch.zeros_like\); got"):

        class Listed(st.optim.Optimizer):
            state = ("m",)

    class Squared(st.optim.Optimizer):
        def __init__(self, params: list[torch.nn.Parameter], lr: float) -> None:
            super().__init__(params, {"lr": lr})

        def update(self, p: torch.Tensor, g: torch.Tensor, *, lr: float) -> None:
            p.sub_(lr * g @ g @ g)

    w = torch.nn.Parameter(torch.ones(3, 3))
    w.grad = torch.ones(3, 3)
    with pytest.raises(st.RuleError, match=r"math of whole matrices is that of st\.optim\.MatrixOptimizer"):
        Squared([w], lr=0.1).step()
