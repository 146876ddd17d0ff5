"""Tracing of straight-line math once, on proxies of one element of every list, into a program.

The proxies have a dtype and a granularity but no values, so reading a value or a shape is refused with the line of the
user's source that asked for it.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import optree
import torch

from subtensors.dispatch.fused.errors import name_of, source_line
from subtensors.dispatch.fused.op_tracer import OpTracer
from subtensors.dispatch.fused.proxies import EXAMPLE_SHAPES, OTHER_SHAPES, ProxySlot, ProxyTensor
from subtensors.dispatch.fused.symbolic_scalars import ValueNeeded, compile_expression, symbolic_scalar
from subtensors.dispatch.ops.errors import RuleError
from subtensors.dispatch.ops.tree import Args, Kwargs, PyTree
from subtensors.kernels.fused.program import Parameter, Program, Shape


@dataclass
class Trace:
    """A program with the data that the host needs to run it."""

    program: Program
    scalars: tuple[Callable[[Sequence[float]], float], ...]
    """For each of the program's dynamic scalars, the function that computes it from the numbers of the call."""
    expressions: tuple[str, ...]
    """The expressions of the dynamic scalars, as text."""
    results: tuple[Returned | None, ...]
    """The leaves of the function's result."""
    result_spec: optree.PyTreeSpec
    """The structure of the result."""
    unlowered: tuple[str, ...] = ()
    """Ops with no Triton formula: the program then runs through torch."""


@dataclass(frozen=True)
class Returned:
    """A leaf of the result: a parameter that is returned, or an output of the program."""

    index: int
    is_parameter: bool


def trace(
    function: Callable[..., PyTree],
    parameters: Sequence[Parameter],
    numbers: Sequence[type[float] | type[int]],
    replace: Callable[[Sequence[object], Sequence[object]], tuple[Args, Kwargs]],
    device: torch.device,
) -> Trace:
    """Trace `function` on one element of every list.

    Raises:
        RuleError: the math is not straight-line, or holds an op without a rule; with the source line.
    """

    def run(tracer: OpTracer) -> tuple[list[ProxyTensor], PyTree]:
        proxies = [ProxyTensor(ProxySlot(i), p.dtype, p.shape, tracer) for i, p in enumerate(parameters)]
        args, kwargs = replace(proxies, [symbolic_scalar(i, kind) for i, kind in enumerate(numbers)])
        with torch.no_grad(), tracer, _errors_with_source():
            return proxies, function(*args, **kwargs)

    tracer = OpTracer(device, tuple(parameters), EXAMPLE_SHAPES)
    proxies, result = run(tracer)
    if tracer.runs_python:
        run(OpTracer(device, tuple(parameters), OTHER_SHAPES, tracer.instructions))
    leaves, spec = optree.tree_flatten(result, none_is_leaf=True)
    outputs: list[int] = []
    results = tuple([_returned(leaf, proxies, outputs, function) for leaf in leaves])
    program = Program(
        name=name_of(function),
        parameters=tuple(parameters),
        instructions=tuple(tracer.instructions),
        scalars=tuple(s.type for s in tracer.scalars.values()),
        stores={i: s.slot.value for i, s in enumerate(proxies) if s.slot.value != i},
        outputs=tuple(outputs),
    )
    evaluators = tuple(compile_expression(expression, len(numbers)) for expression in tracer.scalars)
    return Trace(program, evaluators, tuple(tracer.scalars), results, spec, tuple(dict.fromkeys(tracer.unlowered)))


@contextmanager
def _errors_with_source() -> Iterator[None]:
    """A context that adds the line of the user's source to errors."""
    try:
        yield
    except ValueNeeded as error:
        raise RuleError(
            "this math cannot be fused: it needs the value of a Python number while it is traced "
            f"(an `if`, `max`, `math.sqrt` or `float()` on it)\n  at {_line_of(error)}\n"
            "  instead: compute with ** and torch functions, or pass a bool, which is part of the signature"
        ) from None
    except RuleError:
        raise
    except Exception as error:
        if isinstance(error, AttributeError) and isinstance(error.obj, list | tuple):
            error.add_note("many tensors are one argument as st.TensorList([...])")
        error.add_note(f"while the math was traced, on proxies with a shape of their own\n  at {_line_of(error)}")
        raise


def _line_of(error: Exception) -> str:
    return source_line(traceback.walk_tb(error.__traceback__))


def _returned(
    leaf: PyTree, proxies: Sequence[ProxyTensor], outputs: list[int], function: Callable[..., PyTree]
) -> Returned | None:
    """Classify a leaf of the result as a parameter or an output; append an output's value number to `outputs`."""
    if leaf is None:
        return None
    for i, proxy in enumerate(proxies):
        if leaf is proxy:
            return Returned(i, is_parameter=True)
    if not isinstance(leaf, ProxyTensor):
        raise RuleError(f"fused math returns tensors, got {type(leaf).__name__} from {name_of(function)}")
    if leaf.value_shape is Shape.PER_BLOCK:
        raise RuleError(f"fused math returns tensors, and {name_of(function)} numbers per block: store them instead")
    outputs.append(leaf.slot.value)
    return Returned(len(outputs) - 1, is_parameter=False)
