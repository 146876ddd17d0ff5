"""State dicts: an optimizer saves what torch.optim's class of its name saves, and goes on from what that saved."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from subtensors.dispatch.fused.fused_function import FusedFunction
from subtensors.optim.batches import GroupBatches
from subtensors.optim.capture import Capture
from subtensors.optim.dtensor import Sharding
from subtensors.optim.gradient_norm import GradientNorm
from subtensors.optim.low_bit_state import form_of, keep, restored
from subtensors.optim.state import AVERAGE, MASTER, DeclaredState
from subtensors.optim.traced_update import is_narrow
from subtensors.optim.versioned_state import Entry, States


class SavedState(DeclaredState):
    """The part of an optimizer that saves and loads its state."""

    host_entries: ClassVar[Collection[str]] = ("step",)
    """State of 0 dimensions that `state_dict` puts on the CPU, as torch.optim keeps it there."""

    _lists: dict[int, GroupBatches]
    _shard_fusions: dict[Sharding, FusedFunction]
    """For steps of shards that depend on each other, by how their tensors are spread."""
    _mark: object
    _norm: GradientNorm

    @abstractmethod
    def _check(self, group: dict[str, Any]) -> None:
        """Refuse options that are not supported."""

    def state_dict(self) -> dict[str, Any]:
        """The state as torch.optim's class of the same name saves it.

        Returns:
            `state` and `param_groups`; step counts are on the CPU, unless `capturable` or `fused` says otherwise.
        """
        saved = super().state_dict()
        saved["state"] = {
            key: {name: _plain(t) for name, t in restored(v).items()} if isinstance(v, Entry) else v
            for key, v in saved["state"].items()
        }
        for group in saved["param_groups"]:
            if group.get("capturable") or group.get("fused"):
                continue
            for index in group["params"]:
                state = saved["state"].get(index, {})
                state.update({name: state[name].cpu() for name in self.host_entries if name in state})
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state that this class, or torch.optim's of the same name, saved.

        Values are copied, each into the dtype and onto the device that this optimizer would have started it with.

        Args:
            state_dict: what `state_dict()` gave.

        Raises:
            ValueError: the groups, or the shape of a state entry, don't fit this optimizer's parameters.
        """
        # torch would cast all state to its parameter's dtype, masters included: it is handed over wrapped, after the
        # user's hooks have seen it.
        handle = self.register_load_state_dict_pre_hook(
            lambda _, given: {**given, "state": {key: _Saved(value) for key, value in given["state"].items()}}
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    def __getstate__(self) -> dict[str, Any]:
        # A copy has parameters of its own: that steps are replayed goes with it, the graphs do not.
        kept = {} if self._capture is None else {"_capture": Capture(self._capture.check)}
        return {**super().__getstate__(), **kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._lists, self._shard_fusions = {}, {}
        self._mark = None
        self._norm = GradientNorm()
        self.state = States(dict, self.state)
        for group in self.param_groups:
            for name, default in self.defaults.items():
                if name != "differentiable":  # torch adds it to the defaults of optimizers that never knew it
                    group.setdefault(name, default)
            self._check(group)
            for p in group["params"]:
                if isinstance(saved := self.state.get(p), _Saved):
                    entries = {name: value for name, value in saved.entries.items() if value is not None}
                    self.state[p] = {name: self._loaded(p, name, value, group) for name, value in entries.items()}
                    for name in entries:
                        keep(self.state[p], name, form_of(name, p, group, self.low_bit))
        for key, value in self.state.items():
            if isinstance(value, _Saved):
                self.state[key] = value.entries

    def _loaded(self, p: Tensor, name: str, value: Any, group: dict[str, Any]) -> Any:
        if name not in (MASTER, AVERAGE, *self._entries):
            return value.to(p.device) if isinstance(value, Tensor) else value
        entry = self._start(p, name, bool(group.get("master_weights")) and is_narrow(p.dtype), group)
        value = value if isinstance(value, Tensor) else torch.tensor(value, device=entry.device)
        if value.shape != entry.shape:
            raise ValueError(
                f"state entry {name!r} has shape {tuple(value.shape)}, and {tuple(entry.shape)} is expected"
            )
        # A new tensor: `_start` may hand out a shared one, or the parameter itself.
        return torch.empty_like(entry).copy_(value)


def _plain(value: Any) -> Any:
    """A value as torch's optimizers keep it: the same memory, without saying that it is static or in an arena."""
    return value.data if isinstance(value, Tensor) and (type(value) is not Tensor or vars(value)) else value


@dataclass
class _Saved:
    """One parameter's state on its way through torch's load_state_dict, which leaves what it doesn't know as it is."""

    entries: Any
