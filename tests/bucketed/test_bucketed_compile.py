"""A bucketed program is compiled once for all of its buckets, and computes what the program computes."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import subtensors as st
from subtensors.dispatch.torch_internals import compiler
from subtensors.dispatch.torch_internals.compiler import CompiledGraph
from subtensors.dispatch.tracing.shape_template import NoTemplate, Number, ShapeTemplate, grid

SEQ = st.Dim("seq", max=64, buckets=8)
BATCH = st.Dim("batch", max=16, buckets=4)
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("captured")]


@pytest.fixture
def options(device: str) -> dict[str, Any]:
    """Inductor where it has a GPU; elsewhere the graphs run as they are, for a C++ compiler takes its time."""
    return {} if device == "cuda" else {"backend": "aot_eager"}


@torch.no_grad()
def test_one_compilation_serves_every_bucket(device: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    net = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, device=device, dtype=torch.float64).eval()
    run = st.bucketed(net, {"src": {1: SEQ}}, compile=options or True)
    for n in (3, 8, 9, 30, 64, 33, 1):
        x = torch.randn(2, n, 16, device=device, dtype=torch.float64)
        torch.testing.assert_close(run(x), net(x))
    stats = run.stats()
    assert [b.sizes["seq"] for b in stats.buckets] == [64, 40, 32, 16, 8]
    assert stats.recompiles == 0
    assert not stats.fallbacks


@torch.no_grad()
def test_two_dynamic_sizes_are_one_compilation(device: str, options: dict[str, Any]) -> None:
    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.flatten(0, 1).softmax(0), x.mean((0, 1)).relu()

    run = st.bucketed(program, {"x": {0: BATCH, 1: SEQ}}, compile=options or True)
    for b, n in ((3, 5), (4, 8), (7, 60), (16, 3), (9, 9)):
        x = torch.randn(b, n, 3, device=device, dtype=torch.float64)
        for actual, expected in zip(run(x), program(x), strict=True):
            torch.testing.assert_close(actual, expected)
    assert run.stats().recompiles == 0


@torch.no_grad()
def test_a_program_that_branches_on_its_size_is_compiled_once_per_bucket(
    device: str, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    def program(x: Tensor) -> Tensor:
        return x.softmax(0) if x.shape[0] > 16 else x.softmax(0).exp()

    run = st.bucketed(program, {"x": {0: st.Dim("n", max=24, buckets=8)}}, compile=options or True)
    with caplog.at_level(logging.WARNING, "subtensors.bucketed"):
        for n in (24, 10, 3):
            x = torch.randn(n, device=device, dtype=torch.float64)
            wanted = x.softmax(0) if n == 24 else x.softmax(0).exp()
            torch.testing.assert_close(run(x), wanted)
    assert "compiled once per bucket" in caplog.text


@torch.no_grad()
def test_replaced_parameters_are_recompiled(device: str, options: dict[str, Any]) -> None:
    net = nn.Linear(3, 3, device=device, dtype=torch.float64)
    run = st.bucketed(lambda x: net(x).softmax(1), {"x": {1: SEQ}}, compile=options or True)
    x = torch.randn(2, 5, 3, device=device, dtype=torch.float64)
    run(x)
    net.weight = nn.Parameter(torch.randn(3, 3, device=device, dtype=torch.float64))
    for _ in range(2):
        torch.testing.assert_close(run(x), net(x).softmax(1))


def test_unknown_options_are_refused() -> None:
    with pytest.raises(ValueError, match="reduce-overhead"):
        st.bucketed(torch.exp, {0: {0: SEQ}}, compile={"mode": "reduce-overhead"})
    with pytest.raises(TypeError, match=r"compile takes backend, mode, .*; got 'bakcend'"):
        st.bucketed(torch.exp, {0: {0: SEQ}}, compile={"bakcend": "eager"})
    with pytest.raises(ValueError, match=r"compile's backend is one of .*, got 'inducktor'"):
        st.bucketed(torch.exp, {0: {0: SEQ}}, compile={"backend": "inducktor"})
    with pytest.raises(TypeError, match="compile is a bool or a dict"):
        st.bucketed(torch.exp, {0: {0: SEQ}}, compile="yes")  # type: ignore[arg-type]


def test_empty_options_are_the_compilers_defaults() -> None:
    options = [st.bucketed(torch.exp, {0: {0: SEQ}}, compile=x).graph_cache.compile_options for x in (False, True, {})]
    assert options == [None, {}, {}]


def test_a_number_is_fitted_through_its_points() -> None:
    assert Number.through(grid((4, 3), (8, 5)), [12 + 4, 20 + 4, 24 + 8, 40 + 8]).at((10, 7)) == 80
    with pytest.raises(NoTemplate, match="no polynomial"):
        Number.through([(4,), (8,)], [2, 5])


def test_a_template_is_checked_at_a_size_it_was_not_fitted_to() -> None:
    def program(inputs: Any) -> tuple[list[Tensor], Any]:
        (x,) = inputs
        return [x.new_zeros(x.shape[0] ** 2)], None

    with pytest.raises(NoTemplate, match="has the numbers"):
        ShapeTemplate(program, lambda sizes: [torch.zeros(sizes)], [(4,), (8,), (16,)], [(0, 0)])


@torch.no_grad()
def test_state_is_written_once_by_the_first_call_and_not_by_traces(device: str) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
            self.register_buffer("seen", torch.zeros(3, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            self.calls.add_(1)
            self.seen.mul_(2).add_(1)
            x = x.exp()
            x.add_(self.seen)
            return x * self.calls

    net, plain = Counting().to(device), Counting().to(device)
    run = st.bucketed(net, {"x": {0: SEQ}}, compile={"backend": "aot_eager"})
    for n in (5, 9, 6, 12):
        x = torch.randn(n, 3, dtype=torch.float64, device=device)
        torch.testing.assert_close(run(x), plain(x))
        assert net.calls.item() == plain.calls.item()
        assert torch.equal(net.seen, plain.seen)


@torch.no_grad()
def test_sizes_that_the_compiler_specializes_on_are_compiled_separately() -> None:
    seen = []

    def telling_apart(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        seen.append(bool(inputs[0].shape[0] > 16))
        return graph

    run = st.bucketed(lambda x: x.softmax(0), {"x": {0: SEQ}}, compile={"backend": telling_apart})
    for n in (20, 40, 3, 64, 12):
        x = torch.randn(n, dtype=torch.float64)
        torch.testing.assert_close(run(x), x.softmax(0))
    assert seen == [True, False]
    assert run.stats().recompiles == 1


@torch.no_grad()
def test_compiled_code_reads_the_values_that_parameters_have_now(device: str, options: dict[str, Any]) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)).to(device, torch.float64)
    run = st.bucketed(net, {"input": {1: SEQ}}, compile=options or True)
    for n in (5, 20, 7):
        x = torch.randn(2, n, 3, dtype=torch.float64, device=device)
        torch.testing.assert_close(run(x), net(x))
        for p in net.parameters():
            p.add_(0.5)
    assert run.stats().recompiles == 0


@torch.no_grad()
def test_casts_of_the_callers_autocast_are_compiled_in_once(device: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4)).to(device)
    run = st.bucketed(net, {"input": {1: SEQ}}, compile=options or True)
    for n in (5, 20, 7, 33):
        x = torch.randn(2, n, 8, device=device)
        for dtype in (torch.bfloat16, torch.float16):
            with torch.autocast(device, dtype=dtype):
                found, expected = run(x), net(x)
            assert found.dtype == expected.dtype == dtype
            # Fused ops leave out some of eager's roundings to 8 or 11 bits; a cast that is lost shows in the dtype.
            torch.testing.assert_close(found, expected, atol=0.02, rtol=0.02)
        torch.testing.assert_close(run(x), net(x))


def test_a_compile_mode_with_own_cuda_graphs_leaves_capture_to_the_runner() -> None:
    graph = torch.fx.symbolic_trace(lambda x: [x + 1])
    seen = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor], **options: Any) -> Any:
        seen.append(options)
        return graph

    code = CompiledGraph(graph, [torch.ones(4)], [(0, 0)], {"backend": backend, "options": {"a": 1}})
    assert code(torch.ones(4))[0].sum() == 8
    assert seen == [{"options": {"a": 1}}]
    assert compiler._backend({"mode": "max-autotune"}).config["triton.cudagraphs"] is False
