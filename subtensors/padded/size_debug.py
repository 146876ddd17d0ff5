"""A debug mode for the leak that no type can see: a bucket's size that reaches Python or a plain tensor as a number.

Padded sizes know their true sizes (`PaddedSize`), and calls on PaddedTensors take those. What is left are the calls
that no PaddedTensor is part of, and Python itself. In the mode each of these warns, with its line.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Collection, Iterator
from types import FrameType

from torch.overrides import TorchFunctionMode

from subtensors.dispatch.ops.tree import Args, Kwargs, PyTree
from subtensors.dispatch.padded.padded_size import PaddedSize, find_sizes
from subtensors.dispatch.padded.positions import checked_bounds
from subtensors.dispatch.padded.true_sizes import TrueSizes
from subtensors.dispatch.sizes.expressions import Size
from subtensors.padded.padded_tensor import PaddedTensor

active_modes: list[TorchFunctionMode] = []
"""The debug modes that are on."""


class PaddedSizeWarning(UserWarning):
    """A bucket's size is used as a number."""


class WatchedSize(PaddedSize):
    """A padded size that warns where only the bucket's number is left of it."""

    dim: str

    @classmethod
    def of(cls, bucket: int, size: Size, sizes: TrueSizes, dim: str) -> WatchedSize:
        """Return the size.

        Args:
            bucket: the number that Python sees.
            size, sizes: the true one, and the values of its symbols.
            dim: the dim and its true size, as the warning names them.
        """
        watched = cls(bucket, size, sizes)
        watched.dim = f"the bucket of {dim}"
        return watched

    def derived(self, bucket: int, size: Size, sizes: TrueSizes) -> int:
        """Return a number made of this one."""
        made = super().derived(bucket, size, sizes)
        if isinstance(made, WatchedSize):
            made.dim = self.dim if self.dim.startswith("made") else f"made of {self.dim}"
        return made

    def warn(self, operation: str) -> None:
        """Warn at the line of the user's code that led here."""
        if active_modes:
            warn_at_caller(f"{operation} with {int(self)}, {self.dim}, not its true size: use x.count(dim)")

    def __bool__(self) -> bool:
        """Return whether the bucket's number is not zero, with a warning where the true one would decide otherwise."""
        is_own = str(sys._getframe(1).f_globals.get("__name__")).startswith("subtensors.")
        if not is_own and active_modes and self.decides_otherwise(int.__ne__, 0):
            self.warn("a branch")
        return int(self) != 0

    def decides_otherwise(self, comparison: Callable[[int, object], object], other: object) -> bool:
        """Return whether a comparison of the true size, where the host knows it, has another outcome."""
        sizes = [self.sizes, *([other.sizes] if isinstance(other, PaddedSize) else [])]
        if not all(known.known_on_host for known in sizes):
            return True
        for row in range(self.sizes.rows or 1):
            true = other.on_host(row) if isinstance(other, PaddedSize) else other
            if comparison(self.on_host(row), true) != comparison(int(self), other):
                return True
        return False


def warn_at_caller(message: str) -> None:
    """Warn at the line of the user's code that led here."""
    frame: FrameType = sys._getframe(1)
    while frame.f_back is not None and _is_library(str(frame.f_globals.get("__name__", ""))):
        frame = frame.f_back
    warnings.warn_explicit(message, PaddedSizeWarning, frame.f_code.co_filename, frame.f_lineno)


def _is_library(module: str) -> bool:
    return module == __name__ or module.split(".")[0] in ("torch", "subtensors")


def _warning(name: str) -> Callable[[WatchedSize, object], object]:
    """Return the method of sizes with this name, with a warning where its result doesn't know the true size."""
    plain: Callable[[PaddedSize, object], object] = getattr(PaddedSize, name)

    def method(self: WatchedSize, other: object) -> object:
        out = plain(self, other)
        # Numbers of other types answer themselves.
        if isinstance(other, int | float) and not isinstance(out, PaddedSize) and not _is_known(self, other, name):
            self.warn("Python arithmetic")
        return out

    method.__name__ = name
    return method


def _is_known(size: WatchedSize, other: object, name: str) -> bool:
    """Return whether a sum or product that is a plain number is the same at all true sizes."""
    return isinstance(other, int) and name in ("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__")


def _comparing(name: str) -> Callable[[WatchedSize, object], object]:
    """Return the comparison of `int` with this name, with a warning where the true size would decide otherwise."""
    plain: Callable[[int, object], object] = getattr(int, name)

    def method(self: WatchedSize, other: object) -> object:
        out = plain(self, other)
        is_own = str(sys._getframe(1).f_globals.get("__name__")).startswith("subtensors.")
        if not is_own and isinstance(other, int | float) and active_modes and self.decides_otherwise(plain, other):
            self.warn("a comparison")
        return out

    method.__name__ = name
    return method


_MIXED = "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow divmod and rand"
for _name in _MIXED.split():
    setattr(WatchedSize, f"__{_name}__", _warning(f"__{_name}__"))
for _name in "lt le gt ge eq ne".split():
    setattr(WatchedSize, f"__{_name}__", _comparing(f"__{_name}__"))
WatchedSize.__hash__ = int.__hash__  # type: ignore[assignment]


_OPERATIONS = {"__getitem__": "slicing a plain tensor"} | dict.fromkeys(
    """add sub mul div floor_divide pow remainder __rsub__ __rdiv__ __rpow__ __rfloordiv__ __rmod__ __add__ __radd__
    __sub__ __mul__ __rmul__ __truediv__ __rtruediv__ __floordiv__ __mod__ __pow__ __iadd__ __isub__ __imul__
    __itruediv__ __idiv__ __div__""".split(),
    "arithmetic",
)


class _Watch(TorchFunctionMode):
    """Warn of padded sizes among the arguments of calls without a PaddedTensor."""

    def __torch_function__(
        self, func: Callable[..., PyTree], types: Collection[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> PyTree:
        name = getattr(func, "__name__", "")
        if name == "__len__" and isinstance(args[0], PaddedTensor) and args[0].dim():
            for size in find_sizes([args[0].shape[0]]):
                if isinstance(size, WatchedSize):
                    size.warn("len(x)")
        elif not any(issubclass(kind, PaddedTensor) for kind in types):
            for size in find_sizes((args, kwargs or {})):
                if isinstance(size, WatchedSize):
                    size.warn(_OPERATIONS.get(name, f"{name} of plain tensors"))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def watch_size_arithmetic() -> Iterator[None]:
    """Warn where the number of a bucket's size is used, with the line: in Python, or in calls on plain tensors.

    Views, slices and arithmetic of PaddedTensors take the true size that the number stands for, without a warning. Of
    an index tensor with positions beyond the true size it warns, too: masks read these harmlessly, since what they read
    is padding of what they are combined with. To see such positions waits for the device.

    Raises:
        PaddedSizeWarning: as a warning.

    Example:
        >>> import torch
        >>> import subtensors as st
        >>> x = st.pad(torch.ones(3), {0: st.Dim("n", max=8, buckets=4)})
        >>> with warnings.catch_warnings(record=True) as caught, st.watch_size_arithmetic():
        ...     warnings.simplefilter("always")
        ...     positions = torch.arange(x.shape[0])
        >>> print(caught[0].message)
        arange of plain tensors with 4, the bucket of dim 0 (true size n), not its true size: use x.count(dim)
    """
    with watch_sizes(), checked_bounds(warn_at_caller):
        yield


@contextlib.contextmanager
def watch_sizes() -> Iterator[None]:
    """Warn where the number of a bucket's size is used, without looking at index tensors."""
    with _Watch() as mode:
        active_modes.append(mode)
        try:
            yield
        finally:
            active_modes.pop()
