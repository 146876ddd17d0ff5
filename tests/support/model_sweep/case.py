"""A row of the sweep: a model of transformers at a tiny size, its inputs, and which of their dims vary."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

import subtensors as st

if TYPE_CHECKING:
    import transformers
else:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    transformers = __import__("pytest").importorskip("transformers")

SEQ = st.Dim("seq", max=32, buckets=[8, 16, 32])
ANSWER = st.Dim("answer", max=32, buckets=[8, 16, 32])

VOCABULARY = 50

SIZES: dict[str, object] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 24,
    "head_dim": 8,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "attention_dropout": 0.0,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""What a tiny model is made of; each config takes those that it knows."""


@dataclass(frozen=True)
class ModelCase:
    """A row of the table.

    Args:
        name: of the row: the model's class, with what makes it special behind it if it has several rows.
        family: the rows that stand together.
        build: return the model; its parameters are drawn anew.
        inputs: return the arguments of a call, given the true sizes of its Dims and `rows`.
        dims: as of `st.bucketed`: by argument, which of its dims vary.
        calls: the true sizes of the calls, in order: several in a bucket and across buckets.
        ragged: the true sizes of the rows of a ragged batch; none if rows can't differ.
        counted: how many terms a row's loss is the mean of, given its true sizes; None where there is no such loss.
    """

    name: str
    family: str
    build: Callable[[], nn.Module]
    inputs: Callable[..., dict[str, Tensor]]
    dims: Mapping[str, Mapping[int, st.Dim]]
    calls: tuple[tuple[int, ...], ...] = ((7,), (5,), (8,), (12,), (9,), (1,), (3,))
    ragged: tuple[tuple[int, ...], ...] = ((5,), (9,), (2,))
    counted: Callable[..., int] | None = None

    def model(self) -> nn.Module:
        """Return the model, in float32 and evaluation, with parameters large enough that a leak shows."""
        torch.manual_seed(0)
        model = self.build().eval()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for p in model.parameters():
                noise = torch.randn(p.shape, generator=generator)
                p.copy_(0.3 * noise if p.dim() > 1 else p + 0.1 * noise)
        return model

    def arguments(self, index: int, sizes: tuple[int, ...], rows: int = 2) -> dict[str, Tensor]:
        """Return the arguments of a call, drawn with a seed of its own."""
        torch.manual_seed(index + 1)
        return self.inputs(*sizes, rows=rows)


def tiny(model: str, **options: object) -> Callable[[], nn.Module]:
    """Return a function that builds a tiny model.

    Args:
        model: its class in transformers.
        options: of its config, beside those of `SIZES` that the config takes; None leaves a size to the config.
    """

    def build() -> nn.Module:
        kind = getattr(transformers, model)
        config = kind.config_class
        known = set(inspect.signature(config).parameters) | set(getattr(config, "attribute_map", {}))
        sizes = {name: value for name, value in SIZES.items() if name in known}
        left = {name for name, value in options.items() if value is None}
        given = {name: value for name, value in {**sizes, **options}.items() if name not in left}
        built: nn.Module = kind(config(**given))
        return built

    return build


def tokens(count: int, rows: int) -> Tensor:
    """Return random tokens that are none of the special ones."""
    return torch.randint(3, VOCABULARY, (rows, count))
