"""Stochastic gradient descent: with momentum, and averaging its parameters."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor

from subtensors.optim.hyperparameters import Accepted, hyperparameters
from subtensors.optim.optimizer import Optimizer, Params
from subtensors.optim.options import Options, OwnOptions, ParamGroup
from subtensors.optim.traced_update import add_decay


class SGD(Optimizer):
    """Stochastic gradient descent with (Nesterov) momentum; takes and saves what `torch.optim.SGD` does.

        g <- g + weight_decay p
        b <- momentum b + (1 - dampening) g             in a tensor's first step b <- g
        p <- p - lr b                                   nesterov: p <- p - lr (g + momentum b)

    Args:
        momentum: 0 keeps no buffer.
        dampening: as in the math.
        nesterov: needs a momentum and no dampening.

    Example:
        >>> import subtensors as st
        >>> w = torch.nn.Parameter(torch.ones(2))
        >>> opt = st.optim.SGD([w], lr=0.5, momentum=0.5)
        >>> for _ in range(2):
        ...     w.grad = torch.ones(2)
        ...     opt.step()
        >>> w.detach()
        tensor([-0.2500, -0.2500])

    Source: Sutskever et al., "On the importance of initialization and momentum in deep learning" (2013), with torch's
    placing of the learning rate and its undamped first step.
    """

    _accepted = Accepted(torch.optim.SGD)
    optional = ("weight_decay", "dampening")
    state = {"momentum_buffer": torch.zeros_like}

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(params, hyperparameters(locals()), **options)

    def needs_state(self, entry: str, group: ParamGroup) -> bool:
        """A buffer with a momentum; a count only where dampening makes the first step another."""
        return group["momentum"] != 0 and (entry != "step" or group["dampening"] != 0)

    def update(self, p, g, step, momentum_buffer, *, lr, momentum, dampening, weight_decay, nesterov):
        g = add_decay(g, p, weight_decay)
        if momentum_buffer is not None:
            momentum_buffer.mul_(momentum).add_(g if dampening is None else (1 - dampening) * g)
            if step is not None:
                step.add_(1)
                momentum_buffer.copy_(torch.where(step == 1, g, momentum_buffer))
            g = g + momentum * momentum_buffer if nesterov else momentum_buffer
        p.sub_(lr * g)

    def state_dict(self) -> dict[str, Any]:
        """The state as `torch.optim.SGD` saves it: without counts, and without buffers that no step has written."""
        is_provisional = self._is_provisional  # asked which entries there will be
        saved = super().state_dict()
        for key, state in saved["state"].items():
            if "step" in state:
                written = is_provisional or state["step"] > 0
                saved["state"][key] = {
                    name: value
                    for name, value in state.items()
                    if name != "step" and (written or name != "momentum_buffer")
                }
        return saved


class ASGD(Optimizer):
    """Averaged stochastic gradient descent; takes and saves what `torch.optim.ASGD` does.

        g <- g + weight_decay p
        p <- p - eta (g + lambd p)                      eta starts as lr
        a <- a + mu (p - a)                             the average, `state[p]["ax"]`; mu starts as 1
        eta <- lr / (1 + lambd lr t)^alpha
        mu <- 1 / max(1, t - t0)

    Args:
        lambd: how fast the parameter and the learning rate decay.
        alpha: the power of the learning rate's decay.
        t0: the step after which the average is one.

    Source: Polyak & Juditsky, "Acceleration of Stochastic Approximation by Averaging" (1992), with Bottou's schedules.
    """

    _accepted = Accepted(torch.optim.ASGD)
    optional = ("weight_decay",)
    host_entries = ()  # torch, too, keeps these counts on the device
    state = {
        "eta": lambda p: torch.zeros((), device=p.device, dtype=torch.float32),
        "mu": lambda p: torch.ones((), device=p.device, dtype=torch.float32),
        "ax": torch.zeros_like,
    }

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-2,
        lambd: float = 1e-4,
        alpha: float = 0.75,
        t0: float = 1e6,
        weight_decay: float = 0,
        foreach: bool | None = None,
        maximize: bool = False,
        differentiable: bool = False,
        capturable: bool = False,
        **options: Unpack[OwnOptions],
    ) -> None:
        super().__init__(params, hyperparameters(locals()), **options)

    def init_state(self, entry: str, p: Tensor, group: dict[str, Any]) -> Tensor:
        """The learning rate of the first step is lr."""
        started = super().init_state(entry, p, group)
        return started.fill_(float(group["lr"])) if entry == "eta" else started

    def update(self, p, g, step, eta, mu, ax, *, lr, lambd, alpha, t0, weight_decay):
        step.add_(1)
        t, rate = step.double(), eta.double()
        g = add_decay(g, p, weight_decay)
        # Not (1 - lambd eta) p: so near to 1, the factor would be rounded to float32 the same way in every step.
        p.sub_(rate * (g + lambd * p))
        ax.copy_(torch.where(mu == 1, p, ax + mu * (p - ax)))
        eta.copy_(lr / (1 + lambd * lr * t) ** alpha)
        mu.copy_(1 / (t - t0).clamp(min=1))
