"""Capturing CUDA graphs: beginning and ending a capture, its memory, cuBLAS workspaces and random number generators.

Note [Workspaces of captured graphs]
CuBLAS works in memory that torch allocates, for each thread and stream, and every replay of a graph writes to the
workspaces that it was captured with. Torch frees workspaces on request, as `torch.compile(mode="reduce-overhead")`
requests around each of its captures; other tensors could then be allocated where the graph writes. So workspaces come
from a pool that serves nothing else and is never freed: a workspace that torch frees is allocated again on the same
stream, for graphs that are replayed one at a time.
"""

from __future__ import annotations

import ctypes
import logging
import pickle
import random
import re
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from threading import Lock, RLock
from typing import TypeAlias, TypedDict

import numpy as np
import torch

from subtensors.dispatch.graphs import deferred_finalizers
from subtensors.dispatch.torch_internals.requires import requires

PoolHandle: TypeAlias = tuple[int, int]

Generator: TypeAlias = "torch.Generator | random.Random | np.random.Generator"
"""A random generator of a program's own."""

_log = logging.getLogger(__name__)
_MAX_ATTEMPTS = 4
_PINNED_POOLS = 64
_destroyed = 0
_growing = Lock()
_one_at_a_time = RLock()
_MAX_WAIT = 60.0
"""The most seconds that a capture waits for another thread's, which may wait for a lock that this thread holds."""
_allocating_workspaces = Lock()
_workspace_pools: dict[tuple[int, int], torch.cuda.MemPool] = {}
"""By device and stream; torch has 32 streams, which it hands out in turn."""


class PoolSegment(TypedDict):
    """A segment of the allocator, as `torch.cuda.memory_snapshot` describes it."""

    address: int
    total_size: int
    active_size: int
    segment_pool_id: PoolHandle


def new_graph(device: torch.device) -> torch.cuda.CUDAGraph:
    """Return a graph to capture on this device. Checked on 2.11.

    Its constructor gets the current stream, for which torch creates a context on the current device.
    """
    with torch.cuda.device(device):
        return torch.cuda.CUDAGraph()


def destroy(graph: torch.cuda.CUDAGraph) -> None:
    """Destroy a graph, and now and then what torch keeps of the graphs that were destroyed.

    Each graph's pool has a part for pinned memory, of 48 KB even where it is empty, which torch keeps until its cache
    of pinned memory is emptied: as `torch.cuda.graph` does at each capture, and this at every `_PINNED_POOLS`th call.
    """
    global _destroyed
    graph.reset()
    _destroyed += 1
    if _destroyed >= _PINNED_POOLS and not deferred_finalizers.is_capturing():
        _destroyed = 0
        _empty_pinned_cache()


@requires("torch._C._host_emptyCache", otherwise=lambda: None)
def _empty_pinned_cache() -> None:
    torch._C._host_emptyCache()


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, device: torch.device, pool: PoolHandle) -> Iterator[None]:
    """A context that captures the work of this thread on the current stream; other threads may use the device.

    If it fails, torch is left as before: no capture is under way, the pool has no further owner, and random numbers can
    be drawn. Threads take turns: torch's generator counts the numbers of one capture, and a second one that begins
    meanwhile sets the count to 0, so that the graphs would draw the same numbers twice. Checked on 2.11.

    Args:
        graph: a new one.
        device: the current one.
        pool: where the graph allocates its memory.
    """
    is_alone = _one_at_a_time.acquire(timeout=_MAX_WAIT)
    try:
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")  # type: ignore[arg-type]  # a private type
        try:
            yield
        except BaseException:  # says more than the error of the capture that it broke
            with suppress(RuntimeError):
                graph.capture_end()
            raise
        graph.capture_end()
    except BaseException:
        _close_failed_capture(graph, device, pool)
        raise
    finally:
        if is_alone:
            _one_at_a_time.release()


def _close_failed_capture(graph: torch.cuda.CUDAGraph, device: torch.device, pool: PoolHandle) -> None:
    """Close a capture that failed, which torch leaves half open if CUDA invalidated it. Checked on 2.11.

    Torch's allocators, that of pinned memory included, still serve the capture, and its random generator still counts
    as captured. Only `capture_end` of the graph resets them, and it needs a capture to end: so another one, of a single
    kernel, is begun on the same stream.
    """
    if not _has_ended(graph):
        try:
            _begin_capture(torch.cuda.current_stream(device))
            _launch_kernel()
            graph.capture_end()
        except RuntimeError as error:  # the failed capture had not begun
            _log.debug("a failed capture is closed step by step: %s", error)
            _close_step_by_step(device, pool)
            return
    graph.reset()


def _begin_capture(stream: torch.cuda.Stream) -> None:
    """Begin a CUDA capture without torch's knowledge."""
    thread_local = 1
    status = ctypes.CDLL("libcuda.so.1").cuStreamBeginCapture_v2(ctypes.c_void_p(stream.cuda_stream), thread_local)
    if status:
        raise RuntimeError(f"cuStreamBeginCapture: {status}")


@requires("torch._C._cuda_endAllocateToPool", "torch._C._cuda_releasePool")
def _close_step_by_step(device: torch.device, pool: PoolHandle) -> None:
    with suppress(RuntimeError):  # the allocator may not serve the capture
        torch._C._cuda_endAllocateToPool(device.index, pool)  # type: ignore[attr-defined]
        torch._C._cuda_releasePool(device.index, pool)  # type: ignore[attr-defined]
    # The first call of CUDA may report an earlier error.
    for _ in range(_MAX_ATTEMPTS):
        with torch.cuda.stream(torch.cuda.Stream(device)):
            try:
                empty = torch.cuda.CUDAGraph()
                empty.capture_begin(capture_error_mode="thread_local")
                _launch_kernel()
                empty.capture_end()
            except RuntimeError as error:
                _log.debug("after a failed capture: %s", error)
                continue
        empty.reset()
        return


@requires("torch._C._cuda_sleep")
def _launch_kernel() -> None:
    """Launch a kernel that needs no memory, of which there may be none left."""
    torch._C._cuda_sleep(1)  # type: ignore[attr-defined]  # private


def _has_ended(graph: torch.cuda.CUDAGraph) -> bool:
    try:
        graph.pool()
    except RuntimeError:
        return False
    return True


@contextmanager
def growing_segments() -> Iterator[None]:
    """A context in which allocations come from segments that grow in place. Checked on 2.11.

    A graph that needs a larger segment can't use one that doesn't grow. The setting is global to the process, and the
    allocator supports changing it: it keeps its segments, and never mixes the two kinds. One thread at a time sets it;
    another that captures at the same time shares that setting, or gets segments of the usual kind. Allocators other
    than torch's own have no such setting.
    """
    before = allocator_settings() if torch.cuda.get_allocator_backend() == "native" else None
    if before is None or "expandable_segments:true" in before.lower() or not _growing.acquire(blocking=False):
        yield
        return
    try:
        _set_allocator(with_expandable_segments(before, True))
        yield
    finally:
        _set_allocator(with_expandable_segments(before, False))
        _growing.release()


def allocator_settings() -> str:
    """Return the settings of the allocator of CUDA memory, in the format of `PYTORCH_ALLOC_CONF`. Checked on 2.11."""
    get: Callable[[], str] | None = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    if get is not None:
        return get()
    snapshot = torch._C._cuda_memorySnapshot((0, 0, False))
    settings: str = snapshot["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"]  # type: ignore[index]
    return settings


def with_expandable_segments(settings: str, enabled: bool) -> str:
    """Return these settings of the allocator, with segments that grow or without.

    >>> with_expandable_segments("max_split_size_mb:64,expandable_segments:False", True)
    'max_split_size_mb:64,expandable_segments:True'
    """
    rest = re.sub(r"(^|,)\s*expandable_segments:\w+", "", settings).lstrip(",")
    return ",".join(filter(None, [rest, f"expandable_segments:{enabled}"]))


@requires("torch._C._accelerator_setAllocatorSettings")
def _set_allocator(settings: str) -> None:
    """Set the allocator's settings; those that are left out get torch's defaults."""
    torch._C._accelerator_setAllocatorSettings(settings)


def segments(pool: PoolHandle | None) -> list[PoolSegment]:
    """Return the segments of a private pool; none if there is no pool. Checked on 2.11."""
    if pool is None:
        return []
    # Asked for one pool, torch releases its handle's numbers once too often: a crash, once a process has 256 pools
    # (github.com/pytorch/pytorch/pull/196366, open in September 2026).
    found: list[PoolSegment] = torch.cuda.memory_snapshot(include_traces=False)
    return [segment for segment in found if segment["segment_pool_id"] == pool]


def empty_cache() -> None:
    """Return torch's cached memory to the device, unless a thread captures a graph or allocates from a memory pool."""
    if not deferred_finalizers.is_capturing():
        with suppress(RuntimeError):  # torch's assertion that no thread does. Checked on 2.11.
            torch.cuda.empty_cache()


def make_workspaces(device: torch.device) -> None:
    """Allocate the workspaces of cuBLAS and cuBLASLt for this thread and the current stream, if they have none.

    Args:
        device: the current one, a CUDA device with its index.
    """
    with _allocating_workspaces, _workspace_pool(device):
        torch.cuda.current_blas_handle()  # allocates its workspace
        # With deterministic algorithms, but without the setting that they need, torch refuses to call either library.
        if not torch.are_deterministic_algorithms_enabled():
            ones = torch.ones(8, 8, device=device)
            torch.addmm(ones[0], ones, ones)


def _workspace_pool(device: torch.device) -> AbstractContextManager[None]:
    """Return a context that allocates from the pool of the current stream; only torch's own allocator has pools."""
    if torch.cuda.get_allocator_backend() != "native":
        return nullcontext()
    key = device.index, torch.cuda.current_stream(device).cuda_stream
    if key not in _workspace_pools:
        _workspace_pools[key] = torch.cuda.MemPool()
    return torch.cuda.use_mem_pool(_workspace_pools[key], device)


def rng_state(device: torch.device) -> torch.Tensor:
    """Return the state of a device's random generator, without waiting for the device. Checked on 2.11, 2.13."""
    return generator_of(device).get_state()


def set_rng_state(device: torch.device, state: torch.Tensor) -> None:
    """Set the random generator of a device to a state that `rng_state` returned."""
    generator_of(device).set_state(state)


def generator_of(device: torch.device) -> torch.Generator:
    """Return the random generator of a device."""
    return torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator


class RngState:
    """A snapshot of random generators: the CPU's, those of some GPUs, Python's and NumPy's, and a program's own.

    Args:
        devices: the devices; the CPU is always included.
        own: generators of the program.

    Example:
        >>> state = RngState()
        >>> _ = random.random()
        >>> state.has_host_drawn()
        True
        >>> state.restore()
        >>> state.has_host_drawn()
        False
    """

    def __init__(self, devices: Iterable[torch.device] = (), own: Iterable[Generator] = ()) -> None:
        gpus = {device for device in devices if device.type == "cuda"}
        defaults = [generator_of(device) for device in (torch.device("cpu"), *gpus)]
        # As bytes: a comparison of tensors would be an op that a capture, or a mode around it, sees.
        self._states = [
            (is_on_host, get, set_, pickle.dumps(get()))
            for is_on_host, get, set_ in map(_accessors, (*defaults, random, np.random, *own))
        ]

    def has_host_drawn(self) -> bool:
        """Return whether random numbers were drawn on the host since the snapshot; no replay draws those."""
        return any(is_on_host and pickle.dumps(get()) != before for is_on_host, get, _, before in self._states)

    def has_drawn(self) -> bool:
        """Return whether random numbers were drawn since the snapshot, on the host or a device."""
        return any(pickle.dumps(get()) != before for _, get, _, before in self._states)

    def restore(self) -> None:
        """Restore all generators to the snapshot."""
        for *_, set_, before in self._states:
            set_(pickle.loads(before))


def _accessors(source: Generator | types.ModuleType) -> tuple[bool, Callable[[], object], Callable[..., object]]:
    """Return whether a generator, or that of a module, is on the host, and functions that get and set its state."""
    if isinstance(source, torch.Generator):
        is_on_host = source.device.type == "cpu"
        return is_on_host, lambda: source.get_state().numpy(), lambda x: source.set_state(torch.from_numpy(x))
    if isinstance(source, np.random.Generator):
        return True, lambda: source.bit_generator.state, partial(setattr, source.bit_generator, "state")
    if source is np.random:
        return True, np.random.get_state, np.random.set_state
    return True, source.getstate, source.setstate
