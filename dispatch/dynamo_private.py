"""What torch keeps private of how Dynamo answers for tensors, with the versions checked."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from types import FunctionType
from typing import Any

import torch


def answer_in_compiler(
    kind: type[torch.Tensor],
    answer: Callable[[torch.Tensor, str, tuple[Any, ...], dict[str, Any]], Any],
    attributes: Sequence[str],
    methods: Sequence[str],
    functions: Sequence[str],
) -> None:
    """Let Dynamo ask for what it would say of tensors of a type by itself. Checked on 2.11, 2.13.

    Args:
        kind: the type.
        answer: given a stand-in of that type, a name and constant arguments, what to say: constants.
        attributes: what it is asked for, of the attributes of a tensor.
        methods: and of the methods.
        functions: those of the methods that are functions of torch, too.
    """
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.tensor import TensorVariable
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    def asking(name: str, rule: Callable[..., Any]) -> Callable[..., Any]:
        def asked(variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
            tensor = variable.proxy.node.meta.get("example_value")
            if not isinstance(tensor, kind):
                return rule(variable, tx, *args, **kwargs)
            constants = [a.as_python_constant() for a in args]
            named = {key: a.as_python_constant() for key, a in kwargs.items()}
            return VariableTracker.build(tx, answer(tensor, name, tuple(constants), named))

        return asked

    def asked_of(name: str, handler: Callable[..., Any]) -> Callable[..., Any]:
        def asked(function: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
            variable = [*args, *kwargs.values()][0].realize()
            if isinstance(variable, TensorVariable) and isinstance(variable.proxy.node.meta.get("example_value"), kind):
                return variable.call_method(tx, name, [], {})
            return handler(function, tx, *args, **kwargs)

        return asked

    rules = {f"method_attr_{name}": name for name in attributes} | {f"method_{name}": name for name in methods}
    rules |= {"sq_length": "__len__"} if hasattr(TensorVariable, "sq_length") else {}  # since 2.13
    for rule, name in rules.items():
        setattr(TensorVariable, rule, asking(name, getattr(TensorVariable, rule)))
    handlers = TorchInGraphFunctionVariable._get_handlers()
    for name in functions:
        handlers[getattr(torch, name)] = asked_of(name, handlers[getattr(torch, name)])


def list_in_compiler(kind: type[torch.Tensor], attribute: str) -> None:
    """Let Dynamo take an attribute of tensors of a type for the list of what is in them. Checked on 2.11, 2.13.

    Args:
        kind: the type, which can be iterated over in compiled code.
        attribute: no other tensor has one of its name.
    """
    from torch._dynamo.variables.base import ValueMutationNew
    from torch._dynamo.variables.lists import ListVariable
    from torch._dynamo.variables.tensor import TensorVariable

    def listed(variable: Any, tx: Any) -> Any:
        if not isinstance(variable.proxy.node.meta.get("example_value"), kind):
            return None
        return ListVariable(variable.unpack_var_sequence(tx), mutation_type=ValueMutationNew())

    setattr(TensorVariable, f"method_attr_{attribute}", listed)


def break_at_gradients(kind: type[torch.Tensor], reason: str) -> None:
    """Let Dynamo not take `.grad` of a tensor of a type, or of what is in it, for None. Checked on 2.11, 2.13.

    The graph breaks at that of a tensor of the type. What is in it would still be what compiled code was given for it
    after the break, so that is an error.

    Args:
        kind: the type.
        reason: what is said of it.
    """
    from torch._dynamo.exc import unimplemented
    from torch._dynamo.variables.tensor import TensorVariable

    rule = getattr(TensorVariable, "method_attr_grad", None)

    def is_kind(node: torch.fx.Node) -> bool:
        return isinstance(node.meta.get("example_value"), kind)

    def gradient(variable: Any, tx: Any) -> Any:
        node = variable.proxy.node
        if is_kind(node):
            unimplemented(gb_type=f".grad of a {kind.__name__}", context=str(variable), explanation=reason, hints=[])
        if any(isinstance(holder, torch.fx.Node) and is_kind(holder) for holder in node.args[:1]):
            raise RuntimeError(reason)
        return None if rule is None else rule(variable, tx)

    setattr(TensorVariable, "method_attr_grad", gradient)  # noqa: B010 (mypy takes no assignment to a method)


def break_at_moves(kind: type[torch.Tensor], reason: str) -> None:
    """Let Dynamo break the graph where `.data` of a tensor of a type is set. Checked on 2.11, 2.13.

    It would write a call that no subclass is asked about.

    Args:
        kind: the type.
        reason: what is said where no break is allowed.
    """
    from torch._dynamo.exc import unimplemented
    from torch._dynamo.variables import builtin

    owner: Any = getattr(builtin, "SetAttrBuiltinVariable", builtin.BuiltinVariable)  # since 2.13
    method = "_call_setattr" if hasattr(owner, "_call_setattr") else "call_setattr"
    rule = getattr(owner, method)

    def call_setattr(variable: Any, tx: Any, tensor: Any, name: Any, value: Any) -> Any:
        is_moved = getattr(tensor, "class_type", None) is kind and name.is_python_constant()
        if is_moved and name.as_python_constant() == "data":
            unimplemented(gb_type=f".data = of a {kind.__name__}", context=str(tensor), explanation=reason, hints=[])
        return rule(variable, tx, tensor, name, value)

    setattr(owner, method, call_setattr)


def show_gradients(kinds: Collection[type[torch.Tensor]]) -> None:
    """Let compiled code read `.grad` of tensors of these types as of torch's own. Checked on 2.11, 2.13.

    Dynamo breaks the graph at it for every subclass.
    """
    from torch._dynamo.variables.tensor import TensorVariable
    from torch._dynamo.variables.torch_function import TensorWithTFOverrideVariable

    rule = TensorWithTFOverrideVariable.var_getattr

    def var_getattr(variable: Any, tx: Any, name: str) -> Any:
        if name == "grad" and variable.class_type in kinds:
            return TensorVariable.var_getattr(variable, tx, name)
        return rule(variable, tx, name)

    setattr(TensorWithTFOverrideVariable, "var_getattr", var_getattr)  # noqa: B010 (as above)


def call_eagerly(function: Callable[..., Any], reason: str) -> None:
    """Have Dynamo break the graph at a call of this function, and compile nothing that it calls. Checked on 2.11, 2.13.

    `torch.compiler.disable` does that with a wrapper, which takes each call some microseconds.

    Args:
        function: written in Python.
        reason: what is said where no break is allowed.
    """
    compile_only_inlined(function)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]


def compile_only_inlined(function: Callable[..., Any]) -> None:
    """Have Dynamo compile a function only within others, and not where it is called between two graphs.

    Checked on 2.11, 2.13.
    """
    from torch._C._dynamo import eval_frame

    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))


def compile_methods_only_inlined(kind: type) -> None:
    """`compile_only_inlined` for what a class defines in Python. Checked on 2.11, 2.13.

    Where a graph breaks, tensors of the class are real ones, and not what compiled code is given for them.
    """
    for member in vars(kind).values():
        for function in (getattr(member, name, None) for name in ("fget", "fset", "__func__")):
            if isinstance(function, FunctionType):
                compile_only_inlined(function)
        if isinstance(member, FunctionType):
            compile_only_inlined(member)


def is_symbolic(value: Any) -> bool:
    """Does it hold a size that the compiler has no number for? Checked on 2.11, 2.13."""
    from torch.fx.experimental.symbolic_shapes import has_free_symbols

    return not isinstance(value, bool | torch.dtype | torch.device | torch.layout) and has_free_symbols(value)


def tell_operands_apart() -> None:
    """Let Dynamo call `a @ tensor` as `Tensor.__rmatmul__(tensor, a)`, where it says `Tensor.matmul(tensor, a)`.

    That is what it says of `tensor @ a`, too; of other operators it tells which stood first. Checked on 2.11, 2.13.
    """
    from torch._dynamo.variables import builtin

    builtin.populate_builtin_to_tensor_fn_map()
    builtin.BUILTIN_TO_TENSOR_RFN_MAP.setdefault(operator.matmul, torch.Tensor.__rmatmul__)
