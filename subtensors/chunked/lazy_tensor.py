"""Tensors that stand for lazy values, and the references behind them: in-place ops replace a value, views see it.

    LazyTensor  --_ref-->  AliasRef  --value-->  LazyValue       x
                              ^
                              | base, view_call
    LazyTensor  --_ref-->  AliasRef  --value-->  LazyValue       x[0]: recorded again after a write to x

`user_tensor` makes the tensor that a user holds, `inner_tensor` the one that ops beneath autograd see.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from torch._ops import OpOverload

from subtensors.dispatch.chunked.lazy_graph import LazyValue, NeedsMaterialize, rechunked, recording, replicated
from subtensors.dispatch.chunked.record import ChunkedCall, record, with_gradient_of
from subtensors.dispatch.chunked.rules.contractions import linear_layer
from subtensors.dispatch.chunked.shared_pass import Holder, hold
from subtensors.dispatch.ops.errors import RuleError
from subtensors.dispatch.ops.lazy_storage import GRADIENT_HOOKS, Hook, function_around
from subtensors.dispatch.ops.tree import Args, Kwargs, PyTree, tree_find
from subtensors.dispatch.torch_internals.autograd import is_fsdp_identity_node, set_leaf_hooks

aten = torch.ops.aten

Metadata: TypeAlias = tuple[Sequence[int], Sequence[int], torch.dtype, torch.device]
"""Sizes, strides, dtype and device."""


class AliasRef(Holder):
    """A reference to a value that in-place ops replace. A view refers to its base: each sees writes to the other.

    Args:
        value: the value it refers to.
        borrowed: whether it stands for a plain tensor of the caller, whose memory recording must not write.
    """

    __slots__ = ("_value", "base", "base_writes", "borrowed", "view_call", "writes")

    def __init__(self, value: LazyValue, borrowed: bool = False) -> None:
        self._value, self.borrowed = value, borrowed
        self.base: AliasRef | None = None
        self.view_call: tuple[OpOverload, Args, Kwargs, int] | None = None
        self.base_writes = self.writes = 0

    def make_view_of(self, base: AliasRef, op: OpOverload, args: Args, kwargs: Kwargs, index: int) -> AliasRef:
        """Make this a view of `base`, result `index` of op(base, *args, **kwargs), and return it."""
        self.base, self.view_call, self.base_writes = base, (op, args, kwargs, index), base.writes
        return self

    def pending(self) -> LazyValue | None:
        """Return a chunked value of few elements, such as one a row; None where its tensor is known, or for others."""
        value, is_current = self._value, self.base is None or self.base.writes == self.base_writes
        layout = value.layout
        if layout is None or value.node is None or value.tensor is not None or not is_current:
            return None
        return value if value.like.numel() < layout.axis.elements else None

    @property
    def needs_grad(self) -> bool:
        """Return whether the value requires grad."""
        return self.value.needs_grad

    @property
    def is_of_gradients(self) -> bool:
        """Return whether the value, or one that it is a view of, requires grad."""
        return self.needs_grad or (self.base is not None and self.base.is_of_gradients)

    def metadata(self) -> Metadata:
        """Sizes, strides, dtype and device."""
        value = self.value
        like = value.like
        return like.shape, like.stride(), like.dtype, value.device

    @property
    def value(self) -> LazyValue:
        """The current value; a view is recorded again after a write to its base."""
        if self.base is not None and self.view_call is not None:
            value = self.base.value
            if self.base.writes != self.base_writes:
                op, args, kwargs, index = self.view_call
                with recording(value.needs_grad):
                    try:
                        results = record(op, value, *args, **kwargs)
                    except NeedsMaterialize:
                        results = record(op, replicated(value), *args, **kwargs)
                self._value = tree_find(LazyValue, results)[index]
                self.base_writes = self.base.writes
                self.writes += 1
        return self._value

    def write(self, value: LazyValue) -> None:
        """Replace the value, and write it through to the base of a view.

        Raises:
            NeedsMaterialize: a plain tensor would have to be written to.
            RuleError: it is a view that can't be written through.
        """
        if self.borrowed:
            raise NeedsMaterialize("an in-place op", "it writes to a plain tensor")
        if self.base is not None and self.view_call is not None:
            op, args, kwargs, index = self.view_call
            base = self.base.value
            try:
                written = _written_base(op, args, kwargs, index, base, value)
            except NeedsMaterialize:
                if base.layout is None:
                    raise
                # A write that no chunk can do by itself is done on the full base.
                written = _written_base(op, args, kwargs, index, replicated(base), replicated(value))
            if base.layout is not None and written.layout is None:
                written = rechunked(written, base.layout)
            self.base.write(written)
            self.base_writes = self.base.writes
        self._value = value if value.needs_grad else with_gradient_of(self._value, value)
        self.writes += 1


class LazyLinear(AliasRef):
    """A linear layer of rows, recorded only when something other than the cross-entropy kernels reads it.

    Args:
        rows: (N, H), chunked along N.
        weight: (V, H), a constant of the same dtype and device.
        bias: (V,), such a constant, or None.
        grad: whether it is differentiable.
        uncast: the layer that this is a cast of; None for the layer itself.
        dtype: the dtype it is cast to; None for that of the rows.
    """

    __slots__ = ("_recorded", "bias", "dtype", "grad", "rows", "uncast", "weight")

    def __init__(
        self,
        rows: LazyValue,
        weight: LazyValue,
        bias: LazyValue | None,
        grad: bool,
        uncast: LazyLinear | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(rows)
        self.rows, self.weight, self.bias, self.grad = rows, weight, bias, grad
        self.uncast, self.dtype = uncast, rows.like.dtype if dtype is None else dtype
        self._recorded: LazyValue | None = None

    def to(self, dtype: torch.dtype, grad: bool) -> LazyLinear:
        """Return the layer, cast to a dtype."""
        return LazyLinear(self.rows, self.weight, self.bias, self.grad and grad, self, dtype)

    @property
    def is_recorded(self) -> bool:
        """Return whether the layer was recorded as an op, or overwritten."""
        return self._value is not self.rows

    @property
    def value(self) -> LazyValue:
        """The current value, recorded on first use."""
        if not self.is_recorded:
            self._value = self.recorded()
        return self._value

    def recorded(self) -> LazyValue:
        """Return the layer or its cast as a recorded op: its value unless it was overwritten."""
        if self._recorded is None:
            if self.uncast is None:
                self._recorded = linear_layer(self.rows, self.weight, self.bias, self.grad)
            else:
                with recording(self.grad):
                    self._recorded = record(aten._to_copy.default, self.uncast.recorded(), dtype=self.dtype)
        return self._recorded

    @property
    def needs_grad(self) -> bool:
        """Return whether the value requires grad."""
        if self._value is not self.rows:
            return self._value.needs_grad
        has_grad = self.rows.needs_grad or self.weight.needs_grad or (self.bias is not None and self.bias.needs_grad)
        return self.grad and has_grad

    def metadata(self) -> Metadata:
        """Sizes, strides, dtype and device."""
        if self._value is not self.rows:
            return super().metadata()
        rows, classes = self.rows.like.shape[0], self.weight.like.shape[0]
        return (rows, classes), (classes, 1), self.dtype, self.rows.device


def _written_base(op: OpOverload, args: Args, kwargs: Kwargs, index: int, base: LazyValue, new: LazyValue) -> LazyValue:
    """Return the base with `new` written into its view under `op`, and unchanged elsewhere."""
    call = ChunkedCall(op, (base, *args), kwargs)
    packet = op.overloadpacket
    written: PyTree = None
    if packet in (aten.alias, aten.view, aten._unsafe_view, aten.squeeze, aten.unsqueeze, aten.reshape):
        written = new if new.shape == base.shape else record(aten.reshape.default, new, list(base.shape))
    elif packet in (aten.t, aten.transpose, aten._conj_physical, aten.neg):
        written = record(op, new, *args)
    elif packet is aten.permute:
        dims = [d % base.ndim for d in call["dims"]]
        written = record(op, new, [dims.index(d) for d in range(base.ndim)])
    elif packet is aten.select:
        written = record(aten.select_scatter.default, base, new, *args)
    elif packet is aten.slice:
        written = record(aten.slice_scatter.default, base, new, *args)
    elif packet is aten.unbind:
        written = record(aten.select_scatter.default, base, new, call["dim"], index)
    elif packet in (aten.split, aten.split_with_sizes):
        sizes = [v.shape[call["dim"]] for v in tree_find(Tensor, call.infer())]
        start = sum(sizes[:index])
        written = record(aten.slice_scatter.default, base, new, call["dim"], start, start + sizes[index])
    if not isinstance(written, LazyValue):
        raise RuleError(f"a ChunkedTensor can't be written to through {op}; write to what it is a view of")
    return written


class LazyTensor(torch.Tensor):
    """A tensor without memory that stands for the value of its reference."""

    _ref: AliasRef

    def realize(self) -> Tensor:
        """Return the value as a plain tensor."""
        raise NotImplementedError

    @classmethod
    def result_of(cls, value: LazyValue) -> Tensor:
        """Return a value without the rows to the user: a number may wait, anything else is computed."""
        raise NotImplementedError


def alias_ref(x: LazyTensor) -> AliasRef:
    """Return the reference of a tensor that a user holds.

    Raises:
        RuleError: it is the result of an autograd.Function, whose backward the lazy graph can't call.
    """
    with torch._C.DisableTorchFunctionSubclass():
        function = x.grad_fn
    if function is None:
        return x._ref
    if is_fsdp_identity_node(function) and x._ref.base is not None:
        return x._ref.base
    raise function_around(function)


def graph_node(x: LazyTensor) -> torch.autograd.graph.Node | None:
    """Return the autograd node of a tensor, which gets no gradient where torch didn't make the tensor.

    Torch's hooks of several tensors look for the node of a view of each.
    """
    with torch._C.DisableTorchFunctionSubclass():
        if x.grad_fn is None and x.requires_grad and x._ref.base is not None:
            x = x.view_as(x)  # type: ignore[assignment]
        return x.grad_fn


def inner_tensor(kind: type[LazyTensor], ref: AliasRef) -> LazyTensor:
    """Return a tensor of the reference for the ops beneath autograd: it does not require grad."""
    return _wrapper(kind, ref, None)


def user_tensor(kind: type[LazyTensor], ref: AliasRef) -> LazyTensor:
    """Return a tensor of the reference for the user: it requires grad where the value does."""
    if type(ref) is AliasRef and ref._value.node is not None and ref.pending() is not None:
        hold(ref, ref._value)
    return _wrapper(kind, ref, GRADIENT_HOOKS if ref.needs_grad else None)


def number_tensor(kind: type[LazyTensor], ref: AliasRef, hook: Hook | None) -> LazyTensor:
    """Return a tensor of the reference to a number; it requires grad where `hook` is to be called with its gradient."""
    return _wrapper(kind, ref, None if hook is None else OrderedDict({0: hook}))


def _wrapper(kind: type[LazyTensor], ref: AliasRef, hooks: OrderedDict[int, Hook] | None) -> LazyTensor:
    """Return a tensor of the reference, which requires grad where there are hooks for its gradient."""
    sizes, strides, dtype, device = ref.metadata()
    with torch._C.DisableTorchFunctionSubclass():
        out: LazyTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[assignment]
            kind, sizes, strides=strides, dtype=dtype, device=device, requires_grad=hooks is not None
        )
        if hooks is not None:
            set_leaf_hooks(out, hooks)
    out._ref = ref
    return out


def update_requires_grad(x: LazyTensor) -> None:
    """Make the tensor require grad where its value does, after a write."""
    needs = x._ref.needs_grad
    with torch._C.DisableTorchFunctionSubclass():
        if needs != x.requires_grad:
            x.requires_grad_(needs)
            if needs:
                set_leaf_hooks(x, GRADIENT_HOOKS)
