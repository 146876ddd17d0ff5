"""`TensorList`: many tensors held as one value, with every torch function mapped over them.

This file holds the class and its data. How a call runs on lists is decided in `torch_function.py`, which imports this
file and sets the three functions that the class runs calls with.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Hashable, Iterator, KeysView, Sequence, ValuesView
from types import EllipsisType
from typing import ClassVar, cast, overload

import optree
import torch

from subtensors.arguments import shown
from subtensors.dispatch.lists.list_call import ListCall, list_call
from subtensors.dispatch.ops.errors import RuleError
from subtensors.dispatch.ops.plain_types import PLAIN_TYPES
from subtensors.dispatch.ops.tree import Args, Kwargs, PyTree
from subtensors.dispatch.torch_internals import dynamo_rules, ops
from subtensors.dispatch.torch_internals.dispatcher import is_traced
from subtensors.lists import compiled
from subtensors.lists.conversions import NoSingleValue, describe
from subtensors.lists.packing import Packed, PackedLayout, are_private, pack
from subtensors.lists.tree_structure import Structure, check_elements, flatten_tensors, indexes_each, select_leaves

_log = logging.getLogger(__name__)

Size = Sequence[int | torch.SymInt]


class TensorList(NoSingleValue, torch.Tensor):
    """Many tensors as one value: `torch.f(tl, ...)` is `[torch.f(t, ...) for t in tl]`, for every torch function.

    Other TensorLists among the arguments are matched element by element; plain tensors and numbers go to each. Several
    outputs give several TensorLists, results that are no tensors (shapes, numbers) a plain list. Autograd flows through
    the elements.

    Args:
        x: a list, tuple, iterator or any pytree of tensors of any shapes, dtypes and devices; or a TensorList, for
            another one of the same elements.

    Raises:
        TypeError: a leaf is not a plain tensor; the message names its path.

    Example:
        >>> tl = TensorList({"w": torch.ones(2, 3), "b": torch.zeros(3)})
        >>> tl
        TensorList(2 tensors, 9 values: 1 x float32[3] cpu, 1 x float32[2, 3] cpu)
        >>> (tl + 1).tree()["b"]
        tensor([1., 1., 1.])
        >>> tl.shape
        [torch.Size([3]), torch.Size([2, 3])]
    """

    treespec: optree.PyTreeSpec
    _elements: list[torch.Tensor] | None
    _packed: Packed | None
    _aliases: dict[int, torch.Tensor]
    _is_unconnected: bool
    """True for a traced list whose elements require grad, if the list can't be connected to them."""
    _edges: list[compiled.Edge]

    _run_function: ClassVar[Callable[[ListCall[TensorList]], PyTree]]
    _run_overload: ClassVar[Callable[[ListCall[TensorList]], PyTree]]
    _run_in_compiler: ClassVar[Callable[[Callable[..., PyTree], Args, Kwargs], PyTree]]

    @staticmethod
    def __new__(cls, x: object) -> TensorList:
        """Make the list of a pytree's tensors."""
        if isinstance(x, TensorList):
            return copy.copy(x)._marked()
        tree = list(x) if isinstance(x, (Iterator, KeysView, ValuesView)) else x
        tensors, treespec = flatten_tensors(tree, list_type=TensorList)
        return _of_elements(tensors, treespec)._marked()

    def __init__(self, x: object) -> None:
        pass

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The elements, in the order of the pytree's leaves."""
        if self._is_unconnected or self.is_traced():
            return self.split_elements().elements()
        compiled.check_connected(self, self._edges)
        return self.elements()

    def stored(self) -> list[torch.Tensor]:
        """The tensors that the list stores: its flats while it is packed, else its elements."""
        return self.elements() if self._packed is None else self._packed.flats

    def elements(self) -> list[torch.Tensor]:
        """The elements, like `tensors`, but without connecting those of a traced list to it in the autograd graph."""
        if self._elements is None:
            assert self._packed is not None
            self._elements = self._packed.layout.view(self._packed.flats)
        return self._elements

    def like(self, tensors: Sequence[torch.Tensor]) -> TensorList:
        """A list of the same structure with other elements.

        Args:
            tensors: one tensor per element, of any shape and dtype.

        Raises:
            TypeError: one is no tensor.
            ValueError: the number of tensors is not `len(self)`.

        Example:
            >>> TensorList([torch.ones(2)]).like([torch.zeros(3)]).shape
            [torch.Size([3])]
        """
        check_elements(tensors, len(self), list_type=TensorList)
        return _of_elements(list(tensors), self.treespec)

    def tree(self) -> PyTree:
        """The elements in the pytree they came in.

        Example:
            >>> TensorList({"step": torch.tensor(3)}).tree()
            {'step': tensor(3)}
        """
        return self.treespec.unflatten(self.tensors)

    def same_structure(self, other: TensorList) -> bool:
        """Return whether both lists came from pytrees of one structure, so that one call can take both.

        Example:
            >>> a = TensorList([torch.ones(2)])
            >>> a.same_structure(TensorList([torch.ones(5)])), a.same_structure(TensorList((torch.ones(2),)))
            (True, False)
        """
        if not isinstance(other, TensorList):
            raise TypeError(f"same_structure takes another TensorList, got {shown(other)}")
        return self.treespec == other.treespec

    def pack(self) -> TensorList:
        """Move the elements into one flat arena per device and dtype; each becomes a view of its place there.

        The tensors keep their identity, values, `requires_grad`, `.grad` and, where dense, their strides; only their
        memory changes. An element that was a view of some other tensor stops being one. Pointwise and in-place ops
        between lists packed alike then run once per group, and `torch.compile` sees one tensor per group. If an
        element's `.data` is later set to other memory, the list is treated as unpacked.

        Raises:
            ValueError: two elements share part of their memory, or one is not a strided torch tensor.

        Example:
            >>> w, b = torch.nn.Parameter(torch.ones(2, 3)), torch.nn.Parameter(torch.zeros(3))
            >>> TensorList([w, b]).pack()
            TensorList(2 tensors, 9 values: 1 x float32[2, 3] cpu, 1 x float32[3] cpu; packed in 1 flat)
            >>> w.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
            True
        """
        if self.arena is None and len(self):
            self._packed = pack(self.tensors, self.treespec)
            # Elements that nothing else refers to are dropped; `elements` makes views of the flats when they are read.
            elements, self._elements = self.elements().copy(), None
            self._elements = None if are_private(elements) else elements
        return self

    @property
    def arena(self) -> PackedLayout | None:
        """The layout of a packed list; None for an unpacked one, or once an element left it."""
        if self._packed is not None and self._elements and not self._packed.holds(self._elements):
            _log.warning("an element of a packed TensorList was moved; the list is treated as unpacked")
            self._packed = None
        return None if self._packed is None else self._packed.layout

    @property
    def flats(self) -> list[torch.Tensor]:
        """The arenas of a packed list, one 1-d tensor per device and dtype; gaps between elements hold no meaning."""
        if self.arena is None or self._packed is None:
            raise ValueError("this TensorList is not packed; call .pack()")
        return self._packed.flats

    def any_requires_grad(self) -> bool:
        """Return whether an element requires grad; for a packed list, as of the last full check of its addresses."""
        if self._packed is not None and self._packed.any_requires_grad is not None:
            return self._packed.any_requires_grad
        return any(t.requires_grad for t in self._elements or self.stored())

    def __len__(self) -> int:
        return self.treespec.num_leaves

    def __iter__(self) -> Iterator[torch.Tensor]:  # type: ignore[override]
        return iter(list(self.tensors))

    def __reversed__(self) -> Iterator[torch.Tensor]:  # type: ignore[override]
        return reversed(list(self.tensors))

    def __contains__(self, item: object) -> bool:
        return any(t is item for t in self.tensors)

    @overload
    def __getitem__(self, key: slice | EllipsisType | torch.Tensor) -> TensorList: ...

    @overload
    def __getitem__(self, key: object) -> torch.Tensor: ...

    def __getitem__(self, key: object) -> torch.Tensor:
        """The element at a position or path, the part of the list under a slice or inner path, or each element indexed.

        A position is an int, a slice gives a flat list, a path is a key or a tuple of keys. A key that holds an
        Ellipsis or a tensor indexes every element: `tl[..., 0]` is `[t[..., 0] for t in tl]`.
        """
        if isinstance(key, int):
            if not -len(self) <= key < len(self):
                raise IndexError(f"no element {key} in a TensorList of {len(self)}")
            return self.tensors[key]
        if indexes_each(key):
            call = list_call(torch.Tensor.__getitem__, (self, key), {}, TensorList)
            return cast(TensorList, TensorList._run_function(call))
        leaves, spec = select_leaves(self.treespec, key)
        part = self.tensors[leaves]
        return part[0] if spec.is_leaf() else _of_elements(part, spec)

    def __setitem__(self, key: object, value: object) -> None:
        """Write into the memory of `self[key]`."""
        if indexes_each(key):
            TensorList._run_function(list_call(torch.Tensor.__setitem__, (self, key, value), {}, TensorList))
            return
        part = self[key]
        part.copy_(value) if isinstance(value, torch.Tensor) else part.fill_(cast(float, value))

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        if self._elements is None and self._packed is not None:
            metadata = self._packed.metadata()  # without making the elements
        else:
            metadata = [(t.dtype, t.device, t.shape) for t in self.elements()]
        return describe(metadata, 0 if self._packed is None else len(self._packed.flats))

    __str__ = __repr__

    def __copy__(self) -> TensorList:
        if self._elements is None and self._packed is not None:
            return of_flats(self._packed.flats, self._packed.layout)
        out = _of_elements(list(self.tensors), self.treespec)
        out._packed = None if self.arena is None else self._packed
        return out

    def __deepcopy__(self, memo: dict[int, object]) -> TensorList:
        if id(self) in memo:
            return cast(TensorList, memo[id(self)])
        memo[id(self)] = out = _of_elements([copy.deepcopy(t, memo) for t in self.tensors], self.treespec)
        return out if self.arena is None else out.pack()

    def __reduce_ex__(self, protocol: object) -> tuple[Callable[..., TensorList], tuple[object, ...]]:
        # Compiled graphs are cached under the pickles of their inputs, so whether the list is packed must show.
        return _rebuild, (self.treespec.unflatten(range(len(self))), list(self.tensors), self._packed is not None)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., PyTree], types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> PyTree:
        if torch.compiler.is_compiling() or ops.is_tracing():
            return TensorList._run_in_compiler(func, args, kwargs or {})
        return TensorList._run_function(list_call(func, args, kwargs or {}, TensorList))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., PyTree], types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> PyTree:
        return TensorList._run_overload(list_call(func, args, kwargs or {}, TensorList))

    def __tensor_flatten__(self) -> tuple[list[str], Hashable]:
        if self._packed is not None and ops.is_asked_for_names_only():
            return [f"flat_{i}" for i in range(len(self._packed.flats))], None
        layout = self.arena
        is_unconnected = self._is_unconnected or self.any_requires_grad()
        if is_unconnected and not self.is_traced():
            edges = compiled.join_elements(self, self.tensors, self._edges) if torch.is_grad_enabled() else []
            is_unconnected, self._edges = edges is None, edges or self._edges
        if layout is not None:
            return [f"flat_{i}" for i in range(len(layout.sizes))], (layout, is_unconnected)
        for i in range(len(self)):
            self._untracked_element(i)
        return [f"element_{i}" for i in range(len(self))], (Structure(self.treespec), is_unconnected)

    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: dict[str, torch.Tensor],
        context: tuple[PackedLayout | Structure, bool],
        outer_size: Size,
        outer_stride: object,
    ) -> TensorList:
        inner = list(inner_tensors.values())
        # At run time compiled code reads the size from the list itself, which returns those of its elements.
        size = outer_size if isinstance(outer_size[0], int | torch.SymInt) else None
        structure, is_unconnected = context
        if isinstance(structure, PackedLayout):
            out = of_flats(inner, structure, size)
        else:
            out = _of_elements(inner, structure.treespec, size)
        out._is_unconnected = is_unconnected
        if is_unconnected and type(inner[0]) in PLAIN_TYPES:
            raise RuleError(
                "a compiled function can't return a TensorList that requires grad: return its elements, list(x)"
            )
        return out

    def __getattr__(self, name: str) -> torch.Tensor:
        kind, _, index = name.partition("_")
        if index.isdigit() and kind == "flat" and self._packed is not None:
            return self._packed.flats[int(index)]
        if index.isdigit() and kind == "element":
            return self._untracked_element(int(index))
        raise AttributeError(f"'TensorList' object has no attribute {name!r}")

    def is_traced(self) -> bool:
        """Return whether the list stores tensors of a compiler or a transform, without known values."""
        stored = self.stored()
        return bool(stored) and type(stored[0]) not in PLAIN_TYPES and is_traced(stored[0])

    def _marked(self) -> TensorList:
        """Mark the list as requiring grad if an element does, and return it.

        Compiled code guards on the mark before it reads the elements; `__tensor_flatten__` connects the list to them in
        the autograd graph. A list that compiled code makes holds traced tensors, which autograd tracks one by one.
        """
        elements = self.elements()
        if not self.is_traced():
            compiled.mark_requires_grad(self, elements)
        elif ops.is_in_compiler():
            dynamo_rules.install_rules(TensorList)  # the first list may be one that it makes
        return self

    def split_elements(self) -> TensorList:
        """Split a traced list that requires grad into a list of traced tensors that autograd tracks one by one."""
        parts = compiled.split_elements(self, self._is_unconnected) if torch.is_grad_enabled() else None
        return self if parts is None else self.with_stored(parts)

    def _untracked_element(self, index: int) -> torch.Tensor:
        """Return an element for the compiler, which refuses those that require grad, or a detached alias of it."""
        element = self.elements()[index]
        if not element.requires_grad or self.is_traced():
            return element
        return compiled.detached_alias(element, index, self._aliases)

    def with_stored(self, tensors: list[torch.Tensor]) -> TensorList:
        """A list of the same structure and, if packed, the same layout, that stores other tensors."""
        with torch._C.DisableTorchFunctionSubclass():
            size = self.shape
        if self._packed is None:
            return _of_elements(tensors, self.treespec, size)
        return of_flats(tensors, self._packed.layout, size)

    def _stable_hash_for_caching(self) -> str:
        structure = self.treespec if self._packed is None else self._packed.layout.stable_hash()
        return f"{structure} {self._is_unconnected}"


def _of_elements(
    tensors: list[torch.Tensor] | None,
    treespec: optree.PyTreeSpec,
    size: Size | None = None,
    first: torch.Tensor | None = None,
) -> TensorList:
    """Make a list of elements; `first` tells the dtype and device of one that has none of its own yet."""
    first = tensors[0] if tensors else first
    dtype, device = (torch.get_default_dtype(), torch.device("cpu")) if first is None else (first.dtype, first.device)
    # To the compiler a list is a vector of its elements: len, iteration and indexing mean the same there.
    with torch._C.DisableTorchFunctionSubclass():
        out = torch.Tensor._make_wrapper_subclass(
            TensorList, size or (treespec.num_leaves,), dtype=dtype, device=device
        )
    out.treespec, out._elements, out._packed = treespec, tensors, None
    out._aliases, out._is_unconnected, out._edges = {}, False, []
    return out


def list_of(tensors: Sequence[torch.Tensor], lists: Sequence[TensorList]) -> TensorList:
    """The one of these lists that holds these tensors, or a list like the first one where none does."""
    for known in lists:
        if all(a is b for a, b in zip(tensors, known.tensors, strict=True)):
            return known
    return lists[0].like(tensors)


def of_flats(flats: list[torch.Tensor], layout: PackedLayout, size: Size | None = None) -> TensorList:
    """Make the packed list that stores these flats."""
    out = _of_elements(None, layout.treespec, size, flats[layout.groups[0]])
    out._packed = Packed(flats, layout)
    return out


def _rebuild(tree: PyTree, tensors: list[torch.Tensor], packed: bool = False) -> TensorList:
    """A TensorList from its structure, written as plain containers of positions, and its elements."""
    out = _of_elements(list(tensors), optree.tree_structure(tree))
    return out.pack() if packed else out


torch.serialization.add_safe_globals([_rebuild])
compiled.teach_compiler(TensorList)
