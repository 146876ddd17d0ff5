"""A small GPT, written for plain tensors; where asked for, the hidden states before its head are chunked."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from subtensors.chunked.chunked_tensor import chunk

LOSS_CHUNKS = 8


@dataclass(frozen=True)
class Size:
    """How large the model is.

    Args:
        layers: transformer blocks.
        width: of the residual stream.
        heads: attention heads a block; they divide the width.
        context: the longest sequence, in tokens.
    """

    layers: int
    width: int
    heads: int
    context: int


class Block(nn.Module):
    """Pre-norm attention and a four times wider MLP."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.attention_norm = nn.LayerNorm(size.width)
        self.query_key_value = nn.Linear(size.width, 3 * size.width)
        self.attention_out = nn.Linear(size.width, size.width)
        self.mlp_norm = nn.LayerNorm(size.width)
        self.mlp_in = nn.Linear(size.width, 4 * size.width)
        self.mlp_out = nn.Linear(4 * size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:  # (batch, length, width)
        """The next residual stream, `(batch, length, width)`."""
        batch, length, width = x.shape
        heads = self.query_key_value(self.attention_norm(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each (batch, heads, length, width / heads)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))
        hidden = F.gelu(self.mlp_in(self.mlp_norm(x)), approximate="tanh")
        result: Tensor = x + self.mlp_out(hidden)
        return result


class Trunk(nn.Module):
    """A GPT without its head.

    Args:
        size: of the model.
        vocabulary: how many tokens there are.
    """

    def __init__(self, size: Size, vocabulary: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, size.width)
        self.position = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)

    def forward(self, inputs: Tensor) -> Tensor:  # (batch, length), int64
        """Hidden states, `(batch, length, width)`."""
        x = self.token(inputs) + self.position.weight[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        hidden: Tensor = self.norm(x)
        return hidden


class GPT(nn.Module):
    """Next-token logits from a sequence of tokens.

    Args:
        size: of the model.
        vocabulary: how many tokens there are.
        chunked: give logits as a ChunkedTensor: they and their gradient are then taken in parts.

    >>> import torch
    >>> GPT(Size(layers=1, width=8, heads=2, context=16), 300)(torch.zeros(3, 5, dtype=torch.long)).shape
    torch.Size([3, 5, 300])
    """

    def __init__(self, size: Size, vocabulary: int, chunked: bool = False) -> None:
        super().__init__()
        self.chunked = chunked
        self.trunk = Trunk(size, vocabulary)
        self.head = nn.Linear(size.width, vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, inputs: Tensor) -> Tensor:  # (batch, length), int64
        """Logits, `(batch, length, vocabulary)`."""
        return self.logits(self.trunk(inputs))

    def logits(self, hidden: Tensor) -> Tensor:  # (batch, length, width)
        """Logits, `(batch, length, vocabulary)`."""
        logits: Tensor = self.head(chunk(hidden, chunks=LOSS_CHUNKS) if self.chunked else hidden)
        return logits
