"""The foreach table, the flats of packed lists and the batched matrix functions against the map oracle."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from conformance import check_call, mapped

import subtensors as st
from subtensors.dispatch.lists.batched import ROWS
from subtensors.dispatch.lists.flat_ops import acts_on_values
from subtensors.dispatch.lists.foreach import targets
from subtensors.lists.torch_function import explain_call

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.bool,
    torch.complex64,
]
SHAPES = [(2, 3), (), (0,), (5,)]
TARGETS = targets()


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    wide = torch.rand(shape, dtype=torch.float64, generator=generator) * 3 - 1
    return (wide * 2).round().to(dtype) if not dtype.is_floating_point else wide.to(dtype)


def lists(dtype: torch.dtype, seed: int = 0) -> st.TensorList:
    return st.TensorList([values(shape, dtype, seed + i) for i, shape in enumerate(SHAPES)])


def operands(kinds: str, dtypes: tuple[torch.dtype, ...]) -> list[Any]:
    out: list[Any] = []
    for i, (kind, dtype) in enumerate(zip(kinds, dtypes, strict=True)):
        number = {torch.int64: 2, torch.bool: True, torch.complex64: 1 + 2j}.get(dtype, 0.5)
        out.append(
            {"L": lambda d=dtype, i=i: lists(d, 10 * i), "S": lambda n=number: n}.get(
                kind, lambda d=dtype, i=i: values((), d, i)
            )()
        )
    return out


CALLS = [
    pytest.param(func, kinds, id=f"{func.__name__}-{kinds}-{i}")
    for i, (func, target) in enumerate(TARGETS.items())
    for kinds in target.overloads
]


@pytest.mark.parametrize(("func", "kinds"), CALLS)
def test_a_foreach_call_is_the_map_for_every_mix_of_dtypes(func: Callable[..., Any], kinds: str) -> None:
    target = TARGETS[func]
    is_first_spelling = next(f for f, t in TARGETS.items() if t is target) is func
    repeat = min(len(kinds), 2)
    for dtypes in itertools.product(DTYPES if is_first_spelling else [torch.float32, torch.int64], repeat=repeat):
        args = operands(kinds, (*dtypes, *[dtypes[-1]] * (len(kinds) - repeat)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for packed in (False, True):
                check_call(func, args, packed=packed)


@pytest.mark.parametrize("kinds", ["LL", "L0"])
@pytest.mark.parametrize("func", [torch.add, torch.sub, torch.Tensor.add_, torch.Tensor.sub_])
@pytest.mark.parametrize("packed", [False, True])
def test_alpha_scales_the_second_operand(func: Callable[..., Any], kinds: str, packed: bool) -> None:
    # The vector and the scalar code of bfloat16 round alpha * other differently, which cancellation then shows.
    for dtype in (torch.float32, torch.int64) if packed else (torch.float32, torch.int64, torch.bfloat16):
        assert check_call(func, operands(kinds, (dtype, dtype)), {"alpha": 3}, packed=packed)


@pytest.mark.parametrize("number", [torch.tensor(1.5), np.float32(1.5), np.int64(3)], ids=repr)
def test_an_option_may_be_any_number_that_torch_takes(number: Any) -> None:
    check_call(torch.add, operands("LL", (torch.float32, torch.float32)), {"alpha": number})
    check_call(torch.addcmul, operands("LLL", (torch.float32,) * 3), {"value": number})


@pytest.mark.parametrize("func", [torch.Tensor.add_, torch.Tensor.copy_, torch.mm])
@pytest.mark.parametrize("view", [torch._neg_view, torch.conj], ids=["negated", "conjugated"])
def test_views_that_are_negated_or_conjugated_are_elements(
    func: Callable[..., Any], view: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    def arguments() -> list[st.TensorList]:
        x = torch.arange(16.0).view(4, 2, 2) * (1 if view is torch._neg_view else 1 + 2j)
        return [st.TensorList([x[0], view(x[1])]), st.TensorList([x[2], x[3]])]

    each = [func(*row) for row in zip(*arguments(), strict=True)]
    assert all(torch.equal(a, b) for a, b in zip(func(*arguments()), each, strict=True))


def test_elements_of_several_dtypes_run_in_groups() -> None:
    mixed = st.TensorList([values((3,), d, i) for i, d in enumerate([*DTYPES, *DTYPES])])
    assert explain_call(torch.add, mixed, 1) == "foreach aten._foreach_add.Scalar (7 groups)"
    assert check_call(torch.add, [mixed, 1])
    assert check_call(torch.mul, [mixed, mixed])
    assert check_call(torch.Tensor.mul_, [mixed, mixed])
    assert check_call(torch.mul, [mixed, mixed], packed=True)


@pytest.mark.parametrize("func", [f for f, t in TARGETS.items() if not t.in_place and "L" in t.overloads])
def test_gradients_of_a_foreach_call_are_those_of_the_map(func: Callable[..., Any]) -> None:
    def gradient(x: Any) -> Any:
        func(x).backward(torch.ones_like(x))
        return x.grad

    x = st.TensorList([values((2, 3), torch.float64, 1).abs() + 0.1, values((), torch.float64, 2).abs() + 0.1])
    assert check_call(gradient, [x.requires_grad_()])


BINARY = [f for f, t in TARGETS.items() if "LL" in t.overloads and not t.in_place]


@pytest.mark.parametrize("func", BINARY)
def test_gradients_of_a_binary_foreach_call_are_those_of_the_map(func: Callable[..., Any]) -> None:
    def gradient(x: Any, y: Any) -> Any:
        func(x, y).backward(torch.ones_like(x))
        return x.grad, y.grad

    x, y = (st.TensorList([values((2, 3), torch.float64, s).abs() + 0.1] * 2) for s in (1, 2))
    x, y = (z.like([t.clone() for t in z]).requires_grad_() for z in (x, y))
    assert check_call(gradient, [x, y])


def test_an_in_place_call_on_a_leaf_that_requires_grad_is_refused() -> None:
    leaf = st.TensorList([torch.ones(2, requires_grad=True)])
    for packed in (False, True):
        assert not check_call(torch.Tensor.add_, [leaf, 1], packed=packed)


UNARY_ON_VALUES = [
    f
    for name in sorted(dir(torch.Tensor))
    if not name.startswith("_") and name not in ("cuda", "data", "to")
    for f in [getattr(torch.Tensor, name)]
    if callable(f) and acts_on_values(f)
]


@pytest.mark.parametrize("func", UNARY_ON_VALUES, ids=lambda f: f.__name__)
def test_a_call_on_flats_is_the_map(func: Callable[..., Any]) -> None:
    succeeded = []
    for dtype, rest in itertools.product(
        DTYPES, ([], [2], [0.5], ["list"], ["zero"], ["list", "list"], ["list", 0.5], [0, 1])
    ):
        mates = {"list": lists(dtype, 7), "zero": values((), dtype, 3)}
        args = [lists(dtype), *[mates.get(r, r) if isinstance(r, str) else r for r in rest]]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            succeeded.append(check_call(func, args, packed=True, values="empty" not in func.__name__))
    masks = lists(torch.bool), lists(torch.float32, 5)
    succeeded.append(
        check_call(func, [lists(torch.float32), *masks], packed=True) if "fill" in func.__name__ else False
    )
    assert any(succeeded) or func.__name__ in NEEDS_OTHER_ARGUMENTS


NEEDS_OTHER_ARGUMENTS = {"masked_fill", "masked_fill_", "where"}


def test_where_and_masked_fill_run_on_flats() -> None:
    x, y = (st.TensorList([values((2, 3), torch.float32, s), values((5,), torch.float32, s)]) for s in (1, 2))
    assert check_call(torch.where, [x > 0, x, y], packed=True)
    assert check_call(torch.where, [x > 0, x, 0.0], packed=True)
    assert check_call(torch.Tensor.masked_fill_, [x, y > 0, 2.0], packed=True)
    assert explain_call(torch.where, (x.pack() > 0), x, 0.0) == "on the packed flats (1 group)"
    assert check_call(torch.where, [x > 0], packed=True)


def batched_arguments(func: Callable[..., Any], dtype: torch.dtype) -> list[Any]:
    def matrices(rows: int, columns: int, seed: int) -> list[torch.Tensor]:
        return [values((rows, columns), torch.float64, seed + i).to(dtype) for i in range(3)]

    name = func.__name__.removeprefix("linalg_")
    if name in ("mm", "matmul"):
        return [
            st.TensorList(matrices(3, 4, 0) + matrices(2, 5, 9)),
            st.TensorList(matrices(4, 2, 20) + matrices(5, 5, 30)),
        ]
    if name == "bmm":
        left, right = (torch.stack(matrices(4, 4, s)) for s in (0, 40))
        return [st.TensorList([left, left + 1]), st.TensorList([right, right - 1])]
    if name == "addmm":
        return [st.TensorList([values((2,), torch.float64, i).to(dtype) for i in range(3)]),
                st.TensorList(matrices(3, 4, 0)), st.TensorList(matrices(4, 2, 20))]  # fmt: skip
    if name == "linear":
        return [st.TensorList(matrices(3, 4, 0)), st.TensorList(matrices(2, 4, 20)),
                st.TensorList([values((2,), torch.float64, i).to(dtype) for i in range(3)])]  # fmt: skip
    spd = [m @ m.mT + torch.eye(len(m), dtype=dtype) for m in matrices(4, 4, 0) + matrices(3, 3, 9)]
    if name.startswith("solve"):
        return [st.TensorList([m.triu() for m in spd]), st.TensorList(matrices(4, 2, 20) + matrices(3, 2, 30))]
    return [st.TensorList(spd)]


@pytest.mark.parametrize("func", ROWS, ids=lambda f: f.__name__)
def test_a_batched_matrix_function_errs_no_more_than_the_map(func: Callable[..., Any]) -> None:
    kwargs: dict[str, Any] = {"upper": True} if func.__name__.endswith("solve_triangular") else {}
    args = batched_arguments(func, torch.float32)
    assert explain_call(func, *args, **kwargs).startswith("batched by shape")
    actual = func(*args, **kwargs)
    each = mapped(func, args, kwargs)
    if func.__name__.removeprefix("linalg_") in ("qr", "svd", "eigh", "eig"):
        # Factors are unique up to signs and phases: their product is what must come back.
        for i, (t, e) in enumerate(zip(args[0], each, strict=True)):
            parts = [part[i] for part in actual]
            assert [p.shape for p in parts] == [p.shape for p in e]
            assert error(_product(func, parts), t.double()) <= 1.5 * error(_product(func, e), t.double()) + _rounding(t)
        return
    truths = mapped(func, [a.double() for a in args], kwargs)
    for i, (e, truth) in enumerate(zip(each, truths, strict=True)):
        parts = (
            [(actual[i], e, truth)]
            if isinstance(e, torch.Tensor)
            else zip([a[i] for a in actual], e, truth, strict=True)
        )
        for a, b, c in parts:
            assert a.shape == b.shape
            assert a.dtype == b.dtype
            assert error(a, c) <= 1.5 * error(b, c) + _rounding(c)


def error(x: torch.Tensor, truth: torch.Tensor) -> float:
    return (x.to(truth.dtype) - truth).abs().max().item()


def _rounding(truth: torch.Tensor) -> float:
    return truth.abs().max().item() * torch.finfo(torch.float32).eps


def _product(func: Callable[..., Any], parts: list[torch.Tensor]) -> torch.Tensor:
    wide = [p.to(torch.complex128 if p.is_complex() else torch.float64) for p in parts]
    name = func.__name__.removeprefix("linalg_")
    if name == "qr":
        return wide[0] @ wide[1]
    if name == "svd":
        return wide[0] @ torch.diag(wide[1]) @ wide[2]
    product = wide[1] @ torch.diag(wide[0]) @ torch.linalg.inv(wide[1])
    return product.real if product.is_complex() else product


def test_calls_that_autograd_records_are_not_batched() -> None:
    args = batched_arguments(torch.mm, torch.float32)
    args[0].requires_grad_()
    assert explain_call(torch.mm, *args) == "mapped element by element"
    with torch.no_grad():
        assert explain_call(torch.mm, *args) == "batched by shape (2 shapes)"


@pytest.mark.parametrize("function", [torch.add, torch.sub, torch.mul, torch.div])
def test_a_number_that_all_elements_share_gets_its_gradient(function: Callable[..., Any], device: str) -> None:
    parts = [torch.arange(1.0, n, device=device, requires_grad=True) for n in (3, 5)]
    w = torch.tensor(3.0, device=device, requires_grad=True)
    actual, expected = (
        torch.autograd.grad(sum(t.square().sum() for t in results), [*parts, w])
        for results in (function(st.TensorList(parts), w), [function(t, w) for t in parts])
    )
    torch.testing.assert_close(actual, expected)
