"""Ops that would move a tensor or let it grow, and what to do instead."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

COPY = "write into it with copy_(), or make another one with st.static(t)"
_SHAPE = "give it the shape of the result"
_VIEW = "take a view of it instead"

_INSTEAD = {"set_": COPY, "resize_": COPY, "resize_as_": COPY, "as_strided_": _VIEW, "addbmm_": _SHAPE}
"""In-place ops; the last one is the only op that broadcasts the tensor itself."""

MOVERS: dict[Any, tuple[str, str]] = {
    Tensor.data.__set__: (".data =", COPY),  # type: ignore[attr-defined]
    Tensor.share_memory_: ("share_memory_", "share a clone() of it"),
}
"""Each op's name and what to do instead. Torch dispatches methods, functions, overloads and overload packets."""

for _name, _instead in _INSTEAD.items():
    _packet = getattr(torch.ops.aten, _name)
    _overloads = [getattr(_packet, overload) for overload in _packet.overloads()]
    for _op in (getattr(Tensor, _name), getattr(torch, _name, _packet), _packet, *_overloads):
        MOVERS[_op] = _name, _instead


def stays(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call of a mover leaves the tensor in place, as torch's in `module.to(its own device)` do."""
    tensor, rest = args[0], args[1:]
    if func == Tensor.data.__set__:  # type: ignore[attr-defined]
        return same_place(tensor, rest[0])
    if MOVERS[func][0] == "resize_":
        size = rest[0] if rest and not isinstance(rest[0], int) else rest
        return tuple(kwargs.get("size", size)) == tuple(tensor.shape)
    if MOVERS[func][0] == "addbmm_":
        batches = (*rest, *(kwargs[name] for name in ("batch1", "batch2") if name in kwargs))
        return tuple(tensor.shape) == (batches[0].shape[1], batches[1].shape[2])
    if MOVERS[func][0] == "resize_as_":
        return bool((rest[0] if rest else kwargs["the_template"]).shape == tensor.shape)
    return bool(func == Tensor.share_memory_ and tensor.is_cuda)


def same_place(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same memory, layout, dtype and device."""
    return (a.data_ptr(), a.shape, a.stride(), a.dtype, a.device) == (
        b.data_ptr(),
        b.shape,
        b.stride(),
        b.dtype,
        b.device,
    )
