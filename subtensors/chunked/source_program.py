"""The source of a program: Python statements, one a step, which are a constant of the compiler's graph.

    v0 = chunk(t[0], 0, None, 512, None, True, False)
    with autocast("cuda", torch.bfloat16): v1 = F.linear(v0, t[1])
    v2 = Tensor.view(v1, i[0], i[1])
    return F.cross_entropy(v2, t[2])

They are on one line, with `BREAK` between them: compilers copy it into comments of the code they generate.

Tensors `t`, whole numbers `i` and other numbers `x` are arguments: sizes may be the compiler's symbols.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from subtensors.dispatch.ops.tree import Kwargs, PyTree, tree_find

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
    """The source of the program that ends with a step, and the tensors and numbers that it reads.

    Args:
        last: the step whose result the program returns.
    """

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
        if x is None or x is True or x is False:
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
        if isinstance(x, (torch.dtype, torch.memory_format)):
            return str(x)
        if isinstance(x, torch.device):
            return f'torch.device("{x}")'
        if isinstance(x, (int, torch.SymInt)):
            self.ints.append(x)
            return f"i[{len(self.ints) - 1}]"
        self.floats.append(x)
        return f"x[{len(self.floats) - 1}]"
