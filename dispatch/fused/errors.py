"""Errors for math that can't be fused, with the line of the user's source that asked for it."""

from __future__ import annotations

import dis
import functools
import linecache
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import NoReturn

from torch._ops import OpOverload

from subtensors.dispatch.ops.errors import RuleError
from subtensors.dispatch.ops.op_classes import OpClass, op_class

_PACKAGES = frozenset({"builtins", "torch", "numpy", "triton", "sympy", "optree", "subtensors"})

_OF_MATRICES = "; an optimizer's math of whole matrices is that of st.optim.MatrixOptimizer"

ADVICE = {
    OpClass.COPY: "it moves elements, and fused math sees one at a time: call it on the TensorList itself",
    OpClass.VIEW: "fused math sees one element at a time: take the view before the call" + _OF_MATRICES,
    OpClass.REDUCTION: "only whole-tensor reductions can be fused: reduce over dimensions on the TensorList itself"
    + _OF_MATRICES,
    OpClass.RANDOM: "draw the numbers before the call and pass them as an argument",
    OpClass.SCATTER_GATHER: "choose with torch.where(condition, a, b), or call it on the TensorList itself",
    OpClass.CONTRACTION: "call it on the TensorList itself, where it is batched by shape" + _OF_MATRICES,
}
"""Advice for each class of ops that fused math can't call."""


@functools.cache
def is_library(module: str | None) -> bool:
    """Return whether a module, by name, is of Python, torch or another library that holds no values of the user's."""
    name = str(module).partition(".")[0]
    if name in _PACKAGES:
        return True
    if name not in sys.stdlib_module_names:
        return False
    file = getattr(sys.modules.get(name), "__file__", None)  # a user's own file may have the name of one of Python's
    return file is None or Path(file).resolve().is_relative_to(Path(sysconfig.get_path("stdlib")).resolve())


def source_line(frames: Iterable[tuple[FrameType, int]]) -> str:
    """The innermost line of the user's own source, as `file:line: text`."""
    named = [(frame, line, str(frame.f_globals.get("__name__"))) for frame, line in frames]
    own = [step for step in named if not is_library(step[2])]
    own = own or [step for step in named if step[2].startswith("subtensors.optim.")]  # whose math is as a user's
    if not own:
        return "unknown line"
    frame, line, _ = own[-1]
    path = frame.f_code.co_filename
    linecache.checkcache(path)  # it may have been edited and reloaded
    return f"{path}:{line}: {linecache.getline(path, line, frame.f_globals).strip()}"


def name_and_line(name: str, codes: Sequence[CodeType]) -> str:
    """The name of a value, and the first line of these codes that reads it."""
    last = name.partition("[")[0].rpartition(".")[2]
    for code in codes:
        line = next((line for line, used in _lines_with_names(code) if used == last), 0)
        if line:
            return f"{name}\n  at {code.co_filename}:{line}: {linecache.getline(code.co_filename, line).strip()}"
    return name


def _lines_with_names(code: CodeType) -> Iterator[tuple[int, object]]:
    for instruction in dis.get_instructions(code):
        if instruction.opname.startswith("LOAD_") and instruction.positions and instruction.positions.lineno:
            yield instruction.positions.lineno, instruction.argval
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _lines_with_names(inner)


def name_of(function: Callable[..., object]) -> str:
    """The name of a function: for a partial its function's, for another callable object its type's."""
    if isinstance(function, functools.partial):
        return name_of(function.func)
    return getattr(function, "__name__", type(function).__name__)


def refuse(reason: str, advice: str) -> NoReturn:
    """Raise RuleError with the innermost line of the user's own source."""
    frames = list(traceback.walk_stack(sys._getframe(1)))[::-1]
    raise RuleError(f"this math cannot be fused: {reason}\n  at {source_line(frames)}\n  instead: {advice}")


def refuse_op(op: OpOverload) -> NoReturn:
    """Raise RuleError for an op that fused math has no rule for."""
    kind = op_class(op)
    refuse(f"{op} ({kind.value}) has no rule here", ADVICE.get(kind, "call it on the TensorList itself"))


def refuse_value(how: str) -> NoReturn:
    """Raise RuleError for a value that is read on the host."""
    refuse(
        f"it needs the value of a tensor on the host ({how})",
        "keep the decision on the device: torch.where(condition, a, b); of a tensor, x.sqrt(), not math.sqrt(x)",
    )
