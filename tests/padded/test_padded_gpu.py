"""PaddedTensors on a GPU: the programs of the CPU tests, and one captured graph for every length of a bucket."""

from __future__ import annotations

import pytest
import torch
from padded_programs import NAN, PROGRAMS, RAGGED, SEQ
from torch import Tensor, nn

import subtensors as st

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", PROGRAMS)
def test_real_values_and_gradients_are_the_unpadded_programs(name: str) -> None:
    program = PROGRAMS[name]
    source = torch.randn(2, 5, 3, dtype=torch.float64, device="cuda", requires_grad=True)
    weight = torch.randn(3, dtype=torch.float64, device="cuda", requires_grad=True)
    expected = program(source, weight)
    cotangent = torch.randn_like(expected)
    actual = program(st.pad(source, {1: SEQ}, value=NAN), weight)
    actual = actual.unpad() if isinstance(actual, st.PaddedTensor) else actual
    torch.testing.assert_close(actual, expected)
    wanted = torch.autograd.grad(expected, [source, weight], cotangent, allow_unused=True)
    for a, e in zip(torch.autograd.grad(actual, [source, weight], cotangent, allow_unused=True), wanted, strict=True):
        torch.testing.assert_close(a, e)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", RAGGED)
def test_a_ragged_batch_errs_no_more_than_its_rows_alone(name: str, dtype: torch.dtype) -> None:
    program = PROGRAMS[name]
    rows = [torch.randn(n, 3, device="cuda", dtype=dtype) for n in (4, 7, 2)]
    weight = torch.randn(3, device="cuda", dtype=dtype)
    actual = program(st.pad(rows, {0: SEQ}, value=NAN), weight)
    parts = actual.unpad() if isinstance(actual, st.PaddedTensor) else list(actual)
    truth = [program(row[None].double(), weight.double())[0] for row in rows]
    alone = [program(row[None], weight)[0] for row in rows]
    error = max(float((a.double() - t).abs().max()) for a, t in zip(parts, truth, strict=True))
    plain = max(float((a.double() - t).abs().max()) for a, t in zip(alone, truth, strict=True))
    scale = max(float(t.abs().max()) for t in truth)
    assert error <= 1.5 * plain + scale * torch.finfo(dtype).eps


def test_one_captured_graph_serves_every_length_of_a_bucket() -> None:
    torch.manual_seed(0)
    net = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, device="cuda").double()
    # Its padding is said to hold nothing known, and is poisoned below.
    x = st.pad(torch.randn(2, 8, 16, device="cuda").double(), {1: SEQ}, value=NAN)

    def program() -> Tensor:
        h = net(x)
        out: Tensor = (h * torch.softmax(h, 1)).mean(1) + h[:, -1]
        return out

    with torch.no_grad():
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            program()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            out = program()
        for n in (5, 1, 8, 3):
            t = torch.randn(2, n, 16, device="cuda").double()
            x._dense.fill_(NAN)
            x._dense[:, :n] = t
            x._sizes.set((n,))  # type: ignore[union-attr]
            graph.replay()
            h = net(t)
            torch.testing.assert_close(out, (h * torch.softmax(h, 1)).mean(1) + h[:, -1])


def test_an_op_without_a_rule_is_refused_in_a_capture() -> None:
    x = st.pad(torch.randn(5, 3, device="cuda"), {0: SEQ})
    torch.renorm(x, 2, 0, 0.5)
    with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
        _ = x + 1
        with pytest.raises(st.RuleError, match="renorm cannot run at the true sizes either"):
            torch.renorm(x, 2, 0, 0.5)
