"""The optimizers that a program steps: the state and options that its graphs hold, and their dynamic scalars.

A captured step writes to the optimizer's state at its address at capture, and repeats the captured scalars. Scalars of
`st.optim` are passed to each replay. A program with another optimizer is recaptured when its scalars change, unless
they are tensors on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, compress
from operator import is_, methodcaller
from typing import Any, TypeAlias

import torch
from torch import Tensor

from subtensors.bucketed.state.guards import TensorSnapshot
from subtensors.dispatch.graphs.dynamic_scalars import DynamicScalars
from subtensors.optim.accumulation import accumulates
from subtensors.optim.captured_step import step_signature
from subtensors.optim.optimizer import Optimizer

_VALUES = methodcaller("values")

_Group: TypeAlias = dict[str, Any]
_Copy: TypeAlias = tuple[torch.optim.Optimizer, dict[Tensor, _Group], list[_Group]]
"""An optimizer, and copies of its state by parameter and of its parameter groups."""


class Optimizers:
    """Some optimizers, and a snapshot of their state and options.

    Args:
        found: the optimizers that a program reaches.
    """

    def __init__(self, found: Sequence[torch.optim.Optimizer]) -> None:
        self.found = list(found)
        self.take_snapshot()

    def take_snapshot(self) -> None:
        """Take a new snapshot: the present state and options count as the captured ones."""
        entries = self._entries()
        self._is_tensor = [isinstance(x, Tensor) for x in entries]
        self._tensors = list(compress(entries, self._is_tensor))
        self._snapshot = TensorSnapshot(self._tensors)
        self._options = [_options(opt, group) for opt in self.found for group in opt.param_groups]
        self._read_values = self._values_read()

    def tensors(self) -> list[Tensor]:
        """Return the tensors of their state."""
        return [x for x in self._entries() if isinstance(x, Tensor)]

    def copies(self) -> list[_Copy]:
        """Return each optimizer with shallow copies of its state and of its parameter groups."""
        return [
            (opt, {p: dict(entry) for p, entry in opt.state.items()}, [dict(group) for group in opt.param_groups])
            for opt in self.found
        ]

    def restore(self, copies: list[_Copy]) -> None:
        """Restore the state and groups that `copies` returned; the contents of tensors are not restored."""
        for opt, states, groups in copies:
            for p in [p for p in opt.state if p not in states]:
                del opt.state[p]
            for p, before in states.items():
                entry = opt.state[p]
                for name in [name for name in entry if name not in before]:
                    del entry[name]
                entry.update({name: x for name, x in before.items() if entry.get(name) is not x})
            for group, options in zip(opt.param_groups, groups, strict=True):
                group.update({name: x for name, x in options.items() if group.get(name) is not x})

    def _entries(self) -> list[Any]:
        return list(chain.from_iterable(map(_VALUES, chain.from_iterable(opt.state.values() for opt in self.found))))

    def first_change(self) -> str:
        """Return what changed since the snapshot, in words; "" if nothing did."""
        entries = self._entries()
        tensors = list(compress(entries, self._is_tensor))
        if not all(map(is_, tensors, self._tensors)):
            tensors = self.tensors()
        if len(entries) != len(self._is_tensor) or not self._snapshot.matches(tensors):
            return "the state of an optimizer was replaced"
        options = [_options(opt, group) for opt in self.found for group in opt.param_groups]
        if options != self._options:
            return "a number of an optimizer changed, which its graph holds: give it as a tensor on the device"
        if self._values_read() != self._read_values:
            return "a value changed that the update of an optimizer reads besides its arguments"
        return ""

    def _values_read(self) -> list[tuple[object, ...]]:
        return [opt._updater.function.read_values() for opt in self.found if isinstance(opt, Optimizer)]

    def reread_state(self) -> None:
        """Make the optimizers of `st.optim` read their state again, by setting each tensor in it anew."""
        for own in [own for opt in self.found if isinstance(opt, Optimizer) for own in opt.state.values()]:
            own.update({name: x for name, x in own.items() if isinstance(x, Tensor)})

    def no_capture_reason(self) -> str:
        """Return the reason why their steps cannot be captured; "" if they can."""
        if any(isinstance(opt, Optimizer) and accumulates(opt.param_groups) for opt in self.found):
            return "an optimizer updates only every n-th step (accumulate=n), and a graph does the same in each"
        return ""

    def set_dynamic_scalars(self, to: DynamicScalars) -> None:
        """Pass the current dynamic scalars to a graph."""
        for opt in self.found:
            if isinstance(opt, Optimizer) and opt._updater.is_fused:
                for index, group in enumerate(opt.param_groups):
                    _, numbers, hosts = step_signature(opt._updater, group, group["params"][0].device)
                    to.set((id(opt), index), numbers, hosts)


def _options(opt: torch.optim.Optimizer, group: _Group) -> list[object]:
    """Return the options of a group that a graph holds as constants; tensors by their addresses."""
    if isinstance(opt, Optimizer) and opt._updater.is_fused:
        return list(step_signature(opt._updater, group, group["params"][0].device)[0])
    values = [(name, value) for name, value in group.items() if name not in ("params", "initial_lr")]
    return [(name, value.data_ptr() if isinstance(value, Tensor) else value) for name, value in values]
