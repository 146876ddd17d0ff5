"""Real text that is always there: the sources of the Python standard library."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor


def corpus(size: int) -> Tensor:
    """The first `size` bytes of the standard library's top-level modules, in the order of their names.

    Args:
        size: how many bytes.

    Returns:
        uint8, `(size,)`.

    Raises:
        FileNotFoundError: this Python comes without that many bytes of sources.

    >>> bytes(corpus(12)).decode()
    '\"\"\"Record of'
    """
    folder = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= size:
            return torch.frombuffer(text[:size], dtype=torch.uint8)
    raise FileNotFoundError(f"{folder} holds {len(text)} bytes of Python sources, and {size} are needed")


def pairs(text: Tensor) -> tuple[Tensor, int]:
    """A text as tokens: two bytes each, numbered among those pairs that the text has.

    Args:
        text: uint8, `(size,)`.

    Returns:
        int64, `(size // 2,)`, and how many numbers there are.

    >>> pairs(torch.tensor([1, 2, 0, 9, 1, 2, 7], dtype=torch.uint8))
    (tensor([1, 0, 1]), 2)
    """
    two = text[: len(text) // 2 * 2].view(-1, 2).long()
    distinct, numbers = (two[:, 0] * 256 + two[:, 1]).unique(return_inverse=True)
    return numbers, len(distinct)


def batches(text: Tensor, batch: int, context: int, steps: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Random windows of the text, the same ones for the same seed.

    Args:
        text: tokens, `(size,)`.
        batch: windows a step.
        context: tokens a window.
        steps: how many batches.
        seed: of the windows' places.

    Yields:
        inputs and, one token on, targets; both int64, `(batch, context)`, on the CPU.

    >>> inputs, targets = next(batches(torch.arange(10, dtype=torch.uint8), batch=2, context=3, steps=1, seed=0))
    >>> bool((targets == inputs + 1).all())
    True
    """
    generator = torch.Generator().manual_seed(seed)
    window = torch.arange(context + 1)
    for _ in range(steps):
        starts = torch.randint(len(text) - context, (batch, 1), generator=generator)
        rows = text[starts + window].long()
        yield rows[:, :-1], rows[:, 1:]
