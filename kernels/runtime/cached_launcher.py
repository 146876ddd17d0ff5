"""Launching a kernel again without Triton's look at its arguments, for which the host takes longer than for the launch.

Triton compiles a kernel for the dtypes of its arguments, for whether addresses and whole numbers are multiples of 16,
and for numbers that are one. Here these are the key under which its launcher is kept.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from subtensors.kernels.runtime.async_compile import compile_async, wait_for_triton
from subtensors.kernels.runtime.current_device import current_stream, launching_on
from subtensors.kernels.runtime.launcher import Launch, launcher

ALIGNMENT = 16
"""Bytes, or units of a whole number, that Triton compiles multiples of apart."""


class CompilePending(Exception):
    """A kernel is compiled in another thread: what it computes is to be computed without it."""


class _Thread(threading.local):
    asked: list[Future[Any]] | None = None
    """The compilations that this thread has requested; None where it waits for the compiler."""


_thread = _Thread()


@contextmanager
def use_reference_while_compiling() -> Iterator[None]:
    """Kernels with a reference that are not compiled yet raise CompilePending, and are compiled at the end.

    What is new stays so to the end, so that it does not depend on the compiler's speed what is computed how.
    """
    before, _thread.asked = _thread.asked, []
    try:
        yield
    finally:
        asked, _thread.asked = _thread.asked, before
        wait(asked)


class RepeatedLaunch:
    """A kernel that is launched as Triton launches it, and from then on by what Triton made of it.

    Args:
        kernel: under `triton.jit`.
        has_reference: does who launches it compute the same in another way where it is still compiled?
    """

    def __init__(self, kernel: Any, has_reference: bool = False) -> None:
        self.kernel, self.has_reference = kernel, has_reference
        self._launchers: dict[Any, tuple[Launch, list[Any]]] = {}
        self._compiled: dict[Any, Any] = {}
        self._coming: dict[Any, Future[Any]] = {}

    def __call__(self, programs: int, tensors: Sequence[Tensor], *others: Any, **constants: Any) -> None:
        """Launch so many programs.

        Args:
            programs: at least one.
            tensors: the first arguments of the kernel, all on one device.
            others: those that follow: numbers, and tuples of tensors and numbers.
            constants: the last ones, in their order, and options of the compilation.

        Raises:
            CompilePending: see `use_reference_while_compiling`; only where there is a reference.
        """
        device = tensors[0].device
        if device.type != "cuda":
            with launching_on(device):
                self.kernel[(programs,)](*tensors, *others, **constants)
            return
        addresses = [x.data_ptr() for x in tensors]
        kind = (
            device.index,
            # What is no number is equal to itself here.
            *["nan" if x != x else x for x in constants.values()],
            *[x.dtype for x in tensors],
            *[address % ALIGNMENT == 0 for address in addresses],
            *[(x == 1, x % ALIGNMENT == 0, x >> 31) if type(x) is int else _kind(x) for x in others],
        )
        ready = self._launchers.get((programs, kind))
        if ready is None:
            ready = self._new(programs, kind, device, (*tensors, *others), constants)
            if ready is None:
                return
        launch, named = ready
        stream = current_stream(device)
        with launching_on(device):
            launch(*addresses, *[_passed(x) if type(x) is tuple else x for x in others], *named, stream=stream)

    def _new(
        self, programs: int, kind: Any, device: torch.device, arguments: tuple[Any, ...], constants: Mapping[str, Any]
    ) -> Any:
        """The launcher for arguments of a kind; None where Triton has launched the kernel itself."""
        compiled: Any = self._compiled.get(kind)
        if compiled is None and self.has_reference and _thread.asked is not None:
            if kind not in self._coming:
                like = [_like(x) for x in arguments]
                self._coming[kind] = compile_async(lambda: self._compile(device, like, constants))
                _thread.asked.append(self._coming[kind])
            raise CompilePending
        if compiled is None and kind in self._coming:
            compiled = self._coming.pop(kind).result()
        is_launched = compiled is None
        if is_launched:
            wait_for_triton()
            with launching_on(device):
                compiled = self.kernel[(programs,)](*arguments, **constants)
        self._compiled[kind] = compiled
        named = [constants[name] for name in self.kernel.arg_names[len(arguments) :]]
        self._launchers[programs, kind] = ready = launcher(compiled, programs), named
        return None if is_launched else ready

    def _compile(self, device: torch.device, arguments: list[Any], constants: Mapping[str, Any]) -> Any:
        with launching_on(device):
            compiled = self.kernel.warmup(*arguments, grid=(1,), **constants)
            compiled[(1, 1, 1)]  # is loaded by this
        return compiled


def _kind(x: Any) -> Any:
    """Return the properties of an argument that Triton specializes a kernel for."""
    if isinstance(x, tuple):
        return tuple(map(_kind, x))
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() % ALIGNMENT == 0
    return (x == 1, x % ALIGNMENT == 0, x >> 31) if isinstance(x, int) else None


def _passed(x: Any) -> Any:
    """An argument as a launcher takes it."""
    if isinstance(x, tuple):
        return tuple(map(_passed, x))
    return x.data_ptr() if isinstance(x, Tensor) else x


def _like(x: Any) -> Any:
    """An argument that Triton compiles the same for, without what holds much memory."""
    if isinstance(x, tuple):
        return tuple(map(_like, x))
    if not isinstance(x, Tensor):
        return x
    first = x.data_ptr() % ALIGNMENT // x.element_size()
    return torch.empty(ALIGNMENT, dtype=x.dtype, device=x.device)[first:]
