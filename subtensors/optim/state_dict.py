"""State dicts: an optimizer saves what torch.optim's class of its name saves, and loads what that saved.

Torch's `load_state_dict` would cast all state to the dtype of its parameter, masters included. So each parameter's
state goes through it wrapped, as an object that torch doesn't know and leaves alone, and is unwrapped after it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from subtensors.optim import accumulation
from subtensors.optim.accumulation import GRADIENT
from subtensors.optim.low_bit_state import convert_entry, dequantized_state, low_bit_dtype
from subtensors.optim.options import ParamGroup
from subtensors.optim.state import AVERAGE, MASTER, StateFactory
from subtensors.optim.traced_update import is_narrow
from subtensors.optim.versions import Entry, States

SavedState = dict[str, Any]
"""The return value of torch's `state_dict`: `state` and `param_groups`."""


@dataclass
class _Wrapped:
    """One parameter's state on its way through torch's load_state_dict."""

    entries: object


class StateDict:
    """The form in which the state of an optimizer is saved and loaded.

    Args:
        host_entries: entries of 0 dimensions that are saved on the CPU, unless `capturable` or `fused` says otherwise.
    """

    def __init__(self, host_entries: Collection[str]) -> None:
        self.host_entries = host_entries

    def to_plain(self, saved: SavedState) -> SavedState:
        """Turn a state dict of torch into plain tensors, in the dtypes and on the devices that torch.optim saves."""
        saved["state"] = {
            key: {name: _plain(t) for name, t in dequantized_state(v).items()} if isinstance(v, Entry) else v
            for key, v in saved["state"].items()
        }
        for group in saved["param_groups"]:
            if group.get("capturable") or group.get("fused"):
                continue
            for index in group["params"]:
                state = saved["state"].get(index, {})
                state.update({name: state[name].cpu() for name in self.host_entries if name in state})
        return saved

    @staticmethod
    def add_gradients(saved: SavedState, groups: list[dict[str, Any]], state: States, factory: StateFactory) -> None:
        """Add the gradients that are left for a later step to a state dict of torch.

        Args:
            saved: the state dict; changed in place.
            groups: the parameter groups of the optimizer.
            state: its state.
            factory: makes new state, for parameters that have none: torch.optim takes an entry to be all of it.
        """
        params = [p for group in groups for p in group["params"]]
        indices = dict(zip(params, [i for group in saved["param_groups"] for i in group["params"]], strict=True))
        for p, group in accumulation.waiting(groups):
            if not state.get(p):
                factory.create_group([p], group)
            saved["state"][indices[p]] = Entry({**(state.get(p) or factory.state.get(p, {})), GRADIENT: p.grad})

    @staticmethod
    def wrap(saved: SavedState, declared: Collection[str], needed: Collection[str]) -> SavedState:
        """Wrap the state of each parameter.

        Args:
            saved: a state dict.
            declared: the names of the entries that the optimizer keeps.
            needed: those that its groups need.

        Raises:
            KeyError: the state is another optimizer's.
            RuntimeError: the state is a checkpoint's that lost its entries.
        """
        for value in saved["state"].values():
            if isinstance(value, Mapping):
                _check_names(set(value), set(declared))
        if needed and saved["state"] and all(type(k) is str and v == {} for k, v in saved["state"].items()):
            raise RuntimeError(
                "the state to load is empty: of a flattened checkpoint, torch.distributed.checkpoint looks for the "
                "names of state entries in this optimizer, which has none yet, and asks for none where gradients "
                "are: load before the first backward pass, and before capture(packed=True)"
            )
        return {**saved, "state": {key: _Wrapped(value) for key, value in saved["state"].items()}}

    def unwrap(self, state: States, groups: list[dict[str, Any]], factory: StateFactory) -> None:
        """Replace what `wrap` wrapped by copies in the dtypes and on the devices that the factory starts entries with.

        Args:
            state: the state of the optimizer, changed in place.
            groups: its parameter groups.
            factory: for the initial values, which have the dtype, shape and device that is expected.

        Raises:
            ValueError: an entry has another shape.
        """
        for group in groups:
            for p in group["params"]:
                if isinstance(wrapped := state.get(p), _Wrapped):
                    assert isinstance(wrapped.entries, Mapping)
                    entries = {name: value for name, value in wrapped.entries.items() if value is not None}
                    state[p] = {name: _loaded(p, name, value, group, factory) for name, value in entries.items()}
                    for name in entries:
                        convert_entry(state[p], name, low_bit_dtype(name, p, group, factory.declaration.low_bit))
        for key, value in state.items():
            if isinstance(value, _Wrapped):
                state[key] = value.entries


def _check_names(saved: set[str], declared: set[str]) -> None:
    """Raise KeyError if none of the saved entries is one that the optimizer declares."""
    names = saved - {"step", MASTER, AVERAGE, GRADIENT}
    if names and declared - {"step"} and not names & declared:
        raise KeyError(f"the state of another optimizer: it has {sorted(names)}, and {sorted(declared)} are expected")


def _loaded(p: Tensor, name: str, value: object, group: ParamGroup, factory: StateFactory) -> object:
    """A copy of a saved entry in the dtype and on the device of the entry's initial value."""
    if name not in (MASTER, AVERAGE, *factory.declaration.entries):
        return value.to(p.device) if isinstance(value, Tensor) else value
    entry = factory.initial_value(p, name, bool(group.get("master_weights")) and is_narrow(p.dtype), group)
    value = value if isinstance(value, Tensor) else torch.tensor(value, device=entry.device)
    if value.shape != entry.shape:
        raise ValueError(f"state entry {name!r} has shape {tuple(value.shape)}, and {tuple(entry.shape)} is expected")
    # A new tensor: `initial_value` may return a shared one, or the parameter itself.
    return torch.empty_like(entry).copy_(value)


def _plain(value: object) -> object:
    """A value as torch's optimizers keep it: the same memory, without being marked as static or in an arena."""
    return value.data if isinstance(value, Tensor) and (type(value) is not Tensor or vars(value)) else value
