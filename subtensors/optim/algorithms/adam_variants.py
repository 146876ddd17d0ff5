"""Adam with another momentum, second moment or length: NAdam, RAdam, Adamax, AdEMAMix, LAMB."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from subtensors.optim.algorithms.adam import adam_denominator, decay_weights, update_moments
from subtensors.optim.hyperparameters import Accepted, hyperparameters
from subtensors.optim.optimizer import Optimizer, Params
from subtensors.optim.options import KeywordOptions, Options
from subtensors.optim.traced_update import add_decay


class NAdam(Optimizer):
    """Adam with Nesterov momentum; takes and saves what `torch.optim.NAdam` does.

        g <- g + weight_decay p                         decoupled: p <- p - lr weight_decay p
        m <- beta1 m + (1 - beta1) g
        v <- beta2 v + (1 - beta2) g^2
        mu_t = beta1 (1 - 0.96^(t momentum_decay) / 2)
        P_t  = mu_1 ... mu_t
        p <- p - lr ((1 - mu_t) / (1 - P_t) g + mu_t+1 / (1 - P_t+1) m) / (sqrt(v / (1 - beta2^t)) + eps)

    Args:
        weight_decay: the L2 penalty; decoupled, the share of lr that a step takes off the parameter.
        momentum_decay: as in the math.
        decoupled_weight_decay: as in AdamW.

    Source: Dozat, "Incorporating Nesterov Momentum into Adam" (2016).
    """

    _accepted = Accepted(torch.optim.NAdam)
    optional = ("weight_decay",)
    host_entries = ("step", "mu_product")
    state = {
        "mu_product": lambda p: torch.ones((), device=p.device, dtype=torch.float32),
        "exp_avg": torch.zeros_like,
        "exp_avg_sq": torch.zeros_like,
    }

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 2e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        momentum_decay: float = 4e-3,
        decoupled_weight_decay: bool = False,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(params, hyperparameters(locals()), **options)

    def update(
        self,
        p,
        g,
        step,
        mu_product,
        exp_avg,
        exp_avg_sq,
        *,
        lr,
        betas,
        eps,
        weight_decay,
        momentum_decay,
        decoupled_weight_decay,
    ):
        beta1, beta2 = betas
        g = decay_weights(p, g, lr, weight_decay, decoupled_weight_decay)
        t = update_moments(step, exp_avg, exp_avg_sq, g, betas)
        mu = beta1 * (1 - 0.5 * 0.96 ** (t * momentum_decay))
        mu_next = beta1 * (1 - 0.5 * 0.96 ** ((t + 1) * momentum_decay))
        # Saved in float32, so torch's product of float32 numbers is taken.
        mu_product.mul_(mu.float())
        product = mu_product.double()
        gradient_factor = lr * (1 - mu) / (1 - product)
        average_factor = lr * mu_next / (1 - product * mu_next)
        direction = gradient_factor * g + average_factor * exp_avg
        p.sub_(direction / adam_denominator(exp_avg_sq, beta2, t, eps))


class RAdam(Optimizer):
    """Adam whose first steps go without the second moment; takes and saves what `torch.optim.RAdam` does.

        g <- g + weight_decay p                         decoupled: p <- p - lr weight_decay p
        m <- beta1 m + (1 - beta1) g
        v <- beta2 v + (1 - beta2) g^2
        rho_inf = 2 / (1 - beta2) - 1
        rho = rho_inf - 2 t beta2^t / (1 - beta2^t)
        r = sqrt((rho - 4) (rho - 2) rho_inf / ((rho_inf - 4) (rho_inf - 2) rho))
        p <- p - lr m / (1 - beta1^t) * { r sqrt(1 - beta2^t) / (sqrt(v) + eps)   where rho > 5
                                        { 1                                      elsewhere

    Args:
        weight_decay: the L2 penalty; decoupled, the share of lr that a step takes off the parameter.
        decoupled_weight_decay: as in AdamW.

    Source: Liu et al., "On the Variance of the Adaptive Learning Rate and Beyond" (2020), with torch's threshold of 5.
    """

    _accepted = Accepted(torch.optim.RAdam)
    optional = ("weight_decay",)
    state = {"exp_avg": torch.zeros_like, "exp_avg_sq": torch.zeros_like}

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        decoupled_weight_decay: bool = False,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(params, hyperparameters(locals()), **options)

    def update(self, p, g, step, exp_avg, exp_avg_sq, *, lr, betas, eps, weight_decay, decoupled_weight_decay):
        beta1, beta2 = betas
        g = decay_weights(p, g, lr, weight_decay, decoupled_weight_decay)
        t = update_moments(step, exp_avg, exp_avg_sq, g, betas)
        decay = beta2**t
        rho_inf = 2 / (1 - beta2) - 1
        rho = rho_inf - 2 * t * decay / (1 - decay)
        squared = (rho - 4) * (rho - 2) * rho_inf / ((rho_inf - 4) * (rho_inf - 2) * rho)
        # Negative where rho is small, and not used there.
        rectification = torch.where(rho > 5, squared, 1.0) ** 0.5
        adaptive = (rectification * (1 - decay) ** 0.5) / (exp_avg_sq.sqrt() + eps)
        p.sub_((lr / (1 - beta1**t)) * exp_avg * torch.where(rho > 5, adaptive, 1.0))


class Adamax(Optimizer):
    """Adam in the infinity norm; takes and saves what `torch.optim.Adamax` does.

        g <- g + weight_decay p
        m <- beta1 m + (1 - beta1) g
        u <- max(beta2 u, |g| + eps)
        p <- p - lr m / ((1 - beta1^t) u)

    Args:
        betas: the decay rates of the average and of the largest gradient.

    Source: Kingma & Ba, "Adam: A Method for Stochastic Optimization" (2015), section 7.1.
    """

    _accepted = Accepted(torch.optim.Adamax)
    optional = ("weight_decay",)
    state = {"exp_avg": torch.zeros_like, "exp_inf": torch.zeros_like}

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 2e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        foreach: bool | None = None,
        **options: Unpack[KeywordOptions],
    ) -> None:
        super().__init__(params, hyperparameters(locals()), **options)

    def update(self, p, g, step, exp_avg, exp_inf, *, lr, betas, eps, weight_decay):
        beta1, beta2 = betas
        step.add_(1)
        g = add_decay(g, p, weight_decay)
        exp_avg.mul_(beta1).add_((1 - beta1) * g)
        exp_inf.copy_(torch.maximum(beta2 * exp_inf, g.abs() + eps))
        p.sub_((lr / (1 - beta1 ** step.double())) * (exp_avg / exp_inf))


class AdEMAMix(Optimizer):
    """Adam whose direction mixes a fast and a slow average of the gradients.

        m1 <- beta1 m1 + (1 - beta1) g
        m2 <- beta3_t m2 + (1 - beta3_t) g
        v  <- beta2 v + (1 - beta2) g^2
        p  <- p - lr ((m1 / (1 - beta1^t) + alpha_t m2) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay p)

    While a warm-up of T steps lasts, a = min(t / T, 1):

        alpha_t = a alpha
        beta3_t = exp(1 / ((1 - a) / log beta1 + a / log beta3))      its half-life grows linearly, from that of beta1

    Args:
        betas: the decay rate of each average: `(beta1, beta2, beta3)`.
        alpha: the share of the slow average.
        beta3_warmup: steps until the slow average is as slow as beta3 says; None: from the start.
        alpha_warmup: steps until alpha is reached; None: from the start.
        weight_decay: decoupled.

    Source: Pagliardini et al., "The AdEMAMix Optimizer: Better, Faster, Older" (2024), Algorithm 1.
    """

    _accepted = Accepted(alpha="[0, inf]", beta3_warmup="None or (0, inf]", alpha_warmup="None or (0, inf]")
    optional = ("weight_decay",)
    state = {
        "exp_avg_fast": torch.zeros_like,
        "exp_avg_slow": torch.zeros_like,
        "exp_avg_sq": torch.zeros_like,
    }

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        alpha: float = 2.0,
        beta3_warmup: int | None = None,
        alpha_warmup: int | None = None,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(params, hyperparameters(locals()), **options)

    def update(
        self,
        p,
        g,
        step,
        exp_avg_fast,
        exp_avg_slow,
        exp_avg_sq,
        *,
        lr,
        betas,
        alpha,
        beta3_warmup,
        alpha_warmup,
        eps,
        weight_decay,
    ):
        beta1, beta2, beta3 = betas
        t = update_moments(step, exp_avg_fast, exp_avg_sq, g, betas[:2])
        slow, share = torch.full_like(t, beta3), torch.full_like(t, alpha)
        if beta3_warmup is not None:
            a = (t / beta3_warmup).clamp(max=1)
            slow = (1 / ((1 - a) / torch.full_like(t, beta1).log() + a / slow.log())).exp()
        if alpha_warmup is not None:
            share = (t / alpha_warmup).clamp(max=1) * alpha
        exp_avg_slow.mul_(slow).add_((1 - slow) * g)
        denominator = adam_denominator(exp_avg_sq, beta2, t, eps)
        u = (exp_avg_fast * (1 / (1 - beta1**t)) + share * exp_avg_slow) / denominator
        p.sub_(lr * add_decay(u, p, weight_decay))


class LAMB(Optimizer):
    """Adam with each tensor's step scaled to the tensor's own norm, for very large batches.

        m <- beta1 m + (1 - beta1) g
        v <- beta2 v + (1 - beta2) g^2
        u = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay p
        p <- p - lr ||p|| / ||u|| u                     a norm of 0 scales nothing: p <- p - lr u

    Args:
        weight_decay: decoupled, inside the norm of the step.

    Source: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes" (2020), Algorithm 2,
    with the identity for phi.
    """

    _accepted = Accepted()
    optional = ("weight_decay",)
    state = {"exp_avg": torch.zeros_like, "exp_avg_sq": torch.zeros_like}

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(params, hyperparameters(locals()), **options)

    def update(self, p, g, step, exp_avg, exp_avg_sq, *, lr, betas, eps, weight_decay):
        beta1, beta2 = betas
        t = update_moments(step, exp_avg, exp_avg_sq, g, betas)
        u = (1 / (1 - beta1**t)) * (exp_avg / adam_denominator(exp_avg_sq, beta2, t, eps))
        u = add_decay(u, p, weight_decay)
        length, change = p.norm(), u.norm()
        is_scaled = (length > 0) & (change > 0)
        ratio = torch.where(is_scaled, length / torch.where(is_scaled, change, 1.0), 1.0)
        p.sub_(lr * ratio * u)
