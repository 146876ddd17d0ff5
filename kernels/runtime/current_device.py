"""The device that a kernel is launched on, and how wide it is.

Triton takes the current one, wherever the memory is that it is given. There it would read addresses of another device:
an illegal access, or where torch has let devices read each other's memory, a race with what that other device is at.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

_AS_IT_IS: AbstractContextManager[Any] = nullcontext()


# As torch.cuda.current_device(), which on every call asks whether CUDA is in use: where tensors are, it is. Torch has
# no such function without CUDA. Checked on 2.11, 2.13.
_index: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
# As torch.cuda.current_stream(), which makes an object of it.
_raw_stream: Callable[[int], int] = getattr(
    torch._C, "_cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream
)


def launching_on(device: torch.device) -> AbstractContextManager[Any]:
    """Kernels that are launched meanwhile run on this device.

    Args:
        device: that has the memory of their arguments; on a CPU there is nothing to do.

    Returns:
        A context, which costs next to nothing where the device is the current one.

    Example:
        >>> with launching_on(torch.device("cpu")):
        ...     pass
    """
    if device.type != "cuda" or device.index == _index():
        return _AS_IT_IS
    return torch.cuda.device(device)


def current_stream(device: torch.device) -> int:
    """The CUDA stream that work on this device goes to now, as a number; 0 for a CPU. Checked on 2.11, 2.13."""
    if device.type != "cuda":
        return 0
    return _raw_stream(device.index)


@contextmanager
def on_stream(stream: torch.cuda.Stream) -> Iterator[None]:
    """Work goes to this stream meanwhile, and its device is the current one.

    As `torch.cuda.stream`, which on its way back takes the device that was current for one that is in use: CUDA then
    makes a context there, of some hundred MiB.
    """
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        yield


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU; 1 for a CPU, which interprets programs one after the other."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
