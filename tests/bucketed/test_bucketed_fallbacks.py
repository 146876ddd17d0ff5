"""Programs that run without a graph compute what the program computes, and warn once per reason."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from bucketed_rows import DIMS, SEQ, rows
from pretend_graphs import PretendPool, pretend
from torch import Tensor, nn

import subtensors as st
from subtensors.bucketed import side_effects


@pytest.fixture
def pools(device: str, monkeypatch: pytest.MonkeyPatch) -> list[PretendPool]:
    """Where a CPU pretends to capture; none on a GPU, which does."""
    return pretend(monkeypatch) if device == "cpu" else []


def asks_the_device(x: Tensor) -> Tensor:
    return x.softmax(0) * float(x.sum().item() > 0)


def goes_to_the_cpu(x: Tensor) -> Tensor:
    return x.softmax(0) * x.sum(0).cpu().abs().to(x.device)


def chooses_by_values(x: Tensor) -> Tensor:
    return x.softmax(0) if bool(x.sum() > 0) else x.softmax(0).neg()


@pytest.mark.parametrize("program", [asks_the_device, goes_to_the_cpu, chooses_by_values])
@torch.no_grad()
def test_a_program_that_cannot_be_captured_falls_back_and_warns_once(
    device: str, program: Callable[[Tensor], Tensor], pools: list[PretendPool], caplog: pytest.LogCaptureFixture
) -> None:
    def called(x: Tensor) -> Tensor:
        if any(p.is_capturing for p in pools):
            raise RuntimeError("operation not permitted when stream is capturing")
        return program(x)

    run = st.bucketed(called, DIMS)
    with caplog.at_level(logging.WARNING, "subtensors.bucketed"):
        for n in (5, 6, 20, 7, 21, 12, 5):
            x = rows(n, device)
            torch.testing.assert_close(run(x), program(x))
    stats = run.stats()
    assert stats.captures == stats.hits == 0
    assert sum(stats.fallbacks.values()) == stats.calls == 7
    assert [sum(said.endswith(reason) for said in caplog.messages) for reason in stats.fallbacks] == [1]
    # What was captured before and after is right.
    other = st.bucketed(lambda x: x.softmax(0), DIMS)
    for n in (5, 6):
        x = rows(n, device)
        torch.testing.assert_close(other(x), x.softmax(0))
    assert other.stats().hits == 1


def transforms(x: Tensor) -> dict[str, Callable[[Callable[[Tensor], Tensor]], Any]]:
    return {
        "grad": lambda f: torch.func.grad(lambda x: f(x).square().sum())(x),
        "vmap": lambda f: torch.vmap(f)(torch.stack([x, x * 2])),
        "jvp": lambda f: torch.func.jvp(f, (x,), (x,)),
        "jacrev": lambda f: torch.func.jacrev(f)(x),
        "forward mode": lambda f: torch.autograd.functional.jvp(f, x, x, strict=True),
    }


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("name", ["grad", "vmap", "jvp", "jacrev", "forward mode"])
def test_transforms_see_the_program_itself(device: str, name: str, trained: bool) -> None:
    net = nn.Linear(3, 3, device=device, dtype=torch.float64).requires_grad_(trained)
    # A bucket's first call has a graph that can be differentiated twice where it isn't compared.
    run = st.bucketed(net, {"input": {0: SEQ}}, check=False)
    for _ in range(2):
        run(rows(5, device))
    transform = transforms(rows(5, device))[name]
    torch.testing.assert_close(transform(run), transform(net))
    with torch.autograd.forward_ad.dual_level():
        x = torch.autograd.forward_ad.make_dual(rows(5, device), rows(5, device))
        found, expected = (torch.autograd.forward_ad.unpack_dual(f(x)).tangent for f in (run, net))
        torch.testing.assert_close(found, expected)
    assert any("inside a transform of torch.func" in reason for reason in run.stats().fallbacks)


@torch.no_grad()
def test_compiled_code_has_a_graph_break_at_a_call(device: str) -> None:
    net = nn.Linear(3, 3, device=device, dtype=torch.float64)
    run = st.bucketed(net, {"input": {0: SEQ}})
    compiled = torch.compile(lambda x: run(x * 2) + 1, backend="eager")
    for n in (5, 6, 20, 7):
        x = rows(n, device)
        torch.testing.assert_close(compiled(x), net(x * 2) + 1)
    assert run.stats().hits == 2
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"st\.bucketed replays graphs of its own"):
        torch.compile(run, backend="eager", fullgraph=True)(rows(5, device))


class Written(nn.Module):
    """Writes to its buffers and draws random numbers, and then has no way for padded tensors."""

    def __init__(self, cause: str) -> None:
        super().__init__()
        self.cause = cause
        self.register_buffer("seen", torch.zeros(3, dtype=torch.float64))
        self.norm = nn.BatchNorm1d(3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x) * torch.rand((), dtype=torch.float64, device=x.device)
        self.seen += 1
        if isinstance(x, st.PaddedTensor) and self.cause == "padded":
            raise ValueError("there is no rule for this")
        if x.shape[0] > 16 and self.cause == "itself":
            raise ValueError("too many rows")
        return y * self.seen


@pytest.mark.parametrize("follows", [False, True])
@pytest.mark.parametrize("cause", ["padded", "itself"])
def test_a_run_that_raises_is_rolled_back_before_the_fallback_runs(cause: str, follows: bool, device: str) -> None:
    ours, theirs = (Written(cause).to(device) for _ in range(2))
    run = st.bucketed(ours, {"x": {0: SEQ}})
    with torch.set_grad_enabled(follows):
        for i, n in enumerate((5, 6, 20, 7) if cause == "padded" else (20, 17, 20)):
            x = rows(n, device)
            outcomes = []
            for program in (run, theirs):
                torch.manual_seed(i)
                if cause == "padded":
                    outcomes.append(program(x))
                else:
                    with pytest.raises(ValueError, match="too many rows"):
                        program(x)
                outcomes.append(torch.rand(2, device=device))
            torch.testing.assert_close(outcomes[: len(outcomes) // 2], outcomes[len(outcomes) // 2 :])
            torch.testing.assert_close(dict(ours.named_buffers()), dict(theirs.named_buffers()))
    if cause == "padded":
        assert run.stats().fallbacks == {"ValueError: there is no rule for this": 4}


@torch.no_grad()
def test_the_largest_buffers_are_not_copied_for_a_rollback(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = Written("padded").to(device)
    ours.register_buffer("cache", torch.zeros(100, device=device))
    nbytes = sum(buffer.nbytes for buffer in ours.buffers())
    for room, times in ((nbytes, 1), (nbytes - 1, 1), (0, 2)):
        monkeypatch.setattr(side_effects, "ROLLBACK_BYTES", room)
        before = ours.seen.clone(), ours.norm.num_batches_tracked.clone()
        st.bucketed(ours, {"x": {0: SEQ}}, check=False)(rows(5, device))
        assert (ours.seen - before[0]).tolist() == [times] * 3
        assert ours.norm.num_batches_tracked - before[1] == times


def scaled(x: Tensor, scale: float) -> Tensor:
    if x.shape[0] > 9:
        raise ValueError("too long")
    return (x @ torch.eye(3, dtype=torch.float64, device=x.device)).sum(0) * scale


WRONG: dict[str, tuple[Callable[[str], tuple[Any, ...]], dict[str, Any]]] = {
    "a missing argument": (lambda device: (rows(5, device),), {}),
    "an unknown argument": (lambda device: (rows(5, device), 1.0), {"other": 1}),
    "a wrong dtype": (lambda device: (rows(5, device).float(), 1.0), {}),
    "a wrong shape": (lambda device: (rows(5, device)[:, :2], 1.0), {}),
    "an error of the program": (lambda device: (rows(12, device), 1.0), {}),
}


@pytest.mark.parametrize("check", ["first", False])
@pytest.mark.parametrize("name", WRONG)
def test_an_error_of_the_callers_is_raised_as_it_is(
    name: str, check: Any, device: str, pools: list[PretendPool], caplog: pytest.LogCaptureFixture
) -> None:
    make, named = WRONG[name]
    arguments = make(device)
    run = st.bucketed(scaled, DIMS, check=check)
    with pytest.raises(Exception) as expected:  # noqa: PT011
        scaled(*arguments, **named)
    with caplog.at_level(logging.DEBUG, "subtensors.bucketed"), pytest.raises(expected.type) as found:
        run(*arguments, **named)
    assert str(found.value) == str(expected.value)
    assert found.value.__context__ is None
    assert not caplog.messages
    assert not run.stats().fallbacks
    # It says nothing of the bucket.
    for _ in range(2):
        x = rows(6, device)
        torch.testing.assert_close(run(x, 2.0), scaled(x, 2.0))
    assert run.stats().hits == 1


def test_a_program_that_raises_at_the_true_size_alone_raises(device: str) -> None:
    def program(x: Tensor) -> Tensor:
        if not isinstance(x, st.PaddedTensor):
            raise ValueError("as it is")
        return x.sum(0)

    with pytest.raises(ValueError, match="as it is"):
        st.bucketed(program, DIMS)(rows(5, device))


@torch.no_grad()
def test_an_argument_that_varies_like_a_dim_and_is_not_named_is_noted_once(
    device: str, caplog: pytest.LogCaptureFixture
) -> None:
    dims = {"x": {0: SEQ, 1: st.Dim("width", max=4, buckets=[1, 2, 4])}}
    run = st.bucketed(lambda x, mask, table: x.softmax(0).sum() + mask.sum() + table.sum(), dims)
    with caplog.at_level(logging.WARNING, "subtensors.bucketed"):
        for n, width in ((5, 1), (6, 2), (7, 2), (7, 1), (7, 4)):
            run(torch.ones(n, width, device=device), torch.ones(2, n, device=device), torch.ones(3, 7, device=device))
    (message,) = caplog.messages
    assert "each size of mask gets a graph of its own, since it has the size of " in message
    assert message.endswith(f"{{'mask': {{1: {SEQ.name}}}}}")
    assert list(run.stats().notes.values()) == [2]
    assert "  each size of mask gets a graph of its own" in str(run.stats())
    assert "(2 times)" in str(run.stats())


@torch.no_grad()
def test_a_name_that_no_call_gives_to_a_program_of_any_names_is_noted_once(
    device: str, caplog: pytest.LogCaptureFixture
) -> None:
    def program(x: Tensor, **others: Tensor) -> Tensor:
        return x.sum(0) + sum(t.sum(0) for t in others.values())

    run = st.bucketed(program, {"x": {0: SEQ}, "maks": {0: SEQ}})
    with caplog.at_level(logging.WARNING, "subtensors.bucketed"):
        for n in (5, 12):
            run(rows(n, device), mask=torch.ones(3, device=device))
    (message,) = caplog.messages
    assert message.endswith("dims name an argument 'maks', which is not given: the call has x, mask")
    assert list(run.stats().notes.values()) == [2]
    run = st.bucketed(program, {"x": {0: SEQ}, "mask": {0: SEQ}})
    run(rows(5, device), mask=rows(5, device))
    assert not run.stats().notes


@torch.no_grad()
def test_a_named_argument_that_fills_its_bucket_is_not_noted(device: str) -> None:
    rows_dim = st.Dim("rows", max=4, buckets=[1, 2, 4])
    run = st.bucketed(lambda x, y: (x * y[:, None]).sum(), {"x": {0: rows_dim, 1: SEQ}, "y": {0: rows_dim}})
    for n in (1, 2, 3, 2, 4, 1):
        run(torch.ones(n, 5, device=device), torch.ones(n, device=device))
    assert not run.stats().notes


@torch.no_grad()
def test_statistics_count_what_was_recaptured(device: str) -> None:
    net = nn.Linear(3, 3, device=device, dtype=torch.float64)
    run = st.bucketed(net, {"input": {0: SEQ}})
    for _ in range(3):
        run(rows(5, device))
        net.weight = nn.Parameter(net.weight.detach().clone())
    run(rows(5, device))
    assert run.stats().notes == {"recaptured: weight was replaced: its address changed": 3}


def test_dims_of_an_object_whose_tensors_are_not_seen_are_refused(device: str) -> None:
    class Batch:
        def __init__(self, x: Tensor) -> None:
            self.x = x

    run = st.bucketed(lambda batch: batch.x.softmax(0), {"batch": {0: SEQ}})
    with pytest.raises(TypeError, match="dims name batch, a Batch whose tensors are not seen: make it a dataclass"):
        run(Batch(rows(5, device)))


NEEDS_SIX: dict[str, Callable[[Tensor], Tensor]] = {
    "a convolution": lambda x: nn.functional.conv1d(x.mT[None], torch.ones(2, 3, 6, dtype=x.dtype, device=x.device)),
    "windows": lambda x: x.unfold(0, 6, 1),
    "a pooling": lambda x: nn.functional.max_pool1d(x.mT, 6, 1),
    "topk": lambda x: x.topk(6, 0).values,
    "a position": lambda x: x[5] * 2,
    "a border": lambda x: nn.functional.pad(x.mT, (5, 0), mode="reflect"),
    "a maximum of few": lambda x: x[5:].amax(0),
}


def check_as_the_program(run: Callable[[Tensor], Tensor], program: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Check that the runner gives what the program gives, for six rows and more; for fewer its error."""
    if len(x) >= 6:
        torch.testing.assert_close(run(x), program(x))
        return
    with pytest.raises((IndexError, RuntimeError)) as plain:
        program(x)
    with pytest.raises(plain.type, match=re.escape(str(plain.value))):
        run(x)


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("name", NEEDS_SIX)
def test_a_size_that_is_too_small_for_a_call_gives_the_programs_own_error(
    device: str, name: str, trained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cpu":
        pretend(monkeypatch, trained=trained)
    program = NEEDS_SIX[name]
    run = st.bucketed(program, DIMS, check=False)
    for n in (8, 7, 5, 6, 4, 8, 5):
        x = rows(n, device).double().requires_grad_(trained)
        check_as_the_program(run, program, x)
    assert run.stats().captures == 1
    assert run.stats().hits == 3


def test_a_first_call_that_is_too_small_leaves_the_bucket_to_others(device: str, pools: list[PretendPool]) -> None:
    run = st.bucketed(NEEDS_SIX["a convolution"], DIMS)
    for n in (5, 5, 8, 7, 6, 5):
        with torch.no_grad(), nullcontext() if n > 5 else pytest.raises(RuntimeError, match="Kernel size"):
            run(rows(n, device).double())
    assert run.stats().hits == 2


@pytest.mark.parametrize("name", NEEDS_SIX)
@torch.no_grad()
def test_compiled_code_of_a_larger_bucket_gives_the_programs_own_error(device: str, name: str) -> None:
    program = NEEDS_SIX[name]
    run = st.bucketed(program, DIMS, check=False, compile={"backend": "aot_eager"})
    for n in (16, 8, 5):
        x = rows(n, device)
        check_as_the_program(run, program, x)
