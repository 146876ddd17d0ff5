"""Gradients through a bucketed program that is compiled: one compilation, and the gradients of the program."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from bucketed_rows import assert_same_gradients
from small_models import TiedEmbedding
from torch import Tensor, nn

import subtensors as st
from demo.model import Block, Size

SEQ = st.Dim("seq", max=64, buckets=8)
pytestmark = [pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def options(device: str) -> dict[str, Any]:
    """Inductor where it has a GPU; elsewhere the graphs run as they are, for a C++ compiler takes its time."""
    return {} if device == "cuda" else {"backend": "aot_eager"}


class Net(nn.Module):
    """Positions meet; the embedding is the head as well."""

    def __init__(self, device: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.unused = nn.Linear(2, 2)
        self.to(device, torch.float64)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.layer(self.embed(ids)) @ self.embed.weight.T
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


DIMS = {"ids": {1: SEQ}, "labels": {1: SEQ}}


def batch(n: int, device: str) -> tuple[Tensor, Tensor]:
    return torch.randint(0, 11, (2, n), device=device), torch.randint(0, 11, (2, n), device=device)


def codes(run: Any) -> list[bool]:
    """For each compilation of a runner: does it serve every size?"""
    kept = {id(b.code): b.code for b in run.graph_cache.buckets.values() if b.is_compiled}
    return [code.shared_trace is not None for code in kept.values()]


def test_one_compilation_of_each_half_serves_every_bucket(device: str, options: dict[str, Any]) -> None:
    net, alone = Net(device), Net(device)
    run = st.bucketed(net, DIMS, compile=options or True)
    for n in (3, 5, 8, 9, 30, 64, 33, 12):
        ids, labels = batch(n, device)
        for model in (run, alone):
            model(ids, labels).backward()
        assert_same_gradients(net, alone, rtol=1e-8, atol=1e-10)
    stats = run.stats()
    assert [b.sizes["seq"] for b in stats.buckets] == [64, 40, 32, 16, 8]
    assert stats.hits == 3
    assert stats.recompiles == 0
    assert not stats.fallbacks
    assert codes(run) == [True]


def test_the_backward_runs_no_product_of_the_forward_again(device: str) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def kept(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    block = Block(Size(2, 16, 2, 64)).to(device)
    run = st.bucketed(block, {"x": {1: SEQ}}, compile={"backend": kept})
    for n in (5, 6):
        run(torch.randn(2, n, 16, device=device)).sum().backward()
    products = [sum("mm" in str(node.target) for node in graph.graph.nodes) for graph in graphs]
    # Of each of the four linear layers a product in the forward, and one for its input and its weight.
    assert products == [4, 8]


@torch.library.custom_op("subtensors_tests::same", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def same(x: Tensor) -> Tensor:
    """A copy, by an op that is said to be random, as backwards of attention are."""
    return x.clone()


same.register_fake(torch.empty_like)


class RandomBackward(torch.autograd.Function):
    """The identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return same(gradients[0])


def test_a_backward_with_random_ops_gets_the_incoming_gradient(device: str, options: dict[str, Any]) -> None:
    layer = nn.Linear(4, 1, device=device)

    def program(x: Tensor) -> Tensor:
        return RandomBackward.apply(layer(x).sum()) * 2  # type: ignore[no-untyped-call,no-any-return]

    run = st.bucketed(program, {"x": {0: SEQ}}, compile=options or True)
    for n in (5, 6):
        x = torch.randn(n, 4, device=device)
        seven = torch.tensor(7.0, device=device)
        found, expected = (torch.autograd.grad(f(x), layer.weight, seven) for f in (run, program))
        torch.testing.assert_close(found, expected)
    assert codes(run) == [True]


def test_cut_results_and_inputs_get_their_gradients(device: str, options: dict[str, Any]) -> None:
    net = TiedEmbedding(device).inner
    run = st.bucketed(
        lambda x: (net(x).softmax(1), {"sum": x.sum(1), "size": 7}), {"x": {1: SEQ}}, compile=options or True
    )
    for n in (5, 6, 20, 3, 17):
        x = torch.randn(2, n, 6, dtype=torch.float64, device=device, requires_grad=True)
        cotangents = [torch.randn(2, n, 6, device=device).double(), torch.randn(2, 6, device=device).double()]
        out, more = run(x)
        assert more["size"] == 7
        wrt = [x, *net.parameters()]
        found = torch.autograd.grad([out, more["sum"]], wrt, cotangents)
        expected = torch.autograd.grad([net(x).softmax(1), x.sum(1)], wrt, cotangents)
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)
    assert codes(run) == [True]


def test_dropped_elements_are_the_same_in_forward_and_backward(device: str, options: dict[str, Any]) -> None:
    run = st.bucketed(lambda x: F.dropout(x, 0.5), {"x": {0: SEQ}}, compile=options or True)
    for n in (20, 20, 19):
        x, y = (torch.ones(n, device=device, requires_grad=True) for _ in range(2))
        a, b = run(x), run(y)
        (a.sum() + b.sum()).backward()
        assert torch.equal(x.grad, a.detach())  # type: ignore[arg-type]
        assert torch.equal(y.grad, b.detach())  # type: ignore[arg-type]
        assert not torch.equal(a, b)
    assert codes(run) == [True]


def test_autocast_around_the_call_is_compiled_in(device: str, options: dict[str, Any]) -> None:
    net, alone = TiedEmbedding(device).float(), TiedEmbedding(device).float()
    run = st.bucketed(net, DIMS, compile=options or True)
    for n in (5, 6, 20, 18):
        ids, labels = batch(n, device)
        for model in (run, alone):
            with torch.autocast(device, torch.bfloat16):
                loss = model(ids, labels)
            loss.backward()
    for p, q in zip(net.parameters(), alone.parameters(), strict=True):
        if q.grad is not None:
            assert (p.grad - q.grad).norm() <= 0.05 * q.grad.norm()  # type: ignore[operator,union-attr]
    assert run.stats().hits == 2
    assert codes(run) == [True]


def test_a_program_that_writes_to_its_buffers_runs_uncompiled(
    device: str, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    net, alone = (nn.BatchNorm1d(3, device=device, dtype=torch.float64) for _ in range(2))
    run = st.bucketed(net, {"input": {0: SEQ}}, compile=options or True)
    with caplog.at_level(logging.WARNING, "subtensors.bucketed"):
        for n in (5, 9, 6, 30, 7):
            x = torch.randn(n, 3, dtype=torch.float64, device=device)
            (run(x) ** 2).sum().backward()
            (alone(x) ** 2).sum().backward()
            torch.testing.assert_close(net.running_mean, alone.running_mean)
            assert net.num_batches_tracked == alone.num_batches_tracked
            assert_same_gradients(net, alone, rtol=1e-8, atol=1e-10)
    assert "runs uncompiled" in caplog.text
    assert run.stats().hits == 2


def test_a_parameter_that_is_read_from_a_list_gets_its_gradient(device: str, options: dict[str, Any]) -> None:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first = nn.Linear(4, 4, device=device, dtype=torch.float64)
            self.flat = [self.first.weight]

        def forward(self, x: Tensor) -> Tensor:
            return self.first(x @ self.flat[0]).softmax(0)

    net, alone = Listed(), Listed()
    run = st.bucketed(net, {"x": {0: SEQ}}, compile=options or True)
    for n in (5, 7, 20):
        x, cotangent = (torch.randn(n, 4, device=device, dtype=torch.float64) for _ in range(2))
        for model in (run, alone):
            model(x).backward(cotangent)
        assert_same_gradients(net, alone, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("make", [pytest.param("torch", marks=pytest.mark.slow), "subtensors"])
def test_a_whole_step_runs_the_compiled_code_of_a_loss_that_is_bucketed_too(
    device: str, options: dict[str, Any], make: str
) -> None:
    net, alone = TiedEmbedding(device), TiedEmbedding(device)

    def step_of(loss_of: Any, model: nn.Module) -> Any:
        opt = (torch.optim.SGD if make == "torch" else st.optim.SGD)(model.parameters(), lr=0.1, momentum=0.9)

        def step(ids: Tensor, labels: Tensor) -> Tensor:
            loss = loss_of(ids, labels)
            loss.backward()
            opt.step()
            opt.zero_grad()
            return loss.detach()  # type: ignore[no-any-return]

        return step

    loss_of = st.bucketed(net, DIMS, compile=options or True)
    run, plain = st.bucketed(step_of(loss_of, net), DIMS), step_of(alone, alone)
    for n in (5, 6, 20, 5, 17, 8):
        ids, labels = batch(n, device)
        torch.testing.assert_close(run(ids, labels), plain(ids, labels))
        # The first call compiles: in a capture it would be too late.
        assert loss_of.graph_cache.compile_cache.by_family  # type: ignore[attr-defined]
    for p, q in zip(net.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-8, atol=1e-10)
    assert run.stats().hits == 4
    (code,) = {b.code for b in loss_of.graph_cache.buckets.values()}  # type: ignore[attr-defined]
    assert code.shared_trace is not None
    assert loss_of.stats().recompiles == 0
    assert not loss_of.captured_buckets()
