"""`loss` and `optimizer`: configurations of torchtitan that build a chunked loss and optimizers of `st.optim`."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import field, make_dataclass
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from subtensors.chunked.chunked_tensor import chunk
from subtensors.integrations.transformers import OPTIMIZERS
from subtensors.optim.optimizer import Optimizer

Losses = tuple[Tensor, dict[str, Tensor]]


class _TitanLossConfig(Protocol):
    """The fields of the loss's configuration."""

    loss_fn: _Buildable
    division: Mapping[str, object]


class _Buildable(Protocol):
    def build(self, *, compile_config: None) -> Callable[..., Losses]: ...


class ChunkedLoss:
    """The methods of a loss that runs head and loss chunk by chunk, from hidden states.

    Args:
        config: what `loss` returned.
        compile_config: not used: what is compiled can't be chunked.
    """

    def __init__(self, config: _TitanLossConfig, *, compile_config: object = None) -> None:
        self.loss_fn = config.loss_fn.build(compile_config=None)
        self.division = config.division
        self.lm_head: nn.Module | None = None  # set by the trainer

    def __call__(
        self, pred: Tensor, labels: Tensor, global_valid_tokens: Tensor | None = None, **inputs: object
    ) -> Losses:
        """Return the loss and its metrics.

        Args:
            pred: hidden states, (batch, length, width).
            labels: (batch, length) int64.
            global_valid_tokens: what the sum is divided by.
            inputs: others of the loss.
        """
        if self.lm_head is None:
            raise ValueError("set_lm_head comes before the first loss")
        logits = self.lm_head(chunk(pred, dim=1, **self.division))  # type: ignore[arg-type]  # checked by `loss`
        return self.loss_fn(logits, labels, global_valid_tokens, **inputs)


class OptimizerFactories:
    """The methods of a container that makes optimizers of `st.optim`."""

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> type[Optimizer]:
        if name not in OPTIMIZERS:
            raise ValueError(f"optimizer_name is one of {', '.join(OPTIMIZERS)}; got {name!r}")
        return OPTIMIZERS[name]

    @staticmethod
    def _build_impl_kwargs(config: object) -> dict[str, object]:
        return {}  # there is one implementation


def _configuration(module: str, base: str, methods: type, fields: Mapping[str, object]) -> Callable[..., object]:
    """Return the configuration of a subclass of torchtitan's that has other methods."""
    theirs = getattr(importlib.import_module(f"torchtitan.components.{module}"), base)
    made = [(name, object, field(default=value)) for name, value in fields.items()]
    config = make_dataclass("Config", made, bases=(theirs.Config,), kw_only=True, slots=True)
    config.__module__ = __name__
    owner = type(methods.__name__, (methods, theirs), {"Config": config})
    return cast("Callable[..., object]", vars(owner)["Config"])


@functools.cache
def _loss_configuration() -> Callable[..., object]:
    return _configuration("loss", "ChunkedLossWrapper", ChunkedLoss, {"division": None})


@functools.cache
def _optimizer_configuration() -> Callable[..., object]:
    return _configuration("optimizer", "OptimizersContainer", OptimizerFactories, {})


def loss(loss_fn: object = None, **division: object) -> object:
    """Return the configuration of a loss that takes its logits in parts.

    Args:
        loss_fn: configuration of the loss of logits and labels; None for torchtitan's `CrossEntropyLoss.Config()`.
        division: the arguments of `st.chunk`, such as `memory_limit="1GiB"`.

    Returns:
        a `ChunkedLossWrapper.Config` of torchtitan.

    Raises:
        ModuleNotFoundError: torchtitan is not installed.
        TypeError, ValueError: see `st.chunk`.

    Example:
        >>> loss(row=1)
        Traceback (most recent call last):
        ...
        TypeError: ... unexpected keyword argument 'row'
    """
    chunk(torch.zeros(1), **division)  # type: ignore[arg-type]  # refuses wrong ones
    given = {} if loss_fn is None else {"loss_fn": loss_fn}
    return _loss_configuration()(division=division, **given)


def optimizer(name: str = "adamw", *, param_groups: object = None, **options: object) -> object:
    """Return the configuration of torchtitan's container, with optimizers of `st.optim` in it.

    Args:
        name: of `st.optim`, in lower case, for all parameters.
        param_groups: `ParamGroupConfig`s of torchtitan instead, whose `optimizer_name` is such a name.
        options: of the optimizer, such as `lr=1e-4` and `max_norm=1.0`.

    Returns:
        an `OptimizersContainer.Config` of torchtitan.

    Raises:
        ModuleNotFoundError: torchtitan is not installed.
        TypeError: both a list of groups and options.
        ValueError: an unknown name.

    Example:
        >>> optimizer("adamx")
        Traceback (most recent call last):
        ...
        ValueError: optimizer_name is one of ...; got 'adamx'
    """
    if param_groups is None:
        OptimizerFactories._resolve_optimizer_factory(name)
        group = importlib.import_module("torchtitan.components.optimizer").ParamGroupConfig
        param_groups = [group(pattern=".*", optimizer_name=name, optimizer_kwargs=options)]
    elif options:
        raise TypeError(f"options of a list of groups are in its optimizer_kwargs; got {', '.join(options)}")
    return _optimizer_configuration()(param_groups=param_groups)
