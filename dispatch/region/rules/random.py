"""Random numbers: those of few elements are drawn when they are recorded, others chunk by chunk from a seed.

Drawn at once, as for a tensor no larger than the one that was chunked, they are the numbers that the unchunked program
draws from the same generator. Larger ones may not be there in full: the generator then gives a seed, each chunk draws
from that and its first row, and a chunk that is computed again draws the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from subtensors.dispatch.op_classes import OpClass
from subtensors.dispatch.region.axis import Layout
from subtensors.dispatch.region.graph import PerChunk, Value, constant, emit
from subtensors.dispatch.region.placing import Call, along, largest
from subtensors.dispatch.region.rules.table import RULES, record

aten = torch.ops.aten

# Ops whose numbers don't depend on the values of their operand, only on its sizes.
_OF_SIZES = frozenset(
    """bernoulli.p uniform.default normal_functional.default exponential.default geometric.default cauchy.default
    log_normal.default rand_like.default randn_like.default randint_like.default randint_like.low_dtype
    random.default random.from random.to""".split()
)


@RULES.register(OpClass.RANDOM)
def random(call: Call) -> Any:
    """Numbers of the sizes of the first operand."""
    value: Value = largest(call.chunked) if call.chunked else call.values[0]
    layout, meta = value.layout, call.infer()
    if not isinstance(meta, Tensor) or meta.shape != value.shape or any(v.shape != value.shape for v in call.values):
        raise call.unchunkable("its numbers have other sizes than its operand")
    if layout is not None and value.meta.numel() > layout.axis.elements:
        return _by_seed(call, layout, lambda v: along(v, layout), meta, [layout])
    if str(call.op).removeprefix("aten.") not in _OF_SIZES:
        raise call.unchunkable("its numbers depend on values")
    stand_in = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    args, kwargs = call.with_values(lambda v: stand_in)
    return constant(call.op(*args, **kwargs))


@RULES.register(aten.native_dropout)
def dropout(call: Call) -> Any:
    """The mask of few elements is drawn for all rows; what it is multiplied with stays chunked."""
    value: Value = call["input"]
    layout, metas = value.layout, call.infer()
    if layout is not None and value.meta.numel() > layout.axis.elements:
        return _by_seed(call, layout, lambda v: v, metas, [layout, layout])
    ones = torch.ones(value.shape, dtype=value.dtype, device=value.device)
    scaled, mask = call.op(ones, call["p"], call["train"])
    return record(aten.mul.Tensor, value, constant(scaled)), constant(mask)


def _by_seed(call: Call, layout: Layout, brought: Any, metas: Any, layouts: list[Layout]) -> Any:
    seed = int(torch.randint(1 << 48, ()))
    op = call.op

    def drawn(row: int, *args: Any, **kwargs: Any) -> Any:
        cuda = [x.device for x in args if isinstance(x, Tensor) and x.is_cuda]
        with torch.random.fork_rng(cuda[:1], device_type="cuda"):
            torch.manual_seed(seed + row)
            return op(*args, **kwargs)

    args, kwargs = call.with_values(brought)
    return emit(drawn, (PerChunk(lambda span: span[0]), *args), kwargs, metas, layouts, layout.axis)
