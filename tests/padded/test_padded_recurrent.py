"""Recurrent networks over padded sequences: outputs, last states and gradients are those of each sequence alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import subtensors as st
from subtensors.padded import torch_function as padded_calls

SEQ = st.Dim("seq", max=24, buckets=st.Linear(8))
BATCH = st.Dim("batch", max=8, buckets=4)
NAN = float("nan")

NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: nn.LSTM(4, 3, batch_first=True),
    "deep LSTM, both directions": lambda: nn.LSTM(4, 3, num_layers=2, batch_first=True, bidirectional=True),
    "LSTM, projected": lambda: nn.LSTM(4, 3, batch_first=True, proj_size=2, bidirectional=True, bias=False),
    "GRU": lambda: nn.GRU(4, 3, num_layers=2, batch_first=True),
    "GRU, both directions": lambda: nn.GRU(4, 3, batch_first=True, bidirectional=True),
    "RNN": lambda: nn.RNN(4, 3, batch_first=True, nonlinearity="relu", bidirectional=True),
}


def flat(out: Any) -> list[Tensor]:
    """The outputs, the last hidden state, and for an LSTM its last cell."""
    outputs, last = out
    return [outputs, *(last if isinstance(last, tuple) else [last])]


def real(x: Any) -> Any:
    return x.unpad() if isinstance(x, st.PaddedTensor) else x


@pytest.mark.parametrize("name", NETWORKS)
def test_a_recurrent_network_ends_where_each_sequence_does(name: str, device: str) -> None:
    torch.manual_seed(0)
    network = NETWORKS[name]().double().to(device)
    rows = [torch.randn(n, 4, dtype=torch.float64, device=device, requires_grad=True) for n in (5, 8, 1)]
    wanted = [*rows, *network.parameters()]
    padded_calls.fallbacks.clear()
    outputs, *last = flat(network(st.pad(rows, {0: SEQ}, value=NAN)))
    assert not padded_calls.fallbacks
    actual = [[real(outputs)[i], *(state[:, i] for state in map(torch.as_tensor, last))] for i in range(len(rows))]
    expected = [flat(network(row)) for row in rows]
    torch.testing.assert_close([[real(t) for t in row] for row in actual], expected)
    given, alone = (
        torch.autograd.grad(torch.stack([(real(t) ** 2).sum() for row in all_of_it for t in row]).sum(), wanted)
        for all_of_it in (actual, expected)
    )
    torch.testing.assert_close(given, alone)


@pytest.mark.parametrize("dims", [{0: BATCH}, {1: SEQ}, {0: BATCH, 1: SEQ}], ids=["batch", "sequence", "both"])
@pytest.mark.parametrize("name", ["deep LSTM, both directions", "GRU"])
def test_a_recurrent_network_takes_padded_batches_and_states(name: str, dims: dict[int, st.Dim]) -> None:
    torch.manual_seed(0)
    network = NETWORKS[name]().double()
    source = torch.randn(3, 5, 4, dtype=torch.float64, requires_grad=True)
    begin = torch.randn(4 if "deep" in name else 2, 3, 3, dtype=torch.float64, requires_grad=True)
    over_batch = {1: dims[0]} if 0 in dims else {}
    padded_begin = st.pad(begin, over_batch, value=NAN) if over_batch else begin
    wanted = [source, begin, *network.parameters()]
    hx: tuple[Any, Any] = ((padded_begin, padded_begin), (begin, begin)) if "LSTM" in name else (padded_begin, begin)
    padded_calls.fallbacks.clear()
    actual = [real(t) for t in flat(network(st.pad(source, dims, value=NAN), hx[0]))]
    assert not padded_calls.fallbacks
    expected = flat(network(source, hx[1]))
    torch.testing.assert_close(actual, expected)
    given, alone = (
        torch.autograd.grad(torch.stack([(t**2).sum() for t in outs]).sum(), wanted) for outs in (actual, expected)
    )
    torch.testing.assert_close(given, alone)


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_a_recurrent_cell_takes_a_padded_batch_compiled_too(kind: type[nn.Module]) -> None:
    cell = kind(4, 3).double()
    compiled = torch.compile(cell, fullgraph=True, backend="aot_eager")
    for run in (cell, compiled):
        for n in (2, 3):
            source = torch.randn(n, 4, dtype=torch.float64, requires_grad=True)
            outs = [run(st.pad(source, {0: BATCH}, value=NAN)), cell(source)]
            actual, expected = (out if isinstance(out, tuple) else (out,) for out in outs)
            torch.testing.assert_close(tuple(map(real, actual)), expected)
            wanted = [source, *cell.parameters()]
            given, alone = (
                torch.autograd.grad(torch.stack([(real(t) ** 2).sum() for t in out]).sum(), wanted)
                for out in (actual, expected)
            )
            torch.testing.assert_close(given, alone)


@pytest.mark.filterwarnings("ignore")
def test_a_recurrent_network_compiles_once_for_every_length_where_the_compiler_takes_any() -> None:
    network = NETWORKS["deep LSTM, both directions"]().double()
    with torch._dynamo.config.patch(allow_rnn=True):
        compiled = torch.compile(network, fullgraph=True, backend="aot_eager")
        for i, n in enumerate((5, 8, 2)):
            source = torch.randn(2, n, 4, dtype=torch.float64)
            with torch._dynamo.config.patch(error_on_recompile=i > 0):
                outs = flat(compiled(st.pad(source, {1: SEQ}, value=NAN)))
            torch.testing.assert_close([real(t) for t in outs], flat(network(source)))
