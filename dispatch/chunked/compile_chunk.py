"""Runs of ops of a chunk's program, compiled: `st.chunk(..., compile=True)`.

A program is split at its matrix products, whose gradients go into sums, and at ops without source. Each run of ops in
between is written as a Python function of the tensors it reads, and compiled by torch.compile. Functions are cached by
their source: the next step records the same program, and finds it compiled.
"""

from __future__ import annotations

import functools
import itertools
import math
import warnings
from collections.abc import Callable, Collection, Sequence
from types import FunctionType

import optree
import torch
from torch._ops import OpOverload

from subtensors.dispatch.chunked.lazy_graph import LazyValue, PerChunk
from subtensors.dispatch.chunked.schedule import Input, ScheduledStep
from subtensors.dispatch.ops.tree import PyTree

BACKEND = "inductor"
"""The backend of torch.compile."""

MIN_RUN_LENGTH = 2
"""The fewest ops in a run that is worth compiling."""


def compiled_program(
    steps: Sequence[ScheduledStep], outputs: Collection[int], splits: Callable[[ScheduledStep], bool]
) -> list[ScheduledStep]:
    """Return the program with its runs of ops compiled, each as one step.

    Args:
        steps: the program.
        outputs: ids of the values that the program computes.
        splits: returns whether an op is not compiled.
    """
    program: list[ScheduledStep] = []
    end = 0
    for (compiles, *_), group in itertools.groupby(
        steps, lambda step: (_has_source(step) and not splits(step), step.grad, step.rides)
    ):
        run = list(group)
        end += len(run)
        program += [_compiled(run, steps[end:], outputs)] if compiles and len(run) >= MIN_RUN_LENGTH else run
    return program


def _has_source(step: ScheduledStep) -> bool:
    """Return whether a step, its op and all its arguments, can be written as source code."""
    op = step.op
    nameable = isinstance(op, OpOverload) or (isinstance(op, FunctionType) and op.__closure__ is None)
    named = Input | LazyValue | PerChunk | int | float | str | None
    constants = torch.dtype | torch.device | torch.memory_format | torch.layout
    return nameable and step.rows is None and all(isinstance(x, named | constants) for x in step.leaves)


def _compiled(run: list[ScheduledStep], later: Sequence[ScheduledStep], outputs: Collection[int]) -> ScheduledStep:
    read_later = {id(x) for step in later for x in step.leaves if isinstance(x, LazyValue)} | set(outputs)
    results = [v for step in run for v in step.outputs if v is not None and id(v) in read_later]
    names: dict[int, _Name] = {}
    reads: list[Input | LazyValue | PerChunk] = []
    constants: list[object] = []
    lines: list[str] = []

    def named(x: object) -> object:
        if isinstance(x, (Input, LazyValue, PerChunk)):
            if id(x) not in names:
                names[id(x)] = _Name(f"a{len(reads)}")
                reads.append(x)
            return names[id(x)]
        if type(x) in (bool, int, float, str, type(None)):
            return x
        constants.append(x)
        return _Name(f"c{len(constants) - 1}")

    for place, step in enumerate(run):
        arguments: PyTree = step.spec.unflatten([named(x) for x in step.leaves])
        args, kwargs = arguments
        names_out = [_Name(f"v{place}_{k}") for k in range(len(step.outputs))]
        names.update({id(v): name for v, name in zip(step.outputs, names_out, strict=True) if v is not None})
        lines.append(f"    {', '.join(names_out)} = {named(step.op)}(*{args}, **{kwargs})")
    lines.append(f"    return ({''.join(names[id(v)] + ', ' for v in results)})")
    text = "\n".join([f"def run({', '.join(names[id(x)] for x in reads)}):", *lines])
    last_uses = [x for x in reads if isinstance(x, LazyValue) and id(x) not in read_later]
    function, arguments = _function(text, tuple(constants), BACKEND), (tuple(reads), {})
    leaves, spec = optree.tree_flatten(arguments, none_is_leaf=True)
    return ScheduledStep(
        function, "compiled", run[0].grad, None, leaves, spec, [*results], last_uses, rides=run[0].rides
    )


class _Name(str):
    """A variable's name, which stands for the variable in the source of tuples, lists and dicts."""

    __slots__ = ()
    __repr__ = str.__str__


@functools.lru_cache(maxsize=256)
def _function(text: str, constants: tuple[object, ...], backend: str) -> Callable[..., Sequence[torch.Tensor]]:
    # dynamic=None: chunks of another length, such as the last, use the same function.
    scope: dict[str, PyTree] = {f"c{k}": constant for k, constant in enumerate(constants)}
    scope |= {"nan": math.nan, "inf": math.inf}  # as floats are written
    exec(text, scope)
    compiled: Callable[..., Sequence[torch.Tensor]] = torch.compile(scope["run"], backend=backend, dynamic=None)

    def call(*args: object) -> Sequence[torch.Tensor]:
        with warnings.catch_warnings():
            # The compiler reads .grad of a tensor that a product before this run computed.
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)
            return compiled(*args)

    return call
