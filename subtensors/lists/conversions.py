"""Python's conversions of a list: its repr, and those to one value, which a list of tensors refuses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NoReturn

import torch

Metadata = tuple[torch.dtype, torch.device, torch.Size]
"""The part of a tensor that a repr shows."""


class NoSingleValue:
    """A base class that precedes `torch.Tensor`, and refuses conversions to bool, numbers and arrays."""

    _flats: list[torch.Tensor] | None

    __hash__ = object.__hash__
    __format__ = object.__format__

    def __dir__(self) -> list[str]:
        unreadable = {"volatile", "__cuda_array_interface__"}  # torch's own leaves these out, too
        return sorted({*object.__dir__(self)} - (unreadable if self._flats else unreadable | {"flats"}))

    def __bool__(self) -> bool:
        self._refuse("truth value")

    def __int__(self) -> int:
        self._refuse("int")

    def __float__(self) -> float:
        self._refuse("float")

    def __complex__(self) -> complex:
        self._refuse("complex")

    def __index__(self) -> int:
        self._refuse("index")

    def __array__(self, *args: object, **kwargs: object) -> NoReturn:
        self._refuse("numpy array")

    def _refuse(self, what: str) -> NoReturn:
        count = len(self)  # type: ignore[arg-type]  # of the class that this is mixed into
        raise TypeError(f"a TensorList of {count} tensors has no single {what}; ask its elements one by one")


def describe(elements: Sequence[Metadata], flats: int) -> str:
    """Describe a list in one line.

    Args:
        elements: the metadata of each element.
        flats: the number of flats of a packed list; 0 for another.

    >>> describe([(torch.float32, torch.device("cpu"), torch.Size([3]))] * 2, flats=1)
    'TensorList(2 tensors, 6 values: 2 x float32[3] cpu; packed in 1 flat)'
    """
    packed = f"; packed in {flats} flat{'s' if flats > 1 else ''}" if flats else ""
    # The ragged size of a nested tensor is no number.
    is_known = all(isinstance(n, int) for *_, shape in elements for n in shape)
    values = f", {sum([shape.numel() for *_, shape in elements])} values" if is_known else ""
    size = f"{len(elements)} tensor{'' if len(elements) == 1 else 's'}{values}"
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
