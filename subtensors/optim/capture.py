"""`opt.capture()`: replay a captured step as one CUDA graph, as long as a step still matches the captured one."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Sequence
from html import escape

import torch
from torch import Tensor

from subtensors.counts import counted
from subtensors.dispatch.fused.bound_call import interprets_kernels
from subtensors.dispatch.graphs.guards import why_not_replayable
from subtensors.dispatch.ops.errors import AddressError, RuleError
from subtensors.optim.captured_step import CONSTANT_GRADIENT, CONSTANT_NUMBER, CapturedStep
from subtensors.optim.dtensor import is_sharded
from subtensors.optim.flat_buffers import CHECK_EACH_LIMIT, FlatBuffers
from subtensors.optim.step import UpdatedOptimizer

WASTED_REASON = (
    "each step has other numbers or gradients than its graph holds: keep gradients in their place, as packed does, "
    "and give a number that changes as a tensor on the device"
)

logger = logging.getLogger("subtensors.optim")


class Capture:
    """The captured steps of one optimizer, with the number of captures and the reasons for them.

    Args:
        check: check, at every replay, each address that it uses; None: if `SUBTENSORS_CHECK_REPLAYS` is set.
        params: the parameters that require gradients.
        packed: whether to pack them.

    Raises:
        RuleError: a parameter is a DTensor.
    """

    MAX_RECORDINGS = 8
    """The most captured steps that are kept: which parameters have a gradient may alternate, as with layer drop."""

    MAX_WASTED_RECORDINGS = 3
    """After this many recordings in a row that served one step each, the next would serve one step too."""

    def __init__(self, check: bool | None, params: Sequence[Tensor] = (), packed: bool = False) -> None:
        if any(map(is_sharded, params)):
            raise RuleError(
                "capture() takes full parameters, and one is a DTensor, of which a shard is here: leave out capture() "
                "and graph=True; an eager step is one fused call over the shards"
            )
        self.check = bool(os.environ.get("SUBTENSORS_CHECK_REPLAYS")) if check is None else check
        self._is_on_cpu = bool(params) and all(p.device.type == "cpu" for p in params)
        self.packed = FlatBuffers(params) if packed and params else None
        """The memory of parameters and gradients, if they are packed."""
        self._wasted = 0
        """The number of recordings in a row that served one step each."""
        self._is_fresh = False
        """True if the last step's recording has served no other step so far."""
        self._last: CapturedStep | None = None
        self._is_packed = False
        """True if the last full check found the step's tensors in their packed places."""
        self.replays = self.recordings = self.eager_steps = 0
        self.full_checks = 0
        """The number of steps that checked every address, because a fast check of packed memory was not enough."""
        self.reasons: Counter[str] = Counter()
        """The reasons for which steps were recaptured, with their counts."""
        self.eager_reasons: Counter[str] = Counter()
        """The reasons for which steps ran eagerly, with their counts."""
        self._steps: list[CapturedStep] = []

    def take_step(self, optimizer: UpdatedOptimizer) -> bool:
        """Replay the step, after capturing it if need be; return False if nothing was done, and it runs eagerly."""
        reason = why_not_replayable()
        if not reason:
            step = (None if self.check else self._fast_check(optimizer)) or self._full_check(optimizer)
            reason = step.reason
        if reason:
            if reason not in self.eager_reasons:
                logger.info("%s: a step runs eagerly: %s", type(optimizer).__name__, reason)
            self.eager_reasons[reason] += 1
            self.eager_steps += 1
            return False
        if self.check:
            step.check()
        self._replay(optimizer, step)
        if self.check and step.recording is not None and not step.recording.matches_device():
            raise AddressError("the numbers or addresses that a replay read on the device are not the ones given to it")
        return True

    def try_fast_replay(self, optimizer: UpdatedOptimizer) -> bool:
        """Replay the step if a fast check of packed memory suffices, as for most steps; otherwise return False."""
        if self.packed is None or self.check or why_not_replayable():
            return False
        step = self._fast_check(optimizer)
        if step is None or step.recording is None:
            return False
        self._replay(optimizer, step)
        return True

    def _replay(self, optimizer: UpdatedOptimizer, step: CapturedStep) -> None:
        step.replay(optimizer)
        self._is_fresh = step is not self._last
        self._last = step
        # A graph tells autograd of nothing that it writes.
        if self._is_packed and self.packed is not None:
            self.packed.increment_versions()
        elif step.recording is not None:
            torch.autograd.graph.increment_version(step.recording.written)
        self.replays += 1

    def _fast_check(self, optimizer: UpdatedOptimizer) -> CapturedStep | None:
        """The last step, if a fast check of packed memory shows that it still matches; None if a full check is due."""
        if self.packed is None or not self._is_packed or not self.packed.is_intact():
            return None
        return None if self._steps[0].fast_check(optimizer) else self._steps[0]

    def _full_check(self, optimizer: UpdatedOptimizer) -> CapturedStep:
        """Find or capture the step after a check of every address."""
        if self.packed is None:
            return self._matching_step(optimizer)
        self._is_packed = False
        self.packed.check()
        self.packed.unwatch_gradients()
        step = self._matching_step(optimizer)
        # A parameter that has no gradient may be given one: no fast check would show it.
        self._is_packed = not any(group.without_gradient for group in step.groups) and (
            step.gradient_guard.addresses == self.packed.gradient_addresses
        )
        self.full_checks += 1
        if self._is_packed:
            self.packed.remember()
        return step

    def _matching_step(self, optimizer: UpdatedOptimizer) -> CapturedStep:
        """The captured step that matches the current one; captured now if there is none."""
        updater = optimizer._updater
        gradients = updater.gradients(optimizer.param_groups)
        try:
            reason = ""
            for position, step in enumerate(self._steps):
                mismatch = step.full_check(optimizer, gradients)
                if not mismatch:
                    if position:
                        self._steps.insert(0, self._steps.pop(position))
                    return step
                reason = reason or mismatch
            is_wasted = reason in (CONSTANT_NUMBER, CONSTANT_GRADIENT) and self._is_fresh
            self._wasted = self._wasted + 1 if is_wasted else 0
            step = CapturedStep(
                optimizer, gradients, WASTED_REASON if self._wasted >= self.MAX_WASTED_RECORDINGS else ""
            )
            self._is_fresh = True
        except RuntimeError:
            for own in gradients:
                updater.refuse_sparse(own)
            raise
        if reason:
            if reason not in self.reasons:
                logger.info("%s: a step is recaptured: %s", type(optimizer).__name__, reason)
            self.reasons[reason] += 1
        self.recordings += step.recording is not None
        # A step for a state that was replaced never matches again.
        self._steps = [step, *[s for s in self._steps if s.stamp is step.stamp][: self.MAX_RECORDINGS - 1]]
        return step

    def stats(self) -> dict[str, int]:
        """The numbers of steps captured, replayed and run eagerly."""
        return {"recordings": self.recordings, "replays": self.replays, "eager_steps": self.eager_steps}

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.summary()}>"

    def _repr_html_(self) -> str:
        """The same as a notebook shows it, with the reasons as a list."""
        lines = [f"<li>{escape(line.strip())}</li>" for line in self.explain().splitlines()[1:]]
        return f"<p>{escape(repr(self))}</p>" + (f"<ul>{''.join(lines)}</ul>" if lines else "")

    def summary(self) -> str:
        """Return the counts in a line, or that there is no graph on a CPU."""
        eager = counted(self.eager_steps, "eager step")
        if self._is_on_cpu and not interprets_kernels():
            return f"captured: no graph on a CPU, {eager}"
        return f"captured: {counted(self.recordings, 'recording')}, {counted(self.replays, 'replay')}, {eager}"

    def explain(self) -> str:
        """Describe what a step replays, and the reasons for recaptures and eager steps, in a few lines."""
        lines = [self.summary()]
        if self._steps and (recording := self._steps[0].recording) is not None:
            launches = counted(len(recording.launches), "launch")
            count = len(self._steps[0].params)
            lines.append(f"  a step replays {launches} over {counted(count, 'tensor')}")
            if self.packed is None and count > CHECK_EACH_LIMIT:
                lines.append("  each step reads where all of them and their gradients are; packed=True spares it that")
        if self.packed is not None:
            lines.append(f"  {self.packed.describe()}; {counted(self.full_checks, 'step')} checked each of them")
        lines += [f"  recaptured: {reason} ({count})" for reason, count in self.reasons.items()]
        lines += [f"  ran eagerly: {reason} ({count})" for reason, count in self.eager_reasons.items()]
        return "\n".join(lines)
