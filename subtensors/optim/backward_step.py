"""Steps within the backward pass: a parameter is updated once its gradient is complete, and the gradient freed.

For each parameter there is an updater of a group of this parameter alone, whose batch is kept from step to step. Hooks
refer to the optimizer weakly, and it holds the updaters, so parameters hold nothing that holds them.
"""

from __future__ import annotations

import threading
import weakref
from functools import partial

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from subtensors.dispatch.graphs import deferred_finalizers
from subtensors.optim.accumulation import Group
from subtensors.optim.state_dict import SavedOptimizer, drop_provisional_state
from subtensors.optim.step import Updater, accumulates
from subtensors.optim.versions import States

_lock = threading.Lock()
"""Held by an update: each device has a thread of the backward."""


def hook_updates(optimizer: SavedOptimizer) -> list[RemovableHandle]:
    """Give each parameter that requires a gradient a hook that updates it; see `Optimizer.step_in_backward`."""
    _refuse(optimizer)
    optimizer._parts, handles = {}, []
    for index, group in enumerate(optimizer.param_groups):
        for position, p in enumerate(group["params"]):
            if p.requires_grad:
                optimizer._parts[p] = Updater(type(optimizer), optimizer._fusion)
                hook = partial(_update, weakref.ref(optimizer), (index, position))
                handles.append(p.register_post_accumulate_grad_hook(hook))
    return handles


@torch.no_grad()
def _update(owner: weakref.ref[SavedOptimizer], place: tuple[int, int], p: Tensor) -> None:
    """Update a parameter that was at this place of the groups, and drop its gradient, unless no group has it now."""
    optimizer = owner()
    group = None if optimizer is None else _group_of(p, optimizer.param_groups, *place)
    if optimizer is None or group is None:
        return
    with _lock:
        _refuse(optimizer)
        if type(optimizer.state) is not States:
            optimizer.state = States(dict, optimizer.state)
        drop_provisional_state(optimizer)
        optimizer._parts[p].update_all(optimizer, [group | {"params": [p]}])
    p.grad = None


def _group_of(p: Tensor, groups: list[Group], index: int, position: int) -> Group | None:
    """Return the group of a parameter, which it was found in at some position before; None if none has it."""
    params = groups[index]["params"] if index < len(groups) else []
    if position < len(params) and params[position] is p:
        return groups[index]
    return next((group for group in groups if any(other is p for other in group["params"])), None)


def _refuse(optimizer: SavedOptimizer) -> None:
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
