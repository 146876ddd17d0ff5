"""Python's conversions of a list: its repr, and those to one value, which a list of tensors refuses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence, Sized
from typing import NoReturn

import torch

from subtensors.counts import counted

Metadata = tuple[torch.dtype, torch.device, torch.Size]
"""The part of a tensor that a repr shows."""


def _refused(what: str) -> Callable[..., NoReturn]:
    """A conversion that a list refuses."""

    def refuse(self: Sized, *args: object, **kwargs: object) -> NoReturn:
        raise TypeError(
            f"a TensorList of {counted(len(self), 'tensor')} has no single {what}; ask its elements one by one"
        )

    return refuse


class NoSingleValue:
    """A base class that precedes `torch.Tensor`, and refuses conversions to bool, numbers and arrays."""

    _packed: object

    __hash__ = object.__hash__
    __format__ = object.__format__

    def __dir__(self) -> list[str]:
        unreadable = {"volatile", "__cuda_array_interface__"}  # torch's own leaves these out, too
        return sorted({*object.__dir__(self)} - (unreadable if self._packed else unreadable | {"flats"}))

    __bool__, __int__, __float__ = _refused("truth value"), _refused("int"), _refused("float")
    __complex__, __index__, __array__ = _refused("complex"), _refused("index"), _refused("numpy array")


def describe(elements: Sequence[Metadata], flats: int) -> str:
    """Describe a list in one line.

    >>> describe([(torch.float32, torch.device("cpu"), torch.Size([3]))] * 2, flats=1)
    'TensorList(2 tensors, 6 values: 2 x float32[3] cpu; packed in 1 flat)'
    """
    packed = f"; packed in {counted(flats, 'flat')}" if flats else ""
    # The ragged size of a nested tensor is no number.
    is_known = all(isinstance(n, int) for *_, shape in elements for n in shape)
    values = f", {sum([shape.numel() for *_, shape in elements])} values" if is_known else ""
    size = f"{counted(len(elements), 'tensor')}{values}"
    return f"TensorList({size}{': ' if elements else ''}{_tally(elements)}{packed})"


def _tally(elements: Sequence[Metadata]) -> str:
    """The number of tensors of each dtype, shape and device, the four commonest, as text."""
    counts = Counter(elements)
    parts = [
        f"{count} x {str(dtype).removeprefix('torch.')}{list(shape)} {device}"
        for (dtype, device, shape), count in counts.most_common(4)
    ]
    parts += [f"{len(counts) - 4} more kinds"] if len(counts) > 4 else []
    return ", ".join(parts)
