"""The options that every optimizer takes beside its own hyperparameters, and checks of both.

An optimizer that torch has, too, is checked by torch's class of its name (`torch_defaults`), so that both always agree.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from numbers import Real
from typing import Any, TypedDict, cast

import torch
from torch import Tensor

from subtensors.arguments import shown
from subtensors.dispatch.ops.plain_types import LAZY_TYPES, MAPPED_TYPES, MASKED_TYPES
from subtensors.static.arena import Arena

ParamGroup = dict[str, object]
"""The parameters of a group under "params", and its hyperparameters and options by name."""


class Options(TypedDict, total=False):
    """Options of any optimizer; each may differ between parameter groups, unless it says otherwise.

    A group holds only the options that it was given, so that without any it is the same as torch.optim's.
    """

    master_weights: bool
    """Keep a float32 `master_param` for every bfloat16 or float16 parameter, with the rest of its state in float32,
    and round the parameter from it. Default False."""

    state_dtype: str | torch.dtype | None
    """The dtype to keep state in, for the optimizers that can: "int8", torch.bfloat16, or None for the dtype it is
    computed in. Default None."""

    max_norm: float | Tensor | None
    """Clip: scale the gradients by max_norm / (norm + 1e-6) where that is less than 1, inside the step. The norm is
    over the gradients of all parameters of the optimizer together. None: don't. Default None."""

    accumulate: int
    """Update once every `accumulate` calls of `step`, by the mean of the gradients that the backward passes since the
    last update have added up; `zero_grad` leaves them alone until then. The same for all groups. Default 1."""

    ema: float | Tensor | None
    """Keep an average of each parameter, updated inside the step: a <- ema a + (1 - ema) p. It starts as the parameter
    before its first step, and is kept in float32 or more. None: don't. Default None."""

    graph: bool
    """Take steps by replaying a CUDA graph: the same as calling `capture()`. One value for the optimizer. Default
    False."""

    arena: Arena | None
    """The arena to make state in: `arena.release()` then frees its memory, and `arena.restore()` brings it back at the
    same addresses. One value for the optimizer. Default None: in memory of its own."""


DEFAULTS: Options = {
    "master_weights": False,
    "state_dtype": None,
    "max_norm": None,
    "accumulate": 1,
    "ema": None,
    "graph": False,
    "arena": None,
}

_OF_OPTIMIZER = {"graph", "arena"}
"""Options of the whole optimizer, which its groups don't hold."""

IN_STEP = ("max_norm", "accumulate", "ema")
"""Options whose values a step is handed beside the hyperparameters of `update`."""


def check_options(name: str, group: Mapping[str, Any], first: Mapping[str, object]) -> None:
    """Refuse options of a group that are out of range or not supported.

    Args:
        name: the name of the optimizer.
        group: the parameter group.
        first: the first group of the optimizer.

    Raises:
        ValueError: with the option and its value.
    """
    if (max_norm := group.get("max_norm")) is not None and not (is_number(max_norm) and max_norm > 0):
        raise ValueError(f"Invalid max_norm: {shown(max_norm)}; expected more than 0, or None")
    if (ema := group.get("ema")) is not None and not (is_number(ema) and 0 <= ema <= 1):
        raise ValueError(f"Invalid ema: {shown(ema)}; expected a number from 0 to 1, or None")
    if type(passes := group.get("accumulate", 1)) is not int or passes < 1:
        raise ValueError(f"Invalid accumulate: {shown(passes)}; expected a whole number of backward passes, 1 or more")
    if passes != (of_first := first.get("accumulate", 1)):
        raise ValueError(f"Invalid accumulate: {passes}; another group has {of_first}")
    if group.get("differentiable"):
        raise ValueError(
            "differentiable=True is not supported: the step is one fused update in place, which autograd can't "
            f"follow; expected False (torch.optim.{name} can differentiate through its step)"
        )


def group_options(options: Options) -> ParamGroup:
    """The options that differ from their default and that groups hold, to be put among the defaults of a group.

    Raises:
        TypeError: an option is not known.
        ValueError: one that is True or False, or an arena, is something else.
    """
    given, defaults = cast(ParamGroup, options), cast(ParamGroup, DEFAULTS)
    if unknown := given.keys() - defaults.keys():
        raise TypeError(f"no optimizer takes {sorted(unknown)}; the options of each are {sorted(defaults)}")
    for name in ("master_weights", "graph"):
        if not isinstance(given.get(name, False), bool):
            raise ValueError(f"Invalid {name}: {shown(given[name])}; expected True or False")
    if not isinstance(given.get("arena"), Arena | None):
        raise ValueError(f"Invalid arena: {shown(given['arena'])}; expected a st.Arena or None")
    return {
        name: value
        for name, value in given.items()
        if not (value is defaults[name] or (type(value) is type(defaults[name]) and value == defaults[name]))
        and name not in _OF_OPTIMIZER
    }


def is_number(value: object) -> bool:
    """Return whether a value is a real number, or a tensor of one."""
    if isinstance(value, Tensor):
        is_dense = type(value) not in {*MASKED_TYPES, *LAZY_TYPES, *MAPPED_TYPES} and not value.is_nested
        is_dense = is_dense and value.layout is torch.strided and not value.is_quantized
        return is_dense and value.numel() == 1 and not value.is_complex()
    return isinstance(value, Real) and not isinstance(value, bool)


def check_hyperparameters(cls: type, group: Mapping[str, object], names: Collection[str]) -> None:
    """Refuse hyperparameters that `update` can't be given: of another kind than the default that the class has for one.

    Args:
        cls: the class of the optimizer.
        group: the parameter group.
        names: of the hyperparameters.

    Raises:
        ValueError: with the hyperparameter and its value.
    """
    defaults = _signature_defaults(cls)
    for name in names:
        value, default = group[name], defaults.get(name)
        if isinstance(default, bool):
            is_right, wanted = value is None or isinstance(value, int), "True or False"
        elif isinstance(default, Real):
            is_right, wanted = is_number(value), "a number"
        else:
            parts = value if isinstance(value, tuple | list) else [value]
            is_right = all(
                part is None or isinstance(part, bool | str | torch.dtype) or is_number(part) for part in parts
            )
            wanted = "a number, a bool, text, None or a tuple of these"
        if not is_right:
            raise ValueError(f"Invalid {name}: {shown(value)}; expected {wanted}")


@functools.cache
def _signature_defaults(cls: type) -> Mapping[str, object]:
    return {p.name: p.default for p in inspect.signature(cls).parameters.values()}


def torch_defaults(cls: type[torch.optim.Optimizer], arguments: Mapping[str, object]) -> ParamGroup:
    """Check arguments as torch's class does, and return its defaults for them.

    Args:
        cls: a class of torch.optim.
        arguments: the `locals()` of a constructor that takes what `cls` takes; what `cls` doesn't know is left out.

    Returns:
        The hyperparameters of a group.

    Raises:
        ValueError: a value is out of range, as `cls` says it.

    Example:
        >>> torch_defaults(torch.optim.SGD, {"lr": 0.5, "self": None})["lr"]
        0.5
    """
    known = inspect.signature(cls).parameters.keys() - {"params"}
    make: Callable[..., torch.optim.Optimizer] = cls
    peer = make([torch.empty(0, 0)], **{name: value for name, value in arguments.items() if name in known})
    return dict(peer.defaults)


def own_defaults(arguments: Mapping[str, object]) -> ParamGroup:
    """The hyperparameters of a group, from the `locals()` at the start of a constructor.

    Example:
        >>> own_defaults({"self": None, "params": [], "lr": 0.5, "options": {}})
        {'lr': 0.5}
    """
    return {name: value for name, value in arguments.items() if name not in _NO_HYPERPARAMETERS}


_NO_HYPERPARAMETERS = {"self", "params", "options", "__class__"}


def check_not_negative(**values: float | Tensor) -> None:
    """Raise ValueError, with the argument's name and value, if a number is below 0 or NaN."""
    for name, value in values.items():
        if not (is_number(value) and value >= 0):
            raise ValueError(f"Invalid {name}: {shown(value)}; expected 0 or more")


def check_fractions(count: int, **values: Any) -> None:
    """Raise ValueError, with the argument's name and value, unless it is `count` numbers in [0, 1).

    Args:
        count: 1 for a number, more for a sequence of as many.
        values: the arguments by name.
    """
    for name, value in values.items():
        numbers = (value,) if count == 1 else value if isinstance(value, tuple | list) else ()
        if len(numbers) != count or not all(is_number(number) and 0 <= number < 1 for number in numbers):
            wanted = "a number" if count == 1 else f"{count} numbers"
            raise ValueError(f"Invalid {name}: {shown(value)}; expected {wanted} in [0, 1)")
