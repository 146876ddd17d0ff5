"""The step of one tensor: an optimizer's `update` and the math around it, traced into one program.

w, *states = p (or its master), *state entries      in float32 where they are stored in less
g          = g.to(w.dtype) / (grad_scale passes)    the mean over the passes; negated when maximizing
g          = g min(1, max_norm / (norm + 1e-6))     where clipping is asked for
update(w, g, *states, **hyperparameters)
average    = ema average + (1 - ema) w              where one is kept; it is the last of the entries
each of them <- where(found_inf, its old value, its new value)
p          <- w                                     where w is its master
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from subtensors.dispatch.fused.writes import WriteWatch
from subtensors.dispatch.ops.errors import RuleError
from subtensors.optim.low_bit_state import Stored, read, write
from subtensors.optim.options import PASSES

StepValues = dict[str, Any]
"""The hyperparameters of a step, and the options of `IN_STEP` that are set, by name."""

PARAMETER = ""
"""The parameter's name beside those of state entries."""


def single_tensor_step(cls: type) -> Callable[..., None]:
    """The step of optimizer class `cls` for one tensor.

    Returns:
        A function that writes the parameter, its master and its state entries in place.
    """
    # An instance without attributes: a trace would freeze the values of one instance for all.
    rules: object = object.__new__(cls)
    update: Callable[..., None] = rules.update  # type: ignore[attr-defined]  # of an Optimizer, which imports this
    names: Sequence[str] = cls._declaration.entries  # type: ignore[attr-defined]  # likewise

    def step(
        p: Tensor,
        g: Tensor,
        master: Tensor | None,
        entries: tuple[Stored | None, ...],
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
        maximize: bool,
        hyperparameters: StepValues,
    ) -> None:
        if g.layout is not torch.strided:
            raise RuntimeError("a gradient is sparse")  # before anything is written
        targets: tuple[Stored | None, ...] = (p if master is None else master, *entries)
        values = [None if t is None else read(t, must_copy=found_inf is not None) for t in targets]
        w, *states, average = values
        assert w is not None
        g, own = prepare_gradient(g.to(w.dtype), grad_scale, maximize, hyperparameters)
        ema = own.pop("ema", None)
        written = zip((PARAMETER, *names), (w, *states), strict=True)
        watch = WriteWatch({name: [t] for name, t in written if t is not None})
        try:
            update(w, g, *states, **own)
        except AttributeError as error:
            if error.obj is not rules:
                raise
            raise RuleError(
                f"{cls.__name__}.update reads self.{error.name}: it is traced once for the class, so what differs "
                "between instances or steps must reach it as a keyword-only argument, from the parameter group"
            ) from error
        refuse_lost_writes(cls, watch)
        if average is not None:
            average.add_((1 - ema) * (w - average))
        for target, value in zip(targets, values, strict=True):
            if target is not None and value is not None and value is not target:
                write(target, value, found_inf)
        if master is not None:
            p.copy_(master)

    step.__name__ = cls.__name__
    return step


def refuse_lost_writes(cls: type, watch: WriteWatch) -> None:
    """Raise RuleError if an update, which is over, lost what it computed for the parameter or for state.

    It wrote nothing at all, dropped what it computed from the parameter, or assigned to the name of a state entry that
    it has not written.
    """
    unwritten = watch.unwritten()
    has_written = len(unwritten) < len(watch.tensors)
    if not has_written or (PARAMETER in unwritten and watch.drops(PARAMETER)):
        raise RuleError(
            f"{cls.__name__}.update {'changes no parameter' if has_written else 'writes nothing'}: what it computes is "
            "lost, since `p = p - lr * g` makes a new tensor, as does a value that it returns\n  instead: write in "
            "place, as in p.sub_(lr * g), p.copy_(p - lr * g) or state.mul_(0.9).add_(g)"
        )
    if lost := [name for name in unwritten if name in _assigned_names(cls.update)]:  # type: ignore[attr-defined]  # likewise
        raise RuleError(
            f"{cls.__name__}.update assigns to {lost[0]!r} and never writes it: `{lost[0]} = ...` makes a new tensor, "
            f"and the state stays what it was\n  instead: write in place, as in {lost[0]}.copy_(...) or "
            f"{lost[0]}.mul_(0.9).add_(g); give what is no state another name"
        )


@cache
def _assigned_names(function: Callable[..., None]) -> frozenset[str]:
    """The local names that a function assigns to."""
    stores = [i for i in dis.get_instructions(function) if i.opname.startswith("STORE_FAST")]
    # Since Python 3.13 one instruction may store two names, or store one and load another.
    names = [(i.argval,) if isinstance(i.argval, str) else i.argval for i in stores]
    counts = [2 if i.opname == "STORE_FAST_STORE_FAST" else 1 for i in stores]
    return frozenset(name for own, count in zip(names, counts, strict=True) for name in own[:count])


def prepare_gradient(
    g: Tensor, grad_scale: Tensor | None, maximize: bool, values: StepValues
) -> tuple[Tensor, StepValues]:
    """Unscale, clip and negate a gradient for `update`.

    Args:
        g: the gradient.
        grad_scale: the loss scale, a tensor of one element.
        maximize: negate it.
        values: the hyperparameters of `update`, and the values of `IN_STEP` and `SUM_OF_SQUARES` that are set.

    Returns:
        The gradient, and the values that are left: the hyperparameters, and `ema`.
    """
    own = dict(values)
    max_norm, passes, squares = own.pop("max_norm", None), own.pop(PASSES, None), own.pop(SUM_OF_SQUARES, None)
    if passes is not None:
        grad_scale = passes if grad_scale is None else grad_scale * passes
    if grad_scale is not None:
        g = g / grad_scale
    if max_norm is not None:
        norm = squares.sqrt() if grad_scale is None else squares.sqrt() / grad_scale
        g = g * (max_norm / (norm + 1e-6)).clamp(max=1)
    return (-g if maximize else g), own


SUM_OF_SQUARES = "gradient_squares"
"""The name of a value of steps that clip: the sum of the squares of all gradients, as they are stored."""


def add_decay(x: Tensor, p: Tensor, weight_decay: float | None) -> Tensor:
    """x + weight_decay p; x itself where there is no decay."""
    return x if weight_decay is None else x + weight_decay * p
