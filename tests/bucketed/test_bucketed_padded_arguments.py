"""PaddedTensors among the arguments: a call without a graph unpads them, and every path gives plain results."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from pretend_graphs import pretend
from torch import Tensor, nn

import subtensors as st

SEQ = st.Dim("n", max=64, buckets=[8, 16])
DIMS = {"x": {1: SEQ}}


@pytest.fixture(params=["plain", "captured"], autouse=True)
def graphs(request: pytest.FixtureRequest, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test without graphs, and with those that a CPU pretends to have."""
    if request.param == "captured" and device == "cpu":
        pretend(monkeypatch, trained=True)


def rows(n: int, device: str) -> Tensor:
    return torch.randn(2, n, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(n)).to(device)


def padded(n: int, device: str) -> st.PaddedTensor:
    return st.pad(rows(n, device), {1: SEQ})


def ragged(device: str, *lengths: int) -> tuple[list[Tensor], st.PaddedTensor]:
    parts = [rows(n, device)[0] for n in lengths]
    return parts, st.pad(parts, {0: SEQ})


def mean_over_the_bucket(x: Tensor) -> Tensor:
    return x * (1 / x.shape[1])


def read_on_the_host(x: Tensor) -> Tensor:
    return x * x.sum().item()


@pytest.mark.parametrize("options", [{}, {"on_miss": "eager"}, {"check": 1}], ids=str)
@pytest.mark.parametrize("program", [mean_over_the_bucket, read_on_the_host])
def test_a_padded_argument_of_a_call_without_a_graph_has_its_true_sizes(
    program: Callable[[Tensor], Tensor], options: dict[str, Any], device: str
) -> None:
    run = st.bucketed(program, DIMS, **options)
    for n in (5, 6, 5, 13):
        result = run(padded(n, device))
        assert type(result) is Tensor
        torch.testing.assert_close(result, program(rows(n, device)))


@pytest.mark.parametrize("program", [lambda x: x * 2, read_on_the_host], ids=["replayed", "without a graph"])
@pytest.mark.parametrize("options", [{}, {"on_miss": "eager"}, {"max_waste": 1.01}], ids=str)
def test_each_call_of_a_ragged_batch_gives_a_list_of_rows(
    program: Callable[[Tensor], Tensor], options: dict[str, Any], device: str
) -> None:
    run = st.bucketed(lambda x: {"out": program(x), "rows": x.shape[0]}, DIMS, **options)
    for lengths in ((2, 5), (2, 5), (3, 3), (9, 16)):
        parts, x = ragged(device, *lengths)
        result = run(x)
        assert [type(row) for row in result["out"]] == [Tensor, Tensor]
        torch.testing.assert_close(torch.cat(result["out"]), program(torch.cat(parts)))
        assert result["rows"] == 2


def test_a_ragged_batch_trains_parameters_in_every_call(device: str, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    net = nn.Linear(4, 3, dtype=torch.float64, device=device)
    run = st.bucketed(net, {"input": {1: SEQ}})
    with caplog.at_level(logging.WARNING, "subtensors.bucketed"):
        for lengths in ((2, 5), (2, 5), (7, 1)):
            parts, x = ragged(device, *lengths)
            result = run(x)
            assert [type(row) for row in result] == [Tensor, Tensor]
            torch.testing.assert_close(torch.cat(result), net(torch.cat(parts)))
            found, expected = (
                torch.autograd.grad(torch.cat(out).square().sum(), [*net.parameters()])
                for out in (result, [net(part) for part in parts])
            )
            torch.testing.assert_close(found, expected)
    assert "a result is a ragged batch" in caplog.text


def test_a_ragged_batch_that_requires_grad_gets_its_gradient_in_every_call(device: str) -> None:
    run = st.bucketed(lambda x: x.square(), DIMS)
    for _ in range(3):
        parts = [rows(n, device)[0].requires_grad_() for n in (2, 5)]
        torch.cat(run(st.pad(parts, {0: SEQ}))).sum().backward()
        for part in parts:
            torch.testing.assert_close(part.grad, 2 * part.detach())


def test_gradients_of_a_padded_argument_flow_through_a_call_without_a_graph(device: str) -> None:
    run = st.bucketed(mean_over_the_bucket, DIMS)
    for n in (5, 6, 5):
        x = rows(n, device).requires_grad_()
        run(st.pad(x, {1: SEQ})).sum().backward()
        torch.testing.assert_close(x.grad, torch.full_like(x, 1 / n))


@dataclass
class Batch:
    x: Tensor
    seen: int = 0


def test_what_a_program_writes_to_containers_of_padded_tensors_is_the_callers(device: str) -> None:
    def program(y: Tensor, batch: dict[str, Any], pair: tuple[Tensor, int], own: Batch) -> Tensor:
        out = batch["x"] * (1 / batch["x"].shape[1]) + pair[0].sum().item() * own.x.shape[1]
        batch["count"], own.seen = batch["x"].shape[1], own.seen + 1
        own.x.add_(1)
        return out  # type: ignore[no-any-return]

    run = st.bucketed(program, {"y": {1: st.Dim("m", max=64, buckets=8)}})
    for _ in range(2):
        given, batch, own = padded(5, device), {"x": padded(5, device)}, Batch(padded(5, device))
        kept, x, y = batch["x"], own.x, rows(5, device)
        result = run(y, batch, (given, 3), own)
        torch.testing.assert_close(result, y / 5 + y.sum() * 5)
        assert batch == {"x": kept, "count": 5}
        assert (own.x is x, own.seen) == (True, 1)
        torch.testing.assert_close(x.unpad(), rows(5, device) + 1)


def test_a_write_to_a_padded_argument_whose_dims_are_flattened_is_the_callers(device: str) -> None:
    def program(y: Tensor, x: Tensor) -> float:
        x.mul_(2)
        return x.sum().item() / x.shape[0]

    run = st.bucketed(program, {"y": {1: st.Dim("m", max=64, buckets=8)}})
    for _ in range(2):
        x = padded(5, device).flatten(0, 1)
        assert isinstance(x, st.PaddedTensor)
        y = rows(5, device).flatten(0, 1) * 2
        assert run(y[None], x) == pytest.approx(float(y.sum()) / 10)
        torch.testing.assert_close(x.unpad(), y)


@pytest.mark.parametrize("given", [padded, rows])
def test_an_error_of_the_program_at_the_true_size_is_raised_in_every_call(
    given: Callable[[int, str], Tensor], device: str
) -> None:
    def program(x: Tensor) -> Tensor:
        if x.shape[1] < 6:
            raise ValueError(f"{int(x.shape[1])} is too short")
        return x * 2

    run = st.bucketed(program, DIMS)
    for _ in range(4):
        with pytest.raises(ValueError, match="5 is too short"):
            run(given(5, device))
    torch.testing.assert_close(run(given(6, device)), 2 * rows(6, device))
