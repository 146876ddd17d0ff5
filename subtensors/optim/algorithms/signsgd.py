"""SignSGD, and with a momentum Signum."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from subtensors.optim.hyperparameters import Accepted, hyperparameters
from subtensors.optim.optimizer import Optimizer, Params
from subtensors.optim.options import Options, ParamGroup


class SignSGD(Optimizer):
    """Every element moves by lr, against the sign of its gradient, or of its momentum.

        m <- momentum m + (1 - momentum) g
        p <- p - lr (sign(m) + weight_decay p)

    Args:
        momentum: the decay rate of the average; 0 keeps no buffer.
        weight_decay: decoupled.

    Example:
        >>> import subtensors as st
        >>> w = torch.nn.Parameter(torch.ones(2))
        >>> opt = st.optim.SignSGD([w], lr=0.5)
        >>> w.grad = torch.tensor([3.0, -1.0])
        >>> opt.step()
        >>> w.detach()
        tensor([0.5000, 1.5000])

    Source: Bernstein et al., "signSGD: Compressed Optimisation for Non-Convex Problems" (2018), Algorithms 1 and 2.
    """

    _accepted = Accepted()
    optional = ("weight_decay",)
    state = {"momentum_buffer": torch.zeros_like}

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-4,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(params, hyperparameters(locals()), **options)

    def needs_state(self, entry: str, group: ParamGroup) -> bool:
        """A buffer only with a momentum."""
        return bool(group["momentum"] != 0)

    def update(
        self,
        p: Tensor,
        g: Tensor,
        momentum_buffer: Tensor | None,
        *,
        lr: float,
        momentum: float,
        weight_decay: float | None,
    ) -> None:
        """The math of the class, for one tensor."""
        if momentum_buffer is not None:
            g = momentum_buffer.mul_(momentum).add_((1 - momentum) * g)
        direction = torch.sign(g)
        if weight_decay is not None:
            direction = direction + weight_decay * p
        p.sub_(lr * direction)
