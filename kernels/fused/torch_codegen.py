"""A program as straight-line Python over torch's ops, which runs where no kernel does.

The code gives the results of `interpret` to the last bit, in less time: nothing is looked up while it runs, and the
memory of a value that is dead after an op is reused for its result:

    v7 = mul(x3, s0)             x3.mul_(s0)       x3 is dead after this, and stored to at the end
    v8 = mul(x1, s1)      =>     v8 = mul(x1, s1)
    v9 = add(v7, v8)             x3.add_(v8)
    store v9 -> x3               nothing left to do
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._ops import OpOverload

from subtensors.kernels.fused.program import Instruction, Operand, Program, Ref, Scalar, Shape, call_form

Run = Callable[[Sequence[Tensor], Sequence[float], Sequence[float | Tensor]], list[Tensor]]
"""Called for one element: its tensors, the dynamic scalars, and the dynamic scalars as operands in place of tensors."""


def write_torch(program: Program) -> Run:
    """Generate the function that does what `interpret` does for this program."""
    return _Writer(program).function()


class _Writer:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.first = len(program.parameters)
        self.constants: dict[str, object] = {}
        self.home: dict[int, int] = {}
        """Value -> the parameter whose memory holds it."""
        self.last_use = dict.fromkeys(range(self.first + len(program.instructions)), -1)
        for number, step in enumerate(program.instructions, self.first):
            self.last_use.update((a.index, number) for a in step.args if isinstance(a, Ref))
        self.kept = {*program.outputs, *program.stores.values()}
        """Values that are needed after the last instruction."""

    def function(self) -> Run:
        names = [f"v{i}" for i in range(self.first)]
        body = [f"{', '.join(names)}, = tensors"] if names else []
        for number, step in enumerate(self.program.instructions, self.first):
            body += self.lines(number, step)
        body += self.ending()
        source = "def run(tensors, numbers, operands):\n" + "".join(f"    {line}\n" for line in body)
        exec(compile(source, f"<subtensors {self.program.name} in torch>", "exec"), self.constants)
        return self.constants["run"]  # type: ignore[return-value]  # compiled just now

    def lines(self, number: int, step: Instruction) -> list[str]:
        """The line of an instruction, and a `del` of the values that are dead after it."""
        reused = self.reused(number, step)
        op = step.op if reused is None else _in_place(step.op)
        assert op is not None
        positional, keywords = call_form(step.op, [self.operand(step, i, a) for i, a in enumerate(step.args)])
        arguments = [*positional, *(f"{name}={text}" for name, text in keywords.items())]
        lines = [f"v{number} = {self.constant(op)}({', '.join(arguments)})"]
        if reused is None:
            dtype = self.constant(step.dtype)
            lines.append(f"if v{number}.dtype != {dtype}: v{number} = v{number}.to({dtype})")
        elif (home := self.home.get(reused, reused)) < self.first:
            self.home[number] = home
        read = {a.index for a in step.args if isinstance(a, Ref)}
        dead = [i for i in read if i >= self.first and self.last_use[i] == number and i not in self.kept]
        return [*lines, f"del {', '.join(f'v{i}' for i in dead)}"] if dead else lines

    def reused(self, number: int, step: Instruction) -> int | None:
        """The operand whose memory the result can reuse; None when it needs its own."""
        operand = step.args[0] if step.args else None
        if not isinstance(operand, Ref) or _in_place(step.op) is None or not step.dtype.is_floating_point:
            return None
        index = operand.index
        value = self.program.value(index)
        if (value.dtype, value.shape) != (step.dtype, step.shape):
            return None
        if self.last_use[index] != number or index in self.kept:
            return None
        home = self.home.get(index, index)
        if home >= self.first:
            return index
        # A parameter's memory may hold the value that is stored to it in the end, or one that is dead by then.
        stored_to = [p for p, v in self.program.stores.items() if v == number]
        is_free = home in self.program.stores and number not in self.program.outputs
        return index if is_free and stored_to in ([], [home]) else None

    def operand(self, step: Instruction, position: int, operand: Operand) -> str:
        match operand:
            case Ref(index):
                return f"v{index}"
            case Scalar(index):
                # Type promotion with a 0-d tensor differs between a number and a tensor.
                is_tensor = isinstance(step.op._schema.arguments[position].type, torch.TensorType)
                sized = any(self.program.value(i).shape is Shape.PER_ELEMENT for i in step.reads())
                return f"{'operands' if is_tensor and sized else 'numbers'}[{index}]"
            case _:
                return self.constant(operand)

    def constant(self, value: object) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = value
        return name

    def ending(self) -> list[str]:
        """The lines that make each output a separate tensor, then those of the remaining stores."""
        shared = {*range(self.first), *self.program.stores.values()}
        lines, outputs = [], []
        for order, value in enumerate(self.program.outputs):
            lines.append(f"out{order} = v{value}{'.clone()' if value in shared else ''}")
            outputs.append(f"out{order}")
            shared.add(value)
        for parameter, value in self.program.stores.items():
            if self.home.get(value, value) != parameter:
                lines.append(f"tensors[{parameter}].copy_(v{value})")
        return [*lines, f"return [{', '.join(outputs)}]"]


def _in_place(op: OpOverload) -> OpOverload | None:
    """The in-place variant of an overload; None when there is none."""
    namespace, _, name = op._schema.name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), f"{name}_", None)
    return getattr(packet, op._overloadname, None)
