"""Private APIs of Dynamo: rules for tracing tensors of our types, and functions that it must not compile.

Nothing here happens at import. What changes Dynamo is a rule of a type (`dynamo_rules.py`), put in place when
compiled code first meets a tensor of it. Each rule looks for what it needs and raises `MissingInternal` where this
torch has it no longer; compiled code then breaks its graph at such tensors.
"""

from __future__ import annotations

import functools
import logging
import operator
import sys
from collections.abc import Callable, Collection, Sequence
from types import FunctionType
from typing import Any, NoReturn

import torch

from subtensors.dispatch.torch_internals.requires import MissingInternal, requires

_log = logging.getLogger(__name__)


def break_graph(reason: str, at: object) -> NoReturn:
    """Break the graph that Dynamo is tracing.

    Args:
        reason: what is said where no break is allowed.
        at: what it traces.
    """
    errors = sys.modules.get("torch._dynamo.exc")
    if (unimplemented := getattr(errors, "unimplemented", None)) is not None:
        unimplemented(gb_type="A type of subtensors", context=str(at), explanation=reason, hints=[])
    raise getattr(errors, "Unsupported", RuntimeError)(reason)


def _replace(owner: Any, names: Sequence[str], wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a method of a class of Dynamo's by what `wrap` makes of it.

    Args:
        owner: the class.
        names: what versions of torch call the method, the newest first.
        wrap: takes the method that is there.
    """
    name = next((name for name in names if name in vars(owner)), None)
    if name is None:
        raise MissingInternal(f"{owner.__name__} has no method {' or '.join(names)}")
    method = vars(owner)[name]
    setattr(owner, name, functools.wraps(method)(wrap(method)))


_READS_ATTRIBUTE = ("tp_getattro_impl", "var_getattr")  # since 2.14; before
_HAS_LENGTH = ("sq_length_impl", "sq_length", "method___len__")  # since 2.15; since 2.13; before


def _value(variable: Any) -> Any:
    """The stand-in that Dynamo traces a tensor with; None where it has none."""
    return variable.proxy.node.meta.get("example_value")


def answer_in_compiler(
    kind: type[torch.Tensor],
    answer: Callable[[torch.Tensor, str, tuple[Any, ...], dict[str, Any]], Any],
    attributes: Collection[str],
    methods: Collection[str],
    functions: Collection[str],
) -> None:
    """Replace what Dynamo itself says of the geometry of tensors of a type. Checked on 2.11 - 2.15.

    Args:
        kind: the type.
        answer: given a stand-in of that type, a name and constant arguments, what to say: constants.
        attributes: the attributes of a tensor that it is asked for.
        methods: the methods.
        functions: those of the methods that are functions of torch, too.
    """
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.tensor import TensorVariable
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    def reply(variable: Any, tx: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        constants = tuple([a.as_python_constant() for a in args])
        named = {key: a.as_python_constant() for key, a in kwargs.items()}
        return VariableTracker.build(tx, answer(_value(variable), name, constants, named))

    def reads(rule: Callable[..., Any]) -> Callable[..., Any]:
        def read(variable: Any, tx: Any, name: str) -> Any:
            if name in attributes and isinstance(_value(variable), kind):
                return reply(variable, tx, name, (), {})
            return rule(variable, tx, name)

        return read

    def calls(rule: Callable[..., Any]) -> Callable[..., Any]:
        def call(variable: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
            if name in methods and isinstance(_value(variable), kind):
                return reply(variable, tx, name, args, kwargs)
            return rule(variable, tx, name, args, kwargs)

        return call

    def counts(rule: Callable[..., Any]) -> Callable[..., Any]:
        def length(variable: Any, tx: Any) -> Any:
            if isinstance(_value(variable), kind):
                return reply(variable, tx, "__len__", (), {})
            return rule(variable, tx)

        return length

    def handles(name: str, rule: Callable[..., Any]) -> Callable[..., Any]:
        def handle(function: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
            variable = [*args, *kwargs.values()][0].realize()
            if isinstance(variable, TensorVariable) and isinstance(_value(variable), kind):
                return reply(variable, tx, name, (), {})
            return rule(function, tx, *args, **kwargs)

        return handle

    handlers = TorchInGraphFunctionVariable._get_handlers()
    replaced = {getattr(torch, name): handles(name, handlers[getattr(torch, name)]) for name in functions}
    _replace(TensorVariable, _READS_ATTRIBUTE, reads)
    _replace(TensorVariable, ("call_method",), calls)
    _replace(TensorVariable, _HAS_LENGTH, counts)
    handlers.update(replaced)


def list_in_compiler(kind: type[torch.Tensor], attribute: str) -> None:
    """Make Dynamo trace an attribute of tensors of a type as the list of their elements. Checked on 2.11 - 2.15.

    Args:
        kind: the type, which can be iterated over in compiled code.
        attribute: no other tensor has one of its name.
    """
    from torch._dynamo.variables.base import ValueMutationNew
    from torch._dynamo.variables.lists import ListVariable
    from torch._dynamo.variables.tensor import TensorVariable

    def reads(rule: Callable[..., Any]) -> Callable[..., Any]:
        def read(variable: Any, tx: Any, name: str) -> Any:
            if name == attribute and isinstance(_value(variable), kind):
                return ListVariable(variable.unpack_var_sequence(tx), mutation_type=ValueMutationNew())
            return rule(variable, tx, name)

        return read

    _replace(TensorVariable, _READS_ATTRIBUTE, reads)


def break_at_gradients(kind: type[torch.Tensor], reason: str) -> None:
    """Stop Dynamo from taking `.grad` of tensors of a type, or of their elements, for None. Checked on 2.11 - 2.15.

    Reading `.grad` of a tensor of the type breaks the graph. An element would, even after the break, still be the
    stand-in that compiled code was given for it, so reading its `.grad` is an error.

    Args:
        kind: the type.
        reason: what is said of it.
    """
    from torch._dynamo.variables.tensor import TensorVariable

    def holder_of(variable: Any) -> Any:
        nodes = [a for a in variable.proxy.node.args[:1] if isinstance(a, torch.fx.Node)]
        return nodes[0].meta.get("example_value") if nodes else None

    def reads(rule: Callable[..., Any]) -> Callable[..., Any]:
        def read(variable: Any, tx: Any, name: str) -> Any:
            if name == "grad" and isinstance(_value(variable), kind):
                break_graph(reason, variable)
            if name == "grad" and isinstance(holder_of(variable), kind):
                raise RuntimeError(reason)
            return rule(variable, tx, name)

        return read

    _replace(TensorVariable, _READS_ATTRIBUTE, reads)


def break_at_data_assignment(kind: type[torch.Tensor], reason: str) -> None:
    """Make Dynamo break the graph where `.data` of a tensor of a type is set. Checked on 2.11 - 2.15.

    Dynamo would trace the assignment as a call that no subclass can intercept.

    Args:
        kind: the type.
        reason: what is said where no break is allowed.
    """
    from torch._dynamo.variables import builtin

    owner: Any = getattr(builtin, "SetAttrBuiltinVariable", builtin.BuiltinVariable)  # since 2.13

    def sets(rule: Callable[..., Any]) -> Callable[..., Any]:
        def call_setattr(variable: Any, tx: Any, tensor: Any, name: Any, value: Any) -> Any:
            is_moved = getattr(tensor, "class_type", None) is kind and name.is_python_constant()
            if is_moved and name.as_python_constant() == "data":
                break_graph(reason, tensor)
            return rule(variable, tx, tensor, name, value)

        return call_setattr

    _replace(owner, ("_call_setattr", "call_setattr"), sets)


def trace_gradients(kind: type[torch.Tensor]) -> None:
    """Make Dynamo trace `.grad` of tensors of a type as it does for plain tensors. Checked on 2.11 - 2.15.

    For any other subclass, reading `.grad` breaks the graph.
    """
    from torch._dynamo.variables.tensor import TensorVariable
    from torch._dynamo.variables.torch_function import TensorWithTFOverrideVariable

    def reads(rule: Callable[..., Any]) -> Callable[..., Any]:
        def read(variable: Any, tx: Any, name: str) -> Any:
            if name == "grad" and variable.class_type is kind:
                return getattr(TensorVariable, rule.__name__)(variable, tx, name)
            return rule(variable, tx, name)

        return read

    _replace(TensorWithTFOverrideVariable, _READS_ATTRIBUTE, reads)


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


def call_eagerly(function: Callable[..., Any], reason: str) -> None:
    """Make Dynamo break the graph at a call of this function, and compile nothing that it calls.

    `torch.compiler.disable` does the same with a wrapper, which costs each call some microseconds, and loads the
    compiler. Checked on 2.11, 2.13.

    Args:
        function: written in Python.
        reason: what is said where no break is allowed.
    """
    compile_only_inlined(function)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]


def compile_only_inlined(function: Callable[..., Any]) -> None:
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

    Where a graph breaks, tensors of the class are actual ones, and not the stand-ins of compiled code.
    """
    for member in vars(kind).values():
        for function in (getattr(member, name, None) for name in ("fget", "fset", "__func__")):
            if isinstance(function, FunctionType):
                compile_only_inlined(function)
        if isinstance(member, FunctionType):
            compile_only_inlined(member)


def _has_symbolic_type(value: Any) -> bool:
    values = value if isinstance(value, tuple | list) else [value]
    return any(isinstance(x, torch.SymInt | torch.SymFloat | torch.SymBool) for x in values)


@requires("torch.fx.experimental.symbolic_shapes.has_free_symbols", otherwise=_has_symbolic_type)
def is_symbolic(value: Any) -> bool:
    """Return whether it holds a size that the compiler has no number for. Checked on 2.11 - 2.15."""
    from torch.fx.experimental.symbolic_shapes import has_free_symbols

    return not isinstance(value, bool | torch.dtype | torch.device | torch.layout) and has_free_symbols(value)


def trace_rmatmul() -> bool:
    """Make Dynamo trace `a @ tensor` as `Tensor.__rmatmul__(tensor, a)`, not as `Tensor.matmul(tensor, a)`.

    It traces `tensor @ a` as the latter too; for other operators it distinguishes the order. Checked on 2.11 - 2.15.

    Returns:
        Whether it will.
    """
    try:
        from torch._dynamo.variables import builtin

        builtin.populate_builtin_to_tensor_fn_map()
        builtin.BUILTIN_TO_TENSOR_RFN_MAP.setdefault(operator.matmul, torch.Tensor.__rmatmul__)
    except Exception as error:  # whatever a torch that nobody here has seen makes of it
        _log.warning("torch %s: st.chunk in compiled code breaks the graph: %s", torch.__version__, error)
        return False
    return True
