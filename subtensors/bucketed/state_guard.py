"""The guard of what a program reads besides its arguments, checked on every call: `StateGuard.first_change()`.

A captured graph reads tensors at fixed addresses, and holds Python values as constants. The guard is a table of
snapshots (`dispatch/graphs/guards.py`), each with the reason to give where it no longer matches. A value that the
program itself writes while it runs, such as a count of its calls, is guarded no longer: it changes with every run.

A captured step of an optimizer writes to the state at its address at capture, and repeats the captured scalars. Those
of `st.optim` are passed to each replay. A program with another optimizer is recaptured when its scalars change, unless
they are tensors on the device.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, compress
from operator import itemgetter, methodcaller
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from subtensors.bucketed.reachable_state import ReachableState
from subtensors.dispatch.fused.errors import is_library
from subtensors.dispatch.graphs.dynamic_scalars import DynamicScalars
from subtensors.dispatch.graphs.guards import TensorSnapshot, ValueSnapshot, are_same, exact, is_plain
from subtensors.dispatch.graphs.released_tensors import Release, check_resident
from subtensors.optim.captured_step import step_signature
from subtensors.optim.optimizer import Optimizer
from subtensors.optim.step import accumulates

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""The attributes in which a module holds its hooks."""

T = TypeVar("T")

_VALUES = methodcaller("values")
_TRAINING = itemgetter("training")

_CONTAINERS = nn.ModuleList.__module__

_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)

_Group: TypeAlias = dict[str, Any]


class StateGuard:
    """One snapshot of all state that a program's graphs depend on.

    Args:
        reachable: what the program reaches.
    """

    def __init__(self, reachable: ReachableState) -> None:
        parts = reachable.parts
        self.roots = [x for x in parts if isinstance(x, nn.Module)]
        self.modules = list(dict.fromkeys(module for root in self.roots for module in root.modules()))
        self.closed_over = [x for x in parts if isinstance(x, Tensor)]
        """Tensors that no module registers."""
        self.optimizers = Optimizers([x for x in parts if isinstance(x, torch.optim.Optimizer)])
        self._locations = reachable.locations
        # Live views of the dicts, since asking each dict for its values takes longer than to compare them.
        self._tensor_views = [_live_values(d) for m in self.modules for d in (m._parameters, m._buffers) if d]
        self._module_views = [_live_values(m._modules) for m in self.modules if m._modules]
        growing = [m for m in self.modules if type(m).__module__ == _CONTAINERS or not is_library(type(m).__module__)]
        registries = [d for m in growing for d in (m._parameters, m._buffers, m._modules)]
        self._empty = [d for d in registries if not d and isinstance(d, dict)]
        """Dicts of modules without a parameter, a buffer or a submodule; torch's own layers would read no other."""
        self._registered, self._children = _chained(self._tensor_views), _chained(self._module_views)
        self._attributes = [vars(m) for m in self.modules if "training" in vars(m)]
        self._scripted = [m for m in self.modules if "training" not in vars(m)]
        self._training_flags = {self.training(): self._all_training_flags()}
        """The training flags of all modules, by those of the outermost ones: each combination has its own graphs."""
        self.user_key: object = None
        """What `st.bucketed`'s `key` gave for the last call; plain attributes may have other values for each."""
        self._plain_attributes = ValueSnapshot(
            (d, [name for name in names if is_plain(d[name]) or isinstance(d[name], _FUNCTIONS)])
            for d, names in reachable.attributes
        )
        self._hooks: list[dict[int, object]] = [getattr(m, kind) for m in self.modules for kind in HOOKS]
        self._hook_ids = self._present_hook_ids()
        self.distinct_tensors = _distinct(self.tensors())
        """The tensors of the snapshot, each once."""
        self._snapshot = TensorSnapshot(self.distinct_tensors)

    def tensors(self) -> list[Tensor]:
        """Return the current parameters, buffers and tensors that the program closes over."""
        return [t for t in _chained(self._tensor_views) if t is not None] + self.closed_over

    def training(self) -> tuple[bool, ...]:
        """Return for each outermost module whether it is in training mode."""
        return tuple([root.training for root in self.roots])

    def _all_training_flags(self) -> list[bool]:
        return [*map(_TRAINING, self._attributes), *[m.training for m in self._scripted]]

    def grad_flags(self, leaves: Iterable[object]) -> tuple[bool, ...] | None:
        """Return for each tensor of the state whether it requires grad; None if autograd does not track the call.

        Args:
            leaves: the leaves of the call's arguments.
        """
        if not torch.is_grad_enabled():
            return None
        flags = tuple([t.requires_grad for t in self.tensors()])
        is_tracked = any(flags) or any(isinstance(x, Tensor) and x.requires_grad for x in leaves)
        return flags if is_tracked else None

    @contextmanager
    def in_modes(self, grad_flags: Sequence[bool], training: tuple[bool, ...]) -> Iterator[None]:
        """A context in which tensors require grad and modules train as when `grad_flags` and `training` gave these."""
        tensors = self.tensors()
        before = [t.requires_grad for t in tensors], self._all_training_flags()
        try:
            self._set_modes(tensors, grad_flags, self._training_flags[training])
            yield
        finally:
            self._set_modes(tensors, *before)

    def _set_modes(self, tensors: list[Tensor], grad_flags: Sequence[bool], training_flags: list[bool]) -> None:
        for t, flag in zip(tensors, grad_flags, strict=False):
            if t.requires_grad != flag:
                t.requires_grad_(flag)
        modules = [*[m for m in self.modules if "training" in vars(m)], *self._scripted]
        for m, flag in zip(modules, training_flags, strict=True):
            m.training = flag

    def check_resident(self) -> None:
        """Raise AddressError if the memory of a tensor is released."""
        if Release.count:
            check_resident((self.distinct_tensors,))

    def first_change(self, allows_new_buffers: bool = False) -> str:
        """Return what changed since the snapshot, in words; "" if nothing did.

        Args:
            allows_new_buffers: a buffer may have been replaced, as a program does itself where a table grows.
        """
        registered = _chained(self._tensor_views)
        if allows_new_buffers:
            pairs = zip(registered, self._registered, strict=False)
            registered = [now if isinstance(before, nn.Parameter) else before for now, before in pairs]
        if not are_same(registered, self._registered) or not self._snapshot.matches(self.distinct_tensors):
            return self._first_tensor_change()
        for location, value in self._locations:
            if location.now() is not value:
                return f"{location.name} was replaced"
        if not are_same(_chained(self._module_views), self._children):
            return "a module was replaced"
        if any(self._empty):
            return "a module got its first parameter, buffer or submodule"
        flags = self._all_training_flags()
        if self._training_flags.setdefault(self.training(), flags) != flags:
            return "a module changed between training and evaluation"
        if self._present_hook_ids() != self._hook_ids:
            return "a hook of a module changed, which a graph holds as a constant"
        if name := self._plain_attributes.changed(self.user_key):
            return f"{name} changed, which a graph holds as a constant"
        return self.optimizers.first_change() if self.optimizers.found else ""

    def _first_tensor_change(self) -> str:
        tensors = _distinct(self.tensors())
        index, what = self._snapshot.first_change(tensors) or (0, "count")
        if what == "count":
            return "a tensor was replaced"
        named = [pair for root in self.roots for pair in (*root.named_parameters(), *root.named_buffers())]
        name = next((name for name, t in named if t is tensors[index]), "a tensor")
        return f"{name} was replaced: its {what} changed"

    def ignore_replaced(self) -> None:
        """Stop watching locations whose value was replaced by now, and dicts with a first one: the program wrote it."""
        self._locations = [(location, value) for location, value in self._locations if location.now() is value]
        self._empty = [d for d in self._empty if not d]

    @contextmanager
    def during_run(self) -> Iterator[None]:
        """A context in which the program runs: what it writes itself is not guarded."""
        hook_ids = self._present_hook_ids()
        try:
            with self._plain_attributes.ignoring_own_changes():
                yield
        finally:
            if self._present_hook_ids() != hook_ids:
                self._hook_ids = self._present_hook_ids()

    def _present_hook_ids(self) -> list[int]:
        return _chained(self._hooks) if any(self._hooks) else []


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
        self._options, self._params = self._present_options(), [list(params) for params in self._present_params()]
        self._read_values = self._values_read()

    def tensors(self) -> list[Tensor]:
        """Return the tensors of their state."""
        return [x for x in self._entries() if isinstance(x, Tensor)]

    def _entries(self) -> list[Any]:
        return _chained(map(_VALUES, _chained(opt.state.values() for opt in self.found)))

    def first_change(self) -> str:
        """Return what changed since the snapshot, in words; "" if nothing did."""
        entries = self._entries()
        tensors = list(compress(entries, self._is_tensor))
        if not are_same(tensors, self._tensors):
            tensors = self.tensors()
        if len(entries) != len(self._is_tensor) or not self._snapshot.matches(tensors):
            return "the state of an optimizer was replaced"
        params = self._present_params()
        if len(params) != len(self._params) or not all(map(are_same, params, self._params)):
            return "the parameters of an optimizer changed"
        if self._present_options() != self._options:
            return "a number of an optimizer changed, which its graph holds: give it as a tensor on the device"
        if self._values_read() != self._read_values:
            return "a value changed that the update of an optimizer reads besides its arguments"
        return ""

    def _present_params(self) -> list[list[Tensor]]:
        return [group["params"] for opt in self.found for group in opt.param_groups]

    def _present_options(self) -> list[list[object]]:
        return [_options(opt, group) for opt, _, group in self._groups()]

    def _groups(self) -> list[tuple[torch.optim.Optimizer, int, _Group]]:
        """Return the groups that hold parameters, each with its optimizer and its place there."""
        found = [(opt, *numbered) for opt in self.found for numbered in enumerate(opt.param_groups)]
        return [(opt, index, group) for opt, index, group in found if group["params"]]

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
        for opt, index, group in self._groups():
            if isinstance(opt, Optimizer) and opt._updater.is_fused:
                _, numbers, hosts = step_signature(opt._updater, group, group["params"][0].device)
                to.set((id(opt), index), numbers, hosts)


def _options(opt: torch.optim.Optimizer, group: _Group) -> list[object]:
    """Return the options of a group that a graph holds as constants; tensors that it reads live by their addresses."""
    device = group["params"][0].device
    if isinstance(opt, Optimizer) and opt._updater.is_fused:
        return list(step_signature(opt._updater, group, device)[0])
    return [
        (name, exact(value) if not isinstance(value, Tensor) else _constant(value, device))
        for name, value in group.items()
        if name not in ("params", "initial_lr")
    ]


def _constant(option: Tensor, device: torch.device) -> object:
    """Return what a graph on a device holds of an option: its address or, of a tensor on the host, its values."""
    return option.data_ptr() if option.device.type == device.type else option.tolist()


class _ScriptedValues:
    """The values of a scripted module's dict, read anew whenever they are iterated over."""

    def __init__(self, scripted: Mapping[str, object]) -> None:
        self._scripted = scripted

    def __iter__(self) -> Iterator[Any]:
        return iter(self._scripted.values())


def _live_values(d: Mapping[str, Any]) -> Iterable[Any]:
    """Return a view of the values of a module's dict as they are whenever it is iterated over."""
    return d.values() if isinstance(d, dict) else _ScriptedValues(d)


def _chained(parts: Iterable[Iterable[T]]) -> list[T]:
    return list(chain.from_iterable(parts))


def _distinct(tensors: list[Tensor]) -> list[Tensor]:
    return list({id(t): t for t in tensors}.values())
