"""One captured step of an optimizer, and the checks that decide whether a later step can replay it.

A step can be replayed if nothing that its launches depend on has changed: the parameters, which of them have a
gradient, the addresses of parameters and state, and the options that decide the math. Dynamic scalars and the addresses
of gradients may change from step to step, and are handed to the replay.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import optree
import torch
from torch import Tensor

from subtensors.counts import counted
from subtensors.dispatch.fused.bound_call import interprets_kernels, modes
from subtensors.dispatch.fused.tensor_columns import TensorColumn
from subtensors.dispatch.graphs.dynamic_scalars import NotRecordable
from subtensors.dispatch.graphs.fused_graph import Launch, Recording
from subtensors.dispatch.graphs.guards import AddressSnapshot, LayoutSnapshot, Writes, are_same
from subtensors.dispatch.graphs.released_tensors import Release, check_resident
from subtensors.dispatch.ops.errors import AddressError
from subtensors.dispatch.ops.tree import PyTree
from subtensors.kernels.runtime.launcher import current_stream
from subtensors.optim.batches import GroupBatches, indices_without_gradient
from subtensors.optim.options import ParamGroup
from subtensors.optim.state import needed_entries
from subtensors.optim.step import UpdatedOptimizer, Updater

Gradients = list[TensorColumn]
"""The gradients of each group, in the order of its parameters; None for a parameter without one."""

_SCALES = ("grad_scale", "found_inf")

CONSTANT_NUMBER = "a number changed that is a constant of this optimizer's graph"
CONSTANT_GRADIENT = "a gradient moved whose address is a constant of this optimizer's graph"
CONSTANTS = (
    "state was added or replaced",
    "a parameter group was added or removed",
    "a mode of torch changed",
    "a value changed that update reads besides its arguments",
    "the current stream changed",
    *["a loss scale was added or removed"] * len(_SCALES),
)
"""The reasons to give where one of a recording's constants changed."""

CPU_REASON = "the parameters are on the CPU, where a step has no graph"


class CapturedStep:
    """A captured step of an optimizer with given gradients, or the reason why it can't be captured.

    Args:
        optimizer: the optimizer; state that a parameter lacks is created.
        gradients: the gradients of its groups.
        reason: why not to capture the step; empty to try.

    Raises:
        AddressError: parameters, state or gradients moved during the capture.
    """

    def __init__(self, optimizer: UpdatedOptimizer, gradients: Gradients, reason: str = "") -> None:
        updater = optimizer._updater
        groups = optimizer.param_groups
        self.recording: Recording | None = None
        self._sources: list[object] = [(id(optimizer), index) for index in range(len(groups))]
        """The source of each group's numbers in the recording."""
        self.reason = ""
        """The reason why there is no recording, so that such steps run eagerly; empty if there is one."""
        batches = [batch for i, own in enumerate(gradients) for batch in updater.batches(optimizer, groups, i, own)]
        self.batches = batches
        self.groups: list[GroupBatches] = [updater.groups[i] for i in range(len(gradients))]
        self.stamp = optimizer.state.version.stamp
        self.params = [p for batch in batches for p in batch.params]
        self.param_guard = AddressSnapshot(self.params)
        self.state = [t for batch in batches for column in batch.columns() for t in column]
        self.state_guard = AddressSnapshot(self.state, with_layout=False)
        own = _present(gradients)
        self.gradient_guard = AddressSnapshot(own)
        self.gradient_metadata = LayoutSnapshot(own)
        self.are_plain = all(batch.has_plain_gradients for batch in batches)
        self.options: list[ParamGroup] = [{} for _ in groups]
        """Each group in the last step, if comparing the identities of its values suffices; else an empty dict."""
        devices = {batch.kind.device for batch in batches}
        self.device = min(devices, key=str, default=torch.device("cpu"))
        self.constants = self._read_constants(optimizer)
        self.paths = [number_paths(updater, group, self.device) for group in groups]
        taken = [step_signature(updater, group, self.device) for group in groups]
        self.signatures = [signature for signature, _, _ in taken]
        self.numbers = [numbers for _, numbers, _ in taken]
        self.has_other_ops = not updater.is_fused
        """True if the step is more than fused calls, so that its graph has everything else as constants."""
        try:
            if reason:
                raise NotRecordable(reason)
            self._record(optimizer, own, devices)
        except NotRecordable as error:
            self.recording, self.reason = None, str(error)

    def _record(self, optimizer: UpdatedOptimizer, gradients: list[Tensor], devices: set[torch.device]) -> None:
        name = type(optimizer).__name__
        if not devices:
            raise NotRecordable("no parameter has a gradient")
        if len(devices) > 1:
            raise NotRecordable("the parameters are on several devices")
        if self.device.type != "cuda" and not interprets_kernels():
            raise NotRecordable(CPU_REASON)
        if self.has_other_ops and not (optimizer.is_replayable and self.device.type == "cuda"):
            raise NotRecordable(f"a step of {name} is more than fused calls")
        if self.has_other_ops:
            for group in optimizer.param_groups:
                # Numbers are then known by identity, wherever the step hands them on.
                group.update({name: fresh_copy(value) for name, value in group.items() if name != "params"})
        self.recording = Recording(self.device, self.has_other_ops)
        self._record_update(optimizer, self.recording, gradients)
        moved = self.first_moved()
        if moved or not self.gradient_guard.matches(_present(optimizer._updater.gradients(optimizer.param_groups))):
            raise AddressError(f"{moved or 'a gradient'} moved while a step was captured")
        self.constant_numbers = [set(range(len(paths))) for paths in self.paths]
        """The positions of each group's numbers that are constants of the graph: a new value needs a recapture."""
        for launch in self.recording.launches:
            if launch.source is not None:  # the norm has no source, and takes no numbers
                self._match_numbers(optimizer, launch)

    def _record_update(self, optimizer: UpdatedOptimizer, recording: Recording, gradients: list[Tensor]) -> None:
        """Record the update, with loss scales in memory of the recording's own."""
        self.buffers = {
            name: torch.empty_like(getattr(optimizer, name), device=self.device)
            for name in _SCALES
            if getattr(optimizer, name, None) is not None
        }
        given = {name: getattr(optimizer, name) for name in self.buffers}
        writes = Writes([*self.params, *self.state])
        try:
            vars(optimizer).update(self.buffers)
            recording.record(partial(optimizer._updater.update_all, optimizer), gradients)
        except AddressError:
            raise
        except RuntimeError as error:
            if not self.has_other_ops:
                raise
            # Torch raises this only when it meets a function that a graph can't hold.
            raise NotRecordable(f"torch could not capture it: {str(error).splitlines()[0]}") from error
        finally:
            vars(optimizer).update(given)
        if writes.any():
            raise RuntimeError(
                f"{type(optimizer).__name__}.update writes parameters or state by torch operations, which ran when the "
                "step was captured: write them in functions made by st.fused alone, or leave is_replayable = False"
            )

    def _match_numbers(self, optimizer: UpdatedOptimizer, launch: Launch) -> None:
        """Match the numbers of a launch with the dynamic scalars of its group, which may change between replays."""
        index = self._sources.index(launch.source)
        group = optimizer.param_groups[index]
        _, numbers, hosts = step_signature(optimizer._updater, group, self.device)
        if self.has_other_ops:
            launch.indices = [next((i for i, n in enumerate(numbers) if n is own), -1) for own in launch.numbers]
        else:
            launch.indices = [*range(len(numbers))]
            if launch.numbers != numbers:
                raise NotRecordable(f"a number of {type(optimizer).__name__} is not one of its parameter group")
        if launch.hosts not in ([], hosts):
            raise NotRecordable(f"a number on the CPU of {type(optimizer).__name__} is not one of its group")
        self.constant_numbers[index] -= set(launch.indices)

    def __repr__(self) -> str:
        launches = "eager" if self.recording is None else counted(len(self.recording.launches), "launch")
        because = f": {self.reason}" if self.reason else ""
        return f"<{type(self).__name__} of {counted(len(self.params), 'tensor')} on {self.device}, {launches}{because}>"

    def first_moved(self) -> str:
        """The first tensor of the step, gradients apart, whose address changed since capture; empty if none did."""
        params = self.param_guard.changed(self.params, "parameter")
        return params or self.state_guard.changed(self.state, "state tensor")

    def full_check(self, optimizer: UpdatedOptimizer, gradients: Gradients) -> str:
        """The reason why a step can't replay this recording; empty if it can, and the recording is then ready."""
        if reason := self.fast_check(optimizer):
            return reason
        if any(
            indices_without_gradient(own) != group.without_gradient
            for own, group in zip(gradients, self.groups, strict=True)
        ):
            return "other parameters have a gradient"
        if not self.param_guard.matches(self.params):
            return "a parameter moved"
        return self._update_gradients(_present(gradients))

    def fast_check(self, optimizer: UpdatedOptimizer) -> str:
        """The same as `full_check`, for a step whose parameters and gradients are known to be at their addresses."""
        constants = self._read_constants(optimizer)
        if constants != self.constants:
            pairs = zip(CONSTANTS, constants, self.constants, strict=True)
            return next(reason for reason, now, before in pairs if now != before)
        for i, group in enumerate(optimizer.param_groups):
            if not self.groups[i].has_params(group["params"]):
                return f"the parameters of group {i} were replaced"
            if are_same(group.values(), self.options[i].values()):
                continue  # the very objects of the last step: none of them changed
            if reason := self._update_options(optimizer, i, group):
                return reason
        for batch in self.batches:
            if batch.is_stale():
                return "state moved, or parameters were cast"
        return ""

    def _read_constants(self, optimizer: UpdatedOptimizer) -> tuple[object, ...]:
        """The values that a recording holds besides tensors and numbers, one for each of `CONSTANTS`."""
        return (
            optimizer.state.version.stamp,
            len(optimizer.param_groups),
            modes()[1:],  # grad mode, the first, has no effect within a step
            optimizer._updater.function.read_values(),
            current_stream(self.device),
            getattr(optimizer, "grad_scale", None) is None,
            getattr(optimizer, "found_inf", None) is None,
        )

    def _update_options(self, optimizer: UpdatedOptimizer, index: int, group: ParamGroup) -> str:
        """Hand the numbers of a group to the recording; return the reason if it can't take them, else ""."""
        if not self.groups[index].accept(group, needed_entries(optimizer, group)):
            return f"group {index} needs other state"
        before = self.options[index]
        if before and [*group] == [*before] and all(map(differ_by_scalars, group.values(), before.values())):
            numbers = [number_at(group, path) for path in self.paths[index]]
            hosts: list[float] = []
        else:
            signature, numbers, hosts = step_signature(optimizer._updater, group, self.device)
            if signature != self.signatures[index]:
                return "an option changed that decides the math"
        if self.recording is not None:
            if any(numbers[i] != self.numbers[index][i] for i in self.constant_numbers[index]):
                return CONSTANT_NUMBER
            self.recording.scalars.set(self._sources[index], numbers, hosts)
        self.options[index] = dict(group) if self.groups[index].values else {}
        return ""

    def _update_gradients(self, own: list[Tensor]) -> str:
        """Hand the gradients' addresses to the recording; return the reason if it can't take them, else ""."""
        has_moved = not self.gradient_guard.matches(own)
        if (has_moved or not self.are_plain) and not self.gradient_metadata.matches(own):
            return "a gradient has another layout or dtype"
        if has_moved and self.has_other_ops and self.recording is not None:
            return CONSTANT_GRADIENT
        if has_moved:
            addresses = list(map(Tensor.data_ptr, own))
            if self.recording is not None and not self.recording.move(addresses):
                return "a gradient shares memory with what the step writes"
            self.gradient_guard.addresses = addresses
        return ""

    def replay(self, optimizer: UpdatedOptimizer) -> None:
        """Replay the step, without telling autograd of the tensors that it wrote, which are `recording.written`."""
        assert self.recording is not None
        if Release.count:
            check_resident((self.params, self.state))
        for name, buffer in self.buffers.items():
            buffer.copy_(getattr(optimizer, name), non_blocking=True)
        self.recording.replay()

    def check(self) -> None:
        """Check the addresses of everything that the next replay reads and writes, gradients apart.

        Raises:
            AddressError: a tensor's address has changed.
        """
        if moved := self.first_moved():
            raise AddressError(
                f"{moved} moved since it was captured, unseen by the step: put new tensors into opt.state[p] rather "
                "than moving those that are there, or call opt.capture() again"
            )


def _present(gradients: Gradients) -> list[Tensor]:
    return [g for own in gradients for g in own if g is not None]


def differ_by_scalars(now: object, before: object) -> bool:
    """Return whether two values are the same object, or differ only as dynamic scalars do.

    A number that was 0 or becomes 0 counts as different, since the step may leave a 0 out of the math.
    """
    if now is before:
        return True
    if type(now) is tuple and type(before) is tuple and len(now) == len(before):
        return all(type(n) is float for n in (*now, *before))
    return type(now) is type(before) is float and now != 0 != before


def number_paths(updater: Updater, group: ParamGroup, device: torch.device) -> list[tuple[Any, ...]]:
    """The paths of a group's dynamic scalars, in the order in which the step takes them."""
    values: PyTree = updater.values(group, device)
    paths, leaves, _ = optree.tree_flatten_with_path(values, none_is_leaf=True)
    return [path for path, leaf in zip(paths, leaves, strict=True) if type(leaf) in (float, int)]


def fresh_copy(value: object) -> object:
    """A copy of a float that is a new object, also inside a tuple; other values unchanged."""
    if type(value) is tuple:
        return tuple([fresh_copy(v) for v in value])
    return value * 1.0 if type(value) is float else value


def number_at(group: dict[str, Any], path: tuple[Any, ...]) -> float:
    """The number at a path of a group, as a float."""
    value = group[path[0]]
    return float(value if len(path) == 1 else value[path[1]])


def step_signature(
    updater: Updater, group: ParamGroup, device: torch.device
) -> tuple[tuple[object, ...], list[float], list[float]]:
    """Split a group's options into a signature that decides the launches, dynamic scalars, and CPU scalars."""
    numbers: list[float] = []
    hosts: list[float] = []
    signature: list[object] = [(name, value) for name, value in group.items() if type(value) in (bool, str, type(None))]
    values: PyTree = updater.values(group, device)
    leaves, spec = optree.tree_flatten(values, none_is_leaf=True)
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.device.type == "cpu" != device.type:
            signature.append((Tensor, leaf.dtype))
            hosts.append(float(leaf.item()))
        elif isinstance(leaf, Tensor):
            signature.append((leaf.data_ptr(), leaf.dtype, leaf.device))
        elif type(leaf) is float or type(leaf) is int:
            signature.append(type(leaf))
            numbers.append(leaf)
        else:
            signature.append(leaf)
    return (spec, *signature), numbers, hosts
