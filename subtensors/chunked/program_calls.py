"""The calls that the program of a traced chunk can hold: their kinds, and the expressions by which it calls them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch._ops import OpOverload

from subtensors.dispatch.ops.lazy_storage import fill_padding, mask_gradient
from subtensors.dispatch.ops.op_classes import OpClass, op_class

VIEWS = frozenset(
    """view reshape view_as reshape_as flatten unflatten transpose swapaxes swapdims permute movedim moveaxis t
    unsqueeze squeeze expand expand_as narrow select detach alias contiguous to type_as float double half bfloat16
    __getitem__ T mT H mH real imag""".split()
)
"""Calls whose result may share the memory of its operand."""

_STEPS = VIEWS | frozenset(
    """linear matmul mm bmm einsum layer_norm rms_norm group_norm softmax log_softmax softmin normalize relu relu6 gelu
    silu mish elu selu celu glu leaky_relu prelu hardtanh hardswish hardsigmoid log_sigmoid softplus softsign softshrink
    hardshrink tanhshrink threshold embedding one_hot pad long int bool clone where clamp clip square cat concat stack
    tril triu diagonal diag put copied cumsum logcumsumexp flip roll dropout truediv rtruediv rdiv floordiv rfloordiv
    mod rmod invert and or xor fill_padding mask_gradient""".split()
)
"""Calls, besides pointwise ops, whose result has the rows of their operand and is as wide."""

_ENDS = frozenset(
    """cross_entropy nll_loss kl_div mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy
    binary_cross_entropy_with_logits soft_margin_loss poisson_nll_loss gaussian_nll_loss cosine_similarity
    pairwise_distance cosine_embedding_loss margin_ranking_loss triplet_margin_loss multi_margin_loss
    multilabel_margin_loss multilabel_soft_margin_loss hinge_embedding_loss sum mean nansum nanmean prod logsumexp
    amax amin argmax argmin norm vector_norm var std any all count_nonzero gather take_along_dim dot trace
    index_select""".split()
)
"""Calls that end a program: their result is a number, or a few numbers a row."""

_SPLITS = frozenset("chunk split unbind tensor_split".split())
"""Calls with several results, which are views."""

UNSUPPORTED = frozenset("requires_grad_ register_hook register_post_accumulate_grad_hook retain_grad backward".split())


CallKind: TypeAlias = Literal["step", "end", "split", ""]
"""A step of a program, its end, a step with several results; or "" for a call that no program can hold."""


@functools.cache
def call_kind(name: str) -> CallKind:
    """Return the kind of a call by the name of its function."""
    bare = name.strip("_")
    kinds: tuple[tuple[CallKind, frozenset[str]], ...] = (("split", _SPLITS), ("end", _ENDS), ("step", _STEPS))
    for kind, names in kinds:
        if name in names or (bare in names and name.startswith("__")):
            return kind
    packets = (getattr(torch.ops.aten, n, None) for n in (bare, bare.removeprefix("r")))
    packet = next((p for p in packets if p is not None), None)
    classes = {op_class(getattr(packet, o)) for o in packet.overloads()} if packet is not None else set()
    if classes == {OpClass.REDUCTION}:
        return "end"
    return "step" if OpClass.POINTWISE in classes and OpClass.RANDOM not in classes else ""


def op_kind(op: OpOverload) -> CallKind:
    """Return the kind of a call of an op, as the rules of another type call it."""
    if len(op._schema.returns) > 1 or op._schema.is_mutable:
        return ""
    kinds: dict[OpClass, CallKind] = {OpClass.REDUCTION: "end", OpClass.POINTWISE: "step", OpClass.VIEW: "step"}
    found = kinds.get(op_class(op), "") or call_kind(op.overloadpacket.__name__)
    return found if op.is_view or found != "split" else ""


def callee(function: Callable[..., object], name: str) -> str:
    """Return the expression by which a program calls a function of this name; empty if there is none."""
    if isinstance(function, OpOverload):
        return f"torch.ops.{function.namespace}.{name}.{function._overloadname}"
    if function in (fill_padding, mask_gradient):
        return name
    if getattr(F, name, None) is function:
        return f"F.{name}"
    if getattr(torch, name, None) is function:
        return f"torch.{name}"
    module, _, rest = name.partition("_")
    if rest and hasattr(getattr(torch, module, None), rest):
        return f"torch.{module}.{rest}"  # "linalg_norm"
    homes = {"torch._C._nn": torch._C._nn, "Tensor": torch.Tensor}
    return next((f"{home}.{name}" for home, space in homes.items() if hasattr(space, name)), "")
