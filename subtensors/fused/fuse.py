"""`st.fused`: single-tensor math that runs as one kernel over whole lists."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar
from weakref import WeakValueDictionary

import optree
import torch

from subtensors.dispatch.fused.fused_function import FusedFunction
from subtensors.dispatch.fused.tensor_columns import TensorColumn
from subtensors.fused import custom_op as _op  # noqa: F401  (registers the ops of compiled calls)
from subtensors.kernels.fused.launch import Tiling
from subtensors.lists.tensor_list import TensorList
from subtensors.lists.tree_structure import first_difference

P = ParamSpec("P")
R = TypeVar("R")

_fusions: WeakValueDictionary[int, FusedFunction] = WeakValueDictionary()
_numbers = itertools.count()


def fusion_of(number: int) -> FusedFunction:
    """The fusion that has a number, by which compiled code names it."""
    return _fusions[number]


class Fused(Generic[P, R]):
    """A function of single-tensor math that takes TensorLists; made by `st.fused`.

    Args:
        function: straight-line math on tensors and numbers.
    """

    def __init__(self, function: Callable[P, R]) -> None:
        self.function = function
        self.fusion = FusedFunction(function)
        functools.update_wrapper(self, function)
        self._key = next(_numbers)
        _fusions[self._key] = self.fusion

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Apply the math to every element of the lists among the arguments."""
        if torch.compiler.is_compiling():
            return self._compiling(*args, **kwargs)
        args, kwargs, lists = _open_lists(self.fusion.name, args, kwargs)  # type: ignore[assignment]
        result = self.fusion(*args, **kwargs)
        return optree.tree_map(lambda leaf: _close_list(leaf, lists), result, none_is_leaf=True)  # type: ignore[arg-type, return-value]

    def _compiling(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """The call as `torch.compile` traces it: one op on the lists, or the math itself when it returns tensors."""
        from subtensors.fused.dynamo_call import call_opaque  # which loads the compiler

        values = [*args, *kwargs.values()]
        names = (None,) * len(args) + tuple(kwargs)
        if not call_opaque(self._key, values, names):
            return self.function(*args, **kwargs)
        return None  # type: ignore[return-value]

    def explain(self, *args: P.args, **kwargs: P.kwargs) -> str:
        """Describe a call with these arguments: groups of elements, kernels, and the reasons for slower paths."""
        args, kwargs, _ = _open_lists(self.fusion.name, args, kwargs)  # type: ignore[assignment]
        return self.fusion.explain(*args, **kwargs)

    def tune(self, *args: P.args, **kwargs: P.kwargs) -> dict[str, Tiling]:
        """Choose tile sizes for a call with these arguments by measurement, and keep the choice on disk.

        The arguments are looked at but neither read nor written: what is measured runs on scratch tensors.
        It takes about a second on a GPU, and does nothing without one.

        Args:
            args: as for a call.
            kwargs: as for a call.

        Returns:
            For each device and program that the call runs there, its tiling.

        Example:
            >>> import torch, subtensors as st
            >>> @st.fused
            ... def halve(p):
            ...     p.mul_(0.5)
            >>> for program, tiling in halve.tune(st.TensorList([torch.ones(2), torch.ones(3)])).items():
            ...     print(tiling)
            Tiling(block=512, warps=2)
        """
        args, kwargs, _ = _open_lists(self.fusion.name, args, kwargs)  # type: ignore[assignment]
        return self.fusion.tune(*args, **kwargs)

    def __reduce__(self) -> Any:
        # What a decorator made stands where the function would: pickle finds it by its name.
        return getattr(self, "__qualname__", (Fused, (self.function,)))

    @property
    def traces(self) -> int:
        """The number of times that the function was traced."""
        return self.fusion.traces


def fused(function: Callable[P, R]) -> Fused[P, R]:
    """Make a function of single-tensor math run as one kernel over lists of tensors.

    The function is written for one tensor: any pointwise torch op, in-place updates, comparisons, casts,
    whole-tensor reductions (`norm`, `sum`, `max`, ...), 0-d tensors and Python numbers. Called with
    TensorLists it is traced once and lowered to one Triton kernel per sweep between reductions, however
    many tensors there are; on a CPU the traced program runs through torch. Floats and ints stay live: a new
    value neither traces nor compiles nor waits for the device. bools, None and strings are part of the
    signature, so an `if` on them is fine.

    Args:
        function: straight-line math on tensors and numbers; returns None, a tensor or a pytree of tensors.

    Returns:
        A callable of the same arguments, each tensor one where a TensorList may stand. With plain tensors
        only, it is the same math. Results are TensorLists, or plain tensors when no argument was a list.

    Raises:
        RuleError: at the first call, when the math needs a value or a shape on the host, or holds an op
            that is not element by element; names the source line.
        ValueError: the lists' structures differ; names the first path that does.

    Example:
        >>> import torch, subtensors as st
        >>> @st.fused
        ... def sgd(p, g, *, lr):
        ...     p.sub_(lr * g)
        >>> p = st.TensorList({"w": torch.ones(2, 2), "b": torch.zeros(3)})
        >>> sgd(p, st.TensorList({"w": torch.ones(2, 2), "b": torch.ones(3)}), lr=0.5)
        >>> p["b"]
        tensor([-0.5000, -0.5000, -0.5000])
    """
    return Fused(function)


def _open_lists(
    name: str, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], list[TensorList]]:
    """The arguments with `TensorColumn` for lists, and the lists."""
    lists: list[TensorList] = []

    def opened(leaf: Any) -> Any:
        if not isinstance(leaf, TensorList):
            return leaf
        if lists and (difference := first_difference(lists[0].treespec, leaf.treespec)):
            raise ValueError(f"{name}: TensorLists of different structure, at {difference}")
        lists.append(leaf)
        return TensorColumn(leaf.tensors)

    args, kwargs = optree.tree_map(opened, (tuple(args), kwargs), none_is_leaf=True)  # type: ignore[arg-type, assignment]
    return args, kwargs, lists  # type: ignore[return-value]


def _close_list(leaf: Any, lists: list[TensorList]) -> Any:
    """A list for `TensorColumn`: the argument itself when they are its own."""
    if not isinstance(leaf, TensorColumn):
        return leaf
    for known in lists:
        if all(a is b for a, b in zip(leaf, known.tensors, strict=True)):
            return known
    return lists[0].like(leaf)
