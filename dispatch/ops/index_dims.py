"""The dimension maps of reads and writes at an index.

out[i, j, :] = x[:, a[i, j], b[j], :]        along the dims that are indexed, positions of x are combined; along
                                             those of the indices, which broadcast, the read is parallel
x[:, a[i, j], b[j], :] = values[i, j, :]     along both, positions are combined: the last write wins, or all add
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from subtensors.dispatch.ops.dims import DimMap, Label, Labels, Operand, dim_rule, labels_of, normalized

aten = torch.ops.aten

Indices = Sequence[Operand | None]
MASKS = frozenset([torch.bool, torch.uint8])
"""The dtypes of an index that selects as many positions as it has true elements."""


@dim_rule(aten.index.Tensor, aten._unsafe_index.Tensor)
def index(x: Operand, indices: Indices) -> DimMap:
    """The positions that indices name in some dims."""
    at, named, result = _named(x, indices)
    if any(i is not None and i.dtype in MASKS for i in indices):
        return DimMap((labels_of(x), *named), ((...,),), frozenset([*labels_of(x), *_all(named)]))
    return DimMap((labels_of(x), *named), (result,), frozenset(at))


@dim_rule(aten.index_put, aten._unsafe_index_put)
def index_put(x: Operand, indices: Indices, values: Operand) -> DimMap:
    """Elements replaced, or added to, at the positions that indices name in some dims."""
    own = labels_of(x)
    at, named, picked = _named(x, indices)
    if any(i is not None and i.dtype in MASKS for i in indices):
        named, picked = [(None,) * len(labels) for labels in named], (None,) * values.ndim
        return DimMap((own, *named, picked), (own,), frozenset([*own, None]))
    source = picked[len(picked) - values.ndim :]
    return DimMap((own, *named, source), (own,), frozenset([*at, *_all(named)]))


def _named(x: Operand, indices: Indices) -> tuple[list[int], list[Labels], Labels]:
    """Return the dims that are indexed, and the labels of the indices, which broadcast, and of what they name."""
    given = [i for i in indices if i is not None]
    at = [d for d, i in enumerate(indices) if i is not None]
    rest = [d for d in labels_of(x) if d not in at]
    # The dims of the indices stand where the indexed ones stood, or in front if these are apart.
    before = at[0] if at and at == list(range(at[0], at[-1] + 1)) else 0
    named: list[Labels] = [tuple(("index", back) for back in range(-i.ndim, 0)) for i in given]
    return at, named, (*rest[:before], *max(named, key=len, default=()), *rest[before:])


def _all(named: Sequence[Labels]) -> set[Label]:
    return {label for labels in named for label in labels}


@dim_rule(aten.take)
def take(x: Operand, index: Operand) -> DimMap:
    """Elements of the flattened tensor."""
    own, named = tuple(("element", d) for d in labels_of(x)), labels_of(index)
    return DimMap((own, named), (named,), frozenset(own))


@dim_rule(aten.index_add, aten.index_copy, aten.index_fill, aten.index_reduce)
def index_write(x: Operand, dim: int, index: Operand, operands: Sequence[Operand]) -> DimMap:
    """Slices replaced, filled, added to or reduced at positions of one dim."""
    own, named = labels_of(x), ("index",) * index.ndim
    at = normalized(dim, x.ndim)
    slices: Labels = tuple("index" if d == at else d for d in own)
    given = tuple(slices[: source.ndim] for source in operands[2:])
    return DimMap((own, named, *given), (own,), frozenset([at, "index"]))


@dim_rule(aten.gather)
def gather(x: Operand, dim: int, index: Operand) -> DimMap:
    """An element for each position of an index, of a dim that is combined."""
    return _at_index(x, dim, [x, index], index)


@dim_rule(aten.scatter, aten.scatter_add, aten.scatter_reduce)
def scatter(x: Operand, dim: int, index: Operand, src: Operand | None = None) -> DimMap:
    """Elements replaced or reduced at the positions of an index, of a dim that is combined."""
    return _at_index(x, dim, [x, index, *([] if src is None else [src])], x)


def _at_index(x: Operand, dim: int, operands: Sequence[Operand], result: Operand) -> DimMap:
    """Return the map of a read or write at an index; dims of different sizes are combined, too."""
    at = normalized(dim, x.ndim)
    uneven = [d for d in labels_of(x) if any(d >= y.ndim or y.shape[d] != x.shape[d] for y in operands)]
    return DimMap(tuple(map(labels_of, operands)), (labels_of(result),), frozenset([at, *uneven]))


@dim_rule(aten.embedding)
def embedding(weight: Operand, indices: Operand, scale_grad_by_freq: bool = False) -> DimMap:
    """A row of a table for each index; the gradient may depend on how often an index occurs."""
    own = labels_of(indices)
    combined = frozenset(["row", *own] if scale_grad_by_freq else ["row"])
    return DimMap((("row", "feature"), own), ((*own, "feature"),), combined)


@dim_rule(aten.index_select)
def index_select(x: Operand, dim: int, index: Operand) -> DimMap:
    """The positions of a dim that an index names."""
    own, at = labels_of(x), normalized(dim, x.ndim)
    named = ("index",) * index.ndim
    if not own:
        return DimMap((own, named), (own,), frozenset(named))
    return DimMap((own, named), ((*own[:at], *(named or (None,)), *own[at + 1 :]),), frozenset([at]))
