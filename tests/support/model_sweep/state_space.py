"""Rows of the sweep: state-space models, linear recurrences, and hybrids of these with attention."""

from __future__ import annotations

from model_sweep.texts import causal

_MAMBA: dict[str, object] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_d_state": 4,
    "mamba_n_groups": 1,
}

CASES = [
    causal("MambaForCausalLM", "state-space", state_size=4),
    causal("FalconMambaForCausalLM", "state-space", state_size=4),
    causal("Mamba2ForCausalLM", "state-space", num_heads=4, state_size=4, n_groups=1, chunk_size=4),
    causal("BambaForCausalLM", "state-space", **_MAMBA, attn_layer_indices=[1]),
    causal("FalconH1ForCausalLM", "state-space", **_MAMBA, mamba_d_ssm=32, mamba_chunk_size=4),
    causal(
        "JambaForCausalLM",
        "state-space",
        mamba_d_state=4,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=2,
        use_mamba_kernels=False,
    ),
    causal(
        "Zamba2ForCausalLM",
        "state-space",
        mamba_d_state=4,
        layer_types=["mamba", "hybrid"],
        mamba_ngroups=1,
        n_mamba_heads=2,
        mamba_headdim=16,
        chunk_size=4,
        hybrid_layer_ids=[1],
        num_mem_blocks=1,
    ),
    causal(
        "NemotronHForCausalLM",
        "state-space",
        mamba_num_heads=4,
        mamba_head_dim=8,
        ssm_state_size=4,
        n_groups=1,
        chunk_size=4,
        hybrid_override_pattern="M*",
    ),
    causal("GraniteMoeHybridForCausalLM", "state-space", **_MAMBA, layer_types=["mamba", "attention"]),
    causal("RecurrentGemmaForCausalLM", "state-space", lru_width=16, attention_window_size=4),
    causal("RwkvForCausalLM", "state-space", attention_hidden_size=16),
    causal("xLSTMForCausalLM", "state-space"),
    causal("Lfm2ForCausalLM", "state-space"),
    causal(
        "Qwen3NextForCausalLM",
        "state-space",
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    ),
]
