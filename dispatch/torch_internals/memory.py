"""Private torch APIs of a tensor's memory and reference counts: one function each, with the versions checked."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from subtensors.dispatch.torch_internals.requires import requires

if TYPE_CHECKING:
    from _ctypes import CFuncPtr


@requires("torch._C._nn.flatten_dense_tensors", otherwise=lambda tensors: torch.cat([t.reshape(-1) for t in tensors]))
def join(tensors: list[torch.Tensor]) -> torch.Tensor:
    """One flat tensor of the elements of all, each row after row. Checked on 2.13."""
    return torch._C._nn.flatten_dense_tensors(tensors)


def split(joined: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The parts of a flat tensor as views in the shapes of those that it was joined of."""
    return list(map(torch.Tensor.view_as, joined.split(list(map(torch.Tensor.numel, like))), like))


@requires("torch.Tensor._use_count")
def use_count(tensor: torch.Tensor) -> int:
    """The number of C++ references to a tensor: its Python object's, autograd's, reducers'. Checked on 2.11, 2.13."""
    return int(torch.Tensor._use_count(tensor))  # type: ignore[attr-defined]


def base_reference_count(view: torch.Tensor, base: torch.Tensor) -> int:
    """Return the number of references to its base that a view of this kind holds. Checked on 2.11, 2.13.

    >>> pairs = torch.zeros(2, dtype=torch.complex64)
    >>> base_reference_count(pairs[1:], pairs), base_reference_count(torch.view_as_real(pairs), pairs)
    (1, 2)
    """
    before = use_count(base)
    with torch.no_grad():
        another = torch.Tensor.view_as(view, view)
    count = use_count(base) - before
    del another
    return count


@requires("torch.UntypedStorage._cdata")
def storage_id(tensor: torch.Tensor) -> int:
    """A number that identifies the tensor's storage. Checked on 2.11, 2.13."""
    return int(tensor.untyped_storage()._cdata)


@requires("torch.UntypedStorage._cdata", "torch._C._storage_Use_Count")
def storage_use_count(tensor: torch.Tensor) -> int:
    """The number of tensors that hold the tensor's storage, in C++ and in Python. Checked on 2.11, 2.13."""
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1  # type: ignore[attr-defined]


class _MetaTensor(torch.Tensor):
    """A tensor on the meta device that `.data` accepts for tensors of another device."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


def take_memory(tensor: torch.Tensor, message: str) -> torch.Tensor:
    """Take the memory from a tensor, so that C++ that reads or writes it raises, rather than crashes the process.

    Checked on 2.11 with CUDA, and 2.13 without, where the tensor is on the meta device until `give_memory`, and errors
    are torch's. A leaf whose gradient a graph will accumulate is left unchanged there: its gradient would be on
    the meta device, too.

    Args:
        tensor: of any class that has a storage.
        message: of the error.

    Returns:
        The memory, to be given back with `give_memory`.

    >>> t = torch.ones(2)
    >>> memory = take_memory(t, "it is released")
    >>> torch.func.vmap(torch.neg)(t)
    Traceback (most recent call last):
    ...
    RuntimeError: ...
    >>> give_memory(t, memory)
    >>> t
    tensor([1., 1.])
    """
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        memory = torch.Tensor.detach(tensor)
        if (release := getattr(torch._C, "_set_storage_access_error_msg", None)) is not None:
            release(tensor, message)
        elif not _awaits_gradient(tensor):
            count = memory.untyped_storage().nbytes() // memory.element_size()
            nothing = torch.empty(count, dtype=memory.dtype, device="meta")
            nothing = nothing.as_strided(memory.shape, memory.stride(), memory.storage_offset())
            placeholder = torch.Tensor._make_subclass(
                _MetaTensor, nothing, False, device_for_backend_keys=memory.device
            )
            give_memory(tensor, placeholder)
        return memory


def _awaits_gradient(tensor: torch.Tensor) -> bool:
    """Return whether a graph or a hook holds the node that accumulates this leaf's gradient. Checked on 2.13."""
    if not (tensor.is_leaf and tensor.requires_grad):
        return False

    def metadata() -> dict[str, bool]:
        with torch.enable_grad():
            node = torch.Tensor.view_as(tensor, tensor).grad_fn
        assert node is not None
        accumulator = node.next_functions[0][0]
        assert accumulator is not None
        return accumulator.metadata  # type: ignore[return-value]  # a method in torch's stubs

    metadata()["asked"] = True  # kept only if something else holds the node
    return metadata().pop("asked", False)


def give_memory(tensor: torch.Tensor, memory: torch.Tensor) -> None:
    """Give a tensor the memory back that was taken from it."""
    with torch._C.DisableTorchFunctionSubclass():
        torch.Tensor.data.__set__(tensor, memory)  # type: ignore[attr-defined]


def keep_alive_views(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return views without memory, each of which keeps a C++ reference to one of these tensors. Checked on 2.11, 2.13.

    Whenever C++ takes a tensor that only its Python object references from a list, ownership moves between the two, and
    both reference counts change: reading the addresses of a thousand tensors and counting writes to them then takes
    twice as long. A view references its base.
    """
    with torch.no_grad():
        views = [t.view_as(t) for t in tensors]
    empty: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
    for view in views:
        # Not the memory, which must be freed when the tensor gets other memory by `.data`.
        kind = view.dtype, view.device
        view.data = empty.setdefault(kind, torch.empty(0, dtype=view.dtype, device=view.device))
    return views


class StorageUseCounts:
    """Reference counts of some tensors' storages, the tensors themselves included. Checked on 2.11, 2.13."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._storages = [t.untyped_storage() for t in tensors]
        self._handles = [storage._cdata for storage in self._storages]

    @requires("torch._C._storage_Use_Count")
    def counts(self) -> list[int]:
        """The reference count of each storage, in order."""
        return list(map(torch._C._storage_Use_Count, self._handles))  # type: ignore[attr-defined]


@requires("torch._C._cuda_customAllocator")
def custom_allocator(allocate: CFuncPtr, free: CFuncPtr) -> Any:
    """Return an allocator for `torch.cuda.MemPool` made of two C functions. Checked on 2.11, 2.13.

    Args:
        allocate: `void *(ssize_t size, int device, cudaStream_t stream)`.
        free: `void (void *address, ssize_t size, int device, cudaStream_t stream)`.
    """
    addresses = [ctypes.cast(function, ctypes.c_void_p).value for function in (allocate, free)]
    return torch._C._cuda_customAllocator(*addresses)  # type: ignore[attr-defined, arg-type]
