"""What a program reads beside its arguments, and whether it is still where a graph was recorded.

A graph reads parameters and buffers at bare addresses. Looking at all of them takes some microseconds for every
hundred, which a call spends while the device is busy with the replay: what a replay computed from memory that was
replaced is thrown away. The memory itself is kept until then, so that nothing reads what isn't there. A program that
writes to its state is looked at before.
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
    """The state of a program: that of the modules in it, and the tensors that it closes over.

    Args:
        program: as `ReachableState` takes it.
    """

    def __init__(self, program: Callable[..., Any]) -> None:
        self._program = program
        self._written: set[int] | None = set()
        """Ids of what the program was seen to write to; None where torch doesn't count it."""
        self.look()

    def look(self) -> None:
        """Take what is there now for what is recorded."""
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
        """Which modules train, by which of the outermost do: graphs are recorded for each."""
        self.constants = Constants(self.reached.plain, self.modules)
        self.additions = NewAttributes(self.reached.holders, self.reached.names)
        self.loose = [x for x in parts if isinstance(x, Tensor)]
        self._tensors = _distinct(self.tensors())
        self._held = TensorSnapshot(self._tensors)
        self.optimizers = Optimizers([x for x in parts if isinstance(x, torch.optim.Optimizer)])

    def tensors(self) -> list[Tensor]:
        """Parameters, buffers and tensors that the program closes over, as they are now."""
        return [t for t in _values(self._holders) if t is not None] + self.loose

    def training(self) -> tuple[bool, ...]:
        """Which of the outermost modules train."""
        return tuple([root.training for root in self.roots])

    def _trained(self) -> list[bool]:
        """Which of all modules train."""
        return [*map(_ITS_TRAINING, self._attributes), *[m.training for m in self._scripted]]

    def is_lazy(self) -> bool:
        """Has a parameter no size yet?"""
        return any(map(nn.parameter.is_lazy, self.tensors()))

    def followed(self, leaves: Iterable[Any]) -> tuple[bool, ...] | None:
        """Which of the tensors want a gradient, in a call that autograd follows; None in another.

        Args:
            leaves: of the call's arguments.
        """
        if not torch.is_grad_enabled():
            return None
        wanting = tuple([t.requires_grad for t in self.tensors()])
        is_followed = any(wanting) or any(isinstance(x, Tensor) and x.requires_grad for x in leaves)
        return wanting if is_followed else None

    def moved(self) -> str:
        """What is no longer as recorded, in words; "" where nothing is."""
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
        """Why a step that the program takes can't be a part of a graph; "" where it can."""
        if self.reached.has_scaler:
            return "a GradScaler asks the device whether gradients are finite: scale and step outside of the program"
        return self.optimizers.obstacle()

    @contextmanager
    def of_a_run(self) -> Iterator[None]:
        """The program runs meanwhile: what it writes itself is not watched."""
        with self.constants.of_a_run(), self.additions.of_a_run():
            yield

    def held(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Where the modules hold parameters and buffers, and which these are."""
        return [(held, dict(held)) for m in self.modules for held in (m._parameters, m._buffers)]

    def put_back(self, before: list[tuple[dict[str, Any], dict[str, Any]]]) -> str:
        """Undo what was replaced since: the name of the first such parameter or buffer, "" where none was."""
        replaced: list[str] = []
        for held, kept in before:
            others = {name: value for name, value in kept.items() if name not in held or held[name] is not value}
            replaced += others
            if others:  # those of scripted modules have no update
                held.update(others)
        return replaced[0] if replaced else ""

    def refuse_sleepers(self) -> None:
        """AddressError where the memory of a tensor is away."""
        check_resident((self._tensors,))

    def versions(self) -> list[int] | None:
        """How often each tensor was written to; None where torch doesn't count."""
        if any(t.is_inference() for t in self._tensors):
            return None
        return [t._version for t in self._tensors]

    def note_writes(self, before: list[int] | None) -> bool:
        """Remember what was written to since these were the versions: was anything, or can't that be told?"""
        after = self.versions()
        if before is None or after is None:
            self._written = None
            return True
        if self._written is not None:
            self._written |= {id(t) for t, a, b in zip(self._tensors, before, after, strict=True) if a != b}
        return before != after

    def buffers(self) -> list[Tensor]:
        """What a program may write to without autograd's leave: it is no parameter, nor wants a gradient otherwise."""
        return [t for t in self._tensors if not (t.requires_grad or isinstance(t, nn.Parameter))]

    def at_risk(self) -> list[Tensor]:
        """What a run must put back: buffers of modules, and else what the program was seen to write to.

        The tensors that an object holds beside its modules may be all of its data.
        """
        buffers = self.buffers()
        if self._written is None:
            return buffers
        sure = set(map(id, buffers)) - set(map(id, self.loose)) | self._written
        return [t for t in self._tensors if id(t) in sure]

    def stepped(self) -> list[Tensor]:
        """What steps of the program's optimizers write to; nothing where it has none."""
        if not self.optimizers.are_there():
            return []
        trained = [t for t in self._tensors if t.requires_grad and t.is_leaf]
        return [*trained, *self.optimizers.tensors()]

    def aliases(self, kept: Collection[int] = ()) -> dict[int, nn.Parameter]:
        """Leaves of their own over the memory of the modules' parameters, by the id of what each stands for.

        Tensors that the program closes over are read where they are, and parameters of another class as they are:
        neither has an alias.

        Args:
            kept: ids of parameters that get none.
        """
        without = {*kept, *map(id, self.loose)}
        held = [p for own in self._own_parameters() for p in own.values() if p is not None and _is_plain(p)]
        return {id(p): _alias(p) for p in held if p.requires_grad and not p.is_inference() and id(p) not in without}

    def _own_parameters(self) -> list[dict[str, Any]]:
        """Where modules hold their parameters; those of scripted ones are not Python's to exchange."""
        return [m._parameters for m in self.modules if m._parameters and isinstance(m._parameters, dict)]

    @contextmanager
    def own_leaves(self, aliases: Mapping[int, Tensor]) -> Iterator[None]:
        """The modules hold these aliases meanwhile, so that autograd's nodes of the caller's parameters aren't met."""
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
                # What the program itself put there stays.
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
    """The ids of the leaves that autograd's graph behind some tensors accumulates gradients of."""
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
    """Are these the same objects? Tensors compare themselves elementwise."""
    return len(now) == len(before) and all(map(is_, now, before))
