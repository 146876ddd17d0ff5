"""`callback`: chunked losses, compilation and buckets for a causal language model inside a LightningModule."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Protocol, cast

from torch import nn
from torch.optim import Optimizer as TorchOptimizer

from subtensors.integrations.transformers import CompileOption, LossOption, apply
from subtensors.integrations.undo import keep
from subtensors.optim.optimizer import Optimizer
from subtensors.sizes.dims import Dim


class _LightningTrainer(Protocol):
    """The attributes of a `lightning.Trainer` that are read and set."""

    optimizers: list[TorchOptimizer]
    gradient_clip_val: float | None
    gradient_clip_algorithm: object


class LightningHooks:
    """The hooks of the callback.

    Args:
        options: of `apply`.
    """

    def __init__(self, options: Mapping[str, object]) -> None:
        self.options = options
        self.undo = ExitStack()
        self.is_applied = False

    def setup(self, trainer: _LightningTrainer, pl_module: nn.Module, stage: str) -> None:
        """Apply the options once the module has made its model, before a strategy wraps it."""
        if self.is_applied:
            return
        self.is_applied = True
        restored = ExitStack()

        def configure_model() -> None:
            restored.close()
            cast("Callable[[], None]", pl_module.configure_model)()
            models = (m for m in pl_module.modules() if getattr(m, "get_output_embeddings", lambda: None)() is not None)
            model = next(models, None)
            if model is None:
                raise TypeError(f"{type(pl_module).__name__} holds no causal language model of transformers")
            self.undo.callback(apply(model, **self.options).revert)  # type: ignore[call-overload]  # checked by it

        keep(pl_module, "configure_model", restored)
        self.undo.callback(restored.close)
        vars(pl_module)["configure_model"] = configure_model

    def on_train_start(self, trainer: _LightningTrainer, pl_module: nn.Module) -> None:
        """Make `gradient_clip_val` the optimizers' `max_norm`, so that gradients are clipped once, inside the step."""
        is_norm = str(getattr(trainer.gradient_clip_algorithm, "value", "norm")) == "norm"
        hook = getattr(type(pl_module), "configure_gradient_clipping", None)  # a module's own clips as it says
        is_theirs = getattr(hook, "__qualname__", "").startswith("LightningModule.")
        if not trainer.gradient_clip_val or not is_norm or not is_theirs:
            return
        if not all(isinstance(optimizer, Optimizer) for optimizer in trainer.optimizers):
            return
        for group in (group for optimizer in trainer.optimizers for group in optimizer.param_groups):
            group["max_norm"] = trainer.gradient_clip_val
        keep(trainer, "gradient_clip_val", self.undo)
        trainer.gradient_clip_val = None

    def teardown(self, trainer: _LightningTrainer, pl_module: nn.Module, stage: str) -> None:
        """Take all changes back."""
        self.undo.close()
        self.is_applied = False

    def on_exception(self, trainer: _LightningTrainer, pl_module: nn.Module, exception: BaseException) -> None:
        """Take all changes back."""
        self.teardown(trainer, pl_module, "")


def callback(
    *,
    loss: LossOption = "chunked",
    compile: CompileOption = False,
    buckets: Dim | None = None,
) -> LightningHooks:
    """Return a callback of Lightning that applies `st.integrations.transformers.apply` while a trainer runs.

    The model is the LightningModule's, or the first of its modules that is a causal language model. Where
    `configure_optimizers` returns optimizers of `st.optim`, `gradient_clip_val` becomes their `max_norm`.

    Args:
        loss, compile, buckets: see `st.integrations.transformers.apply`.

    Returns:
        a `lightning.pytorch.Callback`; when the trainer is done, its changes are taken back.

    Raises:
        ModuleNotFoundError: neither lightning nor pytorch_lightning is installed.

    Example:
        >>> import subtensors as st
        >>> try:
        ...     callbacks = [st.integrations.lightning.callback(loss={"memory_limit": "1GiB"})]
        ... except ModuleNotFoundError:
        ...     callbacks = []
    """
    try:
        base: object = importlib.import_module("lightning.pytorch").Callback
    except ModuleNotFoundError:
        base = importlib.import_module("pytorch_lightning").Callback
    kind = type("SubtensorsCallback", (LightningHooks, cast(type, base)), {})
    return cast(LightningHooks, kind({"loss": loss, "compile": compile, "buckets": buckets}))
