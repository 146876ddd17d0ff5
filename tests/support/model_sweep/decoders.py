"""Rows of the sweep: decoders of text."""

from __future__ import annotations

from model_sweep.texts import causal

_LIKE_LLAMA = """Apertus Arcee BitNet Cohere Cohere2 Ernie4_5 Exaone4 Gemma Gemma2 Glm Glm4 Granite Helium
HunYuanDenseV1 Jais2 Llama Ministral Ministral3 Mistral ModernBertDecoder NanoChat Nemotron Olmo Olmo2 Olmo3 Persimmon
Phi Phi3 Qwen2 Qwen3 SeedOss SmolLM3 StableLm Starcoder2 VaultGemma Emu3 Cwm Doge""".split()

CASES = [
    *(causal(f"{kind}ForCausalLM", "decoder") for kind in _LIKE_LLAMA),
]
