"""Private parts of torch.distributed.checkpoint: one function each, with the versions checked."""

from __future__ import annotations

import sys
import traceback

from subtensors.dispatch.torch_internals.requires import requires


def is_initializing_state() -> bool:
    """Return whether torch.distributed.checkpoint takes the current step, of an optimizer that has no state yet.

    It gives all parameters gradients of zero, and sets each `lr` to 0, to learn what state there will be.
    """
    return "torch.distributed.checkpoint.state_dict" in sys.modules and _is_called_by_it()


@requires("torch.distributed.checkpoint.state_dict._init_optim_state", otherwise=lambda: False)
def _is_called_by_it() -> bool:
    """Return whether the caller is called by the function that takes such steps. Checked on 2.13."""
    from torch.distributed.checkpoint.state_dict import _init_optim_state

    return any(frame.f_code is _init_optim_state.__code__ for frame, _ in traceback.walk_stack(sys._getframe(1)))
