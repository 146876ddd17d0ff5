"""Side effects of calls that are compared with the plain program: writes, gradients and random draws happen once."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from bucketed_batches import DIMS, rows
from torch import Tensor, nn
from torch.nn import functional as F

import subtensors as st
from subtensors.bucketed import side_effects


@pytest.mark.usefixtures("captured")
def test_gradients_that_a_program_accumulates_are_added_once_by_a_checked_call(device: str) -> None:
    factor = [1.0]

    def program_of(w: Tensor) -> Callable[[Tensor], Tensor]:
        def program(x: Tensor) -> Tensor:
            loss = (x @ w).square().sum() * factor[0]
            loss.backward()
            return loss.detach()

        return program

    weights = [torch.ones(4, dtype=torch.float64, device=device).requires_grad_() for _ in range(2)]
    run, plain = st.bucketed(program_of(weights[0]), DIMS, check=1), program_of(weights[1])
    for i, n in enumerate((5, 6, 5, 13, 7, 6)):
        if i == 4:
            factor[0] = 2.0  # the check finds the replay stale, and undoes what it added
        torch.testing.assert_close(run(rows(n, device)), plain(rows(n, device)))
        torch.testing.assert_close(weights[0].grad, weights[1].grad)


def _training_step(net: nn.Module, loss: Callable[[Tensor], Tensor], device: str) -> Callable[[Tensor], Tensor]:
    opt = st.optim.AdamW(net.parameters(), lr=0.01)

    def step(x: Tensor) -> Tensor:
        value = loss(net(x))
        value.backward()
        opt.step()
        opt.zero_grad()
        return value.detach()

    return step


@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize("is_wrong", [False, True])
def test_a_step_that_writes_much_is_compared_once_it_is_known_what_it_writes(
    is_wrong: bool, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.setattr(side_effects, "ROLLBACK_BYTES", 64)

    def loss(x: Tensor) -> Tensor:
        return x.square().sum() * (1 / x.shape[1]) if is_wrong else x.square().mean()

    nets = [nn.Linear(4, 4, dtype=torch.float64).to(device) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    plain = _training_step(nets[1], loss, device)
    run = st.bucketed(_training_step(nets[0], loss, device), DIMS)
    for n in (5, 6, 7, 13, 12):
        torch.testing.assert_close(run(rows(n, device)), plain(rows(n, device)))
        torch.testing.assert_close(nets[0].state_dict(), nets[1].state_dict())
    assert run.stats().not_checked == {"it writes to a tensor that is too large for a copy": 1}
    assert run.stats().checked == (2 if is_wrong else 3)
    assert bool(run.stats().fallbacks) == is_wrong


@pytest.mark.usefixtures("captured")
def test_a_step_of_whose_writes_there_is_no_room_for_copies_is_not_run_for_nothing(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.setattr(side_effects, "ROLLBACK_BYTES", 64)
    monkeypatch.setattr(side_effects, "_free_bytes", lambda device: 100)
    nets = [nn.Linear(4, 4, dtype=torch.float64).to(device) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    plain = _training_step(nets[1], Tensor.sum, device)
    run = st.bucketed(_training_step(nets[0], Tensor.sum, device), DIMS)
    for n in (5, 6, 13, 3, 12):
        torch.testing.assert_close(run(rows(n, device)), plain(rows(n, device)))
        torch.testing.assert_close(nets[0].state_dict(), nets[1].state_dict())
    assert run.stats().not_checked == {"it writes to a tensor that is too large for a copy": 1}


@pytest.mark.usefixtures("captured")
def test_what_the_program_writes_is_written_once(device: str) -> None:
    torch.manual_seed(0)
    ours, theirs = (nn.BatchNorm1d(4, dtype=torch.float64).to(device) for _ in range(2))
    run = st.bucketed(lambda x: ours(x.transpose(1, 2)), DIMS)
    with torch.no_grad():
        for n in (5, 6, 5, 13):
            torch.testing.assert_close(run(rows(n, device)), theirs(rows(n, device).transpose(1, 2)))
            torch.testing.assert_close(ours.running_mean, theirs.running_mean)
            torch.testing.assert_close(ours.running_var, theirs.running_var)
    assert run.stats().checked == 3


class Noise(nn.Module):
    """Adds a number that a generator of its own draws on the host."""

    def __init__(self, draw: Callable[[Any], float], generator: object) -> None:
        super().__init__()
        self.draw, self.generator = draw, generator

    def forward(self, x: Tensor) -> Tensor:
        return x.sum(1) + self.draw(self.generator)


OWN: dict[str, tuple[Callable[[Any], float], Callable[[], object]]] = {
    "torch's": (lambda g: float(torch.rand((), generator=g)), lambda: torch.Generator().manual_seed(3)),
    "NumPy's": (lambda g: float(g.random()), lambda: np.random.default_rng(3)),
    "Python's": (lambda g: g.random(), lambda: random.Random(3)),
}


@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize("is_argument", [False, True])
@pytest.mark.parametrize("name", OWN)
def test_a_generator_of_the_programs_own_draws_what_it_draws_in_the_plain_program(
    device: str, name: str, is_argument: bool
) -> None:
    draw, generator = OWN[name]
    noise, given, plain = Noise(draw, generator()), generator(), Noise(draw, generator())

    def takes_it(x: Tensor, generator: object) -> Tensor:
        return x.sum(1) + draw(generator)

    run = st.bucketed(takes_it if is_argument else noise, DIMS)
    for n in (5, 5, 6, 13, 5):
        x = rows(n, device)
        torch.testing.assert_close(run(x, given) if is_argument else run(x), plain(x))
    assert run.stats().checked == 0
    assert [*run.stats().not_checked, *run.stats().fallbacks]


@pytest.mark.usefixtures("captured")
def test_a_call_that_draws_random_numbers_is_not_checked_and_says_so(device: str) -> None:
    run = st.bucketed(lambda x: F.dropout(x, 0.5).sum(1), DIMS)
    run(rows(5, device))
    assert run.stats().not_checked == {"it draws random numbers": 1}
    assert "1 call not checked: it draws random numbers" in str(run.stats())


def test_a_write_too_large_to_undo_makes_the_plain_run_the_answer(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_effects, "ROLLBACK_BYTES", 8)
    total = torch.zeros(4, dtype=torch.float64, device=device)

    def program(x: Tensor) -> Tensor:
        total.add_(1)
        return x.sum(1)

    run = st.bucketed(program, DIMS)
    for count in (1, 2, 3):
        torch.testing.assert_close(run(rows(5, device)), rows(5, device).sum(1))
        assert total.tolist() == [count] * 4


@pytest.mark.filterwarnings("ignore")
def test_a_result_that_no_graph_can_return_is_returned_where_writes_are_too_large_to_undo(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side_effects, "ROLLBACK_BYTES", 8)
    total = torch.zeros(4, dtype=torch.float64, device=device)

    def program(x: Tensor) -> set[Tensor]:
        total.add_(1)
        return {x.sum(1)}

    (found,) = st.bucketed(program, DIMS)(rows(5, device))
    torch.testing.assert_close(found, rows(5, device).sum(1))


def test_an_error_of_a_program_whose_writes_are_too_large_to_undo_is_raised_after_one_run(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side_effects, "ROLLBACK_BYTES", 8)
    total = torch.zeros(4, dtype=torch.float64, device=device)

    def program(x: Tensor) -> Tensor:
        total.add_(1)
        raise ValueError("too long")

    with pytest.raises(ValueError, match="too long"):
        st.bucketed(program, DIMS)(rows(5, device))
    assert total.tolist() == [1] * 4
