"""The options that every optimizer takes beside its own hyperparameters."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Collection, Mapping
from typing import Any, Literal, TypedDict, cast

import torch
from torch import Tensor

from subtensors.arguments import shown
from subtensors.optim.hyperparameters import check_range
from subtensors.static.arena import Arena

ParamGroup = dict[str, object]
"""The parameters of a group under "params", and its hyperparameters and options by name."""


class OwnOptions(TypedDict, total=False):
    """The options of `Options` that torch.optim's classes don't have."""

    master_weights: bool
    state_dtype: Literal["int8"] | torch.dtype | None
    max_norm: float | Tensor | None
    accumulate: int
    ema: float | Tensor | None
    graph: bool
    arena: Arena | None


class KeywordOptions(OwnOptions, total=False):
    """The flags of `Options` other than `foreach`, which classes of torch.optim take, too."""

    maximize: bool
    capturable: bool
    fused: bool | None
    differentiable: bool


class Options(KeywordOptions, total=False):
    """Options of any optimizer; each may differ between parameter groups, unless it says otherwise.

    A group holds only the options that it was given, so that without any it is the same as torch.optim's.

    Args:
        master_weights: keep a float32 `master_param` for every bfloat16 or float16 parameter, with the rest of its
            state in float32, and round the parameter from it.
        state_dtype: the dtype to keep state in, for the optimizers that can: "int8", torch.bfloat16, or None for the
            dtype it is computed in.
        max_norm: clip: scale the gradients by max_norm / (norm + 1e-6) where that is less than 1, inside the step. The
            norm is over the gradients of all parameters of the optimizer together. None: don't.
        accumulate: update once every `accumulate` calls of `step`, by the mean of the gradients that the backward
            passes since the last update have added up; `zero_grad` leaves them alone until then. A state that is saved
            between updates holds these gradients, too. The same for all groups.
        ema: keep an average of each parameter, updated inside the step: a <- ema a + (1 - ema) p. It starts as the
            parameter before its first step, and is kept in float32 or more. None: don't.
        graph: take steps by replaying a CUDA graph: the same as calling `capture()`. One value for the optimizer.
        arena: the arena to make state in: `arena.release()` then frees its memory, and `arena.restore()` brings it back
            at the same addresses. One value for the optimizer; None: memory of its own.
        maximize: ascend instead of descend.
        foreach: recorded for torch.optim; changes nothing here.
        capturable: recorded for torch.optim, and saves step counts on the device; a step can always be captured.
        fused: recorded for torch.optim, and saves step counts on the device.
        differentiable: only False.
    """

    foreach: bool | None


TORCH_DEFAULTS = {"maximize": False, "foreach": None, "capturable": False, "fused": None, "differentiable": False}
"""The options that torch.optim's classes have among their hyperparameters."""

_OWN = OwnOptions(
    master_weights=False, state_dtype=None, max_norm=None, accumulate=1, ema=None, graph=False, arena=None
)
DEFAULTS: ParamGroup = {**_OWN, **TORCH_DEFAULTS}

_OF_OPTIMIZER = {"graph", "arena"}
"""Options of the whole optimizer, which its groups don't hold."""

PASSES = "accumulated"
"""The entry of a group that counts its passes since the last update; groups with `accumulate` have it."""

IN_STEP = ("max_norm", PASSES, "ema")
"""Entries of a group whose values a step is handed beside the hyperparameters of `update`."""


_RANGES = {"max_norm": "None or (0, inf]", "ema": "None or [0, 1]"}

_FLAGS = {"master_weights": bool, "graph": bool, **dict.fromkeys(TORCH_DEFAULTS, int | None)}
"""The types of options that are on or off; torch's, and hyperparameters, may also be 0, 1 and None."""


def check_flags(given: Mapping[str, object], hyperparameters: Collection[str] = ()) -> None:
    """Refuse options, and these hyperparameters, that are neither on nor off.

    Raises:
        ValueError: with the option and its value.
    """
    for name, kind in (dict.fromkeys(hyperparameters, int | None) | _FLAGS).items():
        if not isinstance(given.get(name, False), kind):
            raise ValueError(f"Invalid {name}: {shown(given[name])}; expected True or False")


def check_options(name: str, group: Mapping[str, Any], first: Mapping[str, object]) -> None:
    """Refuse options of a group that are out of range or not supported.

    Raises:
        ValueError: with the option and its value.
    """
    for option, allowed in _RANGES.items():
        if isinstance(value := group.get(option), tuple | list):
            raise ValueError(f"Invalid {option}: {shown(value)}; expected one number")
        check_range(option, value, allowed)
    if type(passes := group.get("accumulate", 1)) is not int or passes < 1:
        raise ValueError(f"Invalid accumulate: {shown(passes)}; expected a whole number of backward passes, 1 or more")
    if passes != (of_first := first.get("accumulate", 1)):
        raise ValueError(f"Invalid accumulate: {passes}; another group has {of_first}")
    if type(count := group.get(PASSES, 0)) is not int or count < 0:
        raise ValueError(f"Invalid {PASSES}: {count}; expected the number of passes since the last update")
    if group.get("differentiable"):
        peer = f" (torch.optim.{name} can differentiate through its step)" if hasattr(torch.optim, name) else ""
        raise ValueError(
            "differentiable=True is not supported: the step is one fused update in place, which autograd can't "
            f"follow; expected False{peer}"
        )


def group_options(options: Options, cls: type = object) -> ParamGroup:
    """The options that differ from their default and that groups hold, to be put among the defaults of a group.

    Args:
        options: as they were given.
        cls: the class of the optimizer, whose own arguments an error may suggest.

    Raises:
        TypeError: an option is not known.
        ValueError: the arena is neither an Arena nor None.
    """
    given, defaults = cast(ParamGroup, options), DEFAULTS
    if unknown := given.keys() - defaults.keys():
        raise TypeError(_unknown_option(min(unknown), cls, sorted(defaults)))
    if not isinstance(given.get("arena"), Arena | None):
        raise ValueError(f"Invalid arena: {shown(given['arena'])}; expected a st.Arena or None")
    return {
        name: value
        for name, value in given.items()
        if not (value is defaults[name] or (type(value) is type(defaults[name]) and value == defaults[name]))
        and name not in _OF_OPTIMIZER
    }


def complete_group(group: ParamGroup, former: Mapping[str, object], defaults: Mapping[str, object]) -> None:
    """Give a loaded group what it doesn't say: that stays as it was."""
    for name, default in defaults.items():
        if name != "differentiable":  # torch adds it to the defaults of optimizers that never knew it
            group.setdefault(name, former.get(name, default))
    for name in DEFAULTS:
        if name in former:
            group.setdefault(name, former[name])


def _unknown_option(name: str, cls: type, options: list[str]) -> str:
    """Return the text of an error about an option that an optimizer does not have."""
    own = [x for x in inspect.signature(cls).parameters if x not in ("params", "options")] if cls is not object else []
    meant = ["lr"] if name == "learning_rate" else difflib.get_close_matches(name, own + options, n=1, cutoff=0.55)
    advice = f"did you mean {meant[0]!r}?" if meant else f"it takes {', '.join(own + options)}"
    return f"{cls.__name__ if own else 'an optimizer'} has no option {name!r}; {advice}"
