"""Selections by value and parts of a padded dim: as of the logical data, without unpadding it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import subtensors as st
from subtensors.padded import torch_function as padded_calls

SEQ = st.Dim("seq", max=16, buckets=[8, 16])
BATCH = st.Dim("batch", max=4, buckets=[4])
NAN = float("nan")
PLANS: dict[str, dict[int, st.Dim | int]] = {"a dim": {1: SEQ}, "the batch": {0: BATCH}, "both": {0: BATCH, 1: SEQ}}

BY_VALUE: dict[str, Callable[[Any], Any]] = {
    "nonzero": lambda x: (x > 0).nonzero(),
    "nonzero as a tuple": lambda x: (x > 0).nonzero(as_tuple=True),
    "argwhere": lambda x: torch.argwhere(x > 0),
    "where of a condition": lambda x: torch.where(x > 0),
    "so many of nonzero": lambda x: torch.nonzero_static(x > 0, size=6),
    "masked_select": lambda x: torch.masked_select(x, x > 0),
    "masked_select, broadcast": lambda x: torch.masked_select(x, (x > 0)[:, :1]),
    "a mask of all dims": lambda x: x[x > 0],
    "a mask of the first dims": lambda x: x[x.detach()[..., 0] > 0],
    "masked_scatter": lambda x: x.masked_scatter(x > 0, torch.arange(60, dtype=x.dtype, device=x.device)),
    "masked_scatter of a padded one": lambda x: x.masked_scatter(x > 0, x * 2),
    "unique": lambda x: x.detach().round().unique(),
    "unique, and where": lambda x: torch.unique(x.detach().round(), return_inverse=True, return_counts=True),
    "unique_consecutive": lambda x: torch.unique_consecutive(
        x.detach().round(), return_inverse=True, return_counts=True
    ),
    "unique slices": lambda x: torch.unique(
        x.detach().round().clamp(-1, 0), dim=1, return_inverse=True, return_counts=True
    ),
    "unique samples": lambda x: torch.unique(x.detach().round(), dim=0, return_inverse=True),
    "runs of slices": lambda x: torch.unique_consecutive(
        x.detach().round().clamp(-1, 0), dim=1, return_inverse=True, return_counts=True
    ),
    "bincount": lambda x: torch.bincount(x.detach().abs().long().flatten()),
    "bincount with weights": lambda x: torch.bincount(x.detach().abs().long().flatten(), x.detach().flatten()),
    "isin": lambda x: torch.isin(x.detach().round(), torch.tensor([0, 1], dtype=x.dtype, device=x.device)),
    "isin a padded one": lambda x: torch.isin(
        torch.arange(-2.0, 3, dtype=x.dtype, device=x.device), x.detach().round()
    ),
    "isin, both padded": lambda x: torch.isin(x.detach().round(), x.detach().round()[0], invert=True),
}

PARTS: dict[str, Callable[[Any], Any]] = {
    "split": lambda x: x.split(2, 1),
    "split, some left": lambda x: torch.split(x, 3, dim=1),
    "split and back": lambda x: torch.cat(x.split(2, 1)[::-1], 1),
    "sums of a split": lambda x: [part.sum(1) for part in x.split(2, 1)],
    "chunk": lambda x: x.chunk(2, 1),
    "fewer chunks": lambda x: torch.chunk(x, 4, 1),
    "more chunks than positions": lambda x: x.chunk(7, 1),
    "tensor_split": lambda x: x.tensor_split(3, 1),
    "more sections than positions": lambda x: x.tensor_split(9, 1),
    "unbind": lambda x: x.unbind(1),
    "iteration": lambda x: list(x.transpose(0, 1)),
}

OTHERS: dict[str, Callable[[Any], Any]] = {
    "diff": lambda x: x.diff(dim=1),
    "diff, twice": lambda x: x.diff(n=2, dim=1),
    "diff after something": lambda x: x.diff(dim=1, prepend=x[:, :1]),
    "diff of bools": lambda x: (x > 0).diff(dim=1),
    "diagonal": lambda x: x.diagonal(0, 1, 2),
    "diagonal above": lambda x: x.diagonal(1, 1, 2),
    "diagonal below": lambda x: x.diagonal(-2, 1, 2),
    # Of a matrix with more rows than columns some versions of torch have a wrong gradient.
    "trace": lambda x: x[0].T.trace(),
    "distances": lambda x: torch.cdist(x, x + 1),
    "distances to plain points": lambda x: torch.cdist(x, torch.ones(4, 3, dtype=x.dtype, device=x.device), p=1),
    "bilinear": lambda x: torch.nn.functional.bilinear(x, x * 2, torch.ones(2, 3, 3, dtype=x.dtype, device=x.device)),
    "positions of a max pool": lambda x: torch.nn.functional.max_pool2d(x[:, None], (2, 1), return_indices=True),
    "power mean pool": lambda x: torch.nn.functional.lp_pool1d(x.abs().mT, 2, 2),
    "less the first position": lambda x: x - x[:, :1],
    "times the last position": lambda x: x * x[:, -1:],
    "the first position's products": lambda x: x[:, :1] @ x.mT,
}
PROGRAMS = BY_VALUE | PARTS | OTHERS


def flat(outs: Any) -> list[Any]:
    return [t for out in outs for t in flat(out)] if isinstance(outs, (tuple, list)) else [outs]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_selection_equals_that_of_the_unpadded_data(name: str, plan: str, device: str) -> None:
    for poison in (NAN, 1e30):
        source = torch.randn(2, 5, 3, dtype=torch.float64, device=device, requires_grad=True)
        expected = flat(PROGRAMS[name](source))
        padded_calls.fallbacks.clear()
        outs = flat(PROGRAMS[name](st.pad(source, PLANS[plan], value=poison)))
        assert not padded_calls.fallbacks
        actual = [out.unpad() if isinstance(out, st.PaddedTensor) else out for out in outs]
        assert len(actual) == len(expected)
        for a, e in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, e)
        followed = [i for i, e in enumerate(expected) if e.requires_grad and e.numel()]
        if followed:
            weights = [torch.randn_like(expected[i]) for i in followed]
            (given,), (wanted,) = (
                torch.autograd.grad([results[i] for i in followed], source, weights) for results in (actual, expected)
            )
            torch.testing.assert_close(given, wanted)


def test_values_are_selected_from_all_rows_of_a_ragged_batch() -> None:
    rows = [torch.randn(n, 3, dtype=torch.float64) for n in (5, 7, 3)]
    x = st.pad(rows, {0: SEQ}, value=NAN)
    together = torch.cat(rows)
    assert x[x > 0].equal(together[together > 0])
    assert x[x[..., 0] > 0].equal(together[together[:, 0] > 0])
    at = (x > 0).nonzero()
    assert [i.tolist() for i in at.split([int((row > 0).sum()) for row in rows])] == [
        [[b, *position] for position in (row > 0).nonzero().tolist()] for b, row in enumerate(rows)
    ]
    values, inverse, counts = torch.unique(x.round(), return_inverse=True, return_counts=True)
    expected = torch.unique(together.round(), return_inverse=True, return_counts=True)
    assert values.equal(expected[0])
    assert torch.cat(inverse.unpad()).equal(expected[1])
    assert counts.equal(expected[2])


def test_padded_tensors_are_equal_if_their_valid_elements_are() -> None:
    rows = [torch.randn(n, 3) for n in (5, 7, 3)]
    x, y = st.pad(rows, {0: SEQ}, value=NAN), st.pad(rows, {0: SEQ}, value=1.0)
    assert torch.equal(x, y)
    assert torch.allclose(x, y * (1 + 1e-7))
    assert not torch.equal(x, y + 1)
    assert not torch.allclose(x, y + 1)


def test_batchmean_over_a_batch_without_padding_divides_by_its_size() -> None:
    rows, others = ([torch.randn(n, 3, dtype=torch.float64) for n in (5, 7, 3)] for _ in range(2))
    x, y = (st.pad(values, {0: SEQ}, value=NAN) for values in (rows, others))
    divergence = torch.nn.functional.kl_div
    actual = divergence(x.log_softmax(-1), y.softmax(-1), reduction="batchmean")
    total = divergence(torch.cat(rows).log_softmax(-1), torch.cat(others).softmax(-1), reduction="sum")
    torch.testing.assert_close(actual, total / 3)
    source = torch.randn(2, 5, 3)
    padded = st.pad(source, {0: BATCH}, value=NAN).log_softmax(-1)
    expected = divergence(source.log_softmax(-1), source.softmax(-1), reduction="batchmean")
    torch.testing.assert_close(divergence(padded, source.softmax(-1), reduction="batchmean"), expected)


def test_explain_distinguishes_rules_that_need_values_from_the_fallback() -> None:
    x = st.pad(torch.ones(2, 5), {1: SEQ})
    assert "by a rule, in eager mode alone" in st.explain(torch.nonzero, x)
    assert "by a rule, in eager mode alone" in st.explain(torch.split, x, 2, 1)
    assert "on the unpadded data" in st.explain(torch.renorm, x, 2, 0, 1.0)


def test_a_ragged_batch_is_split_row_by_row() -> None:
    rows = [torch.randn(n, 3, dtype=torch.float64) for n in (5, 7, 3)]
    x = st.pad(rows, {0: SEQ}, value=NAN)
    for i, part in enumerate(x.chunk(3, 1)):
        assert all(a.equal(row.chunk(3)[i]) for a, row in zip(part.unpad(), rows, strict=True))
    for i, part in enumerate(x.tensor_split(4, 1)):
        assert all(a.equal(row.tensor_split(4)[i]) for a, row in zip(part.unpad(), rows, strict=True))
    for refused in (lambda: x.split(2, 1), lambda: x.unbind(1), lambda: x.chunk(7, 1)):
        with pytest.raises(st.RuleError, match="differs from row to row"):
            refused()


def test_sections_compile_once_for_every_length() -> None:
    def program(x: Any) -> list[Tensor]:
        return [part.sum(1) for part in x.tensor_split(3, 1)]

    compiled = torch.compile(program, fullgraph=True, backend="aot_eager")
    seq = st.Dim("seq", max=8, buckets=[8])
    for i, n in enumerate((5, 8, 2)):
        t = torch.randn(2, n, 3, dtype=torch.float64)
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            torch.testing.assert_close(compiled(st.pad(t, {1: seq}, value=NAN)), program(t))


@pytest.mark.parametrize(
    "program", [lambda x: (x > 0).nonzero(), lambda x: x[x > 0], lambda x: x.unique(), lambda x: x.split(2, 1)[0]]
)
def test_calls_that_depend_on_values_or_sizes_raise_in_compiled_code(program: Callable[[Any], Any]) -> None:
    x = st.pad(torch.randn(2, 5), {1: SEQ})
    with pytest.raises(Exception, match=r"the length of its result|the number of parts"):
        torch.compile(program, fullgraph=True, backend="aot_eager")(x)


@pytest.mark.parametrize(("dtype", "end"), [(torch.float32, 2.0**25), (torch.float64, 2.0**60)])
def test_a_histogram_of_large_bins_has_no_padding_in_the_last_one(dtype: torch.dtype, end: float) -> None:
    x = torch.tensor([1.0, 2.0, end], dtype=dtype)
    counted = torch.histc(st.pad(x, {0: SEQ}, value=end), bins=4, min=0, max=end)
    assert torch.equal(counted, torch.histc(x, bins=4, min=0, max=end))
