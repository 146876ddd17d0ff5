"""The dimension maps of views and copies: dims permuted, added, removed, cut, repeated, bordered and joined."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from subtensors.dispatch.ops.dims import DimMap, Labels, Operand, carried, dim_rule, labels_of, listed, normalized
from subtensors.dispatch.ops.errors import UnsupportedCall

aten = torch.ops.aten


@dim_rule(aten.permute, aten.permute_copy)
def permute(x: Operand, dims: Sequence[int]) -> DimMap:
    """The dims in another order."""
    return carried(x, [normalized(d, x.ndim) for d in dims])


@dim_rule(aten.transpose.int, aten.transpose_copy.int, aten.t, aten.t_copy, aten.mT, aten.adjoint)
def transpose(x: Operand, dim0: int = -2, dim1: int = -1) -> DimMap:
    """Two dims swapped."""
    labels = [*labels_of(x)]
    if len(labels) > 1:
        labels[dim0], labels[dim1] = labels[dim1], labels[dim0]
    return carried(x, labels)


@dim_rule(aten.numpy_T)
def numpy_t(x: Operand) -> DimMap:
    """The dims in reversed order."""
    return carried(x, labels_of(x)[::-1])


@dim_rule(aten.unsqueeze, aten.unsqueeze_copy)
def unsqueeze(x: Operand, dim: int) -> DimMap:
    """A new dim of size 1."""
    at, own = normalized(dim, x.ndim + 1), labels_of(x)
    return carried(x, [*own[:at], None, *own[at:]])


@dim_rule(aten.squeeze, aten.squeeze_copy)
def squeeze(x: Operand, dim: int | Sequence[int] | None = None) -> DimMap:
    """The dims of size 1 removed, or those of them that are named."""
    named = listed(dim, x.ndim) if dim is None or isinstance(dim, int) or len(dim) else []
    kept = [d for d in labels_of(x) if d not in named or x.shape[d] != 1]
    return carried(x, kept)._replace(shape=tuple([x.shape[d] for d in kept]))


@dim_rule(aten.expand, aten.expand_copy, aten.broadcast_to)
def expand(x: Operand, size: Sequence[int]) -> DimMap:
    """Dims of size 1 repeated, and new ones in front."""
    added = len(size) - x.ndim
    kept = [d if size[d + added] in (-1, x.shape[d]) else None for d in labels_of(x)]
    return carried(x, [*[None] * added, *kept], sizes="size")


@dim_rule(aten.view.default, aten.view_copy.default, aten._unsafe_view, aten.reshape, aten._reshape_copy)
def reshape(x: Operand, size: Sequence[int]) -> DimMap:
    """Dims merged and split, and the others kept: those with as many elements before them and behind."""
    if not all(isinstance(n, int | torch.SymInt) for n in size):
        raise UnsupportedCall("a size of its shape is the value of a tensor")
    new, elements = [*size], math.prod(x.shape)
    if -1 in new:
        rest = -math.prod(new)
        new[new.index(-1)] = elements // rest if rest else 0
    places = {(math.prod(x.shape[:d]), x.shape[d]): d for d in labels_of(x) if x.shape[d] != 1}
    kept = [places.get((math.prod(new[:d]), new[d])) if elements else None for d in range(len(new))]
    return carried(x, kept, sizes="size")._replace(shape=tuple(new))


@dim_rule(aten.alias, aten.alias_copy, aten.detach, aten.detach_copy, aten.lift_fresh, aten.lift, aten.contiguous,
          aten.resolve_conj, aten.resolve_neg, aten.positive, aten.pin_memory, aten.requires_grad_)  # fmt: skip
def same(x: Operand) -> DimMap:
    """Every dim as it is."""
    own = labels_of(x)
    return DimMap((own,), (own,), moves=True)


@dim_rule(aten._conj, aten.conj, aten._neg_view, aten.real, aten.imag)
def same_dims(x: Operand) -> DimMap:
    """Every dim as it is, with other elements."""
    return same(x)._replace(moves=False)


@dim_rule(aten.view_as_real, aten.view_as_real_copy)
def view_as_real(x: Operand) -> DimMap:
    """A new last dim of real and imaginary parts."""
    return carried(x, [*labels_of(x), None], moves=False)


@dim_rule(aten.view_as_complex, aten.view_as_complex_copy)
def view_as_complex(x: Operand) -> DimMap:
    """The last dim, of real and imaginary parts, removed."""
    return carried(x, labels_of(x)[:-1], moves=False)


@dim_rule(aten.view.dtype, aten.view_copy.dtype)
def view_as_dtype(x: Operand, dtype: torch.dtype) -> DimMap:
    """The bytes as another dtype; one of another size regroups the last dim."""
    last = [] if dtype.itemsize == x.dtype.itemsize else [x.ndim - 1]
    return carried(x, labels_of(x), last, moves=False)


@dim_rule(aten.select.int, aten.select_copy, aten.unbind, aten.unbind_copy)
def select(x: Operand, dim: int) -> DimMap:
    """One position of a dim, or each of them."""
    at = normalized(dim, x.ndim)
    return carried(x, [d for d in labels_of(x) if d != at])


@dim_rule(aten.slice, aten.slice_copy, aten.narrow.default, aten.narrow_copy, aten.split.Tensor, aten.split_copy.Tensor,
          aten.split_with_sizes, aten.split_with_sizes_copy, aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes,
          aten.split.sizes, aten.split.default, aten.tensor_split.indices, aten.tensor_split.sections, aten.chunk,
          aten.unsafe_chunk, aten.repeat_interleave.self_int)  # fmt: skip
def parts(x: Operand, dim: int | None) -> DimMap:
    """Parts of a dim, or its positions repeated; without a dim, of the flattened tensor."""
    if dim is None:
        return carried(x, [None])
    return carried(x, labels_of(x), [normalized(dim, x.ndim)])


@dim_rule(aten.unfold, aten.unfold_copy)
def unfold(x: Operand, dim: int) -> DimMap:
    """Windows of a dim, whose positions are a new last dim."""
    return carried(x, [*labels_of(x), None], [normalized(dim, x.ndim)])


@dim_rule(aten.diagonal, aten.diagonal_copy, aten.linalg_diagonal)
def diagonal(x: Operand, dim1: int, dim2: int) -> DimMap:
    """A diagonal of two dims, as a new last dim."""
    both = normalized(dim1, x.ndim), normalized(dim2, x.ndim)
    return carried(x, [*[d for d in labels_of(x) if d not in both], None])


@dim_rule(aten.diag_embed)
def diag_embed(x: Operand, dim1: int, dim2: int) -> DimMap:
    """The last dim on a diagonal of two new dims."""
    new = {normalized(dim1, x.ndim + 1), normalized(dim2, x.ndim + 1)}
    kept = iter(labels_of(x)[:-1])
    return carried(x, [None if d in new else next(kept, None) for d in range(x.ndim + 1)], moves=False)


@dim_rule(aten.flip, aten.roll)
def reorder(x: Operand, dim: Sequence[int], shifts: Sequence[int] = ()) -> DimMap:
    """The positions of some dims in another order; a roll without dims is one of the flattened tensor."""
    named = [normalized(d, x.ndim) for d in ([dim] if isinstance(dim, int) else dim)]
    return carried(x, labels_of(x), named if named or not shifts else labels_of(x))


@dim_rule(aten.rot90)
def rot90(x: Operand, k: int, dim: Sequence[int]) -> DimMap:
    """Two dims rotated."""
    a, b = (normalized(d, x.ndim) for d in dim)
    labels = [*labels_of(x)]
    if k % 2:
        labels[a], labels[b] = b, a
    return carried(x, labels, [a, b] if k % 4 else [])


@dim_rule(aten.tril, aten.triu)
def triangle(x: Operand) -> DimMap:
    """The last two dims, zero beyond a diagonal."""
    return carried(x, labels_of(x), labels_of(x)[-2:], moves=False)


@dim_rule(aten.repeat, aten.tile)
def repeat(x: Operand, repeats: Sequence[int] = (), dim: Sequence[int] = ()) -> DimMap:
    """The tensor laid out again and again along some dims."""
    times = [*(repeats or dim)]
    times = [1] * (x.ndim - len(times)) + times
    added = len(times) - x.ndim
    return carried(x, [*[None] * added, *labels_of(x)], [d for d in labels_of(x) if times[d + added] != 1])


@dim_rule(aten.constant_pad_nd, aten.pad, aten.reflection_pad1d, aten.reflection_pad2d, aten.reflection_pad3d,
          aten.replication_pad1d, aten.replication_pad2d, aten.replication_pad3d)  # fmt: skip
def border(x: Operand, padding: Sequence[int]) -> DimMap:
    """A border at both ends of the last dims."""
    touched = [x.ndim - 1 - i // 2 for i, width in enumerate(padding) if width]
    return carried(x, labels_of(x), touched, moves=False)


@dim_rule(aten.glu)
def glu(x: Operand, dim: int) -> DimMap:
    """A dim of half the size."""
    return carried(x, labels_of(x), [normalized(dim, x.ndim)], moves=False)


@dim_rule(aten.cat, aten.concat, aten.concatenate)
def cat(tensors: Sequence[Operand], dim: int) -> DimMap:
    """Tensors joined along a dim; one of shape (0,) adds nothing."""
    rank = max(x.ndim for x in tensors)
    own = tuple(range(rank))
    return DimMap(
        tuple(own if x.ndim == rank else (None,) * x.ndim for x in tensors),
        (own,),
        frozenset([normalized(dim, rank), None]),
        moves=True,
    )


@dim_rule(aten.stack, aten._stack)
def stack(tensors: Sequence[Operand], dim: int) -> DimMap:
    """Tensors joined along a new dim."""
    own = labels_of(tensors[0])
    at = normalized(dim, len(own) + 1)
    return DimMap((own,) * len(tensors), ((*own[:at], None, *own[at:]),), moves=True)


@dim_rule(aten.select_scatter, aten.slice_scatter)
def scatter_part(x: Operand, src: Operand, dim: int) -> DimMap:
    """A part of a dim replaced."""
    own, at = labels_of(x), normalized(dim, x.ndim)
    source: Labels = own if src.ndim == x.ndim else tuple(d for d in own if d != at)
    return DimMap((own, source), (own,), frozenset([at]), moves=True)
