"""Torch's hooks and profiler range around an optimizer's step, run only when a hook or a profiler is active."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from subtensors.dispatch.torch_internals import dynamo, ops

Step = TypeVar("Step", bound=Callable[..., Any])


def with_hooks(step: Step) -> Step:
    """Wrap a step so that it runs its hooks and shows in profiles, at no cost while there are neither.

    `torch.optim.Optimizer` wraps the step of every class in a profiler range and in the calls of its hooks. For an
    optimizer with few parameters those take longer than the rest of the step.

    Args:
        step: the method.

    Returns:
        The method, marked so that torch does not wrap it again.
    """
    observed = torch.optim.Optimizer.profile_hook_step(step)

    @functools.wraps(step)
    def hooked(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if ops.step_is_observed(self):
            return observed(self, *args, **kwargs)
        return step(self, *args, **kwargs)

    hooked.hooked = True  # type: ignore[attr-defined]
    dynamo.call_eagerly(hooked, "a step runs its own kernels, which there is nothing to make faster of")
    return hooked  # type: ignore[return-value]
