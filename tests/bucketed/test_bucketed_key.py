"""`key=` of `st.bucketed`: what it gives is part of every graph's key."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
import torch
from bucketed_rows import DIMS, rows
from torch import Tensor

import subtensors as st

pytestmark = pytest.mark.usefixtures("captured")


@dataclass
class Values:
    scale: float
    shift: float


class Settings:
    def __init__(self, scale: float) -> None:
        self.scale = scale
        self.shifts = {"first": 0.0}

    def apply(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shifts["first"]


KEYS: dict[str, Callable[[Settings], Any]] = {
    "an object": lambda settings: settings,
    "a container": lambda settings: [settings, settings.shifts],
    "a function of the arguments": lambda settings: lambda x: (settings.scale, settings.shifts["first"], x.dim()),
    "a dataclass that it returns": lambda settings: lambda x: Values(settings.scale, settings.shifts["first"]),
}


@torch.no_grad()
@pytest.mark.parametrize("kind", KEYS)
def test_each_value_of_the_key_has_a_graph_of_its_own(kind: str, device: str) -> None:
    settings = Settings(2.0)
    run = st.bucketed(settings.apply, DIMS, key=KEYS[kind](settings), check=False)
    x = rows(5, device)
    for _ in range(3):
        for scale, shift in ((2.0, 0.0), (3.0, 0.0), (3.0, 1.0)):
            settings.scale, settings.shifts["first"] = scale, shift
            torch.testing.assert_close(run(x), x * scale + shift)
    stats = run.stats()
    assert (stats.hits, stats.recaptures, len(stats.buckets)) == (6, 0, 3)
    assert not stats.fallbacks


@torch.no_grad()
def test_a_watched_value_that_is_no_part_of_the_key_is_still_watched(device: str) -> None:
    settings = Settings(2.0)
    run = st.bucketed(settings.apply, DIMS, key=lambda x: settings.shifts["first"], check=False)
    x = rows(5, device)
    for scale, shift in ((2.0, 0.0), (2.0, 1.0), (3.0, 1.0), (3.0, 0.0), (2.0, 1.0)):
        settings.scale, settings.shifts["first"] = scale, shift
        torch.testing.assert_close(run(x), x * scale + shift)
    assert not run.stats().fallbacks


@torch.no_grad()
def test_a_key_that_can_be_no_part_of_a_graphs_key_is_refused(device: str) -> None:
    x = rows(5, device)
    for key, message in (({1}, "unhashable type: 'set'"), ([x], "key gives plain values, got a tensor")):
        with pytest.raises(TypeError, match=message):
            st.bucketed(lambda x: x.softmax(0), DIMS, key=key)(x)
    with pytest.raises(ValueError, match="of the key"):
        st.bucketed(lambda x: x.softmax(0), DIMS, key=lambda x: int("of the key"))(x)


@torch.no_grad()
def test_a_key_of_ever_new_values_ends_without_further_graphs(device: str) -> None:
    step = 0
    run = st.bucketed(lambda x: x.sum(0) + step, DIMS, key=lambda x: step, check=False)
    x = rows(5, device)
    for step in range(130):
        torch.testing.assert_close(run(x), x.sum(0) + step)
    assert run.stats().fallbacks == {"key had 128 values, each with graphs of its own: give a tensor, or max_graphs": 2}


class Power(IntEnum):
    ONE = 1
    TWO = 2


ALIKE: dict[str, tuple[complex, complex]] = {
    "int and float": (1, 1.0),
    "bool and int": (True, 1),
    "signs of zero": (0.0, -0.0),
    "numbers of NumPy": (np.float64(1.0), np.float64(2.0)),
    "members of an enum": (Power.ONE, Power.TWO),
}
"""Values with which a program computes other dtypes or numbers; the first three pairs are equal in Python."""


def scaled(x: Tensor, scale: complex) -> tuple[Tensor, Tensor]:
    """Return what shows the type and the sign of a scale."""
    return x.bool() * scale, 1 / (x * scale)


@torch.no_grad()
@pytest.mark.parametrize("values", ALIKE.values(), ids=ALIKE)
@pytest.mark.parametrize("kind", ["key", "argument", "attribute"])
def test_values_that_compute_something_else_have_other_graphs(
    kind: str, values: tuple[complex, complex], device: str
) -> None:
    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = values[0]

        def forward(self, x: Tensor, settings: object = None) -> tuple[Tensor, Tensor]:
            return scaled(x, settings.scale if isinstance(settings, Settings) else self.scale)

    net, settings = Scaled(), Settings(1.0)
    run = st.bucketed(net, DIMS, key=settings if kind == "key" else None, check=False)
    x = torch.arange(10, device=device).reshape(5, 2)
    more = (settings,) if kind == "argument" else ()
    for value in (*values, *values):
        settings.scale = value  # type: ignore[assignment]
        if kind != "argument":
            net.scale = value
        torch.testing.assert_close(run(x, *more), net(x, *more), rtol=0, atol=0)


@torch.no_grad()
@pytest.mark.parametrize("kind", [dict, OrderedDict, lambda items: defaultdict(int, items)])
def test_keys_of_dicts_that_python_finds_equal_have_graphs_of_their_own(kind: Any, device: str) -> None:
    current: Any = None
    run = st.bucketed(lambda x, given: sum(key * x * value for key, value in given.items()), DIMS)
    keyed = st.bucketed(lambda x: x * current, DIMS, key=lambda x: kind({current: 1}))
    x = torch.ones(5, 3, dtype=torch.int64, device=device)
    for current in (2, 2.0, 1, True, 1.0, 1):
        torch.testing.assert_close(run(x, kind({current: 3})), current * x * 3)
        torch.testing.assert_close(keyed(x), x * current)
    assert run.stats().hits == keyed.stats().hits == 1
