"""Hugging Face models, unmodified, on padded inputs: each real row is as if the model had run on it alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_models import bert, gpt2, llama, t5
from torch import Tensor

import subtensors as st
from subtensors.padded import torch_function as padded_calls

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.filterwarnings("ignore")]

# In float64 both ways are compared with each other. The models cast to float32 inside (rotary tables, norms, losses),
# whose rounding, 6e-8, a few layers carry on; what padding leaks is of the size of the values themselves. How close
# float32 comes to float64 is what the sweep over models compares, without a bound set by hand.
AGREEING: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-7}

SEQ = st.Dim("seq", max=32, buckets=[16])
BATCH = st.Dim("batch", max=8, buckets=[4])


def tokens(length: int) -> dict[str, Tensor]:
    ids = torch.randint(1, 50, (1, length))
    return {"input_ids": ids, "labels": ids.clone()}


def images(count: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(count, 3, 16, 16).double(), "labels": torch.randint(0, 3, (count,))}


def speech(length: int) -> dict[str, Tensor]:
    return {"input_features": torch.randn(1, 4, 16).double(), "labels": torch.randint(3, 50, (1, length))}


def vit(attention: str) -> Any:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.ViTConfig(**sizes, image_size=16, patch_size=4, num_labels=3, attn_implementation=attention)
    return transformers.ViTForImageClassification(config)


def whisper(attention: str) -> Any:
    sizes = {"vocab_size": 50, "num_mel_bins": 4, "d_model": 16, "max_source_positions": 8, "max_target_positions": 32}
    layers = {f"{part}_{what}": n for part in ("encoder", "decoder") for what, n in LAYERS.items()}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = transformers.WhisperConfig(**sizes, **layers, **special, attn_implementation=attention)
    return transformers.WhisperForConditionalGeneration(config)


LAYERS = {"layers": 1, "attention_heads": 2, "ffn_dim": 32}

# The model, its inputs for one row, and how many of a row's labels its loss counts.
MODELS: dict[str, tuple[Callable[[str], Any], Callable[[int], dict[str, Tensor]], Callable[[int], int]]] = {
    "bert": (lambda attention: bert("ForMaskedLM", attn_implementation=attention), tokens, lambda n: n),
    "gpt2": (lambda attention: gpt2(attn_implementation=attention), tokens, lambda n: n - 1),
    "llama": (lambda attention: llama(attn_implementation=attention), tokens, lambda n: n - 1),
    "t5": (lambda attention: t5(attn_implementation=attention), tokens, lambda n: n),
    "whisper": (whisper, speech, lambda n: n),
}


def prepared(model: Any) -> Any:
    """In float64 (but for what a model casts to float32 itself), training, with nothing drawn at random."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    padded_calls.fallbacks.clear()
    return model.double().train()


def gradients(model: Any, loss: Tensor) -> list[Tensor]:
    learned = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad(loss, learned, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(learned, found, strict=True)]


def check(model: Any, padded: dict[str, Any], loss: Tensor) -> Any:
    out = model(**padded)
    torch.testing.assert_close(out.loss.double(), loss.double(), **AGREEING)
    for a, b in zip(gradients(model, out.loss), gradients(model, loss), strict=True):
        torch.testing.assert_close(a, b, **AGREEING)
    assert not padded_calls.fallbacks
    return out.logits


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", MODELS)
def test_a_ragged_batch_is_its_rows_run_alone(name: str, attention: str) -> None:
    torch.manual_seed(0)
    build, inputs, counted = MODELS[name]
    model = prepared(build(attention))
    lengths = (5, 9, 3)
    rows = [inputs(n) for n in lengths]
    alone = [model(**row) for row in rows]
    padded: dict[str, Any] = {}
    for key in rows[0]:
        parts = [row[key][0] for row in rows]
        ragged = len({len(part) for part in parts}) > 1
        padded[key] = st.pad(parts, {0: SEQ}, value=7 if key == "labels" else 10**6) if ragged else torch.stack(parts)
    labels = sum(counted(n) for n in lengths)
    loss = sum(out.loss * counted(n) for out, n in zip(alone, lengths, strict=True)) / labels
    logits = check(model, padded, loss)
    for a, b in zip(logits.unpad(), alone, strict=True):
        torch.testing.assert_close(a, b.logits[0], **AGREEING)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_padded_batch_of_images_is_the_batch(attention: str) -> None:
    torch.manual_seed(0)
    model = prepared(vit(attention))
    batch = images(3)
    poison = {"pixel_values": float("nan"), "labels": 2**40}
    expected = model(**batch)
    logits = check(model, {k: st.pad(t, {0: BATCH}, value=poison[k]) for k, t in batch.items()}, expected.loss)
    torch.testing.assert_close(logits.unpad(), expected.logits, **AGREEING)
