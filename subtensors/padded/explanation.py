"""The text of `st.explain` for a PaddedTensor, and for a call with one."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from subtensors.dispatch.ops.errors import DataDependentCall, RuleError
from subtensors.dispatch.ops.tree import Args, Kwargs, PyTree, tree_find, tree_map_only
from subtensors.dispatch.padded import interpreter
from subtensors.dispatch.sizes.dim_factors import is_padded
from subtensors.padded.padded_tensor import PaddedTensor


def explain_padding(x: PaddedTensor) -> str:
    """Describe each padded dim in a line, and the known contents of the padding in another.

    Args:
        x: the tensor.

    Example:
        >>> import torch, subtensors as st
        >>> x = st.pad(torch.ones(2, 3), {1: st.Dim("n", max=8, buckets=4)})
        >>> print(explain_padding(x).splitlines()[0])
        dim 1: bucket 4, true size n
    """
    lines = []
    for d, factors in enumerate(x._dims):
        if is_padded(factors):
            sizes = " x ".join(str(factor.size) for factor in factors)
            lines.append(f"dim {d}: bucket {x._dense.shape[d]}, true size {sizes}")
    lines.append(f"padding: {'undefined' if x._fill is None else f'{x._fill} everywhere'}")
    return "\n".join(lines)


def has_padding(args: Args, kwargs: Kwargs) -> bool:
    """Return whether a PaddedTensor is among the arguments of a call."""
    return bool(tree_find(PaddedTensor, (args, kwargs)))


def explain_padded_call(func: Callable[..., PyTree], args: Args, kwargs: Kwargs) -> str:
    """Describe the rules that a call of a torch function takes, found by running it on shapes alone.

    Args:
        func: the function.
        args, kwargs: its arguments.

    Returns:
        A line for each op that torch makes of it.

    Example:
        >>> import torch, subtensors as st
        >>> x = st.pad(torch.ones(2, 3), {1: st.Dim("n", max=8, buckets=4)})
        >>> print(explain_padded_call(torch.softmax, (x, 1), {}))
        aten.softmax.int on a PaddedTensor: softmax, registered for every op with the ... across its own dims
        >>> print(explain_padded_call(torch.renorm, (x, 2, 0, 1.0), {}).partition(":")[0])
        on the unpadded data, in eager mode
    """
    shapes = tree_map_only(Tensor, lambda t: t.detach().to("meta"), (args, kwargs))
    with interpreter.observed() as lines:
        try:
            func(*shapes[0], **shapes[1])
        except RuleError as error:
            reason = error.__cause__ or error
            if isinstance(reason, DataDependentCall):
                return f"by a rule, in eager mode alone: {reason}"
            return f"on the unpadded data, in eager mode: {reason}"
    return "\n".join(lines)
