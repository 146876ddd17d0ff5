"""The debug mode: sizes that only Python or a plain tensor gets warn, and so do positions in the padding."""

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
PLAIN = torch.randn(8, 3)

LEAKS: dict[str, Callable[[Any], Any]] = {
    "a division of plain numbers": lambda x: 1 / x.shape[1],
    "a plain tensor divided": lambda x: x.sum() / x.shape[1],
    "all elements": lambda x: x.sum() / x.numel(),
    "a root": lambda x: x.size(1) ** 0.5,
    "ones": lambda x: torch.ones(x.shape[1]),
    "arange": lambda x: torch.arange(x.size()[1]),
    "a window": lambda x: torch.hann_window(x.shape[1]),
    "full": lambda x: PLAIN.new_full((x.shape[1],), 1.0),
    "expand": lambda x: PLAIN[:1].expand(x.shape[1], 3),
    "interpolate": lambda x: torch.nn.functional.interpolate(PLAIN[None], size=x.shape[1]),
    "irfft": lambda x: torch.fft.irfft(PLAIN, n=x.shape[1]),
    "the end of a plain tensor": lambda x: PLAIN[-x.shape[1] :],
    "len": lambda x: len(x.t()),
    "a comparison": lambda x: 1 if x.shape[1] > 6 else 0,
    "a comparison with zero": lambda x: 1 if x.shape[1] % 8 == 0 else 0,
    "a branch": lambda x: 1 if x.shape[1] % 8 else 0,
    "a loop": lambda x: [1 for _ in range(4) if not (x.shape[1] - 8)],
}


@pytest.mark.parametrize("name", LEAKS)
def test_a_size_that_becomes_a_plain_number_warns_with_its_line(name: str, device: str) -> None:
    x = st.pad(torch.ones(2, 5).to(device), {1: SEQ})
    with warnings.catch_warnings(record=True) as caught, st.watch_size_arithmetic():
        warnings.simplefilter("always")
        LEAKS[name](x)
    assert caught
    assert all(issubclass(w.category, st.PaddedSizeWarning) for w in caught)
    assert all(Path(w.filename).name == Path(__file__).name for w in caught)
    assert f'"{name}"' in Path(__file__).read_text().splitlines()[caught[0].lineno - 1]
    assert "the bucket of " in str(caught[0].message)


def test_a_size_that_was_read_before_the_mode_warns_in_it() -> None:
    x = st.pad(torch.ones(2, 5), {1: SEQ})
    assert x.shape == (2, 8)
    with pytest.warns(st.PaddedSizeWarning), st.watch_size_arithmetic():
        _ = 1 / x.shape[1]


def test_sizes_that_are_understood_do_not_warn(device: str) -> None:
    x = st.pad(torch.ones(2, 5).to(device), {1: SEQ})
    with warnings.catch_warnings(), st.watch_size_arithmetic():
        warnings.simplefilter("error")
        _ = x.view(x.shape[0], x.shape[1], 1)[:, : x.shape[1] - 1]
        _ = x.sum() / x.shape[0]
        _ = x.sum() / x.count(1)
        _ = x / x.shape[1]
        _ = x[:, x.shape[1] // 2 :]
        _ = 1 if x.shape[1] else 0, 1 if x.shape[1] % 3 else 0
        _ = x.shape[1] > 3, x.shape[1] == 9, x.shape == (2, 3)
        _ = f"{x.shape[1]} {x.shape[1]:>4}"


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
def test_positions_beyond_the_true_size_warn_in_the_mode(name: str, lengths: tuple[int, int], device: str) -> None:
    rows = [torch.randn(n).to(device) for n in lengths]
    x = st.pad(rows, {0: SEQ}) if len(set(lengths)) > 1 else st.pad(torch.stack(rows), {1: SEQ})
    index = INDEXING[name]
    index(x, torch.arange(6, device=device))
    with warnings.catch_warnings(), st.watch_size_arithmetic():
        warnings.simplefilter("error")
        index(x, torch.arange(5, device=device))
        with pytest.raises(st.PaddedSizeWarning, match="position 5 of dim 1 is padding"):
            index(x, torch.arange(6, device=device))


def test_the_mode_runs_an_unmodified_model_with_an_attention_mask(device: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.MistralConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=32,
    )
    model = transformers.MistralForCausalLM(config).eval().to(device)
    ids, mask = torch.randint(3, 50, (2, 5)).to(device), torch.tensor([[0, 1, 1, 1, 1]] * 2, device=device)
    plain = model(input_ids=ids, attention_mask=mask).logits
    with warnings.catch_warnings(), st.watch_size_arithmetic():
        warnings.simplefilter("ignore", st.PaddedSizeWarning)
        padded = model(input_ids=st.pad(ids, {1: SEQ}), attention_mask=st.pad(mask, {1: SEQ})).logits
    torch.testing.assert_close(padded.unpad()[:, 1:], plain[:, 1:])


def test_outside_of_the_mode_a_size_is_an_int_to_python(device: str) -> None:
    x = st.pad(torch.ones(2, 5).to(device), {1: SEQ})
    assert isinstance(x.shape[1], int)
    assert (x.shape, x.shape[1], {8: "a"}[x.shape[1]], f"{x.shape[1]}") == ((2, 8), 8, "a", "8")


def test_sizes_of_a_ragged_and_of_a_uniform_batch_are_compared() -> None:
    ragged = st.pad([torch.ones(n) for n in (3, 2, 4)], {0: SEQ})
    uniform = st.pad(torch.ones(2, 3), {1: st.Dim("other", max=24, buckets=st.Linear(8))})
    with warnings.catch_warnings(), st.watch_size_arithmetic():
        warnings.simplefilter("ignore", st.PaddedSizeWarning)
        assert ragged.shape[1] == uniform.shape[1]
        assert uniform.shape[1] >= ragged.shape[1]
        assert not ragged.shape[1] < uniform.shape[1]


@pytest.mark.parametrize(("others", "warns"), [((4, 1), True), ((2, 2), False)])
def test_sizes_of_ragged_batches_of_other_numbers_of_rows_are_compared_each_with_each(
    others: tuple[int, int], warns: bool
) -> None:
    own = st.pad([torch.ones(n) for n in (5, 3, 5, 3)], {0: SEQ})
    other = st.pad([torch.ones(n) for n in others], {0: st.Dim("other", max=24, buckets=st.Linear(4))})
    with warnings.catch_warnings(record=True) as seen, st.watch_size_arithmetic():
        warnings.simplefilter("always")
        assert own.shape[1] > other.shape[1]
    assert bool(seen) == warns
