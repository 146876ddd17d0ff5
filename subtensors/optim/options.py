"""The options that every optimizer here takes beside its own."""

from __future__ import annotations

from typing import Any, TypedDict

import torch


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

    graph: bool
    """Take steps by replaying a CUDA graph: the same as calling `capture()`. Of the whole optimizer. Default False."""


DEFAULTS: dict[str, Any] = {"master_weights": False, "state_dtype": None, "graph": False}

WHOLE = {"graph"}
"""Options of the optimizer rather than of its groups."""


def recorded(options: Options) -> dict[str, Any]:
    """The options that were asked for, to be among the defaults of a group.

    Raises:
        TypeError: an option is not known.
    """
    given: dict[str, Any] = dict(options)
    if unknown := given.keys() - DEFAULTS.keys():
        raise TypeError(f"no optimizer takes {sorted(unknown)}; the options of each are {sorted(DEFAULTS)}")
    return {name: value for name, value in given.items() if value != DEFAULTS[name] and name not in WHOLE}
