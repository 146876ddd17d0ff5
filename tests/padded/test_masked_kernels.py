"""Masked softmax, reductions and norms give what the plain ops give on the valid elements, whatever padding holds."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as some
from masked_checks import HALVES, check_reduction, plain_reduction
from masked_oracle import (
    Padded,
    any_padded,
    assert_exact,
    padded,
    poisoned,
    wanted_gradients,
    wanted_results,
    wanted_rows,
)
from programs import LOWERINGS, Lowering, interpreted
from torch import Tensor

from subtensors.kernels.padded import masked_layout, masked_norm, masked_reduction, masked_softmax
from subtensors.kernels.padded.masked_norm import Normed
from subtensors.kernels.padded.masked_reduction import KINDS, Reduced

# What numpy says of the interpreter's arithmetic, and torch of a variance of one number.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", r"ignore:var\(\). degrees of freedom:UserWarning")

FLOATS = (torch.float32, *HALVES)
INTEGERS = (torch.int64, torch.int32, torch.uint8, torch.bool)
# Hypothesis draws shapes at will, each of which a GPU would compile for: there, fixed cases run.
ON_CPU = [
    pytest.param(Lowering.TORCH, id="torch"),
    pytest.param(Lowering.INTERPRETER, id="interpreter", marks=interpreted),
]
each_lowering = pytest.mark.parametrize("lowering", LOWERINGS)
each_on_cpu = pytest.mark.parametrize("lowering", ON_CPU)


@pytest.fixture(params=["one tile", "many tiles"])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles so large that they hold a case whole, or so small that it takes many."""
    if request.param == "many tiles":
        monkeypatch.setattr(masked_layout, "TILE_ELEMENTS", 32)
        monkeypatch.setattr(masked_softmax, "MAX_ONE_PASS_ELEMENTS", 4)


def case(name: str) -> Padded:
    """Tensors that differ in what a kernel has to walk."""
    shape, sizes, order = {
        "vector": ((37,), {0: 20}, None),
        "ragged": ((4, 33), {1: ([33, 0, 7, 32], 0)}, None),
        "attention": ((3, 2, 3, 20), {2: ([3, 2, 0], 0), 3: ([20, 17, 5], 0), 0: 2}, None),
        "inner": ((3, 21, 6), {1: ([21, 1, 8], 0), 2: 5}, None),
        "images": ((3, 2, 5, 7), {2: ([5, 3, 1], 0), 3: ([6, 7, 2], 0)}, (0, 2, 3, 1)),
        "transposed": ((5, 4, 6), {0: 4, 2: ([6, 1, 3, 0, 2], 0)}, (2, 0, 1)),
        "unpadded": ((3, 5), {}, None),
    }[name]
    return padded(shape, sizes, order=order)


CASES = ["vector", "ragged", "attention", "inner", "images", "transposed", "unpadded"]


def sampled(choices: Iterable[Any], name: str, lowering: Lowering) -> list[Any]:
    """All choices for the reference; every third for the interpreter, every fifth for a GPU, which compiles each.

    Other cases take others, so that each choice meets some case, and the interpreter others than a GPU.
    """
    every = list(choices)
    if lowering is Lowering.TORCH:
        return every
    step = min(5 if lowering is Lowering.CUDA else 3, len(every))
    return every[(CASES.index(name) + (lowering is Lowering.CUDA)) % step :: step]


each_case = pytest.mark.parametrize("name", CASES)


def check_softmax(p: Padded, dim: int, is_log: bool, fill: float, lowering: Lowering) -> None:
    p = p.on(lowering)
    by_torch = lowering is Lowering.TORCH
    run = masked_softmax.masked_softmax_reference if by_torch else masked_softmax.masked_softmax_forward
    back = masked_softmax.masked_softmax_backward_reference if by_torch else masked_softmax.masked_softmax_backward

    def plain(row: Tensor) -> Tensor:
        return F.log_softmax(row, 0) if is_log else F.softmax(row, 0)

    y = run(p.x, dim, p.extents, fill, is_log)
    wanted = wanted_rows(p, [dim], plain, fill)
    wanted.check(y, lowering)
    g = p.like(torch.randn(p.x.shape)).x.to(p.x.dtype)
    # The gradient is that at torch's own result, so that the forward's rounding is not counted twice.
    at = torch.where(p.mask, wanted.plain, y)
    wanted_gradients(p, g, [dim], plain).check(back(g, at, dim, p.extents, is_log), lowering)


@each_lowering
@each_case
@pytest.mark.usefixtures("tiles")
def test_softmax_equals_that_of_the_valid_elements(name: str, lowering: Lowering) -> None:
    for dim in sampled(range(case(name).x.dim()), name, lowering):
        check_softmax(case(name), dim, False, 0.0, lowering)
    check_softmax(case(name), -1, True, -1.0, lowering)


@each_on_cpu
@given(any_padded(FLOATS), some.data())
def test_softmax_of_random_tensors_equals_that_of_the_valid_elements(lowering: Lowering, p: Padded, data: Any) -> None:
    dim = data.draw(some.integers(0, p.x.dim() - 1))
    with np.errstate(all="ignore"):
        check_softmax(p, dim, data.draw(some.booleans()), data.draw(some.sampled_from([0.0, -2.5])), lowering)


@each_lowering
@pytest.mark.usefixtures("tiles")
def test_infinite_and_nan_elements_affect_their_row_as_in_plain_torch(lowering: Lowering) -> None:
    p = padded((5, 9), {1: ([9, 4, 4, 4, 3], 0)})
    p.x[0, 2] = math.nan
    p.x[1, :4] = -math.inf
    p.x[2, 0] = math.inf
    p.x[3, :3] = -math.inf
    check_softmax(p, 1, False, 0.0, lowering)


KINDS_AND_ORDERS = [(kind, 2.0) for kind in KINDS] + [("norm", p) for p in (0.0, 1.0, 3.0, math.inf)]


@each_lowering
@each_case
@pytest.mark.usefixtures("tiles")
def test_a_reduction_equals_that_of_the_valid_elements(name: str, lowering: Lowering) -> None:
    x = case(name)
    every = list(range(x.x.dim()))
    for number, (kind, p) in sampled(enumerate(KINDS_AND_ORDERS), name, lowering):
        choices = [every, [-1], every[1:] or every, every[::2]]
        check_reduction(x, kind, choices[number % 4], lowering, p)


@each_on_cpu
@given(any_padded(FLOATS), some.sampled_from(KINDS_AND_ORDERS), some.sampled_from([0.0, 1.0]), some.data())
def test_a_reduction_of_random_tensors_equals_that_of_the_valid_elements(
    lowering: Lowering, x: Padded, kind: tuple[str, float], correction: float, data: Any
) -> None:
    dims = data.draw(some.lists(some.integers(0, x.x.dim() - 1), min_size=1, unique=True))
    with np.errstate(all="ignore"):
        check_reduction(x, kind[0], dims, lowering, kind[1], correction)


@each_lowering
@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.usefixtures("tiles")
def test_integers_are_reduced_exactly(dtype: torch.dtype, lowering: Lowering) -> None:
    x = padded((4, 23), {1: ([23, 1, 7, 12], 0)}).on(lowering)
    x = Padded(poisoned(x.x.abs().nan_to_num(0, 0, 0).clamp(max=50).to(dtype), x.mask), x.extents)
    by_torch = lowering is Lowering.TORCH
    run = masked_reduction.masked_reduction_reference if by_torch else masked_reduction.masked_reduction_forward
    kinds = ["sum", "prod", "amax", "amin"]
    # For a GPU each is another program to compile.
    for kind in kinds[INTEGERS.index(dtype) % 2 :: 2] if lowering is Lowering.CUDA else kinds:
        wanted = wanted_results(x, [1], lambda row: getattr(row, kind)(), 0)  # noqa: B023
        wanted.check(run(x.x, kind, [1], x.extents).out, lowering)


@each_lowering
def test_a_valid_nan_is_not_lost(lowering: Lowering) -> None:
    x = padded((3, 20), {1: ([20, 4, 9], 0)})
    x.x[:, 2] = math.nan
    for kind in KINDS:
        check_reduction(x, kind, [1], lowering)


@each_lowering
def test_a_product_with_zeros_has_torchs_gradient(lowering: Lowering) -> None:
    x = padded((4, 8), {1: ([8, 5, 5, 3], 0)})
    x.x[1, 2] = 0
    x.x[2, 1:3] = 0
    check_reduction(x, "prod", [1], lowering)


@each_lowering
def test_a_long_row_is_shared_by_programs_if_rows_are_few(lowering: Lowering, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masked_layout, "TILE_ELEMENTS", 64)
    monkeypatch.setattr(masked_reduction, "_parts", lambda programs, tiles, slots: min(tiles, 3))
    x = padded((2, 500), {1: ([500, 170], 0)})
    for number, (kind, p) in sampled(enumerate(KINDS_AND_ORDERS), "ragged", lowering):
        check_reduction(x, kind, [[1], [0, 1]][number % 2], lowering, p)


def test_rows_are_shared_by_as_many_programs_as_run_at_a_time() -> None:
    parts = masked_reduction._parts
    assert parts(512, 32, 528) == 1  # a round of programs, and nothing to merge
    assert 264 <= parts(1, 16384, 528) <= 528
    assert parts(10, 100, 528) == 50  # two tiles each
    assert parts(1000, 1, 528) == 1


@pytest.mark.parametrize(("kind", "dtype"), [("mean", torch.int64), ("norm", torch.bool), ("var", torch.int32)])
def test_a_reduction_of_an_unsupported_dtype_raises(kind: str, dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=f"{kind} takes a floating-point tensor, got {dtype}"):
        masked_reduction.result_dtype(kind, dtype)
    with pytest.raises(ValueError, match=r"one of sum, mean.*got 'median'"):
        masked_reduction.result_dtype("median", torch.float32)


def check_norm(
    p: Padded, normalized: int, is_rms: bool, is_weighted: bool, lowering: Lowering, eps: float = 1e-3
) -> None:
    p = p.on(lowering)
    shape = p.x.shape[p.x.dim() - normalized :]
    dims = range(p.x.dim() - normalized, p.x.dim())
    generator = torch.Generator().manual_seed(1)
    w, b = (torch.randn(shape, generator=generator).to(p.x.device, p.x.dtype) for _ in range(2))
    weight, bias = (w, b) if is_weighted else (None, None)
    by_torch = lowering is Lowering.TORCH
    run = masked_norm.masked_norm_reference if by_torch else masked_norm.masked_norm_forward
    back = masked_norm.masked_norm_backward_reference if by_torch else masked_norm.masked_norm_backward
    normed = run(p.x, normalized, weight, bias, eps, p.extents, 0.0, is_rms)
    g = p.like(torch.randn(p.x.shape, generator=generator)).x.to(p.x.dtype)
    truths = [oracle_norm(p, g, dims, dtype, weight, bias, eps, is_rms) for dtype in (p.x.dtype, torch.float64)]
    gradients = back(g, p.x, normed.mean, normed.scale, weight, normalized, p.extents, is_rms)
    assert not gradients[0][~p.mask].any()
    results = [normed.y, gradients[0], *(t.to(p.x.dtype) for t in gradients[1:])]
    # What is added up has the size of (x - mean) * scale before it cancels.
    amplified = p.x.masked_fill(~p.mask, 0).double().abs().amax() * normed.scale.amax()
    terms = g.masked_fill(~p.mask, 0).double().abs().sum() * amplified.clamp(min=1)
    largest = w.double().abs().amax().clamp(min=1)
    sizes = [amplified * largest + b.double().abs().amax(), terms * largest * normed.scale.amax(), terms, terms]
    for actual, plain, truth, size in zip(results, *truths, sizes, strict=True):
        assert_exact(actual, plain, truth, size.expand(truth.shape), lowering)


def oracle_norm(
    p: Padded, g: Tensor, dims: range, dtype: torch.dtype, weight: Tensor | None, bias: Tensor | None, eps: float,
    is_rms: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Result and gradients by the plain op on each row's valid elements, in this dtype."""
    shape = p.x.shape[dims[0] :]
    x = p.x.to(dtype)
    w, b = (torch.ones(shape), torch.zeros(shape)) if weight is None or bias is None else (weight, bias)
    w, b = (t.to(x.device, dtype).clone().requires_grad_() for t in (w, b))
    y, gx = (torch.zeros(x.shape, dtype=dtype, device=x.device) for _ in range(2))
    columns = shape.numel()
    total = []
    for positions, is_real in p.rows(dims):
        where = positions.to(x.device)
        if not is_real or not len(positions):
            continue
        row = x.reshape(-1)[where].requires_grad_()
        ws, bs = (t.reshape(-1)[where % columns] for t in (w, b))
        size = [len(positions)]
        out = F.rms_norm(row, size, ws, eps) + bs if is_rms else F.layer_norm(row, size, ws, bs, eps)
        y.view(-1)[where] = out.detach()
        upstream = g.reshape(-1)[where].to(dtype)
        gx.view(-1)[where] = torch.autograd.grad(out, row, upstream, retain_graph=True)[0]
        total.append((out.double() * upstream.double()).sum())
    if total:
        torch.stack(total).sum().backward()
    none = torch.zeros_like(w)
    return y, gx, w.grad if w.grad is not None else none, b.grad if b.grad is not None else none


@each_lowering
@each_case
@pytest.mark.parametrize("is_rms", [False, True], ids=["layer", "rms"])
def test_a_norm_equals_that_of_the_valid_elements(name: str, is_rms: bool, lowering: Lowering) -> None:
    x = case(name)
    choices = [(1, True), (min(2, x.x.dim()), False)]
    for normalized, is_weighted in (
        choices[(CASES.index(name) + is_rms) % 2 :: 2] if lowering is Lowering.CUDA else choices
    ):
        check_norm(x, normalized, is_rms, is_weighted, lowering)


@each_on_cpu
@given(any_padded(FLOATS), some.booleans(), some.booleans(), some.data())
def test_a_norm_of_random_tensors_equals_that_of_the_valid_elements(
    lowering: Lowering, p: Padded, is_rms: bool, is_weighted: bool, data: Any
) -> None:
    normalized = data.draw(some.integers(1, p.x.dim()))
    # Rows whose batch is normalized away have no counterpart among the plain ops.
    kept = p.x.dim() - normalized
    assume(all(e.sizes.dim() == 0 or e.batch_dim < kept or e.dim >= kept for e in p.extents))
    with np.errstate(all="ignore"):
        check_norm(p, normalized, is_rms, is_weighted, lowering)


@each_lowering
def test_a_row_too_long_for_a_program_is_normalized_too(lowering: Lowering, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masked_norm, "MAX_ROW_LENGTH", 16)
    check_norm(padded((3, 17), {0: 2, 1: 11}), 1, False, True, lowering)


@each_lowering
def test_float64_is_computed_in_float64(lowering: Lowering) -> None:
    p = padded((4, 33), {1: ([33, 0, 7, 32], 0)}, torch.float64).on(lowering)
    weight = torch.linspace(0, 1, 33, dtype=torch.float64, device=p.x.device)
    by_torch = lowering is Lowering.TORCH
    softmax = masked_softmax.masked_softmax_reference if by_torch else masked_softmax.masked_softmax_forward
    norm = masked_norm.masked_norm_reference if by_torch else masked_norm.masked_norm_forward
    reduce = masked_reduction.masked_reduction_reference if by_torch else masked_reduction.masked_reduction_forward
    close = torch.testing.assert_close
    close(softmax(p.x, 1, p.extents), wanted_rows(p, [1], lambda row: row.softmax(0), 0).truth)
    for kind, order in KINDS_AND_ORDERS:
        wanted = wanted_results(p, [1], plain_reduction(kind, order, 1.0), 0).truth
        close(reduce(p.x, kind, [1], p.extents, order).out, wanted, equal_nan=True)
    truth, *_ = oracle_norm(p, torch.zeros_like(p.x), range(1, 2), torch.float64, weight, weight, 1e-5, False)
    close(norm(p.x, 1, weight, weight, 1e-5, p.extents).y, truth)


def test_results_are_named_tuples() -> None:
    x = torch.ones(2, 3)
    assert isinstance(masked_reduction.masked_reduction_reference(x, "sum", [1], []), Reduced)
    assert isinstance(masked_norm.masked_norm_reference(x, 1, None, None, 1e-5, []), Normed)
