"""The text of a program: statements of Python, one a step, that a compiler carries as a constant.

    v0 = chunk(t[0], 0, None, 512, None, True, False)
    with autocast("cuda", torch.bfloat16): v1 = F.linear(v0, t[1])
    v2 = Tensor.view(v1, i[0], i[1])
    return F.cross_entropy(v2, t[2])

They stand on one line, `BREAK` between them: compilers copy it into comments of what they write.

Tensors `t`, whole numbers `i` and other numbers `x` are given to the function: sizes may be the compiler's symbols.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

BREAK = " ;; "
"""The separator between statements."""


class ProgramStep:
    """One call of a program.

    Args:
        callee: "F.linear", "torch.logsumexp", "Tensor.float".
        args, kwargs: its arguments: steps, tensors, constants, and tuples, lists and slices of them.
        before: the steps that it depends on, in order.
        place: which of several results is meant.
    """

    def __init__(
        self,
        callee: str,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        before: list[ProgramStep],
        place: int | None = None,
    ) -> None:
        self.callee, self.args, self.kwargs, self.before, self.place = callee, args, kwargs, before, place
        self.modes = _modes()


def _modes() -> str:
    """The `with` prefix for the modes in which a step is called: no gradients, autocast."""
    modes = [] if torch.is_grad_enabled() else ["torch.no_grad()"]
    for kind in ("cpu", "cuda"):
        if torch.is_autocast_enabled(kind):
            modes.append(f'autocast("{kind}", {torch.get_autocast_dtype(kind)})')
    return "with " + ", ".join(modes) + ": " if modes else ""


class ProgramText:
    """A text under construction, and the tensors and numbers that it reads."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.ints: list[int] = []
        self.floats: list[float] = []
        self._steps: list[ProgramStep] = []

    def of(self, last: ProgramStep) -> str:
        """The text of a program that returns the result of its last step."""
        statements: list[str] = []
        for step in last.before:
            self._steps.append(step)
            statements.append(f"{step.modes}v{len(self._steps) - 1} = {self._call(step)}")
        statements.append(f"{last.modes}return {self._call(last)}")
        return BREAK.join(statements)

    def _call(self, step: ProgramStep) -> str:
        written = "".join([self._written(x) + ", " for x in step.args])
        named = "".join([f"{key}={self._written(x)}, " for key, x in step.kwargs.items()])
        place = "" if step.place is None else f"[{step.place}]"
        return f"{step.callee}({written}{named}){place}"

    def _written(self, x: Any) -> str:
        """The text of an argument."""
        if x is None or x is True or x is False:
            return str(x)
        if x is Ellipsis:
            return "..."
        if isinstance(x, ProgramStep):
            return f"v{_place(x, self._steps)}"
        if isinstance(x, Tensor):
            place = _place(x, self.tensors)
            if place == len(self.tensors):
                self.tensors.append(x)
            return f"t[{place}]"
        if isinstance(x, slice):
            return f"slice({self._written(x.start)}, {self._written(x.stop)}, {self._written(x.step)})"
        if isinstance(x, (tuple, list)):
            return "(" + "".join([self._written(y) + ", " for y in x]) + ")"
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


def _place(x: Any, among: Sequence[Any]) -> int:
    """The index of an object among others, by identity; their number if it is not among them."""
    for place, other in enumerate(among):
        if other is x:
            return place
    return len(among)


def merged(operands: Sequence[ProgramStep]) -> list[ProgramStep]:
    """The steps of all operands, themselves last, each once and in order."""
    steps: list[ProgramStep] = []
    for operand in operands:
        for step in [*operand.before, operand]:
            if _place(step, steps) == len(steps):
                steps.append(step)
    return steps
