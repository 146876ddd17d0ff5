"""Recognition of logits of a linear layer of an input in the lazy graph.

Ops are matched backwards from the logits: first the transforms (casts to a wider dtype, a temperature, a softcap,
reshapes and slices of rows), then a product of hidden states with a replicated weight:

    hidden --> mm(weight) --> [slice, reshape] --> softcap * tanh(. / softcap) / temperature --> logits
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch

from subtensors.dispatch.chunked.lazy_graph import LazyNode, LazyValue, RowSlice, is_differentiated, recording
from subtensors.dispatch.chunked.logit_maps import LogitMap, RowsT, View, can_follow, match_map, viewed
from subtensors.dispatch.chunked.record import record
from subtensors.kernels.cross_entropy.cross_entropy import CrossEntropy

aten = torch.ops.aten


@dataclass(frozen=True)
class TransformedLogits:
    """Logits as softcap * tanh(base / softcap) / temperature of some rows of a base, perhaps with maps after it.

    Args:
        base: the logits before softcap and temperature.
        softcap, temperature: see `CrossEntropy`.
        views: the views that selected the rows of the base.
        maps: by row and by class, the last one first.
    """

    base: LazyValue
    softcap: float | None = None
    temperature: float = 1.0
    views: tuple[View, ...] = ()
    maps: tuple[LogitMap, ...] = ()

    def rows(self) -> LazyValue:
        """Record the rows of the base, without softcap, temperature and maps.

        Raises:
            NeedsMaterialize: the base can't be viewed so.
        """
        return viewed(self.base, self.views, record)

    @property
    def key(self) -> tuple[object, ...]:
        """Everything but the base."""
        return self.softcap, self.temperature, self.views, self.maps

    def applied_to(self, options: CrossEntropy) -> CrossEntropy:
        """Return the options of a cross entropy of the base."""
        plain = self.softcap is None and self.temperature == 1
        return options if plain else replace(options, softcap=self.softcap, temperature=self.temperature)

    def apply_to(self, logits: LazyValue, dtype: torch.dtype) -> LazyValue:
        """Apply the same softcap and temperature to other logits, in a dtype."""
        out: LazyValue = logits if logits.dtype == dtype else record(aten._to_copy.default, logits, dtype=dtype)
        if self.softcap is not None:
            out = record(aten.tanh.default, record(aten.div.Tensor, out, self.softcap))
            out = record(aten.mul.Tensor, out, self.softcap)
        return out if self.temperature == 1 else record(aten.div.Tensor, out, self.temperature)


def match_transforms(logits: LazyValue, through_padding: bool = False, maps: bool = False) -> TransformedLogits:
    """Match logits backwards through casts to a wider dtype, copies, views of rows, a temperature and a softcap.

    Args:
        logits: the logits.
        through_padding: whether rows of padding may be unfilled, and their gradient unmasked: it is known to be zero.
        maps: whether to match maps by row and by class, too.
    """
    temperature, softcap = 1.0, None
    views: list[View] = []
    found: list[LogitMap] = []
    value: LazyValue = logits
    for _ in range(16):
        node, layout = value.node, value.layout
        if node is None or value.tensor is not None or layout is None or not node.args:
            break
        if logits.needs_grad and not value.needs_grad:
            break  # a scale has a gradient; what it scales may have lost that of the logits
        op, args = node.op, node.args
        mapped = match_map(value, temperature, tuple(reversed(views))) if maps and softcap is None else None
        if mapped is not None and can_follow(found, mapped[1]):
            value = mapped[0]
            found.append(mapped[1])
            continue
        factor = _divisor(node)
        if factor is not None:
            uncapped = _softcap_operand(args[0], factor)
            if uncapped is not None and softcap is None:
                softcap, value = 1 / factor, uncapped
                continue
            if not factor > 0 or softcap is not None:
                break
            temperature *= factor
        elif node.name == "reshape" and args[0].shape[-1:] == value.shape[-1:]:
            views.append(list(value.shape[:-1]))
        elif op is aten.slice.Tensor and _slices_rows(*args):
            views.append((args[1] % value.ndim, *args[2:4], *(args[4:] or (1,))))
        elif node.name == "range_of_rows" and args[0].layout is not None:
            dim, start = layout.dim, layout.start - args[0].layout.start
            if dim == value.ndim - 1:
                break
            views.append((dim, start, start + value.shape[dim], 1))
        elif through_padding and node.name in ("fill_padding", "mask_gradient") and _chooses_rows(node.args[0], value):
            value = node.args[1]
            continue
        elif not (op is aten._to_copy.default and widens(args[0], value)) and op not in _COPIES:
            break
        value = args[0]
    return TransformedLogits(value, softcap, temperature, tuple(reversed(views)), tuple(found))


def _chooses_rows(mask: LazyValue | RowSlice, of: LazyValue) -> bool:
    """Return whether a mask is the same for all classes."""
    shape = (mask.value if isinstance(mask, RowSlice) else mask).shape
    return len(shape) < 1 or shape[-1] == 1 != of.ndim


_COPIES = (aten.alias.default, aten.clone.default)


def _slices_rows(value: LazyValue, dim: int = 0, start: object = None, end: object = None, step: object = 1) -> bool:
    """Return whether a slice keeps all classes (the last dim) and has constant bounds."""
    return dim % value.ndim != value.ndim - 1 and all(x is None or isinstance(x, int) for x in (start, end, step))


SCALINGS: dict[object, str] = {
    aten.div.Tensor: "div",
    aten.div.Scalar: "div",
    aten.mul.Tensor: "mul",
    aten.mul.Scalar: "mul",
}


def _divisor(node: LazyNode) -> float | None:
    """Return the number that an op divides by, 0 for a product with 0; None for other ops."""
    if node.op not in SCALINGS or not isinstance(node.args[1], (int, float)):
        return None
    number = float(node.args[1])
    return number if SCALINGS[node.op] == "div" else 1 / number if number else 0.0


def _softcap_operand(value: LazyValue, factor: float) -> LazyValue | None:
    """Return x where the value is tanh(x * factor), which divided by factor is a softcap of 1 / factor; else None."""
    node = value.node
    inner = None if node is None or node.op is not aten.tanh.default else node.args[0].node
    divided = None if inner is None else _divisor(inner)
    is_inverse = divided is not None and divided > 0 and abs(divided * factor - 1) < 1e-12
    if inner is None or not is_inverse:
        return None
    found: LazyValue = inner.args[0]
    return found


def widens(old: object, new: LazyValue) -> bool:
    """Return whether a cast between floating dtypes keeps every value."""
    if not isinstance(old, LazyValue) or not (old.dtype.is_floating_point and new.dtype.is_floating_point):
        return False
    is_wider = new.dtype is old.dtype or new.dtype.itemsize > old.dtype.itemsize
    return is_wider and new.device == old.device


@dataclass(frozen=True)
class LinearLogits:
    """Logits that are hidden states times a weight, perhaps with a softcap and a temperature.

    Args:
        hidden: (N, H), an input of the region or a view of one.
        weight: (H, V), replicated.
        bias: (V,), replicated, or None.
        transforms: the transforms of the product.
    """

    hidden: LazyValue
    weight: LazyValue
    bias: LazyValue | None
    transforms: TransformedLogits

    @functools.cached_property
    def head_weight(self) -> LazyValue:
        """The (V, H) weight whose gradient is computed, recorded once: see `transposed_weight` and `master_weight`."""
        with recording(True):
            return master_weight(transposed_weight(self.weight), self.hidden.dtype)

    def rows_of(self, hidden: RowsT, call: Callable[..., RowsT]) -> RowsT:
        """Return the rows of hidden states that the logits are computed from, (N, H); `call` as in `viewed`."""
        views = self.transforms.views
        if not any(isinstance(view, tuple) for view in views):
            return hidden
        return call(aten.reshape.default, viewed(hidden, views, call), [-1, hidden.shape[-1]])


def match_linear_logits(logits: LazyValue, through_padding: bool = False, maps: bool = False) -> LinearLogits | None:
    """Match logits that a linear layer of an input computes; return None for others. Arguments: `match_transforms`."""
    transforms = match_transforms(logits, through_padding, maps)
    node = transforms.base.node
    if node is None or node.name not in ("mm.default", "addmm.default"):
        return None
    args = node.args
    bias, hidden, weight = (None, *args) if node.name == "mm.default" else args[:3]
    plain = all(isinstance(x, LazyValue) for x in (hidden, weight)) and not node.kwargs and len(args) in (2, 3, 5)
    if not plain or weight.layout is not None or not is_input(hidden) or hidden.layout.dim != 0:
        return None
    if bias is not None and (not isinstance(bias, LazyValue) or bias.layout is not None or bias.ndim != 1):
        return None
    return LinearLogits(hidden, weight, bias, transforms)


_INPUT_OPS = ("reshape", "_to_copy.default", "alias.default")


def is_input(value: LazyValue) -> bool:
    """Return whether a value is a chunked input, or a reshape, a cast or an alias of one, as autocast makes it."""
    while value.node is not None and value.tensor is None and value.node.name in _INPUT_OPS:
        value = value.node.args[0]
    return value.tensor is not None and value.layout is not None


def carries_gradient(value: LazyValue, sources: Iterable[LazyValue]) -> bool:
    """Return whether a value can be recorded anew from its sources: without gradients, or where it has theirs."""
    return not is_differentiated() or value.needs_grad or not any(source.needs_grad for source in sources)


def transposed_weight(weight: LazyValue) -> LazyValue:
    """Return the (V, H) weight: the original where the (H, V) weight is its transpose, else a recorded transpose."""
    node = weight.node
    if node is not None and weight.tensor is None and node.op is aten.t.default:
        (source,) = node.args
        if isinstance(source, LazyValue) and carries_gradient(weight, [source]):
            return source
    out: LazyValue = record(aten.t.default, weight)
    return out


MASTER_DTYPE = {torch.bfloat16: torch.float32, torch.float16: torch.float32}


def master_weight(weight: LazyValue, dtype: torch.dtype) -> LazyValue:
    """Return the float32 weight that autocast cast to this one, so that its gradient is not rounded, or this weight."""
    node = weight.node
    if node is None or weight.tensor is not None or node.op is not aten._to_copy.default:
        return weight
    (source,) = node.operands()
    is_master = source.dtype is MASTER_DTYPE.get(dtype) and weight.dtype is dtype
    return source if is_master and node.grad == source.needs_grad else weight
