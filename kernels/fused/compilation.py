"""Compiling the kernels of one call side by side, before they are launched one after another.

Triton lets go of Python for most of the 0.2 s that a kernel takes, so a step over parameters of several dtypes is ready
nearly as soon as one over a single dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context

import torch

from subtensors.kernels.fused.launch import Grid
from subtensors.kernels.runtime.gc_pause import gc_paused


@gc_paused()
def compile_together(grids: Sequence[Grid]) -> None:
    """Compile the kernels of grids that are not compiled yet, in parallel; do nothing where only one kernel is new.

    Args:
        grids: the grids of one call.
    """
    grids = [grid for grid in grids if grid.device.type == "cuda" and not grid.kernels.are_compiled]
    kernels = [(grid, kernel) for grid in grids for kernel in grid.kernels.kernels if grid.programs(kernel)]
    for grid in grids:
        grid.kernels.are_compiled = True

    def compile_all() -> None:
        from subtensors.kernels.runtime.triton_compat import triton

        with ThreadPoolExecutor(len(kernels)) as pool, triton.AsyncCompileMode(pool):
            for grid, kernel in kernels:
                with torch.cuda.device(grid.device):
                    grid.compile(kernel)

    if len(kernels) > 1:
        # In a context without the caller's own mode, beside which Triton takes no other.
        Context().run(compile_all)
