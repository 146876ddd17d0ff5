"""Steps from the signs of gradients: Lion, SignSGD and Rprop."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor

from subtensors.optim.hyperparameters import Accepted, hyperparameters
from subtensors.optim.optimizer import Optimizer, Params
from subtensors.optim.options import Options
from subtensors.optim.traced_update import add_decay


class Lion(Optimizer):
    """Lion: every element moves by lr, in the direction of its momentum; one state tensor a parameter.

        p <- p - lr (sign(beta1 m + (1 - beta1) g) + weight_decay p)
        m <- beta2 m + (1 - beta2) g

    Args:
        lr: the learning rate, a number or a tensor of one element; the paper takes 3 to 10 times less than for AdamW.
        betas: the decay rates of the momentum in the direction, and in the next momentum.
        weight_decay: decoupled; the paper takes 3 to 10 times more than for AdamW.

    Source: Chen et al., "Symbolic Discovery of Optimization Algorithms" (2023), Algorithm 2.
    """

    _accepted = Accepted()
    optional = ("weight_decay",)
    low_bit = {"exp_avg": True}
    state = {"exp_avg": torch.zeros_like}

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(params, hyperparameters(locals()), **options)

    def update(self, p, g, exp_avg, *, lr, betas, weight_decay):
        beta1, beta2 = betas
        p.sub_(lr * add_decay(torch.sign(beta1 * exp_avg + (1 - beta1) * g), p, weight_decay))
        exp_avg.mul_(beta2).add_((1 - beta2) * g)


class SignSGD(Optimizer):
    """Every element moves by lr, against the sign of its gradient, or of its momentum.

        m <- momentum m + (1 - momentum) g
        p <- p - lr (sign(m) + weight_decay p)

    Args:
        momentum: the decay rate of the average; 0 keeps no buffer.
        weight_decay: decoupled.

    Source: Bernstein et al., "signSGD: Compressed Optimisation for Non-Convex Problems" (2018), Algorithms 1 and 2.
    """

    _accepted = Accepted()
    optional = ("weight_decay",)
    state = {"momentum_buffer": torch.zeros_like}
    _optional_state = {"momentum_buffer": "momentum"}

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-4,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(params, hyperparameters(locals()), **options)

    def update(self, p, g, momentum_buffer, *, lr, momentum, weight_decay):
        if momentum_buffer is not None:
            g = momentum_buffer.mul_(momentum).add_((1 - momentum) * g)
        p.sub_(lr * add_decay(torch.sign(g), p, weight_decay))


class Rprop(Optimizer):
    """A step size an element, grown while its gradient keeps its sign; takes and saves what `torch.optim.Rprop` does.

        s <- clamp(s * { eta_plus where g g' > 0; eta_minus where g g' < 0; 1 elsewhere }, min, max)
        g <- 0 where g g' < 0                           g': the g of the step before
        p <- p - s sign(g)

    Args:
        lr: the first step size, a number or a tensor of one element.
        etas: `(eta_minus, eta_plus)`.
        step_sizes: `(min, max)`.

    Source: Riedmiller & Braun, "A Direct Adaptive Method for Faster Backpropagation Learning: The RPROP Algorithm"
    (1993); the variant without weight backtracking, as torch has it.
    """

    _accepted = Accepted(torch.optim.Rprop)
    state = {"prev": torch.zeros_like, "step_size": torch.zeros_like}

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-2,
        etas: tuple[float, float] = (0.5, 1.2),
        step_sizes: tuple[float, float] = (1e-6, 50),
        **options: Unpack[Options],
    ) -> None:
        super().__init__(params, hyperparameters(locals()), **options)

    def init_state(self, entry: str, p: Tensor, group: dict[str, Any]) -> Tensor:
        """Every element starts with a step size of lr, in both parts of a complex number."""
        if entry != "step_size":
            return super().init_state(entry, p, group)
        lr = float(group["lr"])
        return torch.full_like(p, complex(lr, lr) if p.is_complex() else lr)

    def update(self, p, g, step, prev, step_size, *, etas, step_sizes):
        eta_minus, eta_plus = etas
        smallest, largest = step_sizes
        step.add_(1)
        agreement = g * prev
        has_turned = agreement < 0
        grown = torch.where(agreement > 0, step_size * eta_plus, step_size)
        step_size.copy_(torch.where(has_turned, step_size * eta_minus, grown).clamp(smallest, largest))
        g = torch.where(has_turned, 0.0, g)
        p.sub_(torch.sign(g) * step_size)
        prev.copy_(g)
