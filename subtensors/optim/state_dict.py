"""State dicts: an optimizer saves what torch.optim's class of its name saves, and loads what that saved.

Torch's `load_state_dict` would cast all state to the dtype of its parameter, masters included. So each parameter's
state goes through it wrapped, as an object that torch doesn't know and leaves alone, and is unwrapped after it.

torch.distributed.checkpoint learns what state a new optimizer will have from a step with gradients of zero and each
`lr` at 0. That step counts for nothing here: it makes the state that a first step would start from, and no more. What
`lr` decides would start wrong, so such provisional state is made again when it is saved, and dropped by a step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from subtensors.dispatch.torch_internals.checkpoint import is_initializing_state
from subtensors.optim import accumulation
from subtensors.optim.accumulation import GRADIENT, Group
from subtensors.optim.capture import Capture
from subtensors.optim.dtensor import distributed_like
from subtensors.optim.hyperparameters import OPTIONS, check_types, filled_options
from subtensors.optim.low_bit_state import convert_entry, dequantized_state, low_bit_dtype
from subtensors.optim.options import DEFAULTS, ParamGroup, complete_group
from subtensors.optim.state import AVERAGE, ENTRIES, MASTER, StateFactory, needed_entries
from subtensors.optim.step import UpdatedOptimizer, accumulates
from subtensors.optim.versions import Entry, States

SavedState = dict[str, Any]
"""The return value of torch's `state_dict`: `state` and `param_groups`."""


class SavedOptimizer(UpdatedOptimizer, Protocol):
    """The attributes of an optimizer that are saved and loaded, or say how."""

    defaults: Group
    host_entries: ClassVar[Collection[str]]
    _capture: Capture | None
    _is_provisional: bool

    def _check(self, group: ParamGroup) -> None: ...

    def register_load_state_dict_pre_hook(
        self, hook: Callable[[torch.optim.Optimizer, SavedState], SavedState | None]
    ) -> RemovableHandle:
        """Call a function with each state dict before it is loaded."""


def saved_state(optimizer: SavedOptimizer, make: Callable[[], SavedState]) -> SavedState:
    """The state dict of an optimizer, in plain tensors, in the dtypes and on the devices that torch.optim saves."""
    if is_provisional := drop_provisional_state(optimizer):
        make_state(optimizer)
    saved = make()
    _add_gradients(saved, optimizer)
    if is_provisional:
        optimizer.state.clear()
    saved["state"] = {
        key: {name: _plain(t) for name, t in dequantized_state(v).items()} if isinstance(v, Entry) else v
        for key, v in saved["state"].items()
    }
    for group in saved["param_groups"]:
        if group.get("capturable") or group.get("fused"):
            continue
        for index in group["params"]:
            state = saved["state"].get(index, {})
            state.update({name: state[name].cpu() for name in optimizer.host_entries if name in state})
    return saved


def drop_provisional_state(optimizer: SavedOptimizer) -> bool:
    """Drop the state of an optimizer if it is provisional, and return whether it was."""
    is_provisional = optimizer._is_provisional
    if is_provisional:
        optimizer.state.clear()
        optimizer._is_provisional = False
    return is_provisional


def _add_gradients(saved: SavedState, optimizer: SavedOptimizer) -> None:
    """Add the gradients that are left for a later step to a state dict of torch."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    indices = dict(zip(params, [i for group in saved["param_groups"] for i in group["params"]], strict=True))
    # Parameters without state get some beside it, as torch.optim takes what it loads to be all of it.
    apart = StateFactory(optimizer, is_apart=True)
    for p, group in accumulation.waiting(optimizer.param_groups):
        if not optimizer.state.get(p):
            apart.create_all([p], group)
        state = optimizer.state.get(p) or apart.state.get(p, {})
        saved["state"][indices[p]] = Entry({**state, GRADIENT: p.grad})


def copied_state(optimizer: SavedOptimizer) -> dict[str, object]:
    """The state that differs in a copy of an optimizer, which has parameters of its own."""
    # Steps are replayed there, from other graphs. Copies of parameters lack their gradients, which go as state.
    kept = {} if optimizer._capture is None else {"_capture": Capture(optimizer._capture.check)}
    waiting = accumulation.waiting(optimizer.param_groups)
    gradients = {p: {**optimizer.state.get(p, {}), GRADIENT: p.grad} for p, _ in waiting}
    return {**kept, "state": States(dict, {**optimizer.state, **gradients})}


@dataclass
class _Wrapped:
    """One parameter's state on its way through torch's load_state_dict."""

    entries: object


@contextmanager
def loading(optimizer: SavedOptimizer) -> Iterator[None]:
    """A context for torch's `load_state_dict`: state is wrapped on its way, and an error leaves all as it was."""
    # Wrapped in a hook, which comes after the user's.
    handle = optimizer.register_load_state_dict_pre_hook(lambda _, saved: _wrapped(saved, optimizer))
    before = dict(vars(optimizer))
    try:
        yield
    except BaseException:
        vars(optimizer).update(before)
        raise
    finally:
        handle.remove()


def _wrapped(saved: SavedState, optimizer: SavedOptimizer) -> SavedState:
    """Wrap the state of each parameter."""
    declaration, state = optimizer._declaration, saved["state"]
    foreign = ENTRIES - set(declaration.entries) - _SHARED  # that other classes declare, and this one does not
    for value in state.values():
        if isinstance(value, Mapping):
            _check_names(set(value), set(declaration.entries), foreign)
    _check_options(saved, optimizer)
    needed = any(needed_entries(optimizer, group) for group in optimizer.param_groups)
    if needed and state and all(type(key) is str and value == {} for key, value in state.items()):
        raise RuntimeError(
            "the state to load is empty: of a flattened checkpoint, torch.distributed.checkpoint looks for the names "
            "of state entries in this optimizer, which has none yet, and asks for none where gradients are: load "
            "before the first backward pass, and before capture(packed=True)"
        )
    return {**saved, "state": {key: _Wrapped(value) for key, value in state.items()}}


def restore_state(optimizer: SavedOptimizer, former: list[Group]) -> None:
    """Complete what torch has put into an optimizer, from a state dict or from a copy.

    Args:
        optimizer: the optimizer.
        former: the groups that it had before; none if it is a copy.

    Raises:
        ValueError: an entry has another shape, or an option of a group is not supported.
        KeyError: the state is another optimizer's, or lacks an entry.
    """
    groups = optimizer.param_groups
    was_underway = bool(former) and accumulation.is_underway(former)
    optimizer.state = States(dict, optimizer.state)
    if optimizer._is_provisional:  # a write would be a change to whoever watches its attributes
        optimizer._is_provisional = False
    for index, group in enumerate(groups):
        complete_group(group, former[index] if former else {}, optimizer.defaults)
        accumulation.start(group, {})
        check_types(optimizer._declaration.number_counts, group)
        optimizer._check(group)
        _unwrap(optimizer, group)
    for key, value in optimizer.state.items():
        if isinstance(value, _Wrapped):
            optimizer.state[key] = value.entries
    is_packed = optimizer._capture is not None and optimizer._capture.packed is not None
    accumulation.restore_gradients(groups, optimizer.state, was_underway, type(optimizer).__name__, is_packed)


def _unwrap(optimizer: SavedOptimizer, group: Group) -> None:
    """Replace what was wrapped by copies in the dtypes and on the devices that entries start with."""
    state, factory = optimizer.state, StateFactory(optimizer)
    # What an option asks for is made in the next step where it is missing, as if the option had been set in between.
    without_options = {name: 0 if isinstance(value, int | float) else value for name, value in group.items()}
    needed = tuple(e for e in needed_entries(optimizer, without_options) if optimizer.needs_state(e, group))
    for index, p in enumerate(group["params"]):
        if not isinstance(wrapped := state.get(p), _Wrapped):
            continue
        assert isinstance(wrapped.entries, Mapping)
        # torch.distributed.checkpoint makes a {} of each name of an entry here that a flattened state lacks.
        saved = {name: value for name, value in wrapped.entries.items() if not isinstance(value, dict) or value}
        missing = set(factory.entries_of(p, needed, group)) - _BESIDE - set(saved)
        if missing and not set(saved) <= _BESIDE:
            name = group.get("param_names", {index: index})[index]
            raise KeyError(f"the state of parameter {name} has {sorted(saved)}, and lacks {sorted(missing)}")
        entries = {name: value for name, value in saved.items() if value is not None}
        state[p] = {name: _loaded(p, name, value, group, factory) for name, value in entries.items()}
        for name in entries:
            convert_entry(state[p], name, low_bit_dtype(name, p, group, factory.declaration.low_bit))


_BESIDE = {MASTER, AVERAGE, GRADIENT}
"""Entries that a parameter may have without any that `update` takes."""

_SHARED = {"step", *_BESIDE}
"""Entries by which no optimizer is known."""


def _check_names(saved: set[str], declared: set[str], foreign: set[str]) -> None:
    """Raise KeyError if none of the saved entries is one that the optimizer declares, or one is another class's."""
    names = saved - _SHARED
    if names and declared - {"step"} and (not names & declared or names & foreign):
        raise KeyError(f"the state of another optimizer: it has {sorted(names)}, and {sorted(declared)} are expected")


def _check_options(saved: SavedState, optimizer: SavedOptimizer) -> None:
    """Raise KeyError if the groups to load have an option of another class alone, or lack one of this class.

    Options that torch's class fills in are missing where an older torch saved. It has filled in some of every class
    since before it kept step counts in tensors; so a group that lacks all, beside such a count, is not torch's.
    """
    accepted = optimizer._accepted
    late = filled_options(accepted.peer) if accepted is not None and accepted.peer is not None else frozenset()
    own = {*DEFAULTS, *optimizer.defaults, *optimizer._declaration.hyperparameters}.union(*optimizer.param_groups)
    states = [state for state in saved["state"].values() if isinstance(state, Mapping)]
    may_lack_all = states and not any(isinstance(state.get("step"), Tensor) for state in states)
    for group in saved["param_groups"]:
        foreign, missing = set(group) & OPTIONS - own, set(optimizer._declaration.required) - late - set(group)
        if not may_lack_all and not late & set(group):
            missing |= late
        if foreign or missing:
            raise KeyError(
                f"the state of another optimizer: it has the options {sorted(set(group) - {'params'})}, "
                f"{sorted(foreign)} of them unknown here, and lacks {sorted(missing)}"
            )


def _loaded(p: Tensor, name: str, value: object, group: ParamGroup, factory: StateFactory) -> object:
    """A copy of a saved entry in the dtype and on the device of the entry's initial value."""
    if name not in (MASTER, AVERAGE, *factory.declaration.entries):
        return value.to(p.device) if isinstance(value, Tensor) else value
    entry = factory.initial_value(p, name, group)
    value = value if isinstance(value, Tensor) else torch.tensor(value, device=entry.device)
    if value.shape != entry.shape:
        raise ValueError(f"state entry {name!r} has shape {tuple(value.shape)}, and {tuple(entry.shape)} is expected")
    # A new tensor: `initial_value` may return a shared one, or the parameter itself.
    return torch.empty_like(entry).copy_(distributed_like(value, entry))


def _plain(value: object) -> object:
    """A value as torch's optimizers keep it: the same memory, without being marked as static or in an arena."""
    return value.data if isinstance(value, Tensor) and (type(value) is not Tensor or vars(value)) else value


def take_checkpoint_step(optimizer: SavedOptimizer) -> bool:
    """Make provisional state if the current step is one that only asks for state; return whether it is."""
    drop_provisional_state(optimizer)
    groups = optimizer.param_groups
    if optimizer.state or not all(_is_zero(group.get("lr", 0.0)) for group in groups) or not is_initializing_state():
        return False
    make_state(optimizer)
    # A flattened checkpoint is searched for the names that are here.
    for p in [p for group in groups for p in group["params"] if p.requires_grad and accumulates(groups)]:
        optimizer.state[p][GRADIENT] = p.grad
    optimizer._is_provisional = True
    return True


def make_state(optimizer: SavedOptimizer) -> None:
    """Create the state of all parameters that can have a gradient."""
    for group in optimizer.param_groups:
        StateFactory(optimizer).create_all([p for p in group["params"] if p.requires_grad], group)


def _is_zero(lr: object) -> bool:
    # One on a device would have to be read, and is replaced by one on the CPU for such a step.
    return (not isinstance(lr, Tensor) or lr.device.type == "cpu") and bool(lr == 0)
