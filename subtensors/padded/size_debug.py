"""A debug mode for the one leak that no type can see: Python arithmetic on a bucket's size.

In the mode a PaddedTensor reports sizes that know they are padded. Each warns, with the line, where it is used in a
division or a product, and where a factory makes a plain tensor of it. A position beyond the true size is refused.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from types import FrameType

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from subtensors.dispatch.ops.tree import Args, Kwargs, PyTree
from subtensors.dispatch.padded.positions import checked_bounds

active_modes: list[TorchFunctionMode] = []
"""The debug modes that are on."""

_ARITHMETIC = frozenset(
    """mul mul_ multiply multiply_ div div_ divide divide_ true_divide floor_divide floor_divide_ pow pow_ __mul__
    __rmul__ __truediv__ __rtruediv__ __rdiv__ __div__ __floordiv__ __rfloordiv__ __imul__ __itruediv__ __idiv__
    __pow__ __rpow__ remainder fmod""".split()
)
_FACTORIES = frozenset("zeros ones full empty rand randn randint arange linspace eye".split())


class PaddedSizeWarning(UserWarning):
    """Python computed with a padded size."""


class PaddedSize(int):
    """A bucket's size that warns where it is computed with.

    Args:
        bucket: the size.
        dim: the dim and its true size, as the warning names them.
    """

    dim: str

    def __new__(cls, bucket: int, dim: str) -> PaddedSize:
        """Return the size, with the name of its dim."""
        size = super().__new__(cls, bucket)
        size.dim = dim
        return size

    def warn(self, operation: str) -> None:
        """Warn at the line of the user's code that led here."""
        frame: FrameType = sys._getframe(1)
        while frame.f_back is not None and _is_library(str(frame.f_globals.get("__name__", ""))):
            frame = frame.f_back
        warnings.warn_explicit(
            f"{operation} with {int(self)}, the bucket of {self.dim}, not its true size: use x.count(dim)",
            PaddedSizeWarning,
            frame.f_code.co_filename,
            frame.f_lineno,
        )


def _is_library(module: str) -> bool:
    return module == __name__ or module.split(".")[0] == "torch"


def _warning(name: str) -> Callable[[PaddedSize, object], object]:
    """Return the method of `int` with this name, with a warning before it."""
    plain: Callable[[int, object], object] = getattr(int, name)

    def method(self: PaddedSize, other: object) -> object:
        if isinstance(other, int | float):
            self.warn("Python arithmetic")
        return plain(self, other)

    method.__name__ = name
    return method


for _name in "__mul__ __rmul__ __truediv__ __rtruediv__ __floordiv__ __rfloordiv__ __pow__ __rpow__".split():
    setattr(PaddedSize, _name, _warning(_name))


class _Watch(TorchFunctionMode):
    """Warn of padded sizes among the arguments of torch's arithmetic, which treats them as plain numbers."""

    def __torch_function__(
        self, func: Callable[..., PyTree], types: Collection[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> PyTree:
        name = getattr(func, "__name__", "")
        if name in _ARITHMETIC or name in _FACTORIES:
            for size in tree_leaves((args, kwargs)):
                if isinstance(size, PaddedSize):
                    size.warn("arithmetic" if name in _ARITHMETIC else f"torch.{name}, a plain tensor,")
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def watch_size_arithmetic() -> Iterator[None]:
    """Warn where Python computes with a padded size, with the line; views and slices may use it as before.

    An index tensor that reads or writes beyond the true size is refused; to see it waits for the device.

    Raises:
        PaddedSizeWarning: as a warning.
        IndexError: a position is beyond the true size.

    Example:
        >>> import subtensors as st
        >>> x = st.pad(torch.ones(3), {0: st.Dim("n", max=8, buckets=4)})
        >>> with warnings.catch_warnings(record=True) as caught, st.watch_size_arithmetic():
        ...     warnings.simplefilter("always")
        ...     mean = x.sum() / x.shape[0]
        >>> print(caught[0].message)
        arithmetic with 4, the bucket of dim 0 (true size n), not its true size: use x.count(dim)
    """
    with watch_sizes(), checked_bounds():
        yield


@contextlib.contextmanager
def watch_sizes() -> Iterator[None]:
    """Warn where Python computes with a padded size, without looking at index tensors."""
    with _Watch() as mode:
        active_modes.append(mode)
        try:
            yield
        finally:
            active_modes.pop()


def shape_that_warns(shape: Sequence[int], true_sizes: Sequence[str | None]) -> torch.Size:
    """Return a shape whose padded sizes warn.

    Args:
        shape: the bucket shape.
        true_sizes: the true size of each dim as text; None where it isn't padded.
    """
    return torch.Size(
        size if true is None else PaddedSize(size, f"dim {d} (true size {true})")
        for d, (size, true) in enumerate(zip(shape, true_sizes, strict=True))
    )
