"""Padded sizes that tell who observes a program what it makes of their numbers.

To Python a padded size is the bucket's number. What a program decides by it, and where it takes it as any number, is
noted by the conditions of the bucketed program that runs, and warned of by a debug mode.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Protocol

from subtensors.dispatch.padded.padded_size import PaddedSize
from subtensors.dispatch.padded.size_conditions import COMPARISONS, SizeCondition, noting
from subtensors.dispatch.padded.true_sizes import TrueSizes
from subtensors.dispatch.sizes.expressions import Size


class SizeWatcher(Protocol):
    """A debug mode, which is told how a program uses the number of a bucket's size."""

    def note_number(self, size: ObservedSize, operation: str) -> None:
        """Note that the program got a plain number of a size; "" for one that may be text, or be read to compare."""

    def note_comparison(self, size: ObservedSize, name: str, other: float, outcome: bool, operation: str) -> None:
        """Note the outcome of a size's method that compares it with a number, or with another size."""


watchers: list[SizeWatcher] = []
"""The debug modes that are on."""


class ObservedSize(PaddedSize):
    """A padded size that tells what it decides, and where only the bucket's number is left of it."""

    origin: str = ""
    """The dim that it is the size of, for warnings."""

    def derived(self, bucket: int, size: Size, sizes: TrueSizes) -> int:
        """Return a number made of this one."""
        made = super().derived(bucket, size, sizes)
        if isinstance(made, ObservedSize):
            made.origin = self.origin if self.origin.startswith("made") else f"made of {self.origin}"
        return made

    def __bool__(self) -> bool:
        """Return whether the bucket's number is not zero."""
        self._compared("__ne__", 0, int(self) != 0, "a branch")
        return int(self) != 0

    def _compared(self, name: str, other: float, outcome: bool, operation: str) -> None:
        """Tell of a comparison by the program, which is two frames from here."""
        if _is_library(sys._getframe(2)):
            return
        for watcher in watchers:
            watcher.note_comparison(self, name, other, outcome, operation)
        if noting.into is not None and not isinstance(other, PaddedSize):
            noting.into.note(SizeCondition(self.size, name, other), outcome)


def _is_library(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).startswith("subtensors.")


def _read(name: str, operation: str) -> Callable[..., object]:
    """Return the method of padded sizes with this name, which tells where a program gets a plain number or text."""
    plain: Callable[..., object] = getattr(PaddedSize, name)
    is_linear = name in ("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__")

    def method(self: ObservedSize, *others: object) -> object:
        out, other = plain(self, *others), others[0] if others else None
        # A float and a sequence answer themselves, by the bucket's number.
        is_sequence = isinstance(other, list | tuple | str)
        is_number = not isinstance(out, PaddedSize) and (
            out is not NotImplemented or is_sequence or isinstance(other, float)
        )
        # A sum with an integer that is no padded size is the same at all true sizes.
        if is_number and not (is_linear and isinstance(other, int)) and not _is_library(sys._getframe(1)):
            for watcher in watchers:
                watcher.note_number(self, "a repeated sequence" if is_sequence else operation)
            noting.number_read()
        return out

    method.__name__ = name
    return method


def _compared(name: str) -> Callable[[ObservedSize, object], object]:
    """Return the comparison of padded sizes with this name, which tells its outcome."""
    by_true: Callable[[PaddedSize, object], object] = getattr(PaddedSize, name)

    def method(self: ObservedSize, other: object) -> object:
        if not isinstance(other, int | float):
            return by_true(self, other)
        # A debug mode goes on where true sizes would decide.
        is_true = isinstance(other, PaddedSize) and not watchers
        outcome = bool(by_true(self, other) if is_true else COMPARISONS[name][1](int(self), other))
        self._compared(name, other, outcome, "a comparison")
        return outcome

    method.__name__ = name
    return method


for _name in COMPARISONS:
    setattr(ObservedSize, _name, _compared(_name))
_ARITHMETIC = """add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow divmod rdivmod and
    rand or ror xor rxor lshift rlshift rshift rrshift float round trunc floor ceil invert"""
for _name in _ARITHMETIC.split():
    setattr(ObservedSize, f"__{_name}__", _read(f"__{_name}__", "Python arithmetic"))
for _name in ("__int__", "__repr__", "__format__"):
    setattr(ObservedSize, _name, _read(_name, ""))
ObservedSize.__hash__ = int.__hash__  # type: ignore[assignment]
PADDED_SIZES = frozenset([PaddedSize, ObservedSize])
"""The types of padded sizes whose calls may be remembered."""
