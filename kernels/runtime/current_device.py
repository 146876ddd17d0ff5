"""The device and the stream that a kernel is launched on.

Triton launches on the current device, wherever the memory of its arguments is. There it would read addresses of another
device: an illegal access, or, where torch has enabled peer access, a race with the work of that other device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

_NO_CHANGE: AbstractContextManager[object] = nullcontext()

# As torch.cuda.current_device(), which checks on every call that CUDA is initialized: where there are tensors, it is.
# Torch has no such function without CUDA. Checked on 2.11, 2.13.
_index: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
# As torch.cuda.current_stream(), without the object that it makes.
_raw_stream: Callable[[int], int] = getattr(
    torch._C, "_cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream
)


def launching_on(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which kernels are launched on this device.

    It costs next to nothing where the device is the current one.

    Args:
        device: the one with the memory of their arguments; for a CPU the context does nothing.

    Example:
        >>> with launching_on(torch.device("cpu")):
        ...     pass
    """
    if device.type != "cuda" or device.index == _index():
        return _NO_CHANGE
    return torch.cuda.device(device)


def current_stream(device: torch.device) -> int:
    """Return the handle of the current CUDA stream of a device, an int; 0 for a CPU. Checked on 2.11, 2.13."""
    if device.type != "cuda":
        return 0
    return _raw_stream(device.index)


@contextmanager
def on_stream(stream: torch.cuda.Stream) -> Iterator[None]:
    """A context in which work goes to this stream, and the stream's device is the current one.

    `torch.cuda.stream` alone, at its exit, sets the stream of the device that was current before: CUDA then makes a
    context on that device, of some hundred MiB.
    """
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        yield


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU; 1 for a CPU, which interprets programs one after the other."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
