"""Hugging Face's generate through padded prompts and replayed decode steps gives what plain generate gives."""

from __future__ import annotations

import inspect
import itertools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import small_models
import torch

import subtensors as st
from subtensors.bucketed import call_cache
from subtensors.bucketed.bucket import Bucket
from subtensors.bucketed.generation import CACHE_NAMES

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.filterwarnings("ignore")]

SEQ = st.Dim("seq", max=48, buckets=16)
TOKENS = {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0}
SCORED = {"max_new_tokens": 6, "return_dict_in_generate": True, "output_scores": True}

CACHE = next(name for name in CACHE_NAMES if name in inspect.signature(transformers.GPT2Model.forward).parameters)
"""The name of the argument that is a cache."""


def gpt2(device: str, layers: int = 2) -> Any:
    return prepared(small_models.gpt2(n_layer=layers, **TOKENS), device)


def llama(device: str, kind: str = "Llama") -> Any:
    heads = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    windows = {"sliding_window": 8} if kind == "Mistral" else {}
    return prepared(small_models.llama(kind, **heads, **windows, **TOKENS), device)


def t5(device: str, layers: int = 2) -> Any:
    return prepared(small_models.t5(num_layers=layers, **TOKENS), device)


def bart(device: str) -> Any:
    sizes = {"vocab_size": 50, "d_model": 16, "max_position_embeddings": 64, "forced_eos_token_id": None}
    each = {"layers": 2, "attention_heads": 2, "ffn_dim": 32}
    parts = {f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in each.items()}
    config = transformers.BartConfig(**sizes, **parts, **TOKENS, decoder_start_token_id=0)
    return prepared(transformers.BartForConditionalGeneration(config), device)


def prepared(model: Any, device: str) -> Any:
    return model.double().eval().to(device)


def bloom(device: str) -> Any:
    sizes = {"vocab_size": 50, "hidden_size": 16, "n_layer": 1, "n_head": 2}
    return prepared(transformers.BloomForCausalLM(transformers.BloomConfig(**sizes, **TOKENS)), device)


MODELS = {"gpt2": gpt2, "llama": llama, "bloom": bloom, "t5": t5, "bart": bart}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "samples": {"do_sample": True, "num_return_sequences": 2},
}


def check(model: Any, run: Any, ids: torch.Tensor, **options: Any) -> None:
    """The same tokens and scores, from the same random numbers."""
    answers = []
    for generate in (model.generate, run.generate):
        torch.manual_seed(1)
        answers.append(generate(ids, **SCORED, **options))
    expected, found = answers
    assert torch.equal(found.sequences, expected.sequences)
    for a, b in zip(found.scores, expected.scores, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)  # scores are float32, as T5's norms are


# The sweep over models that generate (`model_sweep/generation.py`) tries all of them in each way.
PAIRS = [("llama", "beams"), ("bloom", "greedy"), ("t5", "samples")]


@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize(("name", "way"), [*itertools.product(["gpt2", "bart"], WAYS), *PAIRS])
def test_prompts_of_every_length_are_continued_as_by_the_model(name: str, way: str, device: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name](device)
    run = st.bucketed(model, {"input_ids": {1: SEQ}})
    plain = model.forward
    for n in (7, 20, 9):
        ids = torch.randint(3, 50, (2, n), device=device)
        check(model, run, ids, **WAYS[way])
        mask = torch.ones_like(ids)
        mask[0, :3] = 0
        check(model, run, ids, attention_mask=mask if name in ("gpt2", "llama", "bloom") else mask.flip(1), **WAYS[way])
    assert model.forward == plain
    for part in (run, *run.programs.values()):
        assert not part.stats().fallbacks
        assert not any(bucket.no_graph_reason for bucket in part.graph_cache.buckets.values())
    buckets = [b for part, program in run.programs.items() if part != "encoder" for b in program.stats().buckets]
    decode = [b for b in buckets if any(len(shape) == 2 and shape[1] == 1 for shape in b.shapes)]
    # One graph for all prompts, and one for BLOOM's masks; for encoded prompts one a bucket, with masks and without.
    graphs, steps = (4, 6) if "encoder" in run.programs else (len(run.programs), 5)
    assert len(decode) == graphs
    assert sum(b.hits for b in decode) == 6 * steps - graphs


@pytest.mark.parametrize("make", [gpt2, t5])
def test_compiled_decode_steps_give_what_the_model_gives(make: Callable[..., Any], device: str) -> None:
    torch.manual_seed(0)
    model = make(device, layers=1)
    run = st.bucketed(model, {"input_ids": {1: SEQ}}, compile={"backend": "aot_eager"})
    for n in (7, 20, 9, 25):
        check(model, run, torch.randint(3, 50, (2, n), device=device))
    assert not run.stats().fallbacks
    assert [part.stats().recompiles for part in run.programs.values()] == [0] * len(run.programs)


def test_a_cache_is_kept_for_later_calls_and_dropped_by_release(device: str) -> None:
    torch.manual_seed(0)
    model = gpt2(device)
    run = st.bucketed(model, {"input_ids": {1: SEQ}})
    for n in (5, 9, 12, 16):
        check(model, run, torch.randint(3, 50, (1, n), device=device))
    stats = run.programs["decoder"].stats()
    assert len(stats.buckets) == 2
    assert stats.hits == 4 * 6 - 2
    assert "decoder: forward" in st.explain(run)
    run.release()
    assert not run.programs["decoder"].captured_buckets()
    check(model, run, torch.randint(3, 50, (1, 9), device=device))


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        ("Llama", {"max_new_tokens": 40}, "longer than seq's max of 48"),
        ("Llama", {"use_cache": False}, "no cache"),
        ("Mistral", {}, "StaticSlidingWindowLayer"),
    ],
)
def test_generate_falls_back_to_the_model_with_a_reason(
    kind: str, options: dict[str, Any], reason: str, device: str, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model = llama(device, kind)
    run = st.bucketed(model, {"input_ids": {1: SEQ}})
    ids = torch.randint(3, 50, (2, 10), device=device)
    with caplog.at_level(logging.WARNING, logger="subtensors.bucketed"):
        for _ in range(2):
            options = {"max_new_tokens": 6, **options}
            assert torch.equal(run.generate(ids, **options), model.generate(ids, **options))
    assert [reason in said for said in caplog.messages if "true sizes" in said] == [True]
    assert [(reason in why, count) for why, count in run.stats().fallbacks.items()] == [(True, 2)]
    with pytest.raises(st.RuleError, match=reason):
        st.bucketed(model, {"input_ids": {1: SEQ}}, on_miss="error").generate(ids, **options)


@pytest.mark.parametrize(
    ("fails", "at", "reason"),
    [
        ("update", 2, "LlamaForCausalLM takes no cache of fixed length: RuntimeError: out of luck"),
        ("update", 4, "RuntimeError: out of luck"),  # the second layer of the first prompt
        ("capture", 2, "RuntimeError: out of luck"),  # the graph of the first decode step
    ],
)
def test_a_text_that_fails_midway_is_generated_by_the_model_from_its_start(
    fails: str, at: int, reason: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from subtensors.bucketed.padded_cache import PaddedStaticLayer

    torch.manual_seed(0)
    model = llama(device)
    run = st.bucketed(model, {"input_ids": {1: SEQ}})
    owner: Any = PaddedStaticLayer if fails == "update" else Bucket
    plain, calls = getattr(owner, fails), []

    def failing(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == at:
            raise RuntimeError("out of luck")
        return plain(*args, **kwargs)

    monkeypatch.setattr(owner, fails, failing)
    for _ in range(2):
        check(model, run, torch.randint(3, 50, (2, 10), device=device), do_sample=True)
    assert list(run.stats().fallbacks.items()) == [(reason, 2)]
    assert len(calls) == at


def test_an_error_of_the_callers_is_raised_and_does_not_disable_graphs(device: str) -> None:
    torch.manual_seed(0)
    model = gpt2(device)
    run = st.bucketed(model, {"input_ids": {1: SEQ}})
    ids = torch.randint(3, 50, (1, 10), device=device)

    def mistaken(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores / (1 // (12 - ids.shape[1]))

    with pytest.raises(ZeroDivisionError):
        run.generate(ids, max_new_tokens=6, logits_processor=[mistaken])
    check(model, run, ids)
    assert not run.stats().fallbacks


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_processor_of_logits_may_call_the_model_itself(name: str, device: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name](device)
    run = st.bucketed(model, {"input_ids": {1: SEQ}})
    for n in (7, 20, 9):
        check(model, run, torch.randint(3, 50, (1, n), device=device), guidance_scale=1.5)
    assert not run.stats().fallbacks


def test_generate_is_refused_for_a_program_that_does_not_generate(device: str) -> None:
    with pytest.raises(st.RuleError, match="Hugging Face models"):
        st.bucketed(torch.nn.Linear(2, 2).to(device), {"input": {0: SEQ}}).generate(torch.zeros(1, 1))
    with pytest.raises(st.RuleError, match="dims that prompts are padded on"):
        st.bucketed(gpt2(device), {"attention_mask": {1: SEQ}}).generate(torch.zeros(1, 1))
    with pytest.raises(ValueError, match="a max"):
        st.bucketed(gpt2(device), {"input_ids": {1: st.Dim("seq")}}).generate(torch.zeros(1, 1))


def test_decode_steps_with_the_callers_cache_replay_one_graph(device: str) -> None:
    torch.manual_seed(0)
    model = gpt2(device)
    plain = model.forward
    run = st.bucketed(plain, {"input_ids": {1: st.Dim("new", min=1, max=1)}})
    cache = transformers.StaticCache(config=model.config, max_cache_len=32)
    for n in (7, 5, 9):
        ids = torch.randint(1, 50, (1, n), device=device)
        expected = model.generate(ids, **SCORED)
        cache.reset()
        model.forward = run
        found = model.generate(ids, **{CACHE: cache}, disable_compile=True, **SCORED)
        model.forward = plain
        assert torch.equal(found.sequences, expected.sequences)
        for a, b in zip(found.scores, expected.scores, strict=True):
            torch.testing.assert_close(a, b)
    stats = run.stats()
    assert [("beyond its max of 1" in reason, count) for reason, count in stats.fallbacks.items()] == [(True, 3)], stats
    assert stats.hits == 3 * 5 - 1


@torch.no_grad()
def test_a_returned_cache_belongs_to_the_caller(device: str) -> None:
    model = gpt2(device)
    run = st.bucketed(model, {"input_ids": {1: st.Dim("seq", max=64, buckets=16)}})
    held = []
    for n in (7, 5, 20, 9):
        ids = torch.randint(1, 50, (1, n), device=device)
        held.append((run(input_ids=ids)[CACHE], model(input_ids=ids)[CACHE]))
    for found, expected in held:
        assert type(found) is type(expected)
        for a, b in zip(found.layers, expected.layers, strict=True):
            torch.testing.assert_close((a.keys, a.values), (b.keys, b.values))
    # It goes on from there, as the model's own does; one that grows is no part of a graph's key.
    for found, expected in held:
        step = torch.ones(1, 1, dtype=torch.long, device=device)
        actual = run(input_ids=step, **{CACHE: found})
        torch.testing.assert_close(actual.logits, model(input_ids=step, **{CACHE: expected}).logits)
    assert len(run.call_cache) == 4
    assert any("DynamicCache" in reason for reason in run.stats().fallbacks)


@torch.no_grad()
def test_an_encoder_and_a_decoder_of_different_lengths(device: str) -> None:
    torch.manual_seed(0)
    model = t5(device)
    dims = {"input_ids": {1: st.Dim("seq", max=32, buckets=16)}, "labels": {1: st.Dim("out", max=32, buckets=8)}}
    run = st.bucketed(model, dims)
    for n, m in ((9, 5), (10, 3), (20, 8), (9, 20)):
        ids, labels = torch.randint(1, 50, (2, n), device=device), torch.randint(1, 50, (2, m), device=device)
        found, expected = run(input_ids=ids, labels=labels), model(input_ids=ids, labels=labels)
        torch.testing.assert_close(found.logits, expected.logits, rtol=1e-5, atol=1e-6)  # T5's norms are in float32
        torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=1e-6)
    assert not run.stats().fallbacks


@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_weights_replaced_between_texts_are_used_for_the_next(name: str, device: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name](device)
    run = st.bucketed(model, {"input_ids": {1: SEQ}})
    ids = torch.randint(3, 50, (2, 7), device=device)
    for _ in range(3):
        check(model, run, ids)
        head = model.get_output_embeddings()
        head.weight = torch.nn.Parameter(head.weight.flip(0) * 2)
    assert not run.stats().fallbacks


@pytest.mark.usefixtures("captured")
def test_a_text_whose_weights_were_replaced_midway_is_generated_by_the_model(device: str) -> None:
    torch.manual_seed(0)
    model = gpt2(device)
    run = st.bucketed(model, {"input_ids": {1: SEQ}})
    ids = torch.randint(3, 50, (2, 7), device=device)
    check(model, run, ids)
    replaced: list[torch.Tensor] = []

    def replace(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if not replaced and ids.shape[1] == 10:
            replaced.append(model.lm_head.weight)
            model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.flip(0) * 2)
        return scores

    found = run.generate(ids, logits_processor=[replace], **SCORED)
    assert replaced
    expected = model.generate(ids, **SCORED)
    assert torch.equal(found.sequences, expected.sequences)
    assert [*run.stats().fallbacks] == ["a tensor was replaced during the call"]
    check(model, run, ids)
    assert sum(run.stats().fallbacks.values()) == 1


def test_any_number_of_rows_has_a_cache(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_cache, "MAX_OBJECTS_PER_ARG", 2)
    torch.manual_seed(0)
    model = gpt2(device)
    run = st.bucketed(model, {"input_ids": {1: SEQ}})
    for rows in (1, 2, 3, 4):
        ids = torch.randint(3, 50, (rows, 7), device=device)
        assert torch.equal(run.generate(ids, **SCORED).sequences, model.generate(ids, **SCORED).sequences)
    assert not run.stats().fallbacks
