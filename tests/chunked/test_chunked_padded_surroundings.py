"""Chunked padded tensors inside bucketed programs, with static and packed heads, and under FSDP2 in two processes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from bucketed_rows import assert_same_gradients
from pretend_graphs import pretend
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from two_ranks import on_two_ranks

import subtensors as st

WIDTH, CLASSES = 8, 30
SEQ = st.Dim("seq", max=64, buckets=16)
SIZES = (20, 30, 10, 20, 21, 5, 9, 31)

Loss = Callable[[Any, Any], Any]


def cross_entropy(logits: Any, target: Any) -> Any:
    return F.cross_entropy(logits, target)


def policy(logits: Any, target: Any) -> Any:
    log_probs = logits.log_softmax(-1)
    picked = log_probs.gather(-1, target.clamp(min=0)[:, None]).squeeze(-1)
    return (picked * picked.exp()).mean() - 0.1 * (log_probs * log_probs.exp()).sum(-1).mean()


def per_token(logits: Any, target: Any) -> Any:
    return F.cross_entropy(logits, target, reduction="none")


class Net(nn.Module):
    """An embedding, a layer, and a head whose loss is chunked or not; without a loss it returns logits."""

    def __init__(self, loss: Loss | None, chunked: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.layer = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        self.double()
        self.loss, self.chunked = loss, chunked

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        hidden = self.layer(self.embedding(tokens)).flatten(0, 1)
        logits = self.head(st.chunk(hidden, rows=8) if self.chunked else hidden)  # type: ignore[arg-type]
        return logits if self.loss is None else self.loss(logits, target.flatten())  # type: ignore[no-any-return]

    def static(self) -> None:
        self.head.weight = st.static(self.head.weight)  # type: ignore[assignment]

    def packed(self) -> None:
        st.TensorList(list(self.parameters())).pack()


def batches() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    found = [(torch.randint(0, CLASSES, (2, n)), torch.randint(0, CLASSES, (2, n))) for n in SIZES]
    for _, target in found:
        target[0, 0] = -100
    return found


@pytest.mark.parametrize("loss", [cross_entropy, policy, per_token])
@pytest.mark.parametrize("weights", [None, Net.static, Net.packed])
@pytest.mark.parametrize("graphs", [True, False])
def test_a_bucketed_program_replays_with_gradients(
    monkeypatch: pytest.MonkeyPatch, loss: Loss, weights: Callable[[Net], None] | None, graphs: bool
) -> None:
    if graphs:
        pretend(monkeypatch, trained=True)
    net, plain = Net(loss), Net(loss, chunked=False)
    if weights is not None:
        weights(net)
    run = st.bucketed(net, {"tokens": {1: SEQ}, "target": {1: SEQ}})
    for tokens, target in batches():
        net.zero_grad()
        plain.zero_grad()
        out, expected = run(tokens, target), plain(tokens, target)
        torch.testing.assert_close(out, expected)
        out.square().sum().backward()
        expected.square().sum().backward()
        assert_same_gradients(net, plain)
    stats = run.stats()
    assert (stats.hits, stats.captures, stats.fallbacks) == (len(SIZES) - 2, 2 * graphs, {})


@pytest.mark.parametrize("loss", [cross_entropy, policy])
def test_a_whole_step_is_one_graph(monkeypatch: pytest.MonkeyPatch, loss: Loss) -> None:
    pretend(monkeypatch, trained=True)
    net, plain = Net(loss), Net(loss, chunked=False)

    def step_of(net: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
        optimizer = st.optim.AdamW(net.parameters(), lr=0.01)

        def step(tokens: Tensor, target: Tensor) -> Tensor:
            out = net(tokens, target)
            out.backward()
            optimizer.step()
            optimizer.zero_grad()
            return out.detach()  # type: ignore[no-any-return]

        return step

    run, expected = st.bucketed(step_of(net), {"tokens": {1: SEQ}, "target": {1: SEQ}}), step_of(plain)
    for tokens, target in batches():
        torch.testing.assert_close(run(tokens, target), expected(tokens, target))
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q)
    assert (run.stats().captures, run.stats().fallbacks) == (2, {})


def sharded(folder: Path) -> bool:
    """Compare the gradients of a sharded model, whose ranks have other lengths, with those of the mean of both."""
    data = batches()[1:3]
    for loss in (cross_entropy, None):
        for own_head in (True, False):
            plain, net = Net(loss, chunked=False), Net(loss)
            mesh = init_device_mesh("cpu", (2,))
            fully_shard(net.layer, mesh=mesh)
            if own_head:
                fully_shard(net.head, mesh=mesh, reshard_after_forward=False)
            fully_shard(net, mesh=mesh)
            losses = [_loss(plain(*pair), pair[1]) for pair in data]
            torch.stack(losses).mean().backward()
            padded = [st.pad(x, {1: SEQ}) for x in data[dist.get_rank()]]
            _loss(net(*padded), padded[1]).backward()
            for p, q in zip(net.parameters(), plain.parameters(), strict=True):
                assert p.grad is not None
                assert q.grad is not None
                torch.testing.assert_close(p.grad.full_tensor(), q.grad)  # type: ignore[attr-defined]
    return True


def _loss(out: Any, target: Any) -> Tensor:
    return F.cross_entropy(out, target.flatten()) if out.ndim else out  # type: ignore[no-any-return]


def test_a_sharded_head_gets_its_gradient(tmp_path: Path) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    assert on_two_ranks(sharded, tmp_path) == [True, True]
