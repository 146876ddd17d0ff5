"""A cache of call outcomes: run the op on the storages, and take dims and fill from an earlier call of its kind.

A rule looks at dims, fills and dtypes, and often finds nothing to fill or to mask. If it only ran the op on its
operands' storages, a call with operands of the same dims, fills and dtypes does the same. That holds for ops whose
rules depend on nothing else, such as true sizes known on the host, and where autograd tracks nothing.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch._ops import OpOverload

from subtensors.dispatch.ops.plain_types import PLAIN_TYPES
from subtensors.dispatch.padded.interpreter import PaddedCall, is_observed
from subtensors.dispatch.padded.padded_value import Fill, PaddedValue
from subtensors.dispatch.padded.true_sizes import TrueSizes
from subtensors.dispatch.sizes.dim_factors import Factors
from subtensors.padded.padded_tensor import PaddedTensor, fill_of, wrap

KINDS = 4096
"""The most kinds of calls that are remembered."""


class CachedOutcome(NamedTuple):
    """The properties of a result other than its storage; fields as in `PaddedValue`."""

    dims: tuple[Factors, ...]
    fill: Fill | None
    view: Literal["", "alias", "copy"]


_known: dict[tuple[Any, ...], CachedOutcome] = {}


class OutcomeKey(NamedTuple):
    """A call as far as its outcome depends on it.

    Args:
        op: what is called.
        key: equal for calls of one outcome.
        operands: the arguments, with storages in place of PaddedTensors.
        sizes: those of all its padded operands.
    """

    op: OpOverload
    key: tuple[Any, ...]
    operands: list[Any]
    sizes: TrueSizes

    def answer(self) -> PaddedTensor | None:
        """The result, where the outcome is known."""
        known = _known.get(self.key)
        if known is None:
            return None
        return wrap(PaddedValue(self.op(*self.operands), known.dims, self.sizes, known.fill, known.view))

    def note(self, call: PaddedCall, out: PaddedValue) -> None:
        """Remember what a rule made of this call, if it only ran the op."""
        if call.unchanged is out.dense and out.padded_dims and out.sizes is self.sizes and out.view != "copy":
            if len(_known) >= KINDS:
                _known.clear()
            _known[self.key] = CachedOutcome(out.dims, out.fill, out.view)


def seen(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OutcomeKey | None:
    """A call of a direct op by what its outcome depends on; None where that may be more."""
    if kwargs or torch.is_grad_enabled() or is_observed():
        return None
    sizes: TrueSizes | None = None
    key: list[Any] = [op]
    operands = []
    for x in args:
        kind = type(x)
        if kind is PaddedTensor:
            if x._origin is not None or x._sizes is None or (sizes is not None and x._sizes is not sizes):
                return None
            sizes, dense = x._sizes, x._dense
            key += (x._dims, dense.dtype, fill_of(x), x._view)
            operands.append(dense)
        elif kind in PLAIN_TYPES:
            key += (x.shape, x.dtype)
            operands.append(x)
        else:
            key += (kind, tuple(x) if kind is list else x)
            operands.append(x)
    if sizes is None or sizes.rows is not None:
        return None
    # Whether two sizes are the same is asked of every size up to the buckets.
    return OutcomeKey(op, (sizes.key, *key), operands, sizes)
