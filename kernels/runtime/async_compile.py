"""Compiling kernels in other threads, while the program that needs them goes on with a reference implementation.

Triton releases the GIL for most of the tenths of a second that a kernel takes to compile. Before the first kernel of a
process it hashes its own sources and has a C compiler build its driver module, which takes as long again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import cache
from typing import Protocol, TypeVar

T = TypeVar("T")

_COMPILERS = ThreadPoolExecutor(2, "subtensors-compiler")


class CompiledKernel(Protocol):
    """A kernel that Triton has compiled: what `kernel[grid](...)` and `kernel.warmup(...)` return."""

    run: Callable[..., object]
    function: object
    packed_metadata: object

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., object]:
        """Load the kernel, and return Triton's own launcher for a grid."""
        ...


class CompilePending(Exception):
    """A kernel is still being compiled in another thread: its caller must compute the result without it."""


class _Requests(threading.local):
    futures: list[Future[CompiledKernel]] | None = None
    """The compilations that this thread has requested; None where it waits for the compiler."""


requests = _Requests()


@contextmanager
def use_reference_while_compiling() -> Iterator[None]:
    """A context in which kernels with a reference that are not compiled yet raise CompilePending.

    They are compiled in other threads; the exit of the context waits for these. A kernel that was not compiled at the
    start raises until the exit, so which calls use the reference does not depend on the compiler's speed.
    """
    before, requests.futures = requests.futures, []
    try:
        yield
    finally:
        futures, requests.futures = requests.futures, before
        wait(futures)


def compile_async(compile: Callable[[], T]) -> Future[T]:
    """Run `compile` in another thread once Triton is ready; return the future of its result."""
    _preparations()

    def run() -> T:
        wait_for_triton()
        return compile()

    return _COMPILERS.submit(run)


def wait_for_triton() -> None:
    """Wait until Triton can compile: threads that prepared it at the same time would each do all of that work."""
    for preparation in _preparations():
        preparation.result()


@cache
def _preparations() -> list[Future[None]]:
    # Two threads that import Triton at the same time may each see the other's modules half initialized.
    from subtensors.kernels.runtime import triton_compat  # noqa: F401

    return [_COMPILERS.submit(_hash_sources), _COMPILERS.submit(_load_driver)]


def _hash_sources() -> None:
    with suppress(ImportError):  # other versions of Triton have another name for it
        from triton.runtime.cache import triton_key

        triton_key()


def _load_driver() -> None:
    with suppress(Exception):  # the first launch of a kernel raises it again
        from triton.runtime.driver import driver

        driver.active.utils  # noqa: B018  (built when the attribute is first read)
