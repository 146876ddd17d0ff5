"""What a program reads beside its arguments, and whether it is still where a graph was recorded.

A graph reads parameters and buffers at bare addresses. Looking at all of them takes some microseconds for every
hundred, which a call spends while the device is busy with the replay: what a replay computed from memory that was
replaced is thrown away. The memory itself is kept until then, so that nothing reads what isn't there. A program that
writes to its state is looked at before.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from subtensors.bucketed.optimizers import Optimizers
from subtensors.dispatch.plain_types import PLAIN_TYPES
from subtensors.dispatch.sleeping import refuse_sleepers
from subtensors.dispatch.tensor_guards import AddressGuard

_DEPTH = 3


class State:
    """The state of a program: that of the modules in it, and the tensors that it closes over.

    Args:
        program: a module, a method of one, a function that reaches modules, tensors and optimizers by its closure or by
            names of its file, or a partial of these.
    """

    def __init__(self, program: Callable[..., Any]) -> None:
        found = list(dict.fromkeys(_within(program, _DEPTH)))
        self.roots = [x for x in found if isinstance(x, nn.Module)]
        self.loose = [x for x in found if isinstance(x, Tensor)]
        self.optimizers = Optimizers([x for x in found if isinstance(x, torch.optim.Optimizer)])
        self.look()

    def look(self) -> None:
        """Take what is there now for what is recorded."""
        self.modules = list(dict.fromkeys(module for root in self.roots for module in root.modules()))
        self._holders = [d for m in self.modules for d in (m._parameters, m._buffers) if d]
        self._parents = [m._modules for m in self.modules if m._modules]
        self._children = _values(self._parents)
        self._held = _values(self._holders)
        self._tensors = self.tensors()
        self._guard = AddressGuard(self._tensors)
        self._layouts = _layouts(self._tensors)
        with torch.no_grad():
            # Keeps the memory, also where `.data` is replaced.
            self._memory = [t.detach() for t in self._tensors]
        self._training = [m.training for m in self.modules]
        self.optimizers.look()

    def tensors(self) -> list[Tensor]:
        """Parameters, buffers and tensors that the program closes over, as they are now."""
        return [t for t in _values(self._holders) if t is not None] + self.loose

    def training(self) -> tuple[bool, ...]:
        """Which of the outermost modules train."""
        return tuple([root.training for root in self.roots])

    def needs_gradients(self) -> bool:
        """Does any of the tensors want one?"""
        return any(t.requires_grad for t in self.tensors())

    def moved(self) -> str:
        """What is no longer as recorded, in words; "" where nothing is."""
        if (
            not _are_same(_values(self._holders), self._held)
            or not self._guard.matches(self._tensors)
            or _layouts(self._tensors) != self._layouts
        ):
            return f"{self._name_of_first_moved(self.tensors())} was replaced"
        if not _are_same(_values(self._parents), self._children):
            return "a module was replaced"
        if [m.training for m in self.modules] != self._training:
            return "a module changed between training and evaluation"
        return self.optimizers.moved()

    def held(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Where the modules hold parameters and buffers, and which these are."""
        return [(held, dict(held)) for m in self.modules for held in (m._parameters, m._buffers)]

    def put_back(self, before: list[tuple[dict[str, Any], dict[str, Any]]]) -> str:
        """Undo what was replaced since: the name of the first such parameter or buffer, "" where none was."""
        replaced = [name for held, kept in before for name in kept if held.get(name) is not kept[name]]
        for held, kept in before:
            held.update(kept)
        return replaced[0] if replaced else ""

    def refuse_sleepers(self) -> None:
        """AddressError where the memory of a tensor is away."""
        refuse_sleepers((self._tensors,))

    def versions(self) -> list[int] | None:
        """How often each tensor was written to; None where torch doesn't count."""
        if any(t.is_inference() for t in self._tensors):
            return None
        return [t._version for t in self._tensors]

    def buffers(self) -> list[Tensor]:
        """What isn't a parameter: what a program may write to without autograd's leave."""
        return [t for t in self._tensors if not isinstance(t, nn.Parameter)]

    def aliases(self, kept: Collection[int] = ()) -> dict[int, nn.Parameter]:
        """Leaves of their own over the memory of the modules' parameters, by the id of what each stands for.

        Tensors that the program closes over are read where they are, and parameters of another class as they are:
        neither has an alias.

        Args:
            kept: ids of parameters that get none.
        """
        without = {*kept, *map(id, self.loose)}
        held = [p for m in self.modules for p in m._parameters.values() if p is not None and _is_plain(p)]
        return {id(p): _alias(p) for p in held if p.requires_grad and not p.is_inference() and id(p) not in without}

    @contextmanager
    def own_leaves(self, aliases: Mapping[int, Tensor]) -> Iterator[None]:
        """The modules hold these aliases meanwhile, so that autograd's nodes of the caller's parameters aren't met."""
        swapped = []
        try:
            for held in [m._parameters for m in self.modules if m._parameters]:
                for name, p in held.items():
                    if (alias := aliases.get(id(p))) is not None:
                        held[name] = alias  # type: ignore[assignment]
                        swapped.append((held, name, p, alias))
            yield
        finally:
            for held, name, p, alias in swapped:
                # What the program itself put there stays.
                if held.get(name) is alias:
                    held[name] = p

    def _name_of_first_moved(self, tensors: list[Tensor]) -> str:
        names: dict[int, str] = {}
        for root in self.roots:
            for name, t in [*root.named_parameters(), *root.named_buffers()]:
                names.setdefault(t.data_ptr(), name)
        for now, before in zip(tensors, self._memory, strict=False):
            if now.data_ptr() != before.data_ptr() or _layouts([now]) != _layouts([before]):
                return names.get(now.data_ptr(), "a tensor")
        return "a tensor"


def _layouts(tensors: Iterable[Tensor]) -> list[tuple[torch.Size, tuple[int, ...]]]:
    """Of those that may be laid out in other ways where they are, as by `w.data = w.data.t()`."""
    return [(t.shape, t.stride()) for t in tensors if t.ndim > 1]


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
    return type(p) in PLAIN_TYPES and issubclass(type(p), nn.Parameter)


def _alias(p: nn.Parameter) -> nn.Parameter:
    alias = nn.Parameter(p.detach())
    vars(alias).update(vars(p))
    return alias


def _values(dicts: list[dict[str, Any]]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, dicts)))


def _are_same(now: list[Any], before: list[Any]) -> bool:
    """Are these the same objects? Tensors compare themselves elementwise."""
    return len(now) == len(before) and all(map(is_, now, before))


_Part = nn.Module | Tensor | torch.optim.Optimizer


def _within(x: Any, depth: int) -> Iterator[_Part]:
    if isinstance(x, _Part):
        yield x
    elif depth and isinstance(x, types.MethodType):
        yield from _within(x.__self__, depth - 1)
        yield from _within(x.__func__, depth - 1)
    elif depth and isinstance(x, functools.partial):
        for part in (x.func, *x.args, *x.keywords.values()):
            yield from _within(part, depth - 1)
    elif depth and not isinstance(x, types.FunctionType) and hasattr(x, "__wrapped__"):
        yield from _within(x.__wrapped__, depth - 1)  # another bucketed program
    elif depth and isinstance(x, types.FunctionType):
        used = [x.__globals__[name] for name in x.__code__.co_names if name in x.__globals__]
        for part in used:
            if not isinstance(part, types.ModuleType) and (
                isinstance(part, (_Part, types.FunctionType)) or hasattr(part, "__wrapped__")
            ):
                yield from _within(part, depth - 1)
        for cell in x.__closure__ or ():
            try:
                yield from _within(cell.cell_contents, depth - 1)
            except ValueError:  # not assigned yet
                continue
        for default in x.__defaults__ or ():
            yield from _within(default, depth - 1)
    elif depth and isinstance(x, (list, tuple)):
        for part in x:
            yield from _within(part, depth - 1)
    elif depth and isinstance(x, dict):
        for part in x.values():
            yield from _within(part, depth - 1)
