"""Writes of a program to objects and containers among its arguments reach the caller, once per call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bucketed_rows import DIMS, rows
from torch import Tensor

import subtensors as st

pytestmark = pytest.mark.usefixtures("captured")


class Cache:
    """What grows with each call."""

    def __init__(self) -> None:
        self.rows: list[Tensor] = []
        self.calls = 0

    def add(self, x: Tensor) -> Tensor:
        self.rows.append(x)
        self.calls += 1
        return torch.cat(self.rows)


@torch.no_grad()
@pytest.mark.parametrize("beyond", [100, 2])
def test_an_object_is_written_once_a_call(device: str, beyond: int) -> None:
    def program(x: Tensor, cache: Cache) -> Tensor:
        whole = cache.add(x).softmax(0)
        if cache.calls > beyond and x.shape[0] != whole.shape[0]:
            raise ValueError("too many")
        return whole.sum(0) * cache.calls

    run = st.bucketed(program, DIMS)
    own, other = Cache(), Cache()
    for i, n in enumerate((5, 6, 20, 5)):
        x = rows(n, device)
        if i < beyond:
            torch.testing.assert_close(run(x, own), program(x, other))
        else:
            for call, cache in ((run, own), (program, other)):
                with pytest.raises(ValueError, match="too many"):
                    call(x, cache)
        assert own.calls == other.calls
        torch.testing.assert_close(own.rows, other.rows)
        assert {type(t) for t in own.rows} == {Tensor}
    if beyond > 4:
        assert list(run.stats().fallbacks.values()) == [4]
        assert "writes to an argument, a Cache, which a graph holds" in next(iter(run.stats().fallbacks))


@torch.no_grad()
@pytest.mark.parametrize("kind", [list, dict])
def test_a_container_is_written_once_a_call(device: str, kind: type) -> None:
    def program(x: Tensor, past: Any) -> Tensor:
        if kind is list:
            past.append(x.mean(0))
            return sum(past)  # type: ignore[return-value]
        past["mean"] = past.get("mean", 0) + x.mean(0)
        return past["mean"] * 2  # type: ignore[no-any-return]

    run = st.bucketed(program, DIMS)
    own, other = kind(), kind()
    for n in (5, 6, 20, 5):
        x = rows(n, device)
        torch.testing.assert_close(run(x, own), program(x, other))
        torch.testing.assert_close(own, other)
    assert all("writes to a container among its arguments" in reason for reason in run.stats().fallbacks)
    assert sum(run.stats().fallbacks.values()) == 4
