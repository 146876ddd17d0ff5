"""`st.optim.convert`: a live optimizer of torch.optim as the class of its name here, state included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Unpack

import torch

from subtensors.optim.hyperparameters import COUNTERPARTS
from subtensors.optim.optimizer import Optimizer
from subtensors.optim.options import Options, group_options


def convert(optimizer: torch.optim.Optimizer, **options: Unpack[Options]) -> Optimizer:
    """An optimizer that goes on where `optimizer` is, with the same parameters, options and state.

    Values of the state are copied, so the old optimizer can be dropped, or kept to compare with. Groups hold what they
    held, a scheduler's `initial_lr` and a learning rate that is a tensor included. What refers to the old optimizer
    must be told of the new one: a scheduler by `scheduler.optimizer = new`, one made of others by telling each of
    those; hooks are registered anew.

    Args:
        optimizer: an instance of a torch.optim class that has a counterpart here.
        options: options of every optimizer here, for all groups.

    Returns:
        The instance of that counterpart.

    Raises:
        TypeError: there is no counterpart; a subclass of torch's may do anything in its step, and has none.

    Example:
        >>> import torch, subtensors as st
        >>> w = torch.nn.Parameter(torch.ones(2))
        >>> theirs = torch.optim.Adam([w], lr=0.25)
        >>> w.grad = torch.ones(2)
        >>> theirs.step()
        >>> ours = st.optim.convert(theirs)
        >>> ours.step()
        >>> type(ours).__name__, w.detach(), int(ours.state[w]["step"])
        ('Adam', tensor([0.5000, 0.5000]), 2)
    """
    kind = type(optimizer)
    if kind not in COUNTERPARTS:
        known = ", ".join(sorted(peer.__name__ for peer in COUNTERPARTS))
        raise TypeError(
            f"convert takes an instance of one of torch.optim's {known}; "
            f"got one of {kind.__module__}.{kind.__qualname__}"
        )
    cls: Callable[..., Optimizer] = COUNTERPARTS[kind]
    given = group_options(options)
    groups = [{**group, **given} for group in optimizer.param_groups]
    # What a scheduler has made of a number may be out of range, and is loaded as it is.
    converted = cls([{"params": [*group["params"]]} for group in groups], **options)
    converted.defaults.update(optimizer.defaults, **given)
    # The groups that it loads are copies; the optimizer keeps the values themselves, which others may hold.
    converted.load_state_dict(optimizer.state_dict() | {"param_groups": converted.state_dict()["param_groups"]})
    for group, values in zip(converted.param_groups, groups, strict=True):
        group.update({name: value for name, value in values.items() if name != "params"})
        converted._check(group)
    return converted
