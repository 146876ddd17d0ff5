"""`TensorList`: many tensors held as one value, with every torch function mapped over them."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Hashable, Iterator, KeysView, Sequence, ValuesView
from typing import Any, cast

import optree
import torch

from subtensors.dispatch.lists.list_call import list_call
from subtensors.dispatch.ops.errors import RuleError
from subtensors.dispatch.ops.plain_types import PLAIN_TYPES
from subtensors.dispatch.torch_internals import ops
from subtensors.lists import compiled_autograd, torch_function
from subtensors.lists.dynamo_metadata import teach_compiler
from subtensors.lists.indexing import indexes_each, named
from subtensors.lists.packing import PackedLayout, Places, are_private, pack
from subtensors.lists.repr import described
from subtensors.lists.scalar_conversions import NoSingleValue
from subtensors.lists.tree_structure import Structure, flatten_tensors

_log = logging.getLogger(__name__)

_ALIASES_WHOLE = (torch.Tensor.detach, torch.detach)


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
    _flats: list[torch.Tensor] | None
    _arena: PackedLayout | None
    _places: Places | None
    _aliases: dict[int, torch.Tensor]
    _records: bool
    """True for a compiler's stand-in for a list whose elements require grad, if the list can't be connected to them."""
    _edges: list[Any]

    @staticmethod
    def __new__(cls, x: object) -> TensorList:
        """Make the list of a pytree's tensors."""
        if isinstance(x, TensorList):
            return compiled_autograd.marked(copy.copy(x))
        tensors, treespec = flatten_tensors(list(x) if isinstance(x, (Iterator, KeysView, ValuesView)) else x)
        for path, t in zip(treespec.paths(), tensors, strict=True):
            if isinstance(t, TensorList):
                raise TypeError(
                    f"an element of a TensorList is one tensor; {list(path)} is a TensorList: give its .tree()"
                )
        return compiled_autograd.marked(_of_elements(tensors, treespec))

    def __init__(self, x: object) -> None:
        pass

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The elements, in the order of the pytree's leaves."""
        return (
            compiled_autograd.parted(self).elements()
            if self._records or compiled_autograd.stands_in(self)
            else self.elements()
        )

    def held(self) -> list[torch.Tensor]:
        """The tensors that the list stores: its flats while it is packed, else its elements."""
        return self.elements() if self._flats is None else self._flats

    def elements(self) -> list[torch.Tensor]:
        """The elements, like `tensors`, but without connecting a compiler's stand-ins to the autograd graph."""
        if self._elements is None:
            assert self._arena is not None
            assert self._flats is not None
            self._elements = self._arena.view(self._flats)
        return self._elements

    def like(self, tensors: Sequence[torch.Tensor]) -> TensorList:
        """A list of the same structure with other elements.

        Args:
            tensors: one tensor per element, of any shape and dtype.

        Raises:
            ValueError: the number of tensors is not `len(self)`.

        Example:
            >>> TensorList([torch.ones(2)]).like([torch.zeros(3)]).shape
            [torch.Size([3])]
        """
        if len(tensors) != len(self):
            raise ValueError(f"{len(self)} tensors expected, one an element; got {len(tensors)}")
        return _of_elements(list(tensors), self.treespec)

    def tree(self) -> Any:
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
        return self.treespec == other.treespec

    def pack(self) -> TensorList:
        """Move the elements into one flat arena per device and dtype; each becomes a view of its place there.

        The tensors keep their identity, values, `requires_grad`, `.grad` and, where dense, their strides; only their
        memory changes. An element that was a view of some other tensor stops being one. Pointwise and in-place ops
        between lists packed alike then run once per group, and `torch.compile` sees one tensor per group. If an
        element's `.data` is later set to other memory, the list is treated as unpacked.

        Returns:
            This list.

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
            self._flats, self._arena = pack(self.tensors, self.treespec)
            self._places = Places(self._arena, self._flats)
            # Elements that nothing else refers to are dropped: views of the flats are made when they are asked for.
            elements, self._elements = self.elements().copy(), None
            self._elements = None if are_private(elements) else elements
        return self

    @property
    def arena(self) -> PackedLayout | None:
        """The layout of a packed list; None for an unpacked one, or once an element left it."""
        if self._arena is not None and self._elements is not None and not self._in_place(self._arena):
            _log.warning("an element of a packed TensorList was moved; the list is treated as unpacked")
            self._flats = self._arena = self._places = None
        return self._arena

    @property
    def flats(self) -> list[torch.Tensor]:
        """The arenas of a packed list, one 1-d tensor per device and dtype; gaps between elements hold no meaning."""
        if self.arena is None or self._flats is None:
            raise ValueError("this TensorList is not packed; call .pack()")
        return self._flats

    def _in_place(self, arena: PackedLayout) -> bool:
        assert self._elements is not None
        assert self._flats is not None
        if type(self._flats[0]) is not torch.Tensor:
            return True  # the compiler's stand-ins have no address, and no one can set their .data
        if self._places is None:
            self._places = Places(arena, self._flats)
        return self._places.hold(self._elements)

    def wants_grad(self) -> bool:
        """Return whether an element requires grad; for a packed list, as of the last check that `arena` made."""
        if self._arena is not None and self._places is not None:
            return self._places.wants_grad
        return any(t.requires_grad for t in self._elements or self._flats or ())

    def __len__(self) -> int:
        return self.treespec.num_leaves

    def __iter__(self) -> Iterator[torch.Tensor]:  # type: ignore[override]
        return iter(list(self.tensors))

    def __reversed__(self) -> Iterator[torch.Tensor]:  # type: ignore[override]
        return reversed(list(self.tensors))

    def __contains__(self, item: object) -> bool:
        return any(t is item for t in self.tensors)

    def __getitem__(self, key: Any) -> Any:
        """The element at a position or path, the part of the list under a slice or inner path, or each element indexed.

        A position is an int, a slice gives a flat list, a path is a key or a tuple of keys. A key that holds an
        Ellipsis or a tensor indexes every element: `tl[..., 0]` is `[t[..., 0] for t in tl]`.
        """
        if isinstance(key, int):
            return self.tensors[key]
        if indexes_each(key):
            return torch_function.run(list_call(torch.Tensor.__getitem__, (self, key), {}, TensorList))
        leaves, spec = named(self.treespec, key)
        part = self.tensors[leaves]
        return part[0] if spec.is_leaf() else _of_elements(part, spec)

    def __setitem__(self, key: Any, value: Any) -> None:
        """Write into the memory of `self[key]`."""
        if indexes_each(key):
            torch_function.run(list_call(torch.Tensor.__setitem__, (self, key, value), {}, TensorList))
            return
        part = self[key]
        part.copy_(value) if isinstance(value, torch.Tensor) else part.fill_(value)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return described(self)

    __str__ = __repr__
    __hash__ = object.__hash__
    __format__ = object.__format__
    __dir__ = object.__dir__  # type: ignore[assignment]

    def __copy__(self) -> TensorList:
        if self._elements is None and self._arena is not None and self._flats is not None:
            return of_flats(list(self._flats), self._arena)
        out = _of_elements(list(self.tensors), self.treespec)
        if self.arena is not None:
            out._flats, out._arena, out._places = self._flats, self._arena, self._places
        return out

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorList:
        if id(self) in memo:
            return cast(TensorList, memo[id(self)])
        out = _of_elements([copy.deepcopy(t, memo) for t in self.tensors], self.treespec)
        memo[id(self)] = out
        return out if self.arena is None else out.pack()

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Compiled graphs are cached under the pickles of their inputs, so whether the list is packed must show.
        return _rebuild, (self.treespec.unflatten(range(len(self))), list(self.tensors), self._flats is not None)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.compiler.is_dynamo_compiling():
            if func in _ALIASES_WHOLE:
                raise RuleError(
                    f"{func.__name__} on a TensorList has no rule under torch.compile: the compiler would rebuild the "
                    f"alias from one shape, which a list does not have; call it outside the compiled function"
                )
            # Dynamo records the call unchanged; the compiler runs it again outside Dynamo, in the branch below.
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        if torch.compiler.is_compiling() or ops.is_tracing():
            return compiled_autograd.run_in_compiler(func, args, kwargs or {})
        return torch_function.run(list_call(func, args, kwargs or {}, TensorList))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        call = list_call(func, args, kwargs or {}, TensorList)
        compiled_autograd.refuse_lost_gradients(call)
        return torch_function.run_overload(call)

    def __tensor_flatten__(self) -> tuple[list[str], Hashable]:
        if self._flats is not None and ops.asks_names_alone():
            return self._namesof_flats(), None
        arena = self.arena
        records = self._records or self.wants_grad()
        if records and not compiled_autograd.stands_in(self):
            records = torch.is_grad_enabled() and not compiled_autograd.follow(self)
        if arena is not None and self._flats is not None:
            return self._namesof_flats(), (arena, records)
        for i in range(len(self)):
            compiled_autograd.unrecorded(self, i)
        return [f"element_{i}" for i in range(len(self))], (Structure(self.treespec), records)

    def _namesof_flats(self) -> list[str]:
        return [f"flat_{i}" for i in range(len(self._flats or ()))]

    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: dict[str, torch.Tensor], context: Any, outer_size: Any, outer_stride: Any
    ) -> TensorList:
        inner = list(inner_tensors.values())
        # At run time compiled code asks the list itself for its size, and is told those of its elements.
        size = outer_size if isinstance(outer_size[0], int | torch.SymInt) else None
        laid_out, records = context
        out = (
            of_flats(inner, laid_out, size)
            if isinstance(laid_out, PackedLayout)
            else _of_elements(inner, laid_out.treespec, size)
        )
        out._records = records
        if records and type(inner[0]) in PLAIN_TYPES:
            raise RuleError(
                "a compiled function can't return a TensorList that requires grad: return its elements, list(x)"
            )
        return out

    def __getattr__(self, name: str) -> Any:
        kind, _, index = name.partition("_")
        if index.isdigit() and kind == "flat" and self._flats is not None:
            return self._flats[int(index)]
        if index.isdigit() and kind == "element":
            return compiled_autograd.unrecorded(self, int(index))
        raise AttributeError(f"'TensorList' object has no attribute {name!r}")

    def holding(self, held: list[torch.Tensor]) -> TensorList:
        """A list of the same structure and, if packed, the same layout, that stores other tensors."""
        with torch._C.DisableTorchFunctionSubclass():
            size = self.shape
        if self._flats is None or self._arena is None:
            return _of_elements(held, self.treespec, size)
        return of_flats(held, self._arena, size)

    def _stable_hash_for_caching(self) -> str:
        return f"{self._arena.stable_hash() if self._arena is not None else self.treespec} {self._records}"


def _shell(
    treespec: optree.PyTreeSpec, size: Any, first: torch.Tensor | None, elements: list[torch.Tensor] | None
) -> TensorList:
    dtype, device = (torch.get_default_dtype(), torch.device("cpu")) if first is None else (first.dtype, first.device)
    # To the compiler a list is a vector of its elements: len, iteration and indexing mean the same there.
    size = (treespec.num_leaves,) if size is None else size
    with torch._C.DisableTorchFunctionSubclass():
        out = torch.Tensor._make_wrapper_subclass(TensorList, size, dtype=dtype, device=device)
    out.treespec = treespec
    out._elements = elements
    out._flats = out._arena = out._places = None
    out._aliases, out._records, out._edges = {}, False, []
    return out


def _of_elements(tensors: list[torch.Tensor], treespec: optree.PyTreeSpec, size: Any = None) -> TensorList:
    return _shell(treespec, size, tensors[0] if tensors else None, tensors)


def of_flats(flats: list[torch.Tensor], arena: PackedLayout, size: Any = None) -> TensorList:
    """The packed list whose arenas these are."""
    out = _shell(arena.treespec, size, flats[arena.groups[0]], None)
    out._flats, out._arena = flats, arena
    return out


def _rebuild(tree: Any, tensors: list[torch.Tensor], packed: bool = False) -> TensorList:
    """A TensorList from its structure, written as plain containers of positions, and its elements."""
    out = _of_elements(list(tensors), optree.tree_structure(tree))
    return out.pack() if packed else out


torch.serialization.add_safe_globals([_rebuild])
teach_compiler(TensorList)
