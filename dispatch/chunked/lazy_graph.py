"""The lazy graph behind chunked tensors: values, and the ops that compute them.

A value is *whole* (one tensor) or *chunked* (a `RowLayout` says where its rows are). An op on whole values runs once.
An op on chunked values runs for each chunk, and each of its results is chunked or a *partial*: every chunk computes a
part, and the parts are summed, concatenated or stacked (`Combine`). The ops that read a partial see a whole value.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import optree
import torch
from torch import Tensor
from torch._ops import OpOverload

from subtensors.dispatch.chunked.row_layout import ChunkAxis, RowLayout, meta_of
from subtensors.dispatch.ops.errors import RuleError
from subtensors.dispatch.ops.tree import tree_leaves, tree_map

Span = tuple[int, int]

_recording: ContextVar[bool] = ContextVar("recording", default=False)


@contextmanager
def recording(grad: bool) -> Iterator[None]:
    """A context in which recorded ops are differentiable, or not."""
    token = _recording.set(grad)
    try:
        yield
    finally:
        _recording.reset(token)


class NeedsMaterialize(Exception):
    """An op that can't be recorded: its operands must be materialized first."""

    def __init__(self, op: object, reason: str) -> None:
        super().__init__(f"{op}: {reason}")
        self.op = str(op)
        self.reason = reason


class Combine(enum.Enum):
    """The way in which the parts of chunks are combined into one value."""

    SUM = "sum"
    CAT = "cat"
    STACK = "stack"


class LazyValue:
    """A tensor of the region, known by its metadata until it is computed.

    Args:
        meta: sizes, strides and dtype; None for an input, which has them itself.
        device: where it will live.
        layout: where its rows are; None for a whole value.
        node: the op that computes it; None for an input.
        needs_grad: whether it requires grad.
    """

    __slots__ = (
        *("_meta", "device", "index", "join", "layout", "needs_grad", "node", "source", "tensor", "version"),
        "__weakref__",
    )

    def __init__(
        self,
        meta: Tensor | None,
        device: torch.device,
        layout: RowLayout | None,
        node: LazyNode | None,
        needs_grad: bool,
    ) -> None:
        self._meta, self.device, self.layout, self.node, self.needs_grad = meta, device, layout, node, needs_grad
        self.join: Combine | None = None
        self.index = 0
        self.tensor: Tensor | None = None
        """The whole value, once it is known."""
        self.source: RowLayout | None = None
        """For a concatenated partial, the layout of its parts; for a stacked one, the rows that make a part."""
        self.version: int | None = None

    def bare(self) -> LazyValue:
        """A copy of its metadata without node or tensor: keeping the copy keeps no tensor alive."""
        out = LazyValue(self.meta, self.device, self.layout, None, self.needs_grad)
        out.join, out.index, out.source = self.join, self.index, self.source
        return out

    @property
    def like(self) -> Tensor:
        """A tensor of its sizes, strides and dtype: its own, or a meta tensor."""
        like = self.tensor if self._meta is None else self._meta
        assert like is not None
        return like

    @property
    def meta(self) -> Tensor:
        """Its sizes, strides and dtype, without memory."""
        if self._meta is None:
            self._meta = meta_of(self.like)
        return self._meta

    @property
    def shape(self) -> torch.Size:
        """The sizes of the whole value."""
        return self.like.shape

    @property
    def ndim(self) -> int:
        """The number of its dims."""
        return self.like.ndim

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype."""
        return self.like.dtype


@dataclass(frozen=True, eq=False)
class RowSlice:
    """A whole value of which each chunk reads its own part."""

    value: LazyValue
    layout: RowLayout


@dataclass(frozen=True, eq=False)
class PerChunk:
    """An argument that differs between chunks, such as a size."""

    of: Callable[[Span], Any]


class LazyNode:
    """An op of the region.

    Args:
        op: what is called.
        args, kwargs: its arguments: values, cuts of them, per-chunk arguments and constants.
        axis: the axis it is run along, chunk by chunk; None for an op that is run once.
        grad: whether it is differentiated.
    """

    __slots__ = ("_outputs", "args", "axis", "grad", "kwargs", "name", "op", "rows")

    def __init__(self, op: Callable[..., Any], args: Any, kwargs: Any, axis: ChunkAxis | None, grad: bool) -> None:
        self.op, self.args, self.kwargs, self.axis, self.grad = op, args, kwargs, axis, grad
        self.name = str(op).removeprefix("aten.") if isinstance(op, OpOverload) else op.__name__.strip("_")
        # A value knows its node. If the node kept the value, all that either reads would live until Python looks for
        # cycles.
        self._outputs: list[weakref.ref[LazyValue]] = []
        self.rows: RowLayout | None = None
        """For an op whose parts are stacked: the rows of which a chunk must hold some to have a part."""

    @property
    def outputs(self) -> list[LazyValue | None]:
        """Its results, in order; None for a result that nobody holds."""
        return [made() for made in self._outputs]

    def gives(self, value: LazyValue) -> None:
        """Note its next result."""
        value.index = len(self._outputs)
        self._outputs.append(weakref.ref(value))

    def operands(self) -> list[LazyValue | RowSlice]:
        """The values and cuts among its arguments."""
        return [x for x in tree_leaves((self.args, self.kwargs)) if isinstance(x, (LazyValue, RowSlice))]


def constant(tensor: Tensor) -> LazyValue:
    """A whole value whose tensor is known.

    Raises:
        NeedsMaterialize: it has no strides to be read by.
    """
    if tensor.layout != torch.strided:
        raise NeedsMaterialize("a tensor without strides", "it can't be recorded")
    value = LazyValue(None, tensor.device, None, None, tensor.requires_grad)
    value.tensor = tensor
    value.version = None if tensor.is_inference() else tensor._version
    return value


def leaf_value(x: Tensor, dim: int, axis: ChunkAxis) -> LazyValue:
    """The value of a tensor that is chunked along a dim."""
    value = LazyValue(None, x.device, RowLayout(axis, dim, x.shape[dim]), None, x.requires_grad)
    value.tensor = x
    value.version = None if x.is_inference() else x._version
    return value


def known(value: LazyValue) -> Tensor | None:
    """The tensor of a whole value, where it is known.

    Raises:
        RuleError: it was written to after it was recorded, or its memory is gone.
    """
    tensor = value.tensor
    if tensor is None or value.version is None:
        return tensor
    if tensor._version != value.version:
        raise RuleError(
            f"a tensor of shape {tuple(tensor.shape)} was modified in place after an op on a ChunkedTensor had "
            f"recorded it; realize() the result before the write, or write to a clone"
        )
    if tensor.numel() and tensor.layout == torch.strided and tensor.untyped_storage().nbytes() == 0:
        raise RuleError(
            f"the memory of a tensor of shape {tuple(tensor.shape)} was freed before the ChunkedTensor that uses it "
            f"was evaluated; with FSDP keep this module's weights until the loss (reshard_after_forward=False)"
        )
    return tensor


_inferred: dict[Any, Any] = {}

MOST_INFERRED = 4096
"""Calls whose results are remembered; a training step records the same ones again."""


def infer(op: OpOverload, args: Any, kwargs: Any) -> Any:
    """The results of an op, as meta tensors; they are cached, so nobody may write to them.

    Raises:
        NeedsMaterialize: the results depend on values, or the op refuses these arguments.
    """
    call: Any = (args, kwargs)
    flat: list[Any]
    flat, spec = optree.tree_flatten(call, none_is_leaf=True)
    bare = [x.value.meta if isinstance(x, RowSlice) else x.meta if isinstance(x, LazyValue) else x for x in flat]
    # Equal numbers of two types are promoted differently.
    key = op, spec, torch.get_default_dtype(), *(_seen(x) for x in bare)
    try:
        found = _inferred.get(key)
    except TypeError:  # an argument that is no key
        return _infer(op, spec, bare)
    if found is None:
        if len(_inferred) >= MOST_INFERRED:
            _inferred.clear()
        found = _inferred[key] = _infer(op, spec, bare)
    return found


def _seen(x: Any) -> Any:
    return (x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else (type(x), x)


def _infer(op: OpOverload, spec: Any, flat: Sequence[Any]) -> Any:
    args, kwargs = spec.unflatten(flat)
    if "device" in kwargs:
        kwargs["device"] = torch.device("meta")
    try:
        return op(*args, **kwargs)
    except Exception as error:  # ops refuse meta tensors in many ways
        raise NeedsMaterialize(op, f"{type(error).__name__}: {error}") from error


def emit(
    op: Callable[..., Any],
    args: Any,
    kwargs: Any,
    metas: Any,
    layouts: Sequence[RowLayout | Combine | None],
    axis: ChunkAxis | None,
    grad: bool | None = None,
) -> Any:
    """Record an op.

    Args:
        op: the function called for each chunk (or once, for whole operands).
        args, kwargs: arguments of that call.
        metas: the results of the whole call as meta tensors, in their pytree.
        layouts: for each tensor among the results, the layout of its rows, or how its parts are combined.
        axis: the rows that chunks are cut along; None for whole operands.
        grad: whether gradients flow through it, if its operands have any; by default where `recording` says so.

    Returns:
        the pytree of the results, with values in place of tensors.
    """
    node = LazyNode(op, args, kwargs, axis, grad=False)
    operands = [x.value if isinstance(x, RowSlice) else x for x in node.operands()]
    recorded = _recording.get() if grad is None else grad
    node.grad = recorded and any(v.needs_grad for v in operands) and op is not torch.ops.aten.detach.default
    device = kwargs.get("device") or next((v.device for v in operands if v.ndim), operands[0].device)
    if Combine.STACK in layouts:
        node.rows = max((v for v in operands if v.layout is not None), key=lambda v: v.meta.numel()).layout
    placed = iter(layouts)

    def value(meta: Any) -> Any:
        if not isinstance(meta, Tensor):
            return meta
        layout = next(placed, None)
        differentiable = meta.dtype.is_floating_point or meta.dtype.is_complex
        join = layout if isinstance(layout, Combine) else None
        out = LazyValue(
            meta,
            torch.device(device),
            None if isinstance(layout, Combine) else layout,
            node,
            node.grad and differentiable,
        )
        out.join, out.source = join, node.rows if join is Combine.STACK else None
        node.gives(out)
        return out

    return tree_map(metas, value)


VIEWS_OF_WHOLES = frozenset(
    """reshape t.default transpose.int permute.default unsqueeze.default squeeze.dims alias.default
    detach.default""".split()
)
"""Views that don't depend on which chunk they are taken in, but for the sizes of a reshape."""


def gathered(value: LazyValue) -> LazyValue:
    """A chunked value as a whole value; a whole value is returned unchanged."""
    layout = value.layout
    if layout is None:
        return value
    if value.tensor is not None:
        whole = LazyValue(value.meta, value.device, None, None, value.needs_grad)
        whole.tensor, whole.version = value.tensor, value.version
        return whole
    node = value.node
    if node is not None and node.name in VIEWS_OF_WHOLES:
        # A view of the whole costs nothing; where its operand is an input, that is in memory in full.
        (operand, *rest) = node.args
        rest = [list(value.shape)] if node.name == "reshape" else rest
        viewed = emit(node.op, (gathered(operand), *rest), node.kwargs, value.meta, [None], None, grad=node.grad)
        assert isinstance(viewed, LazyValue)
        return viewed
    whole = emit(_kept, (value,), {}, value.meta, [Combine.CAT], layout.axis, grad=True)
    assert isinstance(whole, LazyValue)
    whole.source = layout
    return whole


def cut_again(whole: LazyValue, layout: RowLayout) -> LazyValue:
    """A whole value, chunked as a layout says."""
    out = emit(_kept, (RowSlice(whole, layout),), {}, whole.meta, [layout], layout.axis, grad=True)
    assert isinstance(out, LazyValue)
    return out


def _kept(part: Tensor) -> Tensor:
    return part
