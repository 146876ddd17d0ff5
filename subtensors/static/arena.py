"""`Arena`: a range of addresses that tensors are carved from, whose memory can be released and restored."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from threading import RLock
from typing import Literal, ParamSpec, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor

from subtensors.byte_sizes import in_units, parse_bytes
from subtensors.dispatch.graphs import deferred_finalizers
from subtensors.dispatch.graphs.released_tensors import ReferenceCensus, Release, memory_of
from subtensors.dispatch.ops.errors import AddressError
from subtensors.dispatch.torch_internals import dynamo
from subtensors.kernels.memory.cuda_reservation import CudaRange
from subtensors.kernels.memory.from_address import tensor_from_address
from subtensors.kernels.memory.host_reservation import HostRange
from subtensors.static.allocation import AddressRange, Carver, Carving
from subtensors.static.constructors import Constructors
from subtensors.static.mem_pool import pool_over, segments_of
from subtensors.static.offload import Contents
from subtensors.static.static_tensor import StaticAddressTensor, of_memory, refuse_capture, shaped, with_role

_P = ParamSpec("_P")
_R = TypeVar("_R")

_GRANULE = 2 << 20  # what CUDA devices map at least

_arenas: WeakSet[Arena] = WeakSet()


class Arena(Constructors):
    """A range of addresses that tensors are carved from; `release()` frees its memory, `restore()` brings it back.

    Memory is mapped under the range in chunks as tensors need it, so that a reserve larger than the device costs
    nothing. After `restore()` every tensor is at the address where it was, and captured CUDA graphs stay valid.

    Args:
        device: "cuda", "cuda:1" or "cpu".
        reserve: the size of the range, in bytes or as in "2TiB".
        alignment: of each tensor's address, in bytes; a power of two. The size of an element is always one too.
        chunk: how much memory is mapped at once, in bytes or as in "32MiB"; rounded up to multiples of 2 MiB.

    Raises:
        ValueError: an argument is none of these.
        AddressError: a CUDA graph is being captured.
        ImportError: a CUDA device, and the package cuda-bindings is not installed.

    Example:
        >>> arena = Arena("cpu", reserve="1GiB")
        >>> m = arena.zeros(1000)
        >>> at = m.data_ptr()
        >>> m.add_(1).sum()
        tensor(1000.)
        >>> arena.release()
        >>> m.sum()
        Traceback (most recent call last):
        ...
        subtensors.AddressError: sum on a tensor of a released Arena: call restore() on the Arena first
        >>> arena.restore()
        >>> m.data_ptr() == at, m.sum()
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
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1) or alignment > _GRANULE:
            raise ValueError(f"alignment must be a power of two up to {_GRANULE}; got {alignment!r}")
        step = -(-parse_bytes("chunk", chunk) // _GRANULE) * _GRANULE
        size = -(-parse_bytes("reserve", reserve) // step) * step
        memory: AddressRange = CudaRange(size, self.device) if self.device.type == "cuda" else HostRange(size)
        self.alignment = alignment
        deferred_finalizers.watch(self.device)
        self._lock = RLock()
        self._carver = Carver(memory, step, alignment)
        self._contents = Contents(self._carver, self.device)
        self._sleep: Release | None = None
        _arenas.add(self)

    def release(self, keep: Literal["cpu"] | None = "cpu") -> None:
        """Free the arena's memory. Addresses stay reserved, and every op on its tensors is refused until `restore()`.

        Tensors that are deleted while it is released free their part of the range. Waits until the device is idle.

        Args:
            keep: "cpu" copies the contents to host memory, page-locked for a CUDA device and kept for the next
                release; None forgets them.

        Raises:
            AddressError: the arena is released already, a CUDA graph is being captured, or an autograd graph or other
                C++ code holds a tensor, which it might read. Nothing is freed then.
            MemoryError: the host has no memory for the copy. Nothing is freed then.
            ValueError: `keep` is neither.
        """
        if keep not in ("cpu", None):
            raise ValueError(f'keep must be "cpu" or None; got {keep!r}')
        with self._lock:
            if self._sleep is not None:
                raise AddressError("this Arena is released already; restore() comes before the next release()")
            refuse_capture(self.device)
            census = ReferenceCensus(self.address, self.address + self.reserved)
            self._refuse_if_held(census)
            sleep = Release(census.tensors)
            try:
                self._contents.wait()
                if keep:
                    self._contents.save()
                self._carver.unmap_all()
            except BaseException:
                sleep.wake()
                raise
            self._sleep = sleep

    def restore(self) -> None:
        """Map memory at the same addresses, copy back contents that were kept, and make the tensors usable again.

        After `release(keep=None)` the contents are whatever the memory holds.

        Raises:
            AddressError: the arena is not released, or a CUDA graph is being captured.
            torch.OutOfMemoryError: the device has not enough memory; MemoryError on a CPU. The arena stays released,
                what was kept stays kept, and `restore()` can be called again.
        """
        with self._lock:
            if self._sleep is None:
                raise AddressError("this Arena is not released; release() comes before restore()")
            refuse_capture(self.device)
            deferred_finalizers.run_deferred()
            self._contents.load()
            self._contents.forget()
            self._sleep.wake()
            self._sleep = None

    def pool(self) -> torch.cuda.MemPool:
        """A memory pool of torch's allocator whose memory lies in this arena, on a CUDA device.

        `torch.cuda.use_mem_pool(pool)` puts ordinary tensors there, `torch.cuda.graph(g, pool=pool.id)` the memory of a
        captured graph. The pool must live as long as it is allocated from. While the arena is released, allocations
        run out of memory.

        Returns:
            A new pool; torch asks the arena for 2 MiB, or 20 MiB, at a time.

        Raises:
            ValueError: the arena is on a CPU.
        """
        if self.device.type != "cuda":
            raise ValueError("a CPU has no memory pools; allocate with the arena's own constructors")
        return pool_over(self, Arena._take)

    def guard(self, call: Callable[_P, _R]) -> Callable[_P, _R]:
        """Make a callable raise while the arena is released: for holders of bare addresses, such as captured graphs.

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

        @wraps(call)
        def guarded(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            if self._sleep is not None:
                name = getattr(call, "__qualname__", repr(call))
                raise AddressError(f"{name} uses memory of a released Arena: call restore() on the Arena first")
            return call(*args, **kwargs)

        return guarded

    def trim(self) -> None:
        """Free the host memory kept for the next release; the contents of a released arena stay."""
        with self._lock:
            self._contents.trim()

    def explain(self) -> str:
        """Describe how much is reserved, mapped, carved and kept on the host; `st.explain(arena)` returns this."""
        with self._lock:
            return "\n".join(
                [
                    f"Arena on {self.device}, {'released' if self.released else 'awake'}, at {self.address:#x}",
                    f"  reserved {in_units(self.reserved)} of addresses, in chunks of {in_units(self._carver.chunk)}",
                    f"  mapped {in_units(self.mapped)}, used {in_units(self.used)}, parts {len(self._carver.starts())}",
                    f"  on the host {in_units(self._contents.host_bytes)}",
                ]
            )

    @property
    def released(self) -> bool:
        """Return whether the arena's memory is released."""
        return self._sleep is not None

    @property
    def address(self) -> int:
        """The start address of the range."""
        return self._carver.memory.address

    @property
    def reserved(self) -> int:
        """Bytes of reserved addresses."""
        return self._carver.memory.size

    @property
    def mapped(self) -> int:
        """Bytes of memory mapped under the range."""
        return self._carver.mapped_bytes

    @property
    def used(self) -> int:
        """Bytes carved, those lost to alignment included."""
        with self._lock:
            return self._carver.used_bytes

    def __contains__(self, t: object) -> bool:
        """Return whether a tensor's storage begins in the range."""
        if not isinstance(t, Tensor):
            return False
        with torch._C.DisableTorchFunctionSubclass():
            return self.address <= Tensor.untyped_storage(memory_of(t)).data_ptr() < self.address + self.reserved

    def __repr__(self) -> str:
        state = "released" if self.released else f"{in_units(self.mapped)} mapped"
        return f"Arena({self.device}, {in_units(self.used)} used, {state}, {in_units(self.reserved)} reserved)"

    def __del__(self) -> None:
        # Every tensor refers to its arena, so that there is none left. A process that ends gives all back by itself.
        if not sys.is_finalizing() and hasattr(self, "_sleep"):
            if self._sleep is not None:
                self._sleep.wake()
            deferred_finalizers.run_or_defer(self._contents.close)

    def _carve(self, layout: Tensor, value: float | None = None, requires_grad: bool = False) -> StaticAddressTensor:
        """A tensor of this layout, filled with a value where one is given."""
        refuse_capture(self.device)
        size = layout.numel() * layout.element_size()
        part = self._take(size, layout.element_size()) if size else None
        start = part.start if part else 0
        raw = tensor_from_address(self.address + start, size, self.device, (part, self))
        with torch.no_grad():
            out = of_memory(shaped(raw, layout))
            if value is not None:
                out.fill_(value)
        return with_role(out, requires_grad, is_parameter=False)

    def _take(self, size: int, alignment: int = 1) -> Carving:
        deferred_finalizers.run_deferred()
        with self._lock:
            if self._sleep is not None:
                raise AddressError("this Arena is released: call restore() on it before tensors are made in it")
            return self._carver.take(size, alignment)

    def _refuse_if_held(self, census: ReferenceCensus) -> None:
        """Raise AddressError if C++ code holds memory without a Python tensor that could be marked as released."""
        held = census.held_by_others()
        shape = f"a tensor of shape {tuple(held.shape)}" if held is not None else ""
        known = census.storage_addresses | segments_of(self)
        if not shape and any(self.address + start not in known for start in self._carver.starts()):
            shape = "memory without a tensor of Python"
        if shape:
            raise AddressError(
                f"{shape} in this Arena is held by C++ code, such as an autograd graph that saved it, which would read "
                f"memory that is gone: run backward() or delete its result"
            )


dynamo.call_eagerly(Arena._carve, "a tensor in an Arena is made outside of graphs")


def _device(device: torch.device | str) -> torch.device:
    found = torch.device(device)
    if found.type not in ("cpu", "cuda"):
        raise ValueError(f"an Arena is on a CPU or a CUDA device; got {device!r}")
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return found


def explain_place(t: StaticAddressTensor) -> str:
    """Describe where a static tensor is, and whose memory it uses; `st.explain(t)` returns this.

    >>> arena = Arena("cpu")
    >>> explain_place(arena.zeros(2, 3))
    'StaticAddressTensor of (2, 3) torch.float32 at 0x..., in Arena(cpu, 512 B used, 32 MiB mapped, 1 TiB reserved)'
    """
    with torch._C.DisableTorchFunctionSubclass():
        address = Tensor.data_ptr(memory_of(t))
    home = next((f"in {arena}" for arena in list(_arenas) if t in arena), "in memory of its own")
    return f"StaticAddressTensor of {tuple(t.shape)} {t.dtype} at {address:#x}, {home}"
