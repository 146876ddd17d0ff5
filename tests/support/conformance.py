"""The oracle of map semantics: a call over TensorLists against the same call on each element, exactly.

`check_call(func, args, kwargs)` runs both on copies and compares results, changed arguments and refusals.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch

import subtensors as st


def copy_of(t: torch.Tensor) -> torch.Tensor:
    """A leaf with the values, strides and requires_grad of `t`, in memory of its own."""
    if t.layout is not torch.strided or t.is_quantized:
        return t.detach().clone().requires_grad_(t.requires_grad)
    expanded = any(s == 0 and n > 1 for s, n in zip(t.stride(), t.shape, strict=True))
    out = t.detach().clone() if expanded else torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
    if not expanded:
        out.copy_(t.detach())
    return out.requires_grad_(t.requires_grad)


def fresh(tree: Any, packed: bool = False) -> Any:
    """A copy of a call's arguments; `packed` packs the lists among them."""

    def leaf(x: Any) -> Any:
        if isinstance(x, st.TensorList):
            out = x.like([copy_of(t) for t in x])
            return out.pack() if packed else out
        return copy_of(x) if isinstance(x, torch.Tensor) else x

    return optree.tree_map(leaf, tree, none_is_leaf=True)


def mapped(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """`func` on each element in turn: the definition of map semantics."""
    leaves, spec = optree.tree_flatten((tuple(args), kwargs), none_is_leaf=True)
    (length,) = {len(x) for x in leaves if isinstance(x, st.TensorList)}
    results = []
    for i in range(length):
        element_args, element_kwargs = spec.unflatten(x[i] if isinstance(x, st.TensorList) else x for x in leaves)
        results.append(func(*element_args, **element_kwargs))
    return results


def element(value: Any, index: int) -> Any:
    """What a gathered result says of one element."""
    if isinstance(value, st.TensorList):
        return value[index]
    if isinstance(value, (tuple, list)) and any(_gathered(v) for v in value):
        parts = [element(v, index) for v in value]
        return type(value)(*parts) if hasattr(value, "_make") else type(value)(parts)
    if isinstance(value, dict):
        return {k: element(v, index) for k, v in value.items()}
    return value if value is None else value[index]


def _gathered(value: Any) -> bool:
    return isinstance(value, st.TensorList) or (isinstance(value, (tuple, list)) and any(map(_gathered, value)))


def assert_same(actual: Any, expected: Any, strides: bool = True, roundings: int = 0) -> None:
    """Dtypes, shapes, strides, devices, requires_grad, kinds and values, NaN equal to NaN.

    Values are equal up to `roundings` of the dtype; the default is exactly.
    """
    if isinstance(expected, torch.Tensor):
        assert isinstance(actual, torch.Tensor)
        assert not isinstance(actual, st.TensorList)
        assert actual.requires_grad == expected.requires_grad
        rtol = roundings * torch.finfo(expected.dtype).eps if _rounds(expected) else 0
        torch.testing.assert_close(actual, expected, rtol=rtol, atol=0, equal_nan=True)
        if strides and expected.layout is torch.strided and expected.numel():
            assert _strides(actual) == _strides(expected)
    elif isinstance(expected, (tuple, list)) and not isinstance(expected, torch.Size):
        assert type(actual) is type(expected)
        assert len(actual) == len(expected)
        for a, e in zip(actual, expected, strict=True):
            assert_same(a, e, strides, roundings)
    else:
        assert type(actual) is type(expected)
        assert actual == expected or (actual != actual and expected != expected)


def _rounds(t: torch.Tensor) -> bool:
    return t.dtype.is_floating_point or t.dtype.is_complex


def _strides(t: torch.Tensor) -> list[int]:
    return [s for s, n in zip(t.stride(), t.shape, strict=True) if n != 1]


def check_call(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any] | None = None,
    *,
    packed: bool = False,
    values: bool = True,
    strides: bool = True,
) -> bool:
    """Run `func` over lists and over their elements, and compare.

    Args:
        func: a torch function or method.
        args, kwargs: its arguments, with at least one TensorList; they are copied first.
        packed: whether the lists run packed. A value may then stand elsewhere in a vector register, where torch's CPU
            kernels use another code than for the last few values of a tensor: each may err by one rounding.
        values: False for functions that return memory as it was found.
        strides: whether results must be laid out alike.

    Returns:
        Whether the call succeeded; False where both refused it with the same kind of error.
    """
    call = (tuple(args), kwargs or {})
    oracle_args, oracle_kwargs = fresh(call)
    list_args, list_kwargs = fresh(call, packed)
    torch.manual_seed(0)
    try:
        expected = mapped(func, oracle_args, oracle_kwargs)
    except Exception as error:  # whatever torch raises, the list must raise too
        torch.manual_seed(0)
        try:
            func(*list_args, **list_kwargs)
        except type(error):
            return False
        raise AssertionError(f"every element refuses with {error!r}, the list does not") from error
    torch.manual_seed(0)
    actual = func(*list_args, **list_kwargs)
    roundings = 2 if packed else 0
    for i, e in enumerate(expected):
        if values:
            assert_same(element(actual, i), e, strides, roundings)
    left, right = optree.tree_leaves((list_args, list_kwargs)), optree.tree_leaves((oracle_args, oracle_kwargs))
    for a, e in zip(left, right, strict=True):
        if isinstance(e, st.TensorList):
            assert_same(a.tensors, e.tensors, strides, roundings)
        elif isinstance(e, torch.Tensor):
            assert_same(a, e)
    return True
