"""The state that a program reads beside its arguments, and the check that it has not changed since capture.

A graph reads parameters and buffers at fixed addresses. Checking them takes a few microseconds per hundred tensors. A
call does this while the device is busy with the replay; if the state is stale, the results of the replay are thrown
away. The old memory is kept until then, so that no replay reads freed memory. The state of a program that writes to it
is checked before the replay.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from operator import is_, itemgetter, methodcaller
from typing import Any

import torch
from torch import Tensor, nn

from subtensors.bucketed.state.constant_guards import Constants
from subtensors.bucketed.state.new_attributes import NewAttributes
from subtensors.bucketed.state.optimizers import Optimizers
from subtensors.bucketed.state.reachable_state import ReachableState
from subtensors.bucketed.state.tensor_snapshot import TensorSnapshot
from subtensors.dispatch.graphs.released_tensors import check_resident
from subtensors.dispatch.ops.plain_types import PLAIN_TYPES, detached

_ITS_VALUES = methodcaller("values")
_ITS_TRAINING = itemgetter("training")


class State:
    """The state of a program: its modules, the tensors that it closes over, its plain values and its optimizers.

    Args:
        program: as `ReachableState` takes it.
    """

    def __init__(self, program: Callable[..., Any]) -> None:
        self._program = program
        self._written: set[int] | None = set()
        """Ids of the tensors that the program was seen to write to; None if torch does not count writes."""
        self.look()

    def look(self) -> None:
        """Take a new snapshot: the state of now counts as the recorded one."""
        self.reached = ReachableState(self._program)
        parts = self.reached.parts
        self.roots = [x for x in parts if isinstance(x, nn.Module)]
        self.modules = list(dict.fromkeys(module for root in self.roots for module in root.modules()))
        self._holders = [d for m in self.modules for d in (m._parameters, m._buffers) if d]
        self._parents = [m._modules for m in self.modules if m._modules]
        self._children = _values(self._parents)
        self._registered = _values(self._holders)
        self._attributes = [vars(m) for m in self.modules if "training" in vars(m)]
        self._scripted = [m for m in self.modules if "training" not in vars(m)]
        self._training = {self.training(): self._trained()}
        """The training flags of all modules, by those of the outermost ones: each combination has its own graphs."""
        self.constants = Constants(self.reached.plain, self.modules)
        self.additions = NewAttributes(self.reached.holders, self.reached.names)
        self.loose = [x for x in parts if isinstance(x, Tensor)]
        self._tensors = _distinct(self.tensors())
        self._held = TensorSnapshot(self._tensors)
        self.optimizers = Optimizers([x for x in parts if isinstance(x, torch.optim.Optimizer)])

    def tensors(self) -> list[Tensor]:
        """Return the current parameters, buffers and tensors that the program closes over."""
        return [t for t in _values(self._holders) if t is not None] + self.loose

    def training(self) -> tuple[bool, ...]:
        """Return for each outermost module whether it is in training mode."""
        return tuple([root.training for root in self.roots])

    def _trained(self) -> list[bool]:
        """Return for each module whether it is in training mode."""
        return [*map(_ITS_TRAINING, self._attributes), *[m.training for m in self._scripted]]

    def is_lazy(self) -> bool:
        """Return whether a parameter or buffer has no size yet, as in a lazy module before its first call."""
        return any(map(nn.parameter.is_lazy, self.tensors()))

    def followed(self, leaves: Iterable[Any]) -> tuple[bool, ...] | None:
        """Return for each tensor of the state whether it requires grad; None if autograd does not track the call.

        Args:
            leaves: the leaves of the call's arguments.
        """
        if not torch.is_grad_enabled():
            return None
        wanting = tuple([t.requires_grad for t in self.tensors()])
        is_followed = any(wanting) or any(isinstance(x, Tensor) and x.requires_grad for x in leaves)
        return wanting if is_followed else None

    def moved(self) -> str:
        """Return what changed since the snapshot, in words; "" if nothing did."""
        if not _are_same(_values(self._holders), self._registered) or not self._held.are(self._tensors):
            return self._first_moved()
        if name := self.reached.first_other():
            return f"{name} was replaced"
        if not _are_same(_values(self._parents), self._children):
            return "a module was replaced"
        training = self._trained()
        if self._training.setdefault(self.training(), training) != training:
            return "a module changed between training and evaluation"
        if name := self.constants.first_other() or self.additions.first():
            return f"{name} changed, which a graph holds as a constant"
        return self.optimizers.moved()

    def obstacle(self) -> str:
        """Return the reason why an optimizer step of the program cannot be captured; "" if it can."""
        if self.reached.has_scaler:
            return "a GradScaler asks the device whether gradients are finite: scale and step outside of the program"
        return self.optimizers.obstacle()

    @contextmanager
    def of_a_run(self) -> Iterator[None]:
        """A context in which the program runs: what it writes itself is not watched."""
        with self.constants.of_a_run(), self.additions.of_a_run():
            yield

    def held(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Return each dict in which a module holds parameters or buffers, with a copy of it."""
        return [(held, dict(held)) for m in self.modules for held in (m._parameters, m._buffers)]

    def put_back(self, before: list[tuple[dict[str, Any], dict[str, Any]]]) -> str:
        """Put replaced parameters and buffers back; return the name of the first one, "" if none was replaced."""
        replaced: list[str] = []
        for held, kept in before:
            others = {name: value for name, value in kept.items() if name not in held or held[name] is not value}
            replaced += others
            if others:  # those of scripted modules have no update
                held.update(others)
        return replaced[0] if replaced else ""

    def refuse_releaseds(self) -> None:
        """Raise AddressError if the memory of a tensor is released."""
        check_resident((self._tensors,))

    def versions(self) -> list[int] | None:
        """Return the version counter of each tensor; None if one is an inference tensor, which has none."""
        if any(t.is_inference() for t in self._tensors):
            return None
        return [t._version for t in self._tensors]

    def note_writes(self, before: list[int] | None) -> bool:
        """Note which tensors were written to since `before`; return whether any was, True if that is unknown."""
        after = self.versions()
        if before is None or after is None:
            self._written = None
            return True
        if self._written is not None:
            self._written |= {id(t) for t, a, b in zip(self._tensors, before, after, strict=True) if a != b}
        return before != after

    def buffers(self) -> list[Tensor]:
        """Return the tensors that autograd lets a program write to: no parameters, and none that require grad."""
        return [t for t in self._tensors if not (t.requires_grad or isinstance(t, nn.Parameter))]

    def at_risk(self) -> list[Tensor]:
        """Return the tensors that a run must restore: module buffers, and others that the program was seen to write to.

        Other tensors that an object holds may be all of its data, so they are left out until one is written to. If
        writes are not counted, all of `buffers` is returned.
        """
        buffers = self.buffers()
        if self._written is None:
            return buffers
        sure = set(map(id, buffers)) - set(map(id, self.loose)) | self._written
        return [t for t in self._tensors if id(t) in sure]

    def stepped(self) -> list[Tensor]:
        """Return the tensors that steps of the program's optimizers write to; none if it has no optimizer."""
        if not self.optimizers.are_there():
            return []
        trained = [t for t in self._tensors if t.requires_grad and t.is_leaf]
        return [*trained, *self.optimizers.tensors()]

    def aliases(self, kept: Collection[int] = ()) -> dict[int, nn.Parameter]:
        """Return new leaf parameters over the memory of the modules' parameters, by the id of the original.

        Tensors that the program closes over, and parameters of a subclass, have no alias: they are read directly.

        Args:
            kept: ids of parameters that get no alias.
        """
        without = {*kept, *map(id, self.loose)}
        held = [p for own in self._own_parameters() for p in own.values() if p is not None and _is_plain(p)]
        return {id(p): _alias(p) for p in held if p.requires_grad and not p.is_inference() and id(p) not in without}

    def _own_parameters(self) -> list[dict[str, Any]]:
        """Return the parameter dicts of the modules, except of scripted ones, where Python cannot exchange entries."""
        return [m._parameters for m in self.modules if m._parameters and isinstance(m._parameters, dict)]

    @contextmanager
    def own_leaves(self, aliases: Mapping[int, Tensor]) -> Iterator[None]:
        """A context in which the modules hold these aliases, so that the caller's AccumulateGrad nodes are not used."""
        swapped = []
        try:
            for held in self._own_parameters():
                for name, p in held.items():
                    if (alias := aliases.get(id(p))) is not None:
                        held[name] = alias
                        swapped.append((held, name, p, alias))
            yield
        finally:
            for held, name, p, alias in swapped:
                # A parameter that the program itself put there stays.
                if held.get(name) is alias:
                    held[name] = p

    def _first_moved(self) -> str:
        tensors = _distinct(self.tensors())
        index, what = self._held.first_other(tensors) or (0, "count")
        if what == "count":
            return "a tensor was replaced"
        named = [pair for root in self.roots for pair in (*root.named_parameters(), *root.named_buffers())]
        name = next((name for name, t in named if t is tensors[index]), "a tensor")
        return f"{name} was replaced: its {what} changed"


def leaves_behind(roots: Iterable[Tensor]) -> set[int]:
    """Return the ids of the leaves that the autograd graph of some tensors accumulates gradients for."""
    roots = list(roots)
    found = {id(root) for root in roots if root.grad_fn is None}
    todo: list[Any] = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = set(todo)
    while todo:
        node = todo.pop()
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        fresh = {behind for behind, _ in node.next_functions if behind is not None} - seen
        seen |= fresh
        todo.extend(fresh)
    return found


def _is_plain(p: nn.Parameter) -> bool:
    return type(p) in PLAIN_TYPES and isinstance(p, nn.Parameter)


def _alias(p: nn.Parameter) -> nn.Parameter:
    alias = nn.Parameter(detached(p))
    vars(alias).update(vars(p))
    return alias


def _values(dicts: list[dict[str, Any]]) -> list[Any]:
    return list(chain.from_iterable(map(_ITS_VALUES, dicts)))


def _distinct(tensors: list[Tensor]) -> list[Tensor]:
    return list({id(t): t for t in tensors}.values())


def _are_same(now: list[Any], before: list[Any]) -> bool:
    """Return whether two lists hold the same objects; `==` would compare tensors elementwise."""
    return len(now) == len(before) and all(map(is_, now, before))
