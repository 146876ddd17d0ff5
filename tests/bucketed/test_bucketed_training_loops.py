"""Training loops as people write them end with the same weights, bucketed or not."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from bucketed_rows import SEQ
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, parametrizations
from torch.utils.checkpoint import checkpoint

import subtensors as st

pytestmark = pytest.mark.usefixtures("captured")

SIZES = (5, 6, 20, 7, 12, 30, 5)

Wrap = Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Tensor]]
Loop = Callable[[str, Wrap, Callable[[int], Tensor]], Iterator[nn.Module]]
"""Trains on a device what it wraps, on rows of given sizes; gives the modules whose weights it trained."""


def net(device: str, seed: int = 0, *more: nn.Module) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), *more, nn.Linear(8, 3)).to(device, torch.float64)


def two_players(device: str, wrap: Wrap, rows: Callable[[int], Tensor]) -> Iterator[nn.Module]:
    """A GAN: the judge is frozen while the other one learns."""
    maker, judge = net(device), net(device, 1)
    make, rate = wrap(maker), wrap(judge)
    opts = [torch.optim.SGD(model.parameters(), 0.1) for model in (maker, judge)]
    for n in SIZES:
        x = rows(n)
        judge.requires_grad_(True)
        (rate(make(x).detach()).mean() - rate(x).mean()).backward()
        opts[1].step()
        judge.requires_grad_(False)
        (-rate(make(x))).mean().backward()
        opts[0].step()
        for opt in opts:
            opt.zero_grad()
    yield from (maker, judge)


def scaled_and_clipped(device: str, wrap: Wrap, rows: Callable[[int], Tensor]) -> Iterator[nn.Module]:
    """Two batches a step, a loss scale, one step that overflows, clipped gradients."""
    model = net(device)
    run = wrap(model)
    opt = torch.optim.AdamW(model.parameters(), 1e-2)
    scaler = torch.amp.GradScaler(device, init_scale=8.0, growth_interval=2)
    for i, n in enumerate(SIZES):
        for x in (rows(n), rows(n // 2 + 1)):
            scaler.scale(run(x).square().mean() * (float("inf") if i == 3 else 1)).backward()
        scaler.unscale_(opt)
        clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    yield model


def evaluated_many_times(device: str, wrap: Wrap, rows: Callable[[int], Tensor]) -> Iterator[nn.Module]:
    """L-BFGS, whose closure runs the program several times a step."""
    model = net(device)
    run, opt, x = wrap(model), torch.optim.LBFGS(model.parameters(), max_iter=4), rows(6)

    def closure() -> Tensor:
        opt.zero_grad()
        loss = run(x).square().mean()
        loss.backward()
        return loss

    for _ in range(2):
        opt.step(closure)  # type: ignore[no-untyped-call]
    yield model


def loaded_and_cast(device: str, wrap: Wrap, rows: Callable[[int], Tensor]) -> Iterator[nn.Module]:
    """Weights that are loaded, assigned and cast between steps."""
    model = net(device)
    run = wrap(model)
    between: dict[int, Callable[[], Any]] = {
        2: lambda: model.load_state_dict(net(device, 3).state_dict()),
        3: lambda: model.load_state_dict(net(device, 4).state_dict(), assign=True),
        4: model.float,
        5: model.double,
    }
    for i, n in enumerate(SIZES):
        between.get(i, bool)()
        run(rows(n).to(model[0].weight.dtype)).square().sum().backward()
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(p.grad, alpha=0.01)
        model.zero_grad()
    yield model


def parametrized(device: str, wrap: Wrap, rows: Callable[[int], Tensor]) -> Iterator[nn.Module]:
    """Weights that are computed from others, with buffers that every forward writes to."""
    torch.manual_seed(0)
    layers = parametrizations.weight_norm(nn.Linear(3, 8)), parametrizations.spectral_norm(nn.Linear(8, 3))
    model = nn.Sequential(*layers).to(device, torch.float64)
    run, opt = wrap(model), torch.optim.SGD(model.parameters(), 0.1)
    for n in SIZES:
        run(rows(n)).square().mean().backward()
        opt.step()
        opt.zero_grad()
    yield model


def by_turns(device: str, wrap: Wrap, rows: Callable[[int], Tensor]) -> Iterator[nn.Module]:
    """Training and evaluation by turns, with batch norm, and an average of the weights that is evaluated too."""
    model = net(device, 0, nn.BatchNorm1d(8))
    average = copy.deepcopy(model).eval()
    run, run_average, opt = wrap(model), wrap(average), torch.optim.SGD(model.parameters(), 0.1)
    scores = nn.Module()
    for i, n in enumerate(SIZES):
        run(rows(n)).square().mean().backward()
        opt.step()
        opt.zero_grad()
        model.eval()
        with torch.no_grad():
            for p, q in zip(average.parameters(), model.parameters(), strict=True):
                p.lerp_(q, 0.1)
            score = run(rows(n)).square().mean() + run_average(rows(n)).square().mean()
        scores.register_buffer(f"score_{i}", score)
        model.train()
    yield from (model, average, scores)


def with_hooks(device: str, wrap: Wrap, rows: Callable[[int], Tensor]) -> Iterator[nn.Module]:
    """Hooks of modules and parameters, and a part that is computed again in the backward."""
    model = net(device)
    model[1].register_forward_hook(lambda module, given, out: out * 0.5)
    model[0].weight.register_hook(lambda gradient: gradient * 2)

    def program(x: Tensor) -> Tensor:
        return model[2](checkpoint(model[:2], x, use_reentrant=False))  # type: ignore[no-any-return]

    run, opt = wrap(program), torch.optim.SGD(model.parameters(), 0.1)
    for n in SIZES:
        run(rows(n)).square().mean().backward()
        opt.step()
        opt.zero_grad()
    yield model


LOOPS: list[Loop] = [
    two_players,
    scaled_and_clipped,
    evaluated_many_times,
    loaded_and_cast,
    parametrized,
    by_turns,
    with_hooks,
]


@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_ends_with_the_same_weights(device: str, loop: Loop, caplog: pytest.LogCaptureFixture) -> None:
    def trained(wrap: Wrap) -> list[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(0)

        def rows(n: int) -> Tensor:
            return torch.randn(n, 3, dtype=torch.float64, generator=generator).to(device)

        return [dict(model.state_dict()) for model in loop(device, wrap, rows)]

    runs = []

    def bucketed(program: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        runs.append(st.bucketed(program, {0: {0: SEQ}}))
        return runs[-1]

    caplog.set_level(logging.WARNING, "subtensors.bucketed")
    for found, expected in zip(trained(bucketed), trained(lambda program: program), strict=True):
        # Adam divides by roots of small sums, and so makes more of their roundings.
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
    assert runs[0].stats().hits
    # Weights that were replaced are; an evaluation between two steps is nothing to record again for.
    assert "is recaptured" not in caplog.text or loop is loaded_and_cast
