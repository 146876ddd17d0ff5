"""Private torch APIs of autograd and its transforms: one function each, with the versions checked."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.autograd import grad_mode
from torch.autograd.function import FunctionCtx

from subtensors.dispatch.torch_internals.dispatcher import dispatch_keys, without_modes
from subtensors.dispatch.torch_internals.requires import requires

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def reset_grad_accumulator(leaf: torch.Tensor) -> None:
    """Make autograd create a new node that accumulates this leaf's gradient. Checked on 2.11, 2.13.

    The existing node belongs to the stream it was made on, for as long as any graph holds it. Torch drops it when data
    of another dtype is set. Hooks belong to the tensor, and stay.
    """
    data = leaf.data
    leaf.data = torch.empty(
        0, dtype=torch.float16 if leaf.dtype != torch.float16 else torch.float32, device=leaf.device
    )
    leaf.data = data


@requires("torch._C._FunctionBase.maybe_clear_saved_tensors", otherwise=lambda ctx: list(ctx.saved_tensors))
def release_saved_tensors(ctx: FunctionCtx) -> list[torch.Tensor]:
    """Return the saved tensors of an autograd node, and free them there now unless the graph is retained.

    The compiler's own nodes do the same; other nodes hold theirs until their backward has returned. Checked on 2.11,
    2.13.
    """
    saved = list(ctx.saved_tensors)  # type: ignore[attr-defined]  # torch's stubs leave out both
    ctx.maybe_clear_saved_tensors()  # type: ignore[attr-defined]
    return saved


@requires("torch.autograd.grad_mode._unsafe_preserve_version_counter")
@contextmanager
def without_version_bumps(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Return a context in which writes to some tensors do not bump their version counters. Checked on 2.11, 2.13.

    For callers that restore the values, so that a backward reads the same values as its forward.
    """
    with grad_mode._unsafe_preserve_version_counter(tuple(t for t in tensors if not t.is_inference())):
        yield


BACKWARDS = frozenset({torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad})
"""The functions that run a backward, all of user code in it: hooks, recomputed checkpoints, autograd functions."""


def run_backward(function: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Run one of `BACKWARDS` for a type that overrides torch's functions.

    Torch passes these calls to the type, which can only continue with its overrides switched off; then user code in the
    backward would see each type without them. Gradient edges have no type, so they replace the tensors. Checked on
    2.11, which passes `torch.autograd.backward` to no type, and 2.13.

    Args:
        function: one of the three.
        args, kwargs: as torch passes them to `__torch_function__`.
    """
    if function is not torch.autograd.grad:
        options = {{"gradient": "grad_tensors"}.get(name, name): value for name, value in kwargs.items()}
        roots = [args[0]] if isinstance(args[0], torch.Tensor) else list(args[0])
        if isinstance(given := options.get("inputs"), torch.Tensor):
            options["inputs"] = [given]
        if options.get("inputs"):
            options["inputs"] = list(map(_edge, options["inputs"]))
        # `grad_tensors` may be left out for scalars alone, and an edge does not know whether it is one.
        torch.autograd.backward([_edge(x) for x in roots], *args[1:], **options)
        return None
    outputs, inputs = ([x] if isinstance(x, torch.Tensor) else list(x) for x in args)
    if kwargs.get("is_grads_batched") or not all(getattr(x, "requires_grad", True) for x in (*outputs, *inputs)):
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)
    edges = list(map(_edge, outputs)), list(map(_edge, inputs))
    if not kwargs.get("materialize_grads"):
        return function(*edges, **kwargs)
    found = torch.autograd.grad(*edges, **{**kwargs, "materialize_grads": False})  # an edge knows no zeros
    zeros = functools.partial(torch.zeros_like, requires_grad=kwargs.get("create_graph", False))
    return tuple([zeros(x) if grad is None else grad for x, grad in zip(inputs, found, strict=True)])


def _edge(x: Any) -> Any:
    """Return the gradient edge of a tensor of a subclass; plain tensors, parameters and other values unchanged."""
    if type(x) in (torch.Tensor, torch.nn.Parameter) or not isinstance(x, torch.Tensor):
        return x
    with torch._C.DisableTorchFunctionSubclass(), without_modes():  # torch takes a view of a leaf
        return torch.autograd.graph.get_gradient_edge(x)


@requires("torch._C._autograd._get_current_graph_task_keep_graph", otherwise=lambda: False)
def retains_graph() -> bool:
    """Return whether the backward that is running retains its graph. Checked on 2.13."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def is_fsdp_backward_hook(hook: object) -> bool:
    """Return whether a hook is FSDP2's own, which gathers weights for backward and returns the gradient unread.

    Checked on 2.11, 2.13.

    >>> is_fsdp_backward_hook(print)
    False
    """
    owner = type(getattr(hook, "__self__", None))
    is_fsdp = owner.__module__.startswith("torch.distributed.fsdp._fully_shard.")
    return is_fsdp and getattr(hook, "__name__", "") == "_pre_backward"


def is_fsdp_identity_node(function: object) -> bool:
    """Return whether an autograd node is FSDP2's own, which returns its input and its gradient unchanged.

    Checked on 2.11, 2.13.

    >>> is_fsdp_identity_node(torch.ones(1, requires_grad=True).exp().grad_fn)
    False
    """
    return type(function).__name__ == "RegisterPostBackwardFunctionBackward"


def _fsdp_modules() -> Iterator[tuple[FSDPModule, list[Any]]]:
    """Yield the modules that FSDP2 shards, each with what it holds of each parameter. Checked on 2.13."""
    from torch.distributed._composable_state import _module_state_mapping

    for module, reference in list(_module_state_mapping.items()):
        state = reference()
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        yield (
            cast("FSDPModule", module),
            [param for group in groups if group is not None for param in group.fsdp_params],
        )


@requires("torch.distributed._composable_state._module_state_mapping", otherwise=lambda weights: None)
def free_gathered(params: Iterable[torch.Tensor]) -> None:
    """Free what FSDP2 has gathered of these parameters, which were written to: the next forward gathers them anew.

    It keeps the root's after a forward, for the backward that frees them, and an evaluation has none. Checked on 2.13.
    """
    written = set(map(id, params))
    for module, own in _fsdp_modules():
        if any(id(param.sharded_param) in written for param in own):
            module.reshard()


@requires("torch.distributed._composable_state._module_state_mapping", otherwise=lambda weight: None)
def gathered_again(weight: torch.Tensor) -> torch.Tensor | None:
    """Return a weight that FSDP2 has gathered for a forward and freed after it, with its values. Checked on 2.13.

    Where gradients are recorded, the module's weights stay gathered for the backward, which finds them so and frees
    them. Elsewhere nothing would free them before they change, so a copy is gathered.

    Args:
        weight: the module's, or the memory of one that is a DTensor.

    Returns:
        None for any other tensor.

    >>> gathered_again(torch.ones(2)) is None
    True
    """
    storage = weight.untyped_storage()
    for module, params in _fsdp_modules():
        for param in params:
            unsharded = getattr(param, "_unsharded_param", None)
            if unsharded is None:
                continue
            with torch.no_grad():
                local = unsharded.to_local() if hasattr(unsharded, "to_local") else unsharded
            if local.untyped_storage() is not storage:
                continue
            is_copied = not (torch.is_grad_enabled() or storage.nbytes())
            module.unshard()
            if not is_copied:
                return weight
            copy = weight.clone()
            module.reshard()
            return copy
    return None


def convert_from_local(kind: type[torch.Tensor], convert: Callable[..., torch.Tensor]) -> None:
    """Make `DTensor.from_local`, which plans of `parallelize_module` call, leave a type of tensors to a function.

    A DTensor around such a tensor would call ops on it beneath autograd. The function is called with torch's own
    `from_local`, and then with its arguments. Checked on 2.13.
    """
    from torch.distributed.tensor import DTensor

    original = DTensor.from_local

    @functools.wraps(original)
    def from_local(local_tensor: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        if isinstance(local_tensor, kind):
            return convert(original, local_tensor, *args, **kwargs)
        return original(local_tensor, *args, **kwargs)  # type: ignore[arg-type]  # as they came

    DTensor.from_local = staticmethod(from_local)  # type: ignore[method-assign,assignment]


def is_module_tracker_hook(hook: object) -> bool:
    """Return whether a hook is that of `ModuleTracker`, by which `FlopCounterMode` knows the module it is in.

    It reads no gradient: its function is in the closure of the hook of several tensors. Checked on 2.11, 2.13.

    >>> is_module_tracker_hook(print)
    False
    """
    cells = getattr(hook, "__closure__", None) or ()
    return any(getattr(cell.cell_contents, "__module__", None) == "torch.utils.module_tracker" for cell in cells)


@requires("torch.Tensor._backward_hooks")
def set_leaf_hooks(tensor: torch.Tensor, hooks: Mapping[int, Callable[[torch.Tensor], object]]) -> None:
    """Set the hooks that a leaf calls with its gradient, as `register_hook` does; many leaves may share a table.

    Checked on 2.11, 2.13.

    >>> from collections import OrderedDict
    >>> leaf, gradients = torch.ones(2, requires_grad=True), []
    >>> set_leaf_hooks(leaf, OrderedDict({0: gradients.append}))
    >>> leaf.sum().backward()
    >>> gradients
    [tensor([1., 1.])]
    """
    tensor._backward_hooks = hooks  # type: ignore[assignment]


@requires("torch._C._autograd._top_saved_tensors_default_hooks", otherwise=lambda: True)
def has_saved_tensor_hooks() -> bool:
    """Return whether saved-tensor hooks are active, as under activation checkpointing. Checked on 2.11, 2.13.

    >>> has_saved_tensor_hooks()
    False
    >>> with torch.autograd.graph.save_on_cpu():
    ...     has_saved_tensor_hooks()
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
def reenable_autograd() -> Iterator[None]:
    """Return a context, for an op's implementation, in which autograd and `__torch_function__` work as outside the op.

    Checked on 2.11, 2.13.
    """
    included, excluded = dispatch_keys()
    for name in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor", "ADInplaceOrView"):
        excluded = excluded - torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name))
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch._C._EnableTorchFunction():
        yield


@requires("torch._C._functorch.maybe_current_level", "torch.autograd.forward_ad._current_level")
def is_transforming() -> bool:
    """Return whether a torch.func transform or forward-mode differentiation is active. Checked on 2.11, 2.13."""
    return torch._C._functorch.maybe_current_level() is not None or torch.autograd.forward_ad._current_level >= 0


@requires("torch._C._functorch.is_functorch_wrapped_tensor", "torch.autograd.forward_ad._current_level")
def is_transformed(tensor: torch.Tensor) -> bool:
    """Return whether a torch.func transform (grad, vmap, ...) has wrapped a tensor, or the tensor has a tangent.

    Checked on 2.11, 2.13.
    """
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return True
    forward = torch.autograd.forward_ad
    return forward._current_level >= 0 and forward.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]
