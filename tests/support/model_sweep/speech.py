"""Rows of the sweep: models of speech and audio."""

from __future__ import annotations

import torch
from torch import Tensor

import subtensors as st
from model_sweep.case import ANSWER, ModelCase, tiny, tokens

SAMPLES = st.Dim("samples", max=128, buckets=[64, 128])
FRAMES = st.Dim("frames", max=32, buckets=[8, 16, 32])

_LENGTHS = ((57,), (49,), (64,), (90,), (75,), (40,), (51,))
_RAGGED = ((57,), (93,), (40,))

_CONVOLUTIONS: dict[str, object] = {
    "conv_dim": (8, 8, 8),
    "conv_kernel": (4, 3, 2),
    "conv_stride": (3, 2, 2),
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
}
_NO_DROPOUT: dict[str, object] = {
    f"{name}": 0.0
    for name in "hidden_dropout activation_dropout attention_dropout feat_proj_dropout final_dropout layerdrop".split()
}


def waves(model: str, name: str | None = None, **options: object) -> ModelCase:
    """A model of samples, which its convolutions take apart."""

    def inputs(n: int, rows: int) -> dict[str, Tensor]:
        return {"input_values": torch.randn(rows, n)}

    built = tiny(model, **{**_CONVOLUTIONS, **_NO_DROPOUT, "mask_time_prob": 0.0, **options})
    return ModelCase(name or model, "speech", built, inputs, {"input_values": {1: SAMPLES}}, _LENGTHS, _RAGGED)


def frames(model: str, name: str | None = None, key: str = "input_features", **options: object) -> ModelCase:
    """An encoder of frames of a spectrogram, 8 numbers each."""

    def inputs(n: int, rows: int) -> dict[str, Tensor]:
        return {key: torch.randn(rows, n, 8)}

    return ModelCase(name or model, "speech", tiny(model, **options), inputs, {key: {1: FRAMES}})


def transcribing(model: str, key: str = "input_features", **options: object) -> ModelCase:
    """An encoder of frames and a decoder of text."""

    def inputs(n: int, m: int, rows: int) -> dict[str, Tensor]:
        return {key: torch.randn(rows, n, 8), "labels": tokens(m, rows)}

    dims = {key: {1: FRAMES}, "labels": {1: ANSWER}}
    calls = ((7, 3), (5, 6), (8, 8), (12, 5), (9, 7), (4, 4), (3, 1), (10, 12))
    return ModelCase(
        model, "speech", tiny(model, **options), inputs, dims, calls, ((5, 4), (9, 6), (4, 3)), lambda n, m: m
    )


def whisper(model: str, **options: object) -> ModelCase:
    """A decoder of text beside spectrograms, all of one length."""

    def inputs(m: int, rows: int) -> dict[str, Tensor]:
        return {"input_features": torch.randn(rows, 8, 24), "labels": tokens(m, rows)}

    built = tiny(model, num_mel_bins=8, max_source_positions=12, max_target_positions=64, **_LAYERS, **options)
    return ModelCase(model, "speech", built, inputs, {"labels": {1: ANSWER}}, counted=lambda m: m)


_LAYERS: dict[str, object] = {
    "d_model": 16,
    **{f"{part}_layers": 2 for part in ("encoder", "decoder")},
    **{f"{part}_attention_heads": 2 for part in ("encoder", "decoder")},
    **{f"{part}_ffn_dim": 24 for part in ("encoder", "decoder")},
    "decoder_start_token_id": 1,
}
_TWO_NORMS: dict[str, object] = {"feat_extract_norm": "layer", "do_stable_layer_norm": True}
_SQUEEZED: dict[str, object] = {"squeeze_factor": 2, "hidden_size": 16}

CASES = [
    waves("Wav2Vec2Model"),
    waves("Wav2Vec2Model", "Wav2Vec2Model with layer norm", **_TWO_NORMS),
    waves("Wav2Vec2ForCTC"),
    waves("Wav2Vec2ForSequenceClassification", classifier_proj_size=8),
    waves("HubertModel"),
    waves("HubertForCTC", **_TWO_NORMS),
    waves("WavLMModel", num_buckets=8, max_bucket_distance=16),
    waves("UniSpeechModel"),
    waves("UniSpeechSatModel"),
    waves("Data2VecAudioModel", conv_pos_kernel_size=3, num_conv_pos_embeddings=2),
    waves("SEWModel", **_SQUEEZED),
    waves("SEWDModel", **_SQUEEZED, max_position_embeddings=32, position_buckets=8),
    waves("Wav2Vec2ConformerModel", conv_depthwise_kernel_size=3, position_embeddings_type="relative"),
    waves(
        "Wav2Vec2ConformerModel",
        "Wav2Vec2ConformerModel rotary",
        conv_depthwise_kernel_size=3,
        position_embeddings_type="rotary",
    ),
    frames("Wav2Vec2BertModel", feature_projection_input_dim=8, conv_depthwise_kernel_size=3, **_NO_DROPOUT),
    frames("ParakeetEncoder", num_mel_bins=8, subsampling_factor=4, subsampling_conv_channels=4, conv_kernel_size=3),
    transcribing("Speech2TextForConditionalGeneration", input_feat_per_channel=8, conv_channels=8, **_LAYERS),
    whisper("WhisperForConditionalGeneration"),
]
