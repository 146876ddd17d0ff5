"""What a step does to one tensor, around an optimizer's `update`; all of it is traced into one program.

w, *states = p (or its master), *state entries      in float32 where they are stored in less
g          = g.to(w.dtype) / grad_scale             negated when maximizing
update(w, g, *states, **hyperparameters)
each of them <- where(found_inf, what it was, what update left)
p          <- w                                     where w is its master
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from subtensors.dispatch.errors import RuleError
from subtensors.optim.low_bit_state import Dithered, Quantized, read, write


def single_tensor(cls: type) -> Callable[..., None]:
    """The step of optimizer class `cls` for one tensor.

    Args:
        cls: a class with `update(self, p, g, *states, **hyperparameters)`.

    Returns:
        A function that writes the parameter, its master and its state entries in place.
    """
    # It has the methods of the class and none of an instance's values, which a trace would freeze for all instances.
    rules: Any = object.__new__(cls)
    update: Callable[..., None] = rules.update

    def step(
        p: Tensor,
        g: Tensor,
        master: Tensor | None,
        entries: tuple[Tensor | Quantized | Dithered | None, ...],
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
        maximize: bool,
        hyperparameters: dict[str, Any],
    ) -> None:
        targets = (p if master is None else master, *entries)
        values = [None if t is None else _computed(t, must_copy=found_inf is not None) for t in targets]
        w, *states = values
        assert w is not None
        g = g.to(w.dtype)
        if grad_scale is not None:
            g = g / grad_scale
        if maximize:
            g = -g
        try:
            update(w, g, *states, **hyperparameters)
        except AttributeError as error:
            if error.obj is not rules:
                raise
            raise RuleError(
                f"{cls.__name__}.update reads self.{error.name}: it is traced once for the class, so what differs "
                "between instances or steps must reach it as a keyword-only argument, from the parameter group"
            ) from error
        for target, value in zip(targets, values, strict=True):
            if target is None or value is None or value is target:
                continue
            if isinstance(target, Quantized | Dithered):
                write(target, value, found_inf)
            else:
                target.copy_(value if found_inf is None else torch.where(found_inf != 0, target, value))
        if master is not None:
            p.copy_(master)

    step.__name__ = cls.__name__
    return step


def is_narrow(dtype: torch.dtype) -> bool:
    """Is this a float of less than 32 bits?"""
    return dtype.is_floating_point and dtype.itemsize < 4


def _computed(stored: Tensor | Quantized | Dithered, must_copy: bool) -> Tensor:
    """The tensor that `update` works on: the stored one itself, unless its dtype is narrow or a copy is needed."""
    if isinstance(stored, Quantized | Dithered):
        return read(stored)
    if is_narrow(stored.dtype):
        return stored.float()
    return stored.clone() if must_copy else stored
