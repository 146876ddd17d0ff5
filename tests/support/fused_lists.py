"""Lists for fused calls, and the executors and pointer tables of a fused function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from subtensors.dispatch.fused.fused_function import FusedFunction
from subtensors.dispatch.fused.tensor_columns import TensorColumn
from subtensors.dispatch.fused.triton_executor import TritonExecutor


def lists(
    *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0, device: str = "cpu"
) -> TensorColumn:
    generator = torch.Generator().manual_seed(seed)
    wide = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    return TensorColumn(t.to(dtype).to(device) for t in wide)


def sgd(p: Tensor, g: Tensor, lr: float) -> None:
    p.sub_(lr * g)


def adam(p: Tensor, g: Tensor, m: Tensor, v: Tensor, step: Tensor, *, lr: float, betas: tuple[float, float]) -> None:
    beta1, beta2 = betas
    step.add_(1)
    m.lerp_(g, 1 - beta1)
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    denominator = (v.sqrt() / (1 - beta2**step).sqrt()).add_(1e-8)
    p.addcdiv_(m, denominator * ((1 - beta1**step) / lr), value=-1)


def groups(fusion: FusedFunction) -> list[Any]:
    return [group for plans in fusion._variant.plans.values() for plan in plans for _, group in plan.groups]


def tables(fusion: FusedFunction) -> int:
    return sum(g.tables_built for g in groups(fusion) if isinstance(g, TritonExecutor))
