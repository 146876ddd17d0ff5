"""Matrix functions over lists: elements of one shape are stacked and run as one batched call.

A row of the table gives the call on operands with a leading batch dimension; `batched_call` gives None where stacking
would change the result. Results are selected back out of the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from subtensors.dispatch.lists.list_call import ListCall
from subtensors.dispatch.lists.stacking import stacked

Batch = Callable[..., Any]


def _matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.matmul(a, b)


def _addmm(
    c: torch.Tensor,  # (batch, n) or (batch, m, n)
    a: torch.Tensor,  # (batch, m, k)
    b: torch.Tensor,  # (batch, k, n)
    *,
    beta: float = 1,
    alpha: float = 1,
) -> torch.Tensor:
    return torch.baddbmm(c.unsqueeze(1) if c.dim() == 2 else c, a, b, beta=beta, alpha=alpha)


def _linear(
    x: torch.Tensor,  # (batch, rows, in)
    weight: torch.Tensor,  # (batch, out, in)
    bias: torch.Tensor | None = None,  # (batch, out)
) -> torch.Tensor:
    return torch.bmm(x, weight.mT) if bias is None else torch.baddbmm(bias.unsqueeze(1), x, weight.mT)


@dataclass(frozen=True)
class BatchRow:
    """The batched form of a function: the numbers of dims that each operand may have, and the call on stacks."""

    dims: tuple[tuple[int, ...], ...]
    batch: Batch


_MATRIX = (2, 3)


def _rows() -> dict[Callable[..., Any], BatchRow]:
    rows: dict[Callable[..., Any], BatchRow] = {
        torch.mm: BatchRow(((2,), (2,)), torch.bmm),
        torch.Tensor.mm: BatchRow(((2,), (2,)), torch.bmm),
        torch.bmm: BatchRow(((3,), (3,)), torch.matmul),
        torch.Tensor.bmm: BatchRow(((3,), (3,)), torch.matmul),
        torch.matmul: BatchRow((_MATRIX, _MATRIX), _matmul),
        torch.Tensor.matmul: BatchRow((_MATRIX, _MATRIX), _matmul),
        torch.addmm: BatchRow(((1, 2), (2,), (2,)), _addmm),
        torch.Tensor.addmm: BatchRow(((1, 2), (2,), (2,)), _addmm),
        torch.nn.functional.linear: BatchRow(((2,), (2,), (1,)), _linear),
    }
    # torch.linalg takes any number of leading batch dimensions.
    one = (
        "cholesky cholesky_ex det eig eigh eigvals eigvalsh inv inv_ex ldl_factor lu lu_factor matrix_exp pinv qr "
        "slogdet svd svdvals"
    ).split()
    for name in one:
        func = getattr(torch.linalg, name)
        rows[func] = BatchRow((_MATRIX,), func)
    rows[torch.linalg.solve] = BatchRow((_MATRIX, _MATRIX), torch.linalg.solve)
    rows[torch.linalg.solve_triangular] = BatchRow((_MATRIX, _MATRIX), torch.linalg.solve_triangular)
    for name, func in (("inverse", torch.linalg.inv), ("det", torch.linalg.det), ("slogdet", torch.linalg.slogdet)):
        for owner in (torch, torch.Tensor):
            rows[getattr(owner, name)] = BatchRow((_MATRIX,), func)
    return rows


ROWS = _rows()


@dataclass(frozen=True)
class BatchedCall:
    """A call over lists run as one batched call a shape; `groups` are the indices of elements stacked together."""

    call: ListCall
    row: BatchRow
    groups: list[list[int]]

    def run(self) -> list[Any]:
        """The result of each element, in order."""
        out: list[Any] = [None] * sum(map(len, self.groups))
        lists = [x.tensors for x in self.call.lists]
        for group in self.groups:
            if len(group) == 1:
                out[group[0]] = self.call.run([x[group[0]] for x in lists])
                continue
            args, kwargs = self.call.with_lists([stacked([x[i] for i in group]) for x in lists])
            result = self.row.batch(*args, **kwargs)
            for at, i in enumerate(group):
                out[i] = _select(result, at)
        return out

    def describe(self) -> str:
        """Describe the call: batched, with the number of shapes."""
        return f"batched by shape ({len(self.groups)} shape{'s' if len(self.groups) > 1 else ''})"


def batched_call(call: ListCall) -> BatchedCall | None:
    """The batched form of a call, or None where stacking would change what is computed.

    Every matrix operand must be a list (a plain one would be stacked for nothing), at least two elements must have the
    same shapes, and no operand may require grad while gradients are recorded: selected results share one version
    counter, so that an in-place op on one of them would look like a change of all.
    """
    row = ROWS.get(call.func)
    if row is None or "out" in call.kwargs or len(call.positions) != len(call.args):
        return None
    if len(call.args) > len(row.dims) or any(hasattr(v, "treespec") for v in call.kwargs.values()):
        return None
    lists = [x.tensors for x in call.lists]
    by_shape: dict[Any, list[int]] = {}
    records = torch.is_grad_enabled()
    for i, elements in enumerate(zip(*lists, strict=True)):
        dims = [t.dim() for t in elements]
        if any(d not in allowed for d, allowed in zip(dims, row.dims, strict=False)):
            return None
        if row.batch in (_matmul, torch.linalg.solve, torch.linalg.solve_triangular) and len(set(dims)) > 1:
            return None
        if any(t.layout is not torch.strided or (records and t.requires_grad) for t in elements):
            return None
        by_shape.setdefault(tuple((t.shape, t.dtype, t.device) for t in elements), []).append(i)
    if len(by_shape) == len(lists[0]):
        return None
    return BatchedCall(call, row, list(by_shape.values()))


def _select(result: Any, index: int) -> Any:
    if isinstance(result, torch.Tensor):
        return result[index]
    return type(result)([_select(part, index) for part in result])
