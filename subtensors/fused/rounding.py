"""Stochastic rounding to bfloat16."""

from __future__ import annotations

import torch
from torch import Tensor

torch.library.define(
    "subtensors::stochastic_round", "(Tensor x, int salt=0) -> Tensor", tags=[torch.Tag.nondeterministic_seeded]
)


@torch.library.impl("subtensors::stochastic_round", "CompositeExplicitAutograd")
def _round(x: Tensor, salt: int = 0) -> Tensor:
    x = x.float()
    noise = torch.randint_like(x, 1 << 16, dtype=torch.int32)
    rounded = ((x.contiguous().view(torch.int32) + noise) & -65536).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x).to(torch.bfloat16)


@torch.library.register_fake("subtensors::stochastic_round")  # type: ignore[untyped-decorator]
def _fake(x: Tensor, salt: int = 0) -> Tensor:
    return torch.empty_like(x, dtype=torch.bfloat16)


def stochastic_round_(target: Tensor, source: Tensor) -> Tensor:
    """Write `source` to a bfloat16 tensor, rounding up with the probability of the part that is cut off.

    The expectation of the result is `source`, so updates smaller than half a bfloat16 step are not lost but
    taken now and then. Inside `st.fused` math it is part of the kernel's store.

    Args:
        target: bfloat16, written in place; any shape.
        source: float32 of a shape that broadcasts to it.

    Returns:
        `target`.

    Raises:
        TypeError: `target` is not bfloat16.

    Example:
        >>> import torch
        >>> p = torch.ones(10_000, dtype=torch.bfloat16)
        >>> _ = stochastic_round_(p, torch.full((10_000,), 1 + 2 ** -9))
        >>> sorted(p.unique().tolist()), 0.2 < (p > 1).float().mean().item() < 0.3
        ([1.0, 1.0078125], True)

    Source: Gupta et al., "Deep Learning with Limited Numerical Precision", 2015.
    """
    if target.dtype != torch.bfloat16:
        raise TypeError(f"stochastic_round_ writes to bfloat16, got {target.dtype}")
    return target.copy_(torch.ops.subtensors.stochastic_round(source))
