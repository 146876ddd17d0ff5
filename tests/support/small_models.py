"""Small models, losses and parameters: what tests train, and Hugging Face models of tiny sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter


def model(device: str = "cpu", seed: int = 0) -> torch.nn.Sequential:
    """Two layers with a ReLU between them; the same values for the same seed."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)).to(device)


def loss_of(net: torch.nn.Module, seed: int = 1) -> Tensor:
    """How far the model is from adding up its inputs, on a batch that the seed chooses."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(16, 4, generator=generator).to(next(net.parameters()))
    return ((net(x) - x.sum(1, keepdim=True)) ** 2).mean()


def ones(count: int, device: str = "cpu", grad: bool = True) -> list[Parameter]:
    """Parameters of 1, 2, 3, ... ones, with gradients of ones."""
    params = [Parameter(torch.ones(i + 1, device=device)) for i in range(count)]
    for p in params if grad else []:
        p.grad = torch.ones_like(p)
    return params


class TiedEmbedding(nn.Module):
    """An embedding that is the head as well, in float64; positions meet, so that padding would show in gradients."""

    def __init__(self, device: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 6)
        self.inner = nn.Linear(6, 6)
        self.unused = nn.Linear(2, 2)
        self.to(device, torch.float64)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        h = self.inner(self.embed(ids)).tanh()
        h = h * h.softmax(1) + h.mean(1, keepdim=True)
        logits = h @ self.embed.weight.T
        return logits if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())


VOCABULARY = 50
"""Tokens that the Hugging Face models below know."""

_SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _hugging_face(kind: str, head: str, options: dict[str, Any]) -> Any:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{kind}Config")(**{"vocab_size": VOCABULARY, **options})
    return getattr(transformers, f"{kind}{head}")(config)


def bert(head: str, **options: Any) -> Any:
    """A BERT with the head of that name and without dropout."""
    return _hugging_face("Bert", head, {"max_position_embeddings": 64, **_SIZES, **_NO_DROPOUT, **options})


def gpt2(**options: Any) -> Any:
    """A GPT-2 without dropout."""
    sizes = {"n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    dropout = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    return _hugging_face("GPT2", "LMHeadModel", {**sizes, **dropout, **options})


def llama(kind: str = "Llama", **options: Any) -> Any:
    """A Llama, or a model of another kind that takes the same sizes."""
    return _hugging_face(kind, "ForCausalLM", {**_SIZES, "num_key_value_heads": 1, **options})


def t5(**options: Any) -> Any:
    """A T5 without dropout."""
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    dropout = {"dropout_rate": 0.0, "decoder_start_token_id": 0}
    return _hugging_face("T5", "ForConditionalGeneration", {**sizes, **dropout, **options})
