"""The state that a program reads besides its arguments: which tensors it writes to, and how its parameters are swapped.

A graph reads parameters and buffers at fixed addresses. Checking them (`State.guard`) takes a few microseconds per
hundred tensors. A call does this while the device is busy with the replay; if the state is stale, the results of the
replay are discarded. The old memory is kept until then, so that no replay reads freed memory. The state of a program
that writes to it is checked before the replay.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.autograd.graph import Node

from subtensors.bucketed.reachable_state import ReachableState, reached_tensors
from subtensors.bucketed.state_guard import Optimizers, StateGuard
from subtensors.dispatch.graphs.guards import Writes, exact, is_plain
from subtensors.dispatch.ops.plain_types import PLAIN_TYPES, detached

TensorDict: TypeAlias = dict[Any, Any]
"""The parameters or buffers of one module, by name; some are None. Or values that an optimizer holds."""

Registered: TypeAlias = tuple[TensorDict, TensorDict, bool]
"""A dict, a copy of it, and whether it is of an optimizer's state or groups."""


class State:
    """The state of a program: its modules, the tensors that it closes over, its plain values and its optimizers.

    Args:
        program: as `ReachableState` takes it.
        key: a further part of every graph's key, as `st.bucketed` takes it.
    """

    guard: StateGuard
    """The snapshot that graphs were captured with."""

    def __init__(self, program: Callable[..., object], key: object = None) -> None:
        self._program, self.key = program, key
        self.caller: int | None = None
        """The last thread that called the program."""
        self.is_shared = False
        """True if several threads called it."""
        self.has_side_effects = False
        """True once the program has had side effects: it wrote to what it reads, or drew random numbers."""
        self._written: set[int] | None = set()
        """Ids of the tensors that the program was seen to write to; None if torch does not count writes."""
        self.take_snapshot()

    def note_caller(self, thread: int) -> None:
        """Note a call that this thread makes."""
        self.is_shared |= self.caller not in (None, thread)
        self.caller = thread

    def take_snapshot(self) -> None:
        """Take a new snapshot: the present state counts as the captured one."""
        reachable = ReachableState(self._program)
        self.draws_random_numbers, self.has_scaler = reachable.draws_random_numbers, reachable.has_scaler
        self.generators, self._functions = reachable.generators, reachable.functions
        user_key = self.guard.user_key if hasattr(self, "guard") else None
        self.guard = StateGuard(reachable)
        self.guard.user_key = user_key

    @property
    def optimizers(self) -> Optimizers:
        """The optimizers that the program reaches."""
        return self.guard.optimizers

    def tensors(self) -> list[Tensor]:
        """Return the current parameters, buffers and tensors that the program closes over."""
        return self.guard.tensors()

    def unwatched_tensors(self) -> list[Tensor]:
        """Return the tensors that the program reaches and the guard doesn't watch, such as tables that it makes."""
        watched = set(map(id, self.guard.distinct_tensors))
        return [t for t in reached_tensors(self._program, self._functions) if id(t) not in watched]

    def named_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the state by name, those of optimizers included."""
        modules, own = self.guard.roots, self.guard.distinct_tensors
        names = {id(t): name for m in modules for name, t in (*m.named_parameters(), *m.named_buffers())}
        found = {names.get(id(t), f"tensor {i} of the program"): t for i, t in enumerate(own)}
        return found | {f"optimizer state {i}": t for i, t in enumerate(self.optimizers.tensors())}

    def is_lazy(self) -> bool:
        """Return whether a parameter or buffer has no size yet, as in a lazy module before its first call."""
        return any(map(nn.parameter.is_lazy, self.tensors()))

    def no_capture_reason(self) -> str:
        """Return the reason why an optimizer step of the program cannot be captured; "" if it can."""
        if self.has_scaler:
            return "a GradScaler asks the device whether gradients are finite: scale and step outside of the program"
        return self.optimizers.no_capture_reason()

    def registered(self) -> list[Registered]:
        """Return each dict in which a module holds parameters or buffers, or an optimizer its state, with a copy of it.

        Of the attributes of an optimizer only plain values are copied.
        """
        dicts: list[TensorDict] = [d for m in self.guard.modules for d in (m._parameters, m._buffers)]
        found = [(d, dict(d), False) for d in dicts]
        for opt in self.optimizers.found:
            # The state first, since entries of it may be replaced, and are restored to what they held.
            found += [(d, dict(d), True) for d in (opt.state, *opt.state.values(), *opt.param_groups)]
            found.append((vars(opt), {name: x for name, x in vars(opt).items() if is_plain(x)}, False))
        return found

    def restore_registered(self, before: list[Registered], drops_new_state: bool = False) -> str:
        """Restore what was replaced in these dicts; return the name of the first value, "" if none was replaced.

        Args:
            before: what `registered` returned.
            drops_new_state: drop what optimizers made since, too.
        """
        replaced: list[str] = []
        for now, copy, is_state in before:
            for name in [name for name in now if name not in copy] if is_state and drops_new_state else ():
                del now[name]
            changed = {name: x for name, x in copy.items() if name not in now or not _is_same(now[name], x)}
            replaced += [name if isinstance(name, str) else "the state of an optimizer" for name in changed]
            if changed:  # those of scripted modules have no update
                now.update(changed)
        return replaced[0] if replaced else ""

    def note_writes(self, since: Writes) -> None:
        """Note which tensors were written to.

        Args:
            since: the writes to the guard's `distinct_tensors`, from before the run.
        """
        written = since.written()
        self.has_side_effects |= bool(written) or not since.are_counted
        if not since.are_counted:
            self._written = None
        elif self._written is not None:
            self._written |= set(map(id, written))

    def buffers(self) -> list[Tensor]:
        """Return the tensors that autograd lets a program write to: no parameters, and none that require grad."""
        return [t for t in self.guard.distinct_tensors if not (t.requires_grad or isinstance(t, nn.Parameter))]

    def tensors_to_restore(self) -> list[Tensor]:
        """Return the tensors that a run must restore: module buffers, and others that the program was seen to write to.

        Other tensors that an object holds may be all of its data, so they are left out until one is written to. If
        writes are not counted, all of `buffers` is returned.
        """
        buffers = self.buffers()
        if self._written is None:
            return buffers
        sure = set(map(id, buffers)) - set(map(id, self.guard.closed_over)) | self._written
        return [t for t in self.guard.distinct_tensors if id(t) in sure]

    def written(self) -> list[Tensor]:
        """Return the tensors that the program was seen to write to."""
        return [t for t in self.guard.distinct_tensors if id(t) in self._written] if self._written else []

    def stepped_tensors(self) -> list[Tensor]:
        """Return the tensors that steps of the program's optimizers write to; none if it has no optimizer."""
        if not self.optimizers.found:
            return []
        trained = [t for t in self.guard.distinct_tensors if t.requires_grad and t.is_leaf]
        return [*trained, *self.optimizers.tensors()]

    def aliases(self, without: Collection[int] = ()) -> dict[int, nn.Parameter]:
        """Return new leaf parameters over the memory of the modules' parameters, by the id of the original.

        Tensors that the program closes over, and parameters of a subclass, have no alias: they are read directly.

        Args:
            without: ids of parameters that get no alias.
        """
        without = {*without, *map(id, self.guard.closed_over)}
        found = [p for d in self._parameter_dicts() for p in d.values() if p is not None and _is_plain_parameter(p)]
        return {id(p): _alias(p) for p in found if p.requires_grad and not p.is_inference() and id(p) not in without}

    def _parameter_dicts(self) -> list[TensorDict]:
        """Return the parameter dicts of the modules, except of scripted ones, where Python cannot exchange entries."""
        return [m._parameters for m in self.guard.modules if m._parameters and isinstance(m._parameters, dict)]

    @contextmanager
    def swapped_parameters(self, aliases: Mapping[int, Tensor]) -> Iterator[None]:
        """A context in which the modules hold these aliases, so that the caller's AccumulateGrad nodes are not used."""
        swapped = []
        try:
            for parameters in self._parameter_dicts():
                for name, p in parameters.items():
                    if (alias := aliases.get(id(p))) is not None:
                        parameters[name] = alias
                        swapped.append((parameters, name, p, alias))
            yield
        finally:
            for parameters, name, p, alias in swapped:
                # A parameter that the program itself put there stays.
                if parameters.get(name) is alias:
                    parameters[name] = p


def leaf_ids_of(roots: Iterable[Tensor]) -> set[int]:
    """Return the ids of the leaves that the autograd graph of some tensors accumulates gradients for."""
    roots = list(roots)
    leaf_ids = {id(root) for root in roots if root.grad_fn is None}
    todo: list[Node] = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = set(todo)
    while todo:
        node = todo.pop()
        if hasattr(node, "variable"):
            leaf_ids.add(id(node.variable))
        new = {behind for behind, _ in node.next_functions if behind is not None} - seen
        seen |= new
        todo.extend(new)
    return leaf_ids


def _is_same(now: object, before: object) -> bool:
    return now is before or (is_plain(now) and is_plain(before) and exact(now) == exact(before))


def _is_plain_parameter(p: Tensor) -> bool:
    return type(p) in PLAIN_TYPES and isinstance(p, nn.Parameter)


def _alias(p: nn.Parameter) -> nn.Parameter:
    alias = nn.Parameter(detached(p))
    vars(alias).update(vars(p))
    return alias
