"""Statistics of rows of logits, recorded as one op with several results: a chunk's logits are read once for all.

`logsumexp`, `argmax`, a gathered log-probability, an entropy: each is asked for in a call of its own. The first one
records the op; the others of the same logits add a result to it, until it runs. Where the logits are a linear layer
that nothing else reads, `lower_statistics.py` runs it as a whole instead of chunk by chunk.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from subtensors.dispatch.chunked.lazy_graph import (
    LazyNode,
    LazyValue,
    NeedsMaterialize,
    computation,
    is_differentiated,
    recording,
    replicated,
)
from subtensors.dispatch.chunked.logit_maps import record_maps, scales_offsets
from subtensors.dispatch.chunked.match_logits import TransformedLogits, match_transforms
from subtensors.dispatch.chunked.record import sliced
from subtensors.dispatch.ops.tree import PyTree
from subtensors.kernels.cross_entropy.row_statistics import row_statistics
from subtensors.kernels.cross_entropy.row_sums import ClassMap, LogitStatistics, StatisticsOptions
from subtensors.kernels.runtime.custom_ops import arithmetic_dtype

Kind = Literal["log_sum_exp", "logit", "log_probability", "negative_entropy", "finite_entropy", "expectation", "argmax"]
_ENTROPIES: frozenset[Kind] = frozenset({"negative_entropy", "finite_entropy"})
_OF_CLASSES: frozenset[Kind] = frozenset({"logit", "log_probability"})


@dataclass(frozen=True)
class Statistic:
    """One result of the op.

    Args:
        kind: its name.
        count: of classes a row, for "logit" and "log_probability": its result is (..., count).
        operand: the position of its classes or of its vector among the op's operands; -1 without one.
    """

    kind: Kind
    count: int = 0
    operand: int = -1


class StatisticsOp:
    """The op: logits (..., V) and operands to a list of results, (...) or (..., count) each.

    Args:
        softcap, temperature: see `CrossEntropy`.
        scales_offsets: whether the rows are scaled after the offsets of classes: the first three operands are those of
            `record_maps`.
    """

    def __init__(self, softcap: float | None, temperature: float, scales_offsets: bool) -> None:
        self.softcap, self.temperature, self.scales_offsets = softcap, temperature, scales_offsets
        self.statistics: list[Statistic] = []
        self.is_final = False
        """True once the op has run: what its backward runs again must be the same."""
        self.__name__ = "row_statistics"

    def __call__(self, logits: Tensor, *operands: PyTree) -> list[Tensor]:
        """Compute the results of a chunk."""
        rows = logits.flatten(0, -2)
        return self.results_of(partial(row_statistics, rows), rows, operands, logits.shape[:-1])

    def results_of(
        self, statistics: Callable[..., LogitStatistics], rows: Tensor, operands: Sequence[PyTree], sizes: torch.Size
    ) -> list[Tensor]:
        """Compute the results.

        Args:
            statistics: takes what `row_statistics` takes after the logits.
            rows: (N, ...), the logits or the hidden states.
            operands: of the op.
            sizes: of the logits without the classes.
        """
        self.is_final = True
        kinds = {statistic.kind for statistic in self.statistics}
        flags = bool(_ENTROPIES & kinds), "argmax" in kinds, False, "negative_entropy" in kinds
        given = [operands[s.operand].flatten(0, -2).t() for s in self.statistics if s.kind in _OF_CLASSES]
        nothing = torch.empty(0, rows.shape[0], dtype=torch.int64, device=rows.device)
        scale, offsets, masked = operands[:3]
        found = statistics(
            torch.cat(given) if given else nothing,
            next((operands[s.operand] for s in self.statistics if s.kind == "expectation"), None),
            options=StatisticsOptions(self.softcap, self.temperature, *flags),
            scale=None if scale is None else scale.flatten().to(rows.device).expand(rows.shape[0]),
            class_map=None if offsets is None else ClassMap(offsets, masked, self.scales_offsets),
        )
        out: list[Tensor] = []
        begin = 0
        for statistic in self.statistics:
            if statistic.kind in _OF_CLASSES:
                of_rows = found.target_logits if statistic.kind == "logit" else found.log_probabilities
                out.append(of_rows[begin : begin + statistic.count].t().reshape(*sizes, statistic.count))
                begin += statistic.count
                continue
            single = getattr(found, "negative_entropy" if statistic.kind in _ENTROPIES else statistic.kind)
            assert isinstance(single, Tensor)
            out.append(single.view(sizes))
        return out


MAX_CLASSES = 16
"""The most classes a row whose logits or log-probabilities the kernels look for."""

_recorded: weakref.WeakKeyDictionary[LazyValue, list[tuple[object, weakref.ref[LazyNode]]]]
_recorded = weakref.WeakKeyDictionary()
"""The ops on logits, by the rows that these are a transform of."""


def has_rows(logits: LazyValue) -> bool:
    """Return whether logits are rows of classes, chunked along another dim than the classes."""
    sized = logits.ndim >= 2 and logits.shape[-1] > 0 and logits.dtype.is_floating_point
    return sized and logits.layout is not None and logits.layout.dim != logits.ndim - 1


def record_statistic(logits: LazyValue, kind: Kind, operand: LazyValue | None = None) -> LazyValue | None:
    """Record a statistic of the last dim of logits.

    Args:
        logits: (..., V), which have rows, see `has_rows`.
        kind: of the statistic.
        operand: (..., T), the classes of each row, for "logit" and "log_probability"; (V,), for "expectation".

    Returns:
        (...) or (..., T), chunked, in the dtype of the kernels' arithmetic; None where these don't take the logits.
    """
    layout, sizes, is_class = logits.row_layout, logits.shape[:-1], kind in _OF_CLASSES
    if operand is not None and operand.device != logits.device:
        return None
    count = operand.shape[-1] if operand is not None and is_class else 0
    is_index = operand is not None and operand.shape[:-1] == sizes and operand.dtype is torch.int64
    if is_class and (not is_index or count > MAX_CLASSES):
        return None
    transforms, rows = untransformed_rows(logits, maps=True)
    dtype = torch.int64 if kind == "argmax" else arithmetic_dtype(rows.dtype)
    meta = torch.empty((*sizes, count) if is_class else sizes, dtype=dtype, device="meta")
    # The largest class has no gradient: it joins the others where it is asked for without recording them.
    grad = (is_differentiated() or kind == "argmax") and logits.needs_grad
    operands = () if operand is None else (sliced(operand, layout) if is_class else replicated(operand),)
    node = _open_node(transforms.base, (transforms.key, grad), operand, kind)
    if node is None:
        with recording(logits.needs_grad):
            maps = record_maps(transforms.maps, logits, arithmetic_dtype(rows.dtype))
        op = StatisticsOp(transforms.softcap, transforms.temperature, scales_offsets(transforms.maps))
        node = LazyNode(op, (rows, *maps), {}, grad)
        _recorded.setdefault(transforms.base, []).append(((transforms.key, grad), weakref.ref(node)))
    assert isinstance(node.op, StatisticsOp)
    node.op.statistics.append(Statistic(kind, count, len(node.args) - 1 if operands else -1))
    node.args = (*node.args, *operands)
    value = LazyValue(meta, logits.device, layout, node, node.grad and dtype.is_floating_point)
    node.add_output(value)
    return value


def _open_node(
    base: LazyValue, key: object, operand: LazyValue | None = None, kind: Kind | None = None
) -> LazyNode | None:
    """Return the op on these logits that a result of a kind and an operand can be added to; None: there is none."""
    for known, reference in _recorded.get(base, ()):
        node = reference()
        if known != key or node is None or not isinstance(node.op, StatisticsOp) or node.op.is_final:
            continue
        kinds = {s.kind for s in node.op.statistics}
        if (kind == "expectation" and kind in kinds) or (kind in _ENTROPIES and _ENTROPIES & (kinds - {kind})):
            continue
        if operand is None or not _reads(operand, node):
            return node
    return None


def has_statistics(logits: LazyValue) -> bool:
    """Return whether a differentiable op on these logits is recorded, that results can be added to."""
    transforms = match_transforms(logits, maps=True)
    return _open_node(transforms.base, (transforms.key, True)) is not None


def _reads(value: LazyValue, node: LazyNode) -> bool:
    """Return whether a value depends on the results of an op, which has not run."""
    return any(found.node is node for found in computation([value]))


def untransformed_rows(
    logits: LazyValue, through_padding: bool = False, maps: bool = False
) -> tuple[TransformedLogits, LazyValue]:
    """Return the transforms of logits and the rows before them; without a match, no transforms and the logits."""
    transforms = match_transforms(logits, through_padding, maps)
    try:
        with recording(logits.needs_grad):
            rows = transforms.rows()
    except NeedsMaterialize:
        return TransformedLogits(logits), logits
    if not logits.row_layout.aligns_with(rows.layout) or logits.dtype == torch.float64 != rows.dtype:
        return TransformedLogits(logits), logits
    return transforms, rows
