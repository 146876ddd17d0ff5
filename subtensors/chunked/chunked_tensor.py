"""`ChunkedTensor`: a tensor whose ops run chunk by chunk, since their results would be too large in full."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor

from subtensors.chunked.chunk_policy import known_policy
from subtensors.chunked.lazy_tensor import RecordedTensor, cell_of, outer, whole_of
from subtensors.chunked.torch_function import called, dispatched, is_metadata_query, refuse_transformed
from subtensors.dispatch.chunked.aliasing import AliasRef
from subtensors.dispatch.chunked.evaluation import evaluate, passes_for
from subtensors.dispatch.chunked.lazy_graph import LazyValue, leaf_value
from subtensors.dispatch.chunked.lower_cross_entropy import LoweredPlan, expected_loss
from subtensors.dispatch.chunked.row_layout import ChunkAxis, Policy
from subtensors.dispatch.chunked.schedule import ChunkSchedule
from subtensors.dispatch.ops.errors import SizeError
from subtensors.dispatch.ops.type_interaction import LAZY_TYPES, MASKED_TYPES
from subtensors.dispatch.torch_internals import dynamo
from subtensors.dispatch.torch_internals.dispatcher import is_transforming


class ChunkedTensor(RecordedTensor):
    """A tensor whose ops are recorded, and run chunk by chunk when a number or another whole value is asked for.

    Sizes, dtype and device are those of the whole. What has lost the chunked dim (a loss, a gradient of a weight) is
    a plain tensor at once; what has it stays chunked, and `realize()` makes it plain. Gradients reach the tensor that
    was chunked and every plain tensor that joined.

    Args:
        x: the tensor, of at least one dim.
        dim: the dim whose rows are chunked.
        chunks, rows, memory_limit, accumulate, compile: see `chunk`.

    Example:
        >>> import torch
        >>> h = ChunkedTensor(torch.ones(6, 2), chunks=3)
        >>> h @ torch.ones(2, 4)
        ChunkedTensor((6, 4), float32, cpu, rows in dim 0, 1 op recorded)
        >>> (h @ torch.ones(2, 4)).sum()
        tensor(48.)
    """

    @staticmethod
    def __new__(
        cls,
        x: Tensor,
        dim: int = 0,
        *,
        chunks: int | None = None,
        rows: int | None = None,
        memory_limit: int | str | None = None,
        accumulate: Literal["exact", "fast"] = "exact",
        compile: bool = False,
    ) -> ChunkedTensor:
        """The tensor, chunked."""
        return chunked(x, dim, known_policy(chunks, rows, memory_limit, accumulate, compile))

    def __init__(self, x: Tensor, dim: int = 0, **kwargs: Any) -> None:
        pass

    def realize(self) -> Tensor:
        """Materialize the value as a plain tensor, with its ops run chunk by chunk.

        Returns:
            a dense tensor; differentiable, with each chunk computed again in backward.

        Example:
            >>> import torch
            >>> ChunkedTensor(torch.ones(3), rows=2).mul(2).realize()
            tensor([2., 2., 2.])
        """
        return evaluate(cell_of(self).value)

    def explain(self) -> str:
        """The pass over the chunks that `realize()` would run: chunks, bytes, what it reads, ops; and a loss's plan."""
        plans = passes_for(self._cell.value)
        lines = [*(plan.describe() for plan in plans), expected_loss(self._cell.value)]
        return "\n".join(line for line in lines if line is not None) or repr(self)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        value = self._cell.value
        count = _ops(value)
        dim = "" if value.layout is None else f", rows in dim {value.layout.dim}"
        dtype = str(value.dtype).removeprefix("torch.")
        recorded = f"{count} op{'' if count == 1 else 's'} recorded"
        return f"ChunkedTensor({tuple(value.shape)}, {dtype}, {value.device}{dim}, {recorded})"

    __str__ = __repr__
    __format__ = object.__format__

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if is_metadata_query(func):
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        return called(cls, func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return dispatched(cls, func, args, kwargs or {})


def chunked(x: Tensor, dim: int, policy: Policy) -> ChunkedTensor:
    """A tensor, chunked along a dim by a policy.

    Raises:
        TypeError, RuleError, SizeError, IndexError: see `chunk`.
    """
    x = x.realize() if isinstance(x, ChunkedTensor) else whole_of(x)
    if not isinstance(x, Tensor):
        raise TypeError(f"chunk takes a tensor, got {type(x).__name__}")
    if type(x) in MASKED_TYPES:
        raise TypeError(f"a ChunkedTensor is made of a plain tensor, and a {type(x).__name__} has rules of its own")
    if is_transforming():
        refuse_transformed(x)
    dims = x.ndim
    if dims == 0:
        raise SizeError("a tensor of no dims has no rows to chunk")
    if not -dims <= dim < dims:
        raise IndexError(f"dim must be in [{-dims}, {dims - 1}], got {dim}")
    return chunked_by(x, dim % dims, policy)


def chunked_by(x: Tensor, dim: int, policy: Policy) -> ChunkedTensor:
    """A plain tensor, chunked along a dim, counted from the front, by a policy."""
    cell = AliasRef(leaf_value(x, dim, ChunkAxis(x.shape[dim], policy, x.numel())))
    return outer(ChunkedTensor, cell)  # type: ignore[return-value]


def explain_loss(loss: Tensor) -> str:
    """The passes over chunks that a plain tensor was computed by.

    Args:
        loss: a tensor with a graph.

    Returns:
        for each pass: chunks, bytes, what it reads, ops.

    Example:
        >>> import torch
        >>> print(explain_loss(ChunkedTensor(torch.ones(6, 2, requires_grad=True), chunks=3).exp().sum()))
        3 chunks of 2 of 6 rows, 32 B a chunk
          reads by rows float32[6, 2]
          exp.default -> float32[6, 2]
          sum.dim_IntList -> float32[] (sum over chunks)
    """
    plans: list[ChunkSchedule | LoweredPlan] = []
    seen, stack = set[Any](), [loss.grad_fn]
    while stack:
        function: Any = stack.pop()
        if function is None or function in seen:
            continue
        seen.add(function)
        if isinstance(plan := getattr(function, "plan", None), ChunkSchedule | LoweredPlan):
            plans.append(plan)
        stack.extend(following for following, _ in function.next_functions)
    return "\n".join(plan.describe() for plan in plans) or "a plain tensor; nothing of its graph was chunked"


def _ops(value: LazyValue) -> int:
    seen, stack = set[int](), [value]
    while stack:
        node = stack.pop().node
        if node is not None and id(node) not in seen:
            seen.add(id(node))
            stack.extend(x for x in node.operands() if isinstance(x, LazyValue))
    return len(seen)


LAZY_TYPES.update({RecordedTensor, ChunkedTensor})
for _kind in (RecordedTensor, ChunkedTensor):
    dynamo.compile_methods_only_inlined(_kind)
