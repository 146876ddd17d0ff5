"""Adagrad: steps shrink with all gradients so far."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor

from subtensors.optim.hyperparameters import Accepted, hyperparameters
from subtensors.optim.optimizer import Optimizer, Params
from subtensors.optim.options import OwnOptions


class Adagrad(Optimizer):
    """Steps divided by the root of all squared gradients; takes and saves what `torch.optim.Adagrad` does.

        g <- g + weight_decay p
        s <- s + g^2                                    s starts as initial_accumulator_value
        p <- p - lr / (1 + (t - 1) lr_decay) g / (sqrt(s) + eps)

    As in torch, state is made with the optimizer, before there are gradients.

    Args:
        lr_decay: how fast the learning rate falls.
        initial_accumulator_value: as in the math.

    Example:
        >>> import subtensors as st
        >>> w = torch.nn.Parameter(torch.ones(2))
        >>> opt = st.optim.Adagrad([w], lr=0.5)
        >>> w.grad = torch.tensor([3.0, -1.0])
        >>> opt.step()
        >>> w.detach()
        tensor([0.5000, 1.5000])

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
        *,
        maximize: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        **options: Unpack[OwnOptions],
    ) -> None:
        super().__init__(params, hyperparameters(locals()), **options)
        self._create_state()

    def init_state(self, entry: str, p: Tensor, group: dict[str, Any]) -> Tensor:
        """The sum starts as `initial_accumulator_value`, in both parts of a complex number."""
        value = group["initial_accumulator_value"]
        return torch.full_like(p, complex(value, value) if p.is_complex() else value)

    def update(
        self,
        p: Tensor,
        g: Tensor,
        step: Tensor,
        sum: Tensor,
        *,
        lr: float,
        lr_decay: float,
        weight_decay: float | None,
        eps: float,
    ) -> None:
        """The math of the class, for one tensor."""
        step.add_(1)
        if weight_decay is not None:
            g = g + weight_decay * p
        sum.add_(g * g)
        p.sub_((lr / (1 + (step.double() - 1) * lr_decay)) * (g / (sum.sqrt() + eps)))

    def share_memory(self) -> None:
        """Move the sums into shared memory, for other processes."""
        for entry in self.state.values():
            entry["sum"].share_memory_()
