"""One captured step of an optimizer, and the checks that decide whether a later step can replay it.

A step can be replayed if nothing that its launches depend on has changed: the parameters, which of them have a
gradient, the addresses of parameters and state, and the options that decide the math. Dynamic scalars and the addresses
of gradients may change from step to step, and are handed to the replay.
"""

from __future__ import annotations

from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from subtensors.dispatch.fused.bound_call import interprets_kernels, modes
from subtensors.dispatch.fused.fused_function import FusedFunction
from subtensors.dispatch.fused.tensor_columns import TensorColumn
from subtensors.dispatch.graphs.fused_graph import Launch, Recording
from subtensors.dispatch.graphs.guards import AddressGuard, AddressLayoutGuard, MetadataGuard
from subtensors.dispatch.graphs.protocols import NotRecordable
from subtensors.dispatch.graphs.released_tensors import check_resident
from subtensors.dispatch.ops.errors import AddressError
from subtensors.kernels.runtime.current_device import current_stream
from subtensors.optim.batches import GroupBatches, is_immutable, kept_form, missing
from subtensors.optim.hyperparameters import another, are_numbers, number_at, number_paths, options_of, step_signature

if TYPE_CHECKING:
    from subtensors.optim.optimizer import Optimizer

Gradients = list[TensorColumn]
"""The gradients of each group, in the order of its parameters; None for a parameter without one."""

HELD_NUMBER = "a number changed that the graph of this optimizer holds"
HELD_GRADIENT = "a gradient moved whose address the graph of this optimizer holds"
CPU_REASON = "the parameters are on the CPU, where a step has no graph"


class RecordedStep:
    """A captured step of an optimizer with given gradients, or the reason why it can't be captured.

    Args:
        optimizer: whose step; state that a parameter lacks is made.
        gradients: what the step finds.
        obstacle: why not to record it.

    Raises:
        AddressError: parameters, state or gradients moved while the step was recorded.
    """

    def __init__(self, optimizer: Optimizer, gradients: Gradients, obstacle: str = "") -> None:
        self.recording: Recording | None = None
        self.obstacle = ""
        """The reason why there is no recording, so that such steps run eagerly; empty if there is one."""
        batches = [
            batch
            for index, (group, own) in enumerate(zip(optimizer.param_groups, gradients, strict=True))
            for batch in optimizer._batches(index, group, own)
        ]
        self.batches = batches
        self.lists: list[GroupBatches] = [optimizer._lists[i] for i in range(len(gradients))]
        self.mark = optimizer.state.changes.mark
        self.modes = _modes()
        self.params = [p for batch in batches for p in batch.params]
        self.param_places = AddressLayoutGuard(self.params)
        self.state = [t for batch in batches for column in batch.columns() for t in column]
        self.state_places = AddressGuard(self.state)
        own = _present(gradients)
        self.gradient_places = AddressLayoutGuard(own)
        self.gradients_alike = MetadataGuard(own)
        self.are_plain = all(batch.has_plain_gradients for batch in batches)
        self.scales = tuple(getattr(optimizer, name, None) is not None for name in _SCALES)
        self.options = [options_of(group) for group in optimizer.param_groups]
        self.values: list[list[Any]] = [[] for _ in optimizer.param_groups]
        """The values of each group in the last step, if comparing their identities suffices; else an empty list."""
        devices = {batch.device for batch in batches}
        self.device = min(devices, key=str, default=torch.device("cpu"))
        self.stream = current_stream(self.device)
        self.paths = [number_paths(optimizer, group, self.device) for group in optimizer.param_groups]
        taken = [step_signature(optimizer, group, self.device) for group in optimizer.param_groups]
        self.signatures = [signature for signature, _, _ in taken]
        self.numbers = [numbers for _, numbers, _ in taken]
        self.is_whole = not isinstance(optimizer._fusion, FusedFunction)
        """True if the step is more than fused calls, so that its graph holds fixed whatever else it was given."""
        try:
            if obstacle:
                raise NotRecordable(obstacle)
            self._record(optimizer, own, devices)
        except NotRecordable as reason:
            self.recording, self.obstacle = None, str(reason)

    def _record(self, optimizer: Optimizer, gradients: list[Tensor], devices: set[torch.device]) -> None:
        if not devices:
            raise NotRecordable("no parameter has a gradient")
        if len(devices) > 1:
            raise NotRecordable("the parameters are on several devices")
        if self.device.type != "cuda" and not interprets_kernels():
            raise NotRecordable(CPU_REASON)
        if self.is_whole and not (optimizer.is_replayable and self.device.type == "cuda"):
            raise NotRecordable(f"a step of {type(optimizer).__name__} is more than fused calls")
        if self.is_whole:
            for group in optimizer.param_groups:
                # Numbers are then known by identity, wherever the step hands them on.
                group.update({name: another(value) for name, value in group.items() if name != "params"})
            self.options = [options_of(group) for group in optimizer.param_groups]
        self.recording = Recording(self.device, self.is_whole)
        self._record_update(optimizer, self.recording, gradients)
        moved = self.moved()
        if moved or not self.gradient_places.matches(_present(optimizer._gradients())):
            raise AddressError(f"{moved or 'a gradient'} moved while a step was recorded")
        self.held = [set(range(len(paths))) for paths in self.paths]
        """The positions of each group's numbers that are constants of the graph: a new value needs a recapture."""
        for launch in self.recording.launches:
            if launch.source is not None:  # the norm has none, and takes no numbers
                self._follow_numbers(optimizer, launch)

    def _record_update(self, optimizer: Optimizer, recording: Recording, gradients: list[Tensor]) -> None:
        """Record the update, with scales of gradients that are in memory of the recording's own."""
        self.buffers = {
            name: torch.empty_like(getattr(optimizer, name), device=self.device)
            for name, is_given in zip(_SCALES, self.scales, strict=True)
            if is_given
        }
        given = {name: getattr(optimizer, name) for name in self.buffers}
        try:
            vars(optimizer).update(self.buffers)
            recording.record(optimizer._update_all, gradients)
        except AddressError:
            raise
        except RuntimeError as error:
            if not self.is_whole:
                raise
            # Torch says of any of its functions, only when it meets one, that a graph can't hold it.
            raise NotRecordable(f"torch could not capture it: {str(error).splitlines()[0]}") from error
        finally:
            vars(optimizer).update(given)

    def _follow_numbers(self, optimizer: Optimizer, launch: Launch) -> None:
        """Match the numbers of a launch with the dynamic scalars of its group, which may change between replays."""
        assert isinstance(launch.source, int)
        _, numbers, hosts = step_signature(optimizer, optimizer.param_groups[launch.source], self.device)
        if self.is_whole:
            launch.number_indices = [next((i for i, n in enumerate(numbers) if n is own), -1) for own in launch.numbers]
        else:
            launch.number_indices = [*range(len(numbers))]
            if launch.numbers != numbers:
                raise NotRecordable(f"a number of {type(optimizer).__name__} is not one of its parameter group")
        if launch.hosts not in ([], hosts):
            raise NotRecordable(f"a number on the CPU of {type(optimizer).__name__} is not one of its group")
        self.held[launch.source] -= set(launch.number_indices)

    def moved(self) -> str:
        """The first tensor of the step, gradients apart, whose address changed since capture; empty if none did."""
        if (index := self.param_places.first_changed(self.params)) is not None:
            return f"parameter {index} of the step"
        if not self.param_places.matches(self.params):
            return "the layout of a parameter"
        if (index := self.state_places.first_changed(self.state)) is not None:
            return f"state tensor {index} of the step"
        return ""

    def difference(self, optimizer: Optimizer, gradients: Gradients) -> str:
        """The reason why a step can't replay this recording; empty if it can, and the recording is then ready."""
        if difference := self.glance(optimizer):
            return difference
        if any(missing(own) != lists.missing for own, lists in zip(gradients, self.lists, strict=True)):
            return "other parameters have a gradient"
        if not self.param_places.matches(self.params):
            return "a parameter moved"
        return self._take_gradients(_present(gradients))

    def glance(self, optimizer: Optimizer) -> str:
        """The same as `difference`, for a step whose parameters and gradients are known to be at their addresses."""
        if optimizer.state.changes.mark is not self.mark:
            return "state was added or replaced"
        if len(optimizer.param_groups) != len(self.lists):
            return "a parameter group was added or removed"
        for i, group in enumerate(optimizer.param_groups):
            if not self.lists[i].has_params(group["params"]):
                return f"the parameters of group {i} are others"
            values = self.values[i]
            if len(group) == len(values) and all(map(is_, group.values(), values)):
                continue  # the very objects of the last step: none of them changed
            if difference := self._take_options(optimizer, i, group):
                return difference
        for batch in self.batches:
            if batch.has_moved():
                return "state moved"
        if _modes() != self.modes:
            return "a mode of torch changed"
        if self.stream != current_stream(self.device):
            return "the current stream is another one"
        if self.scales != tuple([getattr(optimizer, name, None) is not None for name in _SCALES]):
            return "a loss scale came or went"
        return ""

    def _take_options(self, optimizer: Optimizer, index: int, group: dict[str, Any]) -> str:
        """Hand the numbers of a group to the recording; return the reason if it can't take them, else ""."""
        lists = self.lists[index]
        if optimizer._kept(group) != lists.entries or kept_form(group) != lists.form:
            return f"group {index} keeps other state"
        options = options_of(group)
        are_immutable = all(map(is_immutable, options))
        if are_immutable and all(map(are_numbers, options, self.options[index])):
            numbers = [number_at(group, path) for path in self.paths[index]]
            hosts: list[float] = []
        else:
            signature, numbers, hosts = step_signature(optimizer, group, self.device)
            if signature != self.signatures[index]:
                return "an option changed that decides the maths"
        if held := self._take(index, numbers, hosts):
            return held
        self.options[index] = options
        self.values[index] = list(group.values()) if are_immutable else []
        return ""

    def _take(self, index: int, numbers: list[float], hosts: list[float]) -> str:
        """Hand one group's numbers to the recording; return the reason if it can't take them, else ""."""
        if self.recording is not None:
            if any(numbers[i] != self.numbers[index][i] for i in self.held[index]):
                return HELD_NUMBER
            self.recording.set_numbers(index, numbers, hosts)
        return ""

    def _take_gradients(self, own: list[Tensor]) -> str:
        """Hand the gradients' addresses to the recording; return the reason if it can't take them, else ""."""
        has_moved = not self.gradient_places.matches(own)
        if (has_moved or not self.are_plain) and not self.gradients_alike.matches(own):
            return "a gradient has another layout or dtype"
        if has_moved and self.is_whole and self.recording is not None:
            return HELD_GRADIENT
        if has_moved:
            places = AddressLayoutGuard(own)
            if self.recording is not None and not self.recording.move(places.addresses):
                return "a gradient shares memory with what the step writes"
            self.gradient_places = places
        return ""

    def replay(self, optimizer: Optimizer) -> None:
        """Replay the step, without telling autograd of the tensors that it wrote, which are `recording.written`."""
        assert self.recording is not None
        check_resident((self.params, self.state))
        for name, buffer in self.buffers.items():
            buffer.copy_(getattr(optimizer, name), non_blocking=True)
        self.recording.replay()

    def check(self) -> None:
        """Check the addresses of everything that the next replay reads and writes, gradients apart.

        Raises:
            AddressError: a tensor's address has changed.
        """
        if moved := self.moved():
            raise AddressError(
                f"{moved} moved since it was recorded, unseen by the step: put new tensors into opt.state[p] rather "
                "than moving those that are there, or call opt.capture() again"
            )


_SCALES = ("grad_scale", "found_inf")


def _modes() -> tuple[Any, ...]:
    """The modes of torch that decide the math; grad mode, which has no effect within a step, is left out."""
    return modes()[1:]


def _present(gradients: Gradients) -> list[Tensor]:
    return [g for own in gradients for g in own if g is not None]
