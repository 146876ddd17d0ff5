"""`TensorList`: many tensors held as one value, with every torch function mapped over them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, KeysView, Sequence, ValuesView
from typing import Any, cast

import optree
import torch

from subtensors.dispatch.mapping import ListCall, gather, list_call
from subtensors.tree_structure import first_difference, flatten_tensors, leaf_name, list_structure, subtree


class TensorList(torch.Tensor):
    """Many tensors as one value: `torch.f(tl, ...)` is `[torch.f(t, ...) for t in tl]`."""

    tensors: list[torch.Tensor]
    treespec: optree.PyTreeSpec

    @staticmethod
    def __new__(cls, x: object) -> TensorList:
        if isinstance(x, TensorList):
            return x.like(x.tensors)
        tensors, treespec = flatten_tensors(list(x) if isinstance(x, (Iterator, KeysView, ValuesView)) else x)
        return _wrap(tensors, treespec)

    def __init__(self, x: object) -> None:
        pass

    def like(self, tensors: Sequence[torch.Tensor]) -> TensorList:
        """A list of the same structure with other elements."""
        if len(tensors) != self.treespec.num_leaves:
            raise ValueError(f"{self.treespec.num_leaves} tensors expected, one a leaf; got {len(tensors)}")
        return _wrap(list(tensors), self.treespec)

    def tree(self) -> Any:
        """The elements in the pytree they came in."""
        return self.treespec.unflatten(self.tensors)

    def __len__(self) -> int:
        return self.treespec.num_leaves

    def __iter__(self) -> Iterator[torch.Tensor]:  # type: ignore[override]
        return iter(list(self.tensors))

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, int):
            return self.tensors[key]
        if isinstance(key, slice):
            part = self.tensors[key]
            return _wrap(part, list_structure(len(part)))
        spec, start = subtree(self.treespec, key if isinstance(key, tuple) else (key,))
        if spec.is_leaf():
            return self.tensors[start]
        return _wrap(self.tensors[start : start + spec.num_leaves], spec)

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"TensorList of {len(self)}"

    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        call = list_call(func, args, kwargs or {}, TensorList)
        check_same_structure(call)
        return map_elements(call)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        call = list_call(func, args, kwargs or {}, TensorList)
        return map_elements(call)


def _wrap(tensors: list[torch.Tensor], treespec: optree.PyTreeSpec) -> TensorList:
    first = tensors[0] if tensors else torch.empty(0)
    with torch._C.DisableTorchFunctionSubclass():
        out = cast(
            TensorList,
            torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
                TensorList, (sum([t.numel() for t in tensors]),), dtype=first.dtype, device=first.device
            ),
        )
    out.tensors = tensors
    out.treespec = treespec
    return out


def check_same_structure(call: ListCall) -> None:
    """Refuse a call whose lists do not match, naming the first path that differs."""
    first, *others = call.lists
    for other in others:
        if difference := first_difference(first.treespec, other.treespec):
            raise ValueError(f"TensorLists of different structure, at {difference}")


def map_elements(call: ListCall) -> Any:
    """The call on every element in turn."""
    lists = call.lists
    results = []
    for index, elements in enumerate(zip(*[x.tensors for x in lists], strict=True)):
        try:
            results.append(call.run(elements))
        except Exception as error:
            error.add_note(f"in element {leaf_name(lists[0].treespec, index)} of a TensorList")
            raise
    return as_lists(results, lists)


def as_lists(results: list[Any], lists: list[TensorList]) -> Any:
    """Results of each element as lists; a result that is an argument's own elements is that argument."""

    def wrap(tensors: list[torch.Tensor]) -> TensorList:
        for x in lists:
            if all([a is b for a, b in zip(tensors, x.tensors, strict=True)]):
                return x
        return lists[0].like(tensors)

    if not results:
        return lists[0].like([])
    if all([r is None for r in results]):
        return None
    return gather(results, wrap)
