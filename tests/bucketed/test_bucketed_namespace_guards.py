"""Classes, files and functions are namespaces: values and tensors that a program reads there are guarded."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bucketed_rows import SEQ, rows
from counted_buckets import Counted
from torch import Tensor, nn

import subtensors as st

pytestmark = pytest.mark.usefixtures("captured")

table = torch.ones(3, dtype=torch.float64)
"""Of the file."""
settings: Any = types.ModuleType("settings")


class Config:
    scale = 1.0
    table = torch.ones(3, dtype=torch.float64)


def scaled(x: Tensor) -> Tensor:
    return x * scaled.factor  # type: ignore[attr-defined, no-any-return]


class Net(nn.Module):
    shifts: Any = (0.0,)

    def forward(self, x: Tensor) -> Tensor:
        x = settings.scaled(x.softmax(0)) * table * Config.scale * Config.table
        return x * settings.scale * settings.table + self.shifts[0]  # type: ignore[no-any-return]


PLACES: dict[str, tuple[Callable[[], Any], str, bool]] = {
    "a tensor of the file": (lambda: globals(), "table", True),
    "a class": (lambda: Config, "scale", False),
    "a tensor of a class": (lambda: Config, "table", True),
    "another file": (lambda: settings, "scale", False),
    "a tensor of another file": (lambda: settings, "table", True),
    "a function": (lambda: scaled, "factor", False),
}


@pytest.fixture(autouse=True)
def initially(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them as at first."""
    for held in (Config, settings):
        monkeypatch.setattr(held, "scale", 1.0, raising=False)
        monkeypatch.setattr(held, "table", torch.ones(3, dtype=torch.float64, device=device), raising=False)
    monkeypatch.setattr(settings, "scaled", scaled, raising=False)
    monkeypatch.setattr(scaled, "factor", 1.0, raising=False)
    monkeypatch.setitem(globals(), "table", torch.ones(3, dtype=torch.float64, device=device))


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("kind", ["a module", "a method", "a function"])
@torch.no_grad()
def test_values_in_a_namespace_are_read_in_each_call(device: str, kind: str, name: str, counted: Counted) -> None:
    net = Net()
    programs: dict[str, Callable[[Tensor], Tensor]] = {
        "a module": net, "a method": net.forward, "a function": lambda x: net(x),
    }  # fmt: skip
    run = st.bucketed(programs[kind], {0: {0: SEQ}})
    held, at, is_tensor = PLACES[name]
    for i in range(3):
        value = torch.full((3,), 1.0 + i, dtype=torch.float64, device=device) if is_tensor else 1.0 + i
        if isinstance(place := held(), dict):
            place[at] = value
        else:
            setattr(place, at, value)
        for _ in range(2):
            x = rows(5, device)
            torch.testing.assert_close(run(x), net(x))
    # As often as it changed.
    assert counted.recorded == 3
    assert run.stats().hits == 3


@torch.no_grad()
def test_values_that_the_program_does_not_name_may_change(device: str, counted: Counted) -> None:
    net = Net()
    run = st.bucketed(net, {"x": {0: SEQ}})
    for i in range(4):
        settings.other = Config.other = scaled.other = i  # type: ignore[attr-defined]
        x = rows(5, device)
        torch.testing.assert_close(run(x), net(x))
    assert counted.recorded == 1
