"""The types of tensors that kernels and foreach overloads may read and write through their addresses."""

from __future__ import annotations

import torch

from subtensors.dispatch import dynamo_private, torch_private

PLAIN_TYPES: set[type[torch.Tensor]] = {torch.Tensor, torch.nn.Parameter}
"""Exactly these types, not their subclasses: a subclass may mean something else by its memory."""


def read_as_plain(kind: type[torch.Tensor]) -> None:
    """Count a subclass of ours among them, here and in torch."""
    PLAIN_TYPES.add(kind)
    torch_private.treat_as_plain(kind)


def detached(x: torch.Tensor) -> torch.Tensor:
    """The same memory as a plain tensor that autograd does not watch.

    Args:
        x: of one of these types.
    """
    with torch._C.DisableTorchFunctionSubclass():
        return torch.Tensor.detach(x)


dynamo_private.show_gradients(PLAIN_TYPES)
