"""`Arena`: a range of addresses for tensors, whose physical memory can be released and restored.

A process that serves a model, or alternates between training and generation, may have to free its GPU memory for a
while. Freeing tensors loses their addresses, and with them everything that has stored these: views, optimizer state,
captured CUDA graphs. An arena separates the two. It reserves a large range of virtual addresses once, allocates tensors
from it, and maps physical memory behind the range in chunks, when tensors need it:

    addresses     |== A ==|=== B ===|== C ==|           ...     |    reserved once, 1 TiB by default
    resident      [ chunk 0 ][ chunk 1 ][ chunk 2 ]                  device memory is mapped under A, B and C
      release()        |  copy to page-locked host memory, unmap: the device memory is free
    released      [.........][.........][.........]                  ops on A, B and C raise AddressError
      restore()        |  map new device memory at the same addresses, copy back
    resident      [ chunk 0 ][ chunk 1 ][ chunk 2 ]                  A, B, C and graphs over them are valid again

While the arena is released a kernel that accesses the range would fault, so `release()` replaces the class of every
tensor over it by one that refuses ops (`dispatch/graphs/released_tensors.py`), and is refused while an autograd graph
has saved one of them. `Arena.guard` makes the replay of a graph raise until `restore()`. `allocation.py` allocates
addresses and maps chunks, `offload.py` copies the contents to pages of the host and back, and `mem_pool.py`
lets torch's own allocator use the range.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from functools import wraps
from threading import RLock
from typing import Literal, NoReturn, ParamSpec, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor

from subtensors.arguments import flag, shown
from subtensors.counts import format_bytes, parse_bytes
from subtensors.dispatch.graphs import deferred_finalizers
from subtensors.dispatch.graphs.released_tensors import ReferenceCensus, Release, memory_of
from subtensors.dispatch.ops.errors import AddressError
from subtensors.dispatch.torch_internals import dynamo
from subtensors.kernels.memory.cuda_reservation import CudaRange
from subtensors.kernels.memory.from_address import tensor_from_address
from subtensors.kernels.memory.host_reservation import HostRange
from subtensors.static.allocation import Allocation, RangeAllocator
from subtensors.static.constructors import Constructors
from subtensors.static.mem_pool import pool_over, segments_of
from subtensors.static.offload import HostCopy
from subtensors.static.static_tensor import (
    StaticAddressTensor,
    refuse_capture,
    static_alias,
    view_as_layout,
    with_role,
)

_P = ParamSpec("_P")
_R = TypeVar("_R")

_GRANULARITY = 2 << 20  # the smallest amount that CUDA devices map

_arenas: WeakSet[Arena] = WeakSet()


class Arena(Constructors):
    """A range of addresses for tensors; `release()` frees its memory, `restore()` maps memory at the same addresses.

    Memory is mapped under the range in chunks as tensors need it, so that a reserve larger than the device's memory
    costs nothing. After `restore()` every tensor has the address that it had, and captured CUDA graphs stay valid.

    Args:
        device: "cuda", "cuda:1" or "cpu".
        reserve: the size of the range, in bytes or as in "2TiB".
        alignment: of each tensor's address, in bytes; a power of two. Addresses are multiples of the element size too.
        chunk: the amount of memory that is mapped at once, in bytes or as in "32MiB"; a multiple of 2 MiB,
            or rounded up to one.

    Raises:
        ValueError: an argument is not of these forms.
        AddressError: a CUDA graph is being captured.
        ImportError: on a CUDA device, if the package cuda-bindings is not installed.

    Example:
        >>> arena = Arena("cpu", reserve="1GiB")
        >>> m = arena.zeros(1000)
        >>> address = m.data_ptr()
        >>> m.add_(1).sum()
        tensor(1000.)
        >>> arena.release()
        >>> m.sum()
        Traceback (most recent call last):
        ...
        subtensors.AddressError: sum on a tensor of a released Arena: call restore() on the Arena first
        >>> arena.restore()
        >>> m.data_ptr() == address, m.sum()
        (True, tensor(1000.))
    """

    def __init__(
        self,
        device: torch.device | str = "cuda",
        *,
        reserve: int | str = "1TiB",
        alignment: int = 512,
        chunk: int | str = "32MiB",
    ) -> None:
        self.device = _device(device)
        refuse_capture(self.device)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1) or alignment > _GRANULARITY:
            raise ValueError(f"alignment must be a power of two up to {_GRANULARITY}; got {alignment!r}")
        step = -(-parse_bytes("chunk", chunk) // _GRANULARITY) * _GRANULARITY
        size = -(-parse_bytes("reserve", reserve) // step) * step
        memory = CudaRange(size, self.device) if self.device.type == "cuda" else HostRange(size)
        self.alignment = alignment
        deferred_finalizers.watch(self.device)
        self._lock = RLock()
        self._allocator = RangeAllocator(memory, step, alignment)
        self._contents = HostCopy(self._allocator, self.device)
        self._release: Release | None = None
        _arenas.add(self)

    def release(self, keep: Literal["cpu"] | None = "cpu") -> None:
        """Free the arena's memory. Addresses stay reserved, and every op on its tensors is refused until `restore()`.

        Tensors that are deleted while it is released free their part of the range. Waits until the device is idle.

        Args:
            keep: "cpu" copies the contents to host memory, page-locked for a CUDA device and reused by the next
                release; None discards them.

        Raises:
            AddressError: the arena is released already, a thread captures a CUDA graph, or an autograd graph or other
                C++ code refers to a tensor, which it might read. Nothing is freed then.
            MemoryError: the host has not enough memory for the copy. Nothing is freed then.
            ValueError: `keep` is another value.
        """
        if not (keep is None or isinstance(keep, str)) or keep not in ("cpu", None):
            raise ValueError(f'keep must be "cpu" or None; got {shown(keep)}')
        # The nodes that accumulate gradients, whose references are counted, are not found in the mode of inference.
        with self._lock, torch.inference_mode(False):
            if self._release is not None:
                raise AddressError("this Arena is released already; restore() comes before the next release()")
            self._refuse_captures()
            census = ReferenceCensus(self.address, self.address + self.reserved)
            self._refuse_references_from_cpp(census)
            release = Release(census.tensors)
            try:
                self._contents.wait()
                if keep:
                    self._contents.save()
                self._allocator.unmap_all()
            except BaseException:
                release.restore()
                raise
            self._release = release

    def restore(self) -> None:
        """Map memory at the same addresses, copy back the contents that were kept, and make the tensors usable again.

        After `release(keep=None)` the contents are undefined.

        Raises:
            AddressError: the arena is not released, or a thread captures a CUDA graph.
            torch.OutOfMemoryError: the device has not enough memory; MemoryError on a CPU. The arena stays released,
                the contents stay kept, and `restore()` can be called again.
        """
        with self._lock:
            if self._release is None:
                raise AddressError("this Arena is not released; release() comes before restore()")
            self._refuse_captures()
            deferred_finalizers.run_deferred()
            self._contents.load()
            self._release.restore()
            self._release = None

    def pool(self) -> torch.cuda.MemPool:
        """Return a memory pool of torch's allocator whose memory lies in this arena, on a CUDA device.

        `torch.cuda.use_mem_pool(pool)` puts ordinary tensors there, `torch.cuda.graph(g, pool=pool.id)` the memory of a
        captured graph. The pool must live as long as it is allocated from. Allocate nothing from it while the arena is
        released: torch may have parts of segments left, which have no memory then.

        Returns:
            A new pool, which allocates 2 MiB or 20 MiB of the arena at a time.

        Raises:
            ValueError: the arena is on a CPU.
        """
        if self.device.type != "cuda":
            raise ValueError("a CPU has no memory pools; allocate with the arena's own constructors")
        return pool_over(self, self.device, self.address, Arena._allocate_part)

    def guard(self, call: Callable[_P, _R]) -> Callable[_P, _R]:
        """Make a callable raise while the arena is released: for what stores bare addresses, such as captured graphs.

        Args:
            call: `graph.replay`, say.

        Returns:
            A function of the same arguments, which raises AddressError while the arena is released.

        Example:
            >>> arena = Arena("cpu")
            >>> replay = arena.guard(lambda: "replayed")
            >>> replay()
            'replayed'
        """

        if not callable(call):
            raise TypeError(f"guard takes a callable as call, got {shown(call)}")

        @wraps(call)
        def guarded(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            if self._release is not None:
                name = getattr(call, "__qualname__", repr(call))
                raise AddressError(f"{name} uses memory of a released Arena: call restore() on the Arena first")
            return call(*args, **kwargs)

        return guarded

    def trim(self) -> None:
        """Free the host memory kept for the next release; the contents of a released arena stay."""
        with self._lock:
            self._contents.trim()

    def explain(self) -> str:
        """Describe how much is reserved, mapped, allocated and kept on the host; `st.explain(arena)` returns this."""
        with self._lock:
            state, count = "released" if self.released else "resident", len(self._allocator.parts())
            reserved, chunk, mapped, used, host = map(
                format_bytes,
                (self.reserved, self._allocator.chunk, self.mapped, self.used, self._contents.pages.size),
            )
        return "\n".join(
            [
                f"Arena on {self.device}, {state}, at {self.address:#x}",
                f"  reserved {reserved} of addresses, in chunks of {chunk}",
                f"  mapped {mapped}, used {used}, allocations {count}",
                f"  on the host {host}",
            ]
        )

    @property
    def released(self) -> bool:
        """Return whether the arena's memory is released."""
        return self._release is not None

    @property
    def address(self) -> int:
        """The start address of the range."""
        return self._allocator.memory.address

    @property
    def reserved(self) -> int:
        """Bytes of reserved addresses."""
        return self._allocator.memory.size

    @property
    def mapped(self) -> int:
        """Bytes of memory mapped under the range."""
        return self._allocator.mapped_bytes

    @property
    def used(self) -> int:
        """Bytes allocated, those lost to alignment included."""
        with self._lock:
            return self._allocator.used_bytes

    def __contains__(self, t: object) -> bool:
        """Return whether a tensor's storage begins in the range."""
        if not isinstance(t, Tensor):
            return False
        with torch._C.DisableTorchFunctionSubclass():
            return self.address <= Tensor.untyped_storage(memory_of(t)).data_ptr() < self.address + self.reserved

    def __repr__(self) -> str:
        state = "released" if self.released else f"{format_bytes(self.mapped)} mapped"
        return f"Arena({self.device}, {format_bytes(self.used)} used, {state}, {format_bytes(self.reserved)} reserved)"

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # Every tensor refers to its arena, so none is left. The end of the process frees everything by itself, and has
        # perhaps cleared this module's names, so that the function is an argument.
        if not is_finalizing() and hasattr(self, "_release"):
            if self._release is not None:
                self._release.restore()
            deferred_finalizers.run_or_defer(self._contents.close)

    def __reduce__(self) -> NoReturn:
        raise TypeError("an Arena has no copies, which would free its memory: copy its tensors")

    def _allocate(self, layout: Tensor, value: float | None = None, requires_grad: bool = False) -> StaticAddressTensor:
        """Return a new tensor of this layout, filled with the value unless it is None."""
        flag("requires_grad", requires_grad)
        refuse_capture(self.device)
        size = layout.numel() * layout.element_size()
        part = self._allocate_part(size, layout.element_size()) if size else None
        start = part.start if part else 0
        raw = tensor_from_address(self.address + start, size, self.device, (part, self))
        with torch.no_grad():
            out = static_alias(view_as_layout(raw, layout))
            if value is not None:
                out.fill_(value)
        return with_role(out, requires_grad, is_parameter=False)

    def _allocate_part(self, size: int, alignment: int = 1) -> Allocation:
        deferred_finalizers.run_deferred()
        with self._lock:
            if self._release is not None:
                raise AddressError("this Arena is released: call restore() on it before creating tensors in it")
            return self._allocator.allocate(size, alignment)

    def _refuse_captures(self) -> None:
        """Raise AddressError while any thread captures: CUDA ends the captures of a device that is waited for."""
        if self.device.type == "cuda" and deferred_finalizers.is_capturing():
            raise AddressError("an Arena is neither released nor restored while a CUDA graph is captured")

    def _refuse_references_from_cpp(self, census: ReferenceCensus) -> None:
        """Raise AddressError if C++ code refers to memory through no Python tensor that could be marked as released."""
        tensor = census.referenced_from_cpp()
        subject = f"a tensor of shape {tuple(tensor.shape)}" if tensor is not None else ""
        known = census.storage_addresses | segments_of(self)
        if not subject and any(self.address + start not in known for start in self._allocator.parts()):
            subject = "memory without a Python tensor"
        if subject:
            hidden = "; if gc.freeze() hides its tensors, call gc.unfreeze() before" if gc.get_freeze_count() else ""
            raise AddressError(
                f"{subject} in this Arena is referenced by C++ code, such as an autograd graph that saved it, which "
                f"would read released memory: run backward() or delete its result{hidden}"
            )


dynamo.call_eagerly(Arena._allocate, "a tensor in an Arena is created outside of graphs")


def _device(device: torch.device | str) -> torch.device:
    """Return a device with its index, if it is one of CUDA; raise ValueError for other kinds of devices."""
    try:
        resolved = torch.device(device) if isinstance(device, str | torch.device) else None
    except RuntimeError:  # torch knows no such device
        resolved = None
    if resolved is None or resolved.type not in ("cpu", "cuda"):
        raise ValueError(f"device of an Arena is a CPU or a CUDA device; got {shown(device)}")
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise RuntimeError('an Arena is on "cuda" by default, and torch finds no GPU here; st.Arena("cpu") needs none')
    if resolved.type == "cuda" and resolved.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return resolved


def explain_static(t: StaticAddressTensor) -> str:
    """Describe the address of a static tensor, and the arena of its memory; `st.explain(t)` returns this.

    >>> arena = Arena("cpu")
    >>> explain_static(arena.zeros(2, 3))
    'StaticAddressTensor of (2, 3) torch.float32 at 0x..., in Arena(cpu, 512 B used, 32 MiB mapped, 1 TiB reserved)'
    """
    with torch._C.DisableTorchFunctionSubclass():
        address = Tensor.data_ptr(memory_of(t))
    owner = next((f"in {arena}" for arena in list(_arenas) if t in arena), "in memory of its own")
    return f"StaticAddressTensor of {tuple(t.shape)} {t.dtype} at {address:#x}, {owner}"
