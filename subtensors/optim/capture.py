"""`opt.capture()`: replay a captured step as one CUDA graph, as long as a step still matches the captured one."""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING

import torch

from subtensors.dispatch.ops.errors import AddressError
from subtensors.optim.captured_step import HELD_GRADIENT, HELD_NUMBER, RecordedStep
from subtensors.optim.flat_buffers import PackedMemory

if TYPE_CHECKING:
    from subtensors.optim.optimizer import Optimizer

FUTILE_REASON = (
    "each step brings other numbers or gradients than its graph holds: keep gradients in their place, as packed does, "
    "and give a number that changes as a tensor on the device"
)

logger = logging.getLogger("subtensors.optim")


class Capture:
    """The recorded steps of one optimizer, and how often and why they were recorded.

    Args:
        check: check, at every replay, each address that it uses.
        packed: the memory of parameters and gradients, where they are packed.
    """

    # Which parameters have a gradient may alternate, as with layers that are dropped in turn.
    KEPT = 8

    # After this many recordings in a row that served one step each, the next would serve one step too.
    FUTILE = 3

    def __init__(self, check: bool, packed: PackedMemory | None = None) -> None:
        self.check, self.packed = check, packed
        self._futile = 0
        self._is_fresh = False
        """True if the last step's recording has served no other step so far."""
        self._last: RecordedStep | None = None
        self._is_packed = False
        """True if the last full check found the step's tensors in their packed places."""
        self.replays = self.recordings = self.eager_steps = 0
        self.looks = 0
        """The number of steps that checked every address, because a fast check of packed memory was not enough."""
        self.reasons: Counter[str] = Counter()
        """The reasons for which steps were recaptured, with their counts."""
        self.obstacles: Counter[str] = Counter()
        """The reasons for which steps ran eagerly, with their counts."""
        self._steps: list[RecordedStep] = []

    def take_step(self, optimizer: Optimizer) -> bool:
        """Replay the step, recording it first if need be.

        Args:
            optimizer: whose step.

        Returns:
            False where nothing was done, and the step is to be taken eagerly.
        """
        obstacle = _obstacle()
        if not obstacle:
            step = (None if self.check else self._at_a_glance(optimizer)) or self._look(optimizer)
            obstacle = step.obstacle
        if obstacle:
            if obstacle not in self.obstacles:
                logger.info("%s: a step runs eagerly: %s", type(optimizer).__name__, obstacle)
            self.obstacles[obstacle] += 1
            self.eager_steps += 1
            return False
        if self.check:
            step.check()
        self._replay(optimizer, step)
        if self.check and step.recording is not None and not step.recording.matches_device():
            raise AddressError("the numbers or addresses that a replay read on the device are not the ones given to it")
        return True

    def take_glance(self, optimizer: Optimizer) -> bool:
        """Replay the step if a fast check of packed memory suffices, as for most steps; otherwise return False."""
        if self.packed is None or self.check or _obstacle():
            return False
        step = self._at_a_glance(optimizer)
        if step is None or step.recording is None:
            return False
        self._replay(optimizer, step)
        return True

    def _replay(self, optimizer: Optimizer, step: RecordedStep) -> None:
        step.replay(optimizer)
        self._is_fresh = step is not self._last
        self._last = step
        # A graph tells autograd of nothing that it writes.
        if self._is_packed and self.packed is not None:
            self.packed.tell_autograd()
        elif step.recording is not None:
            torch.autograd.graph.increment_version(step.recording.written)
        self.replays += 1

    def _at_a_glance(self, optimizer: Optimizer) -> RecordedStep | None:
        """The last step, if a fast check of packed memory shows that it still matches; None if a full check is due."""
        if self.packed is None or not self._is_packed or not self.packed.is_intact():
            return None
        return None if self._steps[0].glance(optimizer) else self._steps[0]

    def _look(self, optimizer: Optimizer) -> RecordedStep:
        """Find or record the step after a check of every address."""
        if self.packed is None:
            return self._step(optimizer)
        self._is_packed = False
        self.packed.check()
        self.packed.unwatch_gradients()
        step = self._step(optimizer)
        # A parameter that has no gradient may be given one: no fast check would show it.
        self._is_packed = not any(lists.missing for lists in step.lists) and (
            step.gradient_places.addresses == self.packed.gradient_addresses
        )
        self.looks += 1
        if self._is_packed:
            self.packed.take_note()
        return step

    def _step(self, optimizer: Optimizer) -> RecordedStep:
        gradients = optimizer._gradients()
        try:
            reason = ""
            for position, step in enumerate(self._steps):
                difference = step.difference(optimizer, gradients)
                if not difference:
                    if position:
                        self._steps.insert(0, self._steps.pop(position))
                    return step
                reason = reason or difference
            self._futile = self._futile + 1 if reason in (HELD_NUMBER, HELD_GRADIENT) and self._is_fresh else 0
            step = RecordedStep(optimizer, gradients, FUTILE_REASON if self._futile >= self.FUTILE else "")
            self._is_fresh = True
        except RuntimeError:
            for own in gradients:
                optimizer._refuse_sparse(own)
            raise
        if reason:
            if reason not in self.reasons:
                logger.info("%s: a step is recorded again: %s", type(optimizer).__name__, reason)
            self.reasons[reason] += 1
        self.recordings += step.recording is not None
        # A step for a state that is gone is never the right one again.
        self._steps = [step, *[s for s in self._steps if s.mark is step.mark][: self.KEPT - 1]]
        return step

    def stats(self) -> dict[str, int]:
        """The numbers of steps recorded, replayed and run eagerly."""
        return {"recordings": self.recordings, "replays": self.replays, "eager_steps": self.eager_steps}

    def explain(self) -> str:
        """Describe what a step replays, and the reasons for recaptures and eager steps, in a few lines."""
        lines = [f"captured: {self.recordings} recordings, {self.replays} replays, {self.eager_steps} eager steps"]
        if self._steps and (recording := self._steps[0].recording) is not None:
            launches = len(recording.launches)
            lines.append(f"  a step replays {launches} launches over {len(self._steps[0].params)} tensors")
        if self.packed is not None:
            lines.append(f"  {self.packed.describe()}; {self.looks} steps looked at each of them")
        lines += [f"  recorded again: {reason} ({count})" for reason, count in self.reasons.items()]
        lines += [f"  ran eagerly: {obstacle} ({count})" for obstacle, count in self.obstacles.items()]
        return "\n".join(lines)


def _obstacle() -> str:
    """The reason why no step can be replayed now; empty if one can."""
    if torch.compiler.is_compiling():
        return "the step is being compiled"
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return "the step is part of a graph that is being captured"
    return ""
