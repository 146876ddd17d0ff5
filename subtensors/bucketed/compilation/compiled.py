"""A program as compiled code, for calls that autograd does not track."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from subtensors.bucketed.calls.outputs import Output, Outputs
from subtensors.bucketed.compilation.size_polymorphic import DynamicCode, SizePolymorphic, TraceableProgram
from subtensors.dispatch.sizes.dim_factors import Factor
from subtensors.dispatch.tracing.shape_template import ShapeTemplate
from subtensors.dispatch.tracing.shared_inputs import share_inputs

if TYPE_CHECKING:
    import sympy

OutputRest: TypeAlias = "tuple[list[OutputMetadata | OutputValue], pytree.TreeSpec, bool]"
"""Outputs without their tensors: the rest of each leaf, the pytree structure, and whether the result is a leaf."""

OutputValue: TypeAlias = tuple[object]
"""A leaf that is no tensor."""

OutputMetadata: TypeAlias = (
    "tuple[list[list[tuple[int, sympy.Expr]]] | None, list[sympy.Symbol], list[int], int | None]"
)
"""The dims, symbols, buckets and rows of a tensor."""


class Compiled(SizePolymorphic[TraceableProgram, tuple[ShapeTemplate, DynamicCode]]):
    """A program as compiled code; its arguments are those of `SizePolymorphic`."""

    _written_inputs: frozenset[int] = frozenset()

    @property
    def compilations(self) -> int:
        """The number of compilations."""
        return sum(len(code.compiled) for _, code in self.traces())

    def run(self, bucket: TraceableProgram) -> Outputs:
        """Run the compiled program on a bucket's static inputs."""
        template, code = self.trace_for(bucket)
        sizes, inputs = bucket.spec.buckets, bucket.inputs()
        # Casts are in the graph: in the caller's autocast there would be more.
        with torch.autocast(bucket.device.type, enabled=False, cache_enabled=False):
            tensors = code.compiled_for(sizes, inputs, self.dynamic_dims(bucket))(*inputs)
        bucket.written_inputs |= self._written_inputs
        return join_outputs(tensors, template.extra(sizes))

    def trace(self, bucket: TraceableProgram, points: Sequence[tuple[int, ...]]) -> tuple[ShapeTemplate, DynamicCode]:
        """See `SizePolymorphic`."""
        template = ShapeTemplate(
            lambda inputs: split_outputs(bucket.run_on(inputs)), bucket.zero_inputs, points, self.dim_inputs
        )
        self._written_inputs |= bucket.written_inputs
        share_inputs(template.module)
        return template, DynamicCode(template.module, self.options)


def split_outputs(outputs: Outputs) -> tuple[list[Tensor], OutputRest]:
    """Split a program's outputs into their tensors and the rest, with every bucket as a number."""
    tensors: list[Tensor] = []
    rest: list[OutputMetadata | OutputValue] = []
    for leaf in outputs.leaves:
        if not isinstance(leaf.value, Tensor):
            rest.append((leaf.value,))
            continue
        tensors.append(leaf.value)
        dims = None if leaf.dims is None else [[(f.bucket, f.size) for f in factors] for factors in leaf.dims]
        rest.append((dims, list(leaf.symbols), list(leaf.buckets), leaf.rows))
    return tensors, (rest, outputs.structure, outputs.is_leaf)


def join_outputs(tensors: Sequence[Tensor], extra: OutputRest) -> Outputs:
    """Rebuild the outputs that `split_outputs` split."""
    rest, structure, is_leaf = extra
    remaining = iter(tensors)
    leaves = []
    for fields in rest:
        if len(fields) == 1:
            leaves.append(Output(fields[0]))
            continue
        dims, symbols, buckets, rows = fields
        padded = None if dims is None else tuple(tuple(Factor(*f) for f in factors) for factors in dims)
        leaves.append(Output(next(remaining), padded, tuple(symbols), tuple(buckets), rows))
    return Outputs(leaves, structure, is_leaf)
