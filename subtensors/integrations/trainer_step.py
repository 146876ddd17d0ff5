"""A `transformers.Trainer`'s training step as one bucketed program: loss, backward and the optimizer's step.

    Trainer's loop    training_step -> clip_grad_norm_ -> optimizer.step -> lr_scheduler.step -> zero_grad
    here              one replay       the norm of it     nothing: there     as before           nothing
                                                          are no gradients

The loss is what the trainer's own `compute_loss` gives. The loop is the trainer's, so that its callbacks, schedules,
logs and checkpoints are what they were.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from subtensors.bucketed.bucketed import bucketed
from subtensors.bucketed.runner import Bucketed
from subtensors.integrations.undo import keep
from subtensors.lists.norms import total_norm
from subtensors.optim.algorithms.matrix_optimizer import MatrixOptimizer
from subtensors.optim.optimizer import Optimizer
from subtensors.sizes.dims import Dim

_log = logging.getLogger("subtensors.integrations")

Inputs = Mapping[str, object]


class Accelerator(Protocol):
    """The attributes of accelerate's that are read and set."""

    distributed_type: object
    scaler: object
    sync_gradients: bool
    clip_grad_norm_: Callable[..., Tensor]
    unscale_gradients: Callable[[], None]


class Arguments(Protocol):
    """The attributes of `TrainingArguments` that are read and set."""

    learning_rate: float
    adam_beta1: float
    adam_beta2: float
    adam_epsilon: float
    max_grad_norm: float
    torch_empty_cache_steps: int | None


class _Callbacks(Protocol):
    callbacks: list[object]


class Trainer(Protocol):
    """The attributes of a `Trainer` that are read and set."""

    model: nn.Module
    args: Arguments
    optimizer: torch.optim.Optimizer | None
    optimizer_cls_and_kwargs: tuple[Callable[..., Optimizer], dict[str, object]] | None
    accelerator: Accelerator
    callback_handler: _Callbacks
    current_gradient_accumulation_steps: int
    training_step: Callable[..., Tensor]
    compute_loss: Callable[..., object]


class Clipping:
    """A `clip_grad_norm_` that leaves gradients as they are: the norm it is asked for is `max_norm` of the step.

    Args:
        trainer: who asks.
        is_in_step: whether an optimizer of `st.optim` is to clip; else the accelerator does.
        options: of the optimizer, whose `max_norm` goes before the trainer's.
    """

    def __init__(self, trainer: Trainer, is_in_step: bool, options: Mapping[str, object]) -> None:
        self.trainer, self.is_in_step, self.options = trainer, is_in_step, options
        self.norm: Tensor | None = None
        """That of gradients which a step has taken already."""

    def install(self, undo: ExitStack) -> None:
        """Put it in the place of the accelerator's own."""
        accelerator = self.trainer.accelerator
        self.plain = accelerator.clip_grad_norm_
        keep(accelerator, "clip_grad_norm_", undo)
        accelerator.clip_grad_norm_ = self
        undo.callback(self._limit, None)

    def optimizer(self) -> Optimizer | None:
        """Return the optimizer of `st.optim` that the trainer has."""
        found = getattr(self.trainer.optimizer, "optimizer", self.trainer.optimizer)
        return found if isinstance(found, Optimizer) else None

    def is_watched(self) -> bool:
        """Return whether a callback looks at gradients that the trainer clipped."""
        names = "on_pre_optimizer_step", "on_optimizer_step"
        hooks = [getattr(callback, name) for callback in self.trainer.callback_handler.callbacks for name in names]
        return any(hook.__module__ != "transformers.trainer_callback" for hook in hooks)

    def tell(self, max_norm: float) -> bool:
        """Make what the trainer asks for the optimizer's, if it is the one that clips."""
        is_told = self.is_in_step and self.optimizer() is not None and not self.is_watched()
        asked = self.options.get("max_norm", max_norm if 0 < max_norm < float("inf") else None)
        self._limit(asked if is_told else None)
        return is_told

    def _limit(self, max_norm: object) -> None:
        optimizer = self.optimizer() if self.is_in_step else None
        for group in () if optimizer is None else optimizer.param_groups:
            group["max_norm"] = max_norm

    def __call__(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2) -> Tensor:
        """Return the norm of the gradients."""
        if self.norm is not None:
            return self.norm
        if not self.tell(max_norm):
            return self.plain(parameters, self.options.get("max_norm") or max_norm, norm_type)
        accelerator = self.trainer.accelerator
        if norm_type != 2 or str(accelerator.distributed_type) not in _PLAIN:
            return self.plain(parameters, float("inf"), norm_type)
        accelerator.unscale_gradients()
        return total_norm([p.grad for p in parameters if p.grad is not None])


_PLAIN = ("DistributedType.NO", "DistributedType.MULTI_GPU", "DistributedType.MULTI_CPU")
"""The kinds of runs whose gradients are whole on each process, and whose accelerator does no more than to clip."""


class BucketedStep:
    """A trainer's `training_step` that takes the whole step, in the bucket of the batch's length.

    With gradient accumulation each batch is a replay, and the last one's takes the step. Gradients then add up in
    memory of their own, which stays.

    Args:
        trainer: whose step it is.
        length: the dim of the sequence.
        is_compiled: whether the layers are compiled.
        clipping: what the trainer asks for the norm, which is that of the step.
    """

    def __init__(self, trainer: Trainer, length: Dim, is_compiled: bool, clipping: Clipping) -> None:
        self.trainer, self.length, self.is_compiled, self.clipping = trainer, length, is_compiled, clipping
        self.plain = trainer.training_step
        self.run: Bucketed[..., tuple[Tensor, Tensor | None]] | None = None
        self.optimizer: Optimizer | None = None
        self.sums: dict[Tensor, Tensor] = {}
        self.said = ""

    def install(self, undo: ExitStack) -> None:
        """Put it in the place of the trainer's own."""
        keep(self.trainer, "training_step", undo)
        self.trainer.training_step = self
        undo.callback(self.release)

    def release(self) -> None:
        """Give the memory of graphs and gradients back."""
        if self.run is not None:
            self.run.release()
        self.run, self.optimizer, self.sums, self.clipping.norm = None, None, {}, None

    def reason(self, optimizer: Optimizer | None, tokens: object) -> str:
        """Return why the trainer's own step is taken; empty if the whole step is."""
        trainer, args, accelerator = self.trainer, self.trainer.args, self.trainer.accelerator
        kind = type(trainer)
        base = next((cls for cls in kind.__mro__ if cls.__module__ == "transformers.trainer"), object)
        methods = {"training_step": self.plain, **{name: getattr(trainer, name, None) for name in _IN_A_STEP}}
        own = [name for name, f in methods.items() if getattr(f, "__func__", None) is not vars(base).get(name)]
        if own:
            return f"{kind.__name__} has a {' and a '.join(own)} of its own"
        reasons = {
            "the layers are compiled, at lengths of their own": self.is_compiled,
            "the optimizer is none of st.optim": optimizer is None,
            "a graph would hold the learning rate of a matrix optimizer": isinstance(optimizer, MatrixOptimizer),
            "the optimizer accumulates gradients itself": getattr(optimizer, "defaults", {}).get("accumulate", 1) != 1,
            "the trainer clips gradients between backward and step": (
                args.max_grad_norm and not self.clipping.is_in_step
            ),
            "processes exchange gradients": str(accelerator.distributed_type) != "DistributedType.NO",
            "a GradScaler asks the device whether to step": accelerator.scaler is not None,
            "a callback looks at gradients between backward and step": self.clipping.is_watched(),
            "torch_empty_cache_steps frees memory within a step": args.torch_empty_cache_steps is not None,
            "a batch has no input_ids, (batch, length)": not isinstance(tokens, Tensor) or tokens.ndim != 2,
        }
        return next((text for text, holds in reasons.items() if holds), "")

    def __call__(self, model: nn.Module, inputs: Inputs, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """Take a step, or add a batch's gradients to those of the step, and return the loss."""
        trainer, clipping, optimizer = self.trainer, self.clipping, self.clipping.optimizer()
        ids = cast(Tensor, inputs.get("input_ids") if isinstance(inputs, Mapping) else None)  # GRPO has lists
        clipping.norm = None
        if (reason := self.reason(optimizer, ids)) or optimizer is None:
            if reason != self.said:
                _log.warning("buckets= are for evaluation alone: %s", reason)
                self.said = reason
            return self.plain(model, inputs, num_items_in_batch)
        if self.run is None or optimizer is not self.optimizer:
            self.release()
            self.run = bucketed(_program(self.plain, model, optimizer), {"tokens": {1: self.length}})
            self.optimizer = optimizer
        passes, is_last = trainer.current_gradient_accumulation_steps, trainer.accelerator.sync_gradients
        clipping.tell(trainer.args.max_grad_norm)
        if passes > 1:
            self._accumulate(model)
        for part in (model, optimizer):  # before the program does: its state is watched
            if callable(train := getattr(part, "train", None)):
                train()
        tokens = {name: x for name, x in inputs.items() if isinstance(x, Tensor) and x.shape[1:2] == ids.shape[1:]}
        rest = {name: x for name, x in inputs.items() if name not in tokens}
        loss, clipping.norm = self.run(tokens, rest, num_items_in_batch, passes, is_last)
        if passes > 1 and is_last:
            model.zero_grad()
        return loss

    def _accumulate(self, model: nn.Module) -> None:
        """Give parameters that have no gradients zeros to add to, the same memory each time."""
        empty = [p for p in model.parameters() if p.requires_grad and p.grad is None]
        self.sums.update({p: torch.zeros_like(p) for p in empty if p not in self.sums})
        if empty:
            torch._foreach_zero_([self.sums[p] for p in empty])
        for p in empty:
            p.grad = self.sums[p]


_IN_A_STEP = ("compute_loss", "compute_loss_context_manager", "_prepare_inputs", "_prepare_input")
"""The trainer's methods that are called in a step, and not in a replay."""


def _program(
    plain: Callable[..., Tensor], model: nn.Module, optimizer: Optimizer
) -> Callable[[Inputs, Inputs, Tensor | int | None, int, bool], tuple[Tensor, Tensor | None]]:
    """Return the program of a step, of a batch to its loss and, where it is the step's last, the gradients' norm."""
    backward = weakref.WeakMethod(plain)  # what the trainer's loop counts is not watched as the program's state

    def training_step(
        tokens: Inputs, rest: Inputs, num_items_in_batch: Tensor | int | None, passes: int, is_last: bool
    ) -> tuple[Tensor, Tensor | None]:
        loss = cast("Callable[..., Tensor]", backward())(model, {**tokens, **rest}, num_items_in_batch)
        if not is_last:
            return loss, None
        norm = total_norm([p.grad for p in model.parameters() if p.grad is not None])
        optimizer.step()
        if passes == 1:
            optimizer.zero_grad()
        return loss, norm

    return training_step
