"""Muon for the hidden matrices of a model and AdamW for its other parameters, as the groups of one optimizer."""

from __future__ import annotations

from typing import ClassVar, Unpack, cast

import torch
from torch import Tensor, nn

from subtensors.fused.fuse import fused
from subtensors.optim.algorithms.adam import adam_denominator
from subtensors.optim.algorithms.matrix_optimizer import MatrixOptimizer
from subtensors.optim.algorithms.muon import Muon
from subtensors.optim.hyperparameters import Accepted, hyperparameters
from subtensors.optim.optimizer import Params
from subtensors.optim.options import Options, ParamGroup
from subtensors.optim.traced_update import compute_dtype


class MuonAdamW(MatrixOptimizer):
    """Muon for the parameters among `matrices`, AdamW for the others.

    Muon's steps are scaled to the size of AdamW's (`adjust_lr_fn="match_rms_adamw"`), so that one learning rate and one
    weight decay fit both.

    Args:
        momentum: of Muon.
        betas, eps: of AdamW.
        weight_decay: decoupled.

    Raises:
        ValueError: there is no matrix.
    """

    matrices: ClassVar[frozenset[int]] = frozenset()
    """Ids of the parameters that are Muon's; a group that has some is split."""

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
        **options: Unpack[Options],
    ) -> None:
        defaults = hyperparameters(locals()) | {"use_muon": False}
        given = list(params)
        groups = cast("list[ParamGroup]", given if isinstance(given[0], dict) else [{"params": given}])
        halves = [
            (
                group,
                use_muon,
                [p for p in cast("list[Tensor]", group["params"]) if (id(p) in self.matrices) == use_muon],
            )
            for group in groups
            for use_muon in (True, False)
        ]
        parts = [{**group, "params": own, "use_muon": use_muon} for group, use_muon, own in halves if own]
        if not any(part["use_muon"] for part in parts):
            raise ValueError("none of the parameters is a matrix of the model's layers, for Muon: take AdamW")
        super().__init__(parts, defaults, **options)

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
            _adamw(p, g, step, exp_avg, exp_avg_sq, lr, betas[0], betas[1], eps, weight_decay)


_OF_MUON = {
    "nesterov": True,
    "ns_coefficients": (3.4445, -4.7750, 2.0315),
    "eps": 1e-7,
    "ns_steps": 5,
    "adjust_lr_fn": "match_rms_adamw",
}
"""The numbers that a group doesn't hold: torch's defaults, and the scale of AdamW's steps."""


@fused
def _adamw(
    p: Tensor,
    g: Tensor,
    step: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    wide = compute_dtype(p.dtype)
    g = g.to(wide)
    m = beta1 * exp_avg.to(wide) + (1 - beta1) * g
    v = beta2 * exp_avg_sq.to(wide) + (1 - beta2) * g * g
    t = step.add_(1).double()
    exp_avg.copy_(m)
    exp_avg_sq.copy_(v)
    w = p.to(wide) * (1 - lr * weight_decay)
    p.copy_(w - (lr / (1 - beta1**t)) * (m / adam_denominator(v, beta2, t, eps)))


def with_adamw(model: nn.Module, head: nn.Module) -> type[MuonAdamW]:
    """Return the class that gives the matrices of a model's layers to Muon, and all else to AdamW.

    Args:
        model: whose parameters the groups hold.
        head: its head, which is AdamW's, as embeddings are.
    """
    outer = [module for module in model.modules() if module is head or isinstance(module, nn.Embedding)]
    inner = {id(p) for p in model.parameters() if p.ndim == 2} - {id(p) for m in outer for p in m.parameters()}
    return type("MuonAdamW", (MuonAdamW,), {"matrices": frozenset(inner)})
