"""The path that sizes take through a program: the conditions on them, found in one run without values.

The program runs on fake tensors whose sizes are symbols with a value each. Each branch on a size, in Python or inside
torch, takes the side that the value decides, and its condition is recorded. The conditions together describe all sizes
that take the same path through the program, whether it returns or raises.
"""

from __future__ import annotations

import dis
import itertools
import logging
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, TracebackType
from unittest import mock

import sympy
import torch
from torch import nn
from torch.func import functional_call

from subtensors.dispatch.ops.tree import tree_map_only
from subtensors.dispatch.sizes.expressions import size_symbol
from subtensors.dispatch.sizes.symbolic_sizes import ConcreteSizes, SymbolicSizes, is_undecided_without_values
from subtensors.dispatch.sizes.torch_calls import Difference, RecordedCalls, TorchCall


@dataclass(frozen=True)
class ProgramPath:
    """One path through a program.

    Args:
        conditions: in the symbols of `size_symbol`; all hold for the sizes that take it.
        refusal: the error at its end, or what it waits for; None where the program returns.
        is_decided: whether sizes alone decide how the path ends.
        calls: the torch functions that are called on it.
    """

    conditions: tuple[sympy.Basic, ...]
    refusal: str | None
    is_decided: bool = True
    calls: tuple[TorchCall, ...] = field(default=(), repr=False, compare=False)


Arguments = Callable[[ConcreteSizes], Sequence[object]]


def trace_path(program: Callable[..., object], arguments: Arguments, sizes: Mapping[str, int]) -> ProgramPath:
    """Return the path that these sizes take through a program.

    A refusal is confirmed by a run without symbols: what torch refuses only on symbols is none of the program's, and
    the path is then that of these sizes alone.

    Args:
        program: the program. Its arguments are fake tensors, and so are the parameters and buffers of a module.
        arguments: makes its arguments from the sizes, within their mode.
        sizes: a value for each name.

    Example:
        >>> import torch
        >>> def halves(x):
        ...     return x.view(2, -1)
        >>> trace_path(halves, lambda s: [torch.empty(s.numbers["n"])], {"n": 7})
        ProgramPath(conditions=(Ne(Mod(n, 2), 0),), refusal="RuntimeError: shape '[2, -1]' is invalid ...", ...)
    """
    path = _symbolic_path(program, arguments, sizes)
    if path is not None:
        return path
    error, calls = _run(program, arguments, ConcreteSizes(sizes))
    alone = tuple(sympy.Eq(size_symbol(name), size) for name, size in sizes.items())
    return ProgramPath(alone, None if error is None else error_message(error), calls=calls)


def refusal_by_real_calls(program: Callable[..., object], arguments: Arguments, sizes: Mapping[str, int]) -> str | None:
    """Return the error of a program at these sizes, with real tensors deciding the calls that have empty ones."""
    concrete = ConcreteSizes(sizes)

    def outcome(call: TorchCall) -> Difference | None:
        with concrete.real():
            difference = call.difference()
        if difference is None or difference.refusal is not None:
            return difference
        return Difference(None, tree_map_only(torch.Tensor, concrete.fake, difference.result))

    error, _ = _run(program, arguments, concrete, outcome)
    return None if error is None else error_message(error)


def _symbolic_path(
    program: Callable[..., object], arguments: Arguments, sizes: Mapping[str, int]
) -> ProgramPath | None:
    """Return the path of symbolic sizes; None where they end otherwise than the same sizes as numbers do."""
    symbolic = SymbolicSizes(sizes)
    error, recorded = _run(program, arguments, symbolic)
    names = {symbol: size_symbol(name) for symbol, name in symbolic.symbols.items()}
    # Those met while making the arguments count: torch goes on with what it has learned there, such as `Eq(n, 0)`.
    found = [guard.xreplace(names) for guard in symbolic.guards]
    conditions = tuple(c for c in dict.fromkeys(found) if c != sympy.true)
    calls = tuple(call.renamed(names) for call in recorded)
    if not _is_in_message(symbolic.texts, error):
        return None  # the program may branch on the text, which is that of a symbol here
    if error is None:
        waits = "the program's checks depend on values" if symbolic.waits_for_values else None
        return ProgramPath(conditions, waits, waits is None, calls)
    confirmed, _ = _run(program, arguments, ConcreteSizes(sizes))
    if confirmed is not None and is_undecided_without_values(confirmed):
        return ProgramPath(conditions, error_message(confirmed), is_decided=False)
    is_same = confirmed is not None and (type(confirmed), _places(confirmed)) == (type(error), _places(error))
    if not is_same or _is_raised_by_arithmetic(error):
        return None
    refusal = error_message(error)
    for symbol, name in sorted(names.items(), key=lambda pair: -len(str(pair[0]))):
        refusal = refusal.replace(str(symbol), str(name))
    return ProgramPath(conditions, refusal, calls=calls)


def _run(
    program: Callable[..., object],
    arguments: Arguments,
    sizes: ConcreteSizes,
    decided_by_real: Callable[[TorchCall], Difference | None] = lambda call: None,
) -> tuple[Exception | None, tuple[TorchCall, ...]]:
    """Run a program on tensors without values; return what it raises, and its calls, as `RecordedCalls` does."""
    record = RecordedCalls(sizes.expression, decided_by_real)
    error = None
    with mock.patch.object(_FAKE_TENSOR_LOG, "disabled", True), sizes.mode():
        given = arguments(sizes)
        state = {}
        if isinstance(program, nn.Module):
            # A module that counts in a buffer, as batch norm does, would change the caller's.
            tensors = itertools.chain(program.named_parameters(), program.named_buffers())
            state = {name: sizes.fake(tensor) for name, tensor in tensors}
        try:
            with record:
                functional_call(program, state, tuple(given)) if isinstance(program, nn.Module) else program(*given)
        except Exception as raised:  # whatever the program raises at sizes that it does not accept
            error = raised
    return error, tuple(record.calls)


def error_message(error: Exception) -> str:
    """Return the type of an error and the first line of its text."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _is_in_message(texts: Sequence[tuple[CodeType, int]], error: Exception | None) -> bool:
    """Return whether all instructions that took the text of a size lead straight to the `raise` of an error."""
    if not texts or error is None:
        return not texts
    *_, last = _steps(error)
    code, end = last.tb_frame.f_code, last.tb_lasti
    start = min(place for _, place in texts)
    between = [i for i in dis.get_instructions(code) if start <= i.offset <= end]
    is_straight = bool(between) and not any(i.opcode in _JUMPS for i in between)
    return is_straight and between[-1].opname == "RAISE_VARARGS" and all(own is code for own, _ in texts)


def _steps(error: Exception | None) -> Iterator[TracebackType]:
    step = None if error is None else error.__traceback__
    while step is not None:
        yield step
        step = step.tb_next


def _places(error: Exception) -> list[tuple[CodeType, int]]:
    """Return where in the program an error was raised: its frames up to torch's own, each with an instruction."""
    places = [(step.tb_frame.f_code, step.tb_lasti) for step in _steps(error)]
    return [p for p in places if not p[0].co_filename.startswith(_TORCH) or p[0].co_filename.startswith(_TORCH_NN)]


def _is_raised_by_arithmetic(error: Exception) -> bool:
    """Return whether arithmetic of symbols raised an error, as `1 // n` does: it records no condition for that."""
    *_, (frame, _line) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__")).startswith(("torch.fx.experimental.", "torch.utils._sympy.", "sympy."))


_JUMPS = {*dis.hasjrel, *dis.hasjabs}

_TORCH = str(Path(torch.__file__).parent)
_TORCH_NN = str(Path(nn.__file__).parent)

_FAKE_TENSOR_LOG = logging.getLogger("torch._subclasses.fake_tensor")
"""Torch's log of errors on fake tensors, which are an expected outcome here."""
