"""Stand-ins for one element of a list: a dtype and an extent, but no values, and no shape that may be read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch
from torch._ops import OpOverload

from subtensors.dispatch.fused.errors import refuse, refuse_value
from subtensors.dispatch.ops.errors import RuleError
from subtensors.kernels.fused import blockwise
from subtensors.kernels.fused.program import Shape

aten = torch.ops.aten

# Any shape would do; an odd one shows up in an error that should have been caught here.
SHAPES = {Shape.PER_ELEMENT: (3, 5), Shape.PER_TENSOR: (), Shape.PER_BLOCK: (blockwise.block_count(3 * 5),)}


class Tracer(Protocol):
    """The part of a trace that its stand-ins use."""

    device: torch.device
    depth: int
    """The depth of the tracer's own code on the stack, which may read shapes."""


@dataclass
class ProxySlot:
    """The number of the value a tensor holds now; aliases share it, so an in-place write reaches them all."""

    value: int


class ProxyTensor(torch.Tensor):
    """A stand-in for one element of a list."""

    cell: ProxySlot
    extent: Shape
    tracer: Tracer

    @staticmethod
    def __new__(cls, cell: ProxySlot, dtype: torch.dtype, extent: Shape, tracer: Tracer) -> ProxyTensor:
        """A stand-in for what `cell` holds."""
        self: ProxyTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, SHAPES[extent], dtype=dtype, device=tracer.device
        )
        self.cell, self.extent, self.tracer = cell, extent, tracer
        return self

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Refuse to speak of shapes; let `torch.where` take live numbers."""
        if func in _SHAPE_READERS and isinstance(args[0], ProxyTensor) and args[0].tracer.depth == 0:
            refuse(
                f"it reads the shape of a tensor ({_SHAPE_READERS[func]}), and elements differ in shape",
                "use a reduction such as x.mean(), or pass the number as an argument",
            )
        if func in _VALUE_READERS:
            refuse_value(f"{func.__name__}()")
        if func in _LIKE_ANOTHER and all(isinstance(a, ProxyTensor) and a.extent is args[0].extent for a in args):
            return aten.alias.default(args[0])
        if func is torch.where and len(args) == 3:
            args = [args[0], _wrapped(args[1], args[2]), _wrapped(args[2], args[1])]
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        """Raise RuleError: no op may reach a stand-in outside its trace."""
        raise RuleError(f"{func}: a tensor of fused maths outlived the call that made it")

    def __repr__(self) -> str:  # type: ignore[override]
        """Its number and dtype."""
        return f"Traced(v{self.cell.value}, {self.dtype}, {self.extent.value})"


EXAMPLES: dict[type, float] = {torch.SymFloat: 0.5, torch.SymInt: 2}
"""A plain number for each type of live number, for where only the type matters."""


def _wrapped(value: Any, other: Any) -> Any:
    """A live number as the tensor `torch.where` makes of a plain one beside `other`."""
    if type(value) not in EXAMPLES:
        return value
    dtype = torch.result_type(EXAMPLES.get(type(other), other), EXAMPLES[type(value)])
    return torch.scalar_tensor(value, dtype=dtype)


# Views whose new shape is that of another tensor.
_LIKE_ANOTHER = frozenset({torch.Tensor.view_as, torch.Tensor.expand_as, torch.Tensor.reshape_as})

_VALUE_READERS = frozenset({torch.Tensor.tolist, torch.Tensor.numpy})

_SHAPE_READERS: dict[Any, str] = {
    torch.Tensor.shape.__get__: "shape",  # type: ignore[attr-defined]
    torch.Tensor.ndim.__get__: "ndim",  # type: ignore[attr-defined]
    torch.Tensor.nbytes.__get__: "nbytes",  # type: ignore[attr-defined]
    torch.Tensor.storage_offset: "storage_offset()",
    torch.Tensor.is_contiguous: "is_contiguous()",
    torch.Tensor.__len__: "len()",
    torch.Tensor.__iter__: "iter()",
    torch.numel: "numel()",
    **{getattr(torch.Tensor, name): f"{name}()" for name in ("size", "numel", "nelement", "dim", "stride")},
}
