"""Causal language models of transformers, a few families at tiny sizes, with random weights and without dropout."""

from __future__ import annotations

from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn

VOCABULARY = 211
HIDDEN = 16

_SIZES = {
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
_GPT = {"n_embd": HIDDEN, "n_layer": 2, "n_head": 2, "n_positions": 64}
_GROUPED = {**_SIZES, "num_key_value_heads": 1}
_HEAD_DIM = {**_GROUPED, "head_dim": 8}

FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": _GROUPED,
    "Gemma2": {**_HEAD_DIM, "final_logit_softcapping": 3.0, "sliding_window": 64},
    "GPT2": _GPT,
    "Qwen3": _HEAD_DIM,
    "Mistral": {**_GROUPED, "sliding_window": 64},
    "Cohere": _GROUPED,
    "Granite": {**_GROUPED, "logits_scaling": 4.0},
    "GPTNeoX": _SIZES,
    "OPT": {**_SIZES, "ffn_dim": 24, "word_embed_proj_dim": HIDDEN, "dropout": 0.0},
    "Bloom": {"hidden_size": HIDDEN, "n_layer": 2, "n_head": 2, "hidden_dropout": 0.0, "attention_dropout": 0.0},
    "Mixtral": {**_GROUPED, "num_local_experts": 4},
    "Phi3": {**_GROUPED, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "Gemma3Text": {**_HEAD_DIM, "sliding_window": 64},
    "Olmo2": _GROUPED,
    "Starcoder2": {**_GROUPED, "residual_dropout": 0.0, "embedding_dropout": 0.0},
    "StableLm": _GROUPED,
    "Phi": _SIZES,
    "Qwen2": _GROUPED,
    "SmolLM3": _GROUPED,
    "GPTJ": {**_GPT, "rotary_dim": 4},
    "Mpt": {"d_model": HIDDEN, "n_heads": 2, "n_layers": 2},
    "Glm": _HEAD_DIM,
    "Helium": _HEAD_DIM,
    "Nemotron": _GROUPED,
}
"""The options of each family's configuration."""

SAMPLE = ["Llama", "Gemma2", "GPT2"]
"""Families in the default run."""


def causal_lm(family: str = "Llama", dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """The model of a family, the same for the same options, in training mode."""
    transformers = pytest.importorskip("transformers")
    tokens = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = getattr(transformers, f"{family}Config")(**{**tokens, **FAMILIES[family], **options})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.to(dtype).train()


def sampled(families: list[str]) -> list[Any]:
    """Those of the sample in the default run, the others where there is time."""
    return [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.slow) for name in families]


def of_liger(function: Any) -> Any:
    """A function as one that Liger defines."""
    function.__module__ = "liger_kernel.transformers"
    return function


def with_liger() -> Any:
    """A model with the MLP of its first layer as Liger patches it."""
    model = causal_lm()
    mlp = model.model.layers[0].mlp
    forward = type(mlp).forward
    mlp.forward = MethodType(of_liger(lambda part, x: forward(part, x)), mlp)
    return model
