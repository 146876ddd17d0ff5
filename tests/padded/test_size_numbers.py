"""Programs that compute with `x.shape`: each is right, refused, or warns with its line, however it is run."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import subtensors as st

SEQ = st.Dim("n", max=64, buckets=[8, 16])
TABLE = torch.randn(64, 4, dtype=torch.float64)
WEIGHT = torch.randn(4, 4, 3, dtype=torch.float64)
GRID = torch.eye(2, 3, dtype=torch.float64).expand(2, 2, 3)
HALF = torch.randn(2, 4, 3, dtype=torch.float64)

Program = Callable[[Any], Any]


def on(x: Any, table: Tensor) -> Tensor:
    """A table on the device of a tensor."""
    return table if x.device == table.device else table.to(x.device)


UNDERSTOOD: dict[str, Program] = {
    "a maximum pooled over all": lambda x: F.max_pool1d(x.mT, x.shape[1]).squeeze(-1),
    "a mean pooled over all": lambda x: F.avg_pool1d(x.mT, x.shape[1]).squeeze(-1),
    "an image's mean": lambda x: F.avg_pool2d(x[:, None], x.shape[1:]).flatten(),
    "an image's maximum": lambda x: F.max_pool2d(x[:, None], (x.shape[1], 4)).flatten(),
    "interpolated exactly": lambda x: F.interpolate(x.mT[..., 1:], size=x.shape[1] * 2 - 1, mode="nearest-exact"),
    "an interpolated image": lambda x: F.interpolate(x[:, None], size=(x.shape[1] + 2, 7), mode="bilinear"),
    "interpolated to a size": lambda x: F.interpolate(x.mT[..., ::2], size=x.shape[1]).mT + x,
    "interpolated linearly": lambda x: F.interpolate(x.mT[..., ::2], size=x.shape[1], mode="linear").mT + x,
    "pooled to a size": lambda x: F.adaptive_avg_pool1d(x.mT, x.shape[1] - 1),
    "windows of a size": lambda x: x.unfold(1, x.shape[1], 1).sum(-1).sum(1),
    "a remainder": lambda x: x * (x.shape[1] % 3),
    "divided by the size": lambda x: x / x.shape[1],
    "all but the last": lambda x: x[:, : x.shape[1] - 1].sum(1),
    "the last": lambda x: x[:, x.shape[1] - 1],
    "the second half": lambda x: x[:, x.shape[1] // 2 :].sum(1),
    "the last n of two n": lambda x: torch.cat([x, x * 2], 1)[:, -x.shape[1] :],
    "narrow": lambda x: x.narrow(1, 0, x.shape[1] - 1).sum(1),
    "the rest of a split": lambda x: x.split(x.shape[1] - 1, 1)[1],
    "a causal convolution": lambda x: F.conv1d(x.mT, on(x, WEIGHT), padding=2)[..., : x.shape[1]].mean(-1),
    "a view": lambda x: x.view(2, x.shape[1] * 2, 2).sum(1),
    "a reshape": lambda x: x.reshape(2 * x.shape[1], 4).sum(0),
    "expanded": lambda x: x[:, :1].expand(2, x.shape[1], 4).sum(1),
    "repeated": lambda x: x[:, :1].repeat(1, x.shape[1], 1).sum(1),
    "rolled": lambda x: x.roll(x.shape[1] - 1, 1).cumsum(1),
    "padded up to a size": lambda x: F.pad(x, (0, 0, 0, 16 - x.shape[1])).sum(1),
    "padded by the size": lambda x: F.pad(x, (0, 0, x.shape[1], 0))[:, x.shape[1] :],
    "the largest n - 1": lambda x: x.topk(x.shape[1] - 1, 1).values.sum(1),
    "normalized over the size": lambda x: F.layer_norm(x.mT, (x.shape[1],)).mT,
}
"""Programs that are right in eager mode without a warning."""

WARNED: dict[str, Program] = {
    "a plain signal of n": lambda x: torch.fft.irfft(on(x, TABLE)[:5], n=x.shape[1], dim=0).sum(0) + x.sum(1),
    "a signal of its spectrum": lambda x: torch.fft.irfft(torch.fft.rfft(x, dim=1), n=x.shape[1], dim=1),
    "a plain tensor interpolated": lambda x: F.interpolate(on(x, HALF), size=x.shape[1]).sum(-1) + x.sum(1),
    "a grid": lambda x: F.affine_grid(on(x, GRID), (2, 1, x.shape[1], 4), False).sum((1, 2)) + x.sum(1)[:, :2],
    "a window": lambda x: x * torch.hann_window(x.shape[1], dtype=x.dtype, device=x.device)[:, None],
    "the last n of a table": lambda x: x + on(x, TABLE)[-x.shape[1] :],
    "the first n of a table": lambda x: x + on(x, TABLE)[: x.shape[1]],
    "a reversed table": lambda x: x + on(x, TABLE)[: x.shape[1]].flip(0),
    "len": lambda x: x.sum(1) / len(x[0]),
    "a plain tensor times a remainder": lambda x: x.sum(1) * (x.shape[1] % 4),
    "a comparison": lambda x: x * 2 if x.shape[1] > 7 else x,
    "an equality": lambda x: x * 2 if x.shape[1] == 8 else x,
    "a truth value": lambda x: x * 2 if x.shape[1] - 5 else x,
    "a key": lambda x: x * {3: 1, 5: 2, 6: 3, 7: 4, 8: 5}[x.shape[1]],
    "a maximum of sizes": lambda x: x.sum(1) / max(x.shape[1], 6),
    "a mean": lambda x: x.sum(1) / x.shape[1],
    "a mean of all": lambda x: x.sum() / x.numel(),
    "a mean in place": lambda x: x.sum(1).div_(x.size(1)),
    "one over the size": lambda x: x.sum(1) * (1 / x.shape[1]),
    "a root": lambda x: x * x.shape[1] ** -0.5,
    "a root by math": lambda x: x * math.sqrt(x.shape[1]),
    "a float": lambda x: x.sum(1) / float(x.shape[1]),
    "a tensor": lambda x: x.sum(1) / torch.tensor(x.shape[1]),
    "a tensor of a float": lambda x: x.sum(1) / torch.tensor(float(x.shape[1])),
    "rounded": lambda x: x * round(x.shape[1] / 2),
    "bits": lambda x: x * (x.shape[1] | 1),
    "shifted bits": lambda x: x * (x.shape[1] >> 1),
    "divmod": lambda x: x * divmod(x.shape[1], 2)[0],
    "a repeated list": lambda x: x.sum(1) + sum([1.0] * x.shape[1]),
    "positions": lambda x: x + torch.arange(x.shape[1], device=x.device)[:, None],
    "summed positions": lambda x: x.sum(1) + torch.arange(x.shape[1]).sum(),
    "reversed positions": lambda x: x * torch.arange(x.shape[1] - 1, -1, -1, device=x.device)[:, None],
    "a line": lambda x: x * torch.linspace(0, 1, x.shape[1], dtype=x.dtype, device=x.device)[:, None],
    "summed ones": lambda x: x.sum(1) + torch.ones(2, x.shape[1], device=x.device).sum(1, keepdim=True),
    "a triangle": lambda x: torch.ones(x.shape[1], x.shape[1], dtype=x.dtype, device=x.device).tril() @ x,
    "a scale": lambda x: F.scaled_dot_product_attention(x, x, x, scale=1 / x.shape[1]),
    "a plain tensor expanded": lambda x: on(x, TABLE)[:1].expand(x.shape[1], 4).sum(0) + x.sum(1),
    "a plain tensor repeated": lambda x: on(x, TABLE)[:1].repeat(x.shape[1], 1).sum(0) + x.sum(1),
    "a plain tensor chosen": lambda x: torch.where(x.sum(1) > 0, x.sum(1), x.shape[1]),
    "a plain tensor clamped": lambda x: (x.sum(1) * 10).clamp(max=x.shape[1]),
    "taken from the size": lambda x: x.shape[1] - x.sum(1),
}
"""Programs that give the bucket's result in eager mode, or may, and warn."""

ALL = UNDERSTOOD | WARNED

IN_GRAPHS = [name for name in UNDERSTOOD if "pooled over all" in name or "image" in name or "interpolated" in name]


def rows(n: int, device: str) -> Tensor:
    return torch.randn(2, n, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(n)).to(device)


def is_right(program: Program, found: Any, x: Tensor) -> bool:
    wanted, found = program(x), found.unpad() if isinstance(found, st.PaddedTensor) else found
    return found.shape == wanted.shape and torch.allclose(found.double(), wanted.double())


def watched(program: Program, x: Tensor) -> tuple[Any, list[warnings.WarningMessage]]:
    """Run a program in the debug mode; return its result and the mode's warnings."""
    with warnings.catch_warnings(record=True) as caught, st.watch_size_arithmetic():
        warnings.simplefilter("always", st.PaddedSizeWarning)
        found = program(st.pad(x, {1: SEQ}))
    return found, [w for w in caught if issubclass(w.category, st.PaddedSizeWarning)]


def has_line(caught: list[warnings.WarningMessage], name: str) -> bool:
    lines = Path(__file__).read_text().splitlines()
    return any(Path(w.filename) == Path(__file__) and f'"{name}"' in lines[w.lineno - 1] for w in caught)


@pytest.mark.parametrize("name", UNDERSTOOD)
@pytest.mark.parametrize("n", [3, 5, 8])
def test_a_size_that_a_call_takes_is_the_true_one_and_does_not_warn(name: str, n: int, device: str) -> None:
    found, caught = watched(UNDERSTOOD[name], rows(n, device))
    assert is_right(UNDERSTOOD[name], found, rows(n, device))
    assert not caught


@pytest.mark.parametrize("name", WARNED)
def test_a_number_that_may_be_the_buckets_warns_with_its_line(name: str, device: str) -> None:
    _, caught = watched(WARNED[name], rows(5, device))
    assert has_line(caught, name)


@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize("name", ALL)
def test_a_bucketed_program_computes_with_true_sizes_or_is_found_out(name: str, device: str) -> None:
    run = st.bucketed(ALL[name], {0: {1: SEQ}})
    for n in (5, 7, 6, 3, 5):
        assert is_right(ALL[name], run(rows(n, device)), rows(n, device)), f"at {n}"


@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize("name", [name for name in UNDERSTOOD if name in IN_GRAPHS])
def test_pools_over_a_whole_dim_and_interpolations_to_a_size_are_computed_in_graphs(name: str, device: str) -> None:
    run = st.bucketed(UNDERSTOOD[name], {0: {1: SEQ}})
    for n in (5, 7, 3):
        x = rows(n, device).requires_grad_()
        assert is_right(UNDERSTOOD[name], run(x.detach()), x.detach())
        gradients = [torch.autograd.grad(f(x).square().sum(), x)[0] for f in (run, UNDERSTOOD[name])]
        torch.testing.assert_close(*gradients)
    assert not run.stats().fallbacks


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "linear"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_an_interpolation_to_another_tensors_size_reads_the_positions_that_torch_does(
    mode: str, dtype: torch.dtype, device: str
) -> None:
    own, error, torchs = st.Dim("m", max=64, buckets=64), 0.0, 0.0
    for n, m in itertools.product(range(1, 40, 3), repeat=2):
        x = torch.randn(1, 2, n, dtype=torch.float64, generator=torch.Generator().manual_seed(n)).to(device, dtype)
        y = st.pad(torch.zeros(m, device=device), {0: own})
        found = F.interpolate(st.pad(x, {2: st.Dim("n", max=64, buckets=64)}), size=y.shape[0], mode=mode).unpad()
        expected, truth = (F.interpolate(t, size=m, mode=mode) for t in (x, x.double()))
        if mode != "linear":
            assert torch.equal(found, expected), (n, m)
        error = max(error, (found - truth).abs().max().item())
        torchs = max(torchs, (expected - truth).abs().max().item())
    assert error <= 1.5 * torchs


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "linear"])
def test_infinite_values_reach_only_those_positions_of_an_interpolation_that_read_them(mode: str, device: str) -> None:
    x = torch.zeros(1, 1, 6).index_fill_(2, torch.tensor(3), -torch.inf).to(device)
    y = st.pad(torch.zeros(4, device=device), {0: st.Dim("m", max=8, buckets=8)})
    found = F.interpolate(st.pad(x, {2: st.Dim("n", max=8, buckets=8)}), size=y.shape[0], mode=mode).unpad()
    assert torch.equal(found, F.interpolate(x, size=4, mode=mode))


@pytest.mark.parametrize("name", ALL)
def test_compiled_code_is_right_or_warns_with_the_line_where_the_bucket_takes_the_place_of_a_size(
    name: str, device: str
) -> None:
    program, x = ALL[name], rows(5, device)
    compiled = torch.compile(program, backend="aot_eager")
    _, caught = watched(compiled, x)
    if caught:
        assert has_line(caught, name)
        return
    torch._dynamo.reset()
    assert is_right(program, compiled(st.pad(x, {1: SEQ})), x)
