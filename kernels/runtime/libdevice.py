"""CUDA's maths library for the kernels, and its stand-in where the Triton interpreter runs them on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from subtensors.kernels.runtime.triton_compat import tl, triton

_UNARY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    name: getattr(torch, name)
    for name in """acos acosh asin asinh atan atanh ceil cos cosh erf erfc erfinv exp exp2 expm1 floor lgamma log
        log10 log1p log2 rsqrt sin sinh tan tanh trunc""".split()
} | {"nearbyint": torch.round}
_BINARY: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    name: getattr(torch, name) for name in "atan2 copysign fmod hypot pow".split()
}


def _interpreted(function: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """The same function on the interpreter's values, which wrap numpy arrays."""

    def call(*args: Any) -> Any:
        first = next(a for a in args if isinstance(a, tl.tensor))
        arrays = np.broadcast_arrays(*(a.handle.data if isinstance(a, tl.tensor) else a for a in args))
        tensors = [torch.from_numpy(np.array(a, dtype=first.handle.data.dtype)) for a in arrays]
        result = np.asarray(function(*tensors).numpy(), dtype=first.handle.data.dtype)
        widest = max((a for a in args if isinstance(a, tl.tensor)), key=lambda a: a.numel.value)
        return tl.tensor(type(first.handle)(result, first.handle.dtype), widest.type)

    return call


if triton.knobs.runtime.interpret:
    libdevice: Any = SimpleNamespace(**{name: _interpreted(f) for name, f in (_UNARY | _BINARY).items()})
elif triton:
    import triton.language.extra.cuda as cuda

    libdevice = cuda.libdevice
else:
    libdevice = tl.extra.cuda.libdevice
