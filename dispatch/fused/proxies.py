"""Proxies of one element of a list: tensors with a dtype and a granularity, but no values and no readable shape."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import NoReturn, Protocol

import torch
from torch._ops import OpOverload

from subtensors.dispatch.fused.errors import refuse, refuse_value
from subtensors.dispatch.ops.errors import RuleError
from subtensors.dispatch.ops.tree import Args, Kwargs, PyTree, tree_find
from subtensors.kernels.fused import blockwise
from subtensors.kernels.fused.program import Shape

aten = torch.ops.aten

Shapes = dict[Shape, tuple[int, ...]]
"""A shape for each granularity."""


def _example_shapes(*sizes: int) -> Shapes:
    return {
        Shape.PER_ELEMENT: sizes,
        Shape.PER_TENSOR: (),
        Shape.PER_BLOCK: (blockwise.block_count(math.prod(sizes)),),
    }


# Arbitrary shapes; odd ones are easy to recognize in an error message.
EXAMPLE_SHAPES = _example_shapes(3, 5)
OTHER_SHAPES = _example_shapes(7)


class Tracer(Protocol):
    """The part of a trace that its proxies use."""

    device: torch.device
    shapes: Shapes
    """The shapes of the proxies."""
    depth: int
    """The depth of the tracer's own code on the stack, which may read shapes."""
    runs_python: bool
    """True once the math called a function of torch that is written in Python, and may read shapes unseen."""


@dataclass
class ProxySlot:
    """The number of the value that a tensor holds now; aliases share it, so that all of them see an in-place write."""

    value: int
    may_be_copied: bool = False
    """True once `contiguous()` was called: what an in-place write then changes depends on the strides of an element."""


class ProxyTensor(torch.Tensor):
    """A proxy of one element of a list."""

    slot: ProxySlot
    value_shape: Shape
    tracer: Tracer

    @staticmethod
    def __new__(cls, slot: ProxySlot, dtype: torch.dtype, value_shape: Shape, tracer: Tracer) -> ProxyTensor:
        """A proxy of the value in `slot`."""
        self: ProxyTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, tracer.shapes[value_shape], dtype=dtype, device=tracer.device
        )
        self.slot, self.value_shape, self.tracer = slot, value_shape, tracer
        return self

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., PyTree],
        types: Sequence[type],
        args: Sequence[PyTree] = (),
        kwargs: Kwargs | None = None,
    ) -> PyTree:
        """Refuse to read shapes; let `torch.where` take dynamic scalars."""
        if func in _SHAPE_READERS and isinstance(args[0], ProxyTensor) and args[0].tracer.depth == 0:
            refuse(
                f"it reads the shape of a tensor ({_SHAPE_READERS[func]}), and elements differ in shape",
                "use a reduction such as x.mean(), or pass the number as an argument",
            )
        if func in _VALUE_READERS:
            refuse_value(f"{func.__name__}()")
        if func in _OWN_READERS and args[0].tracer.depth == 0:
            _refuse_attribute(_OWN_READERS[func])
        if getattr(func, "__name__", "") == "__set__":
            refuse("it sets an attribute of a tensor", "write values, with x.copy_(y); set attributes outside")
        if func in _LIKE_ANOTHER and all(
            isinstance(a, ProxyTensor) and a.value_shape is args[0].value_shape for a in args
        ):
            return aten.alias.default(args[0])
        if isinstance(func, FunctionType) and func.__module__ != torch.Tensor.__module__:
            for proxy in tree_find(ProxyTensor, (args, kwargs)):
                proxy.tracer.runs_python = True
        if func is torch.Tensor.contiguous and args[0].value_shape is Shape.PER_ELEMENT:
            args[0].slot.may_be_copied |= args[0].tracer.depth == 0
        if func is torch.where and len(args) == 3:
            args = [args[0], _wrapped(args[1], args[2]), _wrapped(args[2], args[1])]
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: OpOverload, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> NoReturn:
        """Raise RuleError: no op may reach a proxy outside its trace."""
        raise RuleError(f"{func}: a tensor of fused math outlived the call that made it")

    def __getattr__(self, name: str) -> NoReturn:
        """Refuse an attribute that elements may have; raise AttributeError for what torch itself asks for."""
        if name.startswith("_") and name != "_is_param":  # isinstance(x, nn.Parameter) reads that
            raise AttributeError(f"a tensor of fused math has no attribute {name}")
        _refuse_attribute(name)

    def __repr__(self) -> str:  # type: ignore[override]
        """Its number and dtype."""
        return f"ProxyTensor(v{self.slot.value}, {self.dtype}, {self.value_shape.value})"


EXAMPLE_NUMBERS: dict[type, float] = {torch.SymFloat: 0.5, torch.SymInt: 2}
"""A plain number for each type of dynamic scalar, for where only the type matters."""


def _wrapped(value: PyTree, other: PyTree) -> PyTree:
    """A dynamic scalar as the tensor that `torch.where` makes of a plain number beside `other`."""
    if type(value) not in EXAMPLE_NUMBERS:
        return value
    example: PyTree = EXAMPLE_NUMBERS.get(type(other), other)
    dtype = torch.result_type(example, EXAMPLE_NUMBERS[type(value)])
    return torch.scalar_tensor(value, dtype=dtype)


def _refuse_attribute(name: str) -> NoReturn:
    refuse(
        f"it reads the attribute {name} of a tensor, which each element has its own of",
        "pass gradients as a list of their own, x.grad, and others as arguments",
    )


# Views that take the shape of another tensor.
_LIKE_ANOTHER = frozenset({torch.Tensor.view_as, torch.Tensor.expand_as, torch.Tensor.reshape_as})

_VALUE_READERS = frozenset({torch.Tensor.tolist, torch.Tensor.numpy})

_OWN_READERS: dict[object, str] = {
    torch.Tensor.data_ptr: "data_ptr()",
    **{getattr(torch.Tensor, n).__get__: n for n in ("grad", "grad_fn", "is_leaf", "requires_grad", "_version")},
}

_SHAPE_READERS: dict[object, str] = {
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
