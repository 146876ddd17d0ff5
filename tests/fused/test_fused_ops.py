"""Every formula of the lowering table against torch, over the values where formulas go wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from programs import KERNELS, LOWERINGS, Lowering, check, each_kernel_lowering, each_lowering
from torch import Tensor

from subtensors.dispatch.fused.fused_function import FusedFunction
from subtensors.dispatch.fused.tensor_columns import TensorColumn
from subtensors.kernels.fused import blockwise, launch
from subtensors.kernels.fused import lowering as table
from subtensors.kernels.fused.launch import Tiling

INF, NAN = float("inf"), float("nan")

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
EVERY = [*FLOATS, *INTEGERS, torch.bool]
NUMBERS = [*FLOATS, *INTEGERS]


def special_values(dtype: torch.dtype) -> Tensor:
    """Values of a dtype that expose a wrong formula."""
    if dtype == torch.bool:
        return torch.tensor([False, True])
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        return torch.tensor([0, 1, 2, 3, 7, 100, info.max, info.min, *((-1, -2, -3, -7) if info.min else ())]).to(dtype)
    info = torch.finfo(dtype)
    plain = [0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 7.0, 100.0, info.tiny, info.max / 64]
    if dtype != torch.bfloat16:
        # The interpreter flushes the denormal numbers of bfloat16.
        plain.append(info.smallest_normal * info.eps * 4)
    signed = [*plain, *(-v for v in plain), INF, -INF, NAN]
    random = torch.randn(15, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).tolist()
    return torch.tensor([*signed, *random], dtype=torch.float64).to(dtype)


def all_pairs(dtype: torch.dtype, other: torch.dtype) -> tuple[Tensor, Tensor]:
    """All pairs of special values."""
    a, b = special_values(dtype), special_values(other)
    return a.repeat_interleave(len(b)), b.repeat(len(a))


def moderate(values: Tensor) -> Tensor:
    """Finite values whose sum has a small rounding error."""
    return values if values.dtype == torch.bool else torch.where(values.abs() <= 100, values, 1)


def divisor(values: Tensor) -> Tensor:
    """Divisors without zero, -1 (which overflows with the smallest integer) and those whose fmod is NaN in torch."""
    return torch.where((values.abs() < 1e-3) | (values == -1), torch.full_like(values, 5), values)


Function = Callable[..., Any]


def power(exponent: float) -> Function:
    return lambda x: x**exponent


def norm(order: float) -> Function:
    return lambda x: torch.linalg.vector_norm(x, order)


UNARY: dict[str, tuple[Function, list[torch.dtype]]] = {
    "neg": (torch.neg, NUMBERS),
    "abs": (torch.abs, NUMBERS),
    "square": (torch.square, NUMBERS),
    "sign": (torch.sign, EVERY),
    "relu": (torch.relu, NUMBERS),
    "positive": (torch.positive, NUMBERS),
    "clone": (torch.clone, EVERY),
    "detach": (lambda x: x.detach() + 0, NUMBERS),
    "alias": (lambda x: torch.ops.aten.alias(x) + 0, NUMBERS),
    "logical_not": (torch.logical_not, EVERY),
    "bitwise_not": (torch.bitwise_not, [*INTEGERS, torch.bool]),
    "isnan": (torch.isnan, EVERY),
    "isinf": (torch.isinf, EVERY),
    "isfinite": (torch.isfinite, EVERY),
    "ceil": (torch.ceil, NUMBERS),
    "floor": (torch.floor, NUMBERS),
    "round": (torch.round, NUMBERS),
    "trunc": (torch.trunc, NUMBERS),
    "frac": (torch.frac, FLOATS),
    "zeros_like": (torch.zeros_like, EVERY),
    "ones_like": (torch.ones_like, EVERY),
    "empty_like": (lambda x: torch.empty_like(x).copy_(x), EVERY),
    "full_like": (lambda x: torch.full_like(x, 2.5), EVERY),
    "full_like of -0.0": (lambda x: 1 / torch.full_like(x, -0.0), FLOATS),
    "zero": (lambda x: x.clone().zero_(), EVERY),
    "fill": (lambda x: x.clone().fill_(3), EVERY),
    "fill truths": (lambda x: (x > 0).fill_(0.5), NUMBERS),
    "copy to truths": (lambda x: (x > 0).copy_(x / 4), NUMBERS),
    "zero numbers": (lambda x: x.clone().zero_() + torch.ones_like(x), NUMBERS),
    "fill with a tensor": (lambda x: x.clone().fill_(x.amax()), INTEGERS),
    "scalar_tensor": (lambda x: x + torch.scalar_tensor(2), NUMBERS),
    "full": (lambda x: x + torch.full((), 3), NUMBERS),
    "lift_fresh": (lambda x: x * torch.tensor(2), NUMBERS),
    "numel": (lambda x: x.sum() * 0 + torch.ops.subtensors.numel(x), INTEGERS),
    "_to_copy to float32": (lambda x: x.to(torch.float32, copy=True), EVERY),
    "_to_copy to float64": (lambda x: x.to(torch.float64, copy=True), EVERY),
    "_to_copy to bfloat16": (lambda x: x.to(torch.bfloat16, copy=True), [torch.float32, torch.float64, torch.bool]),
    "_to_copy to float16": (lambda x: x.to(torch.float16, copy=True), [torch.bfloat16, torch.bool, torch.uint8]),
    "_to_copy to int64": (lambda x: x.to(torch.int64, copy=True), [*INTEGERS, torch.bool]),
    "_to_copy to uint8": (lambda x: x.to(torch.uint8, copy=True), [*INTEGERS, torch.bool]),
    "_to_copy to bool": (lambda x: x.to(torch.bool, copy=True), EVERY),
    "floats to int32": (lambda x: x.nan_to_num(0).clamp(-100, 100).to(torch.int32), FLOATS),
    "copy": (lambda x: torch.zeros_like(x, dtype=torch.float32).copy_(x), EVERY),
    "clamp": (lambda x: x.clamp(-2, 3), NUMBERS),
    "clamp by floats": (lambda x: x.clamp(-0.5, 0.75), NUMBERS),
    "clamp by NaN": (lambda x: x.clamp(NAN, 1.0), FLOATS),
    "clamp the wrong way round": (lambda x: x.clamp(3, 2), NUMBERS),
    "clamp_min": (lambda x: x.clamp_min(1), NUMBERS),
    "clamp_max": (lambda x: x.clamp_max(2), NUMBERS),
    "clamp from above": (lambda x: x.clamp(max=2), NUMBERS),
    "add a number": (lambda x: x + 2, EVERY),
    "add a float": (lambda x: x + 0.5, EVERY),
    "add alpha": (lambda x: x.add(x, alpha=3), NUMBERS),
    "sub": (lambda x: x - 3, NUMBERS),
    "sub alpha": (lambda x: x.sub(x, alpha=3), NUMBERS),
    "rsub": (lambda x: 3 - x, NUMBERS),
    "rsub alpha": (lambda x: torch.rsub(x, x, alpha=2), NUMBERS),
    "mul": (lambda x: x * 3, EVERY),
    "div": (lambda x: x / 3, EVERY),
    "div by zero": (lambda x: x / 0.0, EVERY),
    "reciprocal": (torch.reciprocal, EVERY),
    "1 / x": (lambda x: 1 / x, EVERY),
    **{f"pow {p}": (power(p), NUMBERS) for p in (1, 2, 3)},
    **{f"pow {p}": (power(p), FLOATS) for p in (0, 0.5, -0.5, -1, -2, 4, 2.5, -3)},
    "pow of an integer, 5": (lambda x: x**5, INTEGERS),
    "pow of a number": (lambda x: 2.0**x, NUMBERS),
    "integer pow of a number": (lambda x: 2 ** (x.abs() % 5), INTEGERS),
    "eq": (lambda x: x == 1, EVERY),
    "ne": (lambda x: x != 1, EVERY),
    "lt": (lambda x: x < 1, EVERY),
    "le": (lambda x: x <= 1, EVERY),
    "gt": (lambda x: x > 1, EVERY),
    "ge": (lambda x: x >= 1, EVERY),
    "gt a float": (lambda x: x > 0.5, EVERY),
    "where": (lambda x: torch.where(x > 0, x, -x), NUMBERS),
    "where of numbers": (lambda x: torch.where(x > 0, 1.5, 0), NUMBERS),
    "where of a number": (lambda x: torch.where(x > 0, x, 2), NUMBERS),
    "masked_fill": (lambda x: x.masked_fill(x > 0, 2), NUMBERS),
    "masked_fill by a tensor": (lambda x: x.masked_fill(x > 0, torch.tensor(2).to(x.dtype)), NUMBERS),
    "sigmoid": (torch.sigmoid, EVERY),
    "nextafter": (lambda x: torch.nextafter(x, x + 1), FLOATS[:3]),
    "round to decimals": (lambda x: x.round(decimals=1), FLOATS[:2]),
}
_TRANSCENDENTAL = """acos acosh asin asinh atan atanh cos cosh erf erfc erfinv exp exp2 expm1 lgamma log log10 log1p
log2 rsqrt sin sinh sqrt tan tanh""".split()
UNARY |= {name: (getattr(torch, name), FLOATS) for name in _TRANSCENDENTAL}
UNARY |= {f"{name} of integers": (getattr(torch, name), [torch.uint8, torch.int64]) for name in ("exp", "sqrt", "sin")}

BINARY: dict[str, tuple[Function, list[torch.dtype]]] = {
    "add": (torch.add, EVERY),
    "sub": (torch.sub, NUMBERS),
    "mul": (torch.mul, EVERY),
    "div": (torch.div, EVERY),
    "div floor": (lambda a, b: torch.div(a, divisor(b), rounding_mode="floor"), NUMBERS),
    "div trunc": (lambda a, b: torch.div(a, divisor(b), rounding_mode="trunc"), NUMBERS),
    "floor_divide": (lambda a, b: torch.floor_divide(a, divisor(b)), NUMBERS),
    "floor_divide by zero": (lambda a, b: torch.floor_divide(a, torch.where(b.abs() < 1e-3, 0 * b, b)), FLOATS),
    "remainder": (lambda a, b: torch.remainder(a, divisor(b)), NUMBERS),
    "remainder by zero": (lambda a, b: torch.remainder(a, torch.where(b.abs() < 1e-3, 0 * b, b)), FLOATS),
    "fmod": (lambda a, b: torch.fmod(a, divisor(b)), NUMBERS),
    "maximum": (torch.maximum, EVERY),
    "minimum": (torch.minimum, EVERY),
    "fmax": (torch.fmax, NUMBERS),
    "fmin": (torch.fmin, NUMBERS),
    "copysign": (torch.copysign, FLOATS),
    "atan2": (torch.atan2, FLOATS),
    "hypot": (torch.hypot, FLOATS),
    "pow": (torch.pow, FLOATS),
    "eq": (torch.eq, EVERY),
    "lt": (torch.lt, EVERY),
    "ge": (torch.ge, EVERY),
    "where": (lambda a, b: torch.where(a > b, a, b), EVERY),
    "clamp": (lambda a, b: torch.clamp(a, b, -b), NUMBERS),
    "logical_and": (torch.logical_and, EVERY),
    "logical_or": (torch.logical_or, EVERY),
    "logical_xor": (torch.logical_xor, EVERY),
    "bitwise_and": (torch.bitwise_and, [*INTEGERS, torch.bool]),
    "bitwise_or": (torch.bitwise_or, [*INTEGERS, torch.bool]),
    "bitwise_xor": (torch.bitwise_xor, [*INTEGERS, torch.bool]),
    "lerp": (lambda a, b: torch.lerp(a, b, 0.25), FLOATS),
    "lerp, mostly": (lambda a, b: torch.lerp(a, b, 0.75), FLOATS),
    "lerp by a tensor": (lambda a, b: torch.lerp(a, b, b), FLOATS),
    "addcmul": (lambda a, b: torch.addcmul(a, a, b, value=2), NUMBERS),
    "addcdiv": (lambda a, b: torch.addcdiv(a, a, b, value=-2), FLOATS),
}

REDUCTIONS: dict[str, tuple[Function, list[torch.dtype]]] = {
    "sum": (torch.sum, EVERY),
    "sum to float64": (lambda x: x.sum(dtype=torch.float64), NUMBERS),
    "prod": (torch.prod, [torch.float64, torch.float32, *INTEGERS, torch.bool]),
    "amax": (torch.amax, EVERY),
    "amin": (torch.amin, EVERY),
    "max": (torch.max, EVERY),
    "min": (torch.min, EVERY),
    "mean": (torch.mean, FLOATS),
    "norm": (torch.norm, FLOATS),
    **{f"norm {p}": (norm(p), FLOATS) for p in (0, 1, 2, 3, 2.5, INF, -INF)},
    "var": (torch.var, FLOATS),
    "std": (torch.std, FLOATS),
    "var without correction": (lambda x: x.var(correction=0), FLOATS),
    "any": (torch.any, EVERY),
    "all": (torch.all, EVERY),
    "count_nonzero": (torch.count_nonzero, EVERY),
}


# On a GPU one dtype of each kind is enough: the compiler treats the others alike.
ON_A_GPU = [torch.float64, torch.float32, torch.bfloat16, torch.uint8, torch.int32, torch.bool]

ONE_TILE = Tiling(block=4096, warps=4)


def cases(
    operations: dict[str, tuple[Function, list[torch.dtype]]], together: int = 10, lowerings: list[Any] = KERNELS
) -> list[Any]:
    """Formulas of one dtype, several in a program, since a program of several hardly costs more than one formula.

    On a GPU twice as many, as each program takes the compiler a second.
    """
    found = []
    for way in lowerings:
        (lowering,) = way.values
        for dtype in ON_A_GPU if lowering is Lowering.CUDA else EVERY:
            names = [name for name, (_, dtypes) in operations.items() if dtype in dtypes]
            size = 2 * together if lowering is Lowering.CUDA else together
            for start in range(0, len(names), size):
                part = names[start : start + size]
                identity = f"{lowering.value}-{str(dtype).removeprefix('torch.')}-{', '.join(part)}"
                found.append(pytest.param(lowering, part, dtype, id=identity, marks=way.marks))
    return found


def together(operations: dict[str, tuple[Function, list[torch.dtype]]], names: list[str]) -> Function:
    """All of these formulas as one function; a dict, so that an error names its formula."""
    return lambda *operands: {name: operations[name][0](*operands) for name in names}


@pytest.mark.parametrize(("lowering", "names", "dtype"), cases(UNARY))
def test_formulas_of_one_operand_equal_torch(lowering: Lowering, names: list[str], dtype: torch.dtype) -> None:
    function, values = together(UNARY, names), special_values(dtype)
    # As elements of a tensor, and as numbers per tensor, which are computed in float64.
    assert check(lowering, function, TensorColumn([values]), tiling=ONE_TILE, per_element=True) is not None
    assert check(lowering, function, TensorColumn(values.unbind()), tiling=ONE_TILE) is not None


BEYOND: list[Function] = [
    lambda x, n: x.clamp(-2, 3),
    lambda x, n: x.clamp(2, 300),
    lambda x, n: x.clamp_min(300),
    lambda x, n: x.clamp_max(-200),
    lambda x, n: x.clamp(n, 5),
    lambda x, n: x.clamp_max(n),
    lambda x, n: (x == n) | (x < n),
    lambda x, n: (x >= n) & (x != -2),
    lambda x, n: x * n + 300,
]


@each_lowering
@pytest.mark.parametrize("function", BEYOND)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
def test_integers_beside_numbers_beyond_their_range_equal_torch(
    lowering: Lowering, function: Function, dtype: torch.dtype
) -> None:
    for number in (-2, 2, 300):
        check(lowering, function, TensorColumn([special_values(dtype)]), number)


REFUSED: list[tuple[Callable[..., object], torch.dtype, torch.dtype]] = [
    (lambda x, y: x - y, torch.float32, torch.bool),
    (lambda x, y: y - x, torch.int64, torch.bool),
    (lambda x, y: x.sub_(y), torch.bfloat16, torch.bool),
    (lambda x, y: x - True, torch.float32, torch.float32),
    (lambda x, y: True - x, torch.uint8, torch.uint8),
    (lambda x, y: torch.rsub(y, x, alpha=2), torch.float32, torch.bool),
    (lambda x, y: torch.relu(y), torch.float32, torch.bool),
    (lambda x, y: torch.addcdiv(x, y, y), torch.float32, torch.int32),
]


@each_lowering
@pytest.mark.parametrize(("function", "first", "second"), REFUSED)
def test_integers_and_booleans_that_torch_refuses_are_refused(
    lowering: Lowering, function: Callable[..., object], first: torch.dtype, second: torch.dtype
) -> None:
    x, y = torch.ones(3, dtype=first), torch.ones(3, dtype=second)
    with pytest.raises(RuntimeError) as of_torch:
        function(x, y)
    x, y = x.to(lowering.device), y.to(lowering.device)
    with lowering.running(), pytest.raises(RuntimeError, match=str(of_torch.value)[:30]):
        FusedFunction(function)(TensorColumn([x]), TensorColumn([y]))


@pytest.mark.parametrize(("lowering", "names", "dtype"), cases(BINARY))
def test_formulas_of_two_operands_equal_torch(lowering: Lowering, names: list[str], dtype: torch.dtype) -> None:
    function, (a, b) = together(BINARY, names), all_pairs(dtype, dtype)
    assert (
        check(lowering, function, TensorColumn([a]), TensorColumn([b]), tiling=ONE_TILE, per_element=True) is not None
    )
    assert check(lowering, function, TensorColumn([a]), b[1].to(lowering.device), tiling=ONE_TILE) is not None


MIXED = [
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float16),
    (torch.int64, torch.float16),
    (torch.int32, torch.float64),
    (torch.uint8, torch.int8),
    (torch.bool, torch.float32),
    (torch.bool, torch.int16),
]


@pytest.mark.parametrize("dtypes", MIXED, ids=str)
@each_kernel_lowering
def test_operands_of_two_dtypes_are_promoted_as_torch_promotes_them(
    dtypes: tuple[torch.dtype, torch.dtype], lowering: Lowering
) -> None:
    def function(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return a + b, a * b, a / b, torch.maximum(a, b), a > b, a == b, torch.where(a > 0, a, b)

    a, b = map(moderate, all_pairs(*dtypes))
    # Both have elements, or one is a number per tensor, which has lower priority in promotion.
    assert check(lowering, function, TensorColumn([a]), TensorColumn([b]), tiling=ONE_TILE)
    assert check(lowering, function, TensorColumn([a, a]), TensorColumn([b[3], b[5]]), tiling=ONE_TILE)
    assert check(lowering, function, TensorColumn([a[3], a[5]]), TensorColumn([b, b]), tiling=ONE_TILE)
    assert check(lowering, function, TensorColumn([a[3], a[5]]), TensorColumn([b[1], b[2]]), tiling=ONE_TILE)


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize(("lowering", "names", "dtype"), cases(REDUCTIONS, together=6, lowerings=LOWERINGS))
def test_reductions_equal_torch(lowering: Lowering, names: list[str], dtype: torch.dtype) -> None:
    function = together(REDUCTIONS, names)
    generator = torch.Generator().manual_seed(0)
    random = torch.randn(201, dtype=torch.float64, generator=generator).abs().add(0.5)
    values = random.to(dtype) if dtype.is_floating_point else (random * 3).to(dtype)
    specials = special_values(dtype)
    tensors = [values, values[:64], values[:1], values[0], moderate(specials)]
    if dtype.is_floating_point:
        tensors += [
            torch.tensor(v, dtype=dtype) for v in ([1, INF], [INF, -INF], [1, NAN, 2], [-INF, NAN], [-0.0, 0.0])
        ]
    assert check(lowering, function, TensorColumn(tensors)) is not None
    assert (
        check(lowering, lambda x: [x * r for r in function(x).values()], TensorColumn([values, values[:65]]))
        is not None
    )


FEW_LANES = Tiling(block=16, warps=1)
"""A tiling with chunks of 128 elements."""


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize("dtype", [torch.float32, torch.int32], ids=str)
@each_kernel_lowering
def test_reductions_of_many_chunks_equal_torch(
    dtype: torch.dtype, lowering: Lowering, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "MIN_PROGRAMS", 0)  # chunks of several tiles, even for a small tensor
    monkeypatch.setattr(launch, "MANY_ROUNDS", launch.ROUNDS)
    function = together(REDUCTIONS, [name for name, (_, dtypes) in REDUCTIONS.items() if dtype in dtypes])
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(1000, generator=generator, dtype=torch.float64).add(0.5)
    values = values.to(dtype) if dtype.is_floating_point else (values * 3).to(dtype)
    tensors = [values[:n] for n in (1, 17, 128, 129, 300)]
    if dtype.is_floating_point:
        # A NaN in a later tile of the first chunk, and in the second.
        tensors += [values[:200].index_fill(0, torch.tensor([at]), NAN) for at in (40, 128)]
    assert check(lowering, function, TensorColumn(tensors), tiling=FEW_LANES) is not None
    # Unaligned tensors, all of whose tiles are masked.
    assert check(lowering, function, TensorColumn([values[1:n] for n in (2, 259)]), tiling=FEW_LANES) is not None


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=str)
@each_lowering
def test_a_reduction_of_an_empty_tensor_equals_torch(dtype: torch.dtype, lowering: Lowering) -> None:
    empty = torch.ones(0, dtype=dtype), torch.ones(0, 3, dtype=dtype)
    given = [name for name, (_, dtypes) in REDUCTIONS.items() if dtype in dtypes]
    answered = [name for name in given if gives_a_number(REDUCTIONS[name][0], empty[0])]
    # Formulas that torch refuses are tested one by one; the others are one program.
    for name in set(given) - set(answered):
        assert check(lowering, REDUCTIONS[name][0], TensorColumn(empty)) is None
    assert check(lowering, together(REDUCTIONS, answered), TensorColumn(empty)) is not None


def gives_a_number(function: Function, of: Tensor) -> bool:
    try:
        function(of)
    except (RuntimeError, IndexError):
        return False
    return True


def test_every_formula_of_the_table_is_tested() -> None:
    names = {name for n in (table._SHARED, table._FLOAT, table._INTEGER, table._LOGICAL, table._BOOL) for name in n}
    recorded = set(table._REDUCE)
    for operations, count in ((UNARY, 1), (BINARY, 2)):
        for function, dtypes in operations.values():
            for dtype in dtypes[:1]:
                fusion = FusedFunction(function)
                fusion(*[TensorColumn([special_values(dtype)])] * count)
                (traced,) = fusion._variant.traces.values()
                recorded |= {step.name for step in traced.program.instructions}
    # The formulas of in-place updates, st.stochastic_round_ and 8-bit state are tested elsewhere.
    assert names - recorded <= {"convert_element_type", "stochastic_round", *blockwise.OPS}


@each_lowering
@pytest.mark.parametrize(
    "deviation",
    [lambda x: x.std(), lambda x: x.std(correction=0), lambda x: x.norm()],
    ids=["std", "about its mean", "norm"],
)
def test_a_root_fits_float16_where_its_argument_overflows(
    deviation: Callable[[Tensor], Tensor], lowering: Lowering
) -> None:
    halves = torch.tensor([1e4, -0.3, 2.2, 0.6], dtype=torch.float16, device=lowering.device)
    check(lowering, deviation, TensorColumn([halves, halves * 2]))
