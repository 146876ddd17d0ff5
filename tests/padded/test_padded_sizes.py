"""Sizes of a PaddedTensor that reach an op as numbers: they mean the true size."""

from __future__ import annotations

import copy
import io
import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import subtensors as st

SEQ = st.Dim("n", max=64, buckets=[8, 16])
BUCKET = 8
NAN = float("nan")
W3 = torch.randn(4, 4, 3, dtype=torch.float64)


def padded(x: Tensor, d: int = 1, value: float = NAN) -> st.PaddedTensor:
    return st.pad(x, {d: SEQ}, value=value)


def outcome(program: Callable[[Any], Any], x: Any) -> Any:
    """What a program returns, unpadded; the kind of error where it raises."""
    try:
        out = program(x)
    except (RuntimeError, IndexError, ValueError, ZeroDivisionError) as error:
        return error
    return out.unpad() if isinstance(out, st.PaddedTensor) else out


def assert_same(program: Callable[[Any], Any], n: int, also_refuses: bool = True) -> None:
    """Check that a program returns what it returns unpadded, or refuses; with `also_refuses` where that one does."""
    x = torch.randn(2, n, 4, dtype=torch.float64)
    for value in (NAN, 0.0):  # of the padding: undefined, or known
        _assert_same(outcome(program, x), outcome(program, padded(x, value=value)), n, also_refuses)


def _assert_same(wanted: Any, found: Any, n: int, also_refuses: bool) -> None:
    if isinstance(wanted, Exception) and (n == 0 or not also_refuses):
        return  # Torch has no convolution or pooling of nothing; rules have.
    if isinstance(wanted, Exception) or isinstance(found, st.RuleError):
        assert isinstance(found, Exception), f"at {n}: {wanted}, got {getattr(found, 'shape', found)}"
        return
    assert not isinstance(found, Exception), f"at {n}: {found!r}"
    torch.testing.assert_close(found, wanted, msg=lambda m: f"at {n}: {m}")


def filled_buffer(x: Any) -> Tensor:
    buffer = torch.zeros(x.shape[0], 64, 4, dtype=x.dtype)
    buffer[:, : x.shape[1]] = x
    return buffer.sum(1)


def causal(x: Any) -> Tensor:
    h = x.transpose(1, 2)
    return F.conv1d(h, W3, padding=2)[..., : h.shape[-1]].mean(-1)


def gate(x: Any) -> Tensor:
    h = x.transpose(1, 2)
    return h * F.conv1d(h, W3, padding=2)[..., : h.shape[-1]]


def written_to_last(x: Any) -> Tensor:
    y = x.clone()
    y[:, x.shape[1] - 1] = 0
    return y


def written_to_half(x: Any) -> Tensor:
    y = x.clone()
    y[:, : x.shape[1] // 2] = 7
    return y


PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "a plain buffer": filled_buffer,
    "a causal convolution": causal,
    "a gated causal convolution": gate,
    "all but the last by its number": lambda x: x[:, : x.shape[1] - 1],
    "the last by its number": lambda x: x[:, x.shape[1] - 1],
    "the first half": lambda x: x[:, : x.shape[1] // 2],
    "the second half": lambda x: x[:, x.shape[1] // 2 :],
    "the last n": lambda x: F.pad(x, (0, 0, 2, 0))[:, -x.shape[1] :],
    "shifted": lambda x: F.pad(x, (0, 0, 1, 0))[:, : x.shape[1]] + x,
    "narrow": lambda x: F.pad(x, (0, 0, 1, 1)).narrow(1, 1, x.shape[1]) * x,
    "written to its last": written_to_last,
    "written to its first half": written_to_half,
    "divided by its size": lambda x: x / x.shape[1],
    "less than its size": lambda x: (x + 1).clamp(max=x.shape[1]) < x.size(1),
    "multiplied by all elements": lambda x: x * x.numel(),
    "expanded": lambda x: x[:, :, :1].expand(2, x.shape[1], 4) + x,
    "expanded twice": lambda x: x[:, :, 0][:, None].expand(2, x.shape[1], x.shape[1]).sum(1),
    "expanded and summed": lambda x: x[:, :1].expand(2, x.shape[1], 4).sum(1),
    "repeated": lambda x: x.sum(1, keepdim=True).mul(x[:, :1]).repeat(1, x.shape[1], 1) + x,
    "new zeros": lambda x: x.new_zeros(x.shape[0], x.shape[1]) + x[..., 0],
    "new ones": lambda x: x.new_ones(x.shape[1] + 1, 3).sum(0),
    "interpolated to its size": lambda x: F.interpolate(x.transpose(1, 2)[..., ::2], size=x.shape[1]),
    "pooled over its size": lambda x: F.max_pool1d(x.transpose(1, 2), x.shape[1]).squeeze(-1),
    "padded by its size": lambda x: F.pad(x, (0, 0, 0, x.shape[1])),
    "padded to a size": lambda x: F.pad(x, (0, 0, 0, 16 - x.shape[1])).sum(1),
    "padded to a multiple": lambda x: F.pad(x, (0, 0, 0, -x.shape[1] % 4)).view(2, -1, 4, 4).sum(2),
    "a view that only fits by its bucket": lambda x: x.repeat(1, 1, 2).reshape(-1, x.shape[1]),
    "a signal of its spectrum": lambda x: torch.fft.irfft(x, n=x.shape[1], dim=1),
    "split into halves": lambda x: torch.cat([x, x], 1).split([x.shape[1], x.shape[1]], 1)[1],
    "rolled by its size": lambda x: x.roll(x.shape[1] - 1, 1),
    "flattened": lambda x: x.reshape(x.shape[0] * x.shape[1], 4).sum(0),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_size_given_as_a_number_means_the_true_size(name: str) -> None:
    for n in range(BUCKET + 1):
        assert_same(PROGRAMS[name], n)


REFUSED_AT_SOME_SIZES = {"a view that only fits by its bucket"}


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in REFUSED_AT_SOME_SIZES])
def test_none_of_these_is_refused_where_the_true_size_is_known(name: str) -> None:
    x = torch.randn(2, 5, 4, dtype=torch.float64)
    assert not isinstance(outcome(PROGRAMS[name], padded(x)), st.RuleError)


STEPS: dict[str, Callable[[Any, int], Any]] = {
    "slice": lambda x, k: x[:, : x.shape[1] - k],
    "slice from": lambda x, k: x[:, x.shape[1] // (k + 1) :],
    "narrow": lambda x, k: x.narrow(1, min(k, 1), x.shape[1] - min(k, 1)),
    "pad": lambda x, k: F.pad(x, (0, 0, k, 1)),
    "pad by size": lambda x, k: F.pad(x, (0, 0, k, x.shape[1])),
    "conv": lambda x, k: F.conv1d(x.mT, W3[:, :, :1].expand(4, 4, k + 1), padding=k)[..., : x.shape[1]].mT,
    "pool": lambda x, k: F.avg_pool1d(x.mT, k + 1).mT,
    "pool over all": lambda x, k: F.max_pool1d(x.mT, x.shape[1]).mT,
    "interpolate": lambda x, k: F.interpolate(x.mT, size=x.shape[1] + k).mT,
    "expand": lambda x, k: x[:, :, :1].expand(2, x.shape[1], 4) * x,
    "view": lambda x, k: x.reshape(2, x.shape[1], 2, 2).flatten(2),
    "zeros": lambda x, k: torch.cat([x, x.new_zeros(2, x.shape[1] + k, 4)], 1),
    "divide": lambda x, k: x / (x.shape[1] + k),
    "last": lambda x, k: x + x[:, x.shape[1] - 1, None],
}


@settings(deadline=None, max_examples=25)
@given(
    steps=strategies.lists(
        strategies.tuples(strategies.sampled_from(sorted(STEPS)), strategies.integers(0, 2)), min_size=1, max_size=4
    )
)
def test_chains_of_ops_that_take_sizes_give_the_unpadded_result(steps: list[tuple[str, int]]) -> None:
    def program(x: Any) -> Any:
        for name, k in steps:
            x = STEPS[name](x, k)
        return x

    for n in range(BUCKET + 1):
        assert_same(program, n, also_refuses=False)


def test_compiled_code_takes_the_end_of_a_causal_convolution_as_the_true_one() -> None:
    compiled = torch.compile(gate, fullgraph=True, backend="aot_eager")
    for n in (1, 5, 8):
        x = torch.randn(2, n, 4, dtype=torch.float64)
        torch.testing.assert_close(compiled(padded(x)).unpad(), gate(x))


@pytest.mark.parametrize("name", ["a causal convolution", "all but the last by its number", "divided by its size"])
def test_a_bucketed_program_takes_sizes_as_true_ones(name: str) -> None:
    run = st.bucketed(PROGRAMS[name], {0: {1: SEQ}})
    for n in (5, 1, 8, 3):
        x = torch.randn(2, n, 4, dtype=torch.float64)
        torch.testing.assert_close(run(x), PROGRAMS[name](x))
    assert not run.stats().fallbacks


def test_modes_that_see_ops_run_inside_modules() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4)).double()
    net.append(torch.nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0).double())
    x = torch.randn(2, 5, 4, dtype=torch.float64)
    with FlopCounterMode(display=False) as counter:
        out = net(padded(x))
        out.sum().backward()
    torch.testing.assert_close(out.unpad(), net(x))
    assert counter.get_total_flops() > 0


def test_a_true_size_of_one_is_not_broadcast_over_a_bucket() -> None:
    buffer = torch.zeros(2, 8, 4, dtype=torch.float64)
    with pytest.raises(st.RuleError, match="broadcast a true size of 1"):
        buffer[:, :8] = padded(torch.ones(2, 1, 4, dtype=torch.float64))


def test_a_size_reaches_gradients_and_a_views_base() -> None:
    x = torch.randn(2, 5, 4, dtype=torch.float64)
    grads = []
    for pad in (lambda t: t, padded):
        leaf = x.clone().requires_grad_()
        out = gate(pad(leaf))
        (out.unpad() if isinstance(out, st.PaddedTensor) else out).square().sum().backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(grads[1], grads[0])
    y = padded(x)
    y[:, : y.shape[1] - 1].mul_(0)
    assert y.unpad().count_nonzero() == 8


def test_a_ragged_batch_takes_sizes_row_by_row() -> None:
    rows = [torch.randn(n, 4, dtype=torch.float64) for n in (1, 3, 6)]
    x = st.pad(rows, {0: SEQ}, value=NAN)
    for found, row in zip(x[:, : x.shape[1] - 1].unpad(), rows, strict=True):
        torch.testing.assert_close(found, row[:-1])
    for found, row in zip(gate(x).unpad(), rows, strict=True):
        torch.testing.assert_close(found, gate(row[None])[0])
    with pytest.raises(st.RuleError, match="row"):
        x / x.shape[1]


def test_a_size_is_copied_and_pickled_as_an_int() -> None:
    size = padded(torch.ones(2, 5)).shape[1]
    assert type(pickle.loads(pickle.dumps(size))) is int
    assert copy.deepcopy({"n": size}) == {"n": 8}


def test_a_number_is_found_in_a_ragged_batch() -> None:
    x = st.pad([torch.ones(3), torch.ones(5)], {0: SEQ})
    assert 0 not in x
    assert 1 in x


def test_dir_of_a_padded_tensor_lists_its_own_names() -> None:
    assert {"mask", "unpad", "logical_shape"} <= set(dir(padded(torch.ones(2, 5))))


def test_a_padded_tensor_is_loaded_with_weights_only() -> None:
    x = F.conv1d(padded(torch.randn(1, 4, 5, dtype=torch.float64), 2), W3, stride=2)
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert loaded._dims == x._dims
    torch.testing.assert_close(loaded.unpad(), x.unpad())


def test_a_users_own_error_is_torchs_and_nothing_is_logged_before_it(caplog: pytest.LogCaptureFixture) -> None:
    x = padded(torch.randn(2, 5, 4))
    with caplog.at_level(logging.WARNING, "subtensors"):
        with pytest.raises(RuntimeError) as raised:
            torch.linalg.lu_solve(x, x, x)
        with pytest.raises(TypeError, match="missing 1 required positional"):
            torch.matmul(x)  # type: ignore[call-overload]
    assert not isinstance(raised.value, st.RuleError)
    assert raised.value.__context__ is None
    assert not caplog.records


def test_a_bool_takes_no_wider_sum_in_place() -> None:
    x = st.pad(torch.ones(2, 5, dtype=torch.bool), {1: SEQ})
    with pytest.raises(RuntimeError, match="can't be cast"):
        x += 1


@pytest.mark.parametrize("value", [NAN, 0.0])
def test_copies_as_many_as_a_padded_size_are_padded_beyond_the_true_number(value: float) -> None:
    plain, count = torch.arange(6.0).view(2, 3) + 1, torch.ones(4, 5)
    x, n = padded(plain, value=value), st.pad(count, {1: st.Dim("m", max=8, buckets=[8])}).shape[1]
    assert torch.equal(outcome(lambda x: x.repeat(n, 1).sum(0), x), plain.repeat(5, 1).sum(0))
    assert torch.equal(outcome(lambda x: x.repeat(1, n).cumsum(1), x), plain.repeat(1, 5).cumsum(1))
    assert isinstance(x.repeat(1, n), st.PaddedTensor)


@pytest.mark.parametrize("value", [NAN, 0.0])
@pytest.mark.parametrize("take", [lambda x, y: x.expand_as(y), lambda x, y: torch.broadcast_tensors(x, y)[0]])
def test_values_that_are_broadcast_over_a_padded_dim_are_no_padding_of_it(take: Any, value: float) -> None:
    row, table = torch.arange(3.0) + 1, torch.ones(5, 3)
    y = st.pad(table, {0: st.Dim("m", max=8, buckets=[8]), 1: SEQ}, value=value)
    found = take(padded(row, 0, value), y).sum(0)
    assert torch.equal(found.unpad(), 5 * row)
