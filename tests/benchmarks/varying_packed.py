"""Packed attention of variable length in one CUDA graph, built by hand: what a batch's padding costs goes away.

The sequences of a batch lie one behind the other in one row of a fixed number of tokens. Where each begins is a tensor
that the attention kernel reads, a static buffer of the graph, so one graph serves every batch whose tokens fit. The
rest of the row is sequences too, of tokens that no loss counts: a kernel that skipped them would leave memory as it
was, and the products of a backward would read it.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.varying_cases import IGNORED

NAME = "packed_varlen"
"""What transformers knows the attention by; masks are made for none whose name it does not know."""


class Packing:
    """How batches are laid out in one row.

    Args:
        tokens: of the row.
        longest: of a sequence.
        sequences: of a batch, at most.
        labels: whether a batch has labels.
    """

    def __init__(self, tokens: int, longest: int, sequences: int, labels: bool) -> None:
        self.tokens, self.longest, self.labels = tokens, longest, labels
        self.sequences = sequences
        self.slots = sequences + -(-tokens // longest)

    @staticmethod
    def of(batches: Sequence[Sequence[Tensor]], longest: int, labels: bool, more: int = 1) -> Packing:
        """Return the smallest packing, in steps of 128 tokens, for every batch, or for more sequences by a factor."""
        tokens = max(sum(map(len, batch)) for batch in batches)
        return Packing(-(-tokens // 128) * 128, longest, more * max(map(len, batches)), labels)

    def fill(self, batches: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        """Return the same sequences in the same order, in as few batches as the row has room for."""
        filled: list[list[Tensor]] = [[]]
        for each in (sequence for batch in batches for sequence in batch):
            is_full = sum(map(len, filled[-1])) + len(each) > self.tokens
            if is_full or len(filled[-1]) == self.sequences:
                filled.append([])
            filled[-1].append(each)
        return filled

    def collate(self, sequences: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return a batch: tokens, positions and labels, (1, tokens) int64, and ends, (slots + 1,) int32."""
        lengths = [len(each) for each in sequences]
        left = self.tokens - sum(lengths)
        lengths += [min(self.longest, left - start) for start in range(0, left, self.longest)]
        ends = [0]
        for n in lengths:
            ends.append(ends[-1] + n)
        ends += [self.tokens] * (self.slots + 1 - len(ends))
        found = {
            "input_ids": F.pad(torch.cat(list(sequences)), (0, left))[None],
            "position_ids": torch.cat([torch.arange(n) for n in lengths])[None],
            "cu_seq_lens_q": torch.tensor(ends, dtype=torch.int32),
        }
        if self.labels:
            # A model's loss shifts the labels by one: the first token of a sequence is nobody's next one.
            found["labels"] = F.pad(torch.cat(list(sequences)), (0, left), value=IGNORED)[None]
            found["labels"][0, [end for end in ends[:-1] if end < self.tokens]] = IGNORED
        return found

    def attend_in(self, model: nn.Module) -> None:
        """Have a model of transformers attend within the sequences of a pack."""
        modeling = importlib.import_module("transformers.modeling_utils")
        modeling.AttentionInterface.register(NAME, self._attention)
        config: Any = model.config
        config._attn_implementation = NAME

    def _attention(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None,
        cu_seq_lens_q: Tensor | None = None,
        **kwargs: object,
    ) -> tuple[Tensor, None]:
        """Attention as transformers calls it, of (1, heads, tokens, dim), scaled as torch does by default."""
        assert cu_seq_lens_q is not None
        causal = bool(getattr(module, "is_causal", False))
        q, k, v = (each.squeeze(0).transpose(0, 1) for each in (query, key, value))
        attend = _on_gpu if query.is_cuda else _on_cpu
        return attend(q, k, v, cu_seq_lens_q, self.longest, causal)[None], None


def refusal(device: str) -> str:
    """Return why this torch can't attend to packed sequences; "" if it can."""
    return "" if device == "cpu" or varlen_attn is not None else f"torch {torch.__version__} has no varlen_attn"


def _on_gpu(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int, causal: bool) -> Tensor:
    options = _CAUSAL if causal else {}
    out: Tensor = varlen_attn(q, k, v, ends, ends, longest, longest, **options)
    return out


def _on_cpu(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int, causal: bool) -> Tensor:
    """The same by a mask, where there is no such kernel."""
    number = torch.searchsorted(ends, torch.arange(len(q), dtype=ends.dtype), right=True)
    mask = number[:, None] == number[None, :]
    if causal:
        mask = mask.tril()
    q, k, v = (each.transpose(0, 1) for each in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, mask).transpose(0, 1)


varlen_attn: Any = None
with contextlib.suppress(ImportError):  # of torch before 2.10
    varlen_attn = importlib.import_module("torch.nn.attention.varlen").varlen_attn
_CAUSAL: dict[str, Any] = {"window_size": (-1, 0)}
if varlen_attn is not None and "is_causal" in inspect.signature(varlen_attn).parameters:
    _CAUSAL = {"is_causal": True}
