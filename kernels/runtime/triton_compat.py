"""Triton and libdevice for the kernels, with substitutes where Triton is missing or interprets kernels on a CPU.

Triton is built for Linux alone. On other systems no kernel is launched, since tensors are on a CPU, but modules of
kernels must be importable for their references. Importing Triton takes as long as all of subtensors, so launchers
import the modules that import this one when they are called.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import torch


class Missing:
    """A name of Triton where it is not installed: it has attributes and decorates kernels, and refuses to run."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self._name}.{name}")

    def __bool__(self) -> bool:
        return False

    def __call__(self, *args: object, **options: object) -> Missing:
        """Replace what decorates kernels or marks constants; raise ModuleNotFoundError for anything else."""
        if self._name in ("triton.jit", "triton.language.constexpr"):
            return Missing("a kernel") if args else self
        raise ModuleNotFoundError(f"{self._name} needs Triton, which is not installed", name="triton")

    def __getitem__(self, grid: object) -> NoReturn:
        raise ModuleNotFoundError(f"{self._name} needs Triton, which is not installed", name="triton")


def _import_or_missing(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return Missing(name)


triton, tl = _import_or_missing("triton"), _import_or_missing("triton.language")

_UNARY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    name: getattr(torch, name)
    for name in """acos acosh asin asinh atan atanh ceil cos cosh erf erfc erfinv exp exp2 expm1 floor lgamma log
        log10 log1p log2 rsqrt sin sinh tan tanh trunc""".split()
} | {"nearbyint": torch.round}
_BINARY: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    name: getattr(torch, name) for name in "atan2 copysign fmod hypot pow".split()
}


def _interpreted(function: Callable[..., torch.Tensor]) -> Callable[..., object]:
    """Return a function of torch as one of the interpreter's values, which wrap numpy arrays."""

    def call(*args: Any) -> object:
        first = next(a for a in args if isinstance(a, tl.tensor))
        arrays = np.broadcast_arrays(*(a.handle.data if isinstance(a, tl.tensor) else a for a in args))
        tensors = [torch.from_numpy(np.array(a, dtype=first.handle.data.dtype)) for a in arrays]
        result = np.asarray(function(*tensors).numpy(), dtype=first.handle.data.dtype)
        widest = max((a for a in args if isinstance(a, tl.tensor)), key=lambda a: a.numel.value)
        return tl.tensor(type(first.handle)(result, first.handle.dtype), widest.type)

    return call


def _libdevice() -> Any:
    """Return CUDA's math library for kernels, or torch's functions where the interpreter runs them."""
    if triton.knobs.runtime.interpret:
        return SimpleNamespace(**{name: _interpreted(f) for name, f in (_UNARY | _BINARY).items()})
    if triton:
        import triton.language.extra.cuda as cuda

        return cuda.libdevice
    return tl.extra.cuda.libdevice


libdevice = _libdevice()
