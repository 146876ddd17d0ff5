"""The source of a program: Python statements, one a step, which are a constant of the compiler's graph.

    v0 = chunk(t[0], 0, None, 512, None, True, False)
    with autocast("cuda", torch.bfloat16): v1 = F.linear(v0, t[1])
    v2 = Tensor.view(v1, i[0], i[1])
    return F.cross_entropy(v2, t[2])

They are on one line, with `BREAK` between them: compilers copy it into comments of the code they generate.

Tensors `t`, whole numbers `i` and other numbers `x` are arguments: sizes may be the compiler's symbols.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from subtensors.dispatch.ops.tree import Kwargs, PyTree

BREAK = " ;; "
"""The separator between statements."""


class ProgramStep:
    """One call of a program.

    Args:
        callee: "F.linear", "torch.logsumexp", "Tensor.float".
        args, kwargs: its arguments: steps, tensors, constants, and tuples, lists and slices of them.
        before: the steps that it depends on, in order.
        index: the index of the result, of several; None for one result.
    """

    def __init__(
        self,
        callee: str,
        args: Sequence[PyTree],
        kwargs: Kwargs,
        before: list[ProgramStep],
        index: int | None = None,
    ) -> None:
        self.callee, self.args, self.kwargs, self.before, self.index = callee, args, kwargs, before, index
        self.modes = _modes()


def _modes() -> str:
    """Return the `with` prefix for the modes in which a step is called: no gradients, autocast."""
    modes = [] if torch.is_grad_enabled() else ["torch.no_grad()"]
    for kind in ("cpu", "cuda"):
        if torch.is_autocast_enabled(kind):
            modes.append(f'autocast("{kind}", {torch.get_autocast_dtype(kind)})')
    return "with " + ", ".join(modes) + ": " if modes else ""


class ProgramSource:
    """The source under construction, and the tensors and numbers that it reads."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.ints: list[int] = []
        self.floats: list[float] = []
        self._steps: list[ProgramStep] = []

    def write(self, last: ProgramStep) -> str:
        """Return the source of a program that returns the result of its last step."""
        statements: list[str] = []
        for step in last.before:
            self._steps.append(step)
            statements.append(f"{step.modes}v{len(self._steps) - 1} = {self._call(step)}")
        statements.append(f"{last.modes}return {self._call(last)}")
        return BREAK.join(statements)

    def _call(self, step: ProgramStep) -> str:
        positional = "".join([self._argument(x) + ", " for x in step.args])
        named = "".join([f"{key}={self._argument(x)}, " for key, x in step.kwargs.items()])
        index = "" if step.index is None else f"[{step.index}]"
        return f"{step.callee}({positional}{named}){index}"

    def _argument(self, x: PyTree) -> str:
        """Return the source of an argument."""
        if x is None or x is True or x is False:
            return str(x)
        if x is Ellipsis:
            return "..."
        if isinstance(x, ProgramStep):
            return f"v{_index_of(x, self._steps)}"
        if isinstance(x, Tensor):
            index = _index_of(x, self.tensors)
            if index == len(self.tensors):
                self.tensors.append(x)
            return f"t[{index}]"
        if isinstance(x, slice):
            return f"slice({self._argument(x.start)}, {self._argument(x.stop)}, {self._argument(x.step)})"
        if isinstance(x, (tuple, list)):
            return "(" + "".join([self._argument(y) + ", " for y in x]) + ")"
        if isinstance(x, str):
            return repr(x)
        if isinstance(x, (torch.dtype, torch.memory_format)):
            return str(x)
        if isinstance(x, torch.device):
            return f'torch.device("{x}")'
        if isinstance(x, int):
            self.ints.append(x)
            return f"i[{len(self.ints) - 1}]"
        self.floats.append(x)
        return f"x[{len(self.floats) - 1}]"


def _index_of(x: object, among: Sequence[object]) -> int:
    """Return the index of an object among others, by identity; their number if it is not among them."""
    for index, other in enumerate(among):
        if other is x:
            return index
    return len(among)


def merged_steps(operands: Sequence[ProgramStep]) -> list[ProgramStep]:
    """Return the steps of all operands, and then themselves, each once and in order."""
    steps: list[ProgramStep] = []
    for operand in operands:
        for step in [*operand.before, operand]:
            if _index_of(step, steps) == len(steps):
                steps.append(step)
    return steps
