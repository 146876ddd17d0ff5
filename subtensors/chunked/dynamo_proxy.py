"""Proxies that `st.chunk` returns under torch.compile: calls on them are recorded, and become one op at their end.

The compiler would interleave chunks, and keep several of them in memory. So calls on chunked values are recorded as the
text of a program (`source_program.py`). At a call that reduces the rows or the wide dim, as a loss does, the program
becomes one op that the compiler doesn't look into (`custom_op.py`), which runs it chunk after chunk. Beside each
recorded value its plain counterpart is traced: it gives sizes and dtype, and the compiler drops what is not read of it.
It is read where a program can't hold a call: then values are computed in full, which is logged.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subtensors.chunked.custom_op import chunked_program, put
from subtensors.chunked.dynamo_ops import REFUSED, VIEWS, elsewhere, name_of, what_becomes
from subtensors.chunked.source_program import ProgramStep, ProgramText, merged
from subtensors.dispatch.chunked.row_layout import Policy
from subtensors.dispatch.ops.errors import RuleError
from subtensors.dispatch.ops.linear_cross_entropy import composed
from subtensors.dispatch.torch_internals.dynamo import tell_operands_apart

_log = logging.getLogger(__name__)


class TracedChunk:
    """A chunked value, or one computed from it, while a compiler traces.

    Args:
        whole: its plain counterpart.
        step: the step of the program that computes it.
        is_view: whether it may share the memory of another value.
    """

    def __init__(self, whole: Tensor, step: ProgramStep, is_view: bool = False) -> None:
        self.whole = whole
        self.step = step
        self.is_view = is_view
        self.is_viewed = False

    def realize(self) -> Tensor:
        """The value, its program run chunk by chunk; the tensor that was chunked, where nothing was done to it."""
        return self.whole if self.step.callee == "chunk" else _given(self.step, self.whole)

    def __getattr__(self, name: str) -> Any:
        if name in _OF_SIZES:
            return getattr(self.whole, name)
        if name in ("T", "mT", "H", "mH"):
            return self.permute(*_reversed(self.whole, name))
        if name == "data":
            return self.detach()

        def method(*args: Any, **kwargs: Any) -> Any:
            return _called(getattr(Tensor, name), f"Tensor.{name}", name, (self, *args), kwargs)

        return method

    def __len__(self) -> int:
        return self.whole.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return iter([self.select(0, k) for k in range(len(self))])

    def __setitem__(self, key: Any, value: Any) -> None:
        _written(put, "put", "put_", (self, key, value), {})

    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = name_of(func)
        if name == "__getitem__" and isinstance(args[1], TracedChunk):
            args = (args[1], args[0])  # of `a[b]` the compiler gives a tensor first
        if name == "__eq__":
            return _called(torch.eq, "torch.eq", "eq", args, {})
        if name == "__rmatmul__":
            return _called(torch.matmul, "torch.matmul", "matmul", (args[1], args[0]), {})
        return _called(func, _home(func, name), name, args, kwargs or {})


_OF_SIZES = frozenset(
    """shape dtype device layout ndim size stride dim numel is_floating_point is_complex is_cuda itemsize nbytes
    element_size requires_grad""".split()
)


def _reversed(whole: Tensor, name: str) -> list[int]:
    dims = list(range(whole.dim()))
    return dims[::-1] if name in ("T", "H") else [*dims[:-2], dims[-1], dims[-2]]


def _home(func: Callable[..., Any], name: str) -> str:
    """The name by which a program calls a function; empty if it has none."""
    if getattr(F, name, None) is func:
        return f"F.{name}"
    if getattr(torch, name, None) is func:
        return f"torch.{name}"
    found: str = elsewhere(name)
    return found


def _called(function: Callable[..., Any], callee: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call with traced chunks among its arguments.

    Args:
        function: what is called.
        callee: how a program calls it.
        name: its own.
        args, kwargs: its arguments.
    """
    if name in REFUSED:
        raise RuleError(
            f"{name} on chunked values: their gradient goes to the tensor that was chunked; call it on that"
        )
    if name == "linear_cross_entropy":
        return composed(*args, **kwargs)
    if name.endswith("_") and not name.endswith("__"):
        bare = name[:-1]
        return _written(getattr(Tensor, bare, None), f"Tensor.{bare}", name, args, kwargs)
    if isinstance(args[0], (int, float)):
        args = (torch.as_tensor(args[0]), *args[1:])  # `2 * h`
    if name in ("linear", "matmul", "mm", "bmm"):
        args = _cast_once(args)
    function = operator.getitem if name == "__getitem__" else function
    whole = function(*_with(args, _whole_of), **_with(kwargs, _whole_of))
    fate = what_becomes(name)
    is_several = not isinstance(whole, Tensor) and fate != "parts"
    if fate == "" or callee == "" or is_several or not _is_written(name, args, kwargs):
        _note(name)
        return whole
    operands = _chunks((args, list(kwargs.values())))
    args, kwargs = _with(args, _step_of), _with(kwargs, _step_of)
    before = merged([x.step for x in operands])
    if fate == "gives" or (fate == "stays" and whole.dim() == 0):
        return _given(ProgramStep(callee, args, kwargs, before), whole)
    is_view = fate == "parts" or name in VIEWS
    if is_view:
        for x in operands:
            x.is_viewed = True
    if fate == "parts":
        return tuple([TracedChunk(w, ProgramStep(callee, args, kwargs, before, k), True) for k, w in enumerate(whole)])
    return TracedChunk(whole, ProgramStep(callee, args, kwargs, before), is_view)


def _written(
    function: Callable[..., Any] | None, callee: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> TracedChunk:
    """Run an in-place call as its functional form, whose result replaces the value of the first operand.

    Raises:
        RuleError: its memory may be that of another value, which would not see the write.
    """
    chunk, bare = args[0], name[:-1]
    made = None
    if function is not None and isinstance(chunk, TracedChunk) and not chunk.is_view and not chunk.is_viewed:
        made = _called(function, callee, bare, args, kwargs)
    if not isinstance(made, TracedChunk) or made.dtype != chunk.dtype:
        raise RuleError(f"{name} with chunked values under torch.compile has no rule here: take what {bare} returns")
    chunk.whole, chunk.step = made.whole, made.step
    written: TracedChunk = chunk
    return written


def _cast_once(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Factors that autocast would cast, cast before the program reads them: once, and their gradients stay small."""
    cast: list[Any] = []
    for x in args:
        if isinstance(x, Tensor) and torch.is_autocast_enabled(x.device.type) and x.dtype == torch.float32:
            x = x.to(torch.get_autocast_dtype(x.device.type))
        cast.append(x)
    return tuple(cast)


def _is_written(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether a program can hold a call: one that draws no random numbers, and whose arguments have a text."""
    if name == "dropout" and kwargs.get("training", args[2] if len(args) > 2 else True):
        return False
    return _is_nameable((*args, *kwargs.values()))


def _is_nameable(x: Any) -> bool:
    if isinstance(x, (tuple, list)):
        return False not in [_is_nameable(y) for y in x]
    if isinstance(x, slice):
        return _is_nameable((x.start, x.stop, x.step))
    nameable = (TracedChunk, Tensor, int, float, str, torch.dtype, torch.device, torch.memory_format)
    return x is None or x is Ellipsis or isinstance(x, nameable)


def _with(tree: Any, replaced: Callable[[TracedChunk], Any]) -> Any:
    """Arguments with each chunk among them replaced."""
    if isinstance(tree, TracedChunk):
        return replaced(tree)
    if isinstance(tree, tuple):
        return tuple([_with(x, replaced) for x in tree])
    if isinstance(tree, list):
        return [_with(x, replaced) for x in tree]
    if isinstance(tree, dict):
        return {key: _with(x, replaced) for key, x in tree.items()}
    return tree


def _whole_of(chunk: TracedChunk) -> Tensor:
    return chunk.whole


def _step_of(chunk: TracedChunk) -> ProgramStep:
    return chunk.step


def _chunks(tree: Any) -> list[TracedChunk]:
    if isinstance(tree, TracedChunk):
        return [tree]
    if isinstance(tree, (tuple, list)):
        return [chunk for x in tree for chunk in _chunks(x)]
    return []


def _given(step: ProgramStep, whole: Tensor) -> Tensor:
    """Add a program to the compiler's graph as one op, and return its result."""
    program = ProgramText()
    text = program.of(step)
    grad = torch.is_grad_enabled()
    needs = [grad and t.requires_grad for t in program.tensors]
    is_short = torch.float16 in [t.dtype for t, n in zip(program.tensors, needs, strict=True) if n]
    deferred = whole.dim() > 0 or is_short or not whole.is_floating_point()
    given = (program.tensors, text, program.ints, program.floats, needs, deferred, list(whole.shape), whole.dtype)
    result: Tensor = chunked_program(*given)[0]
    return result


def traced_chunk(x: Tensor, dim: int, policy: Policy) -> Any:
    """The proxy that `st.chunk` returns while a compiler traces.

    Args:
        x: a plain tensor.
        dim: the dim that holds the rows.
        policy: the policy by which they are divided.
    """
    if not _tell_operands_apart():
        torch._dynamo.graph_break()
    dim = dim + x.dim() if dim < 0 else dim
    division = (policy.chunks, policy.rows, policy.memory_limit, policy.exact, policy.compiled)
    return TracedChunk(x, ProgramStep("chunk", (x, dim, *division), {}, []))


def _operator(name: str) -> Callable[..., Any]:
    def method(self: TracedChunk, *others: Any) -> Any:
        return _called(getattr(Tensor, name), f"Tensor.{name}", name, (self, *others), {})

    return method


# Operators with numbers are looked for on the class.
_OPERATORS = {
    f"__{name}__": f"__{name}__"
    for name in """add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod pow rpow neg abs invert matmul and
    or xor getitem""".split()
}
_OPERATORS |= {f"__{name}__": name for name in ("lt", "le", "gt", "ge", "eq", "ne")}
_OPERATORS |= {f"__i{name}__": f"{name.replace('true', '')}_" for name in ("add", "sub", "mul", "truediv", "pow")}
for _name, _method in _OPERATORS.items():
    setattr(TracedChunk, _name, _operator(_method))


_tell_operands_apart = torch.compiler.assume_constant_result(tell_operands_apart)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _note(name: str) -> None:
    _log.warning("%s of chunked values under torch.compile: they are computed in full", name)
