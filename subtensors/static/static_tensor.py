"""`StaticAddressTensor`: values at an address that holds for their whole life.

The tensor is an alias of memory that torch cannot resize, marked so that the compiler copies nothing of it into a
CUDA graph. It has no rule for any op: ops that read it, or write into it, see an ordinary tensor. Only ops that would
move it are caught, in `__torch_function__`, and refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from multiprocessing.reduction import ForkingPickler
from typing import Any, NoReturn, TypeVar, cast

import optree
import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket

from subtensors.dispatch.graphs.released_tensors import ReleasedTensor, refuse_released
from subtensors.dispatch.ops.errors import AddressError
from subtensors.dispatch.ops.plain_types import PLAIN_TYPES, read_as_plain
from subtensors.dispatch.torch_internals import dynamo, memory, ops
from subtensors.kernels.memory.from_address import tensor_from_address
from subtensors.static.relocating_ops import COPY, MOVERS, same_place, stays

_T = TypeVar("_T", bound=Tensor)

# What gives the values as another tensor of the same role: a new address, and the same type.
_CONVERSIONS = frozenset(
    getattr(Tensor, name)
    for name in """
    to cpu cuda type type_as double float half bfloat16 int long short char byte bool cfloat cdouble
    """.split()
)


class _ReadAsPlain(Tensor):
    """A tensor whose every op runs as on a plain tensor, and returns plain tensors."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


class StaticAddressTensor(_ReadAsPlain):
    """A tensor whose address holds for its whole life; reads and writes work as on any tensor.

    `torch.compile(mode="reduce-overhead")` copies none of it into its CUDA graphs. Results of ops are plain tensors;
    `detach()` and `nn.Parameter(...)` give the same memory and the same type, and `to()`, `deepcopy`, pickling and
    `torch.load` another one of the same type, with an address of its own.

    Args:
        t: a strided tensor on a CPU or a CUDA device, of any shape and dtype; its values are copied once. A
            StaticAddressTensor is returned as it is. The result is a leaf; it requires grad, and is a parameter,
            where `t` is.

    Raises:
        TypeError: `t` is no such tensor.
        AddressError: a CUDA graph is being captured, whose memory others reuse.

    Example:
        >>> s = StaticAddressTensor(torch.arange(3.0))
        >>> at = s.data_ptr()
        >>> s.mul_(2).add_(1)
        StaticAddressTensor([1., 3., 5.])
        >>> s.data_ptr() == at
        True
        >>> s + 1
        tensor([2., 4., 6.])
        >>> s.resize_(1000)
        Traceback (most recent call last):
        ...
        subtensors.AddressError: resize_ would move a StaticAddressTensor of shape (3,): write into ...
    """

    @staticmethod
    def __new__(cls, t: Tensor) -> StaticAddressTensor:
        """Return the tensor at an address of its own."""
        return static(t)

    def __init__(self, t: Tensor) -> None:
        pass

    @classmethod
    def __torch_function__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if len(types) > 1 and (others := [kind for kind in types if not _is_plain(kind)]):
            return _among_others(func, types, args, kwargs or {}, others)
        if func in MOVERS and isinstance(args[0], StaticAddressTensor) and not stays(func, args, kwargs or {}):
            _refuse(args[0], *MOVERS[func])
        if kwargs and not torch.compiler.is_compiling() and (outs := _outs_of(func, kwargs)):
            return _write_out(func, types, args, kwargs, outs)
        result = super().__torch_function__(func, types, args, kwargs or {})
        if func in _CONVERSIONS and isinstance(args[0], StaticAddressTensor) and _is_new(result, args[0]):
            return result if torch.compiler.is_compiling() else _Placed.apply(result)  # type: ignore[no-untyped-call]
        return result

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """The same memory as a plain tensor that autograd does not track."""
        with torch._C.DisableTorchFunctionSubclass():
            # Compiled code has no words for the attribute of another class.
            return Tensor.detach(self) if torch.compiler.is_compiling() else super().data

    @data.setter
    def data(self, value: Tensor) -> None:
        if not same_place(self, value):
            _refuse(self, ".data =", COPY)

    def detach(self) -> Tensor:
        """Return the same memory as another StaticAddressTensor that autograd does not track."""
        if torch.compiler.is_compiling():
            return super().detach()
        return of_memory(_alias(self))

    def set_(self, *args: Any, **kwargs: Any) -> NoReturn:  # type: ignore[override]
        """Raise AddressError: it would move the tensor."""
        _refuse(self, "set_", COPY)  # torch asks no __torch_function__ about this one

    def _use_count(self) -> NoReturn:  # type: ignore[override]
        # torch.utils.swap_tensors asks this of both tensors before it changes anything.
        _refuse(self, "torch.utils.swap_tensors", COPY)

    def __format__(self, spec: str) -> str:
        return format(self.data, spec) if spec or self.dim() == 0 else str(self)  # torch asks for its own class

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            memo[id(self)] = _rebuild(*_parts(self))
        return cast(Tensor, memo[id(self)])

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild, _parts(self)


def static(t: Tensor) -> StaticAddressTensor:
    """The values of `t` at an address that never moves.

    Args:
        t: a strided tensor on a CPU or a CUDA device; a StaticAddressTensor is returned as it is.

    Returns:
        A StaticAddressTensor: a leaf, which requires grad, and is a parameter, where `t` is.

    Raises:
        TypeError: `t` is no such tensor.
        AddressError: a CUDA graph is being captured.

    Example:
        >>> import subtensors as st
        >>> layer = torch.nn.Linear(2, 3)
        >>> layer.weight = st.static(layer.weight)
        >>> type(layer.weight).__name__, layer.weight.requires_grad, layer(torch.ones(1, 2)).shape
        ('StaticAddressTensor', True, torch.Size([1, 3]))
    """
    if isinstance(t, StaticAddressTensor):
        return t
    refuse_other(t)
    with torch.no_grad():
        layout = torch.empty_like(t, device="meta")
        raw = new_memory(layout.numel() * layout.element_size(), t.device, t.is_pinned())
        out = of_memory(shaped(raw, layout))
        out.copy_(t)
    return with_role(out, t.requires_grad and t.is_leaf, isinstance(t, torch.nn.Parameter))


def refuse_other(t: object) -> None:
    """Raise TypeError unless `t` is a plain strided tensor on a CPU or CUDA device."""
    if not isinstance(t, Tensor):
        raise TypeError(f"st.static takes a tensor; got {type(t).__name__}")
    if isinstance(t, ReleasedTensor):
        refuse_released("st.static")
    if type(t) not in PLAIN_TYPES or t.layout != torch.strided:
        raise TypeError(f"st.static takes a strided torch.Tensor; got a {t.layout} {type(t).__name__}")
    if t.is_quantized:
        raise TypeError(f"st.static takes plain numbers; got {t.dtype}: give it t.int_repr()")
    if t.device.type not in ("cpu", "cuda"):
        raise TypeError(f"st.static takes a tensor on a CPU or a CUDA device; got one on {t.device}")


def new_memory(size: int, device: torch.device, pinned: bool = False) -> Tensor:
    """Memory of its own that torch cannot resize.

    Args:
        size: bytes.
        device: CPU or CUDA.
        pinned: page-locked, for a CPU.

    Returns:
        (size,) uint8, not initialized.

    Raises:
        AddressError: a CUDA graph is being captured.
    """
    refuse_capture(device)
    raw = torch.empty(size, dtype=torch.uint8, device=device, pin_memory=pinned)
    return tensor_from_address(raw.data_ptr(), size, raw.device, raw)


def refuse_capture(device: torch.device) -> None:
    """Raise AddressError while a CUDA graph is being captured."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise AddressError(
            "a static tensor can't be made while a CUDA graph is captured: its memory would be the graph's, which "
            "others use again, and its values would be written at every replay; make it before the capture"
        )


def shaped(raw: Tensor, layout: Tensor) -> Tensor:
    """Bytes as a tensor of the dtype, shape and strides of `layout`, a dense tensor."""
    return raw.view(layout.dtype).as_strided(layout.shape, layout.stride())


def of_memory(t: Tensor) -> StaticAddressTensor:
    """A StaticAddressTensor that is an alias of `t`, whose memory must never move."""
    with torch._C.DisableTorchFunctionSubclass():
        out = Tensor._make_subclass(StaticAddressTensor, t)
    dynamo.mark_static_address(out)
    ops.take_foreach_paths(StaticAddressTensor)
    return out


def in_place(t: Tensor) -> Tensor:
    """Return a static tensor over a tensor's memory, which it keeps alive; or `t` itself if that is impossible.

    Args:
        t: returned itself if it is of another type, static ones included, has gaps, or is a CUDA graph's.
    """
    if type(t) not in (Tensor, torch.nn.Parameter) or t.layout != torch.strided or not memory.is_dense(t):
        return t
    if t.device.type not in ("cpu", "cuda") or (t.is_cuda and torch.cuda.is_current_stream_capturing()):
        return t
    return of_memory(shaped(tensor_from_address(t.data_ptr(), t.nbytes, t.device, t.detach()), t))


def with_role(t: _T, requires_grad: bool, is_parameter: bool) -> _T:
    """The tensor as a leaf that requires grad, or a parameter, or neither."""
    if is_parameter:
        return torch.nn.Parameter(t, requires_grad)  # type: ignore[return-value]
    return t.requires_grad_(requires_grad)  # type: ignore[return-value]


def _is_plain(kind: type) -> bool:
    return kind in PLAIN_TYPES or issubclass(kind, StaticAddressTensor)


def _among_others(
    func: Callable[..., Any], types: Any, args: tuple[Any, ...], kwargs: dict[str, Any], others: list[Any]
) -> Any:
    """Call another type's `__torch_function__`; a type that takes no static tensors gets plain views of them."""
    if torch.compiler.is_compiling():
        return NotImplemented
    for kind in others:
        result = kind.__torch_function__(func, types, args, kwargs)
        if result is not NotImplemented:
            return result
    given: Any = (args, kwargs)
    plain_args, plain_kwargs = optree.tree_map(_plain_view, given, none_is_leaf=True)
    return func(*plain_args, **plain_kwargs)


def _plain_view(value: Any) -> Any:
    """Return a plain view of a static tensor, which gradients flow through; other values unchanged."""
    if not isinstance(value, StaticAddressTensor):
        return value
    with torch._C.DisableTorchFunctionSubclass():
        return Tensor.view_as(value, value)


def _is_new(result: Any, of: Tensor) -> bool:
    return isinstance(result, Tensor) and result is not of  # a name, of type()


def _refuse(tensor: Tensor, op: str, instead: str) -> NoReturn:
    raise AddressError(f"{op} would move a StaticAddressTensor of shape {tuple(tensor.shape)}: {instead}")


def _outs_of(func: Callable[..., Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The tensors that a call writes its results into, by argument name; torch resizes them."""
    names = _names_of_outs(func) if isinstance(func, OpOverload | OpOverloadPacket) else ("out",)
    return {name: kwargs[name] for name in names if kwargs.get(name) is not None}


@cache
def _names_of_outs(op: OpOverload | OpOverloadPacket) -> tuple[str, ...]:
    overloads = [op] if isinstance(op, OpOverload) else [getattr(op, name) for name in op.overloads()]
    arguments = [a for overload in overloads for a in ops.schema_of(overload).arguments]
    return tuple(dict.fromkeys(a.name for a in arguments if a.is_out))


def _write_out(
    func: Callable[..., Any], types: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outs: dict[str, Any]
) -> Any:
    """Run a call with `out=` on aliases, so that torch resizes those if it must, and the tensors stay."""
    given = [t for out in outs.values() for t in (out if isinstance(out, tuple | list) else [out])]
    fixed = [(t, _alias(t)) for t in given if isinstance(t, StaticAddressTensor) and not t.requires_grad]
    alias_of = {id(t): alias for t, alias in fixed}
    named = {id(alias): t for t, alias in fixed}

    def exchanged(value: Any, others: Mapping[int, Tensor]) -> Any:
        if isinstance(value, tuple | list):
            return type(value)([others.get(id(t), t) for t in value])
        return others.get(id(value), value)

    error: Exception | None = None
    result: Any = None
    try:
        aliases = {name: exchanged(out, alias_of) for name, out in outs.items()}
        result = _ReadAsPlain.__torch_function__(func, types, args, kwargs | aliases)  # type: ignore[call-arg, arg-type]
    except (RuntimeError, SystemError, Warning) as caught:  # SystemError: where an op warned and then raised
        error = caught
    for t, alias in fixed:
        if alias.shape != t.shape:
            name = getattr(func, "__name__", str(func))
            _refuse(t, f"{name}({', '.join(outs)}=...) of shape {tuple(alias.shape)}", COPY)
    if error is not None:
        raise error
    return exchanged(result, named)


def _alias(t: Tensor) -> Tensor:
    """The same memory as a plain tensor that shares the version counter."""
    with torch._C.DisableTorchFunctionSubclass():
        return Tensor.detach(t)


def _parts(t: StaticAddressTensor) -> tuple[Tensor, bool, bool]:
    return t.data, t.requires_grad, isinstance(t, torch.nn.Parameter)


def _rebuild(values: Tensor, requires_grad: bool, is_parameter: bool) -> Tensor:
    """Another StaticAddressTensor of these values; a plain tensor where they have no address, as on the meta device."""
    has_address = values.device.type in ("cpu", "cuda") and type(values) in PLAIN_TYPES
    return with_role(static(values) if has_address else values, requires_grad, is_parameter)


class _Placed(torch.autograd.Function):
    """A new tensor's memory as a static one, unless a CUDA graph owns it; the gradient passes."""

    @staticmethod
    def forward(ctx: Any, t: Tensor) -> Tensor:  # type: ignore[override]
        return in_place(t.detach())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


torch.serialization.add_safe_globals([_rebuild])
read_as_plain(StaticAddressTensor, f".data = would move a StaticAddressTensor: {COPY}")
dynamo.compile_methods_only_inlined(StaticAddressTensor)
dynamo.call_eagerly(static, "a static tensor is made outside of graphs, which would make it at each replay")
# Sharing memory between processes moves it, so that a copy is what is shared.
ForkingPickler.register(StaticAddressTensor, lambda t: (_rebuild, (t.data.clone(), *_parts(t)[1:])))
