"""The options that every optimizer here takes beside its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor

if TYPE_CHECKING:
    from subtensors.static.arena import Arena


class Options(TypedDict, total=False):
    """Options of any optimizer; each may differ between parameter groups, unless it says otherwise.

    An option is recorded where it is asked for, so that the groups of an optimizer without one are torch.optim's.
    """

    master_weights: bool
    """Keep a float32 `master_param` for every bfloat16 or float16 parameter, with the rest of its state in float32,
    and round the parameter from it. Default False."""

    state_dtype: str | torch.dtype | None
    """In how few bits the optimizers that can keep their state: "int8", torch.bfloat16, or None for as many as it is
    computed in. Default None."""

    max_norm: float | Tensor | None
    """Clip: scale the gradients by max_norm / (norm + 1e-6) where that is less than 1, inside the step. The norm is
    that of the gradients of all groups and parameters of the optimizer together. None: don't. Default None."""

    accumulate: int
    """Update in every so-manieth call of `step` only, by the mean of the gradients that the backward passes since the
    last update have added up; `zero_grad` leaves them alone until then. The same for all groups. Default 1."""

    ema: float | Tensor | None
    """Keep an average of each parameter, `ema` of which a step keeps: a <- ema a + (1 - ema) p, taken inside the step,
    from what the parameter was before the first one. In float32 or more. None: don't. Default None."""

    graph: bool
    """Take steps by replaying a CUDA graph: the same as calling `capture()`. Of the whole optimizer. Default False."""

    arena: Arena | None
    """Where the state is made: `arena.release()` then frees its memory, and after `arena.restore()` it is back at the
    same addresses. Of the whole optimizer. Default None: in memory of its own."""


DEFAULTS: dict[str, Any] = {
    "master_weights": False,
    "state_dtype": None,
    "max_norm": None,
    "accumulate": 1,
    "ema": None,
    "graph": False,
    "arena": None,
}

WHOLE = {"graph", "arena"}
"""Options of the optimizer that its groups don't hold."""

IN_STEP = ("max_norm", "accumulate", "ema")
"""Options whose values a step is handed beside the hyperparameters of `update`."""


def check_options(group: Mapping[str, Any]) -> None:
    """Refuse values that are out of range.

    Raises:
        ValueError: with the option and its value.
    """
    if (max_norm := group.get("max_norm")) is not None and not max_norm > 0:
        raise ValueError(f"Invalid max_norm: {max_norm}; expected more than 0, or None")
    if (ema := group.get("ema")) is not None and not 0 <= ema <= 1:
        raise ValueError(f"Invalid ema: {ema}; expected a number from 0 to 1, or None")
    if type(passes := group.get("accumulate", 1)) is not int or passes < 1:
        raise ValueError(f"Invalid accumulate: {passes}; expected a whole number of backward passes, 1 or more")


def recorded(options: Options) -> dict[str, Any]:
    """The options that were asked for, to be among the defaults of a group.

    Raises:
        TypeError: an option is not known.
    """
    given: dict[str, Any] = dict(options)
    if unknown := given.keys() - DEFAULTS.keys():
        raise TypeError(f"no optimizer takes {sorted(unknown)}; the options of each are {sorted(DEFAULTS)}")
    return {name: value for name, value in given.items() if value != DEFAULTS[name] and name not in WHOLE}
