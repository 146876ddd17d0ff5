"""Map semantics: a call over lists is the same call over each element, and its results are lists again.

For lists x, y of n tensors and anything else c, `f(x, y, c)` is `[f(x[0], y[0], c), ..., f(x[n-1], y[n-1], c)]`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, NoReturn, Protocol, TypeVar

import optree
import torch

from subtensors.dispatch.ops.tree import Args, Kwargs, PyTree, tree_find


class ElementList(Protocol):
    """The part of a list of tensors that the ways to run a call use."""

    treespec: optree.PyTreeSpec

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The elements."""


T = TypeVar("T")
ListT = TypeVar("ListT", bound=ElementList, covariant=True)


@dataclass(frozen=True)
class ListCall(Generic[ListT]):
    """One call, and the lists among its arguments.

    `leaves` are all arguments in order, `positions` the indices of the lists among them.
    """

    func: Callable[..., PyTree]
    args: Args
    kwargs: Kwargs
    leaves: list[PyTree]
    spec: optree.PyTreeSpec
    positions: tuple[int, ...]

    @property
    def lists(self) -> list[ListT]:
        """The list arguments, first to last."""
        return [self.leaves[i] for i in self.positions]

    def with_lists(self, values: Iterable[object]) -> tuple[Args, Kwargs]:
        """The arguments with each list replaced by a value."""
        leaves = list(self.leaves)
        for position, value in zip(self.positions, values, strict=True):
            leaves[position] = value
        rebuilt: PyTree = self.spec.unflatten(leaves)
        args, kwargs = rebuilt
        return args, kwargs

    def run(self, values: Iterable[object]) -> PyTree:
        """Make the call with each list replaced by a value."""
        args, kwargs = self.with_lists(values)
        return self.func(*args, **kwargs)


def list_call(func: Callable[..., PyTree], args: Args, kwargs: Kwargs, list_type: type[ListT]) -> ListCall[ListT]:
    """Return a call with the lists among its arguments, at any depth of tuples, lists and dicts."""
    arguments: PyTree = (args, kwargs)
    leaves: list[PyTree]
    leaves, spec = optree.tree_flatten(arguments, none_is_leaf=True)
    positions = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, list_type))
    return ListCall(func, args, kwargs, leaves, spec, positions)


@dataclass(frozen=True)
class ListPlan:
    """A way to run a call: its description, and the function that runs it."""

    describe: Callable[[], str]
    run: Callable[[], PyTree]


class PerElement(list[T]):
    """A list of what each element of a TensorList gives, such as its shape; refuses to pass for one tensor's.

    Functions that compute with `x.dim()` or `x.device.type` expect one tensor. A comparison with anything but a list is
    made for each element, and the truth value is what they agree on.

    Example:
        >>> PerElement([2, 3]) == [2, 3]
        True
        >>> PerElement([2, 3]) == 2
        [True, False]
        >>> bool(PerElement([2, 3]) != 5)
        True
        >>> -PerElement([2, 3])
        Traceback (most recent call last):
        ...
        TypeError: a function of one tensor was given a TensorList: it reads a property that each of the 2 elements ...
    """

    def _refuse(self, *_: object) -> NoReturn:
        raise TypeError(
            f"a function of one tensor was given a TensorList: it reads a property that each of the {len(self)} "
            "elements has its own value of; call it for each element, [f(t) for t in x], or hand it x.tree()"
        )

    def __eq__(self, other: object) -> bool | PerElement[bool]:  # type: ignore[override]
        return list.__eq__(self, other) if isinstance(other, list) else PerElement(x == other for x in self)

    def __ne__(self, other: object) -> bool | PerElement[bool]:  # type: ignore[override]
        return list.__ne__(self, other) if isinstance(other, list) else PerElement(x != other for x in self)

    def __bool__(self) -> bool:
        if not len(self) or any(type(x) is not bool for x in self):
            self._refuse()
        if any(x is not self[0] for x in self):
            raise TypeError(
                f"the {len(self)} elements of a TensorList do not agree on this truth value; ask for any() or all()"
            )
        return bool(self[0])

    __neg__ = __pos__ = __abs__ = __index__ = __int__ = __float__ = __invert__ = _refuse
    __sub__ = __rsub__ = __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = _refuse
    __mod__ = __rmod__ = __pow__ = __rpow__ = __mul__ = __rmul__ = _refuse  # type: ignore[assignment]
    __or__ = __ror__ = __and__ = __rand__ = __xor__ = __rxor__ = _refuse
    __hash__ = _refuse  # type: ignore[assignment]
    type = property(_refuse)

    def __reduce__(self) -> tuple[object, ...]:
        return list, (list(self),)


def gather(results: Sequence[PyTree], wrap: Callable[[list[torch.Tensor]], PyTree]) -> PyTree:
    """Gather the results of all elements into one value.

    Tensors become `wrap(tensors)`; tuples, lists and dicts of one shape become that container of gathered parts
    (`torch.return_types.max` stays one); anything else is the list of results.
    """
    first = results[0]
    if all(isinstance(r, torch.Tensor) for r in results):
        return wrap(list(results))
    holds_tensors = not isinstance(first, torch.Tensor) and bool(tree_find(torch.Tensor, first))
    if not holds_tensors or any(type(r) is not type(first) or len(r) != len(first) for r in results):
        return PerElement(results)
    if isinstance(first, dict):
        return {key: gather([r[key] for r in results], wrap) for key in first}
    parts = [gather(part, wrap) for part in zip(*results, strict=True)]
    if hasattr(first, "_make"):
        return type(first)(*parts)
    return type(first)(parts)
