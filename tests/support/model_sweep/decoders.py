"""Rows of the sweep: decoders of text."""

from __future__ import annotations

from model_sweep.texts import causal

_LIKE_LLAMA = """Apertus Arcee BitNet Cohere Cohere2 Cwm Doge Emu3 Ernie4_5 Exaone4 Gemma Gemma2 Glm Glm4 Granite Helium
HunYuanDenseV1 Jais2 Llama Ministral Ministral3 Mistral Mllama ModernBertDecoder NanoChat Nemotron Olmo Olmo2 Olmo3
Persimmon Phi Phi3 Qwen2 Qwen3 SeedOss SmolLM3 StableLm Starcoder2 VaultGemma
BioGpt Bloom Falcon GPTBigCode GPTNeoX GPTNeoXJapanese Mpt""".split()
_DECODER: dict[str, object] = {"d_model": 16, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 24}

CASES = [
    *(causal(f"{kind}ForCausalLM", "decoder") for kind in _LIKE_LLAMA),
    causal("BertLMHeadModel", "decoder", is_decoder=True),
    causal("BlenderbotForCausalLM", "decoder", shift=0, **_DECODER),
    causal("CTRLLMHeadModel", "decoder", n_embd=16, dff=24, n_layer=2, n_head=2, n_positions=64),
    causal("DiffLlamaForCausalLM", "decoder", num_key_value_heads=2),
    causal("FalconForCausalLM", "decoder", "FalconForCausalLM, alibi", alibi=True),
    causal("FlaubertWithLMHeadModel", "decoder", emb_dim=16, n_layers=2, n_heads=2),
    causal("GPT2LMHeadModel", "decoder"),
    causal("GPTJForCausalLM", "decoder", n_embd=16, n_head=2, n_layer=2, n_positions=64, rotary_dim=4, n_inner=24),
    causal(
        "GPTNeoForCausalLM",
        "decoder",
        num_layers=2,
        num_heads=2,
        attention_types=[[["global", "local"], 1]],
        window_size=4,
    ),
    causal("Gemma3ForCausalLM", "decoder", sliding_window=4),
    causal(
        "Gemma3nForCausalLM",
        "decoder",
        num_kv_shared_layers=0,
        vocab_size_per_layer_input=50,
        hidden_size_per_layer_input=8,
        laurel_rank=4,
        layer_types=["sliding_attention", "full_attention"],
    ),
    causal("MistralForCausalLM", "decoder", "MistralForCausalLM, sliding window", sliding_window=4),
    causal("OPTForCausalLM", "decoder", ffn_dim=24, word_embed_proj_dim=16),
    causal("OpenAIGPTLMHeadModel", "decoder"),
    causal("TrOCRForCausalLM", "decoder", shift=0, **_DECODER),
    causal("XLMWithLMHeadModel", "decoder", emb_dim=16, n_layers=2, n_heads=2),
    causal("XLNetLMHeadModel", "decoder", d_model=16, n_layer=2, n_head=2, d_inner=24, d_head=8),
]
