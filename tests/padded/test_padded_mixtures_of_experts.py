"""Mixtures of experts of Hugging Face, unmodified: experts take their tokens out of a flattened padded dim, and put
them back."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import torch
from pretend_graphs import pretend
from torch import Tensor, nn

import subtensors as st

if TYPE_CHECKING:
    import transformers
else:
    transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.filterwarnings("ignore")]

SEQ = st.Dim("seq", max=16, buckets=[8, 16])
SMALL = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 24,
    "num_experts_per_tok": 2,
}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "Mixtral": lambda: transformers.MixtralForCausalLM(transformers.MixtralConfig(**SMALL, num_local_experts=4)),
    "Qwen3-MoE": lambda: transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(**SMALL, head_dim=8, moe_intermediate_size=8, num_experts=4)
    ),
    "OLMoE": lambda: transformers.OlmoeForCausalLM(transformers.OlmoeConfig(**SMALL, num_experts=4)),
    "GPT-OSS": lambda: transformers.GptOssForCausalLM(
        transformers.GptOssConfig(**SMALL, head_dim=8, num_local_experts=4)
    ),
}


def _model(name: str, experts: str = "eager") -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[name]().double().eval()
    model.set_experts_implementation(experts)
    for p in model.parameters():
        nn.init.normal_(p, std=0.3)
    return model


def _outcome(model: nn.Module, run: Callable[[Tensor], Tensor], ids: Tensor) -> list[Tensor]:
    """The logits, and the gradients of all parameters for a fixed gradient of the logits."""
    model.zero_grad()
    logits = run(ids)
    weight = torch.randn(logits.shape, dtype=logits.dtype, generator=torch.Generator().manual_seed(0))
    (logits * weight).sum().backward()
    return [logits.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def _check(name: str, run: Callable[[nn.Module], Callable[[Tensor], Tensor]], experts: str = "eager") -> None:
    model = _model(name, experts)
    padded = run(model)
    for n in (5, 5, 7):
        ids = torch.randint(0, 50, (2, n))
        want = _outcome(model, lambda ids: model(input_ids=ids).logits, ids)
        got = _outcome(model, padded, ids)
        assert len(got) == len(want)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", MODELS)
def test_experts_take_the_tokens_of_a_padded_batch(name: str) -> None:
    _check(name, lambda model: lambda ids: model(input_ids=st.pad(ids, {1: SEQ})).logits.unpad())


@pytest.mark.parametrize("experts", ["eager", "batched_mm"])
def test_experts_take_the_tokens_of_a_ragged_batch(experts: str) -> None:
    model = _model("Mixtral", experts)
    rows = [torch.randint(0, 50, (n,)) for n in (3, 7, 5)]
    got = model(input_ids=st.pad(rows, {0: SEQ})).logits.unpad()
    for row, logits in zip(rows, got, strict=True):
        torch.testing.assert_close(logits, model(input_ids=row[None]).logits[0], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", MODELS)
def test_experts_whose_weights_are_gathered_have_graphs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, trained=True)
    runs = []

    def bucketed(model: nn.Module) -> Callable[[Tensor], Tensor]:
        runs.append(st.bucketed(model, {"input_ids": {1: SEQ}}))
        return _logits_of(runs[-1])

    _check(name, bucketed, "batched_mm")
    assert not runs[0].stats().fallbacks


@pytest.mark.parametrize("name", MODELS)
def test_a_bucket_whose_experts_ask_for_values_runs_at_its_true_size(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, trained=True)
    _check(name, lambda model: _logits_of(st.bucketed(model, {"input_ids": {1: SEQ}})))


def _logits_of(run: Callable[..., object]) -> Callable[[Tensor], Tensor]:
    return lambda ids: run(input_ids=ids).logits  # type: ignore[attr-defined, no-any-return]
