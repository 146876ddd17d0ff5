"""Schedule-Free AdamW: an average of the parameters in place of a learning rate schedule."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from subtensors.dispatch.fused.fused_function import FusedFunction
from subtensors.dispatch.fused.tensor_columns import TensorColumn
from subtensors.optim.dtensor import free_gathered_weights
from subtensors.optim.hyperparameters import Accepted, hyperparameters
from subtensors.optim.optimizer import Optimizer, Params
from subtensors.optim.options import Options
from subtensors.optim.state import MASTER
from subtensors.optim.traced_update import add_decay


class AdamWScheduleFree(Optimizer):
    """AdamW without a schedule: gradients are taken at y, between the fast iterate z and the average x.

        lr_t = lr sqrt(1 - beta2^t) min(1, t / warmup_steps)
        c = w_t / (w_1 + ... + w_t)                     w_t = t^r max(lr_1, ..., lr_t)^weight_lr_power
        v <- beta2 v + (1 - beta2) g^2
        d = g / (sqrt(v) + eps) + weight_decay y
        z <- z - lr_t d
        x <- (1 - c) x + c z
        y <- (1 - beta1) z + beta1 x

    The parameters hold y while training. `eval()` puts x there, which is what to evaluate and to save; `train()` puts
    y back. x is not stored: it is (y - (1 - beta1) z) / beta1. In bfloat16 and float16 switching
    rounds; with `master_weights` it rounds in float32.

    Args:
        betas: the position of y between z and x, and the decay rate of v; the first more than 0.
        weight_decay: decoupled, taken at y.
        warmup_steps: steps over which the learning rate grows linearly.
        r: the power of t in the weights of the average.
        weight_lr_power: the power of the learning rate in them.

    Source: Defazio et al., "The Road Less Scheduled" (2024), Algorithm 1.
    """

    _accepted = Accepted(betas=("(0, 1)", "[0, 1)"), warmup_steps="[0, inf]")  # with a first of 0, y would not hold x
    optional = ("weight_decay", "warmup_steps")
    state = {
        "z": torch.clone,
        "exp_avg_sq": torch.zeros_like,
        "weight_sum": lambda p: torch.zeros((), device=p.device, dtype=torch.float64),
        "lr_max": lambda p: torch.zeros((), device=p.device, dtype=torch.float64),
    }

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 2.5e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        warmup_steps: int = 0,
        r: float = 0.0,
        weight_lr_power: float = 2.0,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(params, hyperparameters(locals()) | {"train_mode": True}, **options)

    def update(
        self,
        p,
        g,
        step,
        z,
        exp_avg_sq,
        weight_sum,
        lr_max,
        *,
        lr,
        betas,
        eps,
        weight_decay,
        warmup_steps,
        r,
        weight_lr_power,
        train_mode,
    ):
        if not train_mode:
            raise RuntimeError("the parameters hold the average: call train() of the optimizer before a step")
        beta1, beta2 = betas
        step.add_(1)
        t = step.double()
        rate = lr * (1 - beta2**t) ** 0.5
        if warmup_steps is not None:
            rate = rate * (t / warmup_steps).clamp(max=1)
        lr_max.copy_(torch.maximum(lr_max, rate))
        weight = t**r * lr_max**weight_lr_power
        weight_sum.add_(weight)
        c = weight / torch.where(weight_sum > 0, weight_sum, 1.0)

        exp_avg_sq.mul_(beta2).add_((1 - beta2) * g * g)
        d = add_decay(g / (exp_avg_sq.sqrt() + eps), p, weight_decay)
        # The new y in terms of the old one: x is not needed.
        p.copy_(p + c * (z - p) + rate * (beta1 * (1 - c) - 1) * d)
        z.sub_(rate * d)

    def eval(self) -> None:
        """Put the average x into the parameters."""
        self._switch(to_train=False)

    def train(self) -> None:
        """Put y back into the parameters, to train on."""
        self._switch(to_train=True)

    @torch.no_grad()
    def _switch(self, to_train: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] == to_train:
                continue
            group["train_mode"] = to_train
            beta1 = float(group["betas"][0])
            params = [p for p in group["params"] if "z" in self.state.get(p, ())]
            if not params:
                continue
            entries = [self.state[p] for p in params]
            weights = [entry.get(MASTER, p) for p, entry in zip(params, entries, strict=True)]
            _approach(
                TensorColumn(weights), TensorColumn(e["z"] for e in entries), 1 - beta1 if to_train else 1 - 1 / beta1
            )
            for p, w in zip(params, weights, strict=True):
                if w is not p:
                    p.copy_(w)
            free_gathered_weights(params)


_approach = FusedFunction(lambda p, z, share: p.add_(share * (z - p)))
