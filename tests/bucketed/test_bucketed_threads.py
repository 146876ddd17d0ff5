"""Threads share a runner: each gets its own call's results and gradients."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from bucketed_rows import DIMS, assert_same, rows
from torch import Tensor, nn

import subtensors as st

THREADS, CALLS = 4, 12


def net(device: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).to(device, torch.float64)


@pytest.mark.parametrize("check", ["first", 3, False])
def test_threads_take_gradients_through_one_runner(check: object, device: str) -> None:
    own, alone = net(device), net(device)
    run = st.bucketed(own, {"input": DIMS["x"]}, check=check)  # type: ignore[arg-type]
    batches = {(i, j): rows(3 + (5 * i + 3 * j) % 20, device) for i in range(THREADS) for j in range(CALLS)}
    if device == "cuda":  # while a graph is captured, modules hold other parameters
        for n in (5, 10, 20):
            for _ in range(2):
                run(rows(n, device))
    together = Barrier(THREADS)

    def gradients(i: int) -> list[tuple[Tensor, ...]]:
        together.wait()
        found = []
        for j in range(CALLS):
            loss = run(batches[i, j]).square().sum()
            found.append(torch.autograd.grad(loss, list(own.parameters())))
        return found

    with ThreadPoolExecutor(THREADS) as pool:
        for i, found in enumerate(pool.map(gradients, range(THREADS))):
            for j, each in enumerate(found):
                assert_same(each, torch.autograd.grad(alone(batches[i, j]).square().sum(), list(alone.parameters())))
    assert not run.stats().fallbacks
    assert run.stats().calls >= THREADS * CALLS


def test_threads_accumulate_gradients_through_one_runner(device: str) -> None:
    own, alone = net(device), net(device)
    run = st.bucketed(own, {"input": DIMS["x"]})
    batches = [[rows(3 + (5 * i + 3 * j) % 20, device) for j in range(CALLS)] for i in range(THREADS)]
    together = Barrier(THREADS)

    def train(i: int) -> None:
        together.wait()
        for x in batches[i]:
            run(x).square().sum().backward()

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(train, range(THREADS)))
    for x in itertools.chain.from_iterable(batches):
        alone(x).square().sum().backward()
    assert_same([p.grad for p in own.parameters()], [p.grad for p in alone.parameters()])


@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize("has_gradient", [True, False])
def test_an_accumulation_that_began_before_a_first_call_is_kept(has_gradient: bool, device: str) -> None:
    """Gradients change without a hook that would say who changes them."""
    own, meanwhile = net(device), list[int]()
    first = own.get_submodule("0").weight

    def accumulate() -> None:
        meanwhile.append(1)
        ones = torch.ones_like(first)
        first.grad = ones if first.grad is None else first.grad + ones

    def program(x: Tensor) -> Tensor:
        if threading.current_thread() is threading.main_thread():
            with ThreadPoolExecutor(1) as pool:
                pool.submit(accumulate).result()
        return own(x)  # type: ignore[no-any-return]

    run = st.bucketed(program, DIMS)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(run, rows(5, device)).result()
    first.grad = torch.zeros_like(first) if has_gradient else None
    for n in (20, 30, 6):
        run(rows(n, device))
    assert meanwhile
    torch.testing.assert_close(first.grad, torch.full_like(first, len(meanwhile)))
    assert not run.stats().fallbacks


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_first_call_on_one_stream_is_over_before_a_call_on_another_writes_its_inputs() -> None:
    own = net("cuda")
    run, side = st.bucketed(own, {"input": DIMS["x"]}, check=False), torch.cuda.Stream()
    first, second = rows(5, "cuda"), rows(6, "cuda")
    with torch.no_grad():
        expected = own(first), own(second)
        run(rows(30, "cuda"))
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(1 << 28)
            found = run(first)
        again = run(second)
        torch.cuda.synchronize()
    assert_same((found, again), expected)
