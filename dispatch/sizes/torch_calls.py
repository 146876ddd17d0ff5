"""Torch functions that a program called on tensors without values, and what they do on real ones.

A kernel may check other than its stand-in does where a tensor has no elements: `adaptive_avg_pool1d` refuses an empty
dim that its stand-in takes, and `conv_transpose1d` returns an empty tensor where its stand-in raises. Real tensors
decide there. They hold zeros, are on the CPU, and the call is made alone, which costs little: there is nothing in them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import sympy
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from subtensors.dispatch.ops.tree import Args, Kwargs, PyTree, map_arguments

MAX_ELEMENTS = 1 << 22
"""The most elements that the real tensors of one call have together."""

Sizes = Mapping[sympy.Symbol, int]


@dataclass(frozen=True)
class _TensorLike:
    """The place of a tensor in a call."""

    shape: tuple[sympy.Basic, ...]
    strides: tuple[sympy.Basic, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class _Number:
    """The place of a number that depends on sizes."""

    value: sympy.Basic


@dataclass(frozen=True)
class Difference:
    """A call whose real outcome is another one than without values.

    Args:
        refusal: the error of the real call; None if it returns.
        result: its result, which has other shapes than without values.
    """

    refusal: Exception | None
    result: PyTree = None


@dataclass(frozen=True)
class TorchCall:
    """A call of a torch function, in expressions of the program's sizes.

    Args:
        function, args, kwargs: the call.
        results: the shapes of the tensors that it returned; None if it raised.
    """

    function: Callable[..., PyTree]
    args: PyTree
    kwargs: PyTree
    results: tuple[tuple[sympy.Basic, ...], ...] | None

    def sizes(self) -> set[sympy.Basic]:
        """Return the sizes of its tensors."""
        given = [t for t in _leaves((self.args, self.kwargs)) if isinstance(t, _TensorLike)]
        return {n for shape in [*(t.shape for t in given), *(self.results or ())] for n in shape}

    def renamed(self, names: Mapping[sympy.Symbol, sympy.Symbol]) -> TorchCall:
        """Return the call in other symbols."""

        def each(numbers: Sequence[sympy.Basic]) -> tuple[sympy.Basic, ...]:
            return tuple(n.xreplace(names) for n in numbers)

        def rename(x: PyTree) -> PyTree:
            if isinstance(x, _TensorLike):
                return _TensorLike(each(x.shape), each(x.strides), x.dtype)
            return _Number(x.value.xreplace(names)) if isinstance(x, _Number) else x

        args, kwargs = map_arguments((self.args, self.kwargs), rename)
        return TorchCall(self.function, args, kwargs, self.results and tuple(map(each, self.results)))

    def at(self, sizes: Sizes) -> TorchCall:
        """Return the call with numbers in place of symbols."""
        return self.renamed({symbol: sympy.Integer(n) for symbol, n in sizes.items()})

    def difference(self) -> Difference | None:
        """Make a call of numbers on real tensors, and return how its outcome differs.

        Returns:
            None if it doesn't, or if the call isn't made.
        """
        shapes = [t.shape for t in _leaves((self.args, self.kwargs)) if isinstance(t, _TensorLike)]
        shapes += self.results or ()
        if not all(n.is_Integer and n >= 0 for shape in shapes for n in shape):
            return None
        if sum(int(sympy.prod(shape)) for shape in shapes) > MAX_ELEMENTS:
            return None
        try:
            args, kwargs = map_arguments((self.args, self.kwargs), _real)
        except Exception:  # a dtype that the CPU has no zeros of
            return None
        if "device" in kwargs:
            kwargs["device"] = "cpu"
        try:
            with torch.no_grad(), torch.random.fork_rng([]), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                out = self.function(*args, **kwargs)
        except Exception as error:  # torch's refusals are of many types
            return None if self.results is None else Difference(error)
        found = tuple(tuple(t.shape) for t in _leaves(out) if isinstance(t, Tensor))
        is_same = self.results is not None and found == tuple(tuple(map(int, shape)) for shape in self.results)
        return None if is_same else Difference(None, out)


class RecordedCalls(TorchFunctionMode):
    """Records the calls of torch functions that take and return tensors, and those that raise.

    Args:
        expression: returns the expression of a number that depends on sizes.
        decided_by_real: returns the outcome on real tensors of a call that has empty ones, or raised; None where it is
            the same, or where calls are only recorded.
    """

    def __init__(
        self,
        expression: Callable[[object], sympy.Basic],
        decided_by_real: Callable[[TorchCall], Difference | None] = lambda call: None,
    ) -> None:
        super().__init__()
        self.calls: list[TorchCall] = []
        self._expression, self._decided_by_real = expression, decided_by_real

    def __torch_function__(
        self, func: Callable[..., PyTree], types: Collection[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> PyTree:
        # What the call writes to may have another shape after it.
        given, named = map_arguments((args, kwargs or {}), self._place)
        has_tensors = any(isinstance(x, _TensorLike) for x in _leaves((given, named)))
        if not has_tensors or getattr(func, "__name__", "") in _MOVES:
            return func(*args, **(kwargs or {}))
        try:
            out = func(*args, **(kwargs or {}))
        except Exception:
            call = TorchCall(func, given, named, None)
            self.calls.append(call)
            difference = self._decided_by_real(call)
            if difference is None:
                raise
            return difference.result
        results = tuple(self._shape(t) for t in _leaves(out) if isinstance(t, Tensor))
        if not results:
            return out
        call = TorchCall(func, given, named, results)
        self.calls.append(call)
        difference = self._decided_by_real(call) if 0 in call.sizes() else None
        if difference is None:
            return out
        if difference.refusal is not None:
            raise difference.refusal
        return difference.result

    def _place(self, x: PyTree) -> PyTree:
        if isinstance(x, Tensor):
            strides = x.stride() if x.layout is torch.strided else ()
            return _TensorLike(self._shape(x), tuple(map(self._expression, strides)), x.dtype)
        return _Number(self._expression(x)) if isinstance(x, torch.SymInt | torch.SymFloat) else x

    def _shape(self, x: Tensor) -> tuple[sympy.Basic, ...]:
        return tuple(map(self._expression, x.shape))


_MOVES = frozenset("to cuda cpu xpu mps type pin_memory".split())
"""Functions that move tensors to a device, which this machine may not have."""


def _real(x: PyTree) -> PyTree:
    """Return a tensor of zeros, or a plain number, in its place."""
    if isinstance(x, _TensorLike):
        sizes, strides = [int(n) for n in x.shape], [int(n) for n in x.strides]
        if len(strides) != len(sizes):
            return torch.zeros(sizes, dtype=x.dtype)
        extent = 0 if 0 in sizes else 1 + sum((n - 1) * step for n, step in zip(sizes, strides, strict=True))
        return torch.zeros(extent, dtype=x.dtype).as_strided(sizes, strides)
    if isinstance(x, _Number):
        return int(x.value) if x.value.is_Integer else float(x.value)
    return torch.device("cpu") if isinstance(x, torch.device) else x


def _leaves(tree: PyTree) -> Sequence[PyTree]:
    found: list[PyTree] = []
    map_arguments(tree, found.append)
    return found
