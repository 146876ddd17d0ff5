"""Rprop: a step size for each element, from the signs of its gradients."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor

from subtensors.optim.hyperparameters import Accepted, hyperparameters
from subtensors.optim.optimizer import Optimizer, Params
from subtensors.optim.options import Options


class Rprop(Optimizer):
    """A step size an element, grown while its gradient keeps its sign; takes and saves what `torch.optim.Rprop` does.

        s <- clamp(s * { eta_plus where g g' > 0; eta_minus where g g' < 0; 1 elsewhere }, min, max)
        g <- 0 where g g' < 0                           g': the g of the step before
        p <- p - s sign(g)

    Args:
        lr: the first step size, a number or a tensor of one element.
        etas: `(eta_minus, eta_plus)`.
        step_sizes: `(min, max)`.

    Example:
        >>> import subtensors as st
        >>> w = torch.nn.Parameter(torch.ones(2))
        >>> opt = st.optim.Rprop([w], lr=0.5)
        >>> w.grad = torch.tensor([3.0, -1.0])
        >>> opt.step()
        >>> w.detach()
        tensor([0.5000, 1.5000])

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

    def update(
        self,
        p: Tensor,
        g: Tensor,
        step: Tensor,
        prev: Tensor,
        step_size: Tensor,
        *,
        etas: tuple[float, float],
        step_sizes: tuple[float, float],
    ) -> None:
        """The math of the class, for one tensor."""
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
