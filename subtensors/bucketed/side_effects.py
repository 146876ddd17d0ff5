"""The side effects of a program: what a run may write to is noted, undone, or repeated by replays.

`Snapshot` is of all that a run may write to: random generators, tensors, gradients, and optimizers. The context
`rolled_back` restores it, always or if the run raises; `restore_state` restores buffers and random generators alone.
What a run writes to a Python object is detected and undone by an `ObjectSnapshot`.

Note [Gradients of captured programs]
A program may call `backward` and step an optimizer even if no result of it requires grad. Its graph writes in place to
the gradients that it found at capture, or makes new ones in its own memory. The next graph may overwrite the latter
after the call, so they are dropped: the parameter then has no gradient rather than a stale one.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from subtensors.bucketed.program_state import State
from subtensors.bucketed.reachable_state import attributes_of
from subtensors.dispatch.graphs.capture import Generator, RngState
from subtensors.dispatch.graphs.dynamic_scalars import DynamicScalars
from subtensors.dispatch.graphs.guards import TensorSnapshot, Writes, are_same
from subtensors.dispatch.graphs.released_tensors import ReleasedTensor
from subtensors.dispatch.torch_internals import autograd
from subtensors.padded.padded_tensor import PaddedTensor

_log = logging.getLogger("subtensors.bucketed")

ROLLBACK_BYTES = 256 << 20
"""Maximum bytes of the copies that are kept of tensors which a run may write to."""

_CONTAINERS = (dict, OrderedDict, list)  # a module's hooks are in the second


class ObjectSnapshot:
    """A snapshot of the attributes of some objects, and of the contents of the lists and dicts among these.

    Example:
        >>> from types import SimpleNamespace
        >>> cache = SimpleNamespace(steps=[1])
        >>> snapshot = ObjectSnapshot([cache])
        >>> cache.steps.append(2)
        >>> snapshot.restore()
        'SimpleNamespace'
        >>> cache.steps
        [1]
    """

    def __init__(self, objects: Iterable[object]) -> None:
        self._before: list[tuple[str, Any, Any]] = []
        for x in objects:
            attributes = attributes_of(x)
            self._before.append((type(x).__name__, x, attributes))
            for part in attributes.values():
                if isinstance(part, (dict, list)) and type(part) in _CONTAINERS:
                    self._before.append((type(x).__name__, part, part.copy()))

    def restore(self) -> str:
        """Undo what was written since the snapshot; return the class name of the first changed object, "" if none."""
        written = ""
        for name, part, before in self._before:
            is_container = type(part) in _CONTAINERS
            if _is_same(part if is_container else attributes_of(part), before):
                continue
            written = written or name
            if is_container:
                part.clear()
                part.update(before) if isinstance(part, dict) else part.extend(before)
            else:
                _set_attributes(part, before)
        return written


def _set_attributes(x: object, to: dict[str, object]) -> None:
    now = attributes_of(x)
    for name in now.keys() - to.keys():
        object.__delattr__(x, name)
    for name, value in to.items():
        if name not in now or now[name] is not value:
            object.__setattr__(x, name, value)


def _is_same(now: Any, before: Any) -> bool:
    if isinstance(now, dict):
        return now.keys() == before.keys() and are_same(now.values(), before.values())
    return are_same(now, before)


@contextmanager
def restore_state(state: State, device: torch.device) -> Iterator[None]:
    """A context that restores the buffers that a program writes to, its registered tensors, and random generators.

    Args:
        state: the state of the program.
        device: the device on which it runs, besides those of its state.
    """
    registered, buffers = state.registered(), state.tensors_to_restore()
    values, rng = _Values(buffers), RngState([device, *[t.device for t in state.tensors()]], state.generators)
    with autograd.without_version_bumps(buffers):
        try:
            yield
        finally:
            state.restore_registered(registered)
            values.restore()
            rng.restore()


@contextmanager
def rolled_back(before: Snapshot, only_on_error: bool = False) -> Iterator[None]:
    """A context that restores a snapshot of all that a program may write to, also in a whole training step.

    Args:
        before: the snapshot.
        only_on_error: keep what is written unless the context raises, so that the run can be repeated otherwise.
    """
    has_ended = False
    try:
        with torch.autograd.set_multithreading_enabled(False):
            yield
        has_ended = True
    finally:
        if not (only_on_error and has_ended):
            before.restore()


class Accumulations:
    """The accumulations of gradients into some leaves from now on, and whether this thread or others made them.

    An accumulation that began before is not seen. So where several threads call the program, a gradient that changed
    is taken for theirs unless this thread accumulated it.

    Args:
        state: of the program.
        leaves: the leaves.
    """

    def __init__(self, state: State, leaves: Iterable[Tensor]) -> None:
        self._state = state
        self._here, self._elsewhere = set[int](), set[int]()
        note = partial(_note_accumulation, threading.get_ident(), self._here, self._elsewhere)
        hooks = [leaf.register_post_accumulate_grad_hook(note) for leaf in leaves]
        weakref.finalize(self, lambda: [hook.remove() for hook in hooks]).atexit = False

    def are_elsewhere(self, leaf: Tensor) -> bool:
        """Return whether a change of this leaf's gradient is other threads'."""
        return id(leaf) in self._elsewhere or (self._state.is_shared and id(leaf) not in self._here)


def _note_accumulation(thread: int, here: set[int], elsewhere: set[int], leaf: Tensor) -> None:
    (here if threading.get_ident() == thread else elsewhere).add(id(leaf))


class Snapshot:
    """A snapshot of what a program may write to: tensors, gradients, optimizer state, random generators.

    A backward in between is to run on this thread (`torch.autograd.set_multithreading_enabled(False)`): gradients that
    other threads accumulate are theirs. The largest tensors, such as weights and key-value caches, are left out if
    their copies exceed `ROLLBACK_BYTES`.

    Args:
        state: the state of the program.
        devices: the devices whose random generators are included.
        always: tensors that are copied however large they are.
        extra: further tensors that may be written to.
        undo: functions that restore what else may be written to.
        generators: random generators besides those of the state.
    """

    def __init__(
        self,
        state: State,
        devices: Iterable[torch.device],
        always: Sequence[Tensor],
        extra: Iterable[Tensor],
        undo: Sequence[Callable[[], object]] = (),
        generators: Iterable[Generator] = (),
    ) -> None:
        self._state, self._registered = state, state.registered()
        self._rng = RngState([*devices, *[t.device for t in state.tensors()]], [*state.generators, *generators])
        leaves = [t for t in state.tensors() if t.requires_grad and t.is_leaf and not isinstance(t, ReleasedTensor)]
        self._accumulations, self._gradients = Accumulations(state, leaves), [(t, t.grad) for t in leaves]
        gradients = [g for _, g in self._gradients if g is not None]
        found = {
            id(t): t
            for t in [*state.tensors_to_restore(), *state.buffers(), *gradients, *state.stepped_tensors(), *extra]
        }
        copied, left_out, room = {id(t): t for t in always}, list[Tensor](), ROLLBACK_BYTES
        resident = [t for t in found.values() if id(t) not in copied and not isinstance(t, ReleasedTensor)]
        for t in sorted(resident, key=_nbytes):
            if (room := room - _nbytes(t)) >= 0:
                copied[id(t)] = t
            else:
                left_out.append(t)
        self._values = _Values(copied.values())
        self._copied = set(map(id, self._values.tensors))
        self._writes, self._writes_left_out = Writes(self._values.tensors), Writes(left_out)
        self._undo = undo

    def has_copy(self, t: Tensor) -> bool:
        """Return whether the snapshot holds a tensor's values."""
        return id(t) in self._copied

    def written_ids(self) -> set[int]:
        """Return the ids of the copied tensors that were written to since, as far as torch counts writes."""
        return set(map(id, self._writes.written()))

    def has_drawn(self) -> bool:
        """Return whether random numbers were drawn since."""
        return self._rng.has_drawn()

    def has_trained(self) -> bool:
        """Return whether the program accumulated gradients, or stepped an optimizer, since."""
        written = set(map(id, [*self._writes.written(), *self.lost()]))
        changed = [t for t, before in self._gradients if t.grad is not before or id(before) in written]
        is_stepped = self._state.optimizers.found and any(id(t) in written for t, _ in self._gradients)
        return bool(is_stepped) or not all(map(self._accumulations.are_elsewhere, changed))

    def can_restore(self) -> bool:
        """Return whether what was written since can be undone."""
        return not self._writes_left_out.any()

    def lost(self) -> list[Tensor]:
        """Return the tensors that were written to since without a copy."""
        return self._writes_left_out.written()

    def restore(self) -> None:
        """Undo what was written since the snapshot; log a warning if a tensor without a copy was written to."""
        self._state.restore_registered(self._registered, drops_new_state=True)
        others = set[int]()
        for t, gradient in self._gradients:
            # What other threads do to gradients is not undone, unless an optimizer has read them.
            if not self._state.optimizers.found and self._accumulations.are_elsewhere(t):
                others.add(id(gradient))
            else:
                t.grad = gradient
        with autograd.without_version_bumps(self._values.tensors):
            self._values.restore(others)
        self._rng.restore()
        for undo in self._undo:
            undo()
        if not self.can_restore():
            _log.warning("a run that must have no side effects wrote to a tensor too large to keep a copy of")


class _Values:
    """A snapshot of the values of some tensors."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        # Nobody can write to released tensors, nor to inference tensors outside of inference mode.
        can_all = torch.is_inference_mode_enabled()
        self.tensors = [t for t in tensors if not isinstance(t, ReleasedTensor) and (can_all or not t.is_inference())]
        with torch.no_grad():
            self._copies = [t.clone() for t in self.tensors]

    def restore(self, but: Collection[int] = ()) -> None:
        """Undo what was written since the snapshot, except to the tensors with some ids."""
        with torch.no_grad():
            for t, values in zip(self.tensors, self._copies, strict=True):
                if id(t) in but:
                    continue
                # Torch writes to no dim that is expanded: one element of it is all.
                once = [d for d in range(t.dim()) if t.layout is torch.strided and t.stride(d) == 0 and t.shape[d] > 1]
                for d in once:
                    t, values = t.narrow(d, 0, 1), values.narrow(d, 0, 1)
                t.copy_(values)


def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of some tensors; those of one dtype are made by one kernel."""
    made = [torch.empty_like(t) for t in tensors]
    for dtype in {t.dtype for t in tensors}:
        at = [i for i, t in enumerate(tensors) if t.dtype == dtype]
        torch._foreach_copy_([made[i] for i in at], [tensors[i] for i in at])
    return made


def _nbytes(t: Tensor) -> int:
    """Return the bytes of a copy; a sparse tensor counts as if it were dense."""
    return t.numel() * t.element_size()


def is_room_for(tensors: Sequence[Tensor], copies: int) -> bool:
    """Return whether the free memory of their devices takes some copies of tensors."""
    needed: dict[torch.device, int] = {}
    for t in tensors:
        needed[t.device] = needed.get(t.device, 0) + copies * _nbytes(t)
    return all(count <= _free_bytes(device) for device, count in needed.items())


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    known = "SC_AVPHYS_PAGES" in os.sysconf_names
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if known else 0


def dense_of(x: Tensor) -> Tensor:
    """Return the storage of a PaddedTensor; another tensor as it is."""
    return x._dense if isinstance(x, PaddedTensor) else x


class SideEffects:
    """The side effects of one graph's replays.

    Args:
        state: the state of the program.
    """

    def __init__(self, state: State) -> None:
        self.state = state
        self.numbers = DynamicScalars()
        self._accumulated: dict[Tensor, Tensor] = {}
        """Parameters whose gradient the graph reads or adds to in place, each with that gradient."""
        self._snapshot = TensorSnapshot([])
        self._dropped: list[Tensor] = []
        """Parameters whose gradient is in the graph's memory."""
        self._written: list[Tensor] = []

    @contextmanager
    def noted(self, caller_runs_backward: bool) -> Iterator[None]:
        """A context in which the program is captured, and its side effects are noted.

        Args:
            caller_runs_backward: whether the caller runs the backward; then only gradients that the program writes
                itself count.
        """
        tensors = [*self.state.tensors(), *self.state.optimizers.tensors()]
        params = list({id(t): t for t in tensors if t.requires_grad and t.is_leaf}.values())
        gradients = [p.grad for p in params]
        writes, accumulation = Writes(tensors), Writes(g for g in gradients if g is not None)
        threads = Accumulations(self.state, params if self.state.is_shared else [])
        with self.numbers.active():
            try:
                yield
            except BaseException:  # a failed capture has computed nothing
                for p, before in zip(params, gradients, strict=True):
                    if not threads.are_elsewhere(p):
                        p.grad = before
                raise
        accumulated = set(map(id, accumulation.written()))
        for p, before in zip(params, gradients, strict=True):
            is_changed = p.grad is not before or id(before) in accumulated
            if is_changed and threads.are_elsewhere(p):
                continue
            if p.grad is not before:
                self._dropped.append(p)
                p.grad = None
            elif before is not None and not (caller_runs_backward and id(before) not in accumulated):
                self._accumulated[p] = before
        self._snapshot = TensorSnapshot(list(self._accumulated.values()))
        self._written = writes.written()

    def no_replay_reason(self) -> str:
        """Return the reason why the graph must not be replayed now; "" if it may."""
        gradients = list(self._accumulated.values())
        if not are_same([p.grad for p in self._accumulated], gradients) or not self._snapshot.matches(gradients):
            return "a gradient that the program adds to was replaced: let zero_grad(set_to_none=False) keep it"
        return ""

    def before_replay(self) -> None:
        """Upload the dynamic scalars of the optimizers."""
        self.state.optimizers.set_dynamic_scalars(self.numbers)
        self.numbers.upload()

    def after_replay(self) -> None:
        """Bump the versions of written tensors, and drop the gradients that are in the graph's memory."""
        if self._written:
            torch.autograd.graph.increment_version(self._written)
        for p in self._dropped:
            p.grad = None
