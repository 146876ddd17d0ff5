"""The fallback for calls without a rule: run the function on the unpadded data, and pad its result again.

The padded dims of the result are found by running the function on shapes alone, at other true sizes: a dim whose size
is an affine function of one symbol is padded on it. A result whose size varies in another way is returned as a plain
tensor of its true size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from subtensors.dispatch.ops.errors import RuleError
from subtensors.dispatch.padded.padded_value import PaddedValue
from subtensors.dispatch.padded.true_sizes import TrueSizes, merge_sizes
from subtensors.dispatch.sizes.dim_factors import Factors, bucket_of, padded_dim, size_of, static
from subtensors.dispatch.sizes.expressions import size_on_host
from subtensors.dispatch.torch_internals import dispatcher
from subtensors.padded import torch_function as padded_calls
from subtensors.padded.autograd import followed, wrapped
from subtensors.padded.inplace import write_back
from subtensors.padded.padded_tensor import PaddedTensor, value_of
from subtensors.padded.padding import extended, logical

if TYPE_CHECKING:
    import sympy

_log = logging.getLogger("subtensors.padded")


def on_logical_data(func: Callable[..., Any], args: Any, kwargs: Any, missing: Exception) -> Any:
    """Run a function on the unpadded data of its PaddedTensors.

    Args:
        func: the function.
        args, kwargs: its arguments.
        missing: the reason why no rule applies.

    Returns:
        Its result, padded again.

    Raises:
        RuleError: the true sizes are unknown, as in a compiler, or differ from row to row.
    """
    leaves, spec = tree_flatten((args, kwargs))
    padded = {i: x for i, x in enumerate(leaves) if isinstance(x, PaddedTensor)}
    _refuse_unless_known(func, list(padded.values()), missing)
    name = getattr(func, "__name__", str(func))
    if not padded_calls.fallbacks[name]:
        _log.warning("%s runs on the unpadded data: %s", name, missing)
    padded_calls.fallbacks[name] += 1
    given = {i: logical(followed(x)).clone() for i, x in padded.items()}
    # Writes to a copy are told by its version.
    versions = {i: t._version for i, t in given.items()}
    call_args, call_kwargs = tree_unflatten([given.get(i, x) for i, x in enumerate(leaves)], spec)
    out = func(*call_args, **call_kwargs)
    for i, t in given.items():
        if t._version != versions[i] or (i == 0 and name in padded_calls.RAW_MEMORY_FUNCTIONS):
            _write(padded[i], t)
    inputs = {id(t): padded[i] for i, t in given.items()}
    outs, out_spec = tree_flatten(out)
    # Where the result is an argument, it is the caller's own.
    if all(id(x) in inputs for x in outs if isinstance(x, Tensor)):
        return tree_unflatten([inputs.get(id(x), x) for x in outs], out_spec)
    sizes = merge_sizes([x._sizes for x in padded.values() if x._sizes is not None])
    assert sizes is not None
    shapes = _shapes_elsewhere(func, leaves, spec, sizes)
    again = [
        inputs.get(id(x)) or _padded_again(x, [s[j] for s in shapes.values()] if shapes else [], list(shapes), sizes)
        if isinstance(x, Tensor)
        else x
        for j, x in enumerate(outs)
    ]
    return tree_unflatten(again, out_spec)


def _refuse_unless_known(func: Callable[..., Any], padded: list[PaddedTensor], missing: Exception) -> None:
    for x in padded:
        assert x._sizes is not None
        traced = dispatcher.is_traced(x._dense) or (x._dense.is_cuda and torch.cuda.is_current_stream_capturing())
        if traced or x._sizes.rows is not None:
            why = "a compiler or a graph capture doesn't know them" if traced else "they differ from row to row"
            name = getattr(func, "__name__", str(func))
            raise RuleError(
                f"{missing}. {name} cannot run at the true sizes either: {why}; unpad before it, or call it outside"
            ) from missing


def _write(outer: PaddedTensor, new: Tensor) -> None:
    """Copy what the function wrote to an unpadded copy back into the argument."""
    if tuple(new.shape) != outer.logical_shape:
        raise RuleError(f"in place, a PaddedTensor keeps its true shape {outer.logical_shape}; got {tuple(new.shape)}")
    value = value_of(outer)
    assignment = value.sizes.assignment() if value.sizes else {}
    true = [size_on_host(f.size, assignment) for factors in value.dims for f in factors]
    dense = extended(new.reshape(true), [f.bucket for factors in value.dims for f in factors], 0)
    write_back(outer, PaddedValue(dense.reshape(outer.shape), value.dims, value.sizes))


_Key: TypeAlias = "tuple[sympy.Symbol, int]"


def _shapes_elsewhere(
    func: Callable[..., Any], leaves: list[Any], spec: Any, sizes: TrueSizes
) -> dict[_Key, list[Any]]:
    """The shapes of the results with one true size changed, by (symbol, size); {} where they can't be computed."""
    found: dict[_Key, list[Any]] = {}
    truth = sizes.assignment()
    for symbol, bucket in zip(sizes.symbols, sizes.buckets, strict=True):
        for n in {bucket, max(bucket - 1, 1), bucket + 1} - {truth[symbol]}:
            moved = {**truth, symbol: n}
            call_args, call_kwargs = tree_unflatten([_shaped(x, moved) for x in leaves], spec)
            try:
                out = tree_flatten(func(*call_args, **call_kwargs))[0]
            except Exception:  # whatever a function says of a tensor without values
                return {}
            found[symbol, n] = [tuple(x.shape) if isinstance(x, Tensor) else None for x in out]
    return found


def _shaped(x: Any, sizes: Mapping[sympy.Symbol, int]) -> Any:
    if not isinstance(x, Tensor):
        return x
    shape = [size_on_host(size_of(factors), sizes) for factors in x._dims] if isinstance(x, PaddedTensor) else x.shape
    return torch.empty(shape, dtype=x.dtype, device="meta")


def _padded_again(out: Tensor, shapes: list[Any], keys: list[_Key], sizes: TrueSizes) -> Tensor:
    truth = sizes.assignment()
    dims: list[Factors] = []
    for d, size in enumerate(out.shape):
        try:
            points = [(symbol, n, shape[d]) for (symbol, n), shape in zip(keys, shapes, strict=True)]
        except (IndexError, TypeError):
            return out
        moving = {symbol for symbol, _, other in points if other != size}
        if not moving:
            dims.append((static(size),))
            continue
        if len(moving) > 1:
            return out
        symbol = moving.pop()
        line = [(n, other) for s, n, other in points if s == symbol] + [(truth[symbol], size)]
        expression = _straight_line(symbol, line)
        if expression is None:
            return out
        bucket = size_on_host(expression, {symbol: sizes.buckets[sizes.symbols.index(symbol)]})
        dims.append(padded_dim(bucket, expression))
    if any(size_on_host(size_of(f), truth) != size for f, size in zip(dims, out.shape, strict=True)):
        return out
    return wrapped(PaddedValue(extended(out, list(map(bucket_of, dims)), 0), tuple(dims), sizes, 0))


def _straight_line(symbol: sympy.Symbol, points: list[tuple[int, int]]) -> sympy.Expr | None:
    """a * symbol + b through all points, if there is one with whole a and b."""
    (n, size), (m, other), *_ = sorted(set(points))
    slope, rest = divmod(other - size, m - n)
    expression = slope * symbol + size - slope * n
    if rest or any(slope * k + size - slope * n != value for k, value in points):
        return None
    return expression
