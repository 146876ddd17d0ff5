"""A language model whose loss is chunked or not, and batches of its tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import subtensors as st


class LanguageModel(nn.Module):
    """An embedding, a layer, and a head whose loss is chunked or not; `tied` shares the embedding with the head."""

    def __init__(self, tied: bool = False, chunked: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.chunked = chunked
        self.embedding = nn.Embedding(50, 8)
        self.layer = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.head = nn.Linear(8, 50, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.layer(self.embedding(tokens))
        logits = self.head(st.chunk(hidden, rows=2) if self.chunked else hidden)
        wide = torch.promote_types(logits.dtype, torch.float32)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).to(wide), tokens[:, 1:].flatten())


def batches() -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randint(0, 50, (5, 7), generator=g) for _ in range(3)]
