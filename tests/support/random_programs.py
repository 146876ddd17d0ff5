"""Random straight-line programs on tensors, as hypothesis strategies: their source, and what tracing makes of them."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import note
from hypothesis import strategies as some
from torch import Tensor

from subtensors.dispatch.fused.fused_function import FusedFunction
from subtensors.dispatch.fused.tensor_columns import TensorColumn
from subtensors.dispatch.fused.trace import Trace

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
# An empty tensor has no maximum.
EXTREME = ["{x}.amax()", "{x}.amin()", "{x}.max()", "{x}.norm(float('inf'))"]
# Ops that depend on the direction of a rounding take only values that were never rounded.
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
class SourceProgram:
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
    """Draws statements and runs each on small tensors, to leave out what torch refuses."""

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
def programs(
    draw: some.DrawFn, dtypes: dict[str, torch.dtype], scalars: set[str], with_extremes: bool
) -> SourceProgram:
    """A program on parameters of these dtypes, some of which hold one number per tensor."""
    values = {n: torch.ones(() if n in scalars else 2, dtype=d) for n, d in dtypes.items()}
    writer = _Writer(draw, values, {"f0": 0.5, "f1": 0.9, "n0": 3}, exact=set(dtypes))
    for _ in range(draw(some.integers(1, 9))):
        writer.statement(list(dtypes), with_extremes)
    results = draw(some.lists(some.sampled_from([*writer.values]), max_size=3))
    if results:
        writer.lines.append(f"return {', '.join(results)}")
    return SourceProgram(writer.lines or ["pass"], list(dtypes))


def traced(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Trace:
    """The trace of the function, from a call of it."""
    fusion = FusedFunction(function)
    fusion(*args, **kwargs)
    (found,) = fusion._variant.traces.values()
    return found


@some.composite
def traced_programs(draw: some.DrawFn) -> tuple[Trace, list[Tensor], list[float]]:
    """A program over tensors of several dtypes, some of them 0-d, those tensors, and its dynamic scalars."""
    dtypes = draw(some.lists(some.sampled_from([torch.float32, torch.bfloat16, torch.int64]), min_size=1, max_size=4))
    scalars = draw(some.integers(0, 7))
    names = {f"x{i}": d for i, d in enumerate([torch.float32, *dtypes])}
    numbers = {n for i, n in enumerate(names) if i and scalars >> (i - 1) & 1}
    written = draw(programs(names, numbers, with_extremes=True))
    tensors = [torch.arange(1.0, 7) if n not in numbers else torch.tensor(2.0) for n in names]
    tensors = [t.to(d) for t, d in zip(tensors, names.values(), strict=True)]
    trace = traced(written.function(), *(TensorColumn([t.clone()]) for t in tensors), f0=0.5, f1=0.9, n0=3)
    return trace, tensors, [0.5, 0.9, 3]
