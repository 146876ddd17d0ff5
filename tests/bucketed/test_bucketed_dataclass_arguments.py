"""Dataclasses among the arguments of a bucketed program: containers of tensors, or options that are part of the key."""

from __future__ import annotations

from dataclasses import dataclass, make_dataclass
from typing import Any

import pytest
import torch
from bucketed_rows import SEQ, rows
from counted_buckets import Counted
from torch import Tensor

import subtensors as st

pytestmark = pytest.mark.usefixtures("captured")


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
def test_a_dataclass_of_options_is_part_of_the_key(device: str, counted: Counted) -> None:
    @dataclass
    class Options:
        scale: float

    run = st.bucketed(lambda x, options: x.softmax(0) * options.scale, {"x": {0: SEQ}})
    options = Options(1.0)
    for scale in (1.0, 2.0, 1.0, 2.0):
        options.scale = scale
        x = rows(5, device)
        torch.testing.assert_close(run(x, options), x.softmax(0) * scale)
    assert counted.take() == (2, 2)


@torch.no_grad()
def test_a_call_with_a_sparse_argument_falls_back(device: str) -> None:
    run = st.bucketed(lambda x, y: y @ x, {"x": {1: SEQ}})
    y = torch.eye(3, dtype=torch.float64, device=device).to_sparse()
    x = rows(3, device)
    torch.testing.assert_close(run(x, y), x)
    assert list(run.stats().fallbacks) == ["an argument has the layout torch.sparse_coo"]
