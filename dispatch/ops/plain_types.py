"""The types of tensors that kernels and foreach overloads may read and write through their addresses."""

from __future__ import annotations

from functools import partial

import torch

from subtensors.dispatch.torch_internals import dynamo, dynamo_rules

PLAIN_TYPES: set[type[torch.Tensor]] = {torch.Tensor, torch.nn.Parameter}
"""Exactly these types, not their subclasses: a subclass may mean something else by its memory."""


def read_as_plain(kind: type[torch.Tensor], reason: str) -> None:
    """Add a tensor subclass to the plain types, here and in compiled code.

    Args:
        kind: the class.
        reason: why compiled code can't set `.data` of such a tensor.
    """
    PLAIN_TYPES.add(kind)
    dynamo_rules.on_first_compile(
        kind,
        partial(dynamo.pass_as_plain, kind),
        partial(dynamo.show_gradients, kind),
        partial(dynamo.break_at_moves, kind, reason),
    )


def detached(x: torch.Tensor) -> torch.Tensor:
    """The same memory as a plain tensor that is not tracked by autograd.

    Args:
        x: of one of these types.
    """
    with torch._C.DisableTorchFunctionSubclass():
        return torch.Tensor.detach(x)
