"""Rows of the sweep: mixtures of experts."""

from __future__ import annotations

from model_sweep.encoder_decoders import LAYERS, T5
from model_sweep.texts import causal, translating

_LIKE_MIXTRAL = """Mixtral Qwen2Moe Qwen3Moe Olmoe GptOss Phimoe GraniteMoe GraniteMoeShared Ernie4_5_Moe FlexOlmo
Glm4Moe HunYuanMoEV1 MiniMax MiniMaxM2 AriaText JetMoe Llama4 Afmoe""".split()
_LATENT: dict[str, object] = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}

CASES = [
    *(causal(f"{kind}ForCausalLM", "experts") for kind in _LIKE_MIXTRAL),
    causal("MixtralForCausalLM", "experts", "MixtralForCausalLM, batched_mm", experts_implementation="batched_mm"),
    causal("MixtralForCausalLM", "experts", "MixtralForCausalLM, eager", experts_implementation="eager"),
    causal("DeepseekV2ForCausalLM", "experts", **_LATENT),
    causal("DeepseekV3ForCausalLM", "experts", **_LATENT),
    causal("Dots1ForCausalLM", "experts", n_shared_experts=1, n_group=1, topk_group=1, first_k_dense_replace=1),
    translating(
        "SwitchTransformersForConditionalGeneration",
        "experts",
        **T5,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        expert_capacity=4,
    ),
    translating("NllbMoeForConditionalGeneration", "experts", **LAYERS, encoder_sparse_step=1, decoder_sparse_step=1),
]
