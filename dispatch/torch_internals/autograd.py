"""What torch keeps private of autograd's graph: one function each, with the versions checked."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import grad_mode

from subtensors.dispatch.torch_internals.dispatcher import dispatch_keys
from subtensors.dispatch.torch_internals.requires import requires


def take_new_accumulator(leaf: torch.Tensor) -> None:
    """Have autograd make another node that accumulates this leaf's gradient. Checked on 2.11, 2.13.

    The node that there is belongs to the stream it was made on, for as long as any graph holds it. Torch drops it where
    data of another dtype is set. Hooks are the tensor's own, and stay.
    """
    data = leaf.data
    leaf.data = torch.empty(
        0, dtype=torch.float16 if leaf.dtype != torch.float16 else torch.float32, device=leaf.device
    )
    leaf.data = data


@requires("torch._C._FunctionBase.maybe_clear_saved_tensors", otherwise=lambda ctx: list(ctx.saved_tensors))
def taken_from(ctx: Any) -> list[torch.Tensor]:
    """What a node of autograd's graph kept for its backward, and lets go of now unless the graph is retained.

    As the compiler's own nodes do it: others hold it until their backward has returned. Checked on 2.11, 2.13.
    """
    kept = list(ctx.saved_tensors)
    ctx.maybe_clear_saved_tensors()
    return kept


@requires("torch.autograd.grad_mode._unsafe_preserve_version_counter")
@contextmanager
def unseen_writes(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Autograd doesn't count what is written to some tensors meanwhile. Checked on 2.11, 2.13.

    For whoever puts their values back: a backward that reads one reads what its forward read.
    """
    with grad_mode._unsafe_preserve_version_counter(tuple(t for t in tensors if not t.is_inference())):
        yield


def run_backward(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`Tensor.backward`, `torch.autograd.backward` or `grad` for a type that overrides torch's functions.

    Torch hands them to the type, which can only go on with its overrides switched off; then the backward of an autograd
    function that a user wrote would meet the type with its ops taken apart. Edges of the graph are no type's.
    Checked on 2.11, which hands the second to no type, and 2.13.

    Args:
        function: one of the three.
        args, kwargs: as torch hands them to `__torch_function__`.
    """
    if function is not torch.autograd.grad:
        words = {{"gradient": "grad_tensors"}.get(name, name): value for name, value in kwargs.items()}
        roots = [args[0]] if isinstance(args[0], torch.Tensor) else list(args[0])
        if isinstance(given := words.get("inputs"), torch.Tensor):
            words["inputs"] = [given]
        if words.get("inputs"):
            words["inputs"] = list(map(_edge, words["inputs"]))
        # An edge does not know if it is of a scalar, whose gradient may be left out.
        return torch.autograd.backward([_edge(x) for x in roots], *args[1:], **words)
    outputs, inputs = ([x] if isinstance(x, torch.Tensor) else list(x) for x in args)
    if kwargs.get("is_grads_batched") or not all(getattr(x, "requires_grad", True) for x in (*outputs, *inputs)):
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)
    return function(list(map(_edge, outputs)), list(map(_edge, inputs)), **kwargs)


def _edge(x: Any) -> Any:
    """Where the gradient of a tensor of a type arrives; any other as it is."""
    if type(x) in (torch.Tensor, torch.nn.Parameter) or not isinstance(x, torch.Tensor):
        return x
    with torch._C.DisableTorchFunctionSubclass():
        return torch.autograd.graph.get_gradient_edge(x)


def prepares_backward(hook: object) -> bool:
    """Is a tensor's hook FSDP2's own, which gathers weights for backward and passes the gradient on unseen?

    Checked on 2.11, 2.13.

    >>> prepares_backward(print)
    False
    """
    owner = type(getattr(hook, "__self__", None))
    is_fsdp = owner.__module__.startswith("torch.distributed.fsdp._fully_shard.")
    return is_fsdp and getattr(hook, "__name__", "") == "_pre_backward"


def passes_gradients_on(function: object) -> bool:
    """Is a node of autograd's graph FSDP2's own, which gives its input back and passes its gradient on?

    Checked on 2.11, 2.13.

    >>> passes_gradients_on(torch.ones(1, requires_grad=True).exp().grad_fn)
    False
    """
    return type(function).__name__ == "RegisterPostBackwardFunctionBackward"


@requires("torch.Tensor._backward_hooks")
def hook_of_a_leaf(tensor: torch.Tensor, hooks: OrderedDict[int, Callable[[torch.Tensor], Any]]) -> None:
    """Have a leaf call hooks with its gradient, as `register_hook` would, but of a table that many leaves share.

    Checked on 2.11, 2.13.

    >>> leaf, seen = torch.ones(2, requires_grad=True), []
    >>> hook_of_a_leaf(leaf, OrderedDict({0: seen.append}))
    >>> leaf.sum().backward()
    >>> seen
    [tensor([1., 1.])]
    """
    tensor._backward_hooks = hooks  # type: ignore[assignment]


@requires("torch._C._autograd._top_saved_tensors_default_hooks", otherwise=lambda: True)
def saves_through_hooks() -> bool:
    """Are there hooks on what autograd saves, such as those of activation checkpointing? Checked on 2.11, 2.13.

    >>> saves_through_hooks()
    False
    >>> with torch.autograd.graph.save_on_cpu():
    ...     saves_through_hooks()
    True
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


@requires(
    "torch._C.DispatchKey",
    "torch._C.DispatchKeySet",
    "torch._C._ForceDispatchKeyGuard",
    "torch._C._EnableTorchFunction",
)
@contextmanager
def as_called_outside() -> Iterator[None]:
    """In here, as nowhere else in an op's implementation, autograd records and subclasses see functions of torch.

    Checked on 2.11, 2.13.
    """
    included, excluded = dispatch_keys()
    for name in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor", "ADInplaceOrView"):
        excluded = excluded - torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name))
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch._C._EnableTorchFunction():
        yield
