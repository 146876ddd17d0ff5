"""Hugging Face's generate with decode steps that are replays gives the tokens and scores of plain generate."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import subtensors as st

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.filterwarnings("ignore")]


def gpt2(device: str) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=None, pad_token_id=0)
    return transformers.GPT2LMHeadModel(config).double().eval().to(device)


def test_decode_steps_are_replays_of_one_graph(device: str) -> None:
    model = gpt2(device)
    plain = model.forward
    run = st.bucketed(plain, {"input_ids": {1: st.Dim("new", min=1, max=1)}})
    cache = transformers.StaticCache(config=model.config, max_cache_len=32)
    options = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, "output_scores": True}
    for n in (7, 5, 9):
        ids = torch.randint(1, 50, (1, n), device=device)
        expected = model.generate(ids, **options)
        cache.reset()
        model.forward = run
        found = model.generate(ids, past_key_values=cache, **options)
        model.forward = plain
        assert torch.equal(found.sequences, expected.sequences)
        for a, b in zip(found.scores, expected.scores, strict=True):
            torch.testing.assert_close(a, b)
    stats = run.stats()
    assert stats.hits == 3 * 5 - 1
    assert list(stats.fallbacks.values()) == [3]
