"""What a GPU would refuse to capture has no replays on a CPU either, and the reason names the read and its line."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import pytest
import torch
from bucketed_rows import DIMS, rows
from torch import Tensor, nn
from torch.nn import functional as F

import subtensors as st

weight = torch.linspace(-1, 1, 3, dtype=torch.float64)


def is_capturing() -> bool:
    """Ask as models do; a torch without CUDA refuses to answer."""
    try:
        return torch.cuda.is_current_stream_capturing()
    except RuntimeError:
        return False


READS: dict[str, Callable[[Tensor], Tensor]] = {
    "torch.Tensor.item": lambda x: x.sum(0) * (x.sum().item() > 0),
    "torch.Tensor.tolist": lambda x: x.sum(0) * len(x.sum(0).tolist()),
    "torch.Tensor.__bool__": lambda x: x.sum(0) if x.sum() > 0 else -x.sum(0),
    "torch.Tensor.cpu": lambda x: x.sum(0) + x.sum(0).cpu().abs().to(x.device),
    "torch.Tensor.numpy": lambda x: x.sum(0) * float(x.detach().sum(0).cpu().numpy().max()),
    "torch.Tensor.__getitem__": lambda x: x[x > 0].sum(),
    "torch.nonzero": lambda x: x.sum(0) * len(torch.nonzero(weight > 0)),
    "torch.masked_select": lambda x: x.sum(0) + torch.masked_select(weight, weight > 0).sum(),
    "torch.nn.functional.one_hot": lambda x: x.sum(0) + F.one_hot((weight > 0).long()).sum(),
    "torch.Tensor.split": lambda x: x.split(2)[0].sum(0),
    "torch.equal": lambda x: x.sum(0) * torch.equal(weight, weight.clone()),
}


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("grad", [False, True])
def test_a_program_that_reads_values_on_the_host_is_not_replayed(
    name: str, grad: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "weight", weight.to(device))
    program = READS[name]
    run = st.bucketed(program, DIMS)
    for n in (5, 5, 6, 20):
        x = rows(n, device).requires_grad_(grad)
        torch.testing.assert_close(run(x), program(x))
    stats = run.stats()
    assert stats.hits == 0
    assert stats.fallbacks
    if device == "cpu":
        reads = {"torch.Tensor.numpy": "torch.Tensor.cpu"}.get(name, name)
        assert all(reason.startswith(f"{reads} reads values on the host") for reason in stats.fallbacks)
        assert all(f"{__file__}:" in reason for reason in stats.fallbacks)
        assert all("keep it on the device" in reason for reason in stats.fallbacks)


WITHOUT: dict[str, Callable[[Tensor], Tensor]] = {
    "a mask is filled": lambda x: x.masked_fill(x > 0, 1).sum(0),
    "a mask is written to": lambda x: x.sum(0) + _filled(weight),
    "a quantile": lambda x: x.sum(0) + torch.quantile(weight, torch.tensor([0.5], dtype=weight.dtype)),
    "a quantile of padded rows": lambda x: x.quantile(0.5, 0),
    "a move to where it is": lambda x: x.to(x.device).sum(0),
    "a capture is asked for": lambda x: x.sum(0) * (is_capturing() or bool(x.sum() != 0)),
}


def _filled(x: Tensor) -> Tensor:
    filled = x.clone()
    filled[x > 0] = 2.0
    return filled


@pytest.mark.parametrize("name", WITHOUT)
@torch.no_grad()
def test_what_reads_nothing_on_the_host_is_replayed(name: str) -> None:
    run = st.bucketed(WITHOUT[name], DIMS)
    for n in (5, 5, 6):
        x = rows(n, "cpu")
        torch.testing.assert_close(run(x), WITHOUT[name](x))
    assert run.stats().hits == 2
    assert not run.stats().fallbacks
    assert not is_capturing()


@torch.no_grad()
def test_a_number_that_is_written_under_a_mask_needs_no_copy_to_the_device(device: str) -> None:
    run = st.bucketed(_filled, DIMS)
    for n in (5, 5, 6):
        x = rows(n, device)
        torch.testing.assert_close(run(x), _filled(x))
    assert run.stats().hits == 2
    assert not run.stats().fallbacks


def test_a_step_that_reads_its_loss_is_taken_once_a_call_and_not_replayed(device: str) -> None:
    def step_of(net: nn.Module) -> Callable[[Tensor], Tensor]:
        opt = st.optim.SGD(net.parameters(), lr=0.1)

        def step(x: Tensor) -> Tensor:
            loss = net(x).square().sum()
            loss.backward()
            if loss.item() < 1e9:
                opt.step()
            opt.zero_grad()
            return loss.detach()  # type: ignore[no-any-return]

        return step

    torch.manual_seed(0)
    net = nn.Linear(3, 3, device=device, dtype=torch.float64)
    alone = nn.Linear(3, 3, device=device, dtype=torch.float64)
    alone.load_state_dict(net.state_dict())
    run, plain = st.bucketed(step_of(net), DIMS), step_of(alone)
    for n in (5, 6, 5):
        x = rows(n, device)
        torch.testing.assert_close(run(x), plain(x))
        torch.testing.assert_close(net.weight, alone.weight)
    assert run.stats().hits == 0


def test_another_thread_is_not_told_of_a_capture() -> None:
    told = []

    def program(x: Tensor) -> Tensor:
        thread = threading.Thread(target=lambda: told.append(is_capturing()))
        thread.start()
        thread.join()
        return x.sum(0)

    st.bucketed(program, DIMS, check=False)(rows(5, "cpu"))
    assert told == [False]


@torch.no_grad()
def test_a_first_answer_that_no_graph_follows_is_compared_too(device: str) -> None:
    def program(x: Tensor) -> Tensor:
        return x.sum(0) / len(x.detach().mul(1).shape) * float(x.sum().item() != 0) / int(x.shape[0])

    run = st.bucketed(program, DIMS)
    x = rows(5, device)
    torch.testing.assert_close(run(x), program(x))
    assert any("its results differ" in reason for reason in run.stats().fallbacks)
    assert run.stats().calls == 1


labels = torch.zeros(5, dtype=torch.int64)

UNPADDED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "torch.linalg.qr": (lambda x: torch.linalg.qr(x).R.sum(), "it combines valid positions with padding"),
    "torch.nn.functional.cross_entropy": (
        lambda x: F.cross_entropy(x, labels),
        "a dim of bucket n (true size seq) cannot be combined with an unpadded dim of n: pad that tensor",
    ),
}


@pytest.mark.parametrize("name", UNPADDED)
@torch.no_grad()
def test_a_call_on_unpadded_data_is_not_called_a_read_of_values(name: str) -> None:
    program, why = UNPADDED[name]
    run = st.bucketed(program, DIMS, check=False)
    for _ in range(2):
        run(rows(5, "cpu"))
    (reason,) = run.stats().fallbacks
    assert reason.startswith(f"{name} runs on the unpadded data, whose size a graph doesn't know ({__file__}:")
    assert why in reason
    assert "keep it on the device" not in reason
