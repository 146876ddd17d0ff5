"""The state that an optimizer declares: which entries a parameter has, how each starts, and in what form it is kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from subtensors.optim.capture import Capture
from subtensors.optim.low_bit_state import form_of, keep
from subtensors.optim.state_init import AT_ONCE, can_begin_with_others, counts, make_room
from subtensors.optim.traced_update import is_narrow
from subtensors.static.arena import Arena
from subtensors.static.static_tensor import static_in_place

MASTER = "master_param"
AVERAGE = "ema"


class DeclaredState(torch.optim.Optimizer):
    """The part of an optimizer that makes its state."""

    low_bit: ClassVar[Mapping[str, bool]] = {}
    """The state entries that may be kept in fewer bits, and whether their numbers are signed."""

    _arena: Arena | None = None
    _capture: Capture | None = None
    _declaration: ClassVar[dict[str, Callable[[Tensor], Tensor]]] = {}
    _entries: ClassVar[tuple[str, ...]]

    def keeps(self, entry: str, group: dict[str, Any]) -> bool:
        """Return whether the parameters of this group have this state entry; `update` is given None if they lack it.

        Args:
            entry: a name from `state`, or `step`.
            group: the parameter group.
        """
        return True

    def start(self, entry: str, p: Tensor, group: dict[str, Any]) -> Tensor:
        """The initial value of a state entry; override it where that depends on more than the parameter.

        Args:
            entry: a name from `state`.
            p: the parameter, or its float32 master.
            group: the parameter group.

        Returns:
            By default, what the function that `state` has for the entry makes of `p`.
        """
        return self._declaration[entry](p)

    def suits(self, entry: str, p: Tensor, group: dict[str, Any]) -> bool:
        """Return whether this parameter has a state entry that its group keeps; `update` is given None if it lacks it.

        Args:
            entry: a name from `state`, or `step`.
            p: the parameter.
            group: its group.
        """
        return True

    def _kept(self, group: dict[str, Any]) -> tuple[str, ...]:
        """The state entries that a group keeps."""
        own = tuple([entry for entry in self._entries if self.keeps(entry, group)])
        return own if group.get("ema") is None else (*own, AVERAGE)

    def _names(self, p: Tensor, entries: tuple[str, ...], group: dict[str, Any]) -> tuple[str, ...]:
        """The given entries that the parameter has, after its master if it has one."""
        own = entries
        if type(self).suits is not DeclaredState.suits:
            own = tuple([entry for entry in entries if entry == AVERAGE or self.suits(entry, p, group)])
        return (MASTER, *own) if group.get("master_weights") and is_narrow(p.dtype) else own

    def _fill_all(self, params: Sequence[Tensor], names: Sequence[tuple[str, ...]], group: dict[str, Any]) -> None:
        """Make the state entries that these parameters lack, together for like parameters without any state."""
        # What goes into fewer bits or elsewhere is made one by one, so that there is never twice the memory.
        stays = group.get("state_dtype") is None and self._arena is None
        begun: dict[tuple[Any, ...], list[Tensor]] = {}
        for p, own in zip(params, names, strict=True):
            if stays and own and p not in self.state and can_begin_with_others(p):
                begun.setdefault((own, p.device, p.dtype), []).append(p)
            else:
                self._fill(p, own, group)
        for (own, _, _), together in begun.items():
            make_room(together, len(own))
            columns = [self._begin(together, name, MASTER in own, group) for name in own]
            if self._capture is not None:
                columns = [list(map(self._placed, column)) for column in columns]
            for p, *entries in zip(together, *columns, strict=True):
                self.state[p] = dict(zip(own, entries, strict=True))

    def _begin(self, params: list[Tensor], name: str, has_master: bool, group: dict[str, Any]) -> list[Tensor]:
        """The initial values of one entry for each of these parameters, which share a device and dtype."""
        if name == "step" and name not in self._declaration:
            return counts(params)
        is_copy = name in (MASTER, AVERAGE)
        at_once = AT_ONCE.get(torch.clone if is_copy else self._declaration[name])
        if at_once is None or not (is_copy or type(self).start is DeclaredState.start):
            return [self._start(p, name, has_master, group) for p in params]
        dtype = params[0].dtype
        return at_once(params, torch.float32 if is_narrow(dtype) and (has_master or name == AVERAGE) else dtype)

    def _fill(self, p: Tensor, names: tuple[str, ...], group: dict[str, Any]) -> None:
        """Make those of these state entries that the parameter lacks."""
        if not names:
            return  # asking for the state would make an empty one
        state = self.state[p]
        # A count that joins state from before it was kept: steps were taken, how many is not known.
        is_new = not state
        for name in names:
            if state.get(name) is None:
                state[name] = self._start(p, name, MASTER in names, group)
                if name == "step" and not is_new:
                    state[name].fill_(1)
            keep(state, name, form_of(name, p, group, self.low_bit))
        if self._arena is None and self._capture is None:
            return
        for name, value in [*state.items()]:
            if (placed := self._placed(value)) is not value:
                state[name] = placed

    def _placed(self, entry: Tensor) -> Tensor:
        """A state entry in the arena, or where steps are replayed a static one in its own memory; else as it is."""
        if self._arena is None:
            return entry if self._capture is None else static_in_place(entry)
        if entry in self._arena:
            return entry
        if entry.device != self._arena.device:
            raise ValueError(
                f"the arena is on {self._arena.device}, and the parameter whose state it is for on {entry.device}"
            )
        return self._arena.static(entry)

    def _start(self, p: Tensor, name: str, has_master: bool, group: dict[str, Any]) -> Tensor:
        """The value of state entry `name` of this parameter before its first step."""
        if name == "step" and name not in self._declaration:
            return torch.zeros((), device=p.device, dtype=torch.float32)
        p = p.detach()
        p = p.float() if has_master else p
        if name == AVERAGE:
            return p.float() if is_narrow(p.dtype) else p.clone()
        return p if name == MASTER else self.start(name, p, group)
