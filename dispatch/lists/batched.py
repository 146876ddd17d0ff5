"""Matrix functions over lists: elements of one shape are stacked and run as one batched call.

A row of the table gives the call on operands with a leading batch dimension; `batched_call` gives None where stacking
would change the result. Results are selected back out of the batch. Parts of one arena that follow each other at equal
distances already are a stack, so no copy is made of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from subtensors.dispatch.lists.list_call import ElementList, ListCall, ListPlan
from subtensors.dispatch.ops.tree import PyTree


def _addmm(
    c: Tensor,  # (batch, n) or (batch, m, n)
    a: Tensor,  # (batch, m, k)
    b: Tensor,  # (batch, k, n)
    *,
    beta: float = 1,
    alpha: float = 1,
) -> Tensor:
    return torch.baddbmm(c.unsqueeze(1) if c.dim() == 2 else c, a, b, beta=beta, alpha=alpha)


def _linear(
    x: Tensor,  # (batch, rows, in)
    weight: Tensor,  # (batch, out, in)
    bias: Tensor | None = None,  # (batch, out)
) -> Tensor:
    return torch.bmm(x, weight.mT) if bias is None else torch.baddbmm(bias.unsqueeze(1), x, weight.mT)


@dataclass(frozen=True)
class BatchRow:
    """The batched form of a function: the numbers of dims that each operand may have, and the call on stacks."""

    dims: tuple[tuple[int, ...], ...]
    batch: Callable[..., PyTree]


_MATRIX = (2, 3)


_FUNCTIONS_AND_METHODS = {
    "mm": BatchRow(((2,), (2,)), torch.bmm),
    "bmm": BatchRow(((3,), (3,)), torch.matmul),
    "matmul": BatchRow((_MATRIX, _MATRIX), torch.matmul),
    "addmm": BatchRow(((1, 2), (2,), (2,)), _addmm),
    "inverse": BatchRow((_MATRIX,), torch.linalg.inv),
    "det": BatchRow((_MATRIX,), torch.linalg.det),
    "slogdet": BatchRow((_MATRIX,), torch.linalg.slogdet),
}


def _rows() -> dict[Callable[..., PyTree], BatchRow]:
    owners = (torch, torch.Tensor)
    rows = {getattr(owner, name): row for name, row in _FUNCTIONS_AND_METHODS.items() for owner in owners}
    rows[torch.nn.functional.linear] = BatchRow(((2,), (2,), (1,)), _linear)
    # torch.linalg takes any number of leading batch dimensions.
    one = (
        "cholesky cholesky_ex det eig eigh eigvals eigvalsh inv inv_ex ldl_factor lu lu_factor matrix_exp pinv qr "
        "slogdet svd svdvals"
    ).split()
    for name in one:
        func = getattr(torch.linalg, name)
        rows[func] = BatchRow((_MATRIX,), func)
    for func in (torch.linalg.solve, torch.linalg.solve_triangular):
        rows[func] = BatchRow((_MATRIX, _MATRIX), func)
    return rows


ROWS = _rows()


def _run(call: ListCall[ElementList], row: BatchRow, groups: list[list[int]]) -> list[PyTree]:
    """Run the call once per group of elements that are stacked together; return the result of each, in order."""
    lists = [x.tensors for x in call.lists]
    out: list[PyTree] = [None] * len(lists[0])
    for group in groups:
        if len(group) == 1:
            out[group[0]] = call.run([x[group[0]] for x in lists])
            continue
        args, kwargs = call.with_lists([stack([x[i] for i in group]) for x in lists])
        result = row.batch(*args, **kwargs)
        for at, i in enumerate(group):
            out[i] = _select(result, at)
    return out


def batched_call(call: ListCall[ElementList]) -> ListPlan | None:
    """Return the batched form of a call; None if stacking would change what is computed.

    Every matrix operand must be a list (a plain one would be copied for each element), at least two elements must
    have the same shapes, and no operand may require grad while gradients are recorded: selected results share one
    version counter, so an in-place op on one of them would count as a write to all.
    """
    row = ROWS.get(call.func)
    if row is None or "out" in call.kwargs or len(call.positions) != len(call.args):
        return None
    if len(call.args) > len(row.dims) or any(hasattr(v, "treespec") for v in call.kwargs.values()):
        return None
    lists = [x.tensors for x in call.lists]
    records = torch.is_grad_enabled()
    for elements in zip(*lists, strict=True):
        dims = [t.dim() for t in elements]
        if any(d not in allowed for d, allowed in zip(dims, row.dims, strict=False)):
            return None
        if row.dims == (_MATRIX, _MATRIX) and len(set(dims)) > 1:
            return None
        if any(t.layout is not torch.strided or (records and t.requires_grad) for t in elements):
            return None
    groups = group_by_shape(lists)
    if len(groups) == len(lists[0]):
        return None
    count = f"{len(groups)} shape{'s' if len(groups) > 1 else ''}"
    return ListPlan(lambda: f"batched by shape ({count})", functools.partial(_run, call, row, groups))


def _select(result: PyTree, index: int) -> PyTree:
    if isinstance(result, Tensor):
        return result[index]
    return type(result)([_select(part, index) for part in result])


def stack(tensors: Sequence[Tensor]) -> Tensor:
    """Stack tensors along a new first dimension, without a copy where they lie at equal distances in one storage.

    Returns:
        (len(tensors), *shape). It may share memory with the tensors.

    Example:
        >>> arena = torch.arange(12.0)
        >>> parts = [arena[0:4].view(2, 2), arena[6:10].view(2, 2)]
        >>> stack(parts)[1].data_ptr() == parts[1].data_ptr()
        True
        >>> stack([torch.ones(2), torch.zeros(2)])
        tensor([[1., 1.],
                [0., 0.]])
    """
    first = tensors[0]
    if len(tensors) == 1:
        return first.unsqueeze(0)
    step = _distance(tensors)
    if step is None:
        return torch.stack(list(tensors))
    return first.as_strided((len(tensors), *first.shape), (step, *first.stride()), first.storage_offset())


def _distance(tensors: Sequence[Tensor]) -> int | None:
    """The distance in values from each tensor to the next; None if a stack of them takes a copy."""
    first = tensors[0]
    addresses = list(map(Tensor.data_ptr, tensors))
    step = addresses[1] - addresses[0]
    reach = sum((n - 1) * s for n, s in zip(first.shape, first.stride(), strict=True)) + 1
    is_even = addresses == [addresses[0] + i * step for i in range(len(tensors))]
    if not is_even or not first.numel() or step % first.element_size() or step < reach * first.element_size():
        return None
    # Neighbours in memory may still be two allocations, and a view of one must not reach into the other.
    alike = _place(first)
    if any(_place(t) != alike for t in tensors):
        return None
    return None if any(t.requires_grad and torch.is_grad_enabled() for t in tensors) else step // first.element_size()


def _place(t: Tensor) -> tuple[object, ...]:
    return t.untyped_storage()._cdata, t.stride(), t.is_conj(), t.is_neg()


def group_by_shape(columns: Sequence[Sequence[Tensor]]) -> list[list[int]]:
    """Group the elements whose tensors agree in shape, dtype and device; return the indices of each group."""
    groups: dict[Hashable, list[int]] = {}
    for i, row in enumerate(zip(*columns, strict=True)):
        groups.setdefault(tuple([(t.shape, t.dtype, t.device) for t in row]), []).append(i)
    return list(groups.values())
