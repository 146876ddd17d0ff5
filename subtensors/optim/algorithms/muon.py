"""Muon: momentum whose singular values are all brought to one size; alone, and with AdamW for what is no matrix."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Unpack, cast

import torch
from torch import Tensor, nn

from subtensors.fused.fuse import fused
from subtensors.kernels.runtime.custom_ops import arithmetic_dtype
from subtensors.optim.algorithms.adam import AdamW
from subtensors.optim.algorithms.matrix_optimizer import MatrixOptimizer, by_shape
from subtensors.optim.hyperparameters import Accepted, hyperparameters
from subtensors.optim.optimizer import Params
from subtensors.optim.options import Options, ParamGroup
from subtensors.optim.traced_update import single_tensor_step

Coefficients = tuple[float, float, float]


class Muon(MatrixOptimizer):
    """Muon, for the weight matrices of a network; takes and saves what `torch.optim.Muon` does.

        m <- momentum m + (1 - momentum) g
        u <- momentum m + (1 - momentum) g              without nesterov u <- m
        o <- NS(u / max(|u|, eps))                      Newton-Schulz, in bfloat16: singular values near 1
        p <- p - lr weight_decay p - lr s o             s: sqrt(max(1, rows / columns)), or as `adjust_lr_fn` says

    What is element by element is one kernel over all matrices, and Newton-Schulz three matrix products an iteration and
    shape. Other parameters than matrices (embeddings, heads, biases) belong to another optimizer, such as AdamW.

    Args:
        params: parameters with two dimensions, `(name, parameter)` pairs, or parameter groups.
        weight_decay: decoupled, as in AdamW.
        momentum: the decay rate of the momentum.
        nesterov: as in the math.
        ns_coefficients: of the iteration X <- a X + b X X^T X + c (X X^T)^2 X.
        eps: the smallest norm that is divided by.
        ns_steps: iterations.
        adjust_lr_fn: None or "original" for s as above; "match_rms_adamw" for 0.2 sqrt(max(rows, columns)), with which
            the learning rates and weight decays of AdamW fit.

    Raises:
        ValueError: a value is out of range, or a parameter is no real matrix.

    Example:
        >>> import subtensors as st
        >>> w = torch.nn.Parameter(torch.zeros(2, 2))
        >>> opt = st.optim.Muon([w], lr=0.5)
        >>> w.grad = torch.tensor([[3.0, 0.0], [0.0, -0.1]])
        >>> opt.step()
        >>> (w.detach() / 0.5).round()
        tensor([[-1.,  0.],
                [ 0.,  1.]])

    Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024); Liu et al., "Muon is
    Scalable for LLM Training" (2025) for `match_rms_adamw`. The form is torch's.
    """

    _accepted = Accepted(torch.optim.Muon, ns_steps="[0, 100)")
    is_replayable = True
    state = {"momentum_buffer": torch.zeros_like}

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Coefficients = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(params, hyperparameters(locals()), **options)

    def _check(self, group: dict[str, Any]) -> None:
        super()._check(group)
        for p in group["params"]:
            if p.dim() != 2:
                raise ValueError(
                    f"Muon only supports 2D parameters whereas we found a parameter with size: {p.size()}; give it to "
                    "another optimizer, such as AdamW"
                )

    def update(
        self,
        p,
        g,
        momentum_buffer,
        *,
        lr,
        weight_decay,
        momentum,
        nesterov,
        ns_coefficients,
        eps,
        ns_steps,
        adjust_lr_fn,
    ):
        """The math of the class, for all matrices."""
        x: Any
        x, norm = _momentum(g, momentum_buffer, momentum, nesterov, eps)
        _divide(x, norm)
        orthogonalize = functools.partial(
            _orthogonalized, coefficients=ns_coefficients, steps=int(ns_steps), adjust_lr_fn=adjust_lr_fn
        )
        _descend(p, by_shape(orthogonalize, x), lr, weight_decay)


def newton_schulz(x: Tensor, coefficients: Coefficients, steps: int, scale: float = 1.0) -> Tensor:
    """Bring every singular value of a batch of matrices near 1, and keep its singular vectors.

        A = X X^T                                       X^T X for tall matrices, so that A is the smaller one
        X <- a X + (b A + c A^2) X                      X (b A + c A^2) for tall ones

    A step maps each singular value s to a s + b s^3 + c s^5. A batch takes three products a step, however many matrices
    it has.

    Args:
        x: (batch, rows, columns), of Frobenius norms of at most 1; may be overwritten.
        coefficients: a, b and c.
        steps: how many.
        scale: a factor of the result.

    Returns:
        Like `x`; its memory where that saves some.

    Example:
        >>> x = torch.tensor([[[0.6, 0.0], [0.0, -0.8]]])
        >>> newton_schulz(x, (1.5, -0.5, 0.0), steps=10).round()
        tensor([[[ 1.,  0.],
                 [ 0., -1.]]])

    Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024); Bernstein & Newhouse, "Old
    Optimizer, New Norm" (2024).
    """
    a, b, c = coefficients
    is_tall = x.size(-2) > x.size(-1)
    start = x
    for step in range(steps):
        is_last = step == steps - 1
        gram = x.mT @ x if is_tall else x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        del gram
        factors = (x, polynomial) if is_tall else (polynomial, x)
        # The factor of the result costs nothing as a part of the last product.
        factor = scale if is_last else 1.0
        out = start if is_last and x is not start else None
        x = torch.baddbmm(x, *factors, beta=a * factor, alpha=factor, out=out)  # type: ignore[call-overload]
    return x if steps else x * scale


@fused
def _momentum(g: Tensor, m: Tensor, momentum: float, nesterov: bool, eps: float) -> tuple[Tensor, Tensor]:
    """The direction u in bfloat16, and its norm."""
    wide = arithmetic_dtype(m.dtype)
    g = g.to(wide)
    m.copy_(m.to(wide).lerp(g, 1 - momentum))
    u = (g.lerp(m.to(wide), momentum) if nesterov else m.to(wide)).to(torch.bfloat16)
    return u, u.float().norm().clamp(min=eps)


@fused
def _divide(x: Tensor, norm: Tensor) -> None:
    x.copy_(x.float() / norm)


@fused
def _descend(p: Tensor, o: Tensor, lr: float, weight_decay: float) -> None:
    w = p.to(arithmetic_dtype(p.dtype))
    p.copy_(w * (1 - lr * weight_decay) - lr * o.to(w.dtype))


def _orthogonalized(x: Tensor, coefficients: Coefficients, steps: int, adjust_lr_fn: str | None) -> Tensor:
    """Newton-Schulz on a stack, with the factor of the learning rate that its shape asks for."""
    rows, columns = x.shape[1:]
    return newton_schulz(
        x, coefficients, steps, _FACTORS["original" if adjust_lr_fn is None else adjust_lr_fn](rows, columns)
    )


_FACTORS: dict[str, Callable[[int, int], float]] = {
    "original": lambda rows, columns: math.sqrt(max(1, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}


class MuonAdamW(MatrixOptimizer):
    """Muon for the groups with `use_muon`, AdamW for the others.

    Muon's steps are scaled to the size of AdamW's (`adjust_lr_fn="match_rms_adamw"`), so that one learning rate and one
    weight decay fit both.

    Args:
        momentum: of Muon.
        betas, eps: of AdamW.
        weight_decay: decoupled.
        use_muon: what a group does that says nothing of it.
    """

    _accepted = Accepted()
    is_replayable = True
    state = dict.fromkeys(("momentum_buffer", "exp_avg", "exp_avg_sq"), torch.zeros_like)

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        momentum: float = 0.95,
        use_muon: bool = False,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(params, hyperparameters(locals()), **options)

    def needs_state(self, entry: str, group: ParamGroup) -> bool:
        """The momentum of Muon's groups, the moments and counts of AdamW's."""
        return (entry == "momentum_buffer") == bool(group["use_muon"])

    def update(
        self, p, g, momentum_buffer, step, exp_avg, exp_avg_sq, *, lr, betas, eps, weight_decay, momentum, use_muon
    ):
        """The math of either."""
        if use_muon:
            numbers = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
            # It reads nothing of `self`.
            Muon.update(self, p, g, momentum_buffer, **numbers, **_OF_MUON)  # type: ignore[no-untyped-call, arg-type]
        else:
            numbers = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
            entries = step, exp_avg, exp_avg_sq, None, None
            _adamw(p, g, None, entries, None, None, False, {**numbers, "decoupled_weight_decay": True})


_OF_MUON = {
    "nesterov": True,
    "ns_coefficients": (3.4445, -4.7750, 2.0315),
    "eps": 1e-7,
    "ns_steps": 5,
    "adjust_lr_fn": "match_rms_adamw",
}
"""The numbers that a group doesn't hold: torch's defaults, and the scale of AdamW's steps."""

_adamw = fused(single_tensor_step(AdamW))


def with_adamw(model: nn.Module, head: nn.Module) -> Callable[..., MuonAdamW]:
    """Return a function that makes an optimizer: Muon for the matrices of a model's layers, AdamW for all else.

    Args:
        model: whose parameters the groups hold.
        head: its head, which is AdamW's, as embeddings are.
    """
    outer = [module for module in model.modules() if module is head or isinstance(module, nn.Embedding)]
    inner = {id(p) for p in model.parameters() if p.ndim == 2} - {id(p) for m in outer for p in m.parameters()}

    @functools.wraps(MuonAdamW)
    def of_layers(params: Params, **options: Any) -> MuonAdamW:
        parts = [*_split(params, inner)]
        if not any(part["use_muon"] for part in parts):
            raise ValueError("none of the parameters is a matrix of the model's layers, for Muon: take AdamW")
        return MuonAdamW(parts, **options)

    return of_layers


def _split(params: Params, matrices: Collection[int]) -> Iterator[ParamGroup]:
    """Yield the groups of some parameters, each in two: those with these ids, and the others."""
    given = list(params)
    is_grouped = bool(given) and isinstance(given[0], dict)
    for group in cast("list[ParamGroup]", given if is_grouped else [{"params": given}]):
        own = group["params"]
        listed = [own] if isinstance(own, Tensor) else list(cast("Iterable[Tensor | tuple[str, Tensor]]", own))
        for use_muon in (True, False):
            half = [x for x in listed if (id(x[1] if isinstance(x, tuple) else x) in matrices) == use_muon]
            if half:
                yield {**group, "params": half, "use_muon": use_muon}
