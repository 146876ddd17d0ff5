"""What `st.chunk` gives to torch.compile: a linear layer that waits for its cross entropy, and is one op with it.

The compiler would interleave chunks, and keep their logits side by side. So a linear layer of chunked hidden states and
the cross entropy of its logits become one op that it doesn't look into (`opaque_loss.py`), which runs chunk after
chunk. What lies between them is remembered: casts, reshapes, slices of rows, and numbers that make a temperature or,
around a tanh, a softcap. For anything else that is asked of them, logits are made whole.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subtensors.chunked.opaque_loss import opaque_cross_entropy
from subtensors.dispatch.errors import RuleError
from subtensors.dispatch.region.axis import Policy
from subtensors.dispatch.region.lowering import loss_dtype

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Squash:
    """What was done to every logit: a number times it, or a number times the tanh of one.

    Args:
        steps: what was done, in order: ("mul", number), ("div", number), ("tanh", 1) or ("to", dtype).
        inner: what logits are multiplied by, before the tanh where there is one.
        outer: what the tanh is multiplied by; None where there is none.
    """

    steps: tuple[tuple[str, Any], ...] = ()
    inner: float = 1.0
    outer: float | None = None

    def then(self, name: str, operand: Any) -> Squash | None:
        """With another step; None where that makes something else."""
        inner, outer = self.inner, self.outer
        if name == "tanh":
            if outer is not None:
                return None
            outer = 1.0
        elif name in ("mul", "div"):
            factor = operand if name == "mul" else 1 / operand
            inner, outer = (inner * factor, None) if outer is None else (inner, outer * factor)
        return Squash((*self.steps, (name, operand)), inner, outer)

    @property
    def softcap(self) -> float | None:
        """c of c tanh(y / c) / T."""
        return None if self.outer is None else 1 / self.inner

    @property
    def temperature(self) -> float:
        """T of c tanh(y / c) / T, or of y / T."""
        return 1 / (self.inner if self.outer is None else self.inner * self.outer)

    def of(self, logits: Tensor) -> Tensor:
        """The steps, made of logits."""
        for name, operand in self.steps:
            if name == "tanh":
                logits = torch.tanh(logits)
            elif name == "to":
                logits = logits.to(operand)
            else:
                logits = logits * operand if name == "mul" else logits / operand
        return logits


class TracedChunk:
    """Chunked hidden states, or logits that are a linear layer of them, while a compiler traces.

    Args:
        hidden: (..., H).
        policy: how rows are divided.
        dim: the dim that holds them.
        head: the weight (V, H) and the bias (V,) or None; None for the hidden states themselves.
        flat: whether the logits were reshaped to (-1, V).
        squash: what was done to every logit.
    """

    def __init__(
        self,
        hidden: Tensor,
        policy: Policy,
        dim: int,
        head: tuple[Tensor, Tensor | None] | None = None,
        flat: bool = False,
        squash: Squash | None = None,
    ) -> None:
        self.hidden = hidden
        self.policy = policy
        self.dim = dim
        self.head = head
        self.flat = flat
        self.squash = Squash() if squash is None else squash

    def realize(self) -> Tensor:
        """The values, in full."""
        out = self.hidden if self.head is None else F.linear(self.hidden, self.head[0], self.head[1])
        out = self.squash.of(out)
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
        for name, operand in reversed(self.squash.steps):
            if name == "to":
                return operand  # type: ignore[no-any-return]
        return self.hidden.dtype

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Any:
        """A linear layer of hidden states, in the dtype that autocast wants."""
        if self.head is not None:
            return F.linear(self.realize(), weight, bias)
        hidden, kind = self.hidden, self.hidden.device.type
        if torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64:
            dtype = torch.get_autocast_dtype(kind)
            hidden, weight = hidden.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        return TracedChunk(hidden, self.policy, self.dim, (weight, bias))

    def times(self, other: Tensor) -> Any:
        """The matrix product with a tensor on the right."""
        return self.linear(other.t()) if other.dim() == 2 else torch.matmul(self.realize(), other)

    def squashed(self, name: str, operand: Any) -> Any:
        """The logits after a step, or None where that makes something else of them."""
        if self.head is None or (name in ("mul", "div") and not (isinstance(operand, (int, float)) and operand > 0)):
            return None
        squash = self.squash.then(name, operand)
        if squash is None:
            return None
        return TracedChunk(self.hidden, self.policy, self.dim, self.head, self.flat, squash)

    def tanh(self) -> Any:
        """The tanh of the values."""
        squashed = self.squashed("tanh", 1)
        return self.realize().tanh() if squashed is None else squashed

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """The values in another dtype, or elsewhere."""
        if args == (self.dtype,) and not kwargs:
            return self
        widens = len(args) == 1 and not kwargs and args[0] in (torch.float32, torch.float64)
        widens = widens and self.dtype != torch.float64
        widened = self.squashed("to", args[0]) if widens else None
        return self.realize().to(*args, **kwargs) if widened is None else widened

    def float(self) -> Any:
        """The values in float32."""
        return self.to(torch.float32)

    def contiguous(self) -> TracedChunk:
        """The same values."""
        return self

    def view(self, *size: Any) -> Any:
        """The values under other sizes; rows of logits in one dim stay as they are."""
        sizes = size[0] if len(size) == 1 and isinstance(size[0], (tuple, list, torch.Size)) else size
        if self.head is not None and len(sizes) == 2 and sizes[1] in (-1, self.shape[-1]):
            return TracedChunk(self.hidden, self.policy, self.dim, self.head, True, self.squash)
        return self.realize().view(sizes)

    reshape = view

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Any:
        """The values with dims merged; rows of logits in one dim stay as they are."""
        dims = len(self.shape)
        if self.head is not None and start_dim % dims == 0 and end_dim % dims == dims - 2:
            return TracedChunk(self.hidden, self.policy, self.dim, self.head, True, self.squash)
        return self.realize().flatten(start_dim, end_dim)

    def __getitem__(self, key: Any) -> Any:
        """Rows of the values are values of the rows, where the last dim is taken whole."""
        keys = key if isinstance(key, tuple) else (key,)
        rows_only = all(isinstance(k, slice) for k in keys) and len(keys) < len(self.shape)
        if not rows_only and len(keys) > 1 and keys[-1] == slice(None) and not self.flat:
            rows_only = all(isinstance(k, slice) or k is Ellipsis for k in keys)
        if self.flat or not rows_only:
            return self.realize()[key]
        return TracedChunk(self.hidden[key], self.policy, self.dim, self.head, self.flat, self.squash)

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
        if not kwargs and (squashed := _squashed(func.__name__, args)) is not None:
            return squashed
        _note(func.__name__)
        dense = [a.realize() if isinstance(a, TracedChunk) else a for a in args]
        if isinstance(dense[0], (int, float)):
            dense[0] = torch.as_tensor(dense[0])  # the compiler calls `h * 2` as Tensor.mul(2, h)
        named = {k: a.realize() if isinstance(a, TracedChunk) else a for k, a in kwargs.items()}
        return func(*dense, **named)


def _squashed(name: str, args: tuple[Any, ...]) -> Any:
    """What a function of logits and a number makes, if that is a step."""
    if name == "tanh" and isinstance(args[0], TracedChunk):
        return args[0].squashed("tanh", 1)
    if name in ("mul", "multiply") and len(args) == 2:
        chunk, number = (args[1], args[0]) if isinstance(args[1], TracedChunk) else args
        return chunk.squashed("mul", number) if isinstance(chunk, TracedChunk) else None
    if name in ("div", "divide", "true_divide") and len(args) == 2 and isinstance(args[0], TracedChunk):
        return args[0].squashed("div", args[1])
    return None


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


def _operator(name: str, step: str | None) -> Callable[..., Any]:
    def method(self: TracedChunk, *others: Any) -> Any:
        squashed = None if step is None else self.squashed(step, others[0])
        if squashed is not None:
            return squashed
        _note(name)
        return getattr(self.realize(), name)(*(o.realize() if isinstance(o, TracedChunk) else o for o in others))

    return method


# Operators with numbers are looked for on the class.
_STEPS = {"__mul__": "mul", "__rmul__": "mul", "__truediv__": "div"}
for (
    _name
) in """__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __pow__ __rpow__ __neg__ __lt__
__le__ __gt__ __ge__""".split():
    setattr(TracedChunk, _name, _operator(_name, _STEPS.get(_name)))


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
    rows = len(logits.shape) == 2
    hard = rows and target.dim() == 1 and not target.is_floating_point()
    soft = rows and target.dim() == 2 and target.is_floating_point() and not target.requires_grad
    if not (hard or soft) or size_average is not None or reduce is not None:
        return None
    head, bias = logits.head
    hidden = logits.hidden.reshape(-1, logits.hidden.shape[-1])
    policy, squash = logits.policy, logits.squash
    # Flat rows that stand for one row of the chunked dim.
    together = hidden.shape[0] // max(logits.hidden.shape[logits.dim], 1)
    loss = opaque_cross_entropy(
        hidden,
        head,
        bias,
        target,
        weight,
        [float(ignore_index), label_smoothing, squash.softcap or 0.0, squash.temperature],
        reduction,
        [policy.chunks or 0, (policy.rows or 0) * together, policy.memory_limit or 0],
        policy.exact,
    )
    return loss.to(loss_dtype(logits.dtype, hidden.device.type))
