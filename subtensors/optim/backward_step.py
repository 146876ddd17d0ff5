"""Steps within the backward pass: a parameter is updated once its gradient is complete, and the gradient freed.

For each parameter there is a part of the optimizer: in an update it has the attributes that the optimizer then has, but
a group of this parameter alone, and an updater of its own, whose batch is kept from step to step. Hooks refer to the
optimizer weakly, and it holds the parts, so parameters hold nothing that holds them.
"""

from __future__ import annotations

import threading
import weakref
from functools import partial
from typing import ClassVar, Protocol

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from subtensors.dispatch.graphs import deferred_finalizers
from subtensors.optim.state_dict import SavedOptimizer, drop_provisional_state, make_state
from subtensors.optim.step import StepFunction, Updater, accumulates

_lock = threading.Lock()
"""Held by an update: each device has a thread of the backward."""


class PartedOptimizer(SavedOptimizer, Protocol):
    """The attributes of an optimizer that a step within the backward reads."""

    _fusion: ClassVar[StepFunction]
    _parts: dict[Tensor, PartedOptimizer]


def hook_updates(optimizer: PartedOptimizer) -> list[RemovableHandle]:
    """Give each parameter that requires a gradient a hook that updates it; see `Optimizer.step_in_backward`."""
    _refuse(optimizer)
    drop_provisional_state(optimizer)
    make_state(optimizer)
    optimizer._parts, handles = {}, []
    for index, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            if p.requires_grad:
                part = optimizer._parts[p] = object.__new__(type(optimizer))
                part._updater, part.param_groups = Updater(type(optimizer), optimizer._fusion), [{"params": [p]}]
                hook = partial(_update, weakref.ref(optimizer), index)
                handles.append(p.register_post_accumulate_grad_hook(hook))
    return handles


@torch.no_grad()
def _update(owner: weakref.ref[PartedOptimizer], index: int, p: Tensor) -> None:
    """Update a parameter of the group with this index, and drop its gradient."""
    optimizer = owner()
    if optimizer is None:
        return
    with _lock:
        _refuse(optimizer)
        part = optimizer._parts[p]
        group = optimizer.param_groups[index] | {"params": part.param_groups[0]["params"]}
        own = {"param_groups": [group], "_updater": part._updater, "_parts": {}}
        vars(part).update(vars(optimizer) | own)
        part._updater.update_all(part)
    p.grad = None


def _refuse(optimizer: PartedOptimizer) -> None:
    """Raise RuntimeError with the reason if something needs more than the gradients of one parameter and backward."""
    groups, distributed = optimizer.param_groups, torch.distributed
    is_parallel = distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
    reasons = {
        "max_norm needs the norm of all": any(group.get("max_norm") is not None for group in groups),
        "accumulate adds up those of several passes": accumulates(groups),
        "a captured step reads all": optimizer._capture is not None,
        "several processes reduce them later": is_parallel,
        "a graph would keep the learning rate of its capture": deferred_finalizers.is_capturing(),
    }
    for reason, holds in reasons.items():
        if holds:
            raise RuntimeError(f"step_in_backward takes gradients one by one, and {reason}: leave one of them out")


def refuse_scaler(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    """Raise RuntimeError if a GradScaler takes this step, which comes after the updates."""
    if getattr(optimizer, "found_inf", None) is not None:
        raise RuntimeError("step_in_backward updates before a GradScaler divides by its scale: leave one of them out")
