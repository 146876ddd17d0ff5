"""Released tensors, whose memory is unmapped: found by address, they refuse every op until they are restored.

Note [How a tensor is released]
A kernel that accesses unmapped memory ends the process, or its CUDA context. So before memory is unmapped, every Python
tensor over it, allocated from the arena or a view, parameter or gradient of one, gets a class that refuses all ops in
`__torch_function__`; a resident tensor has its own class, so its ops cost nothing more. Much of torch does not call
`__torch_function__`: `torch.tensor(t)`, the transforms of `torch.func`, scripted functions, a backward pass with a
gradient as its argument. So a released tensor has no storage either, and torch's own code raises for it; the storage is
kept in an attribute of the tensor. Tensors without a Python object can't change their class: above all those that an
autograd graph has saved. Reference counts show whether there are any, and then the memory is not released. A captured
CUDA graph holds bare addresses, which no count shows: `Arena.guard` is for those.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from functools import cache, partial
from itertools import chain, compress
from typing import Any, ClassVar, NoReturn
from weakref import ref

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from subtensors.dispatch.ops.errors import AddressError
from subtensors.dispatch.ops.plain_types import PLAIN_TYPES
from subtensors.dispatch.ops.tree import Args, Kwargs
from subtensors.dispatch.torch_internals import memory as memory_internals
from subtensors.dispatch.torch_internals import ops

_ATTRIBUTES = (
    "shape dtype device layout ndim requires_grad is_leaf is_cuda is_cpu is_meta is_sparse is_quantized itemsize "
    "nbytes grad_fn output_nr"
).split()
_METHODS = (
    "size stride dim ndimension numel nelement element_size storage_offset is_contiguous is_complex is_floating_point "
    "is_signed is_conj is_neg is_inference __len__"
).split()

# Allowed on a released tensor: none of these reads the memory, or passes its address to code that might.
_METADATA_CALLS = frozenset(
    [getattr(Tensor, name).__get__ for name in _ATTRIBUTES]
    + [getattr(Tensor, name) for name in _METHODS]
    + [Tensor.grad.__get__, Tensor.grad.__set__, Tensor.grad.__delete__]  # type: ignore[union-attr]
)
_ALLOWED_NAMES = frozenset(
    [*_ATTRIBUTES, *_METHODS, "grad", "_is_param", "_backward_hooks", "_dynamo_static_input_type"]
)

_READ_FROM_MEMORY = frozenset(
    [getattr(Tensor, name).__get__ for name in ("device", "is_cuda", "is_cpu", "is_meta")]
    + [Tensor.is_conj, Tensor.is_neg]
)
"""The attributes and methods that may be wrong on a tensor without memory: they are read from its kept memory."""

_MEMORY = "_memory_of_released"
_REASON = "{} on a tensor of a released Arena: call restore() on the Arena first"


class ReleasedTensor:
    """The first base class of a released tensor's class, which refuses all ops but those on metadata."""

    shape: torch.Size
    dtype: torch.dtype

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., object], types: Collection[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        if func in _READ_FROM_MEMORY:
            args = memory_of(args[0]), *args[1:]
        if func in _METADATA_CALLS:
            return torch._C._disabled_torch_function_impl(func, types, args, kwargs or {})
        return refuse_released(torch.overrides.resolve_name(func) or getattr(func, "__name__", str(func)))

    def __getattribute__(self, name: str) -> object:
        # A subclass's Python methods do not call __torch_function__.
        if name in _ALLOWED_NAMES or (name.startswith("__") and name not in ("__deepcopy__", "__reduce_ex__")):
            return super().__getattribute__(name)
        return refuse_released(name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, its Arena is released)"


class _PassesCompiler(AddressError, AssertionError):
    """An AddressError that torch.compile re-raises unchanged: it wraps most other errors in its own."""


def memory_of(t: Tensor) -> Tensor:
    """Return the tensor itself; for a released one, the tensor with its memory, which nothing may read."""
    memory: Tensor = vars(t).get(_MEMORY, t)
    return memory


def refuse_released(op: str) -> NoReturn:
    """Raise AddressError for an op on a released tensor."""
    error = _PassesCompiler if ops.is_in_compiler() else AddressError
    raise error(_REASON.format(op))


def check_resident(lists: Iterable[Iterable[Tensor]], op: str = "a kernel") -> None:
    """Raise AddressError if one of the tensors is released: for ops that use stored addresses.

    While nothing is released no tensor is checked.
    """
    if Release.count and any(isinstance(t, ReleasedTensor) for tensors in lists for t in tensors):
        refuse_released(op)


@cache
def _released_class(resident: type[Tensor]) -> type[Tensor]:
    """Return the class that a tensor of a class has while it is released."""
    namespace = {"__repr__": ReleasedTensor.__repr__, "resident_class": resident}
    return type(f"Released{resident.__name__}", (ReleasedTensor, resident), namespace)


def _tensors_of_process() -> list[Tensor]:
    """Return all Python tensors that the garbage collector tracks.

    It tracks tuples that other threads are about to fill, and CPython raises SystemError in a thread whose unfinished
    tuple is referred to. So the list of all objects is made, filtered and cleared in one call that runs no Python code,
    during which no other thread runs.
    """
    objects: list[Any] = []
    fill = map(objects.extend, map(gc.get_objects, [None]))
    tensors = compress(objects, map(partial(type.__subclasscheck__, Tensor), map(type, objects)))
    clear = map(list.clear, [objects])
    return list(chain(fill, tensors, clear))[1:-1]


class ReferenceCensus:
    """All Python tensors whose storage begins in an address range, gradients that only autograd refers to included."""

    def __init__(self, start: int, end: int) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            objects = _tensors_of_process()
            gradients = [t.grad for t in objects if _is_leaf(t) and t.grad is not None]
            found: dict[int, Tensor] = {id(t): t for t in [*objects, *gradients] if start <= _storage_address(t) < end}
            self.storage_addresses = {_storage_address(t) for t in found.values()}
            # A wrapper runs ops of its inner tensors without their __torch_function__: it must refuse them itself.
            wrappers = [t for t in objects if any(id(part) in found for part in _inner_tensors(t))]
            # A view refers to its base, even if it was given other memory, as the views of packed lists are.
            # Called on Tensor, past the class: tensors of another arena may be released.
            views = {id(t): t for t in [*objects, *gradients] if Tensor._is_view(t)}
            self._views: dict[int, list[Tensor]] = {}
            """The views of each tensor, by its id."""
            for view in views.values():
                self._views.setdefault(id(Tensor._base.__get__(view)), []).append(view)  # type: ignore[union-attr]
        self.tensors: list[Tensor] = list({**found, **{id(t): t for t in wrappers}}.values())
        self._gradients = Counter(id(t) for t in gradients)

    def referenced_from_cpp(self) -> Tensor | None:
        """Return a tensor with a reference from C++, such as an autograd graph that saved it; None if there is none."""
        with torch._C.DisableTorchFunctionSubclass():
            expected = Counter({id(t): 1 + self._gradients[id(t)] for t in self.tensors})
            # The node that accumulates a leaf's gradient refers to the leaf; getting the edge ensures that it exists.
            leaves = [t for t in self.tensors if _is_leaf(t)]
            nodes = [torch.autograd.graph.get_gradient_edge(t).node for t in leaves]
            expected.update(map(id, leaves))
            in_storage = Counter(map(memory_internals.storage_id, self.tensors))
            for t in self.tensors:
                storage_uses = memory_internals.storage_use_count(t)
                if storage_uses > in_storage[memory_internals.storage_id(t)] or self._has_more_references(
                    t, expected[id(t)]
                ):
                    return t
            del nodes
        return None

    def _has_more_references(self, t: Tensor, expected: int) -> bool:
        """Return whether a tensor has references besides the expected ones and those of its views."""
        views = self._views.get(id(t), [])
        if memory_internals.use_count(t) <= expected + len(views):
            return False
        # A view across complex numbers and their parts refers to its base twice, and so do its own views.
        return memory_internals.use_count(t) > expected + sum(
            memory_internals.base_reference_count(view, t) for view in views
        )


class Release:
    """The release of some tensors, until `restore`."""

    count: ClassVar[int] = 0
    """The number of releases in force."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        Release.count += 1
        self._released_tensors: list[ref[Tensor]] = []
        try:
            for t in tensors:
                t.__class__ = _released_class(type(t))
                self._released_tensors.append(ref(t))
                # A wrapper has none.
                if not is_traceable_wrapper_subclass(t):
                    vars(t)[_MEMORY] = memory_internals.take_memory(t, _REASON.format("a kernel of torch"))
        except BaseException:
            self.restore()
            raise

    def restore(self) -> None:
        """Restore the memory and the class of the tensors that are still alive."""
        Release.count -= 1
        for reference in self._released_tensors:
            t = reference()
            if t is not None:
                if (memory := vars(t).pop(_MEMORY, None)) is not None:
                    memory_internals.give_memory(t, memory)
                t.__class__ = type(t).resident_class  # type: ignore[attr-defined]


def _is_leaf(t: Tensor) -> bool:
    try:
        return t.is_leaf and t.requires_grad
    except (RuntimeError, NotImplementedError):
        return False


def _inner_tensors(t: Tensor) -> list[Tensor]:
    """Return the inner tensors of a wrapper subclass; of another tensor, none."""
    if type(t) in PLAIN_TYPES or not is_traceable_wrapper_subclass(t):
        return []
    try:
        return [getattr(t, name) for name in t.__tensor_flatten__()[0]]
    except Exception:  # code of any type
        return []


def _storage_address(t: Tensor) -> int:
    """Return the address of the tensor's storage; 0 for one without memory."""
    try:
        storage = t.untyped_storage()
        # Fake tensors have a storage on the meta device, and warn when its address is read.
        return 0 if storage.device.type == "meta" else storage.data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0
