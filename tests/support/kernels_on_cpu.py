"""Fused calls as kernels on CPU tensors, which Triton interprets (`TRITON_INTERPRET=1`, which conftest.py sets)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import triton
from triton_interpreter import mend_interpreter

from subtensors.dispatch.fused.bound_call import cpu_kernels

if triton.knobs.runtime.interpret:
    mend_interpreter()  # in processes that tests start, too


@contextmanager
def kernels_on_cpu() -> Iterator[None]:
    """Run kernels on CPU tensors too, where there is no GPU that Triton compiles them for."""
    token = cpu_kernels.set(bool(triton.knobs.runtime.interpret))
    try:
        yield
    finally:
        cpu_kernels.reset(token)
