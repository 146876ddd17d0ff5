"""Released tensors, whose memory is unmapped: found by address, they refuse every op until they are restored.

Note [How a tensor is released]
A kernel that touches unmapped memory ends the process, or its CUDA context. So before memory is unmapped, every Python
tensor over it, carved from the arena or a view, parameter or gradient of it, gets a class that refuses all ops in
`__torch_function__`; a tensor that is not released has its own class, and its ops are not checked. Much of torch does
not call `__torch_function__`: `torch.tensor(t)`, the transforms of `torch.func`, scripted functions, a backward pass
that is handed a gradient. So a released tensor has no memory either, and torch's own code raises for it; the memory is
kept in an attribute of the tensor. Tensors that C++ holds without a Python object can't be given a class: the saved
tensors of an autograd graph above all. Reference counts show that there are any, and then the memory stays. A captured
CUDA graph holds bare addresses, which no count shows: `Arena.guard` is for those.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, ClassVar, NoReturn
from weakref import ref

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from subtensors.dispatch.ops.errors import AddressError
from subtensors.dispatch.ops.plain_types import PLAIN_TYPES
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

# Allowed on a released tensor: none of these reads the memory, or gives its address to code that might.
_AWAKE_TOO = frozenset(
    [getattr(Tensor, name).__get__ for name in _ATTRIBUTES]
    + [getattr(Tensor, name) for name in _METHODS]
    + [Tensor.grad.__get__, Tensor.grad.__set__, Tensor.grad.__delete__]  # type: ignore[union-attr]
)
_NAMES = frozenset([*_ATTRIBUTES, *_METHODS, "grad", "_is_param", "_backward_hooks", "_dynamo_static_input_type"])

_ASKED_OF_MEMORY = frozenset(
    [getattr(Tensor, name).__get__ for name in ("device", "is_cuda", "is_cpu", "is_meta")]
    + [Tensor.is_conj, Tensor.is_neg]
)
"""The attributes and methods that may give wrong answers on a tensor without memory: its memory is asked instead."""

_MEMORY = "_memory_of_released"
_REASON = "{} on a tensor of a released Arena: call restore() on the Arena first"


class ReleasedTensor:
    """The class that a released tensor has before its own, which refuses all ops but those on metadata."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _ASKED_OF_MEMORY:
            args = memory_of(args[0]), *args[1:]
        if func in _AWAKE_TOO:
            return torch._C._disabled_torch_function_impl(func, types, args, kwargs or {})
        return refuse_released(torch.overrides.resolve_name(func) or getattr(func, "__name__", str(func)))

    def __getattribute__(self, name: str) -> Any:
        # Methods that a subclass writes in Python do not ask __torch_function__.
        if name in _NAMES or (name.startswith("__") and name not in ("__deepcopy__", "__reduce_ex__")):
            return super().__getattribute__(name)
        return refuse_released(name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, its Arena is released)"  # type: ignore[attr-defined]


class _PassesCompiler(AddressError, AssertionError):
    """An AddressError that torch.compile lets through: it wraps most others up as errors of its own."""


def memory_of(t: Tensor) -> Tensor:
    """The tensor; for a released one, the memory that it keeps, which nothing may read."""
    memory: Tensor = vars(t).get(_MEMORY, t)
    return memory


def refuse_released(op: str) -> NoReturn:
    """Raise AddressError for an op on a released tensor."""
    error = _PassesCompiler if ops.is_in_compiler() else AddressError
    raise error(_REASON.format(op))


def check_resident(lists: Iterable[Iterable[Tensor]], op: str = "a kernel") -> None:
    """Raise AddressError if one of the tensors is released: for an op that uses addresses it has stored.

    While nothing is released it checks none of them.
    """
    if Release.count and any(isinstance(t, ReleasedTensor) for tensors in lists for t in tensors):
        refuse_released(op)


@cache
def _asleep(kind: type[Tensor]) -> type[Tensor]:
    return type(f"Asleep{kind.__name__}", (ReleasedTensor, kind), {"__repr__": ReleasedTensor.__repr__, "awake": kind})


class ReferenceCensus:
    """All Python tensors whose storage begins within some addresses, gradients that only autograd holds included.

    Args:
        start: the first address.
        end: one past the last.
    """

    def __init__(self, start: int, end: int) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            everything = [t for t in gc.get_objects() if issubclass(type(t), Tensor)]
            gradients = [t.grad for t in everything if _is_leaf(t) and t.grad is not None]
            found: dict[int, Tensor] = {
                id(t): t for t in [*everything, *gradients] if start <= _storage_address(t) < end
            }
            self.storage_addresses = {_storage_address(t) for t in found.values()}
            # A wrapper runs its inner tensors' ops where no tensor is asked about them: it must refuse itself.
            wrappers = [t for t in everything if any(id(part) in found for part in _inner_tensors(t))]
            # A view holds its base, also where it was given memory elsewhere, as those of `holding_views` are.
            # Called on Tensor, past the class: tensors of another arena may be released.
            views = {id(t): t for t in [*everything, *gradients] if Tensor._is_view(t)}
            self._views: dict[int, list[Tensor]] = {}
            """By the id of their base."""
            for view in views.values():
                self._views.setdefault(id(Tensor._base.__get__(view)), []).append(view)  # type: ignore[union-attr]
        self.tensors: list[Tensor] = list({**found, **{id(t): t for t in wrappers}}.values())
        self._gradients = Counter(id(t) for t in gradients)

    def held_by_others(self) -> Tensor | None:
        """A tensor that C++ holds as well, as autograd graphs hold what they saved; None when there is none."""
        with torch._C.DisableTorchFunctionSubclass():
            expected = Counter({id(t): 1 + self._gradients[id(t)] for t in self.tensors})
            # The node that accumulates a leaf's gradient refers to the leaf; asked for, it is there for certain.
            leaves = [t for t in self.tensors if _is_leaf(t)]
            nodes = [torch.autograd.graph.get_gradient_edge(t).node for t in leaves]
            expected.update(map(id, leaves))
            in_storage = Counter(map(memory_internals.storage_of, self.tensors))
            for t in self.tensors:
                storage_uses = memory_internals.storage_use_count(t)
                if storage_uses > in_storage[memory_internals.storage_of(t)] or self._is_held(t, expected[id(t)]):
                    return t
            del nodes
        return None

    def _is_held(self, t: Tensor, expected: int) -> bool:
        """Return whether a tensor has more references than the expected ones and those of its views."""
        views = self._views.get(id(t), [])
        if memory_internals.use_count(t) <= expected + len(views):
            return False
        # A view across complex numbers and their parts refers to its base twice, and so do its own views.
        return memory_internals.use_count(t) > expected + sum(memory_internals.holds_of_base(view, t) for view in views)


class Release:
    """Tensors that are released together, until `wake`.

    Args:
        tensors: the ones to release.
    """

    count: ClassVar[int] = 0
    """The number of releases in force."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        Release.count += 1
        self._released_tensors: list[ref[Tensor]] = []
        try:
            for t in tensors:
                t.__class__ = _asleep(type(t))
                self._released_tensors.append(ref(t))
                # A wrapper has none.
                if not is_traceable_wrapper_subclass(t):
                    vars(t)[_MEMORY] = memory_internals.take_memory(t, _REASON.format("a kernel of torch"))
        except BaseException:
            self.wake()
            raise

    def wake(self) -> None:
        """Give the tensors that are still alive their memory and their own class again."""
        Release.count -= 1
        for reference in self._released_tensors:
            t = reference()
            if t is not None:
                if (memory := vars(t).pop(_MEMORY, None)) is not None:
                    memory_internals.give_memory(t, memory)
                t.__class__ = type(t).awake  # type: ignore[attr-defined]


def _is_leaf(t: Tensor) -> bool:
    try:
        return t.is_leaf and t.requires_grad
    except (RuntimeError, NotImplementedError):
        return False


def _inner_tensors(t: Tensor) -> list[Tensor]:
    """The tensors that a wrapper subclass is made of; none of another tensor."""
    if type(t) in PLAIN_TYPES or not is_traceable_wrapper_subclass(t):
        return []
    try:
        return [getattr(t, name) for name in t.__tensor_flatten__()[0]]
    except Exception:  # a type's own code, which may refuse
        return []


def _storage_address(t: Tensor) -> int:
    """The address at which the tensor's storage begins; 0 for one that has no memory."""
    try:
        storage = t.untyped_storage()
        # The compiler's stand-ins have a storage, on the meta device, and warn of whoever asks for its address.
        return 0 if storage.device.type == "meta" else storage.data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0
