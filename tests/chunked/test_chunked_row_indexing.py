"""Rows that a mask or an index selects from chunked values are rechunked, such as the tokens that count."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from chunked_programs import Allocations, check_chunked
from torch import Tensor

import subtensors as st
from subtensors.chunked import record_call

ROWS, HIDDEN, VOCAB = 12, 6, 20


def case() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    return {
        "h": torch.randn(ROWS, HIDDEN, generator=g),
        "w": torch.randn(VOCAB, HIDDEN, generator=g),
        "b": torch.randn(VOCAB, generator=g),
        "target": torch.randint(0, VOCAB, (ROWS,), generator=g),
        "mask": torch.rand(ROWS, generator=g) > 0.4,
    }


def hidden_states(h: Tensor, w: Tensor, b: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(h[mask], w, b), target[mask])


def logits(h: Tensor, w: Tensor, b: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    scores = F.linear(h, w, b).to(torch.promote_types(h.dtype, torch.float32))
    return F.cross_entropy(scores[mask], target[mask], label_smoothing=0.1)


def capped(h: Tensor, w: Tensor, b: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    scores = 3 * torch.tanh((h @ w.t()) / 3) / 0.7
    return F.cross_entropy(scores[mask, :], target[mask]) + b.sum()


def by_positions(h: Tensor, w: Tensor, b: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    places = mask.nonzero()[:, 0].flip(0).repeat(2)
    scores = F.linear(h, w, b)
    picked = scores[places].log_softmax(-1).gather(-1, target[places][:, None])
    return picked.square().mean() + scores.index_select(0, places).logsumexp(-1).mean()


def of_sequences(h: Tensor, w: Tensor, b: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    scores = F.linear(h.view(3, 4, HIDDEN), w, b)[:, :-1]
    labels, counted = target.view(3, 4)[:, 1:], mask.view(3, 4)[:, 1:]
    return F.cross_entropy(scores[counted], labels[counted])


def other_dims(h: Tensor, w: Tensor, b: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    scores = F.linear(h, w, b) * 1
    allowed = b > 0
    kept = scores[:, allowed].logsumexp(-1)
    scores[:, ~allowed] = -5.0
    scores[:, [1, 3]] += 0.5
    return (scores.logsumexp(-1) - kept).square().mean() + scores.t()[allowed].mean()


def margins(h: Tensor, w: Tensor, b: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    scores = F.linear(F.normalize(h), F.normalize(w))
    scores[torch.arange(ROWS), target] -= 0.35
    scores[[-1, 4, 4], [1, 0, 0]] = 0.25
    return F.cross_entropy(8 * scores, target) + b.sum()


def of_each_element(h: Tensor, w: Tensor, b: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    return F.linear(h, w, b)[F.one_hot(target, VOCAB).bool()].mean()


PROGRAMS = [hidden_states, logits, capped, by_positions, of_sequences, other_dims, margins, of_each_element]


@pytest.mark.parametrize("rows", [1, 5, 12])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_selected_rows_give_the_same_results_as_on_plain_tensors(program: Any, dtype: torch.dtype, rows: int) -> None:
    check_chunked(program, case(), {"h": {"rows": rows}}, dtype=dtype, passes=2)


@pytest.mark.parametrize("program", PROGRAMS[:-1], ids=lambda p: p.__name__)
def test_logits_of_selected_rows_are_never_in_memory_in_full(program: Any) -> None:
    record_call.fallbacks.clear()
    values = {n: t.requires_grad_(t.is_floating_point()) for n, t in case().items()}
    with Allocations() as seen:
        program(**{**values, "h": st.chunk(values["h"], rows=2)}).backward()
    assert not record_call.fallbacks
    assert seen.largest <= max(4 * VOCAB, HIDDEN * VOCAB)


BATCH, LENGTH = 3, 8


def batch() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    return {
        "h": torch.randn(BATCH, LENGTH, HIDDEN, generator=g),
        "w": torch.randn(4 * VOCAB, HIDDEN, generator=g),
        "target": torch.randint(0, 4 * VOCAB, (BATCH, LENGTH), generator=g),
    }


def sequence_by_sequence(h: Tensor, w: Tensor, target: Tensor) -> Tensor:
    """Log-probabilities as preference losses take them, so that no more than a sequence of logits is copied."""
    scores = F.linear(h, w)
    sums = torch.stack([torch.logsumexp(sequence, dim=-1) for sequence in scores])
    shifted = (scores.gather(-1, target[..., None]).squeeze(-1) - sums).sum(1)
    each = [
        sequence.log_softmax(-1).gather(-1, labels[:, None]).squeeze(-1)
        for sequence, labels in zip(scores / 0.7, target, strict=True)
    ]
    return F.logsigmoid(shifted + torch.stack(each).sum(1)).mean()


def some_sequences(h: Tensor, w: Tensor, target: Tensor) -> Tensor:
    counted = torch.tensor([True, False, True])
    scores = 4 * torch.tanh(F.linear(h, w) / 4)
    loss = F.cross_entropy(scores[counted].flatten(0, 1), target[counted].flatten())
    return loss + scores[torch.tensor([2, 0])].logsumexp(-1).square().mean() + h[counted].mean()


def first_and_last(h: Tensor, w: Tensor, target: Tensor) -> Tensor:
    scores = 4 * torch.tanh(F.linear(h, w) / 4)
    first = F.cross_entropy(scores[0], target[0], reduction="none")
    return (
        (first * torch.arange(LENGTH)).mean() + F.cross_entropy(scores.select(0, -1)[1:], target[-1][:-1]) + h[1].mean()
    )


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("program", [sequence_by_sequence, first_and_last, some_sequences])
def test_sequences_of_a_batch_give_the_same_results_as_on_plain_tensors(
    program: Any, dtype: torch.dtype, rows: int
) -> None:
    check_chunked(program, batch(), {"h": {"rows": rows}}, dtype=dtype, passes=3)


@pytest.mark.parametrize("program", [sequence_by_sequence, first_and_last])
def test_logits_of_a_batch_are_never_in_memory_in_full_when_iterating_over_sequences(program: Any) -> None:
    record_call.fallbacks.clear()
    values = {n: t.requires_grad_(t.is_floating_point()) for n, t in batch().items()}
    with Allocations() as seen:
        program(**{**values, "h": st.chunk(values["h"], rows=1)}).backward()
    assert not record_call.fallbacks
    assert seen.largest <= LENGTH * 4 * VOCAB


@pytest.mark.parametrize("change", [lambda x: x * 1, lambda x: F.linear(x, torch.eye(3))], ids=["product", "layer"])
def test_writes_to_a_sequence_and_to_its_batch_are_seen_by_each_other(change: Any) -> None:
    x = torch.arange(24.0).view(4, 2, 3)
    found = []
    for h in (st.chunk(x, rows=1), x.clone()):
        scores = change(h)
        one, (first, *_) = scores[1], scores.unbind()
        scores.mul_(2)
        one[0] = -1.0
        found.append([one.tolist(), first.tolist(), scores.tolist()])
    assert found[0] == found[1]


@pytest.mark.parametrize("pick", [lambda x: x[0], lambda x: x[torch.tensor([True, False, True])], lambda x: x + 0])
def test_backward_hooks_of_rows_run_before_the_backward_of_selected_rows(pick: Any) -> None:
    t = batch()
    logits = F.linear(st.chunk(t["h"].requires_grad_(), rows=1), t["w"])
    seen: list[Tensor] = []
    logits._ref.value.layout.axis.add_backward_hook(lambda gradient: seen.append(gradient) or gradient)  # type: ignore[attr-defined]
    loss = pick(logits).logsumexp(-1).sum()
    assert not seen
    loss.backward()
    assert len(seen) == 1


def test_an_empty_selection_of_rows_is_that_of_torch() -> None:
    h, w = torch.randn(4, 3, requires_grad=True), torch.randn(5, 3, requires_grad=True)
    nothing = torch.zeros(4, dtype=torch.bool)
    for x in (h, st.chunk(h, rows=2)):
        loss = F.cross_entropy(F.linear(x, w)[nothing], torch.zeros(0, dtype=torch.long), reduction="sum")
        loss.backward()
        assert loss == 0
        assert w.grad is not None
        assert not w.grad.any()


@pytest.mark.parametrize("row", [12, -13])
def test_an_index_out_of_range_is_torchs_own_error(row: int) -> None:
    x = torch.randn(12, 3)

    def read(x: Tensor) -> float:
        return x.exp()[[0, row], [1, 1]].sum().item()

    def write(x: Tensor) -> list[float]:
        x = x * 1
        x[[0, row], [1, 1]] = 2.0
        return x.tolist()  # type: ignore[no-any-return]

    for program in (read, write):
        with pytest.raises(IndexError) as expected:
            program(x)
        with pytest.raises(IndexError) as found:
            program(st.chunk(x, rows=5))
        assert str(found.value) == str(expected.value)


def test_selected_rows_are_chunked_like_the_input() -> None:
    x = st.chunk(torch.randn(6, 4, 3), rows=2)
    picked = x[torch.ones(6, 4, dtype=torch.bool)]
    assert "3 chunks of 8 of 24 rows" in st.explain(picked * 2)
