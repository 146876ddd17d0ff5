"""Training steps of Hugging Face models through a bucketed program equal those of the models."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import subtensors as st

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("captured")

SEQ = st.Dim("seq", max=32, buckets=8)
ANSWER = st.Dim("answer", max=32, buckets=8)
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


def gpt2() -> Any:
    sizes = {"n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    dropped = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=50, **sizes, **dropped))


def llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=50, num_key_value_heads=1, **SMALL))


def bert() -> Any:
    dropped = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.BertForTokenClassification(transformers.BertConfig(vocab_size=50, **SMALL, **dropped))


def t5() -> Any:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=50, dropout_rate=0.0, decoder_start_token_id=0, **sizes)
    )


def batch(n: int, m: int, classes: int, device: str) -> dict[str, Tensor]:
    mask = torch.ones(2, n, dtype=torch.long)
    mask[0, (n + 1) // 2 :] = 0
    labels = torch.randint(0, classes, (2, m)).masked_fill(torch.rand(2, m) < 0.2, -100)
    labels[:, 0] = 1
    made = {"input_ids": torch.randint(1, 50, (2, n)), "attention_mask": mask, "labels": labels}
    return {name: t.to(device) for name, t in made.items()}


@pytest.mark.parametrize("make", [gpt2, llama, bert, t5])
def test_a_bucketed_model_is_trained_like_the_plain_model(device: str, make: Any) -> None:
    torch.manual_seed(0)
    model = make().train().to(device, torch.float64)
    alone = copy.deepcopy(model)
    dims = {"input_ids": {1: SEQ}, "attention_mask": {1: SEQ}, "labels": {1: ANSWER if make is t5 else SEQ}}
    run = st.bucketed(model, dims)
    optimizers = [torch.optim.AdamW(net.parameters(), lr=1e-2) for net in (model, alone)]
    for step, (n, m) in enumerate([(5, 3), (6, 9), (20, 12), (7, 4), (22, 14)]):
        inputs = batch(n, m if make is t5 else n, 2 if make is bert else 50, device)
        for program, optimizer in zip((run, alone), optimizers, strict=True):
            out = program(**inputs)
            out.loss.backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(p, q)
            torch.testing.assert_close(p.grad, q.grad)
    assert run.stats().hits == (2 if make is t5 else 3)
    assert not run.stats().fallbacks
