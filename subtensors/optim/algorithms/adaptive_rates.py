"""Steps divided by running root mean squares of gradients: RMSprop, Adagrad and Adadelta."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor

from subtensors.optim.hyperparameters import Accepted, hyperparameters
from subtensors.optim.optimizer import Optimizer, Params
from subtensors.optim.options import KeywordOptions, OwnOptions
from subtensors.optim.traced_update import add_decay


class RMSprop(Optimizer):
    """Steps divided by a running root mean square; takes and saves what `torch.optim.RMSprop` does.

        g <- g + weight_decay p
        v <- alpha v + (1 - alpha) g^2
        a <- alpha a + (1 - alpha) g                    centered; otherwise a = 0
        d = g / (sqrt(v - a^2) + eps)
        b <- momentum b + d                             with a momentum; otherwise b = d
        p <- p - lr b

    Args:
        alpha: the decay rate of each average.
        momentum: 0 keeps no buffer.
        centered: divide by the standard deviation instead.

    Source: Hinton, "Neural Networks for Machine Learning", lecture 6 (2012); Graves, "Generating Sequences With
    Recurrent Neural Networks" (2013) for centered.
    """

    _accepted = Accepted(torch.optim.RMSprop)
    optional = ("weight_decay",)
    state = {
        "square_avg": torch.zeros_like,
        "momentum_buffer": torch.zeros_like,
        "grad_avg": torch.zeros_like,
    }
    _optional_state = {"momentum_buffer": "momentum", "grad_avg": "centered"}

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0,
        momentum: float = 0,
        centered: bool = False,
        capturable: bool = False,
        foreach: bool | None = None,
        maximize: bool = False,
        differentiable: bool = False,
        **options: Unpack[OwnOptions],
    ) -> None:
        super().__init__(params, hyperparameters(locals()), **options)

    def update(self, p, g, step, square_avg, momentum_buffer, grad_avg, *, lr, alpha, eps, weight_decay, momentum):
        step.add_(1)
        g = add_decay(g, p, weight_decay)
        square_avg.mul_(alpha).add_((1 - alpha) * g * g)
        variance = square_avg
        if grad_avg is not None:
            grad_avg.mul_(alpha).add_((1 - alpha) * g)
            variance = square_avg - grad_avg * grad_avg
        d = g / (variance.sqrt() + eps)
        if momentum_buffer is not None:
            d = momentum_buffer.mul_(momentum).add_(d)
        p.sub_(lr * d)


class Adagrad(Optimizer):
    """Steps divided by the root of all squared gradients; takes and saves what `torch.optim.Adagrad` does.

        g <- g + weight_decay p
        s <- s + g^2                                    s starts as initial_accumulator_value
        p <- p - lr / (1 + (t - 1) lr_decay) g / (sqrt(s) + eps)

    As in torch, state is made with the optimizer, before there are gradients.

    Args:
        lr_decay: how fast the learning rate falls.
        initial_accumulator_value: as in the math.

    Source: Duchi et al., "Adaptive Subgradient Methods for Online Learning and Stochastic Optimization" (2011).
    """

    _accepted = Accepted(torch.optim.Adagrad)
    optional = ("weight_decay",)
    state = {"sum": torch.zeros_like}

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0,
        weight_decay: float = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-10,
        foreach: bool | None = None,
        **options: Unpack[KeywordOptions],
    ) -> None:
        super().__init__(params, hyperparameters(locals()), **options)
        self._create_state()

    def init_state(self, entry: str, p: Tensor, group: dict[str, Any]) -> Tensor:
        """The sum starts as `initial_accumulator_value`, in both parts of a complex number."""
        value = group["initial_accumulator_value"]
        return torch.full_like(p, complex(value, value) if p.is_complex() else value)

    def update(self, p, g, step, sum, *, lr, lr_decay, weight_decay, eps):
        step.add_(1)
        g = add_decay(g, p, weight_decay)
        sum.add_(g * g)
        p.sub_((lr / (1 + (step.double() - 1) * lr_decay)) * (g / (sum.sqrt() + eps)))

    def share_memory(self) -> None:
        """Move the sums into shared memory, for other processes."""
        for entry in self.state.values():
            entry["sum"].share_memory_()


class Adadelta(Optimizer):
    """Steps scaled by the steps before them; takes and saves what `torch.optim.Adadelta` does.

        g <- g + weight_decay p
        v <- rho v + (1 - rho) g^2
        d = sqrt(u + eps) / sqrt(v + eps) g
        u <- rho u + (1 - rho) d^2
        p <- p - lr d

    Args:
        lr: scales every step, a number or a tensor of one element.
        rho: the decay rate of each average.
        eps: starts the steps off, and keeps the quotient finite.

    Source: Zeiler, "ADADELTA: An Adaptive Learning Rate Method" (2012).
    """

    _accepted = Accepted(torch.optim.Adadelta)
    optional = ("weight_decay",)
    state = {"square_avg": torch.zeros_like, "acc_delta": torch.zeros_like}

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1.0,
        rho: float = 0.9,
        eps: float = 1e-6,
        weight_decay: float = 0,
        foreach: bool | None = None,
        **options: Unpack[KeywordOptions],
    ) -> None:
        super().__init__(params, hyperparameters(locals()), **options)

    def update(self, p, g, step, square_avg, acc_delta, *, lr, rho, eps, weight_decay):
        step.add_(1)
        g = add_decay(g, p, weight_decay)
        square_avg.mul_(rho).add_((1 - rho) * g * g)
        delta = (acc_delta + eps).sqrt() / (square_avg + eps).sqrt() * g
        acc_delta.mul_(rho).add_((1 - rho) * delta * delta)
        p.sub_(lr * delta)
