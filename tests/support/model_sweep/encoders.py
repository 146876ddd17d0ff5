"""Rows of the sweep: encoders of text."""

from __future__ import annotations

from model_sweep.texts import masked

CASES = [
    *(masked(f"{kind}ForMaskedLM") for kind in "Albert Bert BigBird Camembert ConvBert Data2VecText Deberta DebertaV2 DistilBert Electra Ernie Esm EuroBert FNet Funnel Gte IBert LayoutLM Longformer Luke MegatronBert ModernBert MPNet Mra NomicBert Nystromformer RemBert Roberta RobertaPreLayerNorm RoFormer Tapas XLMRoberta XLMRobertaXL Yoso".split()),
]
