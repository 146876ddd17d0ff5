"""`st.explain`: a description of how a value was computed, or of how a call would run."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from subtensors.arguments import shown
from subtensors.bucketed.runner import Bucketed
from subtensors.chunked.chunked_tensor import ChunkedTensor, explain_loss
from subtensors.dispatch.ops.tree import PyTree
from subtensors.fused.fuse import Fused
from subtensors.lists.tensor_list import TensorList
from subtensors.lists.torch_function import explain_call
from subtensors.optim import Optimizer
from subtensors.padded.explanation import explain_padded_call, explain_padding, has_padding
from subtensors.padded.padded_tensor import PaddedTensor
from subtensors.static.arena import Arena, explain_static
from subtensors.static.static_tensor import StaticAddressTensor


def explain(subject: Tensor | Arena | Optimizer | Callable[..., object], *args: PyTree, **kwargs: PyTree) -> str:
    """Describe a value or a planned call: the rules, groups, chunks and kernels that apply, and why.

    Args:
        subject: a TensorList, a PaddedTensor, a ChunkedTensor or a loss computed from one, a StaticAddressTensor, an
            Arena, an optimizer, a fused function, or any torch function; the last two with the arguments of a call.
        args: arguments of the call, which is planned but not run.
        kwargs: keyword arguments of the call.

    Returns:
        Text, a line for each group of tensors and each kernel.

    Raises:
        TypeError: `subject` is none of these.

    Example:
        >>> import torch, subtensors as st
        >>> print(st.explain(torch.add, st.TensorList([torch.ones(2), torch.ones(3)]), 1))
        foreach aten._foreach_add.Scalar (1 group)
    """
    if isinstance(subject, Fused):
        return subject.explain(*args, **kwargs)
    if isinstance(subject, (Optimizer, Bucketed)):
        return subject.explain()
    if isinstance(subject, TensorList):
        return repr(subject)
    if isinstance(subject, Arena):
        return subject.explain()
    if isinstance(subject, StaticAddressTensor):
        return explain_static(subject)
    if isinstance(subject, ChunkedTensor):
        return subject.explain()
    if isinstance(subject, PaddedTensor):
        return explain_padding(subject)
    if isinstance(subject, Tensor):
        return explain_loss(subject)
    if not callable(subject):
        raise TypeError(
            f"explain takes a TensorList, an optimizer, a fused function or a torch function, got {shown(subject)}"
        )
    try:
        padded = has_padding(args, kwargs)
    except RecursionError:
        raise ValueError("explain takes the arguments of a call; one is a container that holds itself") from None
    return explain_padded_call(subject, args, kwargs) if padded else explain_call(subject, *args, **kwargs)
