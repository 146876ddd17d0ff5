"""State that torch.distributed.checkpoint asks for by a step: made to be looked at, and never trained with.

`get_optimizer_state_dict` and `set_optimizer_state_dict` learn what state a new optimizer will have from a step with
gradients of zero and each `lr` at 0. That step counts for nothing here: it makes the state that a first step would
start from, and no more. What `lr` decides would start wrong, so the state is made again when it is saved, and it is
dropped by a step, which starts its own.
"""

from __future__ import annotations

from torch import Tensor

from subtensors.dispatch.torch_internals.checkpoint import is_initializing_state
from subtensors.optim.accumulation import GRADIENT, Groups
from subtensors.optim.state import StateFactory
from subtensors.optim.step import accumulates


def is_checkpoint_step(groups: Groups) -> bool:
    """Return whether the current step, of an optimizer without state, is one that only asks for state."""
    return all(_is_zero(group.get("lr", 0.0)) for group in groups) and is_initializing_state()


def make_state(groups: Groups, factory: StateFactory, names_gradients: bool = False) -> None:
    """Create the state of all parameters that can have a gradient.

    Args:
        groups: the parameter groups.
        factory: makes the state, and puts it where it belongs.
        names_gradients: put an entry for accumulated gradients into it, if there may be some: a flattened checkpoint
            is searched for the names that are here.
    """
    for group in groups:
        params = [p for p in group["params"] if p.requires_grad]
        factory.create_group(params, group)
        for p in params if names_gradients and accumulates(groups) else ():
            factory.state[p][GRADIENT] = p.grad


def _is_zero(lr: object) -> bool:
    # One on a device would have to be read, and is replaced by one on the CPU for such a step.
    return (not isinstance(lr, Tensor) or lr.device.type == "cpu") and bool(lr == 0)
