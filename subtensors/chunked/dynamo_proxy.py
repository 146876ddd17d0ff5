"""Proxies that `st.chunk` returns under torch.compile: calls on them are recorded, and become one op at their end.

The compiler would interleave chunks, and keep several of them in memory. So calls on chunked values are recorded as the
source of a program (`source_program.py`). At a call that reduces the rows or the wide dim, as a loss does, the program
becomes one op that is opaque to the compiler (`custom_op.py`), which runs it chunk after chunk. For each recorded value
its full counterpart is traced too: it has the sizes and dtype, and the compiler drops the computations that nothing
reads. Where a program can't hold a call, the full value is used, which is logged.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Collection, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from subtensors.chunked.custom_op import chunked_program, put
from subtensors.chunked.dynamo_ops import UNSUPPORTED, VIEWS, call_kind, function_name, qualified_name
from subtensors.chunked.source_program import ProgramSource, ProgramStep, merged_steps
from subtensors.dispatch.chunked.row_layout import Policy
from subtensors.dispatch.ops.errors import RuleError
from subtensors.dispatch.ops.linear_cross_entropy import composed
from subtensors.dispatch.ops.tree import Args, Kwargs, PyTree
from subtensors.dispatch.torch_internals.dynamo import trace_rmatmul
from subtensors.padded.padded_tensor import PaddedTensor

_log = logging.getLogger(__name__)


class TracedChunk:
    """A chunked value, or one computed from it, while a compiler traces.

    Args:
        full: its plain counterpart.
        step: the step of the program that computes it.
        is_view: whether it may share the memory of another value.
    """

    def __init__(self, full: Tensor, step: ProgramStep, is_view: bool = False) -> None:
        self.full = full
        self.step = step
        self.is_view = is_view
        self.is_viewed = False

    def realize(self) -> Tensor:
        """Run the program chunk by chunk, or return the tensor that was chunked if there are no steps."""
        return self.full if self.step.callee == "chunk" else _emit_program(self.step, self.full)

    def __getattr__(self, name: str) -> PyTree:
        if name in _METADATA_NAMES:
            return getattr(self.full, name)
        if name in ("T", "mT", "H", "mH"):
            return self.permute(*_reversed(self.full, name))
        if name == "data":
            return self.detach()

        def method(*args: PyTree, **kwargs: PyTree) -> PyTree:
            return _trace_call(getattr(Tensor, name), f"Tensor.{name}", name, (self, *args), kwargs)

        return method

    def __len__(self) -> int:
        return self.full.shape[0]

    def __iter__(self) -> Iterator[PyTree]:
        return iter([self.select(0, k) for k in range(len(self))])

    def __setitem__(self, key: PyTree, value: PyTree) -> None:
        _trace_write(put, "put", "put_", (self, key, value), {})

    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., PyTree], types: Collection[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> PyTree:
        name = function_name(func)
        if name == "__getitem__" and isinstance(args[1], TracedChunk):
            args = (args[1], args[0])  # for `a[b]` the compiler passes a tensor first
        if name == "__eq__":
            return _trace_call(torch.eq, "torch.eq", "eq", args, {})
        if name == "__rmatmul__":
            return _trace_call(torch.matmul, "torch.matmul", "matmul", (args[1], args[0]), {})
        return _trace_call(func, _callee(func, name), name, args, kwargs or {})


_METADATA_NAMES = frozenset(
    """shape dtype device layout ndim size stride dim numel is_floating_point is_complex is_cuda itemsize nbytes
    element_size requires_grad""".split()
)


def _reversed(full: Tensor, name: str) -> list[int]:
    dims = list(range(full.dim()))
    return dims[::-1] if name in ("T", "H") else [*dims[:-2], dims[-1], dims[-2]]


def _callee(func: Callable[..., PyTree], name: str) -> str:
    """Return the name by which a program calls a function; empty if it has none."""
    if getattr(F, name, None) is func:
        return f"F.{name}"
    if getattr(torch, name, None) is func:
        return f"torch.{name}"
    found: str = qualified_name(name)
    return found


def _trace_call(function: Callable[..., PyTree], callee: str, name: str, args: Args, kwargs: Kwargs) -> PyTree:
    """Record a call with traced chunks among its arguments, and trace it on their full values.

    Args:
        function: the function that is called.
        callee: the expression by which a program calls it.
        name: its name.
        args, kwargs: its arguments.
    """
    if name in UNSUPPORTED:
        raise RuleError(
            f"{name} on chunked values: their gradient goes to the tensor that was chunked; call it on that"
        )
    if name == "linear_cross_entropy":
        return composed(*args, **kwargs)
    if name.endswith("_") and not name.endswith("__"):
        bare = name[:-1]
        return _trace_write(getattr(Tensor, bare, None), f"Tensor.{bare}", name, args, kwargs)
    if isinstance(args[0], (int, float)):
        args = (torch.as_tensor(args[0]), *args[1:])  # `2 * h`
    if name in ("linear", "matmul", "mm", "bmm"):
        args = _autocast_factors(args)
    function = operator.getitem if name == "__getitem__" else function
    full: PyTree = function(*_replace_chunks(args, _full_value), **_replace_chunks(kwargs, _full_value))
    kind = call_kind(name)
    has_several = not isinstance(full, Tensor) and kind != "split"
    if kind == "" or callee == "" or has_several or not _can_record(name, args, kwargs):
        _log_full(name)
        return full
    operands = _chunks((args, list(kwargs.values())))
    args, kwargs = _replace_chunks(args, _step), _replace_chunks(kwargs, _step)
    before = merged_steps([x.step for x in operands])
    if kind == "end" or (kind == "step" and full.dim() == 0):
        return _emit_program(ProgramStep(callee, args, kwargs, before), full)
    is_view = kind == "split" or name in VIEWS
    if is_view:
        for x in operands:
            x.is_viewed = True
    if kind == "split":
        return tuple([TracedChunk(w, ProgramStep(callee, args, kwargs, before, k), True) for k, w in enumerate(full)])
    return TracedChunk(full, ProgramStep(callee, args, kwargs, before), is_view)


def _trace_write(
    function: Callable[..., PyTree] | None, callee: str, name: str, args: Args, kwargs: Kwargs
) -> TracedChunk:
    """Run an in-place call as its functional form, whose result replaces the value of the first operand.

    Raises:
        RuleError: its memory may be that of another value, which would not see the write.
    """
    chunk, bare = args[0], name[:-1]
    result: PyTree = None
    if function is not None and isinstance(chunk, TracedChunk) and not chunk.is_view and not chunk.is_viewed:
        result = _trace_call(function, callee, bare, args, kwargs)
    if not isinstance(result, TracedChunk) or result.dtype != chunk.dtype:
        raise RuleError(f"{name} with chunked values under torch.compile has no rule here: take what {bare} returns")
    chunk.full, chunk.step = result.full, result.step
    written: TracedChunk = chunk
    return written


def _autocast_factors(args: Args) -> Args:
    """Cast factors as autocast would, before the program reads them: once, and their gradients stay small."""
    cast: list[PyTree] = []
    for x in args:
        if isinstance(x, Tensor) and torch.is_autocast_enabled(x.device.type) and x.dtype == torch.float32:
            x = x.to(torch.get_autocast_dtype(x.device.type))
        cast.append(x)
    return tuple(cast)


def _can_record(name: str, args: Sequence[PyTree], kwargs: Kwargs) -> bool:
    """Return whether a program can hold a call: it draws no random numbers, and its arguments have a source."""
    if name == "dropout" and kwargs.get("training", args[2] if len(args) > 2 else True):
        return False
    return _is_nameable((*args, *kwargs.values()))


def _is_nameable(x: PyTree) -> bool:
    if isinstance(x, (tuple, list)):
        return False not in [_is_nameable(y) for y in x]
    if isinstance(x, slice):
        return _is_nameable((x.start, x.stop, x.step))
    nameable = (TracedChunk, Tensor, int, float, str, torch.dtype, torch.device, torch.memory_format)
    return x is None or x is Ellipsis or isinstance(x, nameable)


def _replace_chunks(tree: PyTree, replaced: Callable[[TracedChunk], PyTree]) -> PyTree:
    """Return arguments with each chunk among them replaced."""
    if isinstance(tree, TracedChunk):
        return replaced(tree)
    if isinstance(tree, tuple):
        return tuple([_replace_chunks(x, replaced) for x in tree])
    if isinstance(tree, list):
        return [_replace_chunks(x, replaced) for x in tree]
    if isinstance(tree, dict):
        return {key: _replace_chunks(x, replaced) for key, x in tree.items()}
    return tree


def _full_value(chunk: TracedChunk) -> Tensor:
    return chunk.full


def _step(chunk: TracedChunk) -> ProgramStep:
    return chunk.step


def _chunks(tree: PyTree) -> list[TracedChunk]:
    if isinstance(tree, TracedChunk):
        return [tree]
    if isinstance(tree, (tuple, list)):
        return [chunk for x in tree for chunk in _chunks(x)]
    return []


def _emit_program(step: ProgramStep, full: Tensor) -> Tensor:
    """Add a program to the compiler's graph as one op, and return its result."""
    program = ProgramSource()
    source = program.write(step)
    grad = torch.is_grad_enabled()
    needs = [grad and t.requires_grad for t in program.tensors]
    is_short = torch.float16 in [t.dtype for t, n in zip(program.tensors, needs, strict=True) if n]
    deferred = full.dim() > 0 or is_short or not full.is_floating_point()
    given = (program.tensors, source, program.ints, program.floats, needs, deferred, list(full.shape), full.dtype)
    result: Tensor = chunked_program(*given)[0]
    return result


def traced_chunk(x: Tensor, dim: int, policy: Policy) -> PyTree:
    """Return the proxy that `st.chunk` returns while a compiler traces.

    Args:
        x: a plain tensor; a PaddedTensor stays whole.
        dim: the dim that holds the rows.
        policy: the policy by which they are divided.
    """
    if isinstance(x, PaddedTensor):  # a program reads no true sizes
        _log_full("chunk")
        return x
    if not _tell_operands_apart():
        torch._dynamo.graph_break()
    dim = dim + x.dim() if dim < 0 else dim
    fields = (policy.chunks, policy.rows, policy.memory_limit, policy.exact, policy.compiled)
    return TracedChunk(x, ProgramStep("chunk", (x, dim, *fields), {}, []))


def _operator(name: str) -> Callable[..., PyTree]:
    def method(self: TracedChunk, *others: PyTree) -> PyTree:
        return _trace_call(getattr(Tensor, name), f"Tensor.{name}", name, (self, *others), {})

    return method


# Operators are looked up on the class.
_OPERATORS = {
    f"__{name}__": f"__{name}__"
    for name in """add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod pow rpow neg abs invert matmul and
    or xor getitem""".split()
}
_OPERATORS |= {f"__{name}__": name for name in ("lt", "le", "gt", "ge", "eq", "ne")}
_OPERATORS |= {f"__i{name}__": f"{name.replace('true', '')}_" for name in ("add", "sub", "mul", "truediv", "pow")}
for _name, _method in _OPERATORS.items():
    setattr(TracedChunk, _name, _operator(_method))


_tell_operands_apart = torch.compiler.assume_constant_result(trace_rmatmul)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _log_full(name: str) -> None:
    _log.warning("%s of chunked values under torch.compile: they are computed in full", name)
