"""Private APIs of Dynamo: rules for tracing tensors of our types, and functions that it must not compile.

Nothing here happens at import. What changes Dynamo is a rule of a type (`dynamo_rules.py`), installed when compiled
code first uses a tensor of it. Each rule looks for what it needs and raises `MissingInternal` where this torch no
longer has it; compiled code then breaks its graph at such tensors.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, NoReturn, TypeVar

import torch

from subtensors.dispatch.torch_internals.requires import MissingInternal, requires

if TYPE_CHECKING:
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.tensor import TensorVariable

    Read = Callable[[TensorVariable, InstructionTranslatorBase, str], object]

T = TypeVar("T")

Answer = Callable[[T, str, tuple[object, ...], dict[str, object]], object]
"""Gives the constant that a call by this name, with these constant arguments, returns for a fake tensor of a type."""

_log = logging.getLogger(__name__)


def break_graph(reason: str, at: object) -> NoReturn:
    """Break the graph that Dynamo is tracing.

    Args:
        reason: the message of the error where no break is allowed.
        at: the traced value.
    """
    errors = sys.modules.get("torch._dynamo.exc")
    if (unimplemented := getattr(errors, "unimplemented", None)) is not None:
        unimplemented(gb_type="A type of subtensors", context=str(at), explanation=reason, hints=[])
    raise getattr(errors, "Unsupported", RuntimeError)(reason)


def _replace(
    owner: type | ModuleType, names: Sequence[str], wrap: Callable[[Callable[..., object]], Callable[..., object]]
) -> None:
    """Replace a method of a class of Dynamo's, or a function of a module, by what `wrap` makes of it.

    Args:
        owner: the class or the module.
        names: what versions of torch call the method, the newest first.
        wrap: takes the method that is there.
    """
    name = next((name for name in names if name in vars(owner)), None)
    if name is None:
        raise MissingInternal(f"{owner.__name__} has no {' or '.join(names)}")
    method = vars(owner)[name]
    setattr(owner, name, functools.wraps(method)(wrap(method)))


_READS_ATTRIBUTE = ("tp_getattro_impl", "var_getattr")  # since 2.14; before
_HAS_LENGTH = ("sq_length_impl", "sq_length", "method___len__")  # since 2.15; since 2.13; before


def _example(variable: TensorVariable) -> object:
    """The fake tensor that Dynamo traces a tensor with; None where it has none."""
    return variable.proxy.node.meta.get("example_value")


def trace_as_list(
    kind: type[T],
    answer: Answer[T],
    methods: Collection[str],
    functions: Collection[str],
    attributes: Collection[str],
    elements: str,
    grad_reason: str,
) -> None:
    """Replace what Dynamo itself answers about the geometry of tensors of a type, a list. Checked on 2.11 - 2.15.

    Dynamo takes `.grad` of a subclass for None. So reading it of a list breaks the graph. An element is, even after the
    break, still the fake tensor that compiled code was given for it, so reading its `.grad` is an error.

    Args:
        kind: the type, which can be iterated over in compiled code.
        answer: gives the constants to answer with; the name of `len` is `__len__`.
        methods: the names of methods that are answered.
        functions: those of the methods that are functions of torch, too.
        attributes: the names of attributes that are answered.
        elements: the name of the attribute that is the list of elements; no other tensor has one of this name.
        grad_reason: why `.grad` can't be read.
    """
    from torch._dynamo.variables.base import ValueMutationNew, VariableTracker
    from torch._dynamo.variables.lists import ListVariable
    from torch._dynamo.variables.tensor import TensorVariable
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    def reply(
        example: T,
        tx: InstructionTranslatorBase,
        name: str,
        args: Sequence[VariableTracker] = (),
        kwargs: Mapping[str, VariableTracker] | None = None,
    ) -> object:
        constants = tuple([a.as_python_constant() for a in args])
        named = {key: a.as_python_constant() for key, a in (kwargs or {}).items()}
        return VariableTracker.build(tx, answer(example, name, constants, named))

    def calls(original: Callable[..., object]) -> Callable[..., object]:
        def call(
            variable: TensorVariable,
            tx: InstructionTranslatorBase,
            name: str,
            args: Sequence[VariableTracker],
            kwargs: Mapping[str, VariableTracker],
        ) -> object:
            if name in methods and isinstance(example := _example(variable), kind):
                return reply(example, tx, name, args, kwargs)
            return original(variable, tx, name, args, kwargs)

        return call

    def counts(original: Callable[..., object]) -> Callable[..., object]:
        def length(variable: TensorVariable, tx: InstructionTranslatorBase) -> object:
            if isinstance(example := _example(variable), kind):
                return reply(example, tx, "__len__")
            return original(variable, tx)

        return length

    def handles(name: str, original: Callable[..., object]) -> Callable[..., object]:
        def handle(
            function: object, tx: InstructionTranslatorBase, *args: VariableTracker, **kwargs: VariableTracker
        ) -> object:
            variable = [*args, *kwargs.values()][0].realize()
            if isinstance(variable, TensorVariable) and isinstance(example := _example(variable), kind):
                return reply(example, tx, name)
            return original(function, tx, *args, **kwargs)

        return handle

    def is_element(variable: TensorVariable) -> bool:
        nodes = [a for a in variable.proxy.node.args[:1] if isinstance(a, torch.fx.Node)]
        return bool(nodes) and isinstance(nodes[0].meta.get("example_value"), kind)

    def reads(original: Read) -> Read:
        def read(variable: TensorVariable, tx: InstructionTranslatorBase, name: str) -> object:
            example = _example(variable)
            if name == "grad" and isinstance(example, kind):
                break_graph(grad_reason, variable)
            if name == "grad" and is_element(variable):
                raise RuntimeError(grad_reason)
            if name == elements and isinstance(example, kind):
                return ListVariable(variable.unpack_var_sequence(tx), mutation_type=ValueMutationNew())
            if name in attributes and isinstance(example, kind):
                return reply(example, tx, name)
            return original(variable, tx, name)

        return read

    handlers = TorchInGraphFunctionVariable._get_handlers()
    replaced = {getattr(torch, name): handles(name, handlers[getattr(torch, name)]) for name in functions}
    _replace(TensorVariable, ("call_method",), calls)
    _replace(TensorVariable, _HAS_LENGTH, counts)
    _replace(TensorVariable, _READS_ATTRIBUTE, reads)
    handlers.update(replaced)


def break_at_data_assignment(kind: type[torch.Tensor], reason: str) -> None:
    """Make Dynamo break the graph where `.data` of a tensor of a type is set. Checked on 2.11 - 2.15.

    Dynamo would trace the assignment as a call that no subclass can intercept. The reason is as for `break_graph`.
    """
    from torch._dynamo.variables import builtin

    owner: type = getattr(builtin, "SetAttrBuiltinVariable", builtin.BuiltinVariable)  # since 2.13

    def sets(original: Callable[..., object]) -> Callable[..., object]:
        def call_setattr(
            variable: VariableTracker,
            tx: InstructionTranslatorBase,
            tensor: VariableTracker,
            name: VariableTracker,
            value: VariableTracker,
        ) -> object:
            is_of_kind = getattr(tensor, "class_type", None) is kind and name.is_python_constant()
            if is_of_kind and name.as_python_constant() == "data":
                break_graph(reason, tensor)
            return original(variable, tx, tensor, name, value)

        return call_setattr

    _replace(owner, ("_call_setattr", "call_setattr"), sets)


def trace_as_plain(kind: type[torch.Tensor]) -> None:
    """Make Dynamo trace tensors of a type as plain ones. Checked on 2.11 - 2.15.

    Of any other subclass it traces `__torch_function__`, which torch's functions that are written in Python call again
    from within, and takes `.grad` for None.
    """
    from torch._dynamo.variables import builder
    from torch._dynamo.variables.tensor import TensorVariable

    def wraps(original: Callable[..., object]) -> Callable[..., object]:
        def wrap(*args: object, subclass_type: type | None = None, **options: object) -> object:
            if subclass_type is not kind:
                return original(*args, subclass_type=subclass_type, **options)
            variable = original(*args, **options)
            assert isinstance(variable, TensorVariable)
            variable.class_type = kind
            return variable

        return wrap

    _replace(builder, ("wrap_fx_proxy",), wraps)


def allow_in_compiled_code(kind: type[torch.Tensor]) -> None:
    """Allow compiled code to pass tensors of a type to aten ops. Checked on 2.11 - 2.15.

    Its first call would otherwise refuse them; 2.11 does not check.
    """
    from torch._functorch._aot_autograd import runtime_wrappers

    known = getattr(runtime_wrappers, "HANDLED_TYPES", None)
    if known is not None:
        runtime_wrappers.HANDLED_TYPES = (*known, kind)  # type: ignore[attr-defined]


def mark_static_address(tensor: torch.Tensor) -> None:
    """Note on a tensor that its address is constant, as `torch._dynamo.mark_static_address` does.

    That would load the compiler. Checked on 2.11 - 2.15.
    """
    tensor._dynamo_static_input_type = "unguarded"  # type: ignore[attr-defined]


def call_eagerly(function: Callable[..., object], reason: str) -> None:
    """Make Dynamo break the graph at a call of this function, and compile nothing that it calls.

    `torch.compiler.disable` does the same with a wrapper, which costs each call some microseconds, and loads the
    compiler. The function is written in Python; the reason is as for `break_graph`. Checked on 2.11, 2.13.
    """
    compile_only_inlined(function)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]


def compile_only_inlined(function: Callable[..., object]) -> None:
    """Make Dynamo compile a function only inlined into others, and not where it is called between two graphs.

    Checked on 2.11, 2.13.
    """
    try:
        from torch._C._dynamo import eval_frame

        skip = eval_frame._FrameAction.SKIP
        eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    except (ImportError, AttributeError, TypeError) as error:
        _log.debug("%s may be compiled where a graph breaks, which takes time: %s", function.__qualname__, error)


def compile_methods_only_inlined(kind: type) -> None:
    """Apply `compile_only_inlined` to the methods and properties that a class defines. Checked on 2.11, 2.13.

    Where a graph breaks, tensors of the class are real ones, not the fake tensors of compiled code.
    """
    for member in vars(kind).values():
        for function in (member, *(getattr(member, name, None) for name in ("fget", "fset", "__func__"))):
            if isinstance(function, FunctionType):
                compile_only_inlined(function)


def _has_symbolic_type(value: object) -> bool:
    values = value if isinstance(value, tuple | list) else [value]
    return any(isinstance(x, torch.SymInt | torch.SymFloat | torch.SymBool) for x in values)


@requires("torch.fx.experimental.symbolic_shapes.has_free_symbols", otherwise=_has_symbolic_type)
def is_symbolic(value: object) -> bool:
    """Return whether a value holds a size that is a symbol to the compiler. Checked on 2.11 - 2.15."""
    from torch.fx.experimental.symbolic_shapes import has_free_symbols

    return not isinstance(value, bool | torch.dtype | torch.device | torch.layout) and has_free_symbols(value)
