"""In a bucketed program torch's functions take a padded size as the true one, with PaddedTensors and without."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from bucketed_rows import SEQ
from torch import Tensor

import subtensors as st
from subtensors.padded.host_constants import HostConstants

pytestmark = pytest.mark.usefixtures("captured")


def _written(x: Tensor) -> Tensor:
    x[..., [1, -1]] = 0
    x[:, x.argmax(1)] = 0.5
    x[x > 0.9] = 0.25
    x[0, :2] = 3
    return x


def _with_size(x: Tensor) -> Tensor:
    x = x * 1
    x[:, x[0, 0, :1].long() * 0] = x.shape[1]
    return x


def _with_table_of_the_host(x: Tensor) -> Tensor:
    table = torch.arange(4, device="cpu") / 3
    table[1:] *= torch.tensor(0.5, device="cpu")
    on_device = table.to(x.device, torch.float32)
    on_device += 1  # which a replay does once
    return x.sum(1) + on_device * torch.zeros(4, device="cpu").to(x)[:, None].cos()[:, 0]


PROGRAMS: dict[str, Callable[[Tensor], Tensor]] = {
    "a mean by hand": lambda x: x.sum(1) / x.shape[1],
    "a sum of positions": lambda x: x.sum(1) + torch.arange(x.shape[1]).sum(),
    "positions from an offset": lambda x: x.sum(1) + torch.arange(x.shape[1], 2 * x.shape[1]).sum(),
    "positions backwards": lambda x: x.sum(1) + torch.arange(x.shape[1], -x.shape[1], -1.0, dtype=torch.long).prod(),
    "every second position": lambda x: x.sum(1) + torch.arange(1, x.shape[1], 2).sum(),
    "a plain mask": lambda x: x.sum(1) + torch.ones(x.shape[:2]).cumsum(1)[:, -1:],
    "a causal mask": lambda x: x.sum(1) + torch.ones(x.shape[1], x.shape[1]).tril().sum(),
    "a filled tensor": lambda x: x.sum(1) + torch.full((x.shape[1],), 0.5).sum(),
    "a size as a keyword": lambda x: x.sum(1) + torch.ones(size=(x.shape[1], 2)).sum(),
    "a size as a tensor": lambda x: x.sum(1) * torch.tensor(x.shape[1]).rsqrt(),
    "a list of sizes as a tensor": lambda x: x.sum(1) * torch.tensor([x.shape[1], 2, 4 * x.shape[1], 1]).rsqrt(),
    "a shape as a tensor": lambda x: x.sum(1) * torch.tensor(x.shape, dtype=torch.float32).prod(),
    "a number as a tensor": lambda x: x.sum(1) * torch.tensor(0.5) + torch.tensor(2) * torch.tensor(True),
    "numbers as a tensor": lambda x: (
        x.sum(1) * torch.tensor([0.5, 2, True, -1]) + torch.as_tensor((1, 2, 3, 4)) + x.new_tensor([1, 2, 3, 4])
    ),
    "an array as a tensor": lambda x: x.sum(1) * torch.tensor(np.arange(8).reshape(2, 4), dtype=torch.float32),
    "a list of positions": lambda x: x.sum(1)[:, [-1, 0]] + x[:, [0, -1]].sum((1, 2))[[1, 0], None],
    "a list of positions of a plain tensor": lambda x: (
        x.sum(1) + torch.arange(9.0, device=x.device)[[2, 3, 5, -2]][range(4)]
    ),
    "a table that is made on the host": _with_table_of_the_host,
    "a list that is moved": lambda x: x.sum(1) + torch.tensor([0.5, 1, 2, 3], device="cpu").to(x.device),
    "positions that are made on the host": lambda x: x.sum(1)[:, torch.tensor([3, 0], device="cpu")],
    "a size that is written": lambda x: _with_size(x).sum(1),
    "numbers that are written": lambda x: _written(x.sum(1)),
    "coordinates of a flat index": lambda x: torch.stack(torch.unravel_index(x.flatten().argmax(), x.shape)),
    "coordinates in two dims": lambda x: torch.stack(torch.unravel_index(x.flatten(0, 1).argmin(0), x.shape[:2])),
    "coordinates of padded indices": lambda x: torch.unravel_index(x.flatten(1).argsort(1), x.shape[1:])[0].cumsum(1),
    "coordinates in one dim": lambda x: torch.unravel_index(x.argmax(1).int(), x.shape[1])[0],
    "a slice of a plain tensor": lambda x: x.sum(1) + torch.arange(64.0, device=x.device)[: x.shape[1]].sum(),
    "an expanded plain tensor": lambda x: x.sum(1) + torch.ones(1, 1).expand(3, x.shape[1]).sum(),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_size_given_to_a_plain_call_is_the_true_one(name: str, device: str) -> None:
    program = PROGRAMS[name]
    run = st.bucketed(program, {"x": {1: SEQ}}, check=False)
    with torch.device(device):
        for n in (5, 6, 3, 20):
            x = torch.randn(2, n, 4)
            found, expected = run(x), program(x)
            torch.testing.assert_close(found, expected)
    assert run.stats().hits == 2
    assert not run.stats().fallbacks


def test_a_tensor_of_the_host_that_others_write_to_is_read_in_each_call(device: str) -> None:
    table, numbers = torch.ones(4), np.ones(4, dtype=np.float32)

    def program(x: Tensor) -> Tensor:
        made, written = torch.zeros(4), torch.zeros(4)
        made += table
        written[1:].copy_(table[1:])
        return x.sum(1) + made.to(x.device) + written.to(x.device) + torch.from_numpy(numbers).to(x.device)

    run = st.bucketed(program, {"x": {1: SEQ}}, check=False, key=lambda x: float(numbers[0]))
    for n in (5, 6, 5, 6):
        x = torch.randn(2, n, 4, device=device)
        torch.testing.assert_close(run(x), program(x))
        table += 1
        numbers += 1


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.complex64])
def test_coordinates_of_what_is_no_index_are_refused_as_torch_refuses_them(dtype: torch.dtype, device: str) -> None:
    for program in (
        lambda x: torch.unravel_index(x.sum().to(dtype), x.shape),
        lambda x: torch.unravel_index(x.to(dtype), x.shape),
    ):
        run = st.bucketed(program, {"x": {1: SEQ}})
        with pytest.raises(TypeError, match="expected 'indices' to be integer dtype"):
            run(torch.randn(2, 5, 4, device=device))


def test_a_program_that_calls_what_has_no_rule_is_answered_by_the_plain_program(device: str) -> None:
    def program(x: Tensor) -> Tensor:
        return torch.fft.fft(x, dim=1).abs().sum(1) * (1 / x.shape[1])

    run = st.bucketed(program, {"x": {1: SEQ}}, check=False)
    graphs = run.graph_cache
    x = torch.randn(2, 5, 4, device=device)
    found = run(x)
    if graphs.pools:  # without graphs the function itself runs on the unpadded data
        torch.testing.assert_close(found, program(x))
        assert any("fft" in reason for reason in run.stats().fallbacks)


def test_memory_that_holds_what_others_may_write_to_is_no_constant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "pin_memory", Tensor.clone)
    constants = HostConstants()
    made, written = (constants.run(torch.zeros, (4,), {}) for _ in range(2))
    view = constants.run(Tensor.__getitem__, (written, slice(1, None)), {})
    constants.run(Tensor.copy_, (view, torch.ones(3)), {})
    for t in (made, written):
        constants.run(Tensor.to, (t, "meta"), {})
    assert [t.tolist() for t in constants.pinned] == [[0.0] * 4]
