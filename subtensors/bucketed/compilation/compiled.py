"""A program as compiled code, for calls that autograd does not track."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from subtensors.bucketed.calls.outputs import Output, Outputs
from subtensors.bucketed.compilation.size_polymorphic import DynamicCode, SizePolymorphic
from subtensors.dispatch.sizes.dim_factors import Factor
from subtensors.dispatch.tracing.shape_template import ShapeTemplate
from subtensors.dispatch.tracing.shared_inputs import share_inputs

if TYPE_CHECKING:
    from subtensors.bucketed.bucket import Bucket


class Compiled(SizePolymorphic[tuple[ShapeTemplate, DynamicCode]]):
    """A program as compiled code; its arguments are those of `SizePolymorphic`."""

    _written: frozenset[int] = frozenset()

    @property
    def compilations(self) -> int:
        """The number of compilations."""
        return sum(len(code.made) for _, code in self.every())

    def run(self, bucket: Bucket) -> Outputs:
        """Run the compiled program on a bucket's static inputs."""
        template, code = self.at(bucket)
        sizes, inputs = bucket.reading.buckets, bucket.inputs()
        # Casts are in the graph: in the caller's autocast there would be more.
        with torch.autocast(bucket.device.type, enabled=False, cache_enabled=False):
            tensors = code.at(sizes, inputs, self.open_dims(bucket))(*inputs)
        bucket.written |= self._written
        return assembled(tensors, template.extra(sizes))

    def traced(self, bucket: Bucket, points: Sequence[tuple[int, ...]]) -> tuple[ShapeTemplate, DynamicCode]:
        """See `SizePolymorphic`."""
        made = ShapeTemplate(lambda inputs: taken_apart(bucket.run_on(inputs)), bucket.zeros, points, self.places)
        self._written |= bucket.written
        share_inputs(made.module)
        return made, DynamicCode(made.module, self.options)


def taken_apart(outputs: Outputs) -> tuple[list[Tensor], Any]:
    """Split a program's outputs into their tensors and the rest, with every bucket as a number."""
    tensors: list[Tensor] = []
    rest: list[tuple[Any, ...]] = []
    for leaf in outputs.leaves:
        if not isinstance(leaf.value, Tensor):
            rest.append(("value", leaf.value))
            continue
        tensors.append(leaf.value)
        dims = leaf.dims and [[(f.bucket, f.size) for f in factors] for factors in leaf.dims]
        rest.append(("tensor", dims, list(leaf.symbols), list(leaf.buckets), leaf.rows))
    return tensors, (rest, outputs.spec, outputs.is_leaf)


def assembled(tensors: Sequence[Tensor], extra: Any) -> Outputs:
    """Rebuild the outputs that `taken_apart` split."""
    rest, spec, is_leaf = extra
    left = iter(tensors)
    leaves = []
    for kind, *fields in rest:
        if kind == "value":
            leaves.append(Output(fields[0]))
            continue
        dims, symbols, buckets, rows = fields
        padded = None if dims is None else tuple(tuple(Factor(*f) for f in factors) for factors in dims)
        leaves.append(Output(next(left), padded, tuple(symbols), tuple(buckets), rows))
    return Outputs(leaves, spec, is_leaf)
