"""Rules of single classes: what a table of them promises that a sweep of `op_db` does not show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import subtensors as st
from subtensors.padded import calls as padded_calls

SEQ = st.Dim("seq", max=24, buckets=st.Linear(8))
LABELS = st.Dim("labels", max=4, buckets=[4])
NAN = float("nan")


@pytest.mark.parametrize(
    ("value", "program", "fills"),
    [
        (0, lambda x: x.sum(1), 0),
        (0, lambda x: x.relu().tanh().transpose(1, 2).sum(2), 0),
        (0, lambda x: x @ x.transpose(1, 2).contiguous() @ x, 1),  # what two zeros multiply to isn't kept track of
        (-torch.inf, lambda x: x.amax(1), 0),
        (1, lambda x: x.sum(1), 1),
        (0, lambda x: x.exp().sum(1), 1),
    ],
)
def test_padding_that_is_known_to_be_neutral_is_not_filled_again(
    value: float, program: Callable[[Any], Any], fills: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Mock(wraps=torch.where)
    source = torch.randn(2, 5, 3)
    x = st.pad(source, {1: SEQ}, value=value)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "where", counted)
        out = program(x)
    assert counted.call_count == fills
    torch.testing.assert_close(out.unpad() if isinstance(out, st.PaddedTensor) else out, program(source))


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("lengths", [tuple, torch.tensor])
def test_a_ctc_loss_is_that_of_each_rows_frames_and_labels(reduction: str, lengths: Callable[[Any], Any]) -> None:
    frames, labels = (5, 9, 7), (2, 3, 1)
    rows = [torch.randn(n, 6, dtype=torch.float64, requires_grad=True) for n in frames]
    targets = [torch.randint(1, 6, (n,)) for n in labels]
    alone = torch.stack(
        [
            F.ctc_loss(row.log_softmax(-1), target, torch.tensor(n), torch.tensor(m), reduction="none")
            for row, target, n, m in zip(rows, targets, frames, labels, strict=True)
        ]
    )
    expected = {"none": alone, "sum": alone.sum(), "mean": (alone / torch.tensor(labels)).mean()}[reduction]
    scores = st.pad(rows, {0: SEQ}, value=NAN).log_softmax(-1).transpose(0, 1)
    padded_calls.fallbacks.clear()
    actual = F.ctc_loss(
        scores, st.pad(targets, {0: LABELS}, value=10**6), lengths(frames), lengths(labels), reduction=reduction
    )
    assert not padded_calls.fallbacks
    actual = actual.unpad() if isinstance(actual, st.PaddedTensor) else actual
    torch.testing.assert_close(actual, expected)
    wanted = torch.autograd.grad(expected.sum(), rows)
    torch.testing.assert_close(torch.autograd.grad(actual.sum(), rows), wanted)


@pytest.mark.parametrize(
    ("split", "bounds"),
    [
        (lambda x: x.split([1, 2, 5], 1), (0, 1, 3, None)),
        (lambda x: torch.split_with_sizes(x, [6, 2], 1), (0, 6, None)),
        (lambda x: torch.tensor_split(x, (2, 4), 1), (0, 2, 4, None)),
    ],
    ids=["split", "split_with_sizes", "tensor_split"],
)
def test_parts_of_a_padded_dim_end_where_the_data_does(
    split: Callable[[Any], Any], bounds: tuple[int | None, ...]
) -> None:
    rows = [torch.randn(n, 3, dtype=torch.float64, requires_grad=True) for n in (5, 7, 1)]
    padded_calls.fallbacks.clear()
    parts = split(st.pad(rows, {0: SEQ}, value=NAN))
    assert not padded_calls.fallbacks
    for part, start, stop in zip(parts, bounds[:-1], bounds[1:], strict=True):
        for actual, row in zip(part.unpad(), rows, strict=True):
            torch.testing.assert_close(actual, row[start:stop])
            (gradient,) = torch.autograd.grad(actual.sum(), row, retain_graph=True)
            assert gradient.sum() == actual.numel()


def test_parts_whose_number_depends_on_the_size_are_those_of_the_logical_data() -> None:
    source = torch.randn(2, 3)
    x = st.pad(source, {1: SEQ}, value=NAN)
    for parts, expected in ((x.split(2, 1), source.split(2, 1)), (x.chunk(2, 1), source.chunk(2, 1))):
        assert len(parts) == len(expected)
        for actual, wanted in zip(parts, expected, strict=True):
            torch.testing.assert_close(actual, wanted)


def test_values_that_occur_are_those_of_real_elements() -> None:
    source = torch.tensor([[3, 1, 3], [1, 1, 2]])
    x = st.pad(source, {1: SEQ}, value=10**6)
    for function in (torch.unique, torch.unique_consecutive, torch.bincount, torch.nonzero):
        given = (source.flatten(), x.flatten()) if function is torch.bincount else (source, x)
        expected, actual = (function(t) for t in given)
        torch.testing.assert_close(actual, expected)


def test_a_ragged_batch_is_normalised_instance_by_instance() -> None:
    rows = [torch.randn(3, n, dtype=torch.float64, requires_grad=True) for n in (5, 9, 2)]
    out = F.instance_norm(st.pad(rows, {1: SEQ}, value=NAN))
    for actual, row in zip(out.unpad(), rows, strict=True):
        expected = F.instance_norm(row[None])[0]
        torch.testing.assert_close(actual, expected)
        cotangent = torch.randn_like(expected)
        wanted = torch.autograd.grad(expected, row, cotangent)
        torch.testing.assert_close(torch.autograd.grad(actual, row, cotangent, retain_graph=True), wanted)


def test_positions_made_of_a_padded_size_are_real_where_the_data_is() -> None:
    source = torch.randn(2, 5, 3)
    x = st.pad(source, {1: SEQ}, value=NAN)
    positions, table = torch.arange(x.shape[1]), torch.randn(24, 3)
    torch.testing.assert_close((x + table[positions]).unpad(), source + table[:5])
    torch.testing.assert_close((x + F.embedding(positions, table)).mean(1), (source + table[:5]).mean(1))
    assert torch.arange(x.count(1)).tolist() == list(range(5))


@pytest.mark.parametrize(
    "factory",
    [
        torch.zeros_like,
        torch.ones_like,
        torch.rand_like,
        lambda t: torch.full_like(t, 2.0),
        lambda t: t.new_ones(t.shape),
    ],
)
def test_what_a_factory_makes_of_a_padded_tensor_is_padded_alike(factory: Callable[[Any], Any]) -> None:
    x = st.pad([torch.ones(5), torch.ones(3)], {0: SEQ})
    assert factory(x).logical_shape == x.logical_shape
    assert (factory(x) > -1).sum() == 8


def test_an_out_argument_takes_the_result_and_its_padding() -> None:
    source = torch.randn(2, 5)
    x, out = st.pad(source, {1: SEQ}, value=NAN), st.pad(torch.zeros(2, 5), {1: SEQ}, value=7)
    assert torch.exp(x, out=out) is out
    torch.testing.assert_close(out.unpad(), source.exp())
    plain = torch.empty(2)
    assert torch.sum(x, 1, out=plain) is plain
    torch.testing.assert_close(plain, source.sum(1))
    # A plain one holds no padding, so it is written on the logical data.
    plain = torch.empty(2, 5)
    torch.exp(x, out=plain)
    torch.testing.assert_close(plain, source.exp())


def test_nan_in_the_padding_of_either_operand_of_a_contraction_goes_nowhere() -> None:
    a, b = (torch.randn(*size, dtype=torch.float64, requires_grad=True) for size in ((2, 5), (5, 3)))
    product = st.pad(a, {1: SEQ}, value=NAN) @ st.pad(b, {0: SEQ}, value=torch.inf)
    torch.testing.assert_close(product, a @ b)
    wanted: tuple[Tensor, ...] = torch.autograd.grad((a @ b).square().sum(), [a, b])
    torch.testing.assert_close(torch.autograd.grad(product.square().sum(), [a, b]), wanted)


@pytest.mark.parametrize("pool", [F.adaptive_avg_pool1d, F.adaptive_max_pool1d])
def test_a_pool_down_to_one_position_is_over_the_real_ones(pool: Callable[..., Any]) -> None:
    rows = [torch.randn(3, n, dtype=torch.float64, requires_grad=True) for n in (5, 9, 2)]
    padded_calls.fallbacks.clear()
    out = pool(st.pad(rows, {1: SEQ}, value=NAN), 1).unpad()
    assert not padded_calls.fallbacks
    expected = torch.stack([pool(row, 1) for row in rows])
    torch.testing.assert_close(out, expected)
    wanted = torch.autograd.grad(expected.square().sum(), rows)
    torch.testing.assert_close(torch.autograd.grad(out.square().sum(), rows), wanted)
