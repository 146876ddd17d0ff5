"""`run.generate` called as a model's own `generate` is: options, modes, adapters, threads, and calls within calls."""

from __future__ import annotations

import contextlib
import copy
import threading
from typing import Any

import pytest
import small_models
import torch
from torch import Tensor

import subtensors as st

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.filterwarnings("ignore")]

DIMS = {"input_ids": {1: st.Dim("seq", max=48, buckets=16)}}
TOKENS = {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0}


def model_of(name: str, device: str) -> Any:
    torch.manual_seed(0)
    if name == "t5":
        model = small_models.t5(num_layers=2, **TOKENS)
    elif name == "llama":
        model = small_models.llama(num_attention_heads=2, **TOKENS)
    else:
        model = small_models.gpt2(**TOKENS)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.normal_(0.0, 0.3)
    return model.double().eval().to(device)


def prompts(device: str, rows: int = 2, length: int = 9) -> Tensor:
    return torch.randint(3, 50, (rows, length), device=device, generator=torch.Generator(device).manual_seed(length))


def same(run: Any, model: Any, *args: Any, **options: Any) -> None:
    options = {"max_new_tokens": 6, **options}
    assert torch.equal(run.generate(*args, **options), model.generate(*args, **options))


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_options_are_read_from_every_place_that_generate_reads(name: str, device: str) -> None:
    model, ids = model_of(name, device), prompts(device)
    model.generation_config.num_beams = 3
    run = st.bucketed(model, DIMS)
    given = transformers.GenerationConfig(max_new_tokens=6)
    same(run, model, ids, generation_config=given)
    assert torch.equal(run.generate(ids, given), model.generate(ids, given))
    same(run, model, ids, disable_compile=True)
    assert not run.stats().fallbacks
    same(run, model, ids, generation_config=transformers.GenerationConfig(cache_implementation="static"))
    assert [*run.stats().fallbacks] == ["generate is asked for cache_implementation"]


def test_embeddings_beside_tokens_are_left_to_the_model(device: str) -> None:
    model, ids = model_of("llama", device), prompts(device)
    run = st.bucketed(model, DIMS)
    same(run, model, ids, inputs_embeds=model.get_input_embeddings()(ids.flip(1)).detach())
    assert [*run.stats().fallbacks] == ["generate begins with something other than tokens"]


def test_attentions_have_the_lengths_of_the_text(device: str) -> None:
    model, ids = model_of("llama", device), prompts(device)
    model.set_attn_implementation("eager")
    run = st.bucketed(model, DIMS)
    asked = {"max_new_tokens": 3, "return_dict_in_generate": True, "output_attentions": True}
    found, expected = run.generate(ids, **asked), model.generate(ids, **asked)
    torch.testing.assert_close(found.attentions, expected.attentions)


class Received:
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.tokens: list[list[Any]] = []

    def put(self, tokens: Tensor) -> None:
        self.tokens.append(tokens.tolist())

    def end(self) -> None:
        self.tokens.append([])


def test_a_streamer_is_given_each_token_once_though_the_text_starts_over(device: str) -> None:
    model, ids = model_of("gpt2", device), prompts(device, rows=1)
    run = st.bucketed(model, DIMS)

    def replace(ids: Tensor, scores: Tensor) -> Tensor:
        if ids.shape[1] == 11:
            model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
        return scores

    received, expected = Received(), Received()
    same(run, model, ids)
    run.generate(ids, max_new_tokens=6, streamer=received, logits_processor=[replace])
    model.generate(ids, max_new_tokens=6, streamer=expected)
    assert received.tokens == expected.tokens
    assert [*run.stats().fallbacks] == ["a tensor was replaced during the call"]


def test_a_processor_of_logits_may_call_generate_itself(device: str) -> None:
    model, ids = model_of("llama", device), prompts(device)
    run = st.bucketed(model, DIMS)

    def within(ids: Tensor, scores: Tensor) -> Tensor:
        same(run, model, prompts(device, length=7), max_new_tokens=3)
        return scores

    found = run.generate(ids, max_new_tokens=6, logits_processor=[within])
    assert torch.equal(found, model.generate(ids, max_new_tokens=6))
    assert [*run.stats().fallbacks] == ["generate is called within a call of it"]


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_a_cache_that_generate_returns_belongs_to_the_caller(name: str, device: str) -> None:
    model, ids = model_of(name, device), prompts(device)
    run = st.bucketed(model, DIMS)
    asked = {"max_new_tokens": 4, "return_dict_in_generate": True}
    held, expected = run.generate(ids, **asked), model.generate(ids, **asked)
    run.generate(prompts(device, length=12), **asked)
    assert type(held.past_key_values) is type(expected.past_key_values)
    further = [{"past_key_values": answer.past_key_values, "max_new_tokens": 4} for answer in (held, expected)]
    if name == "t5":
        texts = [model.generate(ids, decoder_input_ids=held.sequences, **options) for options in further]
    else:
        texts = [model.generate(torch.cat([held.sequences, ids], 1), **options) for options in further]
    assert torch.equal(*texts)
    assert not run.stats().fallbacks


@pytest.mark.usefixtures("captured")
def test_a_cache_fits_the_dtype_autocast_and_inference_mode_of_each_call(device: str) -> None:
    model, ids = model_of("llama", device), prompts(device)
    run = st.bucketed(model, DIMS)
    with torch.inference_mode():
        same(run, model, ids)
    same(run, model, ids)
    model.float()
    same(run, model, ids)
    with torch.autocast(device, torch.bfloat16):
        same(run, model, ids)
    same(run, model, ids)
    assert not run.stats().fallbacks


@pytest.mark.usefixtures("captured")
def test_a_first_text_with_dropout_is_that_of_its_seed(device: str) -> None:
    torch.manual_seed(0)
    model = small_models.gpt2(resid_pdrop=0.5, **TOKENS).to(device)
    run, texts = st.bucketed(model.train(), DIMS), []
    for _ in range(3):
        torch.manual_seed(1)
        texts.append(run.generate(prompts(device), max_new_tokens=6, do_sample=True).tolist())
    assert texts[0] == texts[1] == texts[2]


def test_a_call_that_the_model_refuses_does_not_disable_graphs(device: str) -> None:
    if device != "cpu":
        pytest.skip("a token that there is none of ends a process with a GPU")
    model, ids = model_of("llama", device), prompts(device)
    run = st.bucketed(model, DIMS)
    for _ in range(2):
        with pytest.raises(IndexError):
            run.generate(ids + 1000, max_new_tokens=3)
        same(run, model, ids)
    assert not run.stats().fallbacks


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_runners_of_one_model_in_two_threads_leave_it_as_it_was(name: str, device: str) -> None:
    model, ids = model_of(name, device), prompts(device)
    expected = model.generate(ids, max_new_tokens=6)
    runs = [st.bucketed(model, DIMS) for _ in range(2)]
    inside, found = threading.Barrier(2), []

    def wait(ids: Tensor, scores: Tensor) -> Tensor:
        if ids.shape[1] == expected.shape[1] - 3:
            # A second runner that came in would go on here, and the first one would end before it.
            with contextlib.suppress(threading.BrokenBarrierError):
                inside.wait(1)
        return scores

    def generate(run: Any) -> None:
        found.append(run.generate(ids, max_new_tokens=6, logits_processor=[wait]))

    threads = [threading.Thread(target=generate, args=(run,)) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2
    assert all(torch.equal(text, expected) for text in found)
    assert not [name for name, module in model.named_modules() if "forward" in vars(module)]
    assert not any(run.stats().fallbacks for run in runs)


def test_another_thread_may_call_an_encoder_while_texts_are_generated(device: str) -> None:
    model, ids = model_of("t5", device), prompts(device)
    run = st.bucketed(model, DIMS)
    one = prompts(device, length=1)
    expected = copy.deepcopy(model)(input_ids=one, decoder_input_ids=one).logits
    found: list[Tensor] = []

    def meanwhile(ids: Tensor, scores: Tensor) -> Tensor:
        if not found:
            call = threading.Thread(target=lambda: found.append(model(input_ids=one, decoder_input_ids=one).logits))
            call.start()
            call.join()
        return scores

    run.generate(ids, max_new_tokens=3, logits_processor=[meanwhile])
    assert torch.equal(found[0], expected)
    assert found[0].requires_grad


@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize("task", [None, "CAUSAL_LM"])
def test_a_model_with_an_adapter_has_graphs_with_it_and_without(task: str | None, device: str) -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type=task)
    model = peft.get_peft_model(model_of("llama", device), lora).eval()
    run, ids = st.bucketed(model, DIMS), prompts(device)
    for _ in range(2):
        same(run, model, input_ids=ids)
        with model.disable_adapter():
            same(run, model, input_ids=ids)
    assert not run.stats().fallbacks
    assert run.programs["decoder"].stats().hits == 4 * 4


def test_a_model_that_takes_the_end_of_a_cache_for_that_of_the_text_has_no_graphs(device: str) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "max_position_embeddings": 64}
    windows = {"attention_types": [[["global", "local"], 1]], "window_size": 8}
    model = transformers.GPTNeoForCausalLM(transformers.GPTNeoConfig(**sizes, **windows, **TOKENS))
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0.0, 0.3)
    model = model.double().eval().to(device)
    run = st.bucketed(model, DIMS)
    for length in (7, 12):
        same(run, model, prompts(device, length=length), max_new_tokens=12)
    assert ["_can_compile_fullgraph is False" in reason for reason in run.stats().fallbacks] == [True]


def test_a_cache_that_cannot_be_made_leaves_a_model_without_graphs(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from subtensors.bucketed import padded_cache

    def failing(**options: object) -> None:
        raise KeyError("attention of its own")

    monkeypatch.setattr(padded_cache, "StaticCache", failing)
    model = model_of("llama", device)
    run = st.bucketed(model, DIMS)
    same(run, model, prompts(device))
    assert ["takes no cache of fixed length: KeyError" in reason for reason in run.stats().fallbacks] == [True]
