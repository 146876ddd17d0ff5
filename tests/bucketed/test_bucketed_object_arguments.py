"""Objects, containers and dataclasses among the arguments: what is written to them reaches the caller, once a call."""

from __future__ import annotations

import enum
import types
from collections.abc import Callable
from dataclasses import make_dataclass
from typing import Any

import numpy as np
import pytest
import torch
from bucketed_rows import DIMS, SEQ, rows
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


FIELDS = [("x", Tensor), ("more", dict[str, Tensor]), ("scale", float)]
KINDS = {
    "plain": make_dataclass("Batch", FIELDS),
    "frozen": make_dataclass("FrozenBatch", FIELDS, frozen=True),
    "slots": make_dataclass("SlottedBatch", FIELDS, slots=True),
    "by identity": make_dataclass("BatchByIdentity", FIELDS, eq=False),
}


@pytest.mark.parametrize("name", KINDS)
def test_dataclasses_are_containers(device: str, name: str) -> None:
    kind: Any = KINDS[name]

    def program(batch: Any) -> Any:
        y = batch.x.softmax(0) * batch.scale
        return kind(y, {"sum": batch.more["y"].sum(0)}, batch.scale + 1)

    run = st.bucketed(program, {"batch": {"x": {0: SEQ}, "more": {"y": {0: SEQ}}}})
    for n, scale in ((5, 1.0), (6, 1.0), (20, 1.0), (7, 2.0), (8, 2.0)):
        batches = [kind(rows(n, device).requires_grad_(), {"y": rows(n, device)}, scale)]
        batches.append(kind(batches[0].x.detach().clone().requires_grad_(), batches[0].more, scale))
        found, expected = run(batches[0]), program(batches[1])
        assert (type(found), found.scale) == (kind, scale + 1)
        torch.testing.assert_close([found.x, found.more], [expected.x, expected.more])
        for result in (found, expected):
            result.x.square().sum().backward()
        torch.testing.assert_close(batches[0].x.grad, batches[1].x.grad)
    assert (run.stats().hits, run.stats().fallbacks) == (2, {})


@torch.no_grad()
def test_a_call_with_a_sparse_argument_falls_back(device: str) -> None:
    run = st.bucketed(lambda x, y: y @ x, {"x": {1: SEQ}})
    y = torch.eye(3, dtype=torch.float64, device=device).to_sparse()
    x = rows(3, device)
    torch.testing.assert_close(run(x, y), x)
    assert list(run.stats().fallbacks) == ["an argument has the layout torch.sparse_coo"]


class Options:
    """Told by its identity; what it holds has no hash, or is told by its value."""

    def __init__(self, part: Any) -> None:
        self.part = part


class Mode(enum.Enum):
    PLAIN = 1
    DOUBLED = 2


Scaled = make_dataclass("Scaled", [("scale", float)])
SlottedScaled = make_dataclass("SlottedScaled", [("scale", float)], slots=True)


def set_scale(options: Options) -> None:
    options.part.scale = 3.0


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Options], object], Callable[[Any], float]]] = {
    "dataclass": (lambda: Scaled(2.0), set_scale, lambda part: part.scale),
    "dataclass with slots": (lambda: SlottedScaled(2.0), set_scale, lambda part: part.scale),
    "namespace": (lambda: types.SimpleNamespace(scale=2.0), set_scale, lambda part: part.scale),
    "another namespace": (
        lambda: types.SimpleNamespace(scale=2.0),
        lambda options: setattr(options, "part", types.SimpleNamespace(scale=3.0)),
        lambda part: part.scale,
    ),
    "set": (lambda: {1}, lambda options: options.part.add(2), len),
    "array": (lambda: np.ones(2), lambda options: options.part.fill(3), lambda part: float(part[0])),
    "enum": (lambda: Mode.PLAIN, lambda options: setattr(options, "part", Mode.DOUBLED), lambda part: part.value),
}


@torch.no_grad()
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_what_an_object_holds_is_seen(device: str, name: str) -> None:
    make, change, scale_of = CHANGES[name]
    options = Options(make())
    run = st.bucketed(lambda x, options: x.sum(0) * scale_of(options.part), DIMS, check=False)
    x = rows(5, device)
    for _ in range(2):
        torch.testing.assert_close(run(x, options), x.sum(0) * scale_of(options.part))
    before = scale_of(options.part)
    change(options)
    assert scale_of(options.part) != before
    for _ in range(2):
        torch.testing.assert_close(run(x, options), x.sum(0) * scale_of(options.part))
    assert run.stats().hits == 2
    assert not run.stats().fallbacks


def test_an_object_may_hold_itself_and_a_dataclass_may_not(device: str) -> None:
    class Scale:
        def __init__(self) -> None:
            self.own, self.by = self, 3

    run = st.bucketed(lambda x, scale: x["x"] * x["scale"].by + scale.by, DIMS)
    scale, x = Scale(), torch.ones(2, 5, device=device)
    for _ in range(2):
        assert torch.equal(run({"x": x, "scale": scale}, scale), x * 3 + 3)
    made = make_dataclass("Options", ["own"])(None)
    made.own = made
    with pytest.raises(ValueError, match="a container that holds itself"):
        run({"x": x, "scale": scale}, made)
