"""Functions of torch called with chunked tensors.

A function of the table `FAST_PATHS` hands its call to a kernel, or records it without going through torch. Any other
call, and one that its fast path does not take, is recorded op by op or run on materialized values (`record_call.py`).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from subtensors.chunked.lazy_tensor import AliasRef, LazyLinear, LazyTensor, alias_ref, user_tensor
from subtensors.chunked.number import METADATA_QUERIES, ChunkedNumber, may_wait, result_of_rows, waiting_number
from subtensors.chunked.record_call import (
    call_materialized,
    check_not_transformed,
    detach_in_place,
    generator_states,
    log_fallback,
    record_call,
)
from subtensors.chunked.row_indexing import index_select_rows, indexed_rows, select_row, unbind_rows
from subtensors.dispatch.chunked.lazy_graph import (
    LazyValue,
    NeedsMaterialize,
    Waiting,
    constant,
    is_autocast,
    known_tensor,
    recording,
)
from subtensors.dispatch.chunked.linear_loss import (
    cross_entropy_options,
    linear_cross_entropy_loss,
    loss_dtype,
    takes_linear,
    takes_targets,
)
from subtensors.dispatch.chunked.lower_cross_entropy import lowered_cross_entropy
from subtensors.dispatch.chunked.record import record
from subtensors.dispatch.chunked.row_losses import log_softmax_input, record_cross_entropy
from subtensors.dispatch.chunked.rules.contractions import linear_layer
from subtensors.dispatch.chunked.sharded_head import full_tensor
from subtensors.dispatch.ops import linear_cross_entropy as functional
from subtensors.dispatch.ops.errors import RuleError
from subtensors.dispatch.ops.lazy_storage import fill_padding, mask_gradient
from subtensors.dispatch.ops.plain_types import MAPPED_TYPES, MASKED_TYPES, PLAIN_TYPES
from subtensors.dispatch.ops.tree import Args, Kwargs, PyTree, tree_map_only
from subtensors.dispatch.torch_internals.autograd import (
    is_fsdp_backward_hook,
    is_module_tracker_hook,
    is_transforming,
)
from subtensors.kernels.cross_entropy.cross_entropy import CrossEntropy

aten = torch.ops.aten

Kind: TypeAlias = type[LazyTensor]


def is_metadata_query(func: Callable[..., object]) -> bool:
    """Return whether a function reads only metadata, such as sizes and dtype."""
    getter = getattr(func, "__name__", "") == "__get__"
    return func in METADATA_QUERIES or (getter and func not in _VIEW_GETTERS)


def handle_torch_function(
    kind: Kind, func: Callable[..., PyTree], types: Collection[type], args: Args, kwargs: Kwargs
) -> PyTree:
    """Call a function of torch with chunked tensors among its arguments.

    Args:
        kind: the type of results that stay chunked.
        func, types: as torch's overriding protocol passes them.
        args, kwargs: its arguments.

    Returns:
        its results: chunked where they have the rows, plain where they don't; NotImplemented with a type that calls
        the function once for each of its tensors.

    Raises:
        RuleError: it would attach something to the tensor itself that belongs to the one that was chunked, or a
            transform of torch.func would not see the results of its tensors.
    """
    if is_transforming():
        check_not_transformed((args, kwargs))
    if len(types) > 1 and not (MAPPED_TYPES | MASKED_TYPES).isdisjoint(types):
        return NotImplemented
    if len(types) > 1 and ChunkedNumber in types:
        args, kwargs = tree_map_only(ChunkedNumber, ChunkedNumber.realize, (args, kwargs))
    fast_path = FAST_PATHS.get(func)
    if fast_path is not None:
        try:
            result = fast_path(kind, *args, **kwargs)
        except NeedsMaterialize:
            result = None  # op by op it may be recorded
        if result is not None:
            return result
    if func is torch.Tensor.register_hook and is_fsdp_backward_hook(args[1]):
        return _add_backward_hook(*args)
    if func is torch.Tensor.register_hook and is_module_tracker_hook(args[1]):
        return RemovableHandle(OrderedDict())  # what runs for these rows is no module's
    if func in _REFUSED:
        raise RuleError(f"{func.__name__} on a ChunkedTensor: {_REFUSED[func]}")
    if func is torch.Tensor.data_ptr and alias_ref(args[0]).value.tensor is None:
        raise RuleError("data_ptr on a ChunkedTensor: it has no memory; keep its realize() while the address is used")
    if func in _READS_MEMORY:
        return call_materialized(func, args, kwargs)
    states = generator_states(args)
    try:
        return record_call(kind, func, args, kwargs)
    except NeedsMaterialize as error:
        missing = NeedsMaterialize(error.op, error.reason)  # without a traceback, whose frames hold tensors
    except RuntimeError as error:
        if "not allocated" not in str(error) and "data pointer" not in str(error):
            raise
        missing = NeedsMaterialize(getattr(func, "__name__", func), "it reads its operand's memory")
    for generator, state in states:  # ops that were recorded before may have drawn random numbers
        generator.set_state(state)
    result = call_materialized(func, args, kwargs)
    log_fallback(missing)  # not in front of an error of the program's own
    return result


def _linear(kind: Kind, input: object, weight: object, bias: object = None) -> Tensor | None:
    """`F.linear`, recorded without going through torch, and only when more than its cross entropy reads it."""
    if type(weight) not in PLAIN_TYPES or (bias is not None and type(bias) not in PLAIN_TYPES):
        return None
    assert isinstance(weight, Tensor)
    assert bias is None or isinstance(bias, Tensor)
    if not isinstance(input, LazyTensor) or is_autocast(weight.device.type):
        return None
    rows, sizes = alias_ref(input).value, weight.shape
    layout, like = rows.layout, rows.like
    dims = like.ndim
    if layout is None or layout.dim == dims - 1 or len(sizes) != 2 or sizes[1] != like.shape[-1]:
        return None
    if bias is not None and (bias.shape != sizes[:1] or bias.dtype is not like.dtype or bias.device != rows.device):
        return None
    if weight.dtype is not like.dtype or weight.device != rows.device:
        return None
    grad = torch.is_grad_enabled()
    try:
        head = constant(weight), None if bias is None else constant(bias)
        if dims == 2:
            return user_tensor(kind, LazyLinear(rows, *head, grad))
        with recording(grad):
            flat = record(aten.reshape.default, rows, [math.prod(rows.shape[:-1]), rows.shape[-1]])
            if flat.layout is None or flat.layout.dim != 0:
                return None
            out = record(aten.reshape.default, linear_layer(flat, *head, grad), [*rows.shape[:-1], sizes[0]])
    except NeedsMaterialize:
        return None
    return user_tensor(kind, AliasRef(out)) if out.layout is not None else None


def _cross_entropy(
    kind: Kind,
    input: object,
    target: object,
    weight: object = None,
    size_average: object = None,
    ignore_index: int = -100,
    reduce: object = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """`F.cross_entropy`: with the linear layer where the logits are one of the chunked input; otherwise by rows."""
    options = cross_entropy_options(weight, ignore_index, label_smoothing, reduction)
    if not isinstance(input, LazyTensor) or not isinstance(target, Tensor) or options is None:
        return None
    if size_average is not None or reduce is not None:  # torch's deprecated arguments
        return None
    ref = alias_ref(input)
    if type(ref) is LazyLinear and weight is None and type(target) is Tensor and not ref.is_recorded:
        loss = _layer_loss(ref, target, options)
        if loss is not None:
            return loss
    return _class_loss(kind, ref.value, target, options)


def _layer_loss(layer: LazyLinear, target: Tensor, options: CrossEntropy) -> Tensor | None:
    """The cross entropy of a linear layer that nothing else has read; None where its kernels don't take it."""
    rows, grad = layer.rows, torch.is_grad_enabled()
    if not takes_linear(rows, layer.weight, target, options, layer.dtype):
        return None
    needs_grad, layout = grad and layer.needs_grad, rows.row_layout
    dtype, classes = loss_dtype(layer.dtype, rows.device.type), constant(target)

    def alone() -> Tensor | None:
        hidden, weight, known = (known_tensor(x) for x in (rows, layer.weight, classes))
        bias = None if layer.bias is None else known_tensor(layer.bias)
        assert hidden is not None
        assert weight is not None
        assert known is not None
        return linear_cross_entropy_loss(hidden, weight, bias, known, options, layout, needs_grad, dtype)

    def shared() -> LazyValue:
        return record_cross_entropy(layer.recorded(), classes, None, options, dtype, grad)

    if layer.needs_grad and may_wait(rows.like, rows.device):
        return waiting_number(dtype, rows.device, needs_grad, Waiting(alone, shared, layout.axis))
    return alone()


def _linear_cross_entropy(
    kind: Kind, input: Tensor, linear_weight: Tensor, target: Tensor, **named: PyTree
) -> Tensor | None:
    """`F.linear_cross_entropy`: a linear layer and its cross entropy, in chunks of the rows whatever `options` say."""
    try:
        return functional.composed(input, linear_weight, target, **named)
    except functional.NotComposed:
        return None


def _nll_loss(
    kind: Kind,
    input: object,
    target: object,
    weight: object = None,
    size_average: object = None,
    ignore_index: int = -100,
    reduce: object = None,
    reduction: str = "mean",
) -> Tensor | None:
    """`F.nll_loss` of a log-softmax: a cross entropy."""
    options = cross_entropy_options(weight, ignore_index, 0.0, reduction)
    if not isinstance(input, LazyTensor) or not isinstance(target, Tensor) or options is None:
        return None
    scores = alias_ref(input).value
    logits = log_softmax_input(scores)
    is_other = logits is scores or logits.dtype != scores.dtype or target.ndim != 1
    if size_average is not None or reduce is not None or is_other:
        return None
    return _class_loss(kind, logits, target, options)


def _with_aten_arguments(loss: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
    """Return a loss that takes the arguments of its aten op: the reduction is a number, in another place."""

    def called(
        kind: Kind,
        input: object,
        target: object,
        weight: object = None,
        reduction: int = 1,
        ignore_index: int = -100,
        *smoothing: float,
    ) -> Tensor | None:
        name = ("none", "mean", "sum")[reduction]
        return loss(kind, input, target, weight, None, ignore_index, None, name, *smoothing)

    return called


def _class_loss(kind: Kind, logits: LazyValue, target: Tensor, options: CrossEntropy) -> Tensor | None:
    """The cross entropy of logits: by the kernels of a linear layer, or as an op on rows."""
    lazy_target = alias_ref(target).value if isinstance(target, LazyTensor) else constant(full_tensor(target))
    grad = torch.is_grad_enabled()
    weight = None if options.class_weight is None else constant(options.class_weight)
    if not takes_targets(logits, lazy_target, weight, options):
        return None
    dtype = loss_dtype(logits.dtype, logits.device.type)

    def alone() -> Tensor | None:
        known = known_tensor(lazy_target)
        if weight is not None:
            known_tensor(weight)  # which checks that nothing was written to it
        return None if known is None else lowered_cross_entropy(logits, known, options, dtype, grad)

    def shared() -> LazyValue | None:
        try:
            return record_cross_entropy(logits, lazy_target, weight, options, dtype, grad)
        except NeedsMaterialize:
            return None

    if options.reduction != "none":
        needs_grad = grad and logits.needs_grad
        value = shared() if logits.needs_grad and may_wait(logits.like, logits.device) else None
        if value is not None and value.layout is None and logits.layout is not None:
            axis = logits.layout.axis
            return waiting_number(dtype, logits.device, needs_grad, Waiting(alone, lambda: value, axis))
        loss = alone()
        if loss is not None:
            return loss
    value = shared()
    if value is None:
        return None
    return result_of_rows(value) if value.layout is None else user_tensor(kind, AliasRef(value))


def _to(kind: Kind, input: object, *args: object, **named: object) -> Tensor | None:
    """`Tensor.to` a wider dtype, of a linear layer that isn't recorded."""
    ref = alias_ref(input) if isinstance(input, LazyTensor) else None
    dtype = args[0] if len(args) == 1 and not named else named.get("dtype") if not args and len(named) == 1 else None
    if type(ref) is not LazyLinear or ref.is_recorded or not isinstance(dtype, torch.dtype):
        return None
    is_wider = ref.dtype.is_floating_point and dtype.is_floating_point and dtype.itemsize > ref.dtype.itemsize
    return user_tensor(kind, ref.to(dtype, torch.is_grad_enabled())) if is_wider else None


def _fill_padding(kind: Kind, input: LazyTensor, mask: Tensor, value: PyTree) -> Tensor | None:
    """`fill_padding`: a `where` that is known to choose by padding."""
    other = alias_ref(value).value if isinstance(value, LazyTensor) else value
    return _chosen(kind, fill_padding, mask, alias_ref(input).value, other)


def _mask_gradient(kind: Kind, input: Tensor, mask: Tensor, lazy: Tensor) -> Tensor | None:
    """`mask_gradient`: a `where` whose other values are the same, detached."""
    value = alias_ref(input).value if isinstance(input, LazyTensor) else constant(input)
    return _chosen(kind, mask_gradient, mask, value, record(aten.detach.default, value))


def _chosen(kind: Kind, of: Callable[..., Tensor], mask: Tensor, value: LazyValue, other: PyTree) -> Tensor:
    with recording(torch.is_grad_enabled()):
        if not isinstance(other, (LazyValue, Tensor)):
            other = torch.full((), other, dtype=value.dtype, device=value.device)
        out: LazyValue = record(aten.where.self, mask, value, other)
    if out.node is not None:
        out.node.name = of.__name__
    return user_tensor(kind, AliasRef(out))


def _float(kind: Kind, input: object, **named: object) -> Tensor | None:
    return None if named else _to(kind, input, torch.float32)


FAST_PATHS: dict[object, Callable[..., Tensor | tuple[Tensor, ...] | None]] = {
    F.linear: _linear,
    F.cross_entropy: _cross_entropy,
    F.nll_loss: _nll_loss,
    aten.linear.default: _linear,
    aten.cross_entropy_loss.default: _with_aten_arguments(_cross_entropy),
    aten.nll_loss_nd.default: _with_aten_arguments(_nll_loss),
    fill_padding: _fill_padding,
    mask_gradient: _mask_gradient,
    **({} if functional.FUNCTION is None else {functional.FUNCTION: _linear_cross_entropy}),
    Tensor.to: _to,
    Tensor.float: _float,
    **dict.fromkeys((torch.detach_, Tensor.detach_), detach_in_place),
    Tensor.__getitem__: indexed_rows,
    torch.index_select: index_select_rows,
    Tensor.index_select: index_select_rows,
    torch.select: select_row,
    Tensor.select: select_row,
    torch.unbind: unbind_rows,
    Tensor.unbind: unbind_rows,
}
"""Implementations by the torch function that they replace; each returns None where the call is recorded op by op."""


def _add_backward_hook(x: LazyTensor, hook: Callable[[Tensor], Tensor]) -> None:
    """Call a hook before backward reaches the results of these rows, whatever their gradient is."""
    layout = x._ref.value.layout
    if layout is not None:
        layout.axis.add_backward_hook(hook)


_VIEW_GETTERS = {getattr(torch.Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "real", "imag")}

_MEMORY_METHODS = """backward numpy tolist __array__ __deepcopy__ __reduce_ex__ data_ptr untyped_storage __dlpack__
__iter__ __contains__"""

_READS_MEMORY = {torch.autograd.backward, torch.autograd.grad, *(getattr(Tensor, x) for x in _MEMORY_METHODS.split())}
"""Functions that need the memory or the numbers."""

_OTHERS_GRADIENT = "its gradient goes to the tensor that was chunked; call it on that, or on realize()"
_NO_MEMORY = "it has no memory of its own; call it on realize()"

_REFUSED: dict[object, str] = {
    torch.Tensor.requires_grad_: _OTHERS_GRADIENT,
    torch.Tensor.register_hook: _OTHERS_GRADIENT,
    torch.Tensor.register_post_accumulate_grad_hook: _OTHERS_GRADIENT,
    torch.Tensor.retain_grad: _OTHERS_GRADIENT,
    torch.Tensor.share_memory_: _NO_MEMORY,
    torch.Tensor.storage: _NO_MEMORY,
    torch.Tensor.apply_: _NO_MEMORY,
    torch.Tensor.map_: _NO_MEMORY,
}
"""Functions that a ChunkedTensor can't stand for its value in, and why."""
