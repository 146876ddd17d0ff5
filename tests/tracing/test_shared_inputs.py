"""Products of one matrix with several weights, computed together: the kernel, and the graphs that it is put into."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import subtensors as st
from subtensors.bucketed import compiled
from subtensors.dispatch.tracing.shared_inputs import share_inputs
from subtensors.kernels.graph_inputs.grouped_linear import (
    LinearTiling,
    grouped_linear,
    grouped_linear_reference,
    grouped_linear_triton,
)

SMALL = LinearTiling(16, 32, 16, 2, 4)


def made(
    rows: int, inner: int, widths: list[int], has_bias: bool, dtype: torch.dtype, device: str
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """An x whose rows are apart in memory, weights, and biases if there are any."""
    x = torch.randn(rows, inner + 3, dtype=dtype, device=device)[:, :inner]
    weights = [torch.randn(n, inner, dtype=dtype, device=device) for n in widths]
    return x, weights, [torch.randn(n, dtype=dtype, device=device) for n in widths if has_bias]


@given(
    rows=some.integers(0, 40),
    inner=some.integers(1, 50) | some.just(48),
    widths=some.lists(some.integers(0, 70), min_size=1, max_size=3),
    has_bias=some.booleans(),
    dtype=some.sampled_from([torch.float16, torch.bfloat16]),
)
def test_the_kernel_errs_no_more_than_torch(
    device: str, rows: int, inner: int, widths: list[int], has_bias: bool, dtype: torch.dtype
) -> None:
    if device == "cpu" and (torch.cuda.is_available() or dtype is torch.bfloat16):
        return  # compiled kernels take no tensors of a CPU, and Triton 3.6 can't interpret bfloat16
    x, weights, biases = made(rows, inner, widths, has_bias, dtype, device)
    truth = grouped_linear_reference(x.double(), [w.double() for w in weights], [b.double() for b in biases])
    for ours, torchs, true in zip(
        grouped_linear_triton(x, weights, biases, SMALL),
        grouped_linear_reference(x, weights, biases),
        truth,
        strict=True,
    ):
        if true.numel():
            error, own = ((t.double() - true).abs().max() for t in (ours, torchs))
            assert error <= 1.5 * own + torch.finfo(dtype).eps * true.abs().max()


@pytest.mark.parametrize("rows", [5, 600, 5000])
def test_the_custom_op_matches_its_declaration_and_reference(device: str, rows: int) -> None:
    for has_bias in (True, False):
        x, weights, biases = made(rows, 64, [48, 6], has_bias, torch.float16, device)
        torch.library.opcheck(torch.ops.subtensors.grouped_linear.default, (x, weights, biases))
        for ours, torchs in zip(
            grouped_linear(x, weights, biases), grouped_linear_reference(x, weights, biases), strict=True
        ):
            torch.testing.assert_close(ours, torchs, rtol=1e-3, atol=1e-2)  # roundings of sums of 64 products


class Attention(nn.Module):
    """Queries, keys and values of one input, and a product of its own."""

    def __init__(self, width: int, has_bias: bool) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(width, n, bias=has_bias) for n in (width, width // 2, width, width)])

    def forward(self, x: Tensor) -> Tensor:
        first, second, third, fourth = self.parts
        return fourth(torch.relu(first(x)) + third(x)) + second(x).sum(-1, keepdim=True)


def targets(module: torch.fx.GraphModule) -> list[Any]:
    return [node.target for node in module.graph.nodes if node.op == "call_function"]


def shared(program: Any, *inputs: Tensor) -> torch.fx.GraphModule:
    """A program's graph of aten ops, after `share_inputs`."""
    with torch.no_grad():
        module = make_fx(program, _allow_non_fake_inputs=True)(*inputs)
    share_inputs(module, (torch.float32,), "cpu")
    return module


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("shape", [(5, 8), (2, 3, 8)])
def test_products_of_one_input_become_one_call(has_bias: bool, shape: tuple[int, ...]) -> None:
    program, x = Attention(8, has_bias), torch.randn(shape)
    module = shared(program, x)
    found = targets(module)
    assert found.count(torch.ops.subtensors.grouped_linear.default) == 1
    assert found.count(torch.ops.aten.addmm.default) + found.count(torch.ops.aten.mm.default) == 1
    with torch.no_grad():
        torch.testing.assert_close(module(x), program(x))
        for p in program.parameters():
            p.normal_()
        torch.testing.assert_close(module(x), program(x))


def test_more_products_than_fit_a_call_become_several_calls() -> None:
    weights = [nn.Parameter(torch.randn(4, 8)) for _ in range(7)]
    module = shared(lambda x: torch.stack([nn.functional.linear(x, w) for w in weights]), torch.randn(5, 8))
    found = targets(module)
    assert found.count(torch.ops.subtensors.grouped_linear.default) == 2
    assert found.count(torch.ops.aten.mm.default) == 1


def _written_between(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    x = x.clone()
    first = x @ a.t()
    x.add_(1)
    return first + x @ b.t()


def _not_transposed(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return x @ a + x @ b


def _of_computed_weights(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return x @ (a * 2).t() + x @ (b * 2).t()


def _of_two_inputs(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return x @ a.t() + (x + 1) @ b.t()


def _of_two_views(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return x.view(4, 8) @ a.t() + x.view(2, 16)[:, :8].repeat(2, 1) @ b.t()


@pytest.mark.parametrize(
    "program", [_written_between, _not_transposed, _of_computed_weights, _of_two_inputs, _of_two_views]
)
def test_other_products_are_not_merged(program: Any) -> None:
    a, b = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))
    x = torch.randn(4, 8)
    module = shared(lambda x: program(x, a, b), x)
    assert torch.ops.subtensors.grouped_linear.default not in targets(module)
    with torch.no_grad():
        torch.testing.assert_close(module(x), program(x, a, b))


def test_products_with_large_weights_are_not_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subtensors.dispatch.tracing.shared_inputs.MAX_WEIGHT_BYTES", 8 * 8 * 4)
    module = shared(Attention(8, True), torch.randn(5, 8))
    assert torch.ops.subtensors.grouped_linear.default not in targets(module)


@torch.no_grad()
def test_a_compiled_bucketed_program_shares_inputs(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU in half precision; on a CPU where that is asked for."""
    calls: list[Any] = []

    def counting(module: Any) -> None:
        share_inputs(module, *([] if device == "cuda" else [(torch.float32,), "cpu"]))
        calls.extend(t for t in targets(module) if t is torch.ops.subtensors.grouped_linear.default)

    monkeypatch.setattr(compiled, "share_inputs", counting)
    program = Attention(16, True).to(device, torch.half if device == "cuda" else torch.float).eval()
    seq = st.Dim("seq", max=64, buckets=16)
    run = st.bucketed(program, {"x": {1: seq}}, compile={"backend": "eager"} if device == "cpu" else True)
    like = next(program.parameters())
    for n in (20, 33, 64, 5):
        x = torch.randn(2, n, 16, dtype=like.dtype, device=device)
        tolerance = {} if device == "cpu" else {"rtol": 1e-2, "atol": 1e-2}  # roundings of half precision
        torch.testing.assert_close(run(x), program(x), **tolerance)
    assert len(calls) == 1
    assert run.stats().recompiles == 0
