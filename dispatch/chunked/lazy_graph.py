"""The lazy graph behind chunked tensors: ops are recorded, and run chunk by chunk when a value is needed.

An op on a `ChunkedTensor` computes nothing. It adds a node to a graph of `LazyValue`s, each with the dim that holds the
rows (its `RowLayout`), or none. Say h (N, H) is chunked along N, w is a plain weight:

    h  (N, H)   rows in dim 0 ---+
                                 +--> mm --> logits (N, V)   rows in dim 0     never in memory in full
    w  (H, V)   replicated ------+             |
                                               v
                                             sum --> partial ()                each chunk's part, combined: SUM

An op on chunked values runs for each chunk, and each of its results is *chunked* again or a *partial*: every chunk
computes a part, and the parts are summed, concatenated or stacked (`Combine`). To the ops that read it, a partial is
*replicated*, like a plain tensor: one full value. Ops on replicated values run once, in plain autograd.

Reading a value without rows (a loss) runs the region in front of it (`evaluation.py`): for each chunk of rows, the
recorded ops forward, and with them backward, from a tangent of 1, where the result is affine in the sums; else backward
reruns each chunk forward. To autograd all of that is one `autograd.Function` (`autograd.py`), with the gradients of
replicated operands summed over chunks. A region that autograd keeps holds descriptions of values, no tensors.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._ops import OpOverload

from subtensors.dispatch.chunked.row_layout import ChunkAxis, RowLayout, meta_like
from subtensors.dispatch.ops.errors import RuleError
from subtensors.dispatch.ops.plain_types import PLAIN_TYPES
from subtensors.dispatch.ops.tree import Args, Kwargs, PyTree, tree_find, tree_map_only
from subtensors.dispatch.torch_internals.autograd import gathered_again, has_saved_tensor_hooks
from subtensors.dispatch.torch_internals.dispatcher import is_traced

Span = tuple[int, int]

_recording: ContextVar[bool | None] = ContextVar("recording", default=None)


@contextmanager
def recording(grad: bool) -> Iterator[None]:
    """Return a context in which recorded ops are differentiable, or not."""
    token = _recording.set(grad)
    try:
        yield
    finally:
        _recording.reset(token)


def is_recording() -> bool:
    """Return whether a call is being recorded; ops that arrive otherwise are those of another type around a tensor."""
    return _recording.get() is not None


def is_differentiated() -> bool:
    """Return whether ops that are recorded now are differentiable; outside of a recording, as torch says."""
    return torch.is_grad_enabled() if (grad := _recording.get()) is None else grad


def is_autocast(device: str) -> bool:
    """Return whether autocast is enabled on a type of device; torch refuses to tell for some, such as meta."""
    return device in ("cpu", "cuda") and torch.is_autocast_enabled(device)


def without_ambient_modes(grad: bool | None = None) -> AbstractContextManager[None]:
    """Return a context without autocast and saved-tensor hooks; None of `grad` leaves the recording of gradients."""
    is_ambient = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda") or has_saved_tensor_hooks()
    grad = None if grad is torch.is_grad_enabled() else grad
    return _neutral_modes(grad) if is_ambient or grad is not None else _NO_MODES


_NO_MODES: AbstractContextManager[None] = nullcontext()


@contextmanager
def _neutral_modes(grad: bool | None) -> Iterator[None]:
    with ExitStack() as stack:
        if grad is not None:
            stack.enter_context(torch.set_grad_enabled(grad))
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        if has_saved_tensor_hooks():
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(identity, identity))
        yield


class NeedsMaterialize(RuleError):
    """An op that can't be recorded: its operands must be materialized first, by the user where nothing else can."""

    def __init__(self, op: object, reason: str) -> None:
        super().__init__(f"{op}: {reason}")
        self.op = str(op)
        self.reason = reason


class Combine(enum.Enum):
    """The operation that combines the parts of chunks into one value."""

    SUM = "sum"
    CAT = "cat"
    STACK = "stack"


class LazyValue:
    """A tensor of the region: only its metadata is known until it is computed.

    Args:
        meta: sizes, strides and dtype; None for an input, which has them itself.
        device: its device.
        layout: the position of its rows; None for a replicated value.
        node: the op that computes it; None for an input.
        needs_grad: whether it requires grad.
    """

    __slots__ = (
        *("_meta", "device", "index", "combine", "layout", "needs_grad", "node", "part_layout", "recorded", "tensor"),
        *("__weakref__", "observed", "waiting"),
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
        self.combine: Combine | None = None
        self.index = 0
        self.tensor: Tensor | None = None
        """The full value, once it is known."""
        self.part_layout: RowLayout | None = None
        """For a concatenated partial, the layout of its parts; for a stacked one, the rows that make a part."""
        self.recorded: tuple[int, int] | None = None
        """For a tensor of the caller, its version and address when it was recorded."""
        self.waiting: Waiting | None = None
        """For a number that a user holds, the ways to compute it."""
        self.observed: Tensor | None = None
        """For a number that was computed on the way to another, its value, without a gradient."""

    def description(self) -> LazyValue:
        """Return a copy of its metadata without node or tensor: keeping the copy keeps no tensor alive."""
        out = LazyValue(self.meta, self.device, self.layout, None, self.needs_grad)
        out.combine, out.index, out.part_layout = self.combine, self.index, self.part_layout
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
            self._meta = meta_like(self.like)
        return self._meta

    @property
    def row_layout(self) -> RowLayout:
        """The position of its rows, of a chunked value."""
        assert self.layout is not None
        return self.layout

    @property
    def shape(self) -> torch.Size:
        """The sizes of the full value."""
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
class Waiting:
    """The ways to compute a number that waits for others that may share its pass; see `shared_pass.py`.

    Args:
        alone: returns its tensor by a pass of its own; None, or a result of None: the recorded ops are evaluated.
        shared: returns its recorded value, where that is not the number itself; None if there is none.
        axis: of the chunks that it is computed from, where nothing of it is recorded.
    """

    alone: Callable[[], Tensor | None] | None = None
    shared: Callable[[], LazyValue | None] | None = None
    axis: ChunkAxis | None = None


@dataclass(frozen=True, eq=False)
class RowSlice:
    """A replicated value that each chunk reads its own part of."""

    value: LazyValue
    layout: RowLayout


@dataclass(frozen=True, eq=False)
class PerChunk:
    """An argument that differs between chunks, such as a size."""

    value_in: Callable[[Span], PyTree]


class LazyNode:
    """An op of the region.

    Args:
        op: the function that is called.
        args, kwargs: its arguments: values, slices of them, per-chunk arguments and constants.
        grad: whether it is differentiated.
    """

    __slots__ = ("__weakref__", "_outputs", "args", "axis", "grad", "kwargs", "name", "op", "rows")

    def __init__(self, op: Callable[..., PyTree], args: Args, kwargs: Kwargs, grad: bool) -> None:
        self.op, self.args, self.kwargs, self.grad = op, args, kwargs, grad
        layouts = [x.layout for x in tree_find((LazyValue, RowSlice), (args, kwargs))]
        self.axis: ChunkAxis | None = next((layout.axis for layout in layouts if layout is not None), None)
        """The axis along which it runs chunk by chunk; None for an op that runs once, on replicated operands."""
        self.name = str(op).removeprefix("aten.") if isinstance(op, OpOverload) else op.__name__.strip("_")
        # A value refers to its node. If the node did to the value, all that either reads would live until the garbage
        # collector runs.
        self._outputs: list[weakref.ref[LazyValue]] = []
        self.rows: RowLayout | None = None
        """For an op whose parts are stacked: the layout of the rows; a chunk with none of them has no part."""

    @property
    def outputs(self) -> list[LazyValue | None]:
        """Its results, in order; None for a result that was freed."""
        return [output() for output in self._outputs]

    def add_output(self, value: LazyValue) -> None:
        """Add its next result."""
        value.index = len(self._outputs)
        self._outputs.append(weakref.ref(value))

    def operands(self) -> list[LazyValue]:
        """Return the values among its arguments, those that each chunk reads a slice of included."""
        found = tree_find((LazyValue, RowSlice), (self.args, self.kwargs))
        return [x.value if isinstance(x, RowSlice) else x for x in found]


def computation(
    requested: Iterable[LazyValue], stops_at: Callable[[LazyValue], object] = lambda value: False
) -> list[LazyValue]:
    """Return what is to be computed for some values, in order: each value after those that it is computed from.

    Values whose tensors are known are left out. There is no recursion: a region may hold thousands of ops.

    Args:
        requested: the values, the last of which is computed first.
        stops_at: returns whether to go no further than a value: its operands are left out. It is called once for each.
    """
    found: dict[LazyValue, None] = {}
    opened, stack = set[LazyValue](), [*requested]
    while stack:
        value = stack[-1]
        if value in found or value.tensor is not None:
            stack.pop()
        elif value in opened or stops_at(value) or value.node is None:
            found[stack.pop()] = None
        else:
            opened.add(value)
            stack.extend(value.node.operands())
    return [*found]


def largest(values: Sequence[LazyValue]) -> LazyValue:
    """Return the largest of the chunked values, whose layout the others take."""
    return max((v for v in values if v.layout is not None), key=lambda v: v.meta.numel())


def constant(tensor: Tensor) -> LazyValue:
    """Return a replicated value whose tensor is known.

    Raises:
        NeedsMaterialize: the tensor has no strides.
    """
    if tensor.layout != torch.strided:
        raise NeedsMaterialize("a tensor without strides", "it can't be recorded")
    value = LazyValue(None, tensor.device, None, None, tensor.requires_grad)
    value.tensor = tensor
    value.recorded = version_and_address(tensor)
    return value


def leaf_value(x: Tensor, dim: int, axis: ChunkAxis) -> LazyValue:
    """Return the value of a tensor that is chunked along a dim."""
    value = constant(x)
    value.layout = RowLayout(axis, dim, x.shape[dim])
    return value


def version_and_address(tensor: Tensor) -> tuple[int, int] | None:
    """Return what changes when a tensor is written to or given other memory; None for a tensor without versions."""
    if tensor.is_inference() or (type(tensor) not in PLAIN_TYPES and is_traced(tensor)):
        return None
    try:
        return tensor._version, tensor.data_ptr()
    except RuntimeError:  # a fake tensor, say
        return None


def known_tensor(value: LazyValue) -> Tensor | None:
    """Return the tensor of a replicated value, or None where it is not computed yet.

    Raises:
        RuleError: since it was recorded it was written to or frozen, or its memory was freed or replaced.
    """
    tensor = value.tensor
    if tensor is None or value.recorded is None:
        return tensor
    version, address = value.recorded
    if tensor._version != version:
        raise RuleError(
            f"a tensor of shape {tuple(tensor.shape)} was modified in place after an op on a ChunkedTensor had "
            f"recorded it; realize() the result before the write, or write to a clone"
        )
    if tensor.data_ptr() != address:
        again = gathered_again(tensor)
        if again is not None:
            value.tensor, value.recorded = again, version_and_address(again)
            return again
        change = "given other memory, through `.data` perhaps," if tensor.untyped_storage().nbytes() else "freed"
        raise RuleError(
            f"a tensor of shape {tuple(tensor.shape)} was {change} before the ChunkedTensor that uses it was "
            f"evaluated; realize() it before that; with FSDP keep the module's weights (reshard_after_forward=False)"
        )
    if tensor.requires_grad == value.needs_grad or not torch.is_grad_enabled():
        return tensor
    if not value.needs_grad:
        return tensor.detach()
    raise RuleError("a tensor that was recorded requires grad no longer; realize() the result before that changes")


def emit(
    op: Callable[..., PyTree],
    args: Args,
    kwargs: Kwargs,
    metas: PyTree,
    layouts: Sequence[RowLayout | Combine | None] = (),
    grad: bool | None = None,
) -> PyTree:
    """Record an op.

    Args:
        op: the function called for each chunk (or once, for replicated operands).
        args, kwargs: arguments of that call.
        metas: the results of the full call as meta tensors, in their pytree.
        layouts: for each tensor among the results, the layout of its rows, or how its parts are combined; none of
            replicated operands.
        grad: whether it is differentiable, if its operands require grad; None: as `recording` says.

    Returns: the pytree of the results, with values in place of tensors.
    """
    node = LazyNode(op, args, kwargs, grad=False)
    operands = node.operands()
    recorded = is_differentiated() if grad is None else grad
    node.grad = recorded and any(v.needs_grad for v in operands) and op is not torch.ops.aten.detach.default
    device = kwargs.get("device") or next((v.device for v in operands if v.ndim), operands[0].device)
    if Combine.STACK in layouts:
        node.rows = largest(operands).layout
    remaining = iter(layouts)

    def value(meta: Tensor) -> LazyValue:
        layout = next(remaining, None)
        differentiable = meta.dtype.is_floating_point or meta.dtype.is_complex
        combine = layout if isinstance(layout, Combine) else None
        rows = None if isinstance(layout, Combine) else layout
        out = LazyValue(meta, torch.device(device), rows, node, node.grad and differentiable)
        out.combine, out.part_layout = combine, node.rows if combine is Combine.STACK else None
        node.add_output(out)
        return out

    return tree_map_only(Tensor, value, metas)


CHUNK_INDEPENDENT_VIEWS = frozenset(
    """reshape t.default transpose.int permute.default unsqueeze.default squeeze.dims alias.default
    detach.default""".split()
)
"""Views that are the same of a chunk and of the full value, except for the sizes of a reshape."""


def replicated(value: LazyValue, through_casts: bool = False) -> LazyValue:
    """Return a value that every chunk reads in full: a chunked value is concatenated, others are returned unchanged.

    Args:
        value: the value.
        through_casts: whether to cast the full operand, too, rather than concatenate cast chunks: for inputs, which are
            in memory in full.
    """
    layout = value.layout
    if layout is None:
        return value
    if value.tensor is not None:
        leaf = LazyValue(value.meta, value.device, None, None, value.needs_grad)
        leaf.tensor, leaf.recorded = value.tensor, value.recorded
        return leaf
    node = value.node
    is_cast = through_casts and node is not None and node.name == "_to_copy.default"
    if node is not None and is_cast and node.args[0].dtype == value.dtype:
        return replicated(node.args[0], through_casts)
    if node is not None and (is_cast or node.name in CHUNK_INDEPENDENT_VIEWS):
        # A view of the full operand costs nothing; an operand that is an input is in memory in full.
        rest = [list(value.shape)] if node.name == "reshape" else node.args[1:]
        operands = replicated(node.args[0], through_casts), *rest
        out: LazyValue = emit(node.op, operands, node.kwargs, value.meta, grad=node.grad)
        return out
    full: LazyValue = emit(identity, (value,), {}, value.meta, [Combine.CAT], grad=True)
    full.part_layout = layout
    return full


def rechunked(value: LazyValue, layout: RowLayout) -> LazyValue:
    """Return a replicated value, chunked by a layout."""
    out: LazyValue = emit(identity, (RowSlice(value, layout),), {}, value.meta, [layout], grad=True)
    return out


def identity(part: Tensor) -> Tensor:
    """Return a chunk's part of a value, unchanged."""
    return part
