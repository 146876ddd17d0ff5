"""Clocks and counters for one call: device time, host time, kernels, memory."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode


def synchronize(device: str) -> None:
    """Wait until the device has done what it was given; a CPU always has."""
    if device == "cuda":
        torch.cuda.synchronize()


class Span:
    """The time between two points of the device's stream; of the host's clock, where the device is the CPU.

    >>> with Span("cpu") as span:
    ...     total = sum(range(1000))
    >>> span.ms() > 0
    True
    """

    def __init__(self, device: str) -> None:
        self.on_gpu = device == "cuda"

    def __enter__(self) -> Span:
        if self.on_gpu:
            self.begin, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.begin.record()
        self.started = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.host_ms = (time.perf_counter() - self.started) * 1e3
        if self.on_gpu:
            self.end.record()

    def ms(self) -> float:
        """Milliseconds; on a GPU the device must be synchronized first."""
        return float(self.begin.elapsed_time(self.end)) if self.on_gpu else self.host_ms


def seconds(call: Callable[[], object], device: str) -> float:
    """The host's time from one call to a synchronized device.

    >>> seconds(lambda: sum(range(100)), "cpu") > 0
    True
    """
    synchronize(device)
    started = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - started


@dataclass(frozen=True)
class Times:
    """Median milliseconds of one call.

    Args:
        device_ms: between the call's first and last work on the device, with calls enqueued back to back.
        wall_ms: the host's, from the call to a synchronized device.
        enqueue_ms: the host's, until the call returned.
    """

    device_ms: float
    wall_ms: float
    enqueue_ms: float


def time_call(call: Callable[[], object], device: str, repeats: int = 30, warm_up: int = 5) -> Times:
    """Time a call that leaves its work on the device's stream.

    The wall time is taken in a loop of its own, so that it holds no recording of events.

    Args:
        call: what to time.
        device: "cpu" or "cuda".
        repeats: calls in each of the two loops; the medians are returned.
        warm_up: calls before them.

    >>> time_call(lambda: sum(range(100)), "cpu", repeats=3).wall_ms > 0
    True
    """
    for _ in range(warm_up):
        call()
    synchronize(device)
    spans = []
    for _ in range(repeats):
        # No waiting in between: the device always has the next call's work, as in a training loop.
        with Span(device) as span:
            call()
        spans.append(span)
    synchronize(device)
    walls, enqueues = [], []
    for _ in range(repeats):
        synchronize(device)
        started = time.perf_counter()
        call()
        enqueues.append((time.perf_counter() - started) * 1e3)
        synchronize(device)
        walls.append((time.perf_counter() - started) * 1e3)
    return Times(median(span.ms() for span in spans), median(walls), median(enqueues))


class _AtenCalls(TorchDispatchMode):
    """Counts the aten calls under it."""

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def _profiled(call: Callable[[], object]) -> profile:
    """What one call did, by the profiler."""
    profiler = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
    torch.cuda.synchronize()
    with profiler:
        call()
        torch.cuda.synchronize()
    return profiler


def _on_gpu(profiler: profile) -> list[Any]:
    """Kernels, copies and fills that ran on the GPU."""
    events: list[Any] = profiler.events()
    return [event for event in events if event.device_type.name == "CUDA" and not event.is_user_annotation]


def count_kernels(call: Callable[[], object]) -> int:
    """How many kernels one call runs on the GPU, a replayed graph's included; copies and fills by DMA are not."""
    names = [event.name for event in _on_gpu(_profiled(call))]
    return sum(not name.startswith(("Memcpy", "Memset")) for name in names)


@dataclass(frozen=True)
class KernelTime:
    """What a kernel takes of a call.

    Args:
        name: of the kernel, or of a copy or fill by DMA.
        count: how often it ran.
        ms: all of them together.
    """

    name: str
    count: int
    ms: float


def kernel_times(call: Callable[[], object]) -> list[KernelTime]:
    """What runs on the GPU in one call, a replayed graph's kernels included; those that take most come first."""
    times: dict[str, list[float]] = {}
    for event in _on_gpu(_profiled(call)):
        times.setdefault(event.name, []).append(event.time_range.elapsed_us() / 1e3)
    found = [KernelTime(name, len(each), sum(each)) for name, each in times.items()]
    return sorted(found, key=lambda kernel: -kernel.ms)


def count_copied_bytes(call: Callable[[], object]) -> int:
    """How many bytes one call copies on, to or from the GPU: the transfers it makes, a replayed graph's included.

    What a kernel copies as part of what it computes is not a transfer, and not counted.
    """
    profiler = _profiled(call)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return sum(event["args"]["bytes"] for event in events if event.get("cat") == "gpu_memcpy")


def count_aten_calls(call: Callable[[], object]) -> int:
    """How many aten calls one call makes below autograd; a foreach call is one, however long its list.

    >>> a = torch.ones(3)
    >>> count_aten_calls(lambda: a.add(1).mul(2))
    2
    """
    calls = _AtenCalls()  # type: ignore[no-untyped-call]  # torch leaves the mode's constructor without annotations
    with calls:
        call()
    return calls.count
