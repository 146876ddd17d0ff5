"""Rows of the sweep: an encoder and a decoder of text, each with a length of its own."""

from __future__ import annotations

from model_sweep.texts import translating

LAYERS: dict[str, object] = {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "decoder_start_token_id": 2,
}
_LIKE_BART = "Bart MBart Mvp Pegasus Blenderbot BlenderbotSmall M2M100 PLBart".split()

T5: dict[str, object] = {
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": 2,
    "num_heads": 2,
    "decoder_start_token_id": 0,
}

CASES = [
    *(translating(f"{kind}ForConditionalGeneration", **LAYERS) for kind in _LIKE_BART),
    translating("MarianMTModel", **LAYERS),
    translating("PegasusXForConditionalGeneration", **LAYERS, block_size=4, num_global_tokens=2),
    translating("LEDForConditionalGeneration", **LAYERS, attention_window=4, max_encoder_position_embeddings=64),
    translating("BigBirdPegasusForConditionalGeneration", **LAYERS, block_size=4, num_random_blocks=1),
    *(translating(f"{kind}ForConditionalGeneration", **T5) for kind in "T5 MT5 UMT5".split()),
    translating("LongT5ForConditionalGeneration", **T5, local_radius=3),
    translating(
        "ProphetNetForConditionalGeneration",
        num_encoder_layers=1,
        num_decoder_layers=1,
        num_encoder_attention_heads=2,
        num_decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
    ),
]
