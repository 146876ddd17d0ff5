"""The fallback for calls without a rule: run the function on the unpadded data, and pad its result again.

The padded dims of the result are found by running the function on shapes alone, at other true sizes: a dim whose size
is an affine function of one symbol is padded on it. A result whose size varies in another way is returned as a plain
tensor of its true size.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from subtensors.dispatch.graphs.host_reads import needs_host
from subtensors.dispatch.ops.errors import RuleError
from subtensors.dispatch.ops.tree import Args, Kwargs, PyTree
from subtensors.dispatch.padded.padded_size import PaddedSize, find_sizes, map_sizes
from subtensors.dispatch.padded.padded_value import PaddedValue
from subtensors.dispatch.padded.true_sizes import TrueSizes, merge_sizes
from subtensors.dispatch.sizes.dim_factors import Factors, bucket_of, padded_dim, size_of, static
from subtensors.dispatch.sizes.expressions import size_on_host, value_at
from subtensors.dispatch.torch_internals import dispatcher
from subtensors.kernels.padded.padding_ops import pad_to
from subtensors.padded.autograd import unwrap_with_grad, wrap_with_grad
from subtensors.padded.inplace import write_back
from subtensors.padded.padded_tensor import PaddedTensor, unwrap
from subtensors.padded.padding import unpad_value

if TYPE_CHECKING:
    import sympy

_log = logging.getLogger("subtensors.padded")

fallbacks: Counter[str] = Counter()
"""The number of times that each function ran on unpadded data."""

RAW_MEMORY_FUNCTIONS = frozenset(["apply_", "map_"])
"""Functions that access their first argument's memory directly, so that their writes do not change its version."""


class _FallbackState(threading.local):
    is_refused = False


_state = _FallbackState()


@contextlib.contextmanager
def refusing_fallbacks(is_refused: bool) -> Iterator[None]:
    """A context in which calls without a rule are refused, as in a capture, or run on the unpadded data."""
    before = _state.is_refused
    _state.is_refused = is_refused
    try:
        yield
    finally:
        _state.is_refused = before


def run_on_unpadded_data(func: Callable[..., PyTree], args: Args, kwargs: Kwargs, reason: Exception) -> PyTree:
    """Run a function on the unpadded data of its PaddedTensors, and return its result, padded again.

    Raises:
        RuleError: the true sizes are unknown, as in a compiler, or differ from row to row; it gives the reason why no
            rule applies.
    """
    if _state.is_refused:
        raise reason
    leaves, spec = tree_flatten((args, kwargs))
    padded = {i: x for i, x in enumerate(leaves) if isinstance(x, PaddedTensor)}
    given = find_sizes(leaves)
    _check_sizes_known(func, list(padded.values()), reason)
    name = getattr(func, "__name__", str(func))
    copies = {i: _unpadded_copy(x) for i, x in padded.items()}
    sizes = merge_sizes([x.sizes for x in given] + [x._sizes for x in padded.values() if x._sizes is not None])
    assert sizes is not None
    numbers = map_sizes(leaves, PaddedSize.on_host)
    if any(1 in x.logical_shape for x in padded.values()):
        _check_not_broadcast(func, name, leaves, spec, sizes)
    # A changed version tells that the function wrote to a copy.
    versions = {i: t._version for i, t in copies.items()}
    call_args, call_kwargs = tree_unflatten([copies.get(i, x) for i, x in enumerate(numbers)], spec)
    out = func(*call_args, **call_kwargs)
    # Logged now: an error of the caller's own, such as a wrong dtype, is torch's alone.
    if not fallbacks[name]:
        _log.warning("%s runs on the unpadded data: %s", name, reason)
    fallbacks[name] += 1
    for i, t in copies.items():
        if t._version != versions[i] or (i == 0 and name in RAW_MEMORY_FUNCTIONS):
            write_unpadded(padded[i], t)
    inputs = {id(t): padded[i] for i, t in copies.items()}
    outs, out_spec = tree_flatten(out)
    # A result that is an argument is returned as the caller's own tensor.
    if all(id(x) in inputs for x in outs if isinstance(x, Tensor)):
        return tree_unflatten([inputs.get(id(x), x) for x in outs], out_spec)
    shapes = _shapes_at_other_sizes(func, leaves, spec, sizes)
    repadded = [
        inputs.get(id(x)) or _repad(x, {key: each[j] for key, each in shapes.items()}, sizes)
        if isinstance(x, Tensor)
        else x
        for j, x in enumerate(outs)
    ]
    return tree_unflatten(repadded, out_spec)


def _unpadded_copy(x: PaddedTensor) -> Tensor:
    data = unpad_value(unwrap_with_grad(x))
    assert isinstance(data, Tensor), "a ragged batch is refused before"
    return data.clone()


def _check_sizes_known(func: Callable[..., PyTree], padded: list[PaddedTensor], reason: Exception) -> None:
    name = getattr(func, "__name__", str(func))
    for x in padded:
        assert x._sizes is not None
        traced = dispatcher.is_traced(x._dense) or needs_host(x._dense, name, str(reason))
        if traced or x._sizes.rows is not None:
            why = "a compiler or a graph capture doesn't know them" if traced else "they differ from row to row"
            raise RuleError(
                f"{reason}. {name} cannot run at the true sizes either: {why}; unpad before it, or call it outside"
            ) from reason


def write_unpadded(target: PaddedTensor, new: Tensor) -> None:
    """Copy what was written to an unpadded copy of a PaddedTensor back into it."""
    if tuple(new.shape) != target.logical_shape:
        raise RuleError(f"in place, a PaddedTensor keeps its true shape {target.logical_shape}; got {tuple(new.shape)}")
    value = unwrap(target)
    assignment = value.sizes.assignment() if value.sizes else {}
    true = [size_on_host(f.size, assignment) for factors in value.dims for f in factors]
    dense = pad_to(new.reshape(true), [f.bucket for factors in value.dims for f in factors], 0)
    write_back(target, PaddedValue(dense.reshape(target.shape), value.dims, value.sizes))


def _check_not_broadcast(
    func: Callable[..., PyTree], name: str, leaves: list[PyTree], spec: TreeSpec, sizes: TrueSizes
) -> None:
    """Raise RuleError if a call runs only because a true size of 1 is broadcast: at 2 the shapes would not fit."""
    actual = sizes.assignment()
    ones = {symbol: 2 for symbol, n in actual.items() if n == 1}
    shapes_at = functools.partial(_shapes_at, func, leaves, spec)
    if ones and shapes_at(actual) is not None and shapes_at({**actual, **ones}) is None:
        raise RuleError(
            f"{name} would broadcast a true size of 1 ({', '.join(map(str, ones))}) over what has the size of a "
            f"bucket: give the sizes as x.shape[dim], pad the other tensor on the same Dim, or unpad"
        )


_Key: TypeAlias = "tuple[sympy.Symbol, int]"
_Shape: TypeAlias = "tuple[int, ...] | None"


def _shapes_at_other_sizes(
    func: Callable[..., PyTree], leaves: list[PyTree], spec: TreeSpec, sizes: TrueSizes
) -> dict[_Key, list[_Shape]]:
    """The shapes of the results with one true size changed, by (symbol, size); {} where they can't be computed."""
    shapes: dict[_Key, list[_Shape]] = {}
    actual = sizes.assignment()
    for symbol, bucket in zip(sizes.symbols, sizes.buckets, strict=True):
        for n in {bucket, max(bucket - 1, 1), bucket + 1} - {actual[symbol]}:
            found = _shapes_at(func, leaves, spec, {**actual, symbol: n})
            if found is None:
                return {}
            shapes[symbol, n] = found
    return shapes


def _shapes_at(
    func: Callable[..., PyTree], leaves: list[PyTree], spec: TreeSpec, sizes: Mapping[sympy.Symbol, int]
) -> list[_Shape] | None:
    """Return the shapes of the results at some true sizes; None where they can't be computed."""
    call_args, call_kwargs = tree_unflatten([_at_sizes(x, sizes) for x in leaves], spec)
    try:
        out = tree_flatten(func(*call_args, **call_kwargs))[0]
    except Exception:  # whatever a function says of a tensor without values
        return None
    return [tuple(x.shape) if isinstance(x, Tensor) else None for x in out]


def _at_sizes(x: PyTree, sizes: Mapping[sympy.Symbol, int]) -> PyTree:
    if not isinstance(x, Tensor):
        return map_sizes(x, lambda number: value_at(number.size, sizes))
    shape = [size_on_host(size_of(factors), sizes) for factors in x._dims] if isinstance(x, PaddedTensor) else x.shape
    return torch.empty(shape, dtype=x.dtype, device="meta")


def _repad(out: Tensor, shapes: Mapping[_Key, _Shape], sizes: TrueSizes) -> Tensor:
    """Return a result padded again, or as it is where a size varies in a way that is no line."""
    actual = sizes.assignment()
    dims: list[Factors] = []
    known = {key: shape for key, shape in shapes.items() if shape is not None and len(shape) >= out.dim()}
    if len(known) < len(shapes):
        return out
    for d, size in enumerate(out.shape):
        points = [(symbol, n, shape[d]) for (symbol, n), shape in known.items()]
        symbols = {symbol for symbol, _, other in points if other != size}
        if not symbols:
            dims.append((static(size),))
            continue
        if len(symbols) > 1:
            return out
        symbol = symbols.pop()
        expression = _fit_line(symbol, [(n, other) for s, n, other in points if s == symbol] + [(actual[symbol], size)])
        if expression is None:
            return out
        bucket = size_on_host(expression, {symbol: sizes.buckets[sizes.symbols.index(symbol)]})
        dims.append(padded_dim(bucket, expression))
    if any(size_on_host(size_of(f), actual) != size for f, size in zip(dims, out.shape, strict=True)):
        return out
    return wrap_with_grad(PaddedValue(pad_to(out, list(map(bucket_of, dims)), 0), tuple(dims), sizes, 0))


def _fit_line(symbol: sympy.Symbol, points: list[tuple[int, int]]) -> sympy.Expr | None:
    """Return a * symbol + b through all points, with integers a and b; None if there is no such line."""
    (n, size), (m, other), *_ = sorted(set(points))
    slope, remainder = divmod(other - size, m - n)
    expression = slope * symbol + size - slope * n
    if remainder or any(slope * k + size - slope * n != value for k, value in points):
        return None
    return expression
