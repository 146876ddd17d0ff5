"""Programs of fused math run by plain torch ops, one after another."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._ops import OpOverload

from subtensors.kernels.fused.program import Program, Ref, Scalar, call_form


def interpret(program: Program, tensors: Sequence[torch.Tensor], scalars: Sequence[float]) -> list[torch.Tensor]:
    """Run the program on one element of every list with plain torch ops: the oracle of kernels and of torch code.

    Args:
        program: the program.
        tensors: one tensor a parameter; those the program stores to are updated in place.
        scalars: the dynamic scalars, in order.

    Returns:
        The outputs.
    """
    values: list[torch.Tensor] = list(tensors)

    def resolve(operand: object) -> object:
        match operand:
            case Ref(index):
                return values[index]
            case Scalar(index):
                return scalars[index]
            case _:
                return operand

    for step in program.instructions:
        values.append(_run(step.op, step.dtype, [resolve(a) for a in step.args]))
    # Each output is a separate tensor, even where it equals a parameter, another output or a stored value.
    shared = {*range(len(tensors)), *program.stores.values()}
    outputs = []
    for v in program.outputs:
        outputs.append(values[v].clone() if v in shared else values[v])
        shared.add(v)
    # Every stored value is computed before any is written: a store may overwrite what another one reads.
    for parameter, value in program.stores.items():
        if value != parameter:
            tensors[parameter].copy_(values[value])
    return outputs


def _run(op: OpOverload, dtype: torch.dtype, args: Sequence[object]) -> torch.Tensor:
    positional, keywords = call_form(op, args)
    result: torch.Tensor = op(*positional, **keywords)
    return result if result.dtype == dtype else result.to(dtype)
