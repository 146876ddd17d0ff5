"""`st.explain`: a description of how a value was computed, or of how a call would run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, TypeAlias

from torch import Tensor

from subtensors.arguments import shown, signature_of
from subtensors.bucketed.runner import Bucketed
from subtensors.chunked.chunked_tensor import ChunkedTensor
from subtensors.dispatch.chunked.linear_loss import LoweredPlan
from subtensors.dispatch.chunked.schedule import ChunkSchedule
from subtensors.dispatch.ops.errors import DataDependentCall, RuleError
from subtensors.dispatch.ops.tree import Args, Kwargs, PyTree, tree_find, tree_map_only
from subtensors.dispatch.padded import interpreter
from subtensors.dispatch.sizes.dim_factors import is_padded
from subtensors.fused.fuse import Fused
from subtensors.lists.tensor_list import TensorList
from subtensors.lists.torch_function import explain_call
from subtensors.optim import Optimizer
from subtensors.padded.padded_tensor import PaddedTensor
from subtensors.sizes.dims import Dim
from subtensors.static.arena import Arena, explain_static
from subtensors.static.static_tensor import StaticAddressTensor

if TYPE_CHECKING:
    from subtensors.bucketed.compare_runs import CheckReport
    from subtensors.bucketed.statistics import Statistics
    from subtensors.sizes.accepted_sizes import AcceptedSizes  # this loads sympy
    from subtensors.sizes.bucket_policies import BucketPolicy

Explained: TypeAlias = (
    "Tensor | Arena | Optimizer | Dim | BucketPolicy | AcceptedSizes | Statistics | CheckReport | Callable[..., object]"
)
"""What `st.explain` takes."""


def explain(subject: Explained, *args: PyTree, **kwargs: PyTree) -> str:
    """Describe a value or a planned call: the rules, groups, chunks and kernels that apply, and why.

    Args:
        subject: a TensorList, a PaddedTensor, a ChunkedTensor or a loss computed from one, a StaticAddressTensor, an
            Arena, an optimizer, a runner of `st.bucketed`, its statistics and check reports, a Dim, a bucket policy,
            sizes that were inferred, a fused function, or any torch function; the last two with the arguments of a
            call. Of a function, class or module of this package alone, its signature and purpose.
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
    if isinstance(subject, Fused) and (args or kwargs):
        return subject.explain(*args, **kwargs)
    if isinstance(subject, (Optimizer, Bucketed, Arena, ChunkedTensor)):
        return subject.explain()
    if isinstance(subject, TensorList):
        return repr(subject)
    if isinstance(subject, StaticAddressTensor):
        return explain_static(subject)
    if isinstance(subject, PaddedTensor):
        return explain_padding(subject)
    if isinstance(subject, Tensor):
        return explain_loss(subject)
    if isinstance(subject, Dim):
        ends = "have no end, without a max" if subject.max is None else f"are {_shortened(subject.buckets)}"
        return f"{subject}; its buckets {ends}"
    if isinstance(subject, ModuleType) and subject.__name__.startswith("subtensors"):
        return f"{subject.__name__}: {_purpose(subject)}"
    if not callable(subject) and type(subject).__module__.startswith("subtensors."):
        return str(subject)  # sizes, policies, statistics and reports describe themselves
    if not callable(subject):
        raise TypeError(
            f"explain takes a tensor type, an optimizer of st.optim, a runner, an Arena, a Dim or a function, "
            f"got {shown(subject)}"
        )
    if not args and not kwargs:
        name = getattr(subject, "__name__", type(subject).__name__)
        if f"{getattr(subject, '__module__', '')}.".startswith("subtensors.") and not isinstance(subject, Fused):
            return f"{name}{signature_of(subject)}: {_purpose(subject)}"
        title = repr(subject) if isinstance(subject, Fused) else f"{name} of plain tensors is plain torch"
        return f"{title}; st.explain({name}, *arguments) says what a call runs, without running it"
    try:
        padded = tree_find(PaddedTensor, (args, kwargs))
    except RecursionError:
        raise ValueError("explain takes the arguments of a call; one is a container that holds itself") from None
    return explain_padded_call(subject, args, kwargs) if padded else explain_call(subject, *args, **kwargs)


def _purpose(subject: object) -> str:
    """Return the first line of a docstring."""
    return (inspect.getdoc(subject) or "").partition("\n")[0]


def _shortened(numbers: Sequence[int]) -> str:
    """Return numbers as text, only the first and last of many."""
    return ", ".join(map(str, numbers if len(numbers) <= 8 else [*numbers[:4], "...", numbers[-1]]))


def explain_loss(loss: Tensor) -> str:
    """Describe the passes over chunks that computed a plain tensor: of each its chunks, bytes, inputs and ops.

    Example:
        >>> import torch, subtensors as st
        >>> print(explain_loss(st.chunk(torch.ones(6, 2, requires_grad=True), chunks=3).exp().sum()))
        3 chunks of 2 of 6 rows, 32 B a chunk
          reads by rows float32[6, 2]
          exp.default -> float32[6, 2]
          sum.dim_IntList -> float32[] (sum over chunks)
    """
    plans: list[ChunkSchedule | LoweredPlan] = []
    seen, stack = set[object](), [loss.grad_fn]
    while stack:
        function = stack.pop()
        if function is None or function in seen:
            continue
        seen.add(function)
        if isinstance(plan := getattr(function, "plan", None), ChunkSchedule | LoweredPlan):
            plans.append(plan)
        stack.extend(following for following, _ in function.next_functions)
    return "\n".join(plan.describe() for plan in plans) or "a plain tensor; nothing of its graph was chunked"


def explain_padding(x: PaddedTensor) -> str:
    """Describe each padded dim in a line, and the known contents of the padding in another.

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


def explain_padded_call(func: Callable[..., PyTree], args: Args, kwargs: Kwargs) -> str:
    """Describe the rules that a call of a torch function takes, a line an op, found by running it on shapes alone.

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
