"""A thousand steps under a scheduler that changes every number: no retrace, and no synchronization."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from optimizers import WITH_STATE
from torch.optim import lr_scheduler

import subtensors as st
from subtensors.dispatch.fused.fused_function import FusedFunction
from subtensors.dispatch.fused.triton_executor import TritonExecutor


def made(fusion: FusedFunction) -> dict[str, Any]:
    """What there is of each thing that a step could make anew."""
    groups = [group for plans in fusion._variant.plans.values() for plan in plans for _, group in plan.groups]
    kernels = [kernel for built in fusion._kernels.values() for kernel in built.kernels]
    return {
        "traces": fusion.traces,
        "plans": len(groups),
        "kernels": [kernel.name for kernel in kernels],
        # The interpreter compiles nothing.
        "compiled": [len(k.run.device_caches[0][0]) for k in kernels if hasattr(k.run, "device_caches")],
        "tables": [group.tables_built for group in groups if isinstance(group, TritonExecutor)],
    }


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("name", ["Adam", "SGD"])
def test_a_thousand_scheduled_steps_neither_retrace_nor_synchronize(name: str, device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 5), (7,), (), (64, 64)]
    start = [torch.randn(shape, generator=generator).to(device) for shape in shapes]
    gradients = [torch.randn(shape, generator=generator).to(device) for shape in shapes]
    kwargs = WITH_STATE[name]

    def train(package: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        params = [torch.nn.Parameter(t.to(dtype, copy=True)) for t in start]
        for p, g in zip(params, gradients, strict=True):
            p.grad = g.to(dtype)
        optimizer = getattr(package, name)(params, lr=1e-3, **kwargs)
        # It moves the learning rate in every step, and with it the momentum or the first beta.
        schedule = lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=1010)
        before = None
        for number in range(1002):
            if number == 2 and package is st.optim:
                before = made(optimizer._fusion)
                if device == "cuda":
                    torch.cuda.set_sync_debug_mode("error")
            optimizer.step()
            schedule.step()
        if package is st.optim:
            assert made(optimizer._fusion) == before
        return torch.cat([p.detach().double().flatten() for p in params])

    try:
        ours = train(st.optim)
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    truth, plain = train(torch.optim, torch.float64), train(torch.optim)
    assert (ours - truth).norm() <= 1.5 * (plain - truth).norm()
