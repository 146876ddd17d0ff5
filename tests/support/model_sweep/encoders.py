"""Rows of the sweep: encoders of text."""

from __future__ import annotations

from model_sweep.texts import encoder, masked

_LIKE_BERT = """Albert Bert BigBird Camembert ConvBert Data2VecText Deberta DebertaV2 DistilBert Electra Ernie Esm
EuroBert FNet Gte IBert LayoutLM MegatronBert ModernBert MPNet NomicBert Nystromformer RemBert
Roberta RobertaPreLayerNorm RoFormer Tapas XLMRoberta XLMRobertaXL Yoso""".split()

CASES = [
    *(masked(f"{kind}ForMaskedLM") for kind in _LIKE_BERT),
    masked("BigBirdForMaskedLM", name="BigBirdForMaskedLM, block_sparse", attention_type="block_sparse", block_size=4),
    encoder(
        "CanineModel",
        ((7,), (5,), (8,), (12,), (9,), (4,)),
        ((5,), (9,), (4,)),
        num_hash_buckets=16,
        num_hash_functions=2,
        downsampling_rate=2,
        upsampling_kernel_size=2,
        local_transformer_stride=4,
    ),
    masked("LongformerForMaskedLM", attention_window=4),
    masked("LukeForMaskedLM", entity_vocab_size=10, entity_emb_size=16),
    masked(
        "MobileBertForMaskedLM",
        embedding_size=16,
        true_hidden_size=16,
        intra_bottleneck_size=16,
        num_feedforward_networks=1,
    ),
    masked("SqueezeBertForMaskedLM", embedding_size=16),
    masked("XmodForMaskedLM", languages=["en"], default_language="en"),
]
