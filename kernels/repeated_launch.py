"""Launching a kernel again without Triton's look at its arguments, for which the host takes longer than for the launch.

Triton compiles a kernel for the dtypes of its arguments, for whether addresses and whole numbers are multiples of 16,
and for numbers that are one. Here these are the key under which its launcher is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
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

    def __call__(self, programs: int, tensors: Sequence[Tensor], *numbers: float, **constants: Any) -> None:
        """Launch so many programs.

        Args:
            programs: at least one.
            tensors: the first arguments of the kernel, all on one device.
            numbers: those that follow.
            constants: the last ones, in their order, and options of the compilation.
        """
        device = tensors[0].device
        if device.type != "cuda":
            self.kernel[(programs,)](*tensors, *numbers, **constants)
            return
        addresses = [x.data_ptr() for x in tensors]
        key = (
            programs,
            device.index,
            *constants.values(),
            *[x.dtype for x in tensors],
            *[address % ALIGNMENT == 0 for address in addresses],
            *[(x == 1, x % ALIGNMENT == 0, x >> 31) if type(x) is int else None for x in numbers],
        )
        launcher = self._launchers.get(key)
        if launcher is None:
            compiled = self.kernel[(programs,)](*tensors, *numbers, **constants)
            named = [constants[name] for name in self.kernel.arg_names[len(tensors) + len(numbers) :]]
            self._launchers[key] = compiled[(programs, 1, 1)], named
            return
        launch, named = launcher
        stream = torch._C._cuda_getCurrentRawStream(device.index)  # type: ignore[attr-defined]
        launch(*addresses, *numbers, *named, stream=stream)
