"""What the benchmark of whole jobs over varying lengths asks: models, and batches whose lengths are real ones."""

from __future__ import annotations

import bisect
import importlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

IGNORED = -100
"""The label of what no loss counts."""


@dataclass(frozen=True)
class Lengths:
    """A distribution of lengths by its quantiles, linear between them.

    Args:
        source: where the quantiles come from.
        quantiles: (share of the lengths, length), in order.

    >>> Lengths("", ((0, 10), (0.5, 20), (1, 100))).at(0.25)
    15.0
    """

    source: str
    quantiles: tuple[tuple[float, float], ...]

    def at(self, share: float) -> float:
        """Return the length that this share of the lengths does not exceed."""
        shares, values = zip(*self.quantiles, strict=True)
        i = min(max(bisect.bisect_right(shares, share), 1), len(shares) - 1)
        part = (share - shares[i - 1]) / (shares[i] - shares[i - 1])
        return float(values[i - 1] + part * (values[i] - values[i - 1]))


def _percent(source: str, *pairs: tuple[float, float]) -> Lengths:
    return Lengths(source, tuple((percent / 100, length) for percent, length in pairs))


_LIBRISPEECH = "in seconds, as Lhotse describes the manifest in k2-fsa/icefall, {}"
_TABLE = "egs/librispeech/ASR/local/display_manifest_statistics.py"
LENGTHS: dict[str, Lengths] = {
    "librispeech-test": _percent(
        f"LibriSpeech test-clean {_LIBRISPEECH.format(_TABLE)}",
        *((0, 1.3), (0.1, 1.6), (0.5, 1.8), (1, 2.0), (5, 2.3), (10, 2.7), (25, 3.7), (50, 5.8), (75, 9.6)),
        *((90, 14.6), (95, 17.8), (99, 25.5), (99.5, 28.4), (99.9, 32.8), (100, 35.0)),
    ),
    "librispeech-train": _percent(
        f"LibriSpeech train-clean-100, its speed perturbed, {_LIBRISPEECH.format(_TABLE)}",
        *((0, 1.3), (0.1, 1.9), (0.5, 2.2), (1, 2.5), (5, 4.2), (10, 6.4), (25, 11.4), (50, 13.8), (75, 15.3)),
        *((90, 16.7), (95, 17.3), (99, 18.1), (99.5, 18.4), (99.9, 18.8), (100, 27.2)),
    ),
    "recipes": _percent(
        "instructions of the data set AdamCodd/recipe-nlg-alpaca in tokens of Llama 3, as its card has them",
        *((0, 164), (10, 192), (20, 209), (30, 228), (40, 249), (50, 274), (60, 302), (70, 337), (80, 386)),
        *((90, 467), (100, 3285)),
    ),
    "definitions": _percent(
        "functions and classes of CPython 3.11's standard library (`demo.text.corpus`), at four bytes a token",
        *((0, 8), (1, 11), (5, 14), (10, 20), (25, 36), (50, 74), (75, 166), (90, 349), (95, 543), (99, 1127)),
        (100, 13665),
    ),
}
"""Distributions, by name."""


@dataclass(frozen=True)
class Case:
    """A model, and what it is given.

    Args:
        make: the model in float32 on a CPU; tiny or not.
        argument: the name of its input.
        lengths: a key of `LENGTHS`.
        unit: elements of the input in one unit of the lengths.
        longest: elements that a sequence is cut at; tiny or not.
        step: elements by which buckets grow; tiny or not.
        trains: whether it is trained, or called without gradients.
        no_packing: why its sequences can't be packed into one row; "" if they can.
    """

    make: Callable[[bool], nn.Module]
    argument: str
    lengths: str
    unit: int
    longest: tuple[int, int]
    step: tuple[int, int]
    trains: bool = False
    no_packing: str = ""

    def draw(self, lengths: str, batches: int, batch: int, tiny: bool) -> list[list[Tensor]]:
        """Return sequences on the host, the same for everyone.

        Args:
            lengths: a key of `LENGTHS`.
            batches: how many.
            batch: sequences of each.
            tiny: shrink the lengths to the tiny model's.

        Returns:
            each sequence 1-D: int64 tokens, or samples in float32.
        """
        source, drawn = random.Random(0), LENGTHS[lengths]
        generator = torch.Generator().manual_seed(0)
        cut, full = self.longest[tiny], self.longest[False]
        noise = torch.randn(2 * cut if self.unit > 1 else 0, generator=generator)

        def sequence() -> Tensor:
            n = min(int(drawn.at(source.random()) * self.unit), full) * cut // full
            n = max(n, cut // 16)
            if self.unit > 1:
                start = source.randrange(cut)
                return noise[start : start + n]
            return torch.randint(1, 90 if tiny else 30000, (n,), generator=generator)

        return [[sequence() for _ in range(batch)] for _ in range(batches)]


def _transformers() -> Any:
    return importlib.import_module("transformers")


def _bert(tiny: bool) -> nn.Module:
    small = {"vocab_size": 97, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = _transformers().BertConfig(**{**small, "intermediate_size": 32} if tiny else {})
    model: nn.Module = _transformers().BertModel(config, add_pooling_layer=False)
    return model.eval()


def _gpt2(tiny: bool) -> nn.Module:
    small = {"vocab_size": 97, "n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = _transformers().GPT2Config(**small if tiny else {"n_layer": 6}, **no_dropout, use_cache=False)
    model = _transformers().GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # it is the default, whose warning would break a compiled graph in two
    made: nn.Module = model.train()
    return made


def _wav2vec2(tiny: bool) -> nn.Module:
    """The base model's sizes, and norms over channels, as the larger models have: those that take a mask.

    Its mask of feature vectors is written anew, for everyone: transformers' copies the number that it sets from the
    host, which no CUDA graph can hold.
    """
    small: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    small |= {"intermediate_size": 32, "conv_dim": (8, 8, 8), "conv_stride": (5, 2, 2), "conv_kernel": (10, 3, 2)}
    small |= {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2}
    norms = {"feat_extract_norm": "layer", "conv_bias": True}
    config = _transformers().Wav2Vec2Config(**small if tiny else {}, **norms)
    model = _transformers().Wav2Vec2Model(config)

    def feature_mask(length: int, mask: Tensor, add_adapter: bool | None = None) -> Tensor:
        last = model._get_feat_extract_output_lengths(mask.sum(-1)) - 1
        ends = torch.zeros((mask.shape[0], length), dtype=mask.dtype, device=mask.device)
        ends[torch.arange(mask.shape[0], device=mask.device), last] = torch.ones_like(last, dtype=mask.dtype)
        found: Tensor = ends.flip([-1]).cumsum(-1).flip([-1]).bool()
        return found

    model._get_feature_vector_attention_mask = feature_mask
    made: nn.Module = model.eval()
    return made


CASES: dict[str, Case] = {
    "encode-text": Case(_bert, "input_ids", "recipes", 1, (512, 32), (64, 8)),
    "encode-speech": Case(
        _wav2vec2, "input_values", "librispeech-test", 16000, (560_000, 1600), (32_000, 400),
        no_packing="its convolutions over time would mix neighbours in a pack",
    ),
    "train-text": Case(_gpt2, "input_ids", "definitions", 1, (512, 32), (64, 8), trains=True),
}  # fmt: skip
"""By name: BERT-base, Wav2Vec2 of the base model's size, and DistilGPT2 in the loop of transformers' Trainer."""


def padded(case: Case, sequences: Sequence[Tensor], multiple: int = 1) -> dict[str, Tensor]:
    """Return a batch as a collator with dynamic padding makes it.

    Args:
        case: what it is for.
        sequences: 1-D each.
        multiple: of which its length is made.

    Returns:
        the input, (batch, longest); its attention mask, (batch, longest), of the
        dtype that transformers gives it; and labels where it trains.
    """
    longest = max(len(each) for each in sequences)
    longest = -(-longest // multiple) * multiple
    found = {
        case.argument: sequences[0].new_zeros(len(sequences), longest),
        "attention_mask": torch.zeros(len(sequences), longest, dtype=torch.int32 if case.unit > 1 else torch.long),
    }
    if case.trains:
        found["labels"] = torch.full((len(sequences), longest), IGNORED)
    for i, each in enumerate(sequences):
        found[case.argument][i, : len(each)] = each
        found["attention_mask"][i, : len(each)] = 1
        if case.trains:
            found["labels"][i, : len(each)] = each
    return found
