"""The repr of a list: its number of tensors and values, their dtypes, devices and shapes, and its flats."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from subtensors.lists.tensor_list import TensorList


def described(x: TensorList) -> str:
    """Describe a list in one line, without making the elements of a packed list that has none yet."""
    if x._elements is None and x._arena is not None and x._flats is not None:
        shapes = list(x._arena.shapes)
        kinds = [(x._flats[g].dtype, x._flats[g].device) for g in x._arena.groups]
    else:
        shapes = [t.shape for t in x.elements()]
        kinds = [(t.dtype, t.device) for t in x.elements()]
    flats = len(x._flats or ())
    packed = f"; packed in {flats} flat{'s' if flats > 1 else ''}" if flats else ""
    size = f"{len(x)} tensor{'' if len(x) == 1 else 's'}, {sum([s.numel() for s in shapes])} values"
    return f"TensorList({size}{': ' if shapes else ''}{tally(kinds, shapes)}{packed})"


def tally(kinds: Sequence[tuple[torch.dtype, torch.device]], shapes: Sequence[torch.Size]) -> str:
    """The number of tensors of each dtype, shape and device, the four commonest, as text.

    >>> tally([(torch.float32, torch.device("cpu"))] * 2, [torch.Size([3])] * 2)
    '2 x float32[3] cpu'
    """
    counts = Counter(zip(kinds, shapes, strict=True))
    parts = [
        f"{count} x {str(dtype).removeprefix('torch.')}{list(shape)} {device}"
        for ((dtype, device), shape), count in counts.most_common(4)
    ]
    parts += [f"{len(counts) - 4} more kinds"] if len(counts) > 4 else []
    return ", ".join(parts)
