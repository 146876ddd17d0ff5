"""Triton, or where it is not installed what lets modules of kernels be imported: their references run without it.

Triton is built for Linux alone; on other systems tensors are on a CPU, where no kernel is launched. Importing it takes
as long as all of subtensors, so launchers import what imports this when they are called.
"""

from __future__ import annotations

import importlib
from typing import Any


class Missing:
    """A name of Triton's where there is no Triton: it can be asked for names and decorate, and refuses to run."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self._name}.{name}")

    def __bool__(self) -> bool:
        return False

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Stand in for what decorates kernels or marks constants; raise ModuleNotFoundError for anything else."""
        if self._name in ("triton.jit", "triton.language.constexpr"):
            return Missing("a kernel") if args else self
        raise ModuleNotFoundError(f"{self._name} needs Triton, which is not installed", name="triton")

    def __getitem__(self, grid: Any) -> Any:
        raise ModuleNotFoundError(f"{self._name} needs Triton, which is not installed", name="triton")


def _found(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return Missing(name)


triton, tl = _found("triton"), _found("triton.language")
