"""`StaticAddressTensor`: a tensor whose address never changes.

The tensor is an alias of memory that torch cannot resize, marked so that the compiler does not copy it into a CUDA
graph's inputs. It has no rule for any op: ops that read it or write to it treat it as an ordinary tensor. Only ops that
would move it are refused, in `__torch_function__`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cache
from multiprocessing.reduction import ForkingPickler
from typing import NoReturn, SupportsIndex, TypeVar

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.autograd.function import FunctionCtx

from subtensors.dispatch.graphs.guards import tensor_properties
from subtensors.dispatch.graphs.released_tensors import ReleasedTensor, refuse_released
from subtensors.dispatch.ops.errors import AddressError
from subtensors.dispatch.ops.plain_types import PLAIN_TYPES, detached, read_as_plain
from subtensors.dispatch.ops.tree import Args, Kwargs, PyTree, tree_find, tree_map_only
from subtensors.dispatch.torch_internals import dynamo, ops
from subtensors.dispatch.torch_internals.autograd import BACKWARDS, run_backward
from subtensors.kernels.memory.from_address import tensor_from_address
from subtensors.kernels.runtime.custom_ops import is_dense

_T = TypeVar("_T", bound=Tensor)

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
        return tensor_properties(tensor) == tensor_properties(rest[0])
    if RELOCATING_OPS[func][0] == "resize_":
        size: Args = rest[0] if rest and not isinstance(rest[0], int) else rest
        return tuple(kwargs.get("size", size)) == tuple(tensor.shape)
    if RELOCATING_OPS[func][0] == "addbmm_":
        batches = (*rest, *(kwargs[name] for name in ("batch1", "batch2") if name in kwargs))
        return tuple(tensor.shape) == (batches[0].shape[1], batches[1].shape[2])
    if RELOCATING_OPS[func][0] == "resize_as_":
        return bool((rest[0] if rest else kwargs["the_template"]).shape == tensor.shape)
    return bool(func == Tensor.share_memory_ and tensor.is_cuda)


# These return a new tensor with the same values, so the result is static too, at an address of its own.
_CONVERSIONS = frozenset(
    getattr(Tensor, name)
    for name in """
    to cpu cuda type type_as double float half bfloat16 int long short char byte bool cfloat cdouble
    """.split()
)


class _ReadAsPlain(Tensor):
    """A tensor whose ops run as on a plain tensor, and return plain tensors."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


class StaticAddressTensor(_ReadAsPlain):
    """A tensor whose address never changes; reads and writes work as on any tensor.

    `torch.compile(mode="reduce-overhead")` does not copy it into its CUDA graphs' inputs. Results of ops are plain
    tensors; `detach()` and `nn.Parameter(...)` return the same memory with the same type, and `to()`, `deepcopy`,
    pickling and `torch.load` a new tensor of the same type, with an address of its own.

    Args:
        t: a strided tensor on a CPU or a CUDA device, of any shape and dtype; its values are copied once. A
            StaticAddressTensor is returned unchanged. The result is a leaf, which requires grad if `t` does, and is a
            parameter if `t` is one.

    Raises:
        TypeError: `t` is another tensor, or none.
        AddressError: a CUDA graph is being captured, whose memory other graphs reuse.

    Example:
        >>> s = StaticAddressTensor(torch.arange(3.0))
        >>> address = s.data_ptr()
        >>> s.mul_(2).add_(1)
        StaticAddressTensor([1., 3., 5.])
        >>> s.data_ptr() == address
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
        """Return `static(t)`."""
        return static(t)

    def __init__(self, t: Tensor) -> None:
        pass

    @classmethod
    def __torch_function__(  # type: ignore[override]
        cls, func: Callable[..., PyTree], types: Collection[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> PyTree:
        if len(types) > 1 and (other_types := [kind for kind in types if not _is_plain(kind)]):
            return _call_other_type(func, types, args, kwargs or {}, other_types)
        if (
            func in RELOCATING_OPS
            and isinstance(args[0], StaticAddressTensor)
            and not keeps_address(func, args, kwargs or {})
        ):
            _refuse(args[0], *RELOCATING_OPS[func])
        if func in BACKWARDS:
            return run_backward(func, args, kwargs or {})
        if kwargs and not torch.compiler.is_compiling() and (outs := _out_arguments(func, kwargs)):
            return _write_out(func, types, args, kwargs, outs)
        result = super().__torch_function__(func, types, args, kwargs or {})
        if func in _CONVERSIONS and isinstance(args[0], StaticAddressTensor) and _is_new_tensor(result, args[0]):
            return result if torch.compiler.is_compiling() else _ToStatic.apply(result)  # type: ignore[no-untyped-call]
        return result

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """The same memory as a plain tensor that autograd does not track."""
        with torch._C.DisableTorchFunctionSubclass():
            return super().data

    @data.setter
    def data(self, value: Tensor) -> None:
        if tensor_properties(self) != tensor_properties(value):
            _refuse(self, ".data =", COPY)

    def detach(self) -> Tensor:
        """Return the same memory as another StaticAddressTensor that autograd does not track."""
        if torch.compiler.is_compiling():
            return super().detach()
        return static_alias(detached(self))

    def set_(self, *args: object, **kwargs: object) -> NoReturn:  # type: ignore[override]
        """Raise AddressError: it would move the tensor."""
        _refuse(self, "set_", COPY)  # torch does not call __torch_function__ for it

    def _use_count(self) -> NoReturn:  # type: ignore[override]
        # torch.utils.swap_tensors calls this for both tensors before it changes anything.
        _refuse(self, "torch.utils.swap_tensors", COPY)

    def __format__(self, spec: str) -> str:
        return format(self.data, spec) if spec or self.dim() == 0 else str(self)  # torch accepts its own class only

    def __deepcopy__(self, memo: dict[int, Tensor]) -> Tensor:
        if id(self) not in memo:
            memo[id(self)] = _rebuild(*_state(self))
        return memo[id(self)]

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Callable[..., Tensor], tuple[Tensor, bool, bool]]:
        return _rebuild, _state(self)


def static(t: Tensor) -> StaticAddressTensor:
    """Return a copy of `t` whose address never changes.

    Args:
        t: a strided tensor on a CPU or a CUDA device; a StaticAddressTensor is returned unchanged.

    Returns:
        A StaticAddressTensor: a leaf, which requires grad if `t` does, and is a parameter if `t` is one.

    Raises:
        TypeError: `t` is another tensor, or none.
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
    check_can_be_static(t)
    with torch.no_grad():
        layout = torch.empty_like(t, device="meta")
        raw = fixed_memory(layout.numel() * layout.element_size(), t.device, t.is_pinned())
        out = static_alias(view_as_layout(raw, layout))
        out.copy_(t)
    return with_role(out, t.requires_grad and t.is_leaf, isinstance(t, torch.nn.Parameter))


def check_can_be_static(t: object) -> None:
    """Raise TypeError unless `t` is a plain strided tensor on a CPU or CUDA device."""
    if not isinstance(t, Tensor):
        raise TypeError(f"st.static takes a tensor; got {type(t).__name__}")
    if isinstance(t, ReleasedTensor):
        refuse_released("st.static")
    if type(t) not in PLAIN_TYPES or t.layout != torch.strided:
        layout = f"{t.layout} " if type(t) in PLAIN_TYPES else ""
        raise TypeError(f"st.static takes a strided torch.Tensor; got a {layout}{type(t).__name__}")
    if t.is_nested:
        raise TypeError("st.static takes a strided torch.Tensor; got a nested one")
    if t.is_quantized:
        raise TypeError(f"st.static takes plain numbers; got {t.dtype}: give it t.int_repr()")
    if t.device.type not in ("cpu", "cuda"):
        raise TypeError(f"st.static takes a tensor on a CPU or a CUDA device; got one on {t.device}")


def fixed_memory(size: int, device: torch.device, pinned: bool = False) -> Tensor:
    """Allocate (size,) uint8 that torch cannot resize, unless it is pinned, on a CPU; refused during a capture."""
    refuse_capture(device)
    raw = torch.empty(size, dtype=torch.uint8, device=device, pin_memory=pinned)
    if pinned:  # torch has to know the memory whose copies are under way, to reuse it after them
        return raw
    return tensor_from_address(raw.data_ptr(), size, raw.device, raw)


def refuse_capture(device: torch.device) -> None:
    """Raise AddressError while a CUDA graph is being captured."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise AddressError(
            "a static tensor can't be created while a CUDA graph is captured: its memory would be in the graph's "
            "pool, which other graphs reuse, and each replay would write its values again; create it before the capture"
        )


def view_as_layout(raw: Tensor, layout: Tensor) -> Tensor:
    """Return bytes as a tensor with the dtype, shape and strides of `layout`, a dense tensor."""
    return raw.view(layout.dtype).as_strided(layout.shape, layout.stride())


def static_alias(t: Tensor) -> StaticAddressTensor:
    """Return a StaticAddressTensor that is an alias of `t`, whose memory must never move."""
    with torch._C.DisableTorchFunctionSubclass():
        out = Tensor._make_subclass(StaticAddressTensor, t)
    dynamo.mark_static_address(out)
    ops.enable_foreach_paths(StaticAddressTensor)
    return out


def static_in_place(t: Tensor) -> Tensor:
    """Return a static tensor over the memory of `t`, which it keeps alive; or `t` itself if that is impossible.

    Args:
        t: returned itself if its type is not plain, if it is not dense, or if its memory is that of a CUDA graph.
    """
    if type(t) not in (Tensor, torch.nn.Parameter) or t.layout != torch.strided or not is_dense(t):
        return t
    if t.device.type not in ("cpu", "cuda") or (t.is_cuda and torch.cuda.is_current_stream_capturing()):
        return t
    return static_alias(view_as_layout(tensor_from_address(t.data_ptr(), t.nbytes, t.device, t.detach()), t))


def with_role(t: _T, requires_grad: bool, is_parameter: bool) -> _T:
    """Return the tensor as a leaf that requires grad or not, or as a parameter."""
    if is_parameter:
        return torch.nn.Parameter(t, requires_grad)  # type: ignore[return-value]
    return t.requires_grad_(requires_grad)  # type: ignore[return-value]


def _is_plain(kind: type) -> bool:
    return kind in PLAIN_TYPES or issubclass(kind, StaticAddressTensor)


def _call_other_type(
    func: Callable[..., PyTree], types: Collection[type], args: Args, kwargs: Kwargs, other_types: list[type[Tensor]]
) -> PyTree:
    """Call another type's `__torch_function__`; if it returns NotImplemented, call the function on plain views."""
    for kind in other_types:
        result = kind.__torch_function__(func, types, args, kwargs)
        if result is not NotImplemented:
            return result
    plain_args, plain_kwargs = tree_map_only(StaticAddressTensor, _plain_view, (args, kwargs))
    return func(*plain_args, **plain_kwargs)


def _plain_view(t: Tensor) -> Tensor:
    """Return a plain view of a static tensor, through which gradients flow."""
    with torch._C.DisableTorchFunctionSubclass():
        return Tensor.view_as(t, t)


def _is_new_tensor(result: object, original: Tensor) -> bool:
    return isinstance(result, Tensor) and result is not original  # `t.type()` returns a string


def _refuse(tensor: Tensor, op: str, instead: str) -> NoReturn:
    raise AddressError(f"{op} would move a StaticAddressTensor of shape {tuple(tensor.shape)}: {instead}")


def _out_arguments(func: Callable[..., object], kwargs: Kwargs) -> Kwargs:
    """Return the tensors that a call writes its results to, by argument name; torch resizes them."""
    names = _out_names(func) if isinstance(func, OpOverload | OpOverloadPacket) else ("out",)
    return {name: kwargs[name] for name in names if kwargs.get(name) is not None}


@cache
def _out_names(op: OpOverload | OpOverloadPacket) -> tuple[str, ...]:
    overloads = [op] if isinstance(op, OpOverload) else [getattr(op, name) for name in op.overloads()]
    arguments = [a for overload in overloads for a in ops.schema_of(overload).arguments]
    return tuple(dict.fromkeys(a.name for a in arguments if a.is_out))


def _write_out(
    func: Callable[..., PyTree], types: Collection[type], args: Args, kwargs: Kwargs, outs: Kwargs
) -> PyTree:
    """Run a call with `out=` on aliases, so that torch may resize these, and the static tensors stay."""
    static = [(t, detached(t)) for t in tree_find(StaticAddressTensor, outs) if not t.requires_grad]
    alias_of = {id(t): alias for t, alias in static}
    original_of = {id(alias): t for t, alias in static}
    error: Exception | None = None
    result: PyTree = None
    try:
        aliases = tree_map_only(Tensor, lambda t: alias_of.get(id(t), t), outs)
        result = _ReadAsPlain.__torch_function__(func, types, args, kwargs | aliases)  # type: ignore[call-arg, arg-type]
    except (RuntimeError, SystemError, Warning) as caught:  # SystemError: where an op warned and then raised
        error = caught
    for t, alias in static:
        if alias.shape != t.shape:
            name = getattr(func, "__name__", str(func))
            _refuse(t, f"{name}({', '.join(outs)}=...) of shape {tuple(alias.shape)}", COPY)
    if error is not None:
        raise error
    return tree_map_only(Tensor, lambda t: original_of.get(id(t), t), result)


def _state(t: StaticAddressTensor) -> tuple[Tensor, bool, bool]:
    """Return the arguments of `_rebuild` for a tensor."""
    return t.data, t.requires_grad, isinstance(t, torch.nn.Parameter)


def _rebuild(values: Tensor, requires_grad: bool, is_parameter: bool) -> Tensor:
    """Return a StaticAddressTensor of these values; a plain tensor if they have no address, as on the meta device."""
    has_address = values.device.type in ("cpu", "cuda") and type(values) in PLAIN_TYPES
    return with_role(static(values) if has_address else values, requires_grad, is_parameter)


class _ToStatic(torch.autograd.Function):
    """`static_in_place` of a new tensor, through which its gradient passes unchanged."""

    @staticmethod
    def forward(ctx: FunctionCtx, t: Tensor) -> Tensor:  # type: ignore[override]
        return static_in_place(t.detach())

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


torch.serialization.add_safe_globals([_rebuild])
read_as_plain(StaticAddressTensor, f".data = would move a StaticAddressTensor: {COPY}")
dynamo.call_eagerly(static, "a static tensor is created outside of graphs, which would create it at each replay")
# Sharing memory between processes moves it, so a copy is shared.
ForkingPickler.register(StaticAddressTensor, lambda t: (_rebuild, (t.data.clone(), *_state(t)[1:])))
