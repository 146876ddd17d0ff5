"""The debug mode for sizes: arithmetic on a padded size warns, and positions in the padding raise."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import subtensors as st

SEQ = st.Dim("seq", max=24, buckets=st.Linear(8))


def test_arithmetic_on_a_padded_size_warns_with_its_line() -> None:
    x = st.pad(torch.ones(2, 5), {1: SEQ})
    with warnings.catch_warnings(record=True) as caught, st.watch_size_arithmetic():
        warnings.simplefilter("always")
        _ = x.sum() / x.shape[1]
        _ = x.size(1) * 2
        _ = 1 / x.size()[1]
        _ = torch.ones(x.shape[1])
        _ = x.sum() / x.numel()
        expected = len(caught)
        _ = x.view(x.shape[0], x.shape[1], 1)[:, : x.shape[1] - 1]
        _ = x.sum() / x.shape[0]
        _ = x.sum() / x.count(1)
    assert expected == 5
    assert len(caught) == expected
    assert all(issubclass(w.category, st.PaddedSizeWarning) for w in caught)
    assert all(Path(w.filename).name == Path(__file__).name for w in caught)
    lines = Path(__file__).read_text().splitlines()
    assert "x.sum() / x.shape[1]" in lines[caught[0].lineno - 1]
    assert "the bucket of dim 1 (true size seq)" in str(caught[0].message)


INDEXING: dict[str, Callable[[Any, Tensor], Any]] = {
    "a list of positions": lambda x, i: x[:, i],
    "index_select": lambda x, i: x.index_select(1, i),
    "gather": lambda x, i: x.gather(1, i.expand(2, -1)),
    "take_along_dim": lambda x, i: x.take_along_dim(i[None], 1),
    "rows and positions": lambda x, i: x[torch.zeros_like(i), i],
    "scatter": lambda x, i: x.scatter(1, i.expand(2, -1), 0.0),
    "index_fill": lambda x, i: x.index_fill(1, i, 0.0),
}


@pytest.mark.parametrize("name", INDEXING)
@pytest.mark.parametrize("lengths", [(5, 5), (5, 7)])
def test_positions_beyond_the_true_size_raise_in_the_mode(name: str, lengths: tuple[int, int]) -> None:
    rows = [torch.randn(n) for n in lengths]
    x = st.pad(rows, {0: SEQ}) if len(set(lengths)) > 1 else st.pad(torch.stack(rows), {1: SEQ})
    index = INDEXING[name]
    index(x, torch.arange(6))
    with st.watch_size_arithmetic():
        index(x, torch.arange(5))
        with pytest.raises(IndexError, match="position 5 of dim 1 is padding"):
            index(x, torch.arange(6))


def test_outside_of_the_mode_a_size_is_a_plain_int() -> None:
    x = st.pad(torch.ones(2, 5), {1: SEQ})
    assert type(x.shape[1]) is int
