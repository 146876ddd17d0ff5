"""Tracing of straight-line math once, on stand-ins for one element of every list, into a program.

The stand-ins have a dtype and an extent but no values, so reading a value or a shape is refused with the line of the
user's source that asked for it.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from subtensors.dispatch.fused.errors import name_of, source_line
from subtensors.dispatch.fused.op_tracer import OpTracer
from subtensors.dispatch.fused.proxies import ProxySlot, ProxyTensor
from subtensors.dispatch.ops.errors import RuleError
from subtensors.dispatch.torch_internals import ops
from subtensors.kernels.fused.program import Parameter, Program, Shape


@dataclass
class Trace:
    """A program with the data that the host needs to run it."""

    program: Program
    scalars: tuple[Callable[[Sequence[float]], float], ...]
    """For each of the program's live numbers, the function that computes it from the numbers of the call."""
    expressions: tuple[str, ...]
    """The same, as text."""
    results: Any
    """The result of the function: `Returned` leaves in a pytree of tuples, lists and dicts."""
    unlowered: tuple[str, ...] = ()
    """Ops with no Triton formula: the program then runs through torch."""


@dataclass(frozen=True)
class Returned:
    """A leaf of the result: a parameter given back, or an output of the program."""

    index: int
    is_parameter: bool


def trace(
    function: Callable[..., Any],
    parameters: Sequence[Parameter],
    numbers: Sequence[type[float] | type[int]],
    call: Callable[[list[Any], list[Any]], tuple[tuple[Any, ...], dict[str, Any]]],
    device: torch.device,
) -> Trace:
    """Record what `function` does to one element of every list.

    Args:
        function: straight-line math on tensors and numbers.
        parameters: descriptions of the tensors.
        numbers: the kinds of the Python numbers whose values stay live.
        call: puts tensors and numbers in their places: `(args, kwargs)` for `function`.
        device: where the elements live.

    Returns:
        The program, how its live numbers are computed, and the result of the function.

    Raises:
        RuleError: the math is not straight-line, or holds an op without a rule; with the source line.
    """
    tracer = OpTracer(device, tuple(parameters))
    live = ops.LiveNumbers()
    stand_ins = [ProxyTensor(ProxySlot(i), p.dtype, p.extent, tracer) for i, p in enumerate(parameters)]
    args, kwargs = call(list(stand_ins), [live.new(kind) for kind in numbers])
    with torch.no_grad(), tracer, _explained():
        result = function(*args, **kwargs)
    outputs: list[int] = []
    results = _map_nest(lambda leaf: _returned(leaf, stand_ins, outputs, function), result)
    program = Program(
        name=name_of(function),
        parameters=tuple(parameters),
        instructions=tuple(tracer.instructions),
        scalars=tuple(s.type for s in tracer.scalars.values()),
        stores={i: s.cell.value for i, s in enumerate(stand_ins) if s.cell.value != i},
        outputs=tuple(outputs),
    )
    evaluators = tuple(live.compile(expression) for expression in tracer.scalars)
    expressions = tuple(map(str, tracer.scalars))
    return Trace(program, evaluators, expressions, results, tuple(dict.fromkeys(tracer.unlowered)))


@contextmanager
def _explained() -> Iterator[None]:
    """A context that adds the line of the user's source to errors: a live number's value read, or the user's own."""
    try:
        yield
    except ops.undecidable() as error:
        raise RuleError(
            "this maths cannot be fused: it needs the value of a Python number while it is traced "
            f"(an `if`, `max`, `math.sqrt` or `float()` on it)\n  at {_line_of(error)}\n"
            "  instead: compute with ** and torch functions, or pass a bool, which is part of the signature"
        ) from None
    except RuleError:
        raise
    except Exception as error:
        error.add_note(f"while the maths was traced, on stand-ins with a shape of their own\n  at {_line_of(error)}")
        raise


def _line_of(error: Exception) -> str:
    return source_line(traceback.walk_tb(error.__traceback__))


def _returned(
    leaf: Any, stand_ins: Sequence[ProxyTensor], outputs: list[int], function: Callable[..., Any]
) -> Returned | None:
    """Classify a leaf of the result as a parameter or an output; append an output's value number to `outputs`."""
    if leaf is None:
        return None
    for i, stand_in in enumerate(stand_ins):
        if leaf is stand_in:
            return Returned(i, is_parameter=True)
    if not isinstance(leaf, ProxyTensor):
        raise RuleError(f"fused maths returns tensors, got {type(leaf).__name__} from {name_of(function)}")
    if leaf.extent is Shape.PER_BLOCK:
        raise RuleError(f"fused maths returns tensors, and {name_of(function)} numbers per block: store them instead")
    outputs.append(leaf.cell.value)
    return Returned(len(outputs) - 1, is_parameter=False)


def _map_nest(function: Callable[[Any], Any], nest: Any) -> Any:
    """`function` of every leaf of nested tuples, lists and dicts."""
    if isinstance(nest, dict):
        return {key: _map_nest(function, value) for key, value in nest.items()}
    if isinstance(nest, list | tuple):
        mapped = [_map_nest(function, value) for value in nest]
        return type(nest)(*mapped) if hasattr(nest, "_fields") else type(nest)(mapped)
    return function(nest)
