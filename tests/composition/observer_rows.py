"""Rows about what watches a program, and what is done to its modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from composition.subjects import Subject
from composition.table import Column, Slower, row

GROUP = "modes, hooks, modules"


class DispatchMode(TorchDispatchMode):
    """Run each op as it is."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class FunctionMode(TorchFunctionMode):
    """Run each function as it is."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


MODE = Slower("a dispatch mode is around it")


@row(GROUP, "`FlopCounterMode`", bucketed=MODE)
def flop_counter(subject: Subject) -> list[Tensor]:
    """The program and its backward under a `FlopCounterMode`, which counts some."""
    with FlopCounterMode(display=False) as counter:
        out = subject.trained()
    assert counter.get_total_flops() > 0
    return out


@row(GROUP, "`TorchDispatchMode`", bucketed=MODE)
def dispatch_mode(subject: Subject) -> list[Tensor]:
    """The program and its backward under a dispatch mode."""
    with DispatchMode():
        return subject.trained()


@row(GROUP, "`TorchFunctionMode`")
def function_mode(subject: Subject) -> list[Tensor]:
    """The program and its backward under a function mode."""
    with FunctionMode():
        return subject.trained()


@row(GROUP, "profiler")
def profiler(subject: Subject) -> list[Tensor]:
    """The program and its backward under `torch.profiler`, shapes included."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as found:
        out = subject.trained()
    assert len(found.key_averages()) > 0
    return out


@row(GROUP, "forward hooks")
def forward_hooks(subject: Subject) -> list[Tensor]:
    """Hooks that change the input and the output of a layer."""
    subject.module[2].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    subject.module[2].register_forward_hook(lambda module, args, out: out + 1)
    return subject.trained()


@row(GROUP, "tensor hooks")
def tensor_hooks(subject: Subject) -> list[Tensor]:
    """Hooks that halve gradients of parameters."""
    for p in subject.module.parameters():
        p.register_hook(lambda grad: grad / 2)
    return subject.trained()


@row(GROUP, "parametrizations")
def parametrized(subject: Subject) -> list[Tensor]:
    """Weight normalization as a parametrization."""
    parametrizations.weight_norm(subject.module[0])
    if subject.column in (Column.BUCKETED, Column.OPTIM):
        subject.prepare()
    return subject.trained()


@row(GROUP, "tied weights")
def tied(subject: Subject) -> list[Tensor]:
    """Two layers that share a weight."""
    module = subject.module
    module.append(nn.Linear(5, 6, bias=False, device=subject.device, dtype=subject.dtype))
    module.append(nn.Linear(6, 5, bias=False, device=subject.device, dtype=subject.dtype))
    with torch.no_grad():
        module[3].weight.fill_(0.25)
    module[3].weight = nn.Parameter(module[0].weight.detach()[:, :1].expand(6, 5).clone())
    module[4].weight = module[2].weight
    if subject.column in (Column.BUCKETED, Column.OPTIM):
        subject.prepare()
    return subject.trained()
