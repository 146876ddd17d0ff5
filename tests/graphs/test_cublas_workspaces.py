"""The workspaces of cuBLAS in captured graphs: torch may free them, and no tensor is allocated there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import subtensors as st
from subtensors.dispatch.graphs.capture import make_workspaces

pytestmark = pytest.mark.gpu
WORDS = 32 << 18
"""As many float32 as one of cuBLAS's workspaces on a Hopper GPU has."""
FRESH = 7.0


def clear() -> None:
    torch._C._cuda_clearCublasWorkspaces()


def compile_with_graphs() -> None:
    """Run torch's own CUDA graphs, which free workspaces around their captures."""
    layer = nn.Linear(64, 64, device="cuda")
    compiled = torch.compile(layer, mode="reduce-overhead")
    with torch.no_grad():
        for _ in range(3):
            compiled(torch.randn(8, 64, device="cuda"))


def fresh_on_all_streams() -> list[Tensor]:
    """Tensors that would be allocated in freed workspaces."""
    made = []
    for stream in {torch.cuda.current_stream(), *[torch.cuda.Stream() for _ in range(32)]}:
        with torch.cuda.stream(stream):
            made += [torch.full((n,), FRESH, device="cuda") for n in (WORDS, WORDS, WORDS // 32)]
    torch.cuda.synchronize()
    return made


def assert_untouched(fresh: list[Tensor]) -> None:
    torch.cuda.synchronize()
    assert all(bool((t == FRESH).all()) for t in fresh)


@pytest.mark.parametrize("free_workspaces", [clear, compile_with_graphs])
@torch.no_grad()
def test_a_graph_writes_to_no_workspace_that_torch_freed(free_workspaces: Callable[[], None]) -> None:
    # Few results, each a long sum: cuBLAS splits it, with partial sums in its workspace.
    model = nn.Sequential(nn.Linear(4096, 64), nn.ReLU(), nn.Linear(64, 4096), nn.Linear(4096, 128)).cuda().half()
    run = st.bucketed(model, {"input": {0: st.Dim("rows", max=64, buckets=32)}})
    x = torch.randn(30, 4096, device="cuda", dtype=torch.float16)
    run(x)
    expected = run(x)
    free_workspaces()
    fresh = fresh_on_all_streams()
    for _ in range(3):
        assert torch.equal(run(x), expected)
    assert_untouched(fresh)
    del fresh
    torch.cuda.empty_cache()
    assert torch.equal(run(x), expected)
    torch.cuda.synchronize()
    # Freed workspaces serve the next capture on the stream.
    y = torch.randn(60, 4096, device="cuda", dtype=torch.float16)
    run(y)
    assert torch.equal(run(x), expected)
    torch.testing.assert_close(run(y), model(y))


def test_a_captured_step_with_products_writes_to_no_workspace_that_torch_freed() -> None:
    weights = [torch.randn(96, 2048) / 32 for _ in range(2)]
    ours, theirs = ([nn.Parameter(w.cuda()) for w in weights] for _ in range(2))
    captured = st.optim.Muon(ours, lr=0.02, graph=True)
    eager = st.optim.Muon(theirs, lr=0.02)
    gradients = [torch.randn_like(p) for p in ours]
    fresh: list[Tensor] = []
    for number in range(6):
        for params in (ours, theirs):
            for p, g in zip(params, gradients, strict=True):
                p.grad = g
        captured.step()
        if number == 2:
            clear()
            fresh = fresh_on_all_streams()
        if number == 4:
            assert_untouched(fresh)
            fresh = []
            torch.cuda.empty_cache()
        eager.step()
    torch.cuda.synchronize()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q)


def test_living_pools_have_distinct_streams() -> None:
    runs = [st.bucketed(nn.Linear(8, 8).cuda(), {"input": {0: st.Dim("rows", max=8)}}) for _ in range(8)]
    x = torch.randn(3, 8, device="cuda")
    with torch.no_grad():
        for run in runs:
            run(x)
    streams = [pool.stream.cuda_stream for run in runs for pool in run.graph_cache.pools.values()]
    assert len(set(streams)) == len(runs)


def test_programs_without_products_run_with_deterministic_algorithms() -> None:
    x = torch.randn(5, 8, device="cuda")
    run = st.bucketed(lambda x: x.sin() + 1, {"x": {0: st.Dim("rows", max=8)}})
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(2):
            torch.testing.assert_close(run(x), x.sin() + 1)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not run.stats().fallbacks


def test_workspaces_are_allocated_once_for_a_stream() -> None:
    device, stream = torch.device("cuda", torch.cuda.current_device()), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        make_workspaces(device)
        before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        for _ in range(3):
            make_workspaces(device)
            clear()
            make_workspaces(device)
        assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) <= before
