"""Norms, MLPs and rotary embeddings of a model's layers, compiled each by itself while all else stays eager.

In eager code each op of these is a kernel that reads and writes whole hidden states; here a part takes a kernel or two,
forward and backward. Attention, residual sums and the Python of layers are as they were.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import MethodType, ModuleType
from typing import cast

import torch
from torch import Tensor, nn

from subtensors.dispatch.torch_internals.compiler import recomputing_what_fuses
from subtensors.integrations.undo import keep


class CompiledPart:
    """A function that is compiled for plain tensors where gradients are recorded, and called as it is elsewhere.

    Args:
        plain: the function.
    """

    def __init__(self, plain: Callable[..., object]) -> None:
        # Dropout draws as eager code does: a checkpoint may run its parts in both.
        self.plain, self.compiled = plain, torch.compile(plain, options={"fallback_random": True})
        self.users = 0
        self.__module__ = plain.__module__

    def __reduce__(self) -> tuple[type[CompiledPart], tuple[Callable[..., object]]]:
        return CompiledPart, (self.plain,)

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Run the function."""
        is_plain = all(type(x) is Tensor for x in args if isinstance(x, Tensor))
        if not is_plain or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return self.plain(*args, **kwargs)
        with recomputing_what_fuses():
            return self.compiled(*args, **kwargs)


def compile_pointwise(model: nn.Module, undo: ExitStack) -> None:
    """Compile a model's norms and MLPs in place, and the rotary embedding that the models of its class share.

    Raises:
        TypeError: the model has none of them.
    """
    parts = [part for part in model.modules() if _is_compiled(part)]
    for part in parts:
        keep(part, "forward", undo)
        part.forward = partial(CompiledPart(cast(MethodType, part.forward).__func__), part)
    classes = {cls for module in model.modules() for cls in type(module).__mro__}  # FSDP2 derives some
    files = [sys.modules[name] for name in {cls.__module__ for cls in classes}]
    rotated = [file for file in files if _is_of_transformers(vars(file).get(_ROTARY))]
    for file in rotated:
        _share(file, model, undo)
    if not parts and not rotated:
        raise TypeError(
            f'compile="pointwise" takes a model with norms, MLPs or rotary embeddings of transformers, and '
            f"{type(model).__name__} has none"
        )


def _is_compiled(part: nn.Module) -> bool:
    """Return whether a module is a norm or an MLP by transformers' names; hooks of accelerate replace its forward."""
    named = type(part).__name__.endswith(("Norm", "MLP"))
    return named and isinstance(part.forward, MethodType) and _is_of_transformers(part.forward)


def _is_of_transformers(function: object) -> bool:
    """Return whether transformers wrote a function; torch's norms and Liger's parts are one kernel already."""
    return getattr(function, "__module__", "").startswith("transformers")


def _share(file: ModuleType, model: nn.Module, undo: ExitStack) -> None:
    """Compile a file's rotary embedding until the last model that asked for it is reverted or gone."""
    names = vars(file)
    if not isinstance(names[_ROTARY], CompiledPart):
        names[_ROTARY] = CompiledPart(names[_ROTARY])
    rotary = names[_ROTARY]
    rotary.users += 1

    def release() -> None:
        rotary.users -= 1
        if not rotary.users and names[_ROTARY] is rotary:
            names[_ROTARY] = rotary.plain

    undo.callback(finalizer := weakref.finalize(model, release))
    finalizer.atexit = False


_ROTARY = "apply_rotary_pos_emb"
"""The name of the function in the files of transformers' models."""
