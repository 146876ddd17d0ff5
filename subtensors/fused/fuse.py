"""`st.fused`: single-tensor math that runs as one kernel over whole lists."""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Callable
from typing import Generic, ParamSpec, TypeVar

import optree
import torch

from subtensors.arguments import LARGEST_SIZE, signature_of
from subtensors.dispatch.fused.fused_function import FusedFunction
from subtensors.dispatch.fused.proxies import ProxyTensor
from subtensors.dispatch.fused.tensor_columns import TensorColumn
from subtensors.dispatch.ops.tree import Args, Kwargs, PyTree, tree_find
from subtensors.dispatch.torch_internals.ops import has_dispatch_mode
from subtensors.fused.custom_ops import functions
from subtensors.kernels.fused.launch import Tiling
from subtensors.lists.tensor_list import TensorList, list_of
from subtensors.lists.tree_structure import first_difference

P = ParamSpec("P")
R = TypeVar("R")

_keys = itertools.count()


class Fused(Generic[P, R]):
    """A function of single-tensor math that takes TensorLists; made by `st.fused`.

    Args:
        function: straight-line math on tensors and numbers.
    """

    def __init__(self, function: Callable[P, R]) -> None:
        self.function = function
        self.fusion = FusedFunction(function)
        functools.update_wrapper(self, function)
        self._key = next(_keys)
        functions[self._key] = self.fusion

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Apply the math to every element of the lists among the arguments."""
        if torch.compiler.is_compiling():
            return self._traced_call(*args, **kwargs)
        if has_dispatch_mode() and tree_find(ProxyTensor, (args, kwargs)):
            return self.function(*args, **kwargs)  # the math of another fused function, which is traced
        columns, options, lists = _lists_to_columns(self.fusion.name, args, kwargs)
        result = self.fusion(*columns, **options)
        return optree.tree_map(  # type: ignore[return-value]  # the same tree, with lists for columns
            lambda leaf: list_of(leaf, lists) if isinstance(leaf, TensorColumn) else leaf, result, none_is_leaf=True
        )

    def __repr__(self) -> str:
        traced = "once" if self.traces == 1 else f"{self.traces} times"
        return f"<st.fused {self.fusion.name}{signature_of(self.function)}: traced {traced}>"

    def __get__(self, instance: object, owner: type | None = None) -> Fused[..., R]:
        """The method of an object: fused math of its own, whose `self` is the object."""
        if instance is None:
            return self
        if torch.compiler.is_compiling():
            # The compiler traces the math on whole lists, and guards on what it reads of the object.
            return functools.partial(self.function, instance)  # type: ignore[return-value, call-arg, arg-type]
        return bound_to(self, instance)

    def _traced_call(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """The call as `torch.compile` traces it: one op on the lists, or the math itself when it returns tensors."""
        from subtensors.fused.dynamo_call import call_opaque  # this loads Dynamo

        values = [*args, *kwargs.values()]
        names = (None,) * len(args) + tuple(kwargs)
        if not call_opaque(self._key, values, names):
            return self.function(*args, **kwargs)
        return None  # type: ignore[return-value]

    def explain(self, *args: P.args, **kwargs: P.kwargs) -> str:
        """Describe a call with these arguments: groups of elements, kernels, and the reasons for slower paths."""
        columns, options, _ = _lists_to_columns(self.fusion.name, args, kwargs)
        return self.fusion.explain(*columns, **options)

    def tune(self, *args: P.args, **kwargs: P.kwargs) -> dict[str, Tiling]:
        """Choose tile sizes for a call with these arguments by measurement, and keep the choice on disk.

        The arguments are neither read nor written: measurements run on scratch tensors. It takes about a second on a
        GPU, and does nothing without one.

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
        columns, options, _ = _lists_to_columns(self.fusion.name, args, kwargs)
        return self.fusion.tune(*columns, **options)

    def __reduce__(self) -> str | tuple[object, ...]:
        # A decorated function is found by pickle under its own name.
        return getattr(self, "__qualname__", (Fused, (self.function,)))

    @property
    def traces(self) -> int:
        """The number of times that the function was traced."""
        return self.fusion.traces


def bound_to(method: Fused[P, R], instance: object) -> Fused[..., R]:
    """The method of this object, made once and kept in its dict, so that both end together."""
    key = f"_fused_{method.fusion.name}"
    try:
        kept = instance.__dict__
    except AttributeError:
        raise TypeError(
            f"{method.fusion.name} is fused math in a class without __dict__: its objects can't keep their kernels; "
            "fuse a function that takes the numbers as arguments"
        ) from None
    known = kept.get(key)
    if not isinstance(known, BoundFused) or known.instance is not instance or known.method is not method:
        known = kept[key] = BoundFused(method, instance)
    return known


class BoundFused(Fused[P, R]):
    """Fused math that is a method of one object."""

    def __init__(self, method: Fused[..., R], instance: object) -> None:
        super().__init__(types.MethodType(method.function, instance))
        self.method, self.instance = method, instance

    def __reduce__(self) -> tuple[object, ...]:
        # A copy of the object gets a method of its own.
        return getattr, (self.instance, self.method.fusion.name)


def fused(function: Callable[P, R]) -> Fused[P, R]:
    """Make a function of single-tensor math run as one kernel over lists of tensors.

    The function is written for one tensor: any pointwise torch op, in-place updates, comparisons, casts,
    whole-tensor reductions (`norm`, `sum`, `max`, ...), 0-d tensors and Python numbers. Called with
    TensorLists it is traced once and lowered to one Triton kernel per sweep between reductions, however
    many tensors there are; on a CPU the traced program runs through torch. Floats and ints are dynamic: a new
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
    if isinstance(function, staticmethod | classmethod):
        raise TypeError(f"st.fused goes below @{type(function).__name__}, next to the function")
    if not callable(function):
        raise TypeError(f"st.fused makes a function of tensors run over lists; got {type(function).__name__}")
    return Fused(function)


def _lists_to_columns(name: str, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs, list[TensorList]]:
    """The arguments with `TensorColumn` for lists, and the lists."""
    lists: list[TensorList] = []

    def column(leaf: PyTree) -> PyTree:
        if not isinstance(leaf, TensorList):
            if isinstance(leaf, torch.Tensor) and leaf.is_nested is True:
                raise TypeError(f"{name} takes tensors of one shape each, got one that is nested: give t.unbind()")
            if type(leaf) is int and not -LARGEST_SIZE <= leaf <= LARGEST_SIZE:
                raise ValueError(f"{name} takes ints of 64 bits, got {leaf}")
            return leaf
        if lists and (difference := first_difference(lists[0].treespec, leaf.treespec)):
            raise ValueError(f"{name}: TensorLists of different structure, at {difference}")
        lists.append(leaf)
        return TensorColumn(leaf.tensors)

    tree: PyTree = (tuple(args), kwargs)
    try:
        columns: PyTree = optree.tree_map(column, tree, none_is_leaf=True)
    except RecursionError:
        raise ValueError(f"{name}: an argument is a container that holds itself") from None
    return *columns, lists
