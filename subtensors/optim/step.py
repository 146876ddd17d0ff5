"""Optimizer steps: an eager update, one of several accumulated passes, or the replay of a CUDA graph."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast, overload

import torch

from subtensors.dispatch.fused.tensor_columns import TensorColumn
from subtensors.dispatch.graphs.dynamic_scalars import current_scalars
from subtensors.dispatch.graphs.fused_graph import current_recording
from subtensors.dispatch.ops.errors import RuleError
from subtensors.kernels.fused.launch import Prelude
from subtensors.optim.batches import Batch
from subtensors.optim.capture import Capture
from subtensors.optim.dtensor import is_sharded
from subtensors.optim.ema import in_place_of
from subtensors.optim.flat_buffers import PackedMemory
from subtensors.optim.state import AVERAGE
from subtensors.optim.state_dict import SavedState
from subtensors.optim.step_hooks import with_hooks
from subtensors.optim.versioned_state import States

if TYPE_CHECKING:
    from subtensors.optim.optimizer import Optimizer


class Stepping(SavedState):
    """The part of an optimizer that takes steps."""

    _passes = 0
    """Calls of `step` so far: backward passes whose gradients were added up."""

    @abstractmethod
    def _gradients(self) -> list[TensorColumn]:
        """Each group's gradients, None for a parameter without one."""

    @abstractmethod
    def _batches(self, index: int, group: dict[str, Any], grads: TensorColumn) -> list[Batch]:
        """The group's batches for this set of gradients; state that a parameter lacks is made."""

    @property
    @abstractmethod
    def _is_fused(self) -> bool:
        """Return whether the update of a batch is one fused call."""

    @abstractmethod
    def _update_batch(self, group: dict[str, Any], batch: Batch, grads: TensorColumn, prelude: Prelude | None) -> None:
        """Update the parameters of a batch, after or with the prelude."""

    @abstractmethod
    def _forget(self) -> None:
        """Drop the batches of all groups; traced and compiled functions stay."""

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @with_hooks
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient.

        Args:
            closure: evaluates the model again and returns the loss.

        Returns:
            What the closure returned.

        Raises:
            RuntimeError: a gradient is sparse.
        """
        if (
            closure is None
            and self._capture is not None
            and type(self.state) is States
            and self.param_groups[0].get("accumulate", 1) == 1
            and self._capture.take_glance(cast("Optimizer", self))
        ):
            self._passes += 1
            return None
        return self._take_step(closure)

    @torch.no_grad()
    def _take_step(self, closure: Callable[[], float] | None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._passes += 1
        if (passes := self.param_groups[0].get("accumulate", 1)) > 1 and getattr(self, "found_inf", None) is not None:
            raise RuntimeError(
                f"accumulate={passes} adds up gradients of several loss scales, as a GradScaler may change its scale "
                "after each pass: leave it at 1, divide the loss, and call scaler.step(opt) after the last pass"
            )
        if self._is_accumulating():
            return loss
        if type(self.state) is not States:
            self.state = States(dict, self.state)
        if self._capture is None or not self._capture.take_step(cast("Optimizer", self)):
            self._update_all()
        return loss

    def _update_all(self) -> None:
        """Update every parameter that has a gradient, now or in the graph that is being recorded."""
        recording = current_recording()
        groups = list(zip(self.param_groups, self._gradients(), strict=True))
        batches = [self._batches(index, group, grads) for index, (group, grads) in enumerate(groups)]
        prelude = None
        if any(group.get("max_norm") is not None for group in self.param_groups):
            if recording is not None:
                recording.source = None
            pairs = zip(batches, groups, strict=True)
            gradients = [(batch, batch.gradients(grads)) for own, (_, grads) in pairs for batch in own]
            prelude = self._norm.take(gradients, self._is_fused)
        scalars = current_scalars()
        for index, (group, grads) in enumerate(groups):
            if recording is not None:
                recording.source = index
            if scalars is not None:
                scalars.source = id(self), index
            for batch in batches[index]:
                self._update_batch(group, batch, grads, prelude)
                prelude = None
        if scalars is not None:
            scalars.source = None

    def _is_accumulating(self) -> bool:
        """Return whether the current gradients are left for a later call of `step` to update with."""
        passes: int = self.param_groups[0].get("accumulate", 1)
        return self._passes % passes != 0

    def capture(self, *, packed: bool = False, check: bool | None = None) -> Capture:
        """Take steps by replaying a CUDA graph, captured in the next step and recaptured when a step no longer matches.

        Numbers of the parameter groups may change between replays, and so may the addresses of gradients. A step that
        can't be replayed runs eagerly: on a CPU, and inside a graph that the caller captures. `st.explain(opt)` tells
        what happened and why.

        Args:
            packed: move the parameters into one flat tensor a device and dtype, and give each a gradient in another, to
                which backward passes add. Then one fast check covers all addresses, whatever the number of parameters.
                `zero_grad` writes zeros, whatever its argument, so every parameter is updated.
            check: check, at every replay, each address that it uses; None: if `SUBTENSORS_CHECK_REPLAYS` is set.

        Returns:
            The captured steps, with their counts; none at first.

        Raises:
            RuleError: a parameter is a DTensor.

        Example:
            >>> import subtensors as st
            >>> w = torch.nn.Parameter(torch.ones(2))
            >>> opt = st.optim.SGD([w], lr=0.5)
            >>> capture = opt.capture()
            >>> w.grad = torch.ones(2)
            >>> opt.step()
            >>> print(st.explain(opt))
            SGD of 1 parameters, captured: 0 recordings, 0 replays, 1 eager steps
              ran eagerly: the parameters are on the CPU, where a step has no graph (1)
        """
        if check is None:
            check = bool(os.environ.get("SUBTENSORS_CHECK_REPLAYS"))
        params = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        if any(map(is_sharded, params)):
            raise RuleError(
                "capture() takes parameters that are whole, and one is a DTensor, of which a part is here: leave out "
                "capture() and graph=True; an eager step is one fused call over those parts"
            )
        self._forget()  # packing asks that nobody else holds a parameter
        self._capture = Capture(check, PackedMemory(params) if packed and params else None)
        return self._capture

    @property
    def replays(self) -> int | None:
        """The number of steps replayed since `capture()`; None if it was not called."""
        return None if self._capture is None else self._capture.replays

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, unless they are still being accumulated for an update; packed ones become zero.

        Args:
            set_to_none: drop them rather than write zeros.
        """
        if self._is_accumulating():
            return
        packed = None if self._capture is None else self._capture.packed
        if packed is None:
            super().zero_grad(set_to_none)
            return
        packed.zero_gradients()
        for p in packed.others(p for group in self.param_groups for p in group["params"]):
            if p.grad is not None and not set_to_none:
                p.grad.detach_().zero_()
            else:
                p.grad = None

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """A context in which the parameters hold their averages (`ema=`), to evaluate or save; take no step in it.

        Raises:
            ValueError: no parameter has an average.

        Example:
            >>> import subtensors as st
            >>> w = torch.nn.Parameter(torch.zeros(1))
            >>> opt = st.optim.SGD([w], lr=1.0, ema=0.75)
            >>> w.grad = -torch.ones(1)
            >>> opt.step()
            >>> with opt.averaged_weights():
            ...     print(w.item())
            0.25
            >>> w.item()
            1.0
        """
        averages = {p: state[AVERAGE] for p, state in self.state.items() if AVERAGE in state}
        if not averages:
            raise ValueError("no parameter has an average: make the optimizer with ema=0.999, say, and take a step")
        with in_place_of(list(averages), list(averages.values())):
            yield

    def explain(self) -> str:
        """Describe how steps run, in a few lines; `st.explain(opt)` returns the same."""
        count = sum(len(group["params"]) for group in self.param_groups)
        how = "steps run eagerly" if self._capture is None else self._capture.explain()
        return f"{type(self).__name__} of {count} parameters, {how}"
