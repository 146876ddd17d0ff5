"""Checks of the masked kernels against the oracle that several test files share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from masked_oracle import Padded, wanted_gradients, wanted_results
from programs import Lowering
from torch import Tensor

from subtensors.kernels.padded import masked_reduction
from subtensors.kernels.padded.masked_reduction import Reduced

HALVES = (torch.bfloat16, torch.float16)


def plain_reduction(kind: str, p: float, correction: float) -> Any:
    """The kind over a vector, and what it gives for one without elements, where torch refuses."""
    empty = {"amax": -math.inf, "amin": math.inf}

    def reduce(row: Tensor) -> Tensor:
        if not row.numel() and kind in empty:
            return row.new_full((), empty[kind])
        if kind == "norm":
            return torch.linalg.vector_norm(row, p) if row.numel() else row.new_zeros(())
        if kind == "var":
            return row.var(correction=correction)
        if kind == "prod" and row.dtype in HALVES:
            return row.float().prod().to(row.dtype)
        return row.logsumexp(0) if kind == "logsumexp" else getattr(row, kind)()

    return reduce


def power_norm_terms(row: Tensor) -> Tensor:
    return 3 * row.sum()


def check_reduction(
    x: Padded, kind: str, dims: Sequence[int], lowering: Lowering, p: float = 2.0, correction: float = 1.0
) -> None:
    x = x.on(lowering)
    by_torch = lowering is Lowering.TORCH
    run = masked_reduction.masked_reduction_reference if by_torch else masked_reduction.masked_reduction_forward
    back = (
        masked_reduction.masked_reduction_backward_reference if by_torch else masked_reduction.masked_reduction_backward
    )
    plain = plain_reduction(kind, p, correction)
    reduced = run(x.x, kind, dims, x.extents, p, correction, -3.0)
    # A product of n numbers by halves rounds each of them log2 n times.
    depth = math.log2(x.x.numel() + 1) + 1 if kind == "prod" else 1
    terms = Tensor.sum if kind in ("sum", "mean", "norm") else None
    if kind == "norm" and p not in (0.0, 1.0, 2.0, math.inf):
        # The power and the root round as well; torch takes neither of a single element.
        terms, depth = power_norm_terms, 4
    wanted = wanted_results(x, dims, plain, -3.0, terms, depth)
    wanted.check(reduced.out, lowering)
    counts = [len(positions) for positions, _ in x.rows(dims)]
    assert reduced.counts.flatten().tolist() == counts
    if kind == "prod" and x.x.dtype in HALVES:
        return  # the gradient in half precision is a quotient of products that overflow in other places than torch's
    g = torch.randn(reduced.out.shape).to(x.x.device, x.x.dtype)
    exact = Reduced(torch.where(reduced.counts > 0, wanted.plain, reduced.out), reduced.aux, reduced.counts)
    gradient = back(g, x.x, *exact, kind, dims, x.extents, p, correction)
    assert not gradient[~x.mask].any()
    if (kind, p) == ("norm", 0.0):
        assert not gradient.any()  # a count does not vary
    else:
        wanted_gradients(x, g, dims, plain, depth).check(gradient, lowering)
