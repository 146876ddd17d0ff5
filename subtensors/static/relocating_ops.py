"""Ops that give a tensor other memory, and the advice in the error that refuses each."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket

from subtensors.dispatch.graphs.guards import tensor_properties
from subtensors.dispatch.ops.tree import Args, Kwargs

COPY = "write into it with copy_(), or make another one with st.static(t)"
_SHAPE = "give it the shape of the result"
_VIEW = "take a view of it instead"

_ADVICE = {"set_": COPY, "resize_": COPY, "resize_as_": COPY, "as_strided_": _VIEW, "addbmm_": _SHAPE}
"""In-place ops, each with its advice; addbmm_ is the only op that broadcasts the tensor itself."""

RELOCATING_OPS: dict[Callable[..., object] | OpOverload | OpOverloadPacket, tuple[str, str]] = {
    Tensor.data.__set__: (".data =", COPY),  # type: ignore[attr-defined]
    Tensor.share_memory_: ("share_memory_", "share a clone() of it"),
}
"""Each op's name and advice. Torch dispatches methods, functions, overloads and overload packets."""

for _name, _advice in _ADVICE.items():
    _packet = getattr(torch.ops.aten, _name)
    _overloads = [getattr(_packet, overload) for overload in _packet.overloads()]
    for _op in (getattr(Tensor, _name), getattr(torch, _name, _packet), _packet, *_overloads):
        RELOCATING_OPS[_op] = _name, _advice


def keeps_address(func: Callable[..., object], args: Args, kwargs: Kwargs) -> bool:
    """Return whether a call of a relocating op leaves the tensor in place, as `module.to(its own device)` does."""
    tensor, rest = args[0], args[1:]
    if func == Tensor.data.__set__:  # type: ignore[attr-defined]
        return same_memory(tensor, rest[0])
    if RELOCATING_OPS[func][0] == "resize_":
        size: Args = rest[0] if rest and not isinstance(rest[0], int) else rest
        return tuple(kwargs.get("size", size)) == tuple(tensor.shape)
    if RELOCATING_OPS[func][0] == "addbmm_":
        batches = (*rest, *(kwargs[name] for name in ("batch1", "batch2") if name in kwargs))
        return tuple(tensor.shape) == (batches[0].shape[1], batches[1].shape[2])
    if RELOCATING_OPS[func][0] == "resize_as_":
        return bool((rest[0] if rest else kwargs["the_template"]).shape == tensor.shape)
    return bool(func == Tensor.share_memory_ and tensor.is_cuda)


def same_memory(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same memory, layout, dtype and device."""
    return tensor_properties(a) == tensor_properties(b)
