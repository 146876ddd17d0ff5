"""Compiling kernels in threads of their own, while the program that wants them goes on.

Triton lets go of Python for most of what a kernel takes: some tenths of a second. Before the first one of a process it
reads itself, and has a C compiler make what it calls the driver with, which takes as long again.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from typing import TypeVar

T = TypeVar("T")

_COMPILERS = ThreadPoolExecutor(2, "subtensors-compiler")


def compile_async(compile: Callable[[], T]) -> Future[T]:
    """Run `compile` in another thread once Triton is ready; return the future of its result."""
    _preparations()

    def run() -> T:
        wait_for_triton()
        return compile()

    return _COMPILERS.submit(run)


def wait_for_triton() -> None:
    """Return when Triton can compile: threads that make it ready at the same time would each do the work of all."""
    for preparation in _preparations():
        preparation.result()


@cache
def _preparations() -> list[Future[None]]:
    # Two threads that import Triton at the same time may each see the other's modules half made.
    from subtensors.kernels.runtime import triton_compat  # noqa: F401

    return [_COMPILERS.submit(_read_itself), _COMPILERS.submit(_load_driver)]


def _read_itself() -> None:
    with suppress(ImportError):  # of a Triton that calls it otherwise
        from triton.runtime.cache import triton_key

        triton_key()


def _load_driver() -> None:
    with suppress(Exception):  # which whoever launches a kernel is told
        from triton.runtime.driver import driver

        driver.active.utils  # noqa: B018  (made by being asked for)
