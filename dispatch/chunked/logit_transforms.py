"""Transforms of logits ahead of their loss: casts, views of rows, a temperature, a softcap."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from subtensors.dispatch.chunked.lazy_graph import LazyValue
from subtensors.dispatch.chunked.rules.table import record

aten = torch.ops.aten

View = list[int] | tuple[int, Any, Any, int]
"""Of rows: sizes without the classes, or a slice's arguments."""


@dataclass(frozen=True)
class TransformedLogits:
    """Logits as softcap * tanh(base / softcap) / temperature of some rows of a base.

    Args:
        base: the logits before softcap and temperature.
        softcap, temperature: see `CrossEntropy`.
        views: how the rows were taken of the base.
    """

    base: LazyValue
    softcap: float | None = None
    temperature: float = 1.0
    views: tuple[View, ...] = ()

    def rows(self) -> LazyValue:
        """Record the rows of the base, without softcap and temperature.

        Raises:
            NeedsMaterialize: a view of the base that its own layout does not have.
        """
        value = self.base
        for view in self.views:
            if isinstance(view, tuple):
                value = record(aten.slice.Tensor, value, *view)
            else:
                value = record(aten.reshape.default, value, [*view, value.shape[-1]])
        return value

    def again(self, logits: LazyValue, dtype: torch.dtype) -> LazyValue:
        """Apply the same softcap and temperature to other logits, in a dtype."""
        out: LazyValue = logits if logits.dtype == dtype else record(aten._to_copy.default, logits, dtype=dtype)
        if self.softcap is not None:
            out = record(aten.tanh.default, record(aten.div.Tensor, out, self.softcap))
            out = record(aten.mul.Tensor, out, self.softcap)
        return out if self.temperature == 1 else record(aten.div.Tensor, out, self.temperature)


def squashed_logits(logits: LazyValue) -> TransformedLogits:
    """Trace logits back through casts to a wider dtype, copies, views of rows, a temperature and a softcap."""
    temperature, softcap = 1.0, None
    views: list[View] = []
    value: LazyValue = logits
    for _ in range(16):
        node, layout = value.node, value.layout
        if node is None or value.tensor is not None or layout is None or not node.args:
            break
        op, args = node.op, node.args
        if _scaled(op) is not None and isinstance(args[1], (int, float)):
            factor = float(args[1]) if _scaled(op) == "div" else 1 / float(args[1]) if args[1] else 0.0
            capped = _capped(args[0], factor)
            if capped is not None and softcap is None:
                softcap, value = 1 / factor, capped
                continue
            if not factor > 0 or softcap is not None:
                break
            temperature *= factor
        elif node.name == "reshape" and args[0].shape[-1:] == value.shape[-1:]:
            views.append(list(value.shape[:-1]))
        elif op is aten.slice.Tensor and _of_rows(*args):
            views.append((args[1] % value.ndim, *args[2:4], *(args[4:] or (1,))))
        elif node.name == "range_of_rows" and args[0].layout is not None:
            dim, start = layout.dim, layout.low - args[0].layout.low
            if dim == value.ndim - 1:
                break
            views.append((dim, start, start + value.shape[dim], 1))
        elif not (op is aten._to_copy.default and _widens(args[0], value)) and op not in _COPIES:
            break
        value = args[0]
    return TransformedLogits(value, softcap, temperature, tuple(reversed(views)))


_COPIES = (aten.alias.default, aten.clone.default)


def _of_rows(value: LazyValue, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> bool:
    """Return whether a slice keeps all classes (the last dim) and has constant bounds."""
    return dim % value.ndim != value.ndim - 1 and all(x is None or isinstance(x, int) for x in (start, end, step))


def _scaled(op: Any) -> str | None:
    return {aten.div.Tensor: "div", aten.div.Scalar: "div", aten.mul.Tensor: "mul", aten.mul.Scalar: "mul"}.get(op)


def _capped(value: LazyValue, factor: float) -> LazyValue | None:
    """x, where the value is tanh(x * factor): divided by factor, that is a softcap of 1 / factor. Else None."""
    node = value.node
    if node is None or node.op is not aten.tanh.default:
        return None
    inner = node.args[0].node
    if inner is None or _scaled(inner.op) is None or not isinstance(inner.args[1], (int, float)):
        return None
    divided = float(inner.args[1]) if _scaled(inner.op) == "div" else 1 / float(inner.args[1])
    found: LazyValue = inner.args[0]
    return found if divided > 0 and abs(divided * factor - 1) < 1e-12 else None


def _widens(old: Any, new: LazyValue) -> bool:
    return isinstance(old, LazyValue) and new.dtype.itemsize >= old.dtype.itemsize and new.device == old.device
