"""What the benchmark of varying sizes asks: models with random weights, and requests of many sizes."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Case:
    """A model and its requests.

    Args:
        make: the model, in its own dtype on a CPU; tiny or not.
        argument: what a request is to the model.
        dim: which of its dims varies.
        sizes: between which.
        step: of buckets, in every way that has them.
        largest: the largest bucket.
        shape: the others of a request's dims, tiny or not, without the one that varies.
        result: from what the model returns.
        takes_mask: does it take an `attention_mask` of the padding?
        new_tokens: how many a request generates; 0 of a model that is only called.
        requests: how many.
    """

    make: Callable[[bool], nn.Module]
    argument: str
    dim: int
    sizes: tuple[int, int]
    step: int
    largest: int
    shape: Callable[[bool], tuple[int, ...]]
    result: Callable[[Any], Tensor] = lambda out: out
    takes_mask: bool = False
    new_tokens: int = 0
    requests: int = 150

    def prepared(self, tiny: bool, device: str) -> nn.Module:
        """The model; in float16 on a GPU."""
        torch.manual_seed(0)
        model = self.make(tiny).to(device).eval()
        return model.half() if device == "cuda" else model

    def requested(self, tiny: bool, device: str) -> list[Tensor]:
        """The requests, the same for everyone."""
        source = random.Random(0)
        smallest, largest = (2, 6) if tiny and self.dim == 0 else self.sizes
        made = []
        for _ in range(min(10, self.requests // 2) if tiny else self.requests):
            shape = list(self.shape(tiny))
            shape.insert(self.dim, source.randint(smallest, largest))
            made.append(self._request(shape, device))
        return made

    def _request(self, shape: list[int], device: str) -> Tensor:
        if self.argument == "input_ids":
            return torch.randint(1, 1000, shape, device=device)
        return torch.randn(shape, device=device, dtype=torch.half if device == "cuda" else torch.float)


def _bert(tiny: bool) -> nn.Module:
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = _transformers().BertConfig(**small if tiny else {}, attn_implementation="sdpa")
    model: nn.Module = _transformers().BertModel(config, add_pooling_layer=False)
    return model


def _gpt2(tiny: bool) -> nn.Module:
    small = {"vocab_size": 1000, "n_embd": 32, "n_layer": 2, "n_head": 2}
    config = _transformers().GPT2Config(**small if tiny else {}, **_ENDLESS)
    model: nn.Module = _transformers().GPT2LMHeadModel(config)
    return model


def _t5_small(tiny: bool) -> nn.Module:
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2} if tiny else {"num_layers": 6}
    config = _transformers().T5Config(**sizes, **_ENDLESS, decoder_start_token_id=0)
    model: nn.Module = _transformers().T5ForConditionalGeneration(config)
    return model


def _resnet50(tiny: bool) -> nn.Module:
    small = {"embedding_size": 4, "hidden_sizes": [8, 8], "depths": [1, 1]}
    model: nn.Module = _transformers().ResNetForImageClassification(
        _transformers().ResNetConfig(**small if tiny else {})
    )
    return model


# Every answer is as long as was asked for.
_ENDLESS: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0}


def _transformers() -> Any:
    return importlib.import_module("transformers")


def _hidden(out: Any) -> Tensor:
    hidden: Tensor = out.last_hidden_state
    return hidden


def _logits(out: Any) -> Tensor:
    logits: Tensor = out.logits
    return logits


def _encoder(rows: int) -> Case:
    return Case(_bert, "input_ids", 1, (16, 512), 64, 512, lambda tiny: (rows,), _hidden, takes_mask=True)


def _generator(make: Callable[[bool], nn.Module]) -> Case:
    return Case(make, "input_ids", 1, (16, 448), 64, 512, lambda tiny: (1,), new_tokens=64, requests=6)


CASES: dict[str, Case] = {
    "bert-1": _encoder(1),
    "bert-8": _encoder(8),
    "gpt2-generate": _generator(_gpt2),
    "t5-generate": _generator(_t5_small),
    "resnet50": Case(
        _resnet50, "pixel_values", 0, (1, 32), 4, 32, lambda tiny: (3, 32, 32) if tiny else (3, 224, 224), _logits
    ),
}
"""By name: BERT-base, its rows a request after the dash; GPT-2 124M and T5-small, 64 tokens an answer; ResNet-50."""
