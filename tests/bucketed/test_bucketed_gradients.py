"""Gradients through a bucketed program equal the program's, and belong to the caller."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from bucketed_rows import SEQ, assert_same_gradients
from reordered_sums import orders
from small_models import TiedEmbedding
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import subtensors as st

pytestmark = pytest.mark.usefixtures("captured")


DIMS = {"ids": {1: SEQ}, "labels": {1: SEQ}}


def tokens(n: int, device: str) -> Tensor:
    return torch.randint(0, 11, (2, n), device=device)


def gradients(net: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in net.parameters()]


def check(actual: list[Any], expected: list[Any]) -> None:
    for a, e in zip(actual, expected, strict=True):
        if e is None:
            assert a is None
        else:
            torch.testing.assert_close(a, e, rtol=1e-9, atol=1e-12)


def test_gradients_accumulate_over_calls_of_any_size(device: str) -> None:
    net, alone = TiedEmbedding(device), TiedEmbedding(device)
    run = st.bucketed(net, DIMS)
    for n in (5, 3, 8, 20, 7, 32, 20):
        ids, labels = tokens(n, device), tokens(n, device)
        loss, wanted = run(ids, labels), alone(ids, labels)
        torch.testing.assert_close(loss, wanted)
        loss.backward()
        wanted.backward()
        assert_same_gradients(net, alone)
    stats = run.stats()
    assert stats.hits == 4
    assert not stats.fallbacks
    assert all(b.replayed_again == 0 for b in stats.buckets)


def test_gradients_that_existed_at_capture_may_be_dropped(device: str) -> None:
    net, alone = TiedEmbedding(device), TiedEmbedding(device)
    run = st.bucketed(net, DIMS)
    for i, n in enumerate((5, 12, 6, 20, 13, 5, 30, 21)):
        ids, labels = tokens(n, device), tokens(n, device)
        run(ids, labels).backward()
        alone(ids, labels).backward()
        assert_same_gradients(net, alone)
        if i % 3 == 2:
            net.zero_grad()
            alone.zero_grad()
    assert (run.stats().hits, run.stats().fallbacks) == (4, {})


def test_gradients_of_cut_results_and_of_inputs(device: str) -> None:
    net = TiedEmbedding(device)
    run = st.bucketed(lambda x: (net.inner(x).softmax(1), {"sum": x.sum(1), "size": 7}), {"x": {1: SEQ}})
    for n in (3, 6, 10, 2, 9):
        x = torch.randn(2, n, 6, dtype=torch.float64, device=device, requires_grad=True)
        cotangents = [torch.randn(2, n, 6, device=device).double(), torch.randn(2, 6, device=device).double()]
        out, more = run(x)
        assert out.shape == (2, n, 6)
        assert more["size"] == 7
        wrt = [x, *net.inner.parameters()]
        found = torch.autograd.grad([out, more["sum"]], wrt, cotangents)
        check(list(found), list(torch.autograd.grad([net.inner(x).softmax(1), x.sum(1)], wrt, cotangents)))
    assert run.stats().hits == 3


def test_gradients_of_flattened_results(device: str) -> None:
    net = TiedEmbedding(device)

    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = net.inner(x).softmax(1)
        return hidden.flatten(0, 1), hidden.transpose(0, 1).reshape(-1, 3)

    run = st.bucketed(program, {"x": {1: SEQ}})
    for n in (3, 6, 10, 2, 9):
        x = torch.randn(2, n, 6, dtype=torch.float64, device=device, requires_grad=True)
        wrt = [x, *net.inner.parameters()]
        found, expected = run(x), program(x)
        check(list(found), list(expected))
        cotangents = [torch.randn_like(t.T).T for t in expected]
        check(*[list(torch.autograd.grad(out, wrt, cotangents)) for out in (found, expected)])
    assert (run.stats().hits, run.stats().fallbacks) == (3, {})


def test_results_may_be_written_to(device: str) -> None:
    net, alone = TiedEmbedding(device), TiedEmbedding(device)
    run = st.bucketed(net, DIMS)
    for n in (5, 6, 20, 7):
        ids = tokens(n, device)
        for model in (run, alone):
            model(ids).mul_(2).add_(1).square().sum().backward()
        assert_same_gradients(net, alone)


def test_two_calls_in_one_loss(device: str, request: pytest.FixtureRequest) -> None:
    net, alone = TiedEmbedding(device), TiedEmbedding(device)
    run = st.bucketed(net, DIMS)
    for n, m in ((3, 9), (4, 5), (10, 2), (16, 15)):
        batches = [(tokens(k, device), tokens(k, device)) for k in (n, m)]
        for model in (run, alone):
            loss = sum(model(*batch) for batch in batches)
            loss.backward()  # type: ignore[union-attr]
        assert_same_gradients(net, alone)
    has_graphs = device == "cuda" or request.node.callspec.params["captured"] == "captured"
    assert (sum(b.replayed_again for b in run.stats().buckets) > 0) == has_graphs


def test_a_graph_that_is_kept_gives_the_same_gradients_twice(device: str) -> None:
    net = TiedEmbedding(device)
    run = st.bucketed(net, DIMS)
    batch = tokens(5, device), tokens(5, device)
    run(*batch)
    loss = run(*batch)
    wrt = [*net.embed.parameters(), *net.inner.parameters()]
    first = torch.autograd.grad(loss, wrt, retain_graph=True)
    run(tokens(20, device), tokens(20, device))
    check(list(torch.autograd.grad(loss, wrt)), list(first))


def test_gradients_are_not_overwritten_by_the_next_bucket(device: str) -> None:
    net = TiedEmbedding(device)
    run = st.bucketed(net, DIMS)
    for n in (5, 20):
        run(tokens(n, device), tokens(n, device)).backward()
    net.zero_grad()
    run(tokens(5, device), tokens(5, device)).backward()
    kept, held = gradients(net), [p.grad for p in net.parameters()]
    net.zero_grad()
    run(tokens(20, device), tokens(20, device)).backward()
    check(held, kept)


def test_dropped_elements_are_the_same_in_forward_and_backward(device: str) -> None:
    run = st.bucketed(lambda x: F.dropout(x, 0.5), {"x": {0: SEQ}})
    for n in (20, 20, 19):
        x, y = (torch.ones(n, device=device, requires_grad=True) for _ in range(2))
        a, b = run(x), run(y)
        (a.sum() + b.sum()).backward()
        assert torch.equal(x.grad, a.detach())  # type: ignore[arg-type]
        assert torch.equal(y.grad, b.detach())  # type: ignore[arg-type]
        assert not torch.equal(a, b)
    assert run.stats().hits == 5


def test_buffers_are_written_once_a_call(device: str) -> None:
    net, alone = (nn.BatchNorm1d(3, device=device, dtype=torch.float64) for _ in range(2))
    run = st.bucketed(net, {"input": {0: SEQ}})
    for n in (5, 9, 6, 30, 7):
        x = torch.randn(n, 3, dtype=torch.float64, device=device)
        (run(x) ** 2).sum().backward()
        (alone(x) ** 2).sum().backward()
        torch.testing.assert_close(net.running_mean, alone.running_mean)
        assert net.num_batches_tracked == alone.num_batches_tracked
        assert_same_gradients(net, alone)


@pytest.mark.parametrize("writes", [False, True])
def test_a_backward_reads_buffers_as_its_forward_left_them(device: str, writes: bool) -> None:
    class Buffered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, dtype=torch.float64, device=device))
            self.register_buffer("seen", torch.ones(3, dtype=torch.float64, device=device))

        def forward(self, x: Tensor) -> Tensor:
            if writes:
                self.seen.add_(x.detach().mean(0))
            return (x * self.seen * self.weight).softmax(0)

    net, alone = Buffered(), Buffered()
    run = st.bucketed(net, {"x": {0: SEQ}})
    for n in (5, 9, 6, 30, 7):
        x, cotangent = (torch.randn(n, 3, dtype=torch.float64, device=device) for _ in range(2))
        for model in (run, alone):
            model(x).backward(cotangent)
        assert_same_gradients(net, alone)
        torch.testing.assert_close(net.seen, alone.seen)
    assert run.stats().hits == 2


def test_a_forward_that_is_replayed_again_reads_buffers_as_they_were(device: str) -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3, dtype=torch.float64, device=device)
            self.register_buffer("mean", torch.zeros(3, dtype=torch.float64, device=device))

        def forward(self, x: Tensor) -> Tensor:
            if x.shape[0] > 8:  # a size alone
                self.mean.lerp_(x.mean(0), 0.5)
            return (self.inner(x) - self.mean.clone()).exp()

    net, alone = Centred(), Centred()
    alone.load_state_dict(net.state_dict())
    run = st.bucketed(net, {"x": {0: SEQ}}, check=False)
    for sizes in ((5,), (30, 12), (20, 6, 31), (9, 7)):
        batches = [torch.randn(n, 3, dtype=torch.float64, device=device) for n in sizes]
        for model in (run, alone):
            sum(model(x).square().sum() for x in batches).backward()  # type: ignore[union-attr]  # no sum of none
        assert_same_gradients(net, alone)
        torch.testing.assert_close(net.mean, alone.mean)


def test_results_of_data_dependent_size_have_their_gradients(device: str) -> None:
    net, alone = TiedEmbedding(device), TiedEmbedding(device)
    run = st.bucketed(lambda ids: net(ids)[ids > 4], {"ids": {1: SEQ}})
    for n in (5, 6, 20, 7):
        ids = tokens(n, device)
        found, expected = run(ids), alone(ids)[ids > 4]
        torch.testing.assert_close(found, expected)
        found.square().sum().backward()
        expected.square().sum().backward()
        assert_same_gradients(net, alone)


def test_no_backward_is_captured_without_grad(device: str) -> None:
    net = TiedEmbedding(device)
    run = st.bucketed(net, DIMS)
    ids = tokens(5, device)
    for _ in range(2):
        with torch.no_grad():
            assert not run(ids).requires_grad
        assert run(ids).requires_grad
        with torch.inference_mode():
            assert run(ids).is_inference()


def test_results_that_need_no_gradient_come_of_inputs_that_require_one(device: str) -> None:
    run = st.bucketed(lambda ids: ids.argmax(1), {"ids": {1: SEQ}})
    for n in (5, 3, 4, 4):
        x = torch.randn(2, n, 6, device=device, requires_grad=True)
        assert torch.equal(run(x), x.argmax(1))


@pytest.mark.parametrize("make", ["torch", "subtensors"])
def test_a_training_step_is_one_graph(device: str, make: str) -> None:
    net, alone = TiedEmbedding(device), TiedEmbedding(device)

    def optimizer(model: nn.Module) -> Any:
        return (torch.optim.SGD if make == "torch" else st.optim.SGD)(model.parameters(), lr=0.1, momentum=0.9)

    def step_of(model: nn.Module) -> Any:
        opt = optimizer(model)

        def step(ids: Tensor, labels: Tensor) -> Tensor:
            loss = model(ids, labels)
            loss.backward()
            opt.step()
            opt.zero_grad()
            return loss.detach()  # type: ignore[no-any-return]

        return step

    run, plain = st.bucketed(step_of(net), DIMS), step_of(alone)
    for n in (5, 6, 20, 5, 17, 8):
        batch = tokens(n, device), tokens(n, device)
        torch.testing.assert_close(run(*batch), plain(*batch))
    check(list(net.parameters()), list(alone.parameters()))
    assert run.stats().hits == 4


@pytest.mark.parametrize("autocast", [False, True])
def test_autocast_and_a_loss_scale(device: str, autocast: bool) -> None:
    net, exact = TiedEmbedding(device).float(), TiedEmbedding(device)
    plain = [(TiedEmbedding(device).float(), order) for order in orders()]
    run = st.bucketed(net, DIMS)
    scaler = torch.amp.GradScaler(device, init_scale=128.0)
    for n in (5, 20, 6, 17, 8):
        batch = tokens(n, device), tokens(n, device)
        for model, order in [(run, nullcontext()), *plain]:
            with order:
                with torch.autocast(device, torch.bfloat16, enabled=autocast):
                    loss = model(*batch)
                scaler.scale(loss).backward()
        (128 * exact(*batch)).backward()
        # Masked softmax and mean are several ops where torch's are one: a rounding of the gradients more.
        rounding = torch.finfo(torch.float32).eps * norm(exact)
        assert error(net, exact) <= 1.5 * max(error(model, exact) for model, _ in plain) + rounding
    stats = run.stats()
    assert stats.hits == 3
    assert not stats.fallbacks


def error(net: nn.Module, exact: nn.Module) -> float:
    """How far the gradients of one are from those of the other."""
    pairs = zip(net.parameters(), exact.parameters(), strict=True)
    return sum(float((p.grad - q.grad).square().sum()) for p, q in pairs if q.grad is not None) ** 0.5  # type: ignore[operator]


def norm(net: nn.Module) -> float:
    """Return the Euclidean norm of all gradients."""
    return sum(float(p.grad.square().sum()) for p in net.parameters() if p.grad is not None) ** 0.5


def test_an_earlier_loss_may_be_alive(device: str) -> None:
    """While its graph is, the parameters' nodes belong to the stream that it was made on."""
    net, alone = TiedEmbedding(device), TiedEmbedding(device)
    earlier = net(tokens(4, device), tokens(4, device))
    run = st.bucketed(net, DIMS)
    kept = []
    for n in (5, 6, 20, 7, 18):
        batch = tokens(n, device), tokens(n, device)
        loss, wanted = run(*batch), alone(*batch)
        kept.append(loss.sum())
        loss.backward(retain_graph=True)
        wanted.backward()
        assert_same_gradients(net, alone)
    assert run.stats().hits == 3
    earlier.backward()
    assert not run.stats().fallbacks


def test_a_parameter_written_before_the_backward_is_refused_as_in_torch(device: str) -> None:
    net = TiedEmbedding(device)
    run = st.bucketed(net, DIMS)
    for _ in range(2):
        loss = run(tokens(5, device), tokens(5, device))
    with torch.no_grad():
        net.inner.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_gradients_of_gradients_are_refused_where_there_are_graphs(device: str, request: pytest.FixtureRequest) -> None:
    net = TiedEmbedding(device)
    run = st.bucketed(net, DIMS)
    for _ in range(2):
        loss = run(tokens(5, device), tokens(5, device))
    has_graphs = device == "cuda" or request.node.callspec.params["captured"] == "captured"
    refused = pytest.raises(RuntimeError, match="create_graph=True") if has_graphs else nullcontext()
    with refused:
        torch.autograd.grad(loss, [net.inner.weight], create_graph=True)


@pytest.mark.gpu
def test_a_call_in_a_graph_that_the_caller_captures_is_a_part_of_it() -> None:
    net = TiedEmbedding("cuda")
    run = st.bucketed(net, DIMS)
    ids = tokens(5, "cuda")
    with torch.no_grad():
        expected = run(ids)
        mine = torch.cuda.CUDAGraph()
        with torch.cuda.graph(mine):
            out = run(ids)
        mine.replay()
        torch.testing.assert_close(out, expected)
    assert "part of a graph that is being captured" in next(iter(run.stats().fallbacks))


def test_a_call_does_not_change_its_arguments(device: str) -> None:
    run = st.bucketed(TiedEmbedding(device).inner, {"input": {1: SEQ}})
    for n in (5, 6, 20):
        x = torch.randn(2, n, 6, dtype=torch.float64, device=device, requires_grad=True)
        before = x.sin()  # which keeps it for its backward
        (run(x).sum() + before.sum()).backward()
        assert x._version == 0


def test_a_call_in_a_checkpoint_is_a_replay_if_its_bucket_is_captured(device: str) -> None:
    net, alone = TiedEmbedding(device), TiedEmbedding(device)
    run = st.bucketed(net, DIMS)
    for n in (20, 17):
        ids, labels = tokens(n, device), tokens(n, device)
        for model in (run, alone):
            model(ids, labels).backward()
    for n in (5, 6, 20, 18):
        ids, labels = tokens(n, device), tokens(n, device)
        for model in (run, alone):
            checkpoint(model, ids, labels, use_reentrant=False).backward()
        assert_same_gradients(net, alone)
    stats = run.stats()
    # That a forward is replayed again for a checkpoint is no call's.
    assert (stats.hits, [b.sizes["seq"] for b in stats.buckets]) == (3, [24])
    assert ["checkpoint" in why for why in stats.fallbacks] == [True]


@pytest.mark.parametrize("name", ["transposed", "strided", "expanded"])
def test_the_gradient_of_a_result_that_is_not_contiguous_arrives_at_its_places(name: str, device: str) -> None:
    program = {
        "transposed": lambda x: (x * 2).mT + x.mT,
        "strided": lambda x: (x * 2)[..., ::2],
        "expanded": lambda x: (x * 2).sum(-1, keepdim=True).expand(-1, -1, 4),
    }[name]
    run = st.bucketed(program, {0: {1: SEQ}})
    for n in (5, 6, 7, 5, 20, 18):
        x = torch.randn(2, n, 4, dtype=torch.float64, device=device, requires_grad=True)
        found, expected = (torch.autograd.grad(f(x).pow(3).sum(), x)[0] for f in (run, program))
        torch.testing.assert_close(found, expected)
        for bucket in run.captured_buckets():
            for load in bucket._root_loads.values():  # the kernel, from now on, as soon as it is compiled
                assert load._compiled is None or load._compiled.result()
    assert not run.stats().fallbacks
