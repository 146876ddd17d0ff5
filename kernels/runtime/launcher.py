"""Launches of Triton kernels: on which device and stream, and at little more host time than the driver's own takes.

Triton launches on the current device, wherever the memory of its arguments is. There it would read addresses of another
device: an illegal access, or, where torch has enabled peer access, a race with the work of that other device. So every
launch is made inside `launching_on(device)`.

Triton's `kernel[grid](...)` inspects every argument at every launch, which takes longer than the launch. It compiles a
kernel for the dtypes of its arguments, for whether addresses and integers are multiples of 16, and for integers that
are one. `CachedLauncher` uses these properties as the key of a cache of launch functions.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from subtensors.kernels.runtime.async_compile import (
    CompiledKernel,
    CompilePending,
    compile_async,
    requests,
    wait_for_triton,
)

_NO_CHANGE: AbstractContextManager[object] = nullcontext()

# As torch.cuda.current_device(), which checks on every call that CUDA is initialized: where there are tensors, it is.
# Torch has no such function without CUDA. Checked on 2.11, 2.13.
_index: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
# As torch.cuda.current_stream(), without the object that it makes.
_raw_stream: Callable[[int], int] = getattr(
    torch._C, "_cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream
)

ALIGNMENT = 16
"""Triton compiles a kernel apart for addresses, in bytes, and for integers that are multiples of this."""

Launch = Callable[..., None]
"""Called with the number of programs, the kernel's arguments and `stream`, that of a stream of the current device."""

Key = tuple[object, ...]
"""The properties of arguments that Triton compiles a kernel for."""


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


def is_capturing(device: torch.device) -> bool:
    """Return whether work on a device is being captured into a CUDA graph, on the current stream, rather than run."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


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


class JitKernel(Protocol):
    """A function decorated with `triton.jit`."""

    arg_names: Sequence[str]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., CompiledKernel]:
        """Return a function that compiles the kernel for its arguments and launches it."""
        ...

    def warmup(self, *args: object, grid: tuple[int, ...], **constants: object) -> CompiledKernel:
        """Compile the kernel for some arguments."""
        ...


def prepare_launch(compiled: CompiledKernel) -> Launch:
    """Load a kernel, and return a function that launches it.

    Triton's own `compiled[grid]` describes each launch for hooks, which profilers add. While there are no hooks, the
    function that it wraps is called directly, without a description. Checked on Triton 3.6; read in 3.7, 3.9.
    """
    from subtensors.kernels.runtime.triton_compat import triton

    knobs = triton.knobs
    compiled[(1, 1, 1)]  # loads it
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata

    def launch(programs: int, *arguments: object, stream: int) -> None:
        if _is_hooked(knobs.runtime.launch_enter_hook) or _is_hooked(knobs.runtime.launch_exit_hook):
            compiled[(programs, 1, 1)](*arguments, stream=stream)
        else:
            run(programs, 1, 1, stream, function, metadata, None, None, None, *arguments)

    return launch


def _is_hooked(hook: object) -> bool:
    """Return whether a launch hook of Triton has anything to call: it is a chain with `calls`, a function, or None."""
    return bool(getattr(hook, "calls", hook))


class CachedLauncher:
    """A kernel with a cache of launch functions: Triton makes the first launch of each key, the cache all others.

    Args:
        kernel: a `triton.jit` function.
        has_reference: whether the caller handles CompilePending by computing the result in another way.
    """

    def __init__(self, kernel: JitKernel, has_reference: bool = False) -> None:
        self.kernel, self.has_reference = kernel, has_reference
        self._launches: dict[Key, tuple[Launch, list[object]]] = {}
        self._pending: dict[Key, Future[CompiledKernel]] = {}

    def __call__(self, programs: int, tensors: Sequence[Tensor], *rest: object, **constants: object) -> None:
        """Launch `programs` programs of the kernel.

        Args:
            programs: at least one.
            tensors: the first arguments of the kernel, all on one device.
            rest: the arguments after them: numbers, and tuples of tensors and numbers.
            constants: the last arguments, in their order, and options of the compilation.

        Raises:
            CompilePending: see `use_reference_while_compiling`; only with `has_reference`.
        """
        device = tensors[0].device
        if device.type != "cuda":
            with launching_on(device):
                self.kernel[(programs,)](*tensors, *rest, **constants)
            return
        addresses = [x.data_ptr() for x in tensors]
        key = (
            device.index,
            # NaN is not equal to itself, but must find its key again.
            *["nan" if x != x else x for x in constants.values()],
            *[x.dtype for x in tensors],
            *[address % ALIGNMENT == 0 for address in addresses],
            *[(x == 1, x % ALIGNMENT == 0, x >> 31) if type(x) is int else _key_of(x) for x in rest],
        )
        cached = self._launches.get(key)
        if cached is None:
            cached = self._compile_or_launch(programs, key, device, (*tensors, *rest), constants)
            if cached is None:
                return
        launch, last = cached
        stream = current_stream(device)
        with launching_on(device):
            launch(programs, *addresses, *[_raw(x) if type(x) is tuple else x for x in rest], *last, stream=stream)

    def _compile_or_launch(
        self,
        programs: int,
        key: Key,
        device: torch.device,
        arguments: tuple[object, ...],
        constants: Mapping[str, object],
    ) -> tuple[Launch, list[object]] | None:
        """Return the launch function of a key and its last arguments; None where Triton has launched the kernel."""
        pending = self._pending.pop(key, None)
        if self.has_reference and requests.futures is not None:
            if pending is None:
                like = [_small_copy(x) for x in arguments]
                pending = compile_async(lambda: self._compile(device, like, constants))
                requests.futures.append(pending)
            self._pending[key] = pending
            raise CompilePending
        if pending is not None:
            compiled = pending.result()
        else:
            wait_for_triton()
            with launching_on(device):
                compiled = self.kernel[(programs,)](*arguments, **constants)
        last = [constants[name] for name in self.kernel.arg_names[len(arguments) :]]
        self._launches[key] = cached = prepare_launch(compiled), last
        return None if pending is None else cached

    def _compile(
        self, device: torch.device, arguments: list[object], constants: Mapping[str, object]
    ) -> CompiledKernel:
        with launching_on(device):
            compiled = self.kernel.warmup(*arguments, grid=(1,), **constants)
            compiled[(1, 1, 1)]  # loads it
        return compiled


@functools.cache
def cached_launcher(module: str, kernel: str, has_reference: bool = False) -> CachedLauncher:
    """Return the launcher of a kernel; the first call imports the kernel, and Triton with it.

    Args:
        module: of the kernel, below `subtensors.kernels`.
        kernel: its name.
        has_reference: see `CachedLauncher`.
    """
    return CachedLauncher(getattr(importlib.import_module(f"subtensors.kernels.{module}"), kernel), has_reference)


def _key_of(x: object) -> object:
    """Return the properties of an argument that Triton compiles a kernel for."""
    if isinstance(x, tuple):
        return tuple(map(_key_of, x))
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() % ALIGNMENT == 0
    return (x == 1, x % ALIGNMENT == 0, x >> 31) if isinstance(x, int) else None


def _raw(x: object) -> object:
    """Return an argument as a launch function takes it: tensors as addresses."""
    if isinstance(x, tuple):
        return tuple(map(_raw, x))
    return x.data_ptr() if isinstance(x, Tensor) else x


def _small_copy(x: object) -> object:
    """Return an argument with the same key that does not keep a tensor's memory alive."""
    if isinstance(x, tuple):
        return tuple(map(_small_copy, x))
    if not isinstance(x, Tensor):
        return x
    first = x.data_ptr() % ALIGNMENT // x.element_size()
    return torch.empty(ALIGNMENT, dtype=x.dtype, device=x.device)[first:]
