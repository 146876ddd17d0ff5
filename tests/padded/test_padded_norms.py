"""Norms over padded dims: statistics, running ones among them, are of valid elements."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import subtensors as st
from subtensors.padded import torch_function as padded_calls

SEQ = st.Dim("seq", max=24, buckets=st.Linear(8))
BATCH = st.Dim("batch", max=8, buckets=[8])
NAN = float("nan")


def test_a_ragged_batch_is_normalised_instance_by_instance() -> None:
    rows = [torch.randn(3, n, dtype=torch.float64, requires_grad=True) for n in (5, 9, 2)]
    out = F.instance_norm(st.pad(rows, {1: SEQ}, value=NAN))
    for actual, row in zip(out.unpad(), rows, strict=True):
        expected = F.instance_norm(row[None])[0]
        torch.testing.assert_close(actual, expected)
        cotangent = torch.randn_like(expected)
        wanted = torch.autograd.grad(expected, row, cotangent)
        torch.testing.assert_close(torch.autograd.grad(actual, row, cotangent, retain_graph=True), wanted)


@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_a_constant_padded_row_leaves_the_weights_gradient_finite(norm: str) -> None:
    width = st.Dim("width", max=8, buckets=4)
    t = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    w = torch.randn(3, dtype=torch.float64, requires_grad=True)
    function = getattr(torch.nn.functional, norm)
    x = st.pad(t, {0: SEQ, 1: width}, value=NAN)
    actual = function(x, (x.shape[1],), st.pad(w, {0: width}, value=NAN), eps=0.0).unpad()
    expected = function(t, (3,), w, eps=0.0)
    torch.testing.assert_close(actual, expected)
    for a, e in zip(
        torch.autograd.grad(actual.square().sum(), [t, w]),
        torch.autograd.grad(expected.square().sum(), [t, w]),
        strict=True,
    ):
        torch.testing.assert_close(a, e)


NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm1d(4),
    "batch norm, cumulative": lambda: nn.BatchNorm1d(4, momentum=None),
    "instance norm": lambda: nn.InstanceNorm1d(4, affine=True, track_running_stats=True),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", NORMS)
def test_running_statistics_are_updated_from_valid_elements(name: str, compiled: bool, device: str) -> None:
    torch.manual_seed(0)
    norm, plain = (NORMS[name]().double().to(device) for _ in range(2))
    run = torch.compile(norm, fullgraph=True, backend="aot_eager") if compiled and "cumulative" not in name else norm
    padded_calls.fallbacks.clear()
    for training in (True, True, False):
        for rows, n in ((3, 5), (2, 7)):
            source = torch.randn(rows, 4, n, dtype=torch.float64, device=device, requires_grad=True)
            norm.train(training), plain.train(training)
            out = run(st.pad(source, {0: BATCH, 2: SEQ}, value=NAN)).unpad()
            expected = plain(source)
            torch.testing.assert_close(out, expected)
            torch.testing.assert_close(norm.state_dict(), plain.state_dict())
            wanted = [source, *norm.parameters()], [source, *plain.parameters()]
            given, alone = (
                torch.autograd.grad(o.square().sum(), w) for o, w in zip((out, expected), wanted, strict=True)
            )
            torch.testing.assert_close(given, alone)
    assert not padded_calls.fallbacks


@pytest.mark.parametrize("shape", [(6, 3), (6, 3, 6)])
def test_running_statistics_are_as_precise_as_the_values(shape: tuple[int, ...]) -> None:
    kinds = [nn.BatchNorm1d, *([nn.InstanceNorm1d] if len(shape) == 3 else [])]
    for kind in kinds:
        ours, theirs = (kind(3, track_running_stats=True, dtype=torch.float64) for _ in range(2))
        for _ in range(3):
            x = torch.randn(shape, dtype=torch.float64)
            ours(st.pad(x, {-1 if kind is nn.InstanceNorm1d else 0: SEQ}, value=NAN))
            theirs(x)
        torch.testing.assert_close(ours.running_var, theirs.running_var, rtol=1e-14, atol=0)  # tens of roundings
