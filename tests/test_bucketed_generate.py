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


@pytest.mark.parametrize("device", ["cpu"])  # on a GPU it falls back, see docs/bucketed.md
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
    assert [("beyond its max of 1" in reason, count) for reason, count in stats.fallbacks.items()] == [(True, 3)], stats
    assert stats.hits == 3 * 5 - 1


@torch.no_grad()
def test_a_cache_that_is_returned_is_the_callers_own(device: str) -> None:
    model = gpt2(device)
    run = st.bucketed(model, {"input_ids": {1: st.Dim("seq", max=64, buckets=16)}})
    held = []
    for n in (7, 5, 20, 9):
        ids = torch.randint(1, 50, (1, n), device=device)
        held.append((run(input_ids=ids).past_key_values, model(input_ids=ids).past_key_values))
    for found, expected in held:
        assert type(found) is type(expected)
        for a, b in zip(found.layers, expected.layers, strict=True):
            torch.testing.assert_close((a.keys, a.values), (b.keys, b.values))
    # It goes on from there, as the model's own does; one that grows is no part of a graph's key.
    for found, expected in held:
        step = torch.ones(1, 1, dtype=torch.long, device=device)
        actual = run(input_ids=step, past_key_values=found)
        torch.testing.assert_close(actual.logits, model(input_ids=step, past_key_values=expected).logits)
    assert len(run._visits) == 4
    assert any("DynamicCache" in reason for reason in run.stats().fallbacks)


@torch.no_grad()
def test_an_encoder_and_a_decoder_of_different_lengths(device: str) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0))
    model = model.double().eval().to(device)
    dims = {"input_ids": {1: st.Dim("seq", max=32, buckets=16)}, "labels": {1: st.Dim("out", max=32, buckets=8)}}
    run = st.bucketed(model, dims)
    for n, m in ((9, 5), (10, 3), (20, 8), (9, 20)):
        ids, labels = torch.randint(1, 50, (2, n), device=device), torch.randint(1, 50, (2, m), device=device)
        found, expected = run(input_ids=ids, labels=labels), model(input_ids=ids, labels=labels)
        torch.testing.assert_close(found.logits, expected.logits, rtol=1e-5, atol=1e-6)  # T5's norms are in float32
        torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=1e-6)
    assert not run.stats().fallbacks
