"""Real text that is always there: the definitions in the sources of the Python standard library, a document each."""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path

import torch
from torch import Tensor

DEFINITION = re.compile(rb"\n(?=(?:    )?(?:@|def |class |async def ))")
SHORTEST = 32
"""Bytes; what is shorter is left out."""

POOL = 8
"""Batches whose documents are sorted by length together, so that a batch holds documents of about one length."""

IGNORED = -100
"""The target where a document has ended, as `torch.nn.functional.cross_entropy` knows it."""


def corpus(size: int) -> list[bytes]:
    """Return the functions, methods and classes of the standard library's modules, in the order of their names.

    Args:
        size: bytes at least.

    Returns:
        one document a definition, or a stretch between two; their lengths vary from `SHORTEST` to many thousands.

    Raises:
        FileNotFoundError: this Python comes without that many bytes of sources.

    >>> corpus(1000)[0].splitlines()[0].decode()
    '\"\"\"Record of phased-in incompatible language changes.'
    """
    folder = Path(sysconfig.get_path("stdlib"))
    found: list[bytes] = []
    total = 0
    for path in sorted(folder.glob("*.py")):
        for document in DEFINITION.split(path.read_bytes()):
            if len(document) >= SHORTEST:
                found.append(document)
                total += len(document)
                if total >= size:
                    return found
    raise FileNotFoundError(f"{folder} holds {total} bytes of Python sources, and {size} are needed")


def tokenized(documents: list[bytes], width: int = 1) -> tuple[list[Tensor], int]:
    """Return documents as tokens of one or two bytes.

    Args:
        documents: the texts.
        width: bytes a token; pairs of bytes are numbered among those that the documents have.

    Returns:
        each document, (length,) int64, and the size of the vocabulary.

    >>> tokenized([bytes([1, 2, 0, 9, 1, 2])], width=2)
    ([tensor([1, 0, 1])], 2)
    """
    texts = [torch.frombuffer(bytearray(d[: len(d) // width * width]), dtype=torch.uint8).long() for d in documents]
    if width == 1:
        return texts, 256
    lengths = [len(text) // 2 for text in texts]
    pairs = torch.cat(texts).view(-1, 2)
    distinct, numbers = (pairs[:, 0] * 256 + pairs[:, 1]).unique(return_inverse=True)
    return list(numbers.split(lengths)), len(distinct)


def parts(documents: list[Tensor], context: int) -> list[Tensor]:
    """Return documents cut into parts that a context holds.

    Consecutive parts share a token, which is the last target of one and the first input of the next.

    >>> parts([torch.arange(6), torch.arange(2)], context=4)
    [tensor([0, 1, 2, 3, 4]), tensor([4, 5]), tensor([0, 1])]
    """
    return [d[start : start + context + 1] for d in documents for start in range(0, len(d) - 1, context)]


class Batches:
    """Batches of documents, a function of the seed and the step alone.

    Args:
        documents: each (length,) int64; those longer than a context are cut into several.
        batch: documents a step.
        context: tokens of the longest row.
        seed: of the order.

    Raises:
        ValueError: there are fewer documents than a batch holds.

    >>> batches = Batches([torch.arange(n) for n in (3, 6, 4)], batch=2, context=4, seed=0)
    >>> inputs, targets = batches[0]
    >>> inputs.shape == targets.shape, bool((targets == inputs + 1)[targets != IGNORED].all())
    (True, True)
    """

    def __init__(self, documents: list[Tensor], batch: int, context: int, seed: int) -> None:
        self.documents = parts(documents, context)
        self.batch, self.seed = batch, seed
        self.per_epoch = len(self.documents) // batch
        if not self.per_epoch:
            raise ValueError(f"{len(self.documents)} documents are fewer than a batch of {batch}")
        self._epochs: dict[int, list[list[int]]] = {}

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor]:
        """Return a step's inputs and targets, both (batch, longest) int64; targets are IGNORED beyond a document."""
        epoch, place = divmod(step, self.per_epoch)
        if epoch not in self._epochs:
            self._epochs = {epoch: self._order(epoch)}
        rows = [self.documents[index] for index in self._epochs[epoch][place]]
        inputs = torch.zeros(self.batch, max(map(len, rows)) - 1, dtype=torch.long)
        targets = torch.full_like(inputs, IGNORED)
        for row, document in enumerate(rows):
            inputs[row, : len(document) - 1] = document[:-1]
            targets[row, : len(document) - 1] = document[1:]
        return inputs, targets

    def _order(self, epoch: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(self.seed + epoch)
        order = torch.randperm(len(self.documents), generator=generator)[: self.per_epoch * self.batch]
        batches: list[list[int]] = []
        for pool in order.split(POOL * self.batch):
            by_length = sorted(pool.tolist(), key=lambda index: len(self.documents[index]))
            batches += [by_length[start : start + self.batch] for start in range(0, len(by_length), self.batch)]
        return [batches[index] for index in torch.randperm(len(batches), generator=generator).tolist()]
