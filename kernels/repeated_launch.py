"""Launching a kernel again without Triton's look at its arguments, for which the host takes longer than for the launch.

Triton compiles a kernel for the dtypes of its arguments, for whether addresses and whole numbers are multiples of 16,
and for numbers that are one. Here these are the key under which its launcher is kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 16
"""Bytes, or units of a whole number, that Triton compiles multiples of apart."""


class RepeatedLaunch:
    """A kernel that is launched as Triton launches it, and from then on by what Triton made of it.

    Args:
        kernel: under `triton.jit`.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._launchers: dict[Any, Any] = {}

    def __call__(self, programs: int, *arguments: Any, **constants: Any) -> None:
        """Launch so many programs.

        Args:
            programs: at least one.
            arguments: tensors and numbers, all on one device, in the order of the kernel's.
            constants: its last arguments, in their order, and options of the compilation.
        """
        device = arguments[0].device
        if device.type != "cuda":
            self.kernel[(programs,)](*arguments, **constants)
            return
        seen: list[Any] = [programs, device.index, *constants.values()]
        passed: list[Any] = []
        for x in arguments:
            if isinstance(x, Tensor):
                address = x.data_ptr()
                passed.append(address)
                seen += (x.dtype, address % ALIGNMENT == 0)
            else:
                passed.append(x)
                seen.append((x == 1, x % ALIGNMENT == 0, x >> 31) if isinstance(x, int) else None)
        key = tuple(seen)
        launcher = self._launchers.get(key)
        if launcher is None:
            compiled = self.kernel[(programs,)](*arguments, **constants)
            named = [constants[name] for name in self.kernel.arg_names[len(arguments) :]]
            self._launchers[key] = compiled[(programs, 1, 1)], named
            return
        launch, named = launcher
        launch(*passed, *named, stream=torch._C._cuda_getCurrentRawStream(device.index))  # type: ignore[attr-defined]
