"""`st.bucketed`: checks its arguments and makes a `Bucketed` runner."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, Protocol, TypeAlias, TypeVar, overload

from subtensors.arguments import shown
from subtensors.bucketed.check import Schedule
from subtensors.bucketed.runner import Bucketed, OnMiss
from subtensors.counts import parse_bytes
from subtensors.dispatch.torch_internals.compiler import OPTIONS, is_backend

P = ParamSpec("P")
R = TypeVar("R")
Result = TypeVar("Result", covariant=True)

Dims: TypeAlias = Mapping[Any, object]


class _Module(Protocol[P, Result]):
    """A module, whose call is typed by its `forward`."""

    def forward(self, *args: P.args, **kwargs: P.kwargs) -> Result: ...


@overload
def bucketed(
    program: _Module[P, R],
    dims: Dims,
    compile: bool | dict[str, object] = ...,
    max_graphs: int | None = ...,
    memory_limit: int | str | None = ...,
    on_miss: OnMiss = ...,
    max_waste: float | None = ...,
    check: Schedule = ...,
    key: object = ...,
) -> Bucketed[P, R]: ...


@overload
def bucketed(
    program: Callable[P, R],
    dims: Dims,
    compile: bool | dict[str, object] = ...,
    max_graphs: int | None = ...,
    memory_limit: int | str | None = ...,
    on_miss: OnMiss = ...,
    max_waste: float | None = ...,
    check: Schedule = ...,
    key: object = ...,
) -> Bucketed[P, R]: ...


def bucketed(
    program: _Module[..., object] | Callable[..., object],
    dims: Dims,
    compile: bool | dict[str, object] = False,
    max_graphs: int | None = None,
    memory_limit: int | str | None = None,
    on_miss: OnMiss = "capture",
    max_waste: float | None = None,
    check: Schedule = "first",
    key: object = None,
) -> Bucketed[..., Any]:
    """Run a program over varying sizes as one CUDA graph per bucket: pad the inputs, replay, cut the results back.

    Args:
        program: a function or module of tensors; it runs on PaddedTensors, once for each bucket.
        dims: for each argument that varies, by name or position, its padded dims, such as `{"input_ids": {1: seq}}`;
            for a container those of every tensor in it, or a dict or list like it. `{1: seq}` without a name pads dim 1
            of every tensor among the arguments.
        compile: True, or a dict with the backend, mode, options or dynamic of `torch.compile`: the program is compiled
            once, with the buckets' sizes left open, and captured as compiled code.
        max_graphs: the most graphs at a time; the least recently called one is evicted.
        memory_limit: of the graphs' pool and all static inputs: bytes, or text such as "2GiB".
        on_miss: what to do with a size that has no graph: "capture" one if that is possible, run it at its true size
            ("eager"), or raise ("error").
        max_waste: if the bucket is more than this many times the true size, run at the true size.
        check: "first" compares each bucket's first calls with the plain program on unpadded arguments (its first one,
            the first at a second true size, and those at a true size of 0 or 1), gradients too if autograd tracks the
            call; where they differ, the bucket runs the program at its true sizes, and the log and `stats()` say so. An
            int n compares every n-th call as well; False none. Such a call runs the program once more.
        key: what else the program's Python reads: a value, or a function that is called with each call's arguments.
            Plain values, containers and attributes of objects in it are part of the graph's key.

    Returns:
        A callable with the program's arguments: plain tensors, PaddedTensors, pytrees of them, and others, which are
        part of the graph's key. It returns what the program returns, at true sizes and in memory of its own.

    Raises:
        TypeError, ValueError: an argument of this function is none of these.
        SizeError, RuleError: raised by a call with `on_miss="error"`; a Dim with two sizes is always a SizeError.

    Example:
        >>> import torch, subtensors as st
        >>> seq = st.Dim("seq", max=512, buckets=64)
        >>> run = st.bucketed(lambda x: x.softmax(1), {"x": {1: seq}})
        >>> run(torch.zeros(1, 5))
        tensor([[0.2000, 0.2000, 0.2000, 0.2000, 0.2000]])
    """
    if not callable(program):
        raise TypeError(f"bucketed takes a function or a module, got {shown(program)}")
    if max_graphs is not None and (type(max_graphs) is not int or max_graphs < 1):
        raise ValueError(f"max_graphs is an int of at least 1, got {max_graphs!r}")
    if not isinstance(on_miss, str) or on_miss not in ("capture", "eager", "error"):
        raise ValueError(f"on_miss is 'capture', 'eager' or 'error', got {shown(on_miss)}")
    if max_waste is not None and not (isinstance(max_waste, (int, float)) and max_waste >= 1):
        raise ValueError(f"max_waste is a factor of at least 1, got {max_waste!r}")
    is_count = type(check) is int and check > 0
    if not ((isinstance(check, str) and check == "first") or check is False or is_count):
        raise ValueError(f"check is 'first', False or an int of at least 1, got {shown(check)}")
    limit = None if memory_limit is None else parse_bytes("memory_limit", memory_limit)
    if not isinstance(compile, (bool, dict)):
        raise TypeError(f"compile is a bool or a dict of torch.compile's options, got {compile!r}")
    options = ({} if compile else None) if isinstance(compile, bool) else compile
    if unknown := sorted({*(options or {})} - {*OPTIONS}):
        raise TypeError(f"compile takes {', '.join(OPTIONS)}; got {', '.join(map(repr, unknown))}")
    if isinstance(backend := (options or {}).get("backend"), str) and not is_backend(backend):
        raise ValueError(f"compile's backend is one of torch._dynamo.list_backends(), got {backend!r}")
    if options and "reduce" in str(options.get("mode")):
        raise ValueError("compile's mode is not 'reduce-overhead': the graphs are captured here")
    return Bucketed(program, dims, max_graphs, limit, on_miss, max_waste, options, check, key)
