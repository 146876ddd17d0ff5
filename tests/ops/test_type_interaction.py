"""Padded and chunked tensors in one program give the values of the program on plain tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import subtensors as st
from subtensors.chunked import record_call

SEQ = st.Dim("seq", max=32, buckets=8)


@pytest.fixture(autouse=True)
def unsaid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_call, "fallbacks", type(record_call.fallbacks)())


def model(device: str) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList([nn.Embedding(11, 6), nn.Linear(6, 11)]).double().to(device)


def loss_of(parts: Any, ids: Tensor, labels: Tensor, chunk: Callable[[Tensor], Tensor]) -> Tensor:
    return F.cross_entropy(parts[1](chunk(parts[0](ids))).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("dim", [0, 1])
def test_a_padded_tensor_is_chunked(dim: int, device: str, caplog: pytest.LogCaptureFixture) -> None:
    ours = model(device)
    theirs = copy.deepcopy(ours)
    for n in (5, 8, 20):
        ids, labels = (torch.randint(11, (2, n), device=device) for _ in range(2))
        padded = [st.pad(x, {1: SEQ}) for x in (ids, labels)]
        loss = loss_of(ours, *padded, lambda h: st.chunk(h, dim, chunks=2))
        expected = loss_of(theirs, ids, labels, lambda h: h)
        loss.backward()
        expected.backward()
        torch.testing.assert_close(loss.detach(), expected.detach())
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
    assert not [r.getMessage() for r in caplog.records if r.name.startswith("subtensors")]
    with pytest.raises(TypeError, match="made of a plain tensor"):
        st.ChunkedTensor(padded[0], chunks=2)


@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize("compile", [False, {"backend": "aot_eager"}], ids=["eager", "compiled"])
def test_a_bucketed_program_that_chunks_its_hidden_states_has_graphs(compile: Any, device: str) -> None:
    ours = model(device)
    theirs = copy.deepcopy(ours)
    run = st.bucketed(
        lambda ids, labels: loss_of(ours, ids, labels, lambda h: st.chunk(h, 1, chunks=2)),
        {"ids": {1: SEQ}, "labels": {1: SEQ}},
        compile=compile,
    )
    for n in (5, 6, 20, 5):
        ids, labels = (torch.randint(11, (2, n), device=device) for _ in range(2))
        loss, expected = run(ids, labels), loss_of(theirs, ids, labels, lambda h: h)
        loss.backward()
        expected.backward()
        torch.testing.assert_close(loss.detach(), expected.detach())
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
    assert not run.stats().fallbacks
    assert run.stats().hits == 2


CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "mul": torch.mul,
    "operator": lambda a, b: a - b,
    "cat": lambda a, b: torch.cat([a, b]).sum(0),
    "matmul": lambda a, b: a.mT @ b,
    "loss": F.mse_loss,
    "cross entropy": lambda a, b: F.cross_entropy(a, b.softmax(-1)),
}


@pytest.mark.filterwarnings("ignore:Using a target size")  # of true sizes beside the bucket's
@pytest.mark.parametrize("is_padded_first", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_a_chunked_tensor_meets_a_padded_one(name: str, is_padded_first: bool, device: str) -> None:
    call = CALLS[name]
    x, y = (torch.randn(5, 6, dtype=torch.float64, device=device, requires_grad=True) for _ in range(2))
    results = []
    for chunked, padded in ((st.chunk(x, chunks=2), st.pad(y, {0: SEQ})), (x, y)):
        result = call(padded, chunked) if is_padded_first else call(chunked, padded)
        unpadded = result.unpad() if isinstance(result, st.PaddedTensor) else result
        results.append((unpadded.detach(), *torch.autograd.grad(unpadded.square().sum(), (x, y))))
    torch.testing.assert_close(results[0], results[1])
