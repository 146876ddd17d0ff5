"""Fused calls on a GPU: graph capture, no synchronization, streams, launches, and more than 2**31 elements."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from device_waits import waits_are_errors
from fused_lists import adam
from torch import Tensor

import subtensors as st
from subtensors.dispatch.fused.fused_function import FusedFunction
from subtensors.dispatch.fused.tensor_columns import TensorColumn
from subtensors.dispatch.fused.triton_executor import TritonExecutor

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Synchronization debug mode")]

SHAPES: list[tuple[int, ...]] = [(3, 5), (5000,), (), (1,), (0,), (64, 64)]


def lists(seed: int, shapes: list[tuple[int, ...]] = SHAPES) -> TensorColumn:
    generator = torch.Generator().manual_seed(seed)
    return TensorColumn(torch.randn(s, generator=generator).cuda() for s in shapes)


def normalised(p: Tensor, g: Tensor, lr: float) -> Tensor:
    p.sub_(lr * g / (g.norm() + 1))
    return p.sum()


class Run:
    """Adam over new lists; `plain` does the same element by element."""

    def __init__(self, fusion: Callable[..., Any]) -> None:
        self.fusion = fusion
        self.p, self.g, self.m = (lists(seed) for seed in range(3))
        self.v = TensorColumn(t.abs() for t in lists(3))
        self.step = TensorColumn(torch.zeros((), device="cuda") for _ in self.p)

    def __call__(self, lr: float = 1e-3) -> None:
        self.fusion(self.p, self.g, self.m, self.v, self.step, lr=lr, betas=(0.9, 0.999))

    def plain(self, lr: float = 1e-3) -> None:
        for row in zip(self.p, self.g, self.m, self.v, self.step, strict=True):
            adam(*row, lr=lr, betas=(0.9, 0.999))

    def assert_equals(self, other: Run) -> None:
        ours, theirs = ([*run.p, *run.m, *run.v, *run.step] for run in (self, other))
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("warm_up", ["none", "other lists", "the same lists"])
def test_a_captured_step_replays_as_it_runs(warm_up: str) -> None:
    fusion = FusedFunction(adam)
    run, expected = Run(fusion), Run(fusion)
    if warm_up == "other lists":
        Run(fusion)()
    if warm_up == "the same lists":
        run()
        expected.plain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(5):
        graph.replay()
        expected.plain()
    torch.cuda.synchronize()
    run.assert_equals(expected)


def test_an_eager_call_between_capture_and_replay_is_right() -> None:
    fusion = FusedFunction(adam)
    run, expected = Run(fusion), Run(fusion)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(3):
        run()
        expected.plain()
        graph.replay()
        expected.plain()
    torch.cuda.synchronize()
    run.assert_equals(expected)


def test_reductions_are_captured() -> None:
    fusion = FusedFunction(normalised)
    p, g, other = lists(0), lists(1), lists(0)
    fusion(p, g, 0.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sums = fusion(p, g, 0.5)
    for _ in range(3):
        graph.replay()
        expected = [normalised(a, b, 0.5) for a, b in zip(other, g, strict=True)]
        for a, e in zip((*p, *sums), (*other, *expected), strict=True):
            torch.testing.assert_close(a, e)


def test_numbers_in_a_graph_follow_the_eager_call_that_changes_them() -> None:
    fusion = FusedFunction(lambda p, lr: p.add_(lr))
    p = TensorColumn([torch.zeros(100, device="cuda")])
    fusion(p, 1.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fusion(p, 1.0)
    graph.replay()
    fusion(p, 10.0)
    graph.replay()
    torch.cuda.synchronize()
    assert (p[0] == 1 + 1 + 10 + 10).all()


def test_a_number_that_is_new_at_capture_stays_constant_in_the_graph() -> None:
    fusion = FusedFunction(lambda p, lr: p.add_(lr))
    p = TensorColumn([torch.zeros(100, device="cuda")])
    fusion(p, 1.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fusion(p, 5.0)
    fusion(p, 1.0)
    graph.replay()
    fusion(p, 1.0)
    torch.cuda.synchronize()
    assert (p[0] == 1 + 1 + 5 + 1).all()


@pytest.mark.parametrize("warm_up", [False, True])
def test_a_graph_outlives_the_function_that_was_captured(warm_up: bool) -> None:
    p = [torch.arange(float(n), device="cuda") for n in (10, 5000)]
    expected = [t + 3 for t in p]

    def capture() -> torch.cuda.CUDAGraph:
        fusion = FusedFunction(lambda p, n: p.add_(n))
        if warm_up:
            fusion(TensorColumn(p), 0.0)
            fusion(TensorColumn(p), 1.0)
            for t in p:
                t.sub_(1)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            fusion(TensorColumn(p), 1.0)
        return graph

    graph = capture()
    gc.collect()
    torch.cuda.empty_cache()
    scribble = [torch.full((1 << 16,), -1, dtype=torch.int64, device="cuda") for _ in range(50)]
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, e) for a, e in zip(p, expected, strict=True))
    assert len(scribble) == 50


def test_replays_of_stochastic_rounding_draw_fresh_bits() -> None:
    x = TensorColumn([torch.full((1000,), 1 + 2.0**-8, device="cuda")])
    target = TensorColumn([torch.empty(1000, dtype=torch.bfloat16, device="cuda")])
    fusion = FusedFunction(st.stochastic_round_)
    fusion(target, x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fusion(target, x)
    drawn = []
    for _ in range(2):
        graph.replay()
        drawn.append(target[0].clone())
    assert not torch.equal(drawn[0], drawn[1])


def test_steps_with_new_numbers_never_wait_for_the_device() -> None:
    fusion = FusedFunction(adam)
    run, expected = Run(fusion), Run(fusion)
    run(1.0)
    expected(1.0)
    traces = fusion.traces
    with waits_are_errors():
        for step in range(1, 51):
            run(1 / step)
    for step in range(1, 51):
        expected(1 / step)
    torch.cuda.synchronize()
    run.assert_equals(expected)
    assert fusion.traces == traces


def test_moved_gradients_never_wait_for_the_device() -> None:
    fusion = FusedFunction(normalised)
    p = lists(0)
    fusion(p, lists(1), 0.5)
    gradients = [lists(seed) for seed in range(5)]
    with waits_are_errors():
        for g in gradients:
            fusion(p, g, 0.5)


def test_a_number_that_changes_while_kernels_are_queued_reaches_each_in_turn() -> None:
    p = TensorColumn([torch.zeros(1 << 22, device="cuda") for _ in range(8)])
    fusion = FusedFunction(lambda p, n: p.add_(n))
    for step in range(200):
        fusion(p, float(step))
    torch.cuda.synchronize()
    assert all((t == sum(range(200))).all() for t in p)


def launches(call: Callable[[], Any]) -> list[str]:
    """The kernels that a call runs, after warm-up calls."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    ran = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return [name for name in ran if "Memcpy" not in name and "Memset" not in name]


def test_adam_is_two_kernels_with_step_counts_and_one_without() -> None:
    run = Run(FusedFunction(adam))
    # Adam's 0-d element is a separate group, with one kernel over numbers per tensor.
    sized = [i for i, t in enumerate(run.p) if t.dim()]
    run.p, run.g, run.m, run.v, run.step = (
        TensorColumn(x[i] for i in sized) for x in (run.p, run.g, run.m, run.v, run.step)
    )
    assert len(launches(run)) == 2

    def without(p: Tensor, g: Tensor, m: Tensor, lr: float) -> None:
        m.lerp_(g, 0.1)
        p.sub_(lr * m)

    fusion = FusedFunction(without)
    assert len(launches(lambda: fusion(run.p, run.g, run.m, 0.5))) == 1


def test_the_number_of_kernels_does_not_grow_with_the_list() -> None:
    fusion = FusedFunction(normalised)
    counts = set()
    for size in (1, 10, 300):
        p, g = lists(0, [(7,)] * size), lists(1, [(7,)] * size)
        counts.add(len(launches(lambda: fusion(p, g, 0.5))))  # noqa: B023
    assert len(counts) == 1


def test_calls_on_several_streams_do_not_disturb_one_another() -> None:
    fusion = FusedFunction(normalised)
    shapes: list[tuple[int, ...]] = [(1 << 20,)] * 4
    streams = [torch.cuda.Stream() for _ in range(3)]
    p, g = ([lists(seed, shapes) for seed in range(first, first + 3)] for first in (0, 3))
    expected = [[t.clone() for t in x] for x in p]
    torch.cuda.synchronize()
    for _ in range(20):
        for stream, a, b, lr in zip(streams, p, g, (0.5, 0.25, 0.125), strict=True):
            with torch.cuda.stream(stream):
                fusion(a, b, lr)
    torch.cuda.synchronize()
    for _ in range(20):
        for a, b, lr in zip(expected, g, (0.5, 0.25, 0.125), strict=True):
            for t, u in zip(a, b, strict=True):
                normalised(t, u, lr)
    for a, e in zip(p, expected, strict=True):
        for t, u in zip(a, e, strict=True):
            torch.testing.assert_close(t, u)


def test_tiles_of_one_tensor_are_all_counted_in_any_order() -> None:
    x = TensorColumn([torch.ones(n, dtype=torch.int64, device="cuda") for n in (1 << 24, 1023, 1025, 0, 1)])
    fusion = FusedFunction(lambda x: (x.sum(), x.sum() * 2))
    for _ in range(20):
        sums, doubled = fusion(x)
        assert [int(s) for s in sums] == [t.numel() for t in x]
        assert [int(s) for s in doubled] == [2 * t.numel() for t in x]


def test_a_step_allocates_nothing_as_large_as_a_parameter() -> None:
    params = [torch.nn.Parameter(torch.ones(1 << 20, device="cuda")) for _ in range(16)]
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer = st.optim.AdamW(params, lr=1e-3)
    optimizer.step()
    optimizer.step()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    optimizer.param_groups[0]["lr"] = 1e-4
    optimizer.step()
    assert torch.cuda.max_memory_allocated() - before < 1 << 16


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16])
def test_elements_beyond_two_to_the_31_are_right(dtype: torch.dtype) -> None:
    count = 2**31 + 1000
    needed = 3 * count * dtype.itemsize
    if torch.cuda.mem_get_info()[0] < max(needed, 20 << 30):
        pytest.skip(f"needs {needed >> 30} GB of GPU memory")
    x = torch.zeros(count, dtype=dtype, device="cuda")
    x[-1], x[0], x[2**31] = 3, 5, 7

    def function(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x.add_(1)
        return x * 2, x.amax(), (x > 1).sum()

    doubled, largest, count_of_large = FusedFunction(function)(TensorColumn([x, x.new_zeros(5)]))
    assert [int(x[i]) for i in (0, 1, 2**31 - 1, 2**31, count - 1)] == [6, 1, 1, 8, 4]
    assert [int(doubled[0][i]) for i in (0, 1, 2**31 - 1, 2**31, count - 1)] == [12, 2, 2, 16, 8]
    assert [int(t) for t in largest] == [8, 1]
    assert [int(t) for t in count_of_large] == [3, 0]


def test_a_list_of_more_than_two_to_the_31_elements_is_right() -> None:
    if torch.cuda.mem_get_info()[0] < 20 << 30:
        pytest.skip("needs 20 GB of GPU memory")
    x = TensorColumn(torch.zeros(2**29, dtype=torch.uint8, device="cuda") for _ in range(6))
    result = FusedFunction(lambda x: x + 1)(x)
    assert all(int(t[0]) == int(t[-1]) == 1 for t in result)


def test_a_0d_cpu_tensor_is_passed_with_the_dynamic_scalars() -> None:
    fusion = FusedFunction(lambda p, t: p.mul_(t))
    p = lists(0)
    expected = [t * 2 * 3 for t in p]
    for value in (2.0, 3.0):
        fusion(p, torch.tensor(value))
    for a, e in zip(p, expected, strict=True):
        torch.testing.assert_close(a, e)
    (plans,) = fusion._variant.plans.values()
    assert all(isinstance(g, TritonExecutor) for plan in plans for _, g in plan.groups)


def test_writing_to_a_0d_cpu_tensor_is_refused() -> None:
    with pytest.raises(st.RuleError, match="writes numbers of cuda:0 to a CPU tensor"):
        FusedFunction(lambda p, t: t.add_(p.sum()))(TensorColumn([torch.ones(3, device="cuda")]), torch.tensor(1.0))


def test_elements_on_the_host_and_on_the_device_run_where_they_are() -> None:
    x = TensorColumn([torch.ones(3), torch.ones(3, device="cuda")])
    result = FusedFunction(lambda x: x * 2)(x)
    assert [t.device.type for t in result] == ["cpu", "cuda"]
    assert all((t == 2).all() for t in result)
