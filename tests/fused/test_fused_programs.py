"""Random straight-line programs over random lists equal the same math element by element."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from fused_lists import adam
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some
from programs import CUDA, LOWERINGS, SMALL_TILES, Lowering, check, each_lowering
from random_programs import SourceProgram, programs
from torch import Tensor

from subtensors.dispatch.fused.fused_function import FusedFunction
from subtensors.dispatch.fused.tensor_columns import TensorColumn

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
OTHERS = [torch.int64, torch.int32, torch.uint8, torch.bool]

SHAPES = [(), (0,), (1,), (7,), (3, 5), (64,), (65,), (2, 3, 4, 2), (150,), (1, 4)]
VALUES = [0.0, -0.0, 1.0, 0.5, -2.0, float("inf"), float("-inf"), float("nan"), 1e-30, 1e4]


def laid_out(values: Tensor, layout: str) -> Tensor:
    """The same values with other strides, or at a misaligned address."""
    if layout == "transposed" and values.dim() >= 2:
        return values.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "channels last" and values.dim() == 4:
        return values.contiguous(memory_format=torch.channels_last)
    if layout == "misaligned":
        memory = torch.empty(values.numel() + 1, dtype=values.dtype)
        return memory[1:].view(values.shape).copy_(values)
    if layout == "strided" and values.dim():
        memory = torch.empty(*values.shape[:-1], 2 * values.shape[-1], dtype=values.dtype)
        return memory[..., ::2].copy_(values)
    return values


@some.composite
def columns(draw: some.DrawFn, shapes: list[tuple[int, ...]], dtype: torch.dtype, is_scalar: bool) -> TensorColumn:
    """One argument: a tensor of each shape."""
    special = draw(some.booleans()) and dtype.is_floating_point and draw(some.booleans())
    layout = draw(some.sampled_from(["plain", "plain", "transposed", "channels last", "misaligned", "strided"]))
    generator = torch.Generator().manual_seed(draw(some.integers(0, 9)))
    made = []
    for shape in shapes:
        values = torch.randn(() if is_scalar else shape, dtype=torch.float64, generator=generator)
        if special and values.numel():
            values.view(-1)[0] = draw(some.sampled_from(VALUES))
        if not dtype.is_floating_point:
            values = (values * 3).abs() if dtype == torch.uint8 else (values * 3).round()
        made.append(laid_out(values.to(dtype), layout))
    return TensorColumn(made)


@some.composite
def calls(draw: some.DrawFn) -> tuple[SourceProgram, list[Any]]:
    """A program and its arguments."""
    count = draw(some.integers(1, 4))
    names = [f"x{i}" for i in range(count)]
    dtypes = {
        n: draw(some.sampled_from(FLOATS if i == 0 or draw(some.integers(0, 3)) else OTHERS))
        for i, n in enumerate(names)
    }
    scalars = {n for n in names[1:] if draw(some.integers(0, 3)) == 0}
    shapes = draw(some.lists(some.sampled_from(SHAPES), min_size=1, max_size=4))
    written = draw(programs(dtypes, scalars, with_extremes=all(0 not in s for s in shapes)))
    arguments: list[Any] = [draw(columns(shapes, dtypes[n], n in scalars)) for n in names]
    only_read = [n for n in sorted(scalars) if not any(x.startswith((f"{n}.", f"{n} ")) for x in written.lines)]
    if only_read and draw(some.booleans()):
        # A plain 0-d tensor, shared by all elements.
        position = names.index(only_read[0])
        arguments[position] = arguments[position][0]
    return written, arguments


def assert_like_the_map(lowering: Lowering, call: tuple[SourceProgram, list[Any]], f0: float, n0: int) -> None:
    written, arguments = call
    function = written.function()
    fusion = check(lowering, function, *arguments, f0=f0, f1=0.9, n0=n0)
    if fusion is not None and lowering is Lowering.TORCH:
        # The same program with other numbers.
        traces = fusion.traces
        check(lowering, function, *arguments, f0=0.25, f1=0.75, n0=7, fusion=fusion)
        assert fusion.traces == traces


numbers = {"f0": some.sampled_from([0.5, 0.875, 0.1]), "n0": some.integers(1, 5)}
slow_to_draw = [HealthCheck.too_slow, HealthCheck.filter_too_much]
usual = settings.default.max_examples if settings.default else 25


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@given(call=calls(), **numbers)
@settings(max_examples=4 * usual, suppress_health_check=slow_to_draw)
@pytest.mark.parametrize("lowering", [p for p in LOWERINGS if p is not CUDA])
def test_a_program_equals_the_same_math_element_by_element(
    call: tuple[SourceProgram, list[Any]], f0: float, n0: int, lowering: Lowering
) -> None:
    assert_like_the_map(lowering, call, f0, n0)


# On a GPU every program is compiled, which takes a second.
@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@given(call=calls(), **numbers)
@settings(max_examples=usual, suppress_health_check=slow_to_draw)
def test_a_program_on_a_gpu_equals_the_same_math_element_by_element(
    call: tuple[SourceProgram, list[Any]], f0: float, n0: int
) -> None:
    assert_like_the_map(Lowering.CUDA, call, f0, n0)


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@given(data=some.data(), dtypes=some.lists(some.sampled_from([*FLOATS, torch.int64]), min_size=2, max_size=4))
@settings(suppress_health_check=slow_to_draw)
@pytest.mark.parametrize("lowering", [p for p in LOWERINGS if p is not CUDA])
def test_elements_of_several_dtypes_and_ranks_each_equal_torch(
    data: some.DataObject, dtypes: list[torch.dtype], lowering: Lowering
) -> None:
    written = data.draw(programs({"x0": dtypes[0], "x1": torch.float32}, set(), with_extremes=False))
    shapes: list[tuple[int, ...]] = [(5,), (), (66,), (2, 2)]
    x0 = TensorColumn(torch.randn(s).to(d) for s, d in zip(shapes, dtypes, strict=False))
    x1 = TensorColumn(torch.randn(s) for s, _ in zip(shapes, dtypes, strict=False))
    check(lowering, written.function(), x0, x1, f0=0.5, f1=0.9, n0=3)


def lists(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> TensorColumn:
    generator = torch.Generator().manual_seed(seed)
    return TensorColumn(torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes)


@each_lowering
@pytest.mark.parametrize("number", [1e-30, 1e-3, 1e30])
def test_a_root_keeps_what_the_logarithm_of_its_argument_leaves(lowering: Lowering, number: float) -> None:
    # For one element torch takes no root; the error of the rounded exponent 1/3 grows with the distance from one.
    x = TensorColumn([torch.tensor([number], dtype=torch.float64)])
    if lowering is Lowering.CUDA:
        x = TensorColumn(t.cuda() for t in x)
    with lowering.running():
        (norm,) = FusedFunction(lambda x: torch.linalg.vector_norm(x, 3), SMALL_TILES)(x)
    assert abs(norm.item() / number - 1) <= (2 + abs(math.log(number**3))) * torch.finfo(torch.float64).eps


@each_lowering
def test_compensated_sums_keep_what_half_precision_drops(lowering: Lowering) -> None:
    def kahan(p: Tensor, c: Tensor, u: Tensor) -> None:
        u = u + c
        old = p.clone()
        p.add_(u)
        c.copy_(u - (p - old))

    p, c = TensorColumn([torch.ones(70, dtype=torch.bfloat16)]), TensorColumn([torch.zeros(70, dtype=torch.bfloat16)])
    u = TensorColumn([torch.full((70,), 2.0**-10, dtype=torch.bfloat16)])
    if lowering is Lowering.CUDA:
        p, c, u = (TensorColumn(t.cuda() for t in x) for x in (p, c, u))
    fusion = FusedFunction(kahan, SMALL_TILES)
    with lowering.running():
        for _ in range(64):
            fusion(p, c, u)
    assert (p[0].double() + c[0].double() == 1 + 64 * 2.0**-10).all()


@each_lowering
def test_the_rounding_error_of_a_store_can_be_computed(lowering: Lowering) -> None:
    def split(low: Tensor, rest: Tensor, master: Tensor) -> None:
        low.copy_(master)
        rest.copy_(master - low)

    master = lists((70,), (3, 5))
    low, rest = TensorColumn(t.bfloat16() for t in master), TensorColumn(map(torch.zeros_like, master))
    if lowering is Lowering.CUDA:
        master, low, rest = (TensorColumn(t.cuda() for t in x) for x in (master, low, rest))
    with lowering.running():
        FusedFunction(split)(low, rest, master)
    for m, a, b in zip(master, low, rest, strict=True):
        assert torch.equal(a.float() + b, m)


@each_lowering
def test_adam_written_for_one_tensor_runs_over_lists(lowering: Lowering) -> None:
    shapes: list[tuple[int, ...]] = [(3, 5), (150,), (), (1,)]
    p, g, m = (lists(*shapes, seed=i) for i in range(3))
    v = TensorColumn(t.abs() for t in lists(*shapes, seed=3))
    step = TensorColumn(torch.tensor(float(i)) for i in range(4))
    for dtype in (torch.float32, torch.bfloat16):
        weights = TensorColumn(t.to(dtype) for t in p)
        check(lowering, adam, weights, g, m, v, step, lr=1e-3, betas=(0.9, 0.999))


@each_lowering
def test_arguments_may_be_nested_and_results_too(lowering: Lowering) -> None:
    def function(state: dict[str, Tensor], pair: tuple[Tensor, float]) -> dict[str, Any]:
        state["m"].add_(pair[0], alpha=pair[1])
        return {"sum": state["m"].sum(), "both": [state["m"], (pair[0] * 2, None)]}

    check(lowering, function, {"m": lists((70,), (3,))}, (lists((70,), (3,), seed=1), 0.5))
