"""The source of a program: Python statements, one a step, which are a constant of the compiler's graph.

    v0 = chunk(t[0], 0, None, 512, None, True, False)
    with autocast("cuda", torch.bfloat16): v1 = F.linear(v0, t[1])
    v2 = Tensor.view(v1, i[0], i[1])
    return F.cross_entropy(v2, t[2])

They are on one line, with `BREAK` between them: compilers copy it into comments of the code they generate.

Tensors `t`, whole numbers `i` and other numbers `x` are arguments: sizes may be the compiler's symbols. The tables say
which calls a program can hold.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload

from subtensors.dispatch.ops.lazy_storage import fill_padding, mask_gradient
from subtensors.dispatch.ops.op_classes import OpClass, op_class
from subtensors.dispatch.ops.tree import Kwargs, PyTree, tree_find

VIEWS = frozenset(
    """view reshape view_as reshape_as flatten unflatten transpose swapaxes swapdims permute movedim moveaxis t
    unsqueeze squeeze expand expand_as narrow select detach alias contiguous to type_as float double half bfloat16
    __getitem__ T mT H mH real imag""".split()
)
"""Calls whose result may share the memory of its operand."""

_STEPS = VIEWS | frozenset(
    """linear matmul mm bmm einsum layer_norm rms_norm group_norm softmax log_softmax softmin normalize glu prelu
    softsign tanhshrink embedding one_hot pad long int bool cat concat stack tril triu diagonal diag put copied cumsum
    logcumsumexp flip roll dropout truediv rtruediv floordiv rfloordiv mod rmod invert and or xor fill_padding
    mask_gradient""".split()
)
"""Calls, besides pointwise ops, whose result has the rows of their operand and is as wide."""

_ENDS = frozenset(
    """cross_entropy gaussian_nll_loss cosine_similarity pairwise_distance multilabel_soft_margin_loss sum vector_norm
    any all gather take_along_dim dot trace index_select""".split()
)
"""Calls, besides reductions and their losses, that end a program: their result is a number, or a few numbers a row."""

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
    if hasattr(torch.Tensor, name) and not callable(getattr(torch.Tensor, name)):
        return f"Tensor.{name}.__get__"  # Dynamo names an attribute's getter by the attribute since 2.15
    homes = {"torch._C._nn": torch._C._nn, "Tensor": torch.Tensor}
    return next((f"{home}.{name}" for home, space in homes.items() if hasattr(space, name)), "")


BREAK = " ;; "
"""The separator between statements."""


_numbers = itertools.count()


class ProgramStep:
    """One call of a program.

    Args:
        callee: "F.linear", "torch.logsumexp", "Tensor.float".
        args, kwargs: its arguments: steps, tensors, constants, and tuples, lists and slices of them.
        index: the index of the result, of several; None for one result.
    """

    def __init__(self, callee: str, args: Sequence[PyTree], kwargs: Kwargs, index: int | None = None) -> None:
        self.callee, self.args, self.kwargs, self.index = callee, tuple(args), kwargs, index
        self.modes = _modes()
        self.number = next(_numbers)


def _modes() -> str:
    """Return the `with` prefix for the modes in which a step is called: no gradients, autocast."""
    modes = [] if torch.is_grad_enabled() else ["torch.no_grad()"]
    for kind in ("cpu", "cuda"):
        if torch.is_autocast_enabled(kind):
            modes.append(f'autocast("{kind}", {torch.get_autocast_dtype(kind)})')
    return "with " + ", ".join(modes) + ": " if modes else ""


def _steps_before(last: ProgramStep) -> list[ProgramStep]:
    """Return the steps that a step depends on, in the order in which they were called."""
    found: dict[int, ProgramStep] = {}
    stack = [last]
    while stack:
        step = stack.pop()
        operands = tree_find(ProgramStep, (step.args, step.kwargs))
        stack += [x for x in operands if x.number not in found]
        found.update({x.number: x for x in operands})
    return [found[number] for number in sorted(found)]


class ProgramSource:
    """The source of the program that ends with a step, and the tensors and numbers that it reads."""

    def __init__(self, last: ProgramStep) -> None:
        self.tensors: list[Tensor] = []
        self.ints: list[int | torch.SymInt] = []
        self.floats: list[float] = []
        self._variables: dict[int, str] = {}
        statements: list[str] = []
        for k, step in enumerate(_steps_before(last)):
            statements.append(f"{step.modes}v{k} = {self._call(step)}")
            self._variables[step.number] = f"v{k}"
        self.text = BREAK.join([*statements, f"{last.modes}return {self._call(last)}"])

    def _call(self, step: ProgramStep) -> str:
        positional = "".join([self._argument(x) + ", " for x in step.args])
        named = "".join([f"{key}={self._argument(x)}, " for key, x in step.kwargs.items()])
        index = "" if step.index is None else f"[{step.index}]"
        return f"{step.callee}({positional}{named}){index}"

    def _argument(self, x: PyTree) -> str:
        """Return the source of an argument."""
        if x is None or isinstance(x, (bool, torch.dtype, torch.memory_format)):
            return str(x)
        if x is Ellipsis:
            return "..."
        if isinstance(x, ProgramStep):
            return self._variables[x.number]
        if isinstance(x, Tensor):
            index = next((k for k, t in enumerate(self.tensors) if t is x), len(self.tensors))
            if index == len(self.tensors):
                self.tensors.append(x)
            return f"t[{index}]"
        if isinstance(x, slice):
            return f"slice({self._argument(x.start)}, {self._argument(x.stop)}, {self._argument(x.step)})"
        if isinstance(x, (tuple, list)):
            return "(" + "".join([self._argument(y) + ", " for y in x]) + ")"
        if isinstance(x, str):
            return repr(x)
        if isinstance(x, torch.device):
            return f'torch.device("{x}")'
        if isinstance(x, (int, torch.SymInt)):
            self.ints.append(x)
            return f"i[{len(self.ints) - 1}]"
        self.floats.append(x)
        return f"x[{len(self.floats) - 1}]"
