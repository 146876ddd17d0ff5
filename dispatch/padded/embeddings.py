"""Rows of a table: a padded index reads some row, gives it no gradient, and counts nowhere."""

from __future__ import annotations

import torch

from subtensors.dispatch.padded.interpreter import PaddedCall, refuse, table
from subtensors.dispatch.padded.padded_value import PaddedValue, result
from subtensors.dispatch.sizes.dim_factors import static_dims

aten = torch.ops.aten


@table.register(aten.embedding)
def embedding(call: PaddedCall) -> PaddedValue:
    """A row of the table an index."""
    weight, indices = call["weight"], call["indices"]
    if weight.is_padded(0):
        raise refuse(call, "the table itself is padded")
    if call["scale_grad_by_freq"] and indices.padded_dims:
        # How often a row occurs divides its gradient: padding occurs as one more row.
        rows = torch.cat([weight.dense, weight.dense.new_zeros(1, weight.shape[1])])
        out = call.dense({"weight": rows, "indices": indices.filled(weight.shape[0])})
    else:
        out = call.dense({"weight": weight.dense, "indices": indices.filled(0)})
    return result(out, [*indices.dims, weight.dims[1]], call.sizes()).gradient_masked()


@table.register(aten.embedding_renorm)
def renormed(call: PaddedCall) -> PaddedValue:
    """The table, its rows that occur no longer than a norm."""
    weight, indices = call["self"], call["indices"]
    if weight.padded_dims:
        raise refuse(call, "the table itself is padded")
    count = weight.shape[0]
    occurs = torch.zeros(count + 1, dtype=torch.bool, device=weight.dense.device)
    occurs = occurs.index_fill(0, indices.filled(count).reshape(-1), True)[:count, None]
    norm = torch.linalg.vector_norm(weight.dense, call["norm_type"], 1, keepdim=True)
    shorter = weight.dense * (call["max_norm"] / (norm + 1e-7))
    out = torch.where(occurs & (norm > call["max_norm"]), shorter, weight.dense)
    return PaddedValue(out, weight.dims)


@table.register(aten.one_hot)
def one_hot(call: PaddedCall) -> PaddedValue:
    """A row of zeros with a one where an index says."""
    x: PaddedValue = call["self"]
    if call["num_classes"] < 0:
        raise refuse(call, "without num_classes the result is as wide as the greatest value")
    out = call.dense({"self": x.filled(0)})
    return result(out, [*x.dims, *static_dims([call["num_classes"]])], x.sizes)
