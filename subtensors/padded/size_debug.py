"""The shape that a PaddedTensor reports, and a debug mode for the leak that no type can see.

Padded sizes know their true sizes (`PaddedSize`), and calls on PaddedTensors take those. What is left are the calls
that no PaddedTensor is part of, and Python itself. In the mode each of these warns, with its line.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import product
from types import FrameType

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from subtensors.dispatch.ops.tree import Args, Kwargs, PyTree
from subtensors.dispatch.padded.padded_size import PaddedSize, find_sizes, text_of, watchers
from subtensors.dispatch.padded.positions import checked_bounds
from subtensors.dispatch.padded.size_conditions import COMPARISONS
from subtensors.dispatch.padded.true_sizes import rows_symbol
from subtensors.dispatch.sizes.dim_factors import Factors, is_padded, size_of
from subtensors.dispatch.sizes.expressions import Size, multiplied
from subtensors.dispatch.torch_internals import ops
from subtensors.padded.padded_tensor import PaddedTensor
from subtensors.padded.sized_calls import OF_BUCKETS, VALUES


class PaddedSizeWarning(UserWarning):
    """A bucket's size is used as a number."""


def _warn(size: PaddedSize, operation: str) -> None:
    """Warn at the line of the user's code that led here."""
    warn_at_caller(f"{operation} with {int(size)}, {size.origin}, not its true size: use x.count(dim)")


def _decides_otherwise(size: PaddedSize, compare: Callable[[int, float], bool], other: float, outcome: bool) -> bool:
    """Return whether a comparison of the true size has another outcome, or may have where the host doesn't know it."""
    own = size.sizes.each_on_host(size.size)
    others = other.sizes.each_on_host(other.size) if isinstance(other, PaddedSize) else (other,)
    if not (own and others):
        return True
    # Of two batches of as many rows those of a row are compared, as the program would; of others, any two.
    pairs = zip(own, others, strict=True) if len(own) == len(others) else product(own, others)
    return any(compare(a, b) != outcome for a, b in pairs)


def warn_at_caller(message: str) -> None:
    """Warn at the line of the user's code that led here."""
    frame: FrameType = sys._getframe(1)
    while frame.f_back is not None and _is_library(str(frame.f_globals.get("__name__", ""))):
        frame = frame.f_back
    warnings.warn_explicit(message, PaddedSizeWarning, frame.f_code.co_filename, frame.f_lineno)


def _is_library(module: str) -> bool:
    return module == __name__ or module.split(".")[0] in ("torch", "subtensors")


_RESHAPES = frozenset([Tensor.view, Tensor.reshape, torch.reshape])
_EXPANSIONS = frozenset([Tensor.expand, Tensor.broadcast_to, torch.broadcast_to])


def _is_same_compiled(func: Callable[..., PyTree], args: Args) -> bool:
    """Return whether the sizes in a PaddedTensor's call mean the true ones in compiled code, which has the bucket's.

    They do where they are the sizes of its own dims, and as the end of a slice: see `as_traced_size`.
    """
    if func in _EXPANSIONS and len(args) > 1:
        shape = args[1:] if isinstance(args[1], int) else args[1]
        own = [None] * (len(shape) - args[0].dim()) + list(args[0].shape)
        pairs = [(n, mine) for n, mine in zip(shape, own, strict=True) if isinstance(n, PaddedSize)]
        return all(isinstance(mine, PaddedSize) and mine.text == n.text for n, mine in pairs)
    if func is Tensor.__getitem__:
        parts = args[1] if isinstance(args[1], tuple) else (args[1],)
        return all(_is_known_end(part) for part in parts if find_sizes(part))
    return func in OF_BUCKETS or func in _RESHAPES


def _is_known_end(part: PyTree) -> bool:
    """Return whether a part of an index is `:n` for the size n of a dim."""
    if not isinstance(part, slice) or part.start is not None or part.step is not None:
        return False
    return isinstance(part.stop, PaddedSize) and bool(part.stop.size.is_Symbol)


class _Watch(TorchFunctionMode):
    """Warn of padded sizes that are numbers in Python, or among the arguments of calls without a PaddedTensor."""

    def note_number(self, size: PaddedSize, operation: str) -> None:
        """Warn of Python's arithmetic."""
        if operation:
            _warn(size, operation)

    def note_comparison(self, size: PaddedSize, name: str, other: float, outcome: bool, operation: str) -> None:
        """Warn of a comparison that the true size would decide otherwise."""
        if _decides_otherwise(size, COMPARISONS[name][1], other, outcome):
            _warn(size, operation)

    def __torch_function__(
        self, func: Callable[..., PyTree], types: Collection[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> PyTree:
        name = getattr(func, "__name__", "")
        operation = "slicing" if name == "__getitem__" else "arithmetic" if name in VALUES else name
        sizes: Sequence[int] = find_sizes((args, kwargs or {}))
        if name == "__len__" and isinstance(args[0], PaddedTensor) and args[0].dim():
            sizes, operation = args[0].shape[:1], "len(x)"
        elif not any(issubclass(kind, PaddedTensor) for kind in types):
            operation += " of plain tensors"
        elif sizes and ops.is_in_compiled_function() and not _is_same_compiled(func, args):
            operation += " in compiled code"
        else:
            sizes = []
        for size in sizes:
            if isinstance(size, PaddedSize):
                _warn(size, operation)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def watch_size_arithmetic() -> Iterator[None]:
    """Warn where the number of a bucket's size is used, with the line: in Python, or in calls on plain tensors.

    Views, slices and arithmetic of PaddedTensors take the true size that the number stands for, without a warning. Of
    an index tensor with positions beyond the true size it warns, too: masks read these harmlessly, since what they read
    is padding of what they are combined with. To see such positions waits for the device.

    Functions of `torch.compile` run eagerly in the mode, so that their lines are seen. Compiled code knows no true size
    of a number: what takes it in eager mode warns there. A count of Python's own, as in `range(x.shape[1])` or a slice
    of a list, and text are not seen.

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
    with torch.compiler.set_stance("force_eager"), watch_sizes(), checked_bounds(warn_at_caller):
        yield


@contextlib.contextmanager
def watch_sizes() -> Iterator[None]:
    """Warn where the number of a bucket's size is used, without looking at index tensors."""
    with _Watch() as mode:
        watchers.append(mode)
        try:
            yield
        finally:
            watchers.pop()


def padded_size_lines(run: Callable[[], object]) -> tuple[str, ...]:
    """Run a program on PaddedTensors; return `file:line: message` for each line that computed with a padded size."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with watch_sizes():
                run()
        except Exception:  # the lines until then are what there is to tell
            pass
    own = [w for w in caught if issubclass(w.category, PaddedSizeWarning)]
    return tuple(dict.fromkeys(f"{w.filename}:{w.lineno}: {w.message}" for w in own))


def shape_of(x: PaddedTensor) -> torch.Size:
    """The bucket shape; see `PaddedSize`."""
    known = x._known_shape
    if known is not None and known[0] is x._dims and known[1] is x._sizes:
        return known[2]
    shape, sizes = x._dense.shape, x._sizes
    padded = _padded_sizes(x._dims) if sizes is not None else ()
    if sizes is None or not padded:
        return shape
    numbers: list[int] = [*shape]
    for d, size, text, origin in padded:
        if type(shape[d]) is not int:
            return shape
        # As its constructor does, without the call: models read many shapes.
        number = int.__new__(PaddedSize, shape[d])
        number.size, number.sizes, number.text, number.origin = size, sizes, text, origin
        numbers[d] = number
    shape = torch.Size(numbers)
    x._known_shape = x._dims, sizes, shape
    return shape


def numel_of(x: PaddedTensor, bucket: int) -> int:
    """The number of elements of the bucket, given; see `PaddedSize`."""
    sizes = x._sizes
    if sizes is None or type(bucket) is not int or sizes.rows is not None or not _padded_sizes(x._dims):
        return bucket
    number = PaddedSize(bucket, multiplied(*map(size_of, x._dims)), sizes)
    number.origin = "the bucket of all dims"
    return number


@functools.lru_cache(4096)
def _padded_sizes(dims: tuple[Factors, ...]) -> list[tuple[int, Size, str, str]]:
    """The padded dims with their true sizes, also as text, and what warnings call them.

    The rows of a ragged batch are all valid.
    """
    sizes = [(d, size_of(factors)) for d, factors in enumerate(dims) if is_padded(factors)]
    texts = [(d, size, text_of(size)) for d, size in sizes if size != rows_symbol()]
    return [(d, size, text, f"the bucket of dim {d} (true size {text})") for d, size, text in texts]
