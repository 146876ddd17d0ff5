"""Tracing of ops on proxies into instructions: one op as one instruction, by an expansion, or by a decomposition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from subtensors.dispatch.fused.decompositions import EXPANSIONS, DimensionError
from subtensors.dispatch.fused.errors import ADVICE, refuse, refuse_op, refuse_value
from subtensors.dispatch.fused.proxies import EXAMPLE_NUMBERS, ProxySlot, ProxyTensor, Shapes
from subtensors.dispatch.fused.symbolic_scalars import expression_of
from subtensors.dispatch.ops.errors import RuleError
from subtensors.dispatch.ops.op_classes import OpClass, functional_form, op_class, overload_name
from subtensors.dispatch.ops.tree import Args, Kwargs, PyTree
from subtensors.dispatch.torch_internals import ops
from subtensors.kernels.fused import blockwise
from subtensors.kernels.fused.lowering import INTEGERS, can_lower, may_exceed_dtype
from subtensors.kernels.fused.program import (
    REDUCTIONS,
    Instruction,
    Operand,
    Parameter,
    Ref,
    Scalar,
    Shape,
    call_form,
)

aten = torch.ops.aten

# A view that keeps all of these keeps any shape: they differ in rank, one holds a 1, one is larger than any slice.
_VIEWED_SHAPES = ((3, 5), (1,), (1, 7), (2, 1, 3), (1 << 20, 1 << 20))

_TRACEABLE = frozenset({OpClass.POINTWISE, OpClass.FACTORY, OpClass.REDUCTION})
_WRITABLE = _TRACEABLE | {OpClass.COPY, OpClass.VIEW}
_OWN_SHAPE = "it makes a tensor of its own shape", "torch.zeros_like and the like take the shape of a tensor"


@dataclass
class OpTracer(TorchDispatchMode):
    """Records every op on the proxies as instructions."""

    device: torch.device
    parameters: tuple[Parameter, ...]
    shapes: Shapes
    earlier: list[Instruction] | None = None
    """The instructions of the trace on proxies of other shapes, which this one must repeat."""
    instructions: list[Instruction] = field(default_factory=list)
    scalars: dict[str, Scalar] = field(default_factory=dict)
    """Expression of the call's numbers -> the dynamic scalar that it is."""
    unlowered: list[str] = field(default_factory=list)
    values: dict[tuple[Instruction, str], int] = field(default_factory=dict)
    """Instruction, and the text of its operands -> its value: the same math is done once."""
    hosts: set[int] = field(init=False)
    """Values that torch would have on the CPU, though the elements are on a device."""
    depth: int = 0
    runs_python: bool = False

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.hosts = {i for i, parameter in enumerate(self.parameters) if parameter.on_host}

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> PyTree:
        arguments = _schema_order(func, args, kwargs or {})
        if func is aten._local_scalar_dense.default:
            refuse_value("item(), float(), or an `if` on it")
        if func is aten.lift_fresh.default and not isinstance(arguments[0], ProxyTensor):
            return self._constant(arguments[0])
        if func in _IDENTITIES:
            return self._alias(arguments[0])
        if func._schema.is_mutable:
            return self._mutate(func, arguments)
        return self._apply(func, arguments)

    def _apply(self, func: OpOverload, arguments: list[PyTree]) -> PyTree:
        self._check_blocks(func, arguments)
        if not self.depth:
            self._check_devices(func, arguments)
            self._check_kernel(func, arguments)
        if func in EXPANSIONS:
            # Torch's own checks: an expansion may return a result where the op refuses its arguments.
            positional, keywords = call_form(func, [self._meta(a) for a in arguments])
            func(*positional, **keywords)
            return self._expand(func, EXPANSIONS[func], arguments)
        if op_class(func) is OpClass.COPY and self.depth == 0:
            refuse(f"{func} (copy) has no rule here", ADVICE[OpClass.COPY])
        if op_class(func) is OpClass.VIEW and isinstance(arguments[0], ProxyTensor):
            return self._view(func, arguments)
        instruction = self._instruction(func, arguments) if self._is_simple(func) else None
        if instruction is not None and can_lower(instruction):
            return self._emit(instruction)
        if instruction is None and op_class(func) is OpClass.FACTORY and not self.depth:
            refuse(*_OWN_SHAPE)
        decomposition = ops.decomposition_of(func)
        if instruction is not None and may_exceed_dtype(instruction):
            decomposition = None  # it may not do what torch's own kernel does
        if decomposition is not None:
            recorded = len(self.instructions)
            try:
                return self._expand(func, decomposition, arguments)
            except RuntimeError as error:
                # Also a RuleError, or a dynamic scalar whose value must not be read: torch can run the op as it is.
                if isinstance(error, RuleError) and self.depth == 0 and op_class(func) is not OpClass.POINTWISE:
                    refuse_op(func)  # by the name that the user knows
                if instruction is None:
                    raise
                self._forget(recorded)
        if instruction is None or op_class(func) is not OpClass.POINTWISE:
            refuse_op(func)
        self.unlowered.append(str(func))
        return self._emit(instruction)

    def _view(self, func: OpOverload, arguments: list[PyTree]) -> ProxyTensor:
        """Return the input of a view that keeps the shape as another proxy of the same value; refuse other views."""
        source = arguments[0]
        # A user's own view must keep any shape; one inside a decomposition was written for the proxies' shape.
        is_inner = source.value_shape is Shape.PER_TENSOR or self.depth
        for shape in [self.shapes[source.value_shape]] if is_inner else _VIEWED_SHAPES:
            viewed = torch.empty(shape, dtype=source.dtype, device="meta")
            positional, keywords = call_form(func, [viewed, *(self._meta(a) for a in arguments[1:])])
            try:
                result = func(*positional, **keywords)
            except (RuntimeError, IndexError):
                result = None
            if not isinstance(result, Tensor) or (result.shape, result.stride()) != (viewed.shape, viewed.stride()):
                refuse(f"{func} changes the shape of a tensor", ADVICE[OpClass.VIEW])
            if (result.is_conj(), result.is_neg()) != (viewed.is_conj(), viewed.is_neg()):
                refuse(f"{func} reads other values from the same memory", "x.conj_physical() and x.neg() are new ones")
            if result.dtype != source.dtype:
                refuse(f"{func} reads the bits of a tensor as {result.dtype}", ADVICE[OpClass.VIEW])
        return ProxyTensor(source.slot, source.dtype, source.value_shape, self)

    def _is_simple(self, func: OpOverload) -> bool:
        """Return whether an op can be one instruction: one tensor out, no reduction over dims, a traceable class."""
        returns = func._schema.returns
        has_one_result = len(returns) == 1 and isinstance(returns[0].type, torch.TensorType)
        is_full = func._schema.name.rpartition("::")[2] not in REDUCTIONS or func._overloadname == "default"
        return (
            has_one_result and is_full and (func.namespace in ("prims", "subtensors") or op_class(func) in _TRACEABLE)
        )

    def _expand(self, func: OpOverload, expansion: Callable[..., PyTree], arguments: list[PyTree]) -> PyTree:
        positional, keywords = call_form(func, arguments)
        try:
            self.depth += 1
            with self:
                return expansion(*positional, **keywords)
        except DimensionError as error:
            refuse(f"{func}: {error}", ADVICE[OpClass.REDUCTION])
        finally:
            self.depth -= 1

    def _mutate(self, func: OpOverload, arguments: list[PyTree]) -> PyTree:
        target = arguments[0]
        functional = functional_form(func)
        if op_class(func) is OpClass.RANDOM:
            refuse(f"{func} is random", ADVICE[OpClass.RANDOM])
        if functional is None or not isinstance(target, ProxyTensor):
            refuse(f"{func} writes to a tensor in a way that has no rule here", "use the functional form")
        if func.namespace == "aten" and op_class(func) not in _WRITABLE:
            refuse_op(func)
        if target.slot.may_be_copied:
            refuse(
                "it writes to a tensor after contiguous(), which gives a copy of some elements and others themselves",
                "leave contiguous() out: the order of elements in memory makes no difference here",
            )
        # Torch's own check that the result may be cast back, and that the shapes allow it.
        positional, keywords = call_form(func, [self._meta(a) for a in arguments])
        func(*positional, **keywords)
        named = dict(zip((a.name for a in func._schema.arguments), arguments, strict=True))
        result = self._apply(functional, _schema_order(functional, [], named))  # it may take them in another order
        if target.slot.value in self.hosts and result.slot.value not in self.hosts and func not in _MOVES:
            refuse(f"{func} writes numbers of {self.device} to a CPU tensor", "use its result")
        if result.value_shape not in (target.value_shape, Shape.PER_TENSOR):
            raise RuntimeError(f"{func}: a 0-d tensor can't hold a number per element, which it would write to it")
        if result.dtype != target.dtype:
            if not torch.can_cast(result.dtype, target.dtype):  # some ops' meta functions leave that to their kernels
                raise RuntimeError(f"{func}: {result.dtype} can't be cast to {target.dtype}, which it writes to")
            result = self._convert(result, target.dtype)
        target.slot.value = result.slot.value
        return target

    def _convert(self, tensor: ProxyTensor, dtype: torch.dtype) -> ProxyTensor:
        instruction = Instruction(_TO, (Ref(tensor.slot.value), dtype), dtype, tensor.dtype, tensor.value_shape)
        return self._emit(instruction)

    def _instruction(self, func: OpOverload, arguments: list[PyTree]) -> Instruction | None:
        positional, keywords = call_form(func, [self._meta(a) for a in arguments])
        result = func(*positional, **keywords)
        shape = next((kind for kind, example in self.shapes.items() if example == tuple(result.shape)), None)
        if shape is None or (shape is Shape.PER_BLOCK and func._opname not in (*blockwise.OPS, "copy")):
            return None
        if shape is Shape.PER_ELEMENT and self.depth == 0 and not any(isinstance(a, ProxyTensor) for a in arguments):
            refuse(*_OWN_SHAPE)
        operands = tuple(self._operand(a) for a in arguments)
        compute = result.dtype
        if compute == torch.bool and not func._schema.name.rpartition("::")[2].startswith("logical_"):
            values = [
                self._meta(a)
                for a in arguments
                if isinstance(a, ProxyTensor | int | float | torch.SymFloat | torch.SymInt)
            ]
            compute = ops.computation_dtype(*values) if values else torch.bool
        if func in _CONVERSIONS:
            compute = arguments[0].dtype
        if func._opname in blockwise.OPS:
            compute = torch.float32
        return Instruction(func, operands, result.dtype, compute, shape)

    @staticmethod
    def _check_blocks(func: OpOverload, arguments: list[PyTree]) -> None:
        """Refuse to use numbers per block for anything but the quantization of elements."""
        shapes = {a.value_shape for a in arguments if isinstance(a, ProxyTensor)}
        is_moved = func._opname == "copy" and shapes == {Shape.PER_BLOCK}
        is_quantization = func._opname in blockwise.OPS and Shape.PER_TENSOR not in shapes
        if Shape.PER_BLOCK in shapes and not (is_moved or is_quantization):
            refuse(f"{func} takes numbers per block", "quantize and dequantize elements with them, and store them")

    def _check_devices(self, func: OpOverload, arguments: list[PyTree]) -> None:
        """Refuse numbers on the host beside tensors on a device where torch has no kernel that takes both."""
        on_host = {i: a.slot.value in self.hosts for i, a in enumerate(arguments) if isinstance(a, ProxyTensor)}
        if not all(on_host.values()) and any(host and not _takes_from_host(func, i) for i, host in on_host.items()):
            refuse(
                f"{func} takes tensors on one device, and got a 0-d CPU tensor beside tensors on {self.device}",
                "move it there before the call, or pass a Python number",
            )

    def _check_kernel(self, func: OpOverload, arguments: list[PyTree]) -> None:
        """Refuse integers and booleans where torch does, though a formula or a decomposition would return a result."""
        kinds: set[object] = {a.dtype for a in arguments if isinstance(a, ProxyTensor)}
        kinds |= {type(a) for a, s in zip(arguments, func._schema.arguments, strict=True) if type(s.type) in _OPERANDS}
        if func.namespace != "aten" or not kinds & {*INTEGERS, torch.bool, bool}:
            return
        for number in (1, 100):
            values = [self._meta(a) for a in arguments]
            for i, a in enumerate(arguments):
                if isinstance(a, ProxyTensor):
                    values[i] = torch.full(self.shapes[a.value_shape], number, dtype=a.dtype)
            positional, keywords = call_form(func, values)
            try:
                func(*positional, **keywords)
            except RuntimeError:
                if number == 100:  # not about the values, of which another one is refused too
                    raise
            else:
                return

    def _emit(self, instruction: Instruction) -> ProxyTensor:
        source = instruction.args[0] if instruction.args else None
        if instruction.is_reduction and isinstance(source, Ref) and self._shape(source) is Shape.PER_TENSOR:
            # One number is its own sum, product, maximum and minimum.
            instruction = replace(instruction, op=_TO, args=(source, instruction.dtype))
        if instruction.name == "stochastic_round":
            # Each rounding draws different bits.
            salt = sum(earlier.name == "stochastic_round" for earlier in self.instructions)
            instruction = replace(instruction, args=(source, salt))
        # Python finds 1, 1.0 and True equal, and 0.0 and -0.0; their texts differ.
        key = (instruction, repr(instruction.args))
        value = self.values.get(key)
        if value is None:
            self._check_repeated(instruction)
            self.instructions.append(instruction)
            value = self.values[key] = len(self.parameters) + len(self.instructions) - 1
            operands = {a.index for a in instruction.args if isinstance(a, Ref)}
            is_host_constant = torch.device("cpu") in instruction.args and self.device.type != "cpu"
            if operands <= self.hosts if operands else is_host_constant:
                self.hosts.add(value)
        return ProxyTensor(ProxySlot(value), instruction.dtype, instruction.shape, self)

    def _check_repeated(self, instruction: Instruction) -> None:
        """Refuse an instruction that the trace on proxies of other shapes has not in this place."""
        position = len(self.instructions)
        if self.earlier is not None and str(self.earlier[position : position + 1]) != str([instruction]):
            refuse(
                "a function of torch computes with the shape of a tensor, and elements differ in shape",
                "pass the number as an argument",
            )

    def _forget(self, recorded: int) -> None:
        """Drop the instructions after the first `recorded` ones."""
        del self.instructions[recorded:]
        last = len(self.parameters) + recorded
        self.values = {key: value for key, value in self.values.items() if value < last}
        self.hosts = {value for value in self.hosts if value < last}

    def _shape(self, ref: Ref) -> Shape:
        first = len(self.parameters)
        value = self.parameters[ref.index] if ref.index < first else self.instructions[ref.index - first]
        return value.shape

    def _constant(self, tensor: Tensor) -> PyTree:
        if tensor.dim() != 0:
            refuse("it makes a tensor of its own shape", "pass it as an argument")
        func, keywords = aten.scalar_tensor.default, {"dtype": tensor.dtype, "device": tensor.device}
        return self._apply(func, _schema_order(func, (tensor.item(),), keywords))

    def _alias(self, tensor: PyTree) -> ProxyTensor:
        if not isinstance(tensor, ProxyTensor):
            self._refuse_foreign()
        return ProxyTensor(tensor.slot, tensor.dtype, tensor.value_shape, self)

    def _refuse_foreign(self) -> NoReturn:
        refuse("it uses a tensor from outside that is not one of its arguments", "pass the tensor as an argument")

    def _meta(self, argument: PyTree) -> PyTree:
        """The argument without values, from which torch infers the result's dtype and shape."""
        if isinstance(argument, ProxyTensor):
            return torch.empty(self.shapes[argument.value_shape], dtype=argument.dtype, device="meta")
        if isinstance(argument, Tensor):
            self._refuse_foreign()
        if type(argument) in EXAMPLE_NUMBERS:
            return EXAMPLE_NUMBERS[type(argument)]
        return torch.device("meta") if isinstance(argument, torch.device) else argument

    def _operand(self, argument: PyTree) -> Operand:
        if isinstance(argument, ProxyTensor):
            return Ref(argument.slot.value)
        if isinstance(argument, torch.SymFloat | torch.SymInt):
            expression = expression_of(argument)
            kind: type[float] | type[int] = float if isinstance(argument, torch.SymFloat) else int
            return self.scalars.setdefault(expression, Scalar(len(self.scalars), kind))
        return tuple(argument) if isinstance(argument, list) else argument


_HOST_OPERANDS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys("clamp clamp_min clamp_max addcdiv lerp.Scalar _prelu_kernel logaddexp logaddexp2".split(), ()),
    **dict.fromkeys(("logical_and", "logical_or", "logical_xor"), (1,)),
    **dict.fromkeys(("masked_fill", "addcmul", "lerp.Tensor"), (2,)),
}
"""Op -> the operands that may be 0-d CPU tensors beside tensors on a GPU; of most pointwise ops they all may be."""


def _takes_from_host(func: OpOverload, position: int) -> bool:
    """Return whether torch's kernel on a GPU takes a 0-d CPU tensor as this operand."""
    for name in (func._opname, overload_name(func)):
        if name in _HOST_OPERANDS:
            return position in _HOST_OPERANDS[name]
    return not func._opname.endswith("_backward")


_IDENTITIES = {aten.detach.default, aten.alias.default, aten.view_as.default}
_TO = torch.ops.prims.convert_element_type.default
_CONVERSIONS = {aten._to_copy.default, _TO}
_MOVES = {aten.copy_.default, aten.fill_.Tensor}
_OPERANDS = {torch.TensorType, torch.NumberType}
"""The types of arguments that are numbers to compute with, rather than options."""


def _schema_order(func: OpOverload, args: Sequence[PyTree], kwargs: Kwargs) -> list[PyTree]:
    """Every argument of the schema in order, defaults filled in."""
    names = [a.name for a in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    return [given.get(a.name, a.default_value) for a in func._schema.arguments]
