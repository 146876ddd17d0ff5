"""The plan of a lowered loss: the sizes it has, the limits that a user set, and the cost model's choice for them."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from subtensors.dispatch.chunked.cost_model import (
    ChunkPlan,
    LossShape,
    plan_linear_cross_entropy,
    plan_row_statistics,
)
from subtensors.dispatch.chunked.row_layout import Policy, RowLayout
from subtensors.kernels.cross_entropy.linear_cross_entropy import Accumulate


def chunk_plan(shape: LossShape, policy: Policy, rows: int | None, device: torch.device) -> ChunkPlan:
    """Return the schedule of a loss: that of the policy, or the choice of the cost model.

    Args:
        shape: of the loss.
        policy: the limits that the user set.
        rows: rows of a chunk, where the policy sets rows or chunks.
        device: its free memory is the limit where the policy sets none.
    """
    return _cached_plan(shape, policy.exact, rows, *_limits(shape, policy, rows, device))


def statistics_plan(shape: LossShape, policy: Policy, rows: int | None, device: torch.device) -> ChunkPlan | None:
    """Return the schedule of row statistics, by columns; None where none fits the limits. Arguments as `chunk_plan`."""
    return _cached_statistics_plan(shape, rows, *_limits(shape, policy, rows, device))


def _limits(shape: LossShape, policy: Policy, rows: int | None, device: torch.device) -> tuple[int | None, int | None]:
    """Return the user's limit of memory, and where there is none, nor rows, the free memory."""
    if rows is not None or policy.memory_limit is not None:
        limit = policy.memory_limit
        # The user's limit is for chunks; the schedule's own limit counts the gradients, too.
        return (None if limit is None else limit + shape.hidden_grad_bytes + shape.weight_grad_bytes), None
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
    return None, free and _rounded_down(free)


@functools.lru_cache(maxsize=256)
def _cached_plan(shape: LossShape, exact: bool, rows: int | None, limit: int | None, free: int | None) -> ChunkPlan:
    """Return the plan of a loss; cached, since each step of a training run needs the same."""
    accumulate: Accumulate = "exact" if exact else "fast"
    return plan_linear_cross_entropy(shape, accumulate=accumulate, rows=rows, memory_limit=limit, free_bytes=free)


@functools.lru_cache(maxsize=256)
def _cached_statistics_plan(
    shape: LossShape, rows: int | None, limit: int | None, free: int | None
) -> ChunkPlan | None:
    """Return the plan of row statistics; cached as well."""
    return plan_row_statistics(shape, rows=rows, memory_limit=limit, free_bytes=free)


def _rounded_down(free: int) -> int:
    """Round free memory down to a sixteenth, so that allocations of other processes don't change the plan."""
    step = 1 << max(0, free.bit_length() - 5)
    return free // step * step


def loss_shape(hidden: Tensor, weight: Tensor, grad: bool, exact: bool = True) -> LossShape:
    """Return the sizes that the cost of a loss depends on.

    Args:
        hidden: (N, H).
        weight: (V, H).
        grad: whether gradients are recorded.
        exact: whether the weight's gradient has the weight's dtype, or that of the hidden states.
    """
    size = hidden.itemsize
    needs = (grad and hidden.requires_grad, grad and weight.requires_grad)
    return _shape(*hidden.shape, weight.shape[0], size, weight.itemsize if exact else size, *needs)


_shape = functools.lru_cache(maxsize=256)(LossShape)


def requested_rows(layout: RowLayout) -> int | None:
    """Return the rows of the logits in a chunk where the policy sets them; else None."""
    policy = layout.axis.policy
    if policy.rows is None and policy.chunks is None:
        return None
    size = layout.axis.size
    return max(1, layout.size_in((0, min(size, layout.axis.rows(lambda limit: size)))))
