"""`ChunkedTensor`: a tensor too big in what follows it, whose ops run chunk by chunk."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NoReturn

import optree
import torch
from torch import Tensor
from torch._ops import OpOverload

from subtensors.dispatch.errors import RuleError, SizeError
from subtensors.dispatch.op_classes import functional_form, is_in_place
from subtensors.dispatch.region.axis import Axis, Layout, Policy, meta_of
from subtensors.dispatch.region.cells import Cell
from subtensors.dispatch.region.evaluation import evaluate
from subtensors.dispatch.region.graph import NeedsValues, Value, constant, gathered, recording
from subtensors.dispatch.region.lowering import LoweredPlan, lowered_cross_entropy
from subtensors.dispatch.region.placing import Call
from subtensors.dispatch.region.plan import Plan
from subtensors.dispatch.region.rules import record
from subtensors.dispatch.torch_private import schema_of
from subtensors.traced_chunk import traced_chunk

_log = logging.getLogger(__name__)

fallbacks: Counter[str] = Counter()
"""How often each op had its operands realised, since it has no rule or its rule didn't hold."""


class ChunkedTensor(torch.Tensor):
    """A tensor whose ops are recorded, and run chunk by chunk when a number or another whole value is asked for.

    Sizes, dtype and device are those of the whole. What has lost the chunked dim (a loss, a gradient of a weight) is
    a plain tensor at once; what has it stays chunked, and `realize()` makes it plain. Gradients reach the tensor that
    was chunked and every plain tensor that joined.

    Args:
        x: the tensor, of at least one dim.
        dim: the dim whose rows are chunked.
        chunks, rows, memory_limit, accumulate, compile: see `chunk`.

    Example:
        >>> h = ChunkedTensor(torch.ones(6, 2), chunks=3)
        >>> h @ torch.ones(2, 4)
        ChunkedTensor((6, 4), float32, cpu, rows in dim 0, 1 op recorded)
        >>> (h @ torch.ones(2, 4)).sum()
        tensor(48.)
    """

    _cell: Cell

    @staticmethod
    def __new__(
        cls,
        x: Tensor,
        dim: int = 0,
        *,
        chunks: int | None = None,
        rows: int | None = None,
        memory_limit: int | str | None = None,
        accumulate: Literal["exact", "fast"] = "exact",
        compile: bool = False,
    ) -> ChunkedTensor:
        """The tensor, chunked."""
        policy = _policy(chunks, rows, memory_limit, accumulate, compile)
        x = x.realize() if isinstance(x, ChunkedTensor) else x
        if not isinstance(x, Tensor):
            raise TypeError(f"chunk takes a tensor, got {type(x).__name__}")
        if x.ndim == 0:
            raise SizeError("a tensor of no dims has no rows to chunk")
        if not -x.ndim <= dim < x.ndim:
            raise IndexError(f"dim must be in [{-x.ndim}, {x.ndim - 1}], got {dim}")
        return _outer(Cell(_leaf(x, dim % x.ndim, Axis(x.shape[dim], policy, x.numel()))))

    def __init__(self, x: Tensor, dim: int = 0, **kwargs: Any) -> None:
        pass

    def realize(self) -> Tensor:
        """The whole as a plain tensor, its ops run chunk by chunk.

        Returns:
            a dense tensor; differentiable, with each chunk computed again in backward.

        Example:
            >>> ChunkedTensor(torch.ones(3), rows=2).mul(2).realize()
            tensor([2., 2., 2.])
        """
        return evaluate(self._cell.value)

    def explain(self) -> str:
        """The pass over the chunks that `realize()` would run: chunks, bytes, what it reads, ops."""
        whole = gathered(self._cell.value)
        return repr(self) if whole.node is None else Plan([whole]).describe()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        value = self._cell.value
        count = _ops(value)
        dim = "" if value.layout is None else f", rows in dim {value.layout.dim}"
        dtype = str(value.dtype).removeprefix("torch.")
        recorded = f"{count} op{'' if count == 1 else 's'} recorded"
        return f"ChunkedTensor({tuple(value.shape)}, {dtype}, {value.device}{dim}, {recorded})"

    __str__ = __repr__

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _OF_THE_TENSOR_ITSELF or (
            getattr(func, "__name__", "") == "__get__" and func not in _GETTERS_OF_VIEWS
        ):
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        if func in _REFUSED:
            _refuse(func)
        if func in _OF_VALUES:
            return _on_values(func, args, kwargs)
        if func in _LOWERED and (loss := _LOWERED[func](*args, **kwargs)) is not None:
            return loss
        drawn = _generators(args)
        try:
            return _recorded(func, args, kwargs)
        except NeedsValues as missing:
            _note(missing)
        except RuntimeError as error:
            if "not allocated" not in str(error) and "data pointer" not in str(error):
                raise
            _note(NeedsValues(getattr(func, "__name__", func), "it reads its operand's memory"))
        for put_back, state in drawn:  # what was recorded before may have drawn random numbers
            put_back(state)
        return _on_values(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _dispatched(func, args, kwargs or {})


def chunk(
    x: Tensor,
    dim: int = 0,
    *,
    chunks: int | None = None,
    rows: int | None = None,
    memory_limit: int | str | None = None,
    accumulate: Literal["exact", "fast"] = "exact",
    compile: bool = False,
) -> ChunkedTensor:
    """Have what follows `x` run chunk by chunk along a dim, so that nothing of it is ever there in full.

    Args:
        x: a tensor of any dtype, with at least one dim.
        dim: the dim whose rows are chunked.
        chunks: how many chunks; at most one of `chunks`, `rows` and `memory_limit` is given. With none, chunks are as
            long as the region's values and the free memory allow.
        rows: rows in a chunk; the last may have fewer.
        memory_limit: bytes that a chunk's values and their gradients may take: an int, or text such as "1GiB".
        accumulate: how gradients of weights add up over chunks: "exact", as in one sum of higher precision, or "fast",
            rounded to the gradient's dtype at each chunk.
        compile: run the maths of a chunk through torch.compile.

    Returns:
        a ChunkedTensor of the sizes, dtype and device of `x`.

    Raises:
        SizeError: a count below one, or a tensor of no dims.
        ValueError: more than one of the counts, or an unknown word.
        IndexError: no such dim.

    Example:
        >>> import subtensors as st
        >>> hidden, weight = torch.randn(8, 4, requires_grad=True), torch.randn(50, 4, requires_grad=True)
        >>> h = st.chunk(hidden, chunks=4)
        >>> loss = torch.nn.functional.cross_entropy(torch.nn.functional.linear(h, weight), torch.arange(8))
        >>> loss.backward()
        >>> weight.grad.shape
        torch.Size([50, 4])
    """
    if torch.compiler.is_compiling():
        policy = _constant_policy(chunks, rows, memory_limit, accumulate, compile)
        traced: ChunkedTensor = traced_chunk(x, dim, policy)
        return traced
    return ChunkedTensor(
        x, dim, chunks=chunks, rows=rows, memory_limit=memory_limit, accumulate=accumulate, compile=compile
    )


def explain_loss(loss: Tensor) -> str:
    """The passes over chunks that a plain tensor was computed by.

    Args:
        loss: a tensor with a graph.

    Returns:
        for each pass: chunks, bytes, what it reads, ops.

    Example:
        >>> print(explain_loss(chunk(torch.ones(6, 2, requires_grad=True), chunks=3).exp().sum()))
        3 chunks of 2 of 6 rows, 32 B a chunk
          reads by rows float32[6, 2]
          exp.default -> float32[6, 2]
          sum.dim_IntList -> float32[] (sum over chunks)
    """
    plans: list[Plan | LoweredPlan] = []
    seen, stack = set[Any](), [loss.grad_fn]
    while stack:
        function: Any = stack.pop()
        if function is None or function in seen:
            continue
        seen.add(function)
        if isinstance(plan := getattr(function, "plan", None), Plan | LoweredPlan):
            plans.append(plan)
        stack.extend(following for following, _ in function.next_functions)
    return "\n".join(plan.describe() for plan in plans) or "a plain tensor; nothing of its graph was chunked"


_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


def _policy(
    chunks: int | None, rows: int | None, memory_limit: int | str | None, accumulate: str, compile: bool
) -> Policy:
    given = {"chunks": chunks, "rows": rows, "memory_limit": memory_limit}
    asked = {name: value for name, value in given.items() if value is not None}
    if len(asked) > 1:
        raise ValueError(f"chunk takes one of chunks, rows and memory_limit; got {', '.join(asked)}")
    limit = _bytes(memory_limit)
    for name, count in {**asked, **({"memory_limit": limit} if limit is not None else {})}.items():
        if not isinstance(count, int) or isinstance(count, bool):
            raise TypeError(f"{name} is a whole number, got {count!r}")
        if count < 1:
            raise SizeError(f"{name} must be at least 1, got {count}")
    if accumulate not in ("exact", "fast"):
        raise ValueError(f'accumulate is "exact" or "fast", got {accumulate!r}')
    return Policy(chunks, rows, limit, accumulate == "exact", compile)


_constant_policy = torch.compiler.assume_constant_result(_policy)


def _bytes(limit: int | str | None) -> int | None:
    if not isinstance(limit, str):
        return limit
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", limit)
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(f'memory_limit is bytes, or text such as "1GiB" or "500MB"; got {limit!r}')
    return int(float(match[1]) * _UNITS[match[2].upper()])


def _leaf(x: Tensor, dim: int, axis: Axis) -> Value:
    value = Value(meta_of(x), x.device, Layout(axis, dim, x.shape[dim]), None, x.requires_grad)
    value.tensor = x
    value.version = None if x.is_inference() else x._version
    return value


def _ops(value: Value) -> int:
    seen, stack = set[int](), [value]
    while stack:
        node = stack.pop().node
        if node is not None and id(node) not in seen:
            seen.add(id(node))
            stack.extend(x for x in node.operands() if isinstance(x, Value))
    return len(seen)


def _shell(cell: Cell) -> ChunkedTensor:
    """A tensor of the cell, as the ops beneath autograd see it."""
    meta = cell.value.meta
    with torch._C.DisableTorchFunctionSubclass():
        out = torch.Tensor._make_wrapper_subclass(
            ChunkedTensor, meta.shape, strides=meta.stride(), dtype=meta.dtype, device=cell.value.device
        )
    out._cell = cell
    return out


def _outer(cell: Cell) -> ChunkedTensor:
    """A tensor of the cell, as its user sees it."""
    out = _shell(cell)
    _show_gradient(out)
    return out


def _show_gradient(x: ChunkedTensor) -> None:
    """Have the tensor say whether a gradient flows through it, and refuse one that autograd itself would bring."""
    needs = x._cell.value.needs_grad
    with torch._C.DisableTorchFunctionSubclass():
        if needs != x.requires_grad:
            x.requires_grad_(needs)
            if needs:
                x.register_hook(_unreachable)  # type: ignore[no-untyped-call]


def _unreachable(grad: Tensor) -> NoReturn:
    raise RuleError(
        "a gradient reached a ChunkedTensor from outside its region, through an autograd.Function of your own perhaps: "
        "give that function the tensor's realize()"
    )


def _recorded(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function of torch with every op in it recorded, and evaluate those of its results that are whole."""
    grad = torch.is_grad_enabled()
    users: dict[int, ChunkedTensor] = {}
    borrowed: dict[int, ChunkedTensor] = {}
    lent: dict[int, Tensor] = {}

    def lower(x: Any) -> Any:
        if isinstance(x, ChunkedTensor):
            users[id(x._cell)] = x
            return _shell(x._cell)
        if grad and isinstance(x, Tensor) and x.requires_grad:
            # Ops on it inside the function must be recorded too, or its gradient would be lost there.
            if id(x) not in borrowed:
                borrowed[id(x)] = _shell(Cell(constant(x), borrowed=True))
                lent[id(borrowed[id(x)]._cell)] = x
            return borrowed[id(x)]
        return x

    call: Any = (args, kwargs)
    inner_args, inner_kwargs = optree.tree_map(lower, call, none_is_leaf=True)
    writes = {key: x._cell.writes for key, x in users.items()}
    with torch.no_grad(), recording(grad), torch._C.DisableTorchFunctionSubclass():
        out = func(*inner_args, **inner_kwargs)
    for key, x in users.items():
        if x._cell.writes != writes[key]:
            _show_gradient(x)

    def lift(x: Any) -> Any:
        if not isinstance(x, ChunkedTensor):
            return x
        key = id(x._cell)
        if key in users:
            return users[key]
        if key in lent:
            return lent[key]
        return evaluate(x._cell.value) if x._cell.value.layout is None else _outer(x._cell)

    return optree.tree_map(lift, out, none_is_leaf=True)


def _dispatched(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record one op, beneath autograd."""
    if is_in_place(op):
        return _write(op, args, kwargs)
    if functional_form(op) is not op:
        raise NeedsValues(op, "it writes to a tensor that it is given")
    if torch.is_inference_mode_enabled():
        # There composite ops arrive as they are called.
        with torch._C.DisableTorchFunctionSubclass():
            decomposed = op.decompose(*args, **kwargs)
        if decomposed is not NotImplemented:
            return decomposed
    cells = optree.tree_map(
        lambda v: Cell(v) if isinstance(v, Value) else v,
        record(op, *_values(args), **_values(kwargs)),
        none_is_leaf=True,
    )
    if op.is_view and args and isinstance(args[0], ChunkedTensor):
        made = [c for c in optree.tree_leaves(cells) if isinstance(c, Cell)]
        for place, cell in enumerate(made):
            cell.view_of(args[0]._cell, op, _values(args[1:]), _values(kwargs), place)
    return optree.tree_map(lambda c: _shell(c) if isinstance(c, Cell) else c, cells, none_is_leaf=True)


def _values(tree: Any) -> Any:
    def value(x: Any) -> Any:
        return x._cell.value if isinstance(x, ChunkedTensor) else x

    return optree.tree_map(value, tree, none_is_leaf=True)


def _write(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An in-place op: what its functional form gives takes the place of the first operand's value."""
    functional = functional_form(op)
    target = args[0] if args else None
    if functional is None or not isinstance(target, ChunkedTensor):
        raise NeedsValues(op, "it writes to a plain tensor")
    old = target._cell.value
    if op is torch.ops.aten.copy_.default:
        source = record(torch.ops.aten._to_copy.default, _values(args[1]), dtype=old.dtype, device=old.device)
        new = record(torch.ops.aten.expand.default, source, list(old.shape))
    else:
        # By name: the functional form may order them otherwise, or lack a default.
        call = Call(op, _values(args), _values(kwargs))
        given = {a.name: call[a.name] for a in call.arguments}
        new = record(functional, **{a.name: given[a.name] for a in schema_of(functional).arguments if a.name in given})
    if not isinstance(new, Value) or new.shape != old.shape:
        raise NeedsValues(op, "it has several results, or changes sizes")
    if new.dtype != old.dtype:
        new = record(torch.ops.aten._to_copy.default, new, dtype=old.dtype)
    target._cell.write(new)
    return target


def _generators(args: tuple[Any, ...]) -> list[tuple[Callable[[Tensor], None], Tensor]]:
    """The states of the generators that a call may draw from, and how each is put back."""
    states: list[tuple[Callable[[Tensor], None], Tensor]] = [(torch.set_rng_state, torch.get_rng_state())]
    for x in args:
        if isinstance(x, Tensor) and x.is_cuda and not torch.cuda.is_current_stream_capturing():
            states.append((partial(torch.cuda.set_rng_state, device=x.device), torch.cuda.get_rng_state(x.device)))
            break
    return states


def _note(missing: NeedsValues) -> None:
    fallbacks[missing.op] += 1
    if fallbacks[missing.op] == 1:
        _log.warning("%s on a ChunkedTensor: %s; its operands are realized", missing.op, missing.reason)


def _on_values(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function of torch on realised operands; one that it writes to is chunked as before."""
    name = getattr(func, "__name__", "")
    writes = (name.endswith("_") and not name.endswith("__")) or name.startswith(("__i", "__setitem__"))
    realised: dict[int, tuple[ChunkedTensor, Tensor, int]] = {}

    def dense(x: Any) -> Any:
        if not isinstance(x, ChunkedTensor):
            return x
        if id(x._cell) not in realised:
            tensor = x.realize()
            tensor = tensor.clone() if writes else tensor
            realised[id(x._cell)] = (x, tensor, 0 if tensor.is_inference() else tensor._version)
        return realised[id(x._cell)][1]

    call: Any = (args, kwargs)
    plain_args, plain_kwargs = optree.tree_map(dense, call, none_is_leaf=True)
    out = func(*plain_args, **plain_kwargs)
    if not writes:
        return out
    users: dict[int, ChunkedTensor] = {}
    for x, tensor, version in realised.values():
        layout = x._cell.value.layout
        if layout is not None and (tensor.is_inference() or tensor._version != version):
            axis = Axis(tensor.shape[layout.dim], layout.axis.policy, tensor.numel())
            x._cell.write(_leaf(tensor, layout.dim, axis))
            _show_gradient(x)
            users[id(tensor)] = x
    return optree.tree_map(lambda y: users.get(id(y), y), out, none_is_leaf=True)


def _refuse(func: Callable[..., Any]) -> NoReturn:
    raise RuleError(
        f"{func.__name__} on a ChunkedTensor: its gradient goes to the tensor that was chunked; call it on that, or on "
        f"realize()"
    )


def _cross_entropy(
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """`F.cross_entropy` by its kernels, where the logits are a linear layer of what was chunked."""
    plain = isinstance(target, Tensor) and not isinstance(target, ChunkedTensor) and size_average is reduce is None
    if not plain or not isinstance(input, ChunkedTensor) or isinstance(weight, ChunkedTensor):
        return None
    return lowered_cross_entropy(
        input._cell.value,
        target,
        class_weight=weight,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        grad=torch.is_grad_enabled(),
    )


_LOWERED: dict[Any, Callable[..., Tensor | None]] = {torch.nn.functional.cross_entropy: _cross_entropy}

# Answered by the tensor's own metadata, without its values.
_OF_THE_TENSOR_ITSELF = {
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.stride,
    torch.Tensor.numel,
    torch.Tensor.is_floating_point,
    torch.Tensor.is_complex,
    torch.Tensor.element_size,
    torch.Tensor.is_contiguous,
    torch.Tensor.__len__,
    torch.Tensor.__hash__,
    torch.is_floating_point,
    torch.is_complex,
    torch.numel,
}

_GETTERS_OF_VIEWS = {getattr(torch.Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "real", "imag")}

# Asks for the memory or for numbers.
_OF_VALUES = {
    torch.Tensor.backward,
    torch.Tensor.numpy,
    torch.Tensor.tolist,
    torch.Tensor.__array__,
    torch.Tensor.__deepcopy__,
    torch.Tensor.__reduce_ex__,
    torch.Tensor.data_ptr,
    torch.Tensor.untyped_storage,
    torch.Tensor.__dlpack__,
    torch.Tensor.__iter__,
    torch.Tensor.__format__,
    torch.Tensor.__contains__,
}

_REFUSED = {
    torch.Tensor.requires_grad_,
    torch.Tensor.register_hook,
    torch.Tensor.register_post_accumulate_grad_hook,
    torch.Tensor.retain_grad,
}
