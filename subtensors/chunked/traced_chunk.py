"""The result of `st.chunk` while a compiler traces: calls on it are noted, and become one op at their end.

The compiler would interleave chunks, and keep several of them in memory. So calls on chunked values are noted as the
source of a program (`source_program.py`). At a call that reduces the rows or the wide dim, as a loss does, the program
becomes one op that is opaque to the compiler (`custom_op.py`), which runs it chunk after chunk. For each noted value
its full counterpart is traced too: it has the sizes and dtype, and the compiler drops the computations that nothing
reads. Where a program can't hold a call, the full value is used, which is logged.

Where a graph breaks, a value leaves it as its full counterpart; the chunked tensor itself goes on as one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TypeAlias

import optree
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.autograd.function import BackwardCFunction

from subtensors.chunked.custom_op import chunk_in_program, chunked_program, copied, overwritten, put
from subtensors.chunked.record_call import log_fallback
from subtensors.chunked.source_program import (
    UNSUPPORTED,
    VIEWS,
    ProgramSource,
    ProgramStep,
    call_kind,
    callee,
    op_kind,
)
from subtensors.chunked.torch_function import is_metadata_query
from subtensors.dispatch.chunked.lazy_graph import NeedsMaterialize
from subtensors.dispatch.ops import wrappers
from subtensors.dispatch.ops.errors import RuleError
from subtensors.dispatch.ops.linear_cross_entropy import composed, composed_op
from subtensors.dispatch.ops.plain_types import LAZY_TYPES, MAPPED_TYPES, MASKED_TYPES
from subtensors.dispatch.ops.tree import Args, Kwargs, PyTree, tree_find, tree_has, tree_map_only
from subtensors.dispatch.torch_internals.dispatcher import is_traced
from subtensors.padded.autograd import with_storage
from subtensors.padded.padded_tensor import PaddedTensor

Division: TypeAlias = tuple[int | bool | None, ...]
"""The arguments of `chunk` in a program, after the tensor."""


class TracedChunk(Tensor):
    """A chunked value, or one computed from it, while a compiler traces; or one that left a graph.

    The compiler notes the call that makes one, and makes it where it traces ops; where a graph runs op by op, with
    values, it is a ChunkedTensor.

    Args:
        x: a plain tensor.
        dim: the dim that holds the rows.
        division: the fields of the policy by which they are divided.
    """

    full: Tensor
    """Its plain counterpart."""
    step: ProgramStep | None
    """The step of the program that computes it; None once it left its graph."""
    division: Division | None
    """The division into chunks of a tensor that was chunked; None for a computed value."""
    is_view: bool
    is_viewed: bool

    @staticmethod
    def __new__(cls, x: Tensor, dim: int, *division: int | bool | None) -> Tensor:  # type: ignore[misc]
        """Return the chunked tensor."""
        if isinstance(x, PaddedTensor):
            return with_storage(x, lambda value: TracedChunk(value.dense, dim, *division))
        x = x.realize() if isinstance(x, TracedChunk) else x
        dim = dim + x.dim() if dim < 0 else dim
        if not _is_compiled(x):
            return chunk_in_program(x, dim, *division)
        return _traced(x, ProgramStep("chunk", (x, dim, *division), {}))

    def __init__(self, x: Tensor, dim: int, *division: int | bool | None) -> None:
        pass

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({tuple(self.shape)}, {self.dtype})"

    def realize(self) -> Tensor:
        """Run the program chunk by chunk, or return the tensor that was chunked if there are no steps."""
        x = _entered(self)
        if not isinstance(x, TracedChunk) or x.step is None:
            return x
        return x.full if x.step.callee == "chunk" else _emit_program(x.step, x.full)

    @property
    def is_in_graph(self) -> bool:
        """True if the graph that it is computed in goes on."""
        return self.step is not None

    @property
    def tensors(self) -> list[Tensor]:
        """Its plain counterpart, as the only element."""
        return [self.full]

    def stored(self) -> list[Tensor]:
        """Return the same."""
        return self.tensors

    def with_stored(self, tensors: list[Tensor]) -> TracedChunk:
        """Return the wrapper of another plain tensor."""
        return _wrapper(tensors[0], None, self.division)

    def __tensor_flatten__(self) -> tuple[list[str], Division | None]:
        division = self.division and tuple([int(n) if isinstance(n, torch.SymInt) else n for n in self.division])
        return ["full"], division

    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: dict[str, Tensor], division: Division | None, outer_size: object, outer_stride: object
    ) -> TracedChunk:
        return _wrapper(inner_tensors["full"], None, division)

    @classmethod
    def __torch_function__(  # type: ignore[override]
        cls, func: Callable[..., PyTree], types: Collection[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> PyTree:
        if not MAPPED_TYPES.isdisjoint(types):
            return NotImplemented
        named = func.overloadpacket if isinstance(func, OpOverload) else func
        name, kwargs = getattr(named, "__name__", ""), kwargs or {}
        is_query = (is_metadata_query(func) and func != _DATA) or name in _ABOUT_THE_WRAPPER
        if is_query or (name in _ON_OUTPUTS and all(x.step is None for x in tree_find(TracedChunk, args))):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        args, kwargs = tree_map_only(TracedChunk, _entered, (args, kwargs))
        if not tree_has(TracedChunk, (args, kwargs)):
            return func(*args, **kwargs)
        if not MASKED_TYPES.isdisjoint(types):
            log_fallback(NeedsMaterialize(name, "it has an operand with rules of its own"))
            args, kwargs = tree_map_only(TracedChunk, _full_value, (args, kwargs))
            return func(*args, **kwargs)
        return _trace_call(func, name, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., PyTree], types: Collection[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> PyTree:
        # A call of autograd's or the compiler's own: an alias of what leaves a graph, or a sum of its gradients.
        x: TracedChunk = tree_find(TracedChunk, args)[0]
        args, kwargs = tree_map_only(TracedChunk, _full_value, (args, kwargs or {}))
        return tree_map_only(Tensor, lambda t: x.with_stored([t]), func(*args, **kwargs))


def _wrapper(full: Tensor, step: ProgramStep | None, division: Division | None) -> TracedChunk:
    """Return a wrapper that autograd does not track."""
    with torch._C.DisableTorchFunctionSubclass():
        out: TracedChunk = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            TracedChunk, full.shape, strides=full.stride(), dtype=full.dtype, device=full.device
        )
    out.full, out.step, out.division, out.is_view, out.is_viewed = full, step, division, False, False
    return out


def _traced(full: Tensor, step: ProgramStep, is_view: bool = False) -> TracedChunk:
    """Return a traced value, which autograd tracks for the case that it leaves its graph."""
    out = _wrapper(full, step, step.args[1:] if step.callee == "chunk" else None)
    out.is_view = is_view
    if full.requires_grad and torch.is_grad_enabled():
        wrappers.join(out, [full])
    return out


def _is_compiled(x: Tensor) -> bool:
    """Return whether a compiler traces calls on a tensor; otherwise a graph runs op by op, or what follows a break."""
    return torch.compiler.is_compiling() or is_traced(x)


def _entered(x: TracedChunk) -> Tensor:
    """Return a value as calls take it: one that comes out of another graph is its plain tensor, chunked if that was."""
    if x.step is not None:
        return _checked(x)
    is_tracked = wrappers.requires_grad(x) and torch.is_grad_enabled()
    full = wrappers.split(x)[0] if is_tracked else x.full
    if x.division is None:
        return full
    if not _is_compiled(full):
        return chunk_in_program(full, *x.division)
    x.full, x.step = full, ProgramStep("chunk", (full, *x.division), {})
    return x


def _checked(x: TracedChunk) -> TracedChunk:
    """Return a value that no autograd.Function took and returned: a program would not go through its backward."""
    with torch._C.DisableTorchFunctionSubclass():
        function = x.grad_fn
    if isinstance(function, BackwardCFunction) and function.name() != "JoinBackward":
        raise RuleError(
            f"a chunked value came out of {function.name().removesuffix('Backward')}, an autograd.Function, and its "
            f"gradient would not go through that function's backward: give it the tensor's realize()"
        )
    return x


def _trace_call(function: Callable[..., PyTree], name: str, args: Args, kwargs: Kwargs) -> PyTree:
    """Note a call with traced chunks among its arguments, and trace it on their full values."""
    if name in UNSUPPORTED:
        raise RuleError(
            f"{name} on chunked values: their gradient goes to the tensor that was chunked; call it on that"
        )
    if name == "linear_cross_entropy":
        return composed(*args, **kwargs)
    if name.startswith("_linear_cross_entropy_batch_chunked"):  # Dynamo traces the function down to its op
        return composed_op(*args, **kwargs)
    if name == "__get__":
        attribute: str = function.__self__.__name__  # type: ignore[attr-defined]
        if attribute == "data":
            return args[0].detach()
        return _trace_functional(function, f"Tensor.{attribute}.__get__", attribute, args, {})
    if name == "__iter__":
        return iter(args[0].unbind(0))
    if name == "copy_":
        return _trace_write(copied, "copied", "copied", args[:2], {})
    if name == "__setitem__":
        _trace_write(put, "put", "put", args, {})
        return None
    if name in _IN_PLACE or (name.endswith("_") and not name.endswith("__")):
        bare = _IN_PLACE.get(name, name[:-1])
        return _trace_write(getattr(Tensor, bare, None), f"Tensor.{bare}", bare, args, kwargs)
    return _trace_functional(function, callee(function, name), name, args, kwargs)


def _trace_functional(
    function: Callable[..., PyTree], expression: str, name: str, args: Args, kwargs: Kwargs
) -> PyTree:
    """The same for a call that writes to nothing, which a program calls by an expression."""
    if name in ("linear", "matmul", "__matmul__", "mm", "bmm"):
        args = _autocast_factors(args)
    full_args, full_kwargs = tree_map_only(TracedChunk, _full_value, (args, kwargs))
    full: PyTree = function(*full_args, **full_kwargs)
    kind = op_kind(function) if isinstance(function, OpOverload) else call_kind(name)
    has_several = not isinstance(full, Tensor) and kind != "split"
    if kind == "" or expression == "" or has_several or not _can_record(name, args, kwargs):
        log_fallback(NeedsMaterialize(name, "the program of a compiled graph can't hold it"))
        return full
    operands: list[TracedChunk] = tree_find(TracedChunk, (args, kwargs))
    args, kwargs = tree_map_only(TracedChunk, lambda x: x.step, (args, kwargs))
    if kind == "end" or (kind == "step" and full.dim() == 0):
        return _emit_program(ProgramStep(expression, args, kwargs), full)
    is_view = kind == "split" or name in VIEWS or (isinstance(function, OpOverload) and function.is_view)
    if is_view:
        for x in operands:
            x.is_viewed = True
    if kind == "split":
        return tuple([_traced(w, ProgramStep(expression, args, kwargs, k), True) for k, w in enumerate(full)])
    return _traced(full, ProgramStep(expression, args, kwargs), is_view)


def _trace_write(
    function: Callable[..., PyTree] | None, expression: str, name: str, args: Args, kwargs: Kwargs
) -> TracedChunk:
    """Run an in-place call as its functional form, whose result replaces the value of the first operand.

    Raises:
        RuleError: its memory may be that of another value, which would not see the write.
    """
    chunk: TracedChunk = args[0]
    result: PyTree = None
    if function is not None and isinstance(chunk, TracedChunk) and not chunk.is_view and not chunk.is_viewed:
        result = _trace_functional(function, expression, name, args, kwargs)
    if not isinstance(result, TracedChunk) or result.dtype != chunk.dtype:
        raise RuleError(f"{name}_ with chunked values under torch.compile has no rule here: take what {name} returns")
    if chunk.full.requires_grad and not torch.is_grad_enabled() and name != "detach":
        with torch.enable_grad():
            step = ProgramStep("overwritten", (chunk.step, result.step), {})
            result = _traced(overwritten(chunk.full, result.full), step)
    chunk.full, chunk.step, chunk.division = result.full, result.step, None
    if wrappers.requires_grad(result):
        wrappers.join(chunk, [chunk.full])
    return chunk


def _autocast_factors(args: Args) -> Args:
    """Cast factors as autocast would, before the program reads them: once, and their gradients stay small."""

    def cast(x: PyTree) -> PyTree:
        is_cast = isinstance(x, Tensor) and torch.is_autocast_enabled(x.device.type) and x.dtype == torch.float32
        return x.to(torch.get_autocast_dtype(x.device.type)) if is_cast else x

    return tuple(map(cast, args))


def _can_record(name: str, args: Sequence[PyTree], kwargs: Kwargs) -> bool:
    """Return whether a program can hold a call: it draws no random numbers, and its arguments have a source."""
    if name == "dropout" and kwargs.get("training", args[2] if len(args) > 2 else True):
        return False
    call: PyTree = (args, kwargs)
    leaves = optree.tree_leaves(call, none_is_leaf=True)
    parts = [part for x in leaves for part in ((x.start, x.stop, x.step) if isinstance(x, slice) else (x,))]
    return all(x is None or x is Ellipsis or isinstance(x, _NAMEABLE) for x in parts)


_NAMEABLE = (Tensor, int, float, str, torch.SymInt, torch.SymFloat, torch.dtype, torch.device, torch.memory_format)


def _full_value(chunk: TracedChunk) -> Tensor:
    return chunk.full


def _emit_program(step: ProgramStep, full: Tensor) -> Tensor:
    """Add a program to the compiler's graph as one op, and return its result."""
    program = ProgramSource(step)
    grad = torch.is_grad_enabled()
    needs = [grad and t.requires_grad for t in program.tensors]
    is_short = torch.float16 in [t.dtype for t, n in zip(program.tensors, needs, strict=True) if n]
    deferred = full.dim() > 0 or is_short or not full.is_floating_point()
    given = (program.tensors, program.text, program.ints, program.floats, needs, deferred, list(full.shape), full.dtype)
    result: Tensor = chunked_program(*given)[0]
    return result


_ABOUT_THE_WRAPPER = wrappers.QUERIES - UNSUPPORTED - {"type"} | {"grad", "__set__", "__delete__"}
"""Functions that a compiler calls on the wrapper itself."""

_ON_OUTPUTS = ("detach", "contiguous")
"""Functions that a compiler calls on what leaves a graph, to learn the type of its gradient."""

_DATA = Tensor.data.__get__  # type: ignore[attr-defined]

_IN_PLACE = {f"__i{name}__": name for name in ("add", "sub", "mul", "truediv", "pow")}
"""The functional forms of in-place operators."""

LAZY_TYPES.add(TracedChunk)
