"""Recording the same program again costs less, and never gives what another one gave."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import subtensors as st
from subtensors.dispatch.region import graph, lowering


def test_a_program_that_is_recorded_again_infers_and_plans_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight = torch.randn(6, 4, 5, requires_grad=True), torch.randn(30, 5, requires_grad=True)
    target = torch.randint(0, 30, (6, 4))

    def step() -> None:
        logits = F.linear(st.chunk(hidden, rows=2), weight)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), target[:, 1:].flatten())
        (loss + (logits.logsumexp(-1) ** 2).mean()).backward()

    seen: list[object] = []
    infer, plan = graph._infer, lowering.plan_linear_cross_entropy
    monkeypatch.setattr(graph, "_infer", lambda *args: seen.append(args[0]) or infer(*args))
    monkeypatch.setattr(
        lowering, "plan_linear_cross_entropy", lambda *args, **kwargs: seen.append("plan") or plan(*args, **kwargs)
    )
    graph._inferred.clear()
    lowering._planned.cache_clear()
    step()
    assert seen.count("plan") == 1
    assert len(seen) > 5
    seen.clear()
    step()
    assert not seen


def test_equal_numbers_of_two_types_are_not_taken_for_each_other() -> None:
    h = st.chunk(torch.ones(4, 3, dtype=torch.int64), rows=2)
    assert [(h * number).dtype for number in (2, 2.0, 2, True)] == [
        torch.int64,
        torch.float32,
        torch.int64,
        torch.int64,
    ]
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        assert (h * 2.0).dtype == torch.float64
    finally:
        torch.set_default_dtype(default)


def test_the_sequence_dim_stays_divided_through_a_linear_layer() -> None:
    h = st.chunk(torch.ones(4, 12, 3), dim=1, rows=3)
    logits = F.linear(h, torch.ones(5, 3))
    assert "4 chunks of 3 of 12 rows" in st.explain(logits.exp().logsumexp(-1))
