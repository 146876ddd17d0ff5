"""Rows about what belongs to optimizers."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import subtensors as st
from composition.subjects import Optim, Subject
from composition.table import Column, Meaningless, row

GROUP = "optimizers"

NO_PARAMETERS = Meaningless("it holds no parameters")

SCHEDULERS = {
    "StepLR": {"step_size": 1},
    "LinearLR": {"total_iters": 2},
    "CosineAnnealingWarmRestarts": {"T_0": 2},
    "OneCycleLR": {"max_lr": 0.1, "total_steps": 4},
    "CyclicLR": {"base_lr": 0.01, "max_lr": 0.1, "cycle_momentum": False},
    "ReduceLROnPlateau": {"patience": 0},
}


@row(
    GROUP,
    "learning rate schedulers",
    padded=NO_PARAMETERS,
    lists=NO_PARAMETERS,
    chunked=NO_PARAMETERS,
    static=NO_PARAMETERS,
    bucketed=NO_PARAMETERS,
)
def schedulers(subject: Subject) -> list[Tensor]:
    """Schedulers, `ReduceLROnPlateau` and `OneCycleLR` among them, and two steps of each."""
    outs = []
    for name, options in SCHEDULERS.items():
        each = Optim(subject.device, subject.dtype, subject.plain)
        scheduler = getattr(lr_scheduler, name)(each.optimizer, **options)
        for _ in range(2):
            outs += each.trained()
            scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
        outs.append(torch.tensor(each.optimizer.param_groups[0]["lr"], dtype=subject.dtype))
    return outs


@row(GROUP, "parameter groups", padded=NO_PARAMETERS, chunked=NO_PARAMETERS, bucketed=NO_PARAMETERS)
def groups(subject: Subject) -> list[Tensor]:
    """Groups with learning rates of their own, one of them added later."""
    parameters = list(subject.module.parameters())
    if subject.column is Column.LISTS and not subject.plain:
        first, second = (list(st.TensorList(parameters[i : i + 2])) for i in (0, 2))
    else:
        first, second = parameters[:2], parameters[2:]
    kind = torch.optim.AdamW if subject.plain or subject.column is not Column.OPTIM else st.optim.AdamW
    optimizer = kind([{"params": first, "lr": 0.1}], lr=0.05, weight_decay=0.1)
    subject.trained()
    optimizer.step()
    optimizer.add_param_group({"params": second, "weight_decay": 0.0})
    optimizer.step()
    return [p.detach() for p in parameters]


@row(GROUP, "clipping by norm")
def clipped(subject: Subject) -> list[Tensor]:
    """`clip_grad_norm_` of gradients; of a TensorList and an optimizer by our own."""
    subject.trained()
    parameters = list(subject.module.parameters())
    if subject.plain or subject.column is not Column.LISTS:
        norm = torch.nn.utils.clip_grad_norm_(parameters, 0.5)
    else:
        norm = st.clip_grad_norm_(st.TensorList(parameters), 0.5)
    return [norm, *subject.gradients()]


@row(GROUP, "moving averages", padded=NO_PARAMETERS, lists=NO_PARAMETERS, chunked=NO_PARAMETERS)
def averaged(subject: Subject) -> list[Tensor]:
    """`AveragedModel` with an exponential average, over two steps."""
    average = AveragedModel(subject.module, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for _ in range(2):
        average.update_parameters(subject.module)
        subject.trained()
        with torch.no_grad():
            for p in subject.module.parameters():
                p.add_(p.grad, alpha=-0.1)
    average.update_parameters(subject.module)
    return [p.detach() for p in average.parameters()]
