"""The ways to take linear + cross entropy that are measured, each called the way its documentation says."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

from subtensors.kernels.cross_entropy.linear_cross_entropy import Accumulate

LossOf = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(hidden, weight, target) -> the mean loss."""


def _eager(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), target)


def _compiled() -> LossOf:
    function: LossOf = torch.compile(_eager)
    return function


def _auto_chunked() -> LossOf:
    function: LossOf = torch.compile(_eager, options={"auto_chunker.enable": True})
    return function


def _liger(**options: int) -> LossOf:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy  # type: ignore[import-not-found]

    def loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        result: Tensor | tuple[Tensor, ...] = liger_fused_linear_cross_entropy(hidden, weight, target, **options)
        return result[0] if isinstance(result, tuple) else result

    return loss


def _liger_hopper() -> LossOf:
    """Liger's kernels in CuTe, for Hopper alone."""
    _mend_logger()
    from liger_kernel.ops.cutedsl.ops import fused_linear_cross_entropy_sm90  # type: ignore[import-not-found]

    function = fused_linear_cross_entropy_sm90.LigerFusedLinearCrossEntropySM90Function

    def loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        result: Tensor | tuple[Tensor, ...] = function.apply(hidden, weight, target)
        return result[0] if isinstance(result, tuple) else result

    return loss


def _quack() -> LossOf:
    """QuACK's products whose epilogue has exponentials, by its own choice of kernel."""
    _mend_logger()
    from quack.linear_cross_entropy import chunked_linear_cross_entropy  # type: ignore[import-not-found]

    function: LossOf = chunked_linear_cross_entropy
    return function


def _mend_logger() -> None:
    # QuACK 0.6.5 asks everything that a kernel refers to for a key, and the CUTLASS DSL's logger has none.
    logging.Logger.__quack_semantic_key__ = lambda self: self.name  # type: ignore[attr-defined]  # QuACK's


def _cut() -> LossOf:
    from cut_cross_entropy import linear_cross_entropy  # type: ignore[import-not-found]

    function: LossOf = linear_cross_entropy
    return function


def _core() -> LossOf:
    options = torch.nn.LinearCrossEntropyOptions()
    return lambda hidden, weight, target: F.linear_cross_entropy(hidden, weight, target, options=options)


CHECKPOINTED_CHUNKS = 8


def _checkpointed() -> LossOf:
    """Chunks of rows, each computed again at backward, as fine-tuning libraries do it."""
    from torch.utils.checkpoint import checkpoint

    def part(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(hidden, weight).float(), target, reduction="sum")

    def loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        chunks = zip(hidden.chunk(CHECKPOINTED_CHUNKS), target.chunk(CHECKPOINTED_CHUNKS), strict=True)
        parts = [checkpoint(part, h, weight, t, use_reentrant=False) for h, t in chunks]
        return torch.stack(parts).sum() / target.shape[0]

    return loss


@dataclass(frozen=True)
class Peer:
    """One way to take the loss.

    Args:
        make: gives the loss function.
        package: what must be installed, None for torch alone.
        exists: whether this torch has it.
    """

    make: Callable[[], LossOf]
    package: str | None = None
    exists: bool = True

    @property
    def is_here(self) -> bool:
        """Can it be measured here?"""
        return self.exists and (self.package is None or find_spec(self.package) is not None)


PEERS: dict[str, Peer] = {
    "eager": Peer(lambda: _eager),
    "compile": Peer(_compiled),
    "auto_chunker": Peer(_auto_chunked),
    "liger": Peer(_liger, "liger_kernel"),
    "liger 16": Peer(lambda: _liger(chunk_mem_const=16), "liger_kernel"),
    "liger hopper": Peer(_liger_hopper, "cutlass"),
    "quack": Peer(_quack, "quack"),
    "cce": Peer(_cut, "cut_cross_entropy"),
    "core": Peer(_core, exists=hasattr(torch.nn, "LinearCrossEntropyOptions")),
    "checkpoint": Peer(_checkpointed),
}


@dataclass(frozen=True)
class Shape:
    """A loss that is measured.

    Args:
        tokens, hidden, vocabulary: N, H, V.
        rows: chunks of so many rows are measured, both ways to add up.
        columns: blocks of so many columns are measured, each with so many blocks that have memory of their own.
        through: of so many rows, and how their sums add up, the whole way through `st.chunk` is measured, too.
    """

    tokens: int
    hidden: int
    vocabulary: int
    rows: tuple[int, ...]
    columns: tuple[tuple[int, int], ...] = field(default=())
    through: tuple[tuple[Accumulate, int], ...] = field(default=())


SHAPES: dict[str, Shape] = {
    "gemma2-2b": Shape(
        *(8192, 2304, 256000),
        (112, 512, 1024, 2048, 4096, 8192),
        ((1056, 0), (4224, 0), (8448, 0), (8448, 6), (8448, 14)),
        (("fast", 2048), ("exact", 2048)),
    ),
    "llama3-8b": Shape(
        *(4096, 4096, 128256),
        (126, 256, 512, 1024, 2048, 4096),
        ((2112, 0), (4224, 0), (8448, 0), (16896, 0), (42752, 0)),
        (("fast", 1024), ("exact", 1024)),
    ),
    "gpt2": Shape(
        *(16384, 768, 50304),
        (240, 512, 896, 1024, 2048, 4096, 16384),
        ((1056, 0), (2112, 0), (4224, 0), (4224, 4)),
        (("fast", 1024), ("exact", 896)),
    ),
}

TINY = Shape(32, 8, 96, (8, 32), ((32, 0), (32, 1)), (("exact", 8),))
