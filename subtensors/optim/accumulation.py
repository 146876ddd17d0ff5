"""Gradient accumulation in the step (`accumulate=n`): which calls update, and how a save in between goes on.

Each parameter group counts the passes since the last update, beside its options, so that the count goes wherever groups
do: into state dicts, checkpoints and copies. A pass that is counted is worth nothing without its gradients. So while
there are such passes, a parameter's gradient belongs to its saved state, and loading gives it back.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from subtensors.optim.dtensor import distributed_like
from subtensors.optim.options import PASSES
from subtensors.optim.versions import States

GRADIENT = "accumulated_grad"
"""The name of a gradient in a parameter's saved state."""

Group = dict[str, Any]
Groups = Sequence[Group]


def is_underway(groups: Groups) -> bool:
    """Return whether the current gradients are left for a later call of `step` to update with."""
    return bool(groups[0].get(PASSES))


def start(group: Group, first: Mapping[str, object]) -> None:
    """Start the count of a group that has none, as that of the first group."""
    if group.get("accumulate", 1) != 1:
        group.setdefault(PASSES, first.get(PASSES, 0))


def take_pass(groups: Groups, update: Callable[[], None], has_scaler: bool) -> None:
    """Count a pass, and update if it is the last one.

    Raises:
        RuntimeError: a GradScaler takes it.
    """
    wanted, before = groups[0].get("accumulate", 1), groups[0].get(PASSES, 0)
    if has_scaler and (wanted > 1 or before):
        raise RuntimeError(
            f"accumulate={wanted} adds up gradients of several loss scales, as a GradScaler may change it after each "
            "pass: leave it at 1, divide the loss, and call scaler.step(opt) after the last pass"
        )
    _set_passes(groups, before + 1)
    if before + 1 < wanted:
        return
    try:
        update()
    except BaseException:
        _set_passes(groups, before)
        raise
    _set_passes(groups, 0)
    if wanted == 1:  # it was more before
        for group in groups:
            del group[PASSES]


def waiting(groups: Groups) -> Iterator[tuple[Tensor, Group]]:
    """The parameters with a gradient that is left for a later call, each with its group; none after an update."""
    for group in groups if is_underway(groups) else ():
        yield from ((p, group) for p in group["params"] if p.grad is not None)


def restore_gradients(groups: Groups, state: States, was_underway: bool, name: str, in_place: bool) -> None:
    """Give parameters the gradients that were saved with their state, and take these out of it.

    Args:
        groups: the parameter groups, as loaded.
        state: the state, as loaded.
        was_underway: whether gradients were accumulated before the load: they are part of what it replaces.
        name: of the optimizer's class, for a warning.
        in_place: write gradients where they are, rather than replace or drop them.
    """
    params = [p for group in groups for p in group["params"]]
    saved = {p: state[p].pop(GRADIENT) for p in params if GRADIENT in state.get(p, ())}
    if (saved and is_underway(groups)) or was_underway:
        for p in params:
            _set_gradient(p, saved.get(p) if is_underway(groups) else None, in_place)
    # One that is written in place is always there, and may hold nothing.
    has_gradients = any(p.grad is not None and (not in_place or bool(p.grad.any())) for p in params)
    if is_underway(groups) and not saved and not has_gradients:
        warnings.warn(
            f"{name}: the loaded state was saved after {groups[0][PASSES]} of {groups[0].get('accumulate', 1)} passes, "
            "and their gradients were not: a new accumulation starts. Save after an update, or load where the "
            "parameters have these gradients",
            stacklevel=3,
        )
        _set_passes(groups, 0)


def _set_passes(groups: Groups, count: int) -> None:
    for group in groups:
        group[PASSES] = count


def _set_gradient(p: Tensor, gradient: Tensor | None, in_place: bool) -> None:
    if in_place and p.grad is not None:
        p.grad.zero_() if gradient is None else p.grad.copy_(gradient)
    else:
        p.grad = None if gradient is None else distributed_like(gradient.detach().to(p.device, copy=True), p)
