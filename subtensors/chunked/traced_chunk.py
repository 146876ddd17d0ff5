"""What `st.chunk` gives to torch.compile: a linear layer that waits for its cross entropy, and is one op with it.

The compiler would interleave chunks, and keep their logits side by side. So a linear layer of chunked hidden states and
the cross entropy of its logits become one op that it doesn't look into: `subtensors::linear_cross_entropy`, which runs
chunk after chunk and gives the gradients with the loss. For anything else that is asked of them, logits are made whole.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subtensors.dispatch.errors import RuleError
from subtensors.dispatch.region.axis import Policy
from subtensors.dispatch.region.lowering import chunk_plan, loss_shape
from subtensors.kernels.cross_entropy import CrossEntropy
from subtensors.kernels.linear_cross_entropy import linear_cross_entropy

_log = logging.getLogger(__name__)


class TracedChunk:
    """Chunked hidden states, or logits that are a linear layer of them, while a compiler traces.

    Args:
        hidden: (..., H).
        policy: how rows are divided.
        dim: the dim that holds them.
        head: the weight (V, H) and the bias (V,) or None; None for the hidden states themselves.
        flat: whether the logits were reshaped to (-1, V).
        dtype: what the logits were cast to; None for their own.
    """

    def __init__(
        self,
        hidden: Tensor,
        policy: Policy,
        dim: int,
        head: tuple[Tensor, Tensor | None] | None = None,
        flat: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.hidden = hidden
        self.policy = policy
        self.dim = dim
        self.head = head
        self.flat = flat
        self.cast = dtype

    def realize(self) -> Tensor:
        """The values, in full."""
        out = self.hidden if self.head is None else F.linear(self.hidden, self.head[0], self.head[1])
        out = out if self.cast is None else out.to(self.cast)
        return out.reshape(-1, out.shape[-1]) if self.flat else out

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the values."""
        last = self.hidden.shape[-1] if self.head is None else self.head[0].shape[0]
        if not self.flat:
            return (*self.hidden.shape[:-1], last)
        rows = 1
        for size in self.hidden.shape[:-1]:
            rows = rows * size
        return (rows, last)

    def size(self, dim: int | None = None) -> Any:
        """The sizes, or one of them."""
        return self.shape if dim is None else self.shape[dim]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values."""
        return self.hidden.dtype if self.cast is None else self.cast

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Any:
        """A linear layer of hidden states."""
        if self.head is not None or self.cast is not None or self.flat:
            return F.linear(self.realize(), weight, bias)
        return TracedChunk(self.hidden, self.policy, self.dim, (weight, bias))

    def times(self, other: Tensor) -> Any:
        """The matrix product with a tensor on the right."""
        return self.linear(other.t()) if other.dim() == 2 else torch.matmul(self.realize(), other)

    def float(self) -> Any:
        """The values in float32."""
        if self.head is None:
            return self.realize().float()
        return TracedChunk(self.hidden, self.policy, self.dim, self.head, self.flat, torch.float32)

    def contiguous(self) -> TracedChunk:
        """The same values."""
        return self

    def view(self, *size: Any) -> Any:
        """The values under other sizes; rows of logits in one dim stay as they are."""
        sizes = size[0] if len(size) == 1 and isinstance(size[0], (tuple, list, torch.Size)) else size
        if self.head is not None and len(sizes) == 2 and sizes[1] in (-1, self.shape[-1]):
            return TracedChunk(self.hidden, self.policy, self.dim, self.head, True, self.cast)
        return self.realize().view(sizes)

    reshape = view

    def __getitem__(self, key: Any) -> Any:
        """Rows of the values are values of the rows, where the last dim is taken whole."""
        keys = key if isinstance(key, tuple) else (key,)
        rows_only = all(isinstance(k, slice) for k in keys) and len(keys) < len(self.shape)
        if not rows_only and len(keys) > 1 and keys[-1] == slice(None) and not self.flat:
            rows_only = all(isinstance(k, slice) or k is Ellipsis for k in keys)
        if self.flat or not rows_only:
            return self.realize()[key]
        return TracedChunk(self.hidden[key], self.policy, self.dim, self.head, self.flat, self.cast)

    def __getattr__(self, name: str) -> Any:
        _note(name)
        return getattr(self.realize(), name)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear and isinstance(args[0], TracedChunk):
            return args[0].linear(*args[1:], **kwargs)
        if func is torch.matmul and isinstance(args[0], TracedChunk):
            return args[0].times(args[1])
        if func is torch.Tensor.matmul and isinstance(args[1], TracedChunk) and isinstance(args[0], Tensor):
            return _either_way(args[0], args[1])
        if func is F.cross_entropy and isinstance(args[0], TracedChunk) and args[0].head is not None:
            loss = _cross_entropy(*args, **kwargs)
            if loss is not None:
                return loss
        _note(func.__name__)
        dense = [a.realize() if isinstance(a, TracedChunk) else a for a in args]
        if isinstance(dense[0], (int, float)):
            dense[0] = torch.as_tensor(dense[0])  # the compiler calls `h * 2` as Tensor.mul(2, h)
        named = {k: a.realize() if isinstance(a, TracedChunk) else a for k, a in kwargs.items()}
        return func(*dense, **named)


def _either_way(tensor: Tensor, chunk: TracedChunk) -> Any:
    """`chunk @ tensor`, or `tensor @ chunk`: the compiler calls both as Tensor.matmul(tensor, chunk)."""
    right = tensor.shape[-2 if tensor.dim() > 1 else 0] == chunk.shape[-1]
    left = tensor.shape[-1] == chunk.shape[-2]
    if right and left:
        raise RuleError("@ of a chunked and a square matrix is ambiguous under torch.compile: write torch.matmul")
    return chunk.times(tensor) if right else torch.matmul(tensor, chunk.realize())


def traced_chunk(x: Tensor, dim: int, policy: Policy) -> Any:
    """What `st.chunk` gives while a compiler traces.

    Args:
        x: (..., H).
        dim: the dim that holds the rows.
        policy: how they are divided.

    Returns:
        a TracedChunk; `x` itself where its last dim holds the rows, which no linear layer keeps apart.
    """
    dim = dim + x.dim() if dim < 0 else dim
    if dim == x.dim() - 1:
        _note("the last dim")
        return x
    return TracedChunk(x, policy, dim)


def _operator(name: str) -> Callable[..., Any]:
    def method(self: TracedChunk, *others: Any) -> Any:
        _note(name)
        return getattr(self.realize(), name)(*(o.realize() if isinstance(o, TracedChunk) else o for o in others))

    return method


# Operators with numbers are looked for on the class.
for (
    _name
) in """__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __pow__ __rpow__ __neg__ __lt__
__le__ __gt__ __ge__""".split():
    setattr(TracedChunk, _name, _operator(_name))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _note(name: str) -> None:
    _log.warning("%s of chunked values under torch.compile: they are computed in full", name)


def _cross_entropy(
    logits: TracedChunk,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    assert logits.head is not None
    hard = target.dim() == 1 and not target.is_floating_point() and len(logits.shape) == 2
    if not hard or reduction not in ("mean", "sum") or size_average is not None or reduce is not None:
        return None
    head, bias = logits.head
    hidden = logits.hidden.reshape(-1, logits.hidden.shape[-1])
    grad = torch.is_grad_enabled()
    policy = logits.policy
    # Flat rows that stand for one row of the chunked dim.
    together = hidden.shape[0] // max(logits.hidden.shape[logits.dim], 1)
    loss: Tensor = torch.ops.subtensors.linear_cross_entropy(
        hidden,
        head,
        bias,
        target,
        weight,
        ignore_index,
        label_smoothing,
        reduction,
        [policy.chunks or 0, (policy.rows or 0) * together, policy.memory_limit or 0],
        policy.exact,
        [grad and hidden.requires_grad, grad and head.requires_grad, grad and bias is not None and bias.requires_grad],
    )[0]
    return loss.to(logits.dtype)


@torch.library.custom_op("subtensors::linear_cross_entropy", mutates_args=())
def _op(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    reduction: str,
    division: list[int],
    exact: bool,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loss, and the gradients that are needed; empty tensors for others."""
    chunks, rows, limit = (count or None for count in division)
    rows = -(-hidden.shape[0] // chunks) if chunks else rows
    shape = replace(loss_shape(hidden, weight, False), needs_hidden=needs[0], needs_weight=needs[1])
    schedule = chunk_plan(shape, Policy(memory_limit=limit, exact=exact), rows, hidden.device).schedule
    result = linear_cross_entropy(
        hidden,
        weight,
        target,
        bias,
        options=CrossEntropy(ignore_index, class_weight, label_smoothing, reduction=reduction),
        needs=(needs[0], needs[1], needs[2]),
        **schedule._asdict(),
    )
    nothing = hidden.new_empty(0)
    grads = [nothing.clone() if g is None else g for g in (result.hidden, result.weight, result.bias)]
    return result.loss, grads[0], grads[1], grads[2]


@_op.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    reduction: str,
    division: list[int],
    exact: bool,
    needs: list[bool],
) -> tuple[Tensor, ...]:
    loss = hidden.new_empty((), dtype=torch.float64 if hidden.dtype == torch.float64 else torch.float32)
    of = (hidden, weight, bias)
    nothing = hidden.new_empty(0)
    grads = (t.new_empty(t.shape) if n and t is not None else nothing.clone() for t, n in zip(of, needs, strict=True))
    return loss, *grads


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.needs = inputs[-1]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _scale(ctx: Any, loss: Tensor | None, *others: Any) -> tuple[Any, ...]:
    kept = zip(ctx.saved_tensors, ctx.needs, strict=True)
    hidden, weight, bias = (g * loss.to(g.dtype) if n and loss is not None else None for g, n in kept)
    return hidden, weight, bias, *[None] * 8


torch.library.register_autograd("subtensors::linear_cross_entropy", _scale, setup_context=_keep)
