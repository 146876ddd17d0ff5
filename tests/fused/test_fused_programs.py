"""Random straight-line programs over random lists equal the same math element by element."""

from __future__ import annotations

import linecache
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from fused_lists import adam
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as some
from programs import CUDA, LOWERINGS, SMALL_TILES, Lowering, check, each_lowering
from torch import Tensor

from subtensors.dispatch.fused.fused_function import FusedFunction
from subtensors.dispatch.fused.tensor_columns import TensorColumn

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
OTHERS = [torch.int64, torch.int32, torch.uint8, torch.bool]


NUMBERS = ["0.5", "2", "-1.5", "3.0", "f0", "f1", "1 - f0", "n0", "1 - f1**n0", "-f0 * 0.25"]

# Operands: {x} a tensor, {y} another, {c} a condition, {e} an exact tensor, {k} a number, {t} what can be written to.
SMOOTH = [
    "{x} + {y}",
    "{x} - {y}",
    "{x} * {y}",
    "{x} + {k}",
    "{k} - {x}",
    "{x} * {k}",
    "{x} / ({y}.abs() + 0.5)",
    "{x} / 3",
    "{x}.add({y}, alpha=2)",
    "{x}.sub({y}, alpha={k})",
    "torch.lerp({x}, {y}, 0.25)",
    "{x}.lerp({y}, {k})",
    "torch.addcmul({x}, {y}, {z}, value={k})",
    "torch.addcdiv({x}, {y}, {z}.abs() + 1, value=-0.5)",
    "{x}.abs()",
    "-{x}",
    "{x} ** 2",
    "{x}.square()",
    "({x}.abs() + 0.25) ** 0.5",
    "({x}.abs() + 0.25) ** f0",
    "({x}.abs() + 0.25).pow({y}.clamp(-2, 2))",
    "({x}.abs() + 0.125).sqrt()",
    "({x}.abs() + 0.125).rsqrt()",
    "({x}.abs() + 0.125).log()",
    "({x}.clamp(-4, 4)).exp()",
    "torch.sigmoid({x})",
    "torch.tanh({x})",
    "{x}.sin()",
    "torch.nn.functional.silu({x})",
    "torch.maximum({x}, {y})",
    "torch.minimum({x}, {y})",
    "{x}.clamp(-1, 1.5)",
    "{x}.clamp(min={k})",
    "torch.where({c}, {x}, {y})",
    "torch.where({c}, {x}, {k})",
    "torch.where({c}, 1.0, {x})",
    "{x}.masked_fill({c}, 0.5)",
    "{x}.to(torch.float32)",
    "{x}.to(torch.float64)",
    "{x}.to(torch.bfloat16)",
    "{x}.to(torch.float16)",
    "{x}.clone()",
    "torch.zeros_like({x}) + {k}",
    "torch.full_like({x}, {k})",
    "{x}.relu()",
]
REDUCED = [
    "{x}.sum()",
    "{x}.mean()",
    "{x}.norm()",
    "torch.linalg.vector_norm({x}, 1)",
    "torch.linalg.vector_norm({x}.abs() + 0.25, 3)",
    "{x}.abs().sum() + 1",
    "{x}.std(correction=0)",
    "{x}.var(correction=0)",
    "{c}.sum()",
]
# Of no elements there is no largest.
EXTREME = ["{x}.amax()", "{x}.amin()", "{x}.max()", "{x}.norm(float('inf'))"]
# What depends on whether a rounding went up or down is asked only of values that nothing has rounded.
EXACT = [
    "{e} > 0",
    "{e} >= {f}",
    "{e} != {f}",
    "{e} == 0.5",
    "({e} < 1) & ({f} > -1)",
    "~({e} > 0)",
    "{c} | ({e} <= 0)",
    "torch.logical_xor({c}, {e})",
    "{e}.isnan()",
    "{e}.isfinite()",
    "{e}.sign()",
    "{e}.floor()",
    "{e}.round()",
    "{e}.to(torch.bool)",
    "{e}.clone()",
    "torch.maximum({e}, {f})",
    "torch.where({c}, {e}, {f})",
    "({e} > 0).any()",
    "({e} > 0).all()",
]
IN_PLACE = [
    "{t}.add_({x})",
    "{t}.sub_({x}, alpha={k})",
    "{t}.mul_({k})",
    "{t}.mul_({x})",
    "{t}.lerp_({x}, 0.25)",
    "{t}.addcmul_({x}, {y}, value={k})",
    "{t}.copy_({x})",
    "{t}.add_(1)",
    "{t}.zero_()",
    "{t}.fill_({k})",
    "{t}.clamp_(-2, 2)",
    "{t}.neg_()",
    "{t}.masked_fill_({c}, 0.25)",
    "{t} *= {k}",
]


@dataclass
class Written:
    """A program as source text."""

    lines: list[str]
    parameters: list[str]

    def function(self) -> Callable[..., Any]:
        source = f"def function({', '.join(self.parameters)}, f0, f1, n0):\n" + "".join(
            f"    {x}\n" for x in self.lines
        )
        note(source)
        names: dict[str, Any] = {"torch": torch}
        filename = f"<program {abs(hash(source))}>"
        linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
        exec(compile(source, filename, "exec"), names)
        return names["function"]  # type: ignore[no-any-return]


@dataclass
class _Writer:
    """Draws statements and runs each on small tensors, so that what torch refuses is not written."""

    draw: some.DrawFn
    values: dict[str, Tensor]
    numbers: dict[str, float]
    lines: list[str] = field(default_factory=list)
    exact: set[str] = field(default_factory=set)
    conditions: set[str] = field(default_factory=set)

    def pick(self, names: list[str]) -> str:
        return self.draw(some.sampled_from(names))

    def statement(self, parameters: list[str], with_extremes: bool) -> None:
        kinds = [SMOOTH, SMOOTH, REDUCED, EXACT, IN_PLACE, IN_PLACE] + ([EXTREME] if with_extremes else [])
        kind = self.draw(some.sampled_from(kinds))
        template = self.draw(some.sampled_from(kind))
        tensors = [n for n, v in self.values.items() if v.dtype != torch.bool]
        exact = [n for n in tensors if n in self.exact]
        conditions = [n for n, v in self.values.items() if v.dtype == torch.bool and n in self.exact]
        if not tensors or ("{c}" in template and not conditions) or ("{e}" in template and not exact):
            return
        operands = {
            **{letter: self.pick(tensors) for letter in "xyz"},
            **{letter: self.pick(exact or tensors) for letter in "ef"},
            "c": self.pick(conditions or tensors),
            "k": self.pick(NUMBERS),
            "t": self.pick(parameters),
        }
        line = template.format(**operands)
        target = operands["t"] if kind is IN_PLACE else f"a{len(self.lines)}"
        scope = {n: v.clone() for n, v in self.values.items()}
        try:
            exec(line if kind is IN_PLACE else f"{target} = {line}", {"torch": torch, **self.numbers}, scope)
        except (RuntimeError, TypeError):
            return
        self.lines.append(line if kind is IN_PLACE else f"{target} = {line}")
        self.values[target] = scope[target]
        (self.exact.add if kind is EXACT else self.exact.discard)(target)


@some.composite
def programs(draw: some.DrawFn, dtypes: dict[str, torch.dtype], scalars: set[str], with_extremes: bool) -> Written:
    """A program on parameters of these dtypes, some of which hold one number per tensor."""
    values = {n: torch.ones(() if n in scalars else 2, dtype=d) for n, d in dtypes.items()}
    writer = _Writer(draw, values, {"f0": 0.5, "f1": 0.9, "n0": 3}, exact=set(dtypes))
    for _ in range(draw(some.integers(1, 9))):
        writer.statement(list(dtypes), with_extremes)
    results = draw(some.lists(some.sampled_from([*writer.values]), max_size=3))
    if results:
        writer.lines.append(f"return {', '.join(results)}")
    return Written(writer.lines or ["pass"], list(dtypes))


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
def calls(draw: some.DrawFn) -> tuple[Written, list[Any]]:
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


def assert_like_the_map(lowering: Lowering, call: tuple[Written, list[Any]], f0: float, n0: int) -> None:
    written, arguments = call
    function = written.function()
    fusion = check(lowering, function, *arguments, f0=f0, f1=0.9, n0=n0)
    if fusion is not None and lowering is Lowering.TORCH:
        # New numbers, the same program.
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
def test_a_program_equals_the_same_maths_element_by_element(
    call: tuple[Written, list[Any]], f0: float, n0: int, lowering: Lowering
) -> None:
    assert_like_the_map(lowering, call, f0, n0)


# On a GPU every program is compiled, which takes a second.
@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@given(call=calls(), **numbers)
@settings(max_examples=usual, suppress_health_check=slow_to_draw)
def test_a_program_on_a_gpu_equals_the_same_maths_element_by_element(
    call: tuple[Written, list[Any]], f0: float, n0: int
) -> None:
    assert_like_the_map(Lowering.CUDA, call, f0, n0)


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@given(data=some.data(), dtypes=some.lists(some.sampled_from([*FLOATS, torch.int64]), min_size=2, max_size=4))
@settings(suppress_health_check=slow_to_draw)
@pytest.mark.parametrize("lowering", [p for p in LOWERINGS if p is not CUDA])
def test_elements_of_several_dtypes_and_extents_each_follow_torch(
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
    # Torch takes the root of no sum of one element; the exponent 1/3 is rounded, and far from one that counts.
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
def test_what_a_store_rounds_away_can_be_read_back(lowering: Lowering) -> None:
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
