"""Steps within the backward pass, so that gradients are freed as the optimizer takes them.

A parameter's gradient is complete when its post-accumulate hook runs. The hooks let gradients gather until they fill a
bucket, take a step for the parameters that have one, and drop them: there is at most a bucket of gradients, and one
more, rather than the model's.
"""

from __future__ import annotations

import threading
import weakref
from typing import Protocol, cast

import torch
from torch import Tensor

from subtensors.counts import parse_bytes


class _Steps(Protocol):
    def _take_step(self, closure: None) -> object: ...


class BackwardStep:
    """The hooks of an optimizer's parameters; `remove()` takes them away.

    Args:
        optimizer: one of st.optim; it is not kept alive.
        bucket_size: bytes of the gradients that one step is taken for.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, bucket_size: int | str) -> None:
        self.bucket_size = parse_bytes("bucket_size", bucket_size)
        _refuse(optimizer)
        self._optimizer, self._lock = weakref.ref(optimizer), threading.Lock()
        self._waiting: dict[Tensor, None] = {}
        """Parameters whose gradients wait, each once, in order."""
        self._bytes = 0
        params = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        self._hooks = [p.register_post_accumulate_grad_hook(self._gather) for p in params]
        self._hooks.append(optimizer.register_step_pre_hook(_refuse_call))

    def remove(self) -> None:
        """Remove the hooks; gradients that wait are left to `step()`."""
        for hook in self._hooks:
            hook.remove()

    def _gather(self, p: Tensor) -> None:
        """Step for all gradients that are there, once they are large enough."""
        optimizer = self._optimizer()
        if optimizer is None:
            return
        with self._lock:  # each device has a thread of the backward
            if p not in self._waiting:
                self._waiting[p] = None
                self._bytes += p.nbytes
            if self._bytes < self.bucket_size:
                return
            # Gradients that were dropped since, as zero_grad() does, wait no more.
            self._waiting = {q: None for q in self._waiting if q.grad is not None}
            self._bytes = sum(q.nbytes for q in self._waiting)
            if self._bytes < self.bucket_size:
                return
            _refuse(optimizer)
            cast(_Steps, optimizer)._take_step(None)
            for q in self._waiting:
                q.grad = None
            self._waiting, self._bytes = {}, 0


def _refuse(optimizer: torch.optim.Optimizer) -> None:
    """Refuse what needs all gradients at once, or more than one backward.

    Raises:
        RuntimeError: with the option.
    """
    groups = optimizer.param_groups
    reasons = {
        "max_norm needs the norm of all gradients": any(group.get("max_norm") is not None for group in groups),
        "accumulate adds up gradients of several passes": groups[0].get("accumulate", 1) != 1,
        "a captured step reads all gradients": getattr(optimizer, "_capture", None) is not None,
        "several processes reduce gradients later": torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1,
    }
    for reason, holds in reasons.items():
        if holds:
            raise RuntimeError(f"step_in_backward takes gradients one by one, and {reason}: leave one of them out")


def _refuse_call(optimizer: torch.optim.Optimizer, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    """Refuse a `step` that comes too late for what it says of the gradients."""
    if len(args) > 1 or kwargs.get("closure") is not None or getattr(optimizer, "found_inf", None) is not None:
        raise RuntimeError(
            "with step_in_backward most parameters are updated in the backward, before a closure or a GradScaler "
            "comes to step(): call step() alone, or remove() the hooks"
        )
