"""The encoder of `serve_embeddings`, and the ways in which a batch of texts of several lengths goes through it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from torch import Tensor, nn

import subtensors as st


@dataclass(frozen=True)
class Limits:
    """The limits of the texts and batches that the server takes.

    Args:
        longest: bytes of the longest text.
        bucket: a text's length is rounded up to a multiple of it.
        batch: texts of the largest batch, a power of two.
        waiting: texts that may wait; beyond, they are refused.
        wait_ms: how long a batch that is not full waits for more texts.
    """

    longest: int = 512
    bucket: int = 64
    batch: int = 16
    waiting: int = 256
    wait_ms: float = 2.0

    def __post_init__(self) -> None:
        if self.batch < 1 or self.batch & (self.batch - 1):
            raise ValueError(f"batch is a power of two, got {self.batch}")


class Encoder(nn.Module):
    """Embeddings of length one from texts of bytes.

    Args:
        longest: bytes of the longest text.
        width: numbers of an embedding.
        layers: transformer layers.
    """

    def __init__(self, longest: int, width: int = 256, layers: int = 6) -> None:
        super().__init__()
        self.width = width
        self.token = nn.Embedding(256, width)
        self.position = nn.Embedding(longest, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, width // 32, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor, padding: Tensor | None = None) -> Tensor:
        """Return embeddings, (batch, width).

        Args:
            tokens: (batch, length) int64; a ragged PaddedTensor needs no more.
            padding: (batch, length) bool, True beyond the end of a text, for a plain tensor.
        """
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=padding)
        x = self.norm(x)
        if padding is None:
            mean = x.mean(1)
        else:
            valid = ~padding[:, :, None]
            mean = (x * valid).sum(1) / valid.sum(1)
        return F.normalize(mean, dim=-1)


def encoder_on(device: str, limits: Limits) -> Encoder:
    """Return the encoder with random weights, always the same ones, smaller on a CPU; load trained ones here."""
    torch.manual_seed(0)
    width, layers = (64, 2) if device == "cpu" else (256, 6)
    return Encoder(limits.longest, width, layers).to(device).eval()


class Engine(Protocol):
    """A maker of embeddings of a batch; called by one thread."""

    def warmup(self) -> None:
        """Make everything ready that a first batch would wait for."""

    def embed(self, texts: list[Tensor]) -> list[list[float]]:
        """Return an embedding a text; each text (length,) int64 on the CPU."""

    def metrics(self) -> Iterable[Metric]:
        """Return what Prometheus is told."""

    def release(self) -> None:
        """Give memory back."""


class BucketedEngine:
    """Batches through `st.bucketed`: one CUDA graph for each size of a batch and bucket of lengths.

    Args:
        encoder: on its device, in evaluation mode.
        limits: which sizes there are.
    """

    def __init__(self, encoder: Encoder, limits: Limits) -> None:
        self.limits = limits
        self.device = encoder.norm.weight.device
        self.length = st.Dim("length", max=limits.longest, buckets=limits.bucket)
        self.run = st.bucketed(encoder, {"tokens": {1: self.length}}, check=False)  # `warmup` has each bucket checked
        self.sizes = [2**power for power in range(limits.batch.bit_length())]
        self._filler = torch.zeros(1, dtype=torch.long)

    def warmup(self) -> None:
        """Capture every graph, the largest first, and compare it with the encoder."""
        for size in reversed(self.sizes):
            for longest in range(self.limits.longest, 0, -self.limits.bucket):
                texts = [torch.arange(max(1, longest - row)) % 256 for row in range(size)]
                self.embed(texts)
                with torch.inference_mode():
                    report = self.run.check(self._batch(texts))
                if not report.passed:
                    raise RuntimeError(str(report))

    def _batch(self, texts: list[Tensor]) -> Tensor:
        """Return texts as a ragged batch of the next size, with rows of one byte beyond them."""
        rows = self.sizes[bisect_left(self.sizes, len(texts))]
        filled = texts + [self._filler] * (rows - len(texts))
        return st.pad(filled, {0: self.length}).to(self.device)  # one copy

    @torch.inference_mode()
    def embed(self, texts: list[Tensor]) -> list[list[float]]:
        """Return an embedding a text."""
        found: list[list[float]] = self.run(self._batch(texts))[: len(texts)].tolist()
        return found

    def metrics(self) -> Iterable[Metric]:
        """Return the counts of the runner's `stats()`."""
        stats = self.run.stats()
        totals = {
            "calls": stats.calls,
            "replays": stats.hits,
            "captures": stats.captures,
            "fallbacks": sum(stats.fallbacks.values()),
        }
        for name, value in totals.items():
            yield CounterMetricFamily(f"bucketed_{name}", f"{name} of the runner", value=value)
        yield GaugeMetricFamily("bucketed_waste_ratio", "part of the work that was padding", value=stats.waste)
        yield GaugeMetricFamily("bucketed_pool_bytes", "memory of the graphs", value=stats.pool_bytes)
        buckets = CounterMetricFamily("bucketed_bucket_calls", "calls of a bucket", labels=["rows", "length"])
        for bucket in stats.buckets:
            rows, longest = bucket.shapes[0]
            buckets.add_metric([str(rows), str(longest)], bucket.calls)
        yield buckets

    def release(self) -> None:
        """Give the memory of graphs and inputs back."""
        self.run.release()


class PlainEngine:
    """The same encoder without this package: padded by hand, with a mask.

    Args:
        encoder: on its device, in evaluation mode.
        limits: which sizes there are.
        compiled: whether `torch.compile` makes its code, for all sizes at once.
    """

    def __init__(self, encoder: Encoder, limits: Limits, compiled: bool = False) -> None:
        self.limits = limits
        self.device = encoder.norm.weight.device
        self.run: Callable[[Tensor, Tensor], Tensor] = torch.compile(encoder, dynamic=True) if compiled else encoder

    def warmup(self) -> None:
        """Compile, and have the device's libraries start."""
        for count, longest in ((self.limits.batch, self.limits.longest), (2, self.limits.bucket), (3, 7), (1, 5)):
            self.embed([torch.zeros(n, dtype=torch.long) for n in (longest, *[longest // 2 + 1] * (count - 1))])

    @torch.inference_mode()
    def embed(self, texts: list[Tensor]) -> list[list[float]]:
        """Return an embedding a text."""
        lengths = torch.tensor([len(text) for text in texts])
        tokens = nn.utils.rnn.pad_sequence(texts, batch_first=True)
        padding = torch.arange(tokens.shape[1]) >= lengths[:, None]
        found: list[list[float]] = self.run(tokens.to(self.device), padding.to(self.device)).tolist()
        return found

    def metrics(self) -> Iterable[Metric]:
        """Return nothing: there are no buckets."""
        return ()

    def release(self) -> None:
        """Do nothing."""
