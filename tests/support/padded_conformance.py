"""The oracle of padding: a call on padded tensors with poisoned padding against the same call on the logical ones.

`outcomes(op)` runs samples of an OpInfo under several plans of which dims are padded, and says how each went.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import optree
import torch
from torch.testing._internal.opinfo.core import OpInfo, SampleInput

import subtensors as st
from subtensors.dispatch.padded.interpreter import observed
from subtensors.padded import torch_function as padded_calls

Plan = dict[tuple[int, int], int]  # (tensor, dim) -> how many positions of padding

POISON = (float("nan"), float("inf"), 1e30)


WIDER = {torch.float32: torch.float64, torch.complex64: torch.complex128}


@dataclass(frozen=True)
class Outcome:
    """How one sample went under one plan.

    Args:
        how: "rule", "fallback", "refused" or "wrong"; of the forward.
        backward: the same of the gradients; "" where there are none.
        why: the message of a refusal or a failure.
        by: of a forward by rules, "class" or "map" where rules of those decided every op in it, else "own".
        turn: the place of the sample among those of the op.
    """

    how: str
    backward: str
    why: str
    plan: str
    by: str = ""
    turn: int = 0


def samples(op: OpInfo, count: int) -> Iterator[SampleInput]:
    """The first samples of an op that have a tensor, in float32 where it can."""
    dtypes = op.supported_dtypes("cpu")
    if not dtypes:
        return iter(())
    dtype = torch.float32 if torch.float32 in dtypes else next(iter(sorted(dtypes, key=str)))
    grad = op.supports_autograd and dtype.is_floating_point
    return islice(op.sample_inputs("cpu", dtype, requires_grad=grad), count)


def in_double(sample: SampleInput) -> SampleInput:
    """A sample with its numbers in float64: what it gives is the truth that errors are measured against."""

    def double(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or x.dtype not in (torch.float32, torch.complex64):
            return x
        return x.detach().to(WIDER[x.dtype]).requires_grad_(x.requires_grad)

    moved = optree.tree_map(double, (sample.input, sample.args, sample.kwargs), none_is_leaf=True)
    return SampleInput(moved[0], args=moved[1], kwargs=moved[2])


def plans(tensors: list[torch.Tensor]) -> list[Plan]:
    """Which dims to pad: one of one tensor, or the dims of several that may belong together."""
    found: list[Plan] = []
    extra = 3
    for i, t in enumerate(tensors):
        for d in range(t.dim()):
            if t.shape[d] > 1:
                found.append({(i, d): extra})
                size = t.shape[d]
                back = d - t.dim()
                found.append({(j, u.dim() + back): extra for j, u in enumerate(tensors) if fits(u, back, size)})
                found.append({(j, d): extra for j, u in enumerate(tensors) if u.dim() > d and u.shape[d] == size})
                found.append(
                    {(j, e): extra for j, u in enumerate(tensors) for e in range(u.dim()) if u.shape[e] == size}
                )
        if i > 2:
            break
    distinct: list[Plan] = []
    for plan in found:
        if plan and plan not in distinct:
            distinct.append(plan)
    return distinct


def fits(t: torch.Tensor, back: int, size: int) -> bool:
    return t.dim() >= -back and t.shape[back] == size


def poison_for(t: torch.Tensor, turn: int) -> Any:
    if t.dtype == torch.bool:
        return bool(turn % 2)
    if t.is_floating_point() or t.is_complex():
        return POISON[turn % len(POISON)]
    return (torch.iinfo(t.dtype).max, torch.iinfo(t.dtype).min, 7)[turn % 3]


def run(op: Callable[..., Any], sample: SampleInput, plan: Plan | None, turn: int) -> tuple[Any, list[Any], list[Any]]:
    """Results, gradients and how many functions ran on logical data."""
    leaves, spec = optree.tree_flatten((sample.input, sample.args, sample.kwargs), none_is_leaf=True)
    sources, call = [], []
    index = 0
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            call.append(leaf)
            continue
        source = leaf.detach().clone().requires_grad_(leaf.requires_grad)
        sources.append(source)
        dims = {d: extra for (i, d), extra in (plan or {}).items() if i == index}
        index += 1
        if dims:
            named = {
                d: st.Dim(f"n{source.shape[d]}", max=source.shape[d] + e, buckets=[source.shape[d] + e])
                for d, e in dims.items()
            }
            call.append(st.pad(source, named, value=poison_for(source, turn)))
        else:
            # In place, an op writes to a copy, as it does to the padded one.
            call.append(source.clone() if plan is None or not source.requires_grad else source * 1)
    first, args, kwargs = optree.tree_unflatten(spec, call)
    torch.manual_seed(0)
    out = op(first, *args, **kwargs)
    outs = [x for x in optree.tree_leaves(out) if x is not None]
    logical = []
    for x in outs:
        logical.append(x.unpad() if isinstance(x, st.PaddedTensor) else x)
    return logical, sources, call


def gradients(logical: list[Any], sources: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """The gradients of a random linear function of the results."""
    generator = torch.Generator().manual_seed(0)
    total: Any = 0
    for x in logical:
        if isinstance(x, torch.Tensor) and x.requires_grad:
            weight = torch.rand(x.shape, generator=generator, dtype=torch.float64)
            total = total + ((x.real + x.imag) * weight if x.is_complex() else x * weight).sum()
    if not isinstance(total, torch.Tensor):
        return []
    wanted = [s for s in sources if s.requires_grad]
    return list(torch.autograd.grad(total, wanted, allow_unused=True))


def apart(actual: Any, plain: Any, truth: Any, largest: float, values: bool = True) -> str:
    """Why a result is not as good as the unpadded run's; "" where it is.

    Its error against float64 may be 1.5 times the unpadded run's, and a rounding of the largest number at hand: ops on
    a bucket and on the true size add up in other orders.
    """
    if isinstance(actual, torch.Tensor) != isinstance(plain, torch.Tensor):
        return f"{type(actual).__name__} instead of {type(plain).__name__}"
    if not isinstance(actual, torch.Tensor):
        return "" if actual == plain or (actual != actual and plain != plain) else f"{actual} instead of {plain}"
    if isinstance(actual, st.PaddedTensor):
        return "still padded"
    if actual.shape != plain.shape or actual.dtype != plain.dtype:
        return f"{actual.dtype} {list(actual.shape)} instead of {plain.dtype} {list(plain.shape)}"
    if not values or not actual.numel():
        return ""
    roundings = plain.dtype if plain.is_floating_point() or plain.is_complex() else None
    if roundings is not None:
        actual, plain = (x.detach().to(torch.complex128) for x in (actual, plain))
    finite = torch.zeros_like(plain, dtype=torch.bool)
    if roundings is not None and isinstance(truth, torch.Tensor) and truth.shape == plain.shape:
        truth = truth.detach().to(torch.complex128)
        finite = plain.isfinite() & truth.isfinite()
    given, wanted = actual[~finite], plain[~finite]
    if not ((given == wanted) | (given.isnan() & wanted.isnan())).all():
        return f"{given[:5].tolist()} instead of {wanted[:5].tolist()}"
    if not finite.any():
        return ""
    assert roundings is not None
    error, allowed = (float((x[finite] - truth[finite]).abs().max()) for x in (actual, plain))
    rounding = torch.finfo(roundings).eps * largest
    return "" if error <= 1.5 * allowed + rounding else f"an error of {error:.2e} where torch's is {allowed:.2e}"


def largest_of(tensors: list[torch.Tensor]) -> float:
    """The largest finite number among tensors."""
    numbers = [t for t in tensors if t.layout == torch.strided and (t.is_floating_point() or t.is_complex())]
    found = [t.detach().to(torch.complex128).abs() for t in numbers]
    return max((float(t[t.isfinite()].max()) for t in found if t.isfinite().any()), default=0.0)


def dropouts(op: OpInfo, sample: SampleInput) -> list[Any]:
    """The probabilities with which the op drops values: its draws are those of the bucket."""
    if op.name == "nn.functional.scaled_dot_product_attention":
        return [sample.kwargs.get("dropout_p")]
    return [x for x in sample.args if isinstance(x, float)] if op.name.endswith("multi_head_attention_forward") else []


def true_run(
    func: Callable[..., Any], sample: SampleInput, turn: int, outs: int, grads: int
) -> tuple[list[Any], list[Any]]:
    """Results and gradients in float64; None in their place where there are no such."""
    try:
        truth, sources, _ = run(func, in_double(sample), None, turn)
        true_grads = gradients(truth, sources)
    except Exception:  # an op without a kernel for float64 has no truth there
        truth, true_grads = [], []
    return (
        truth if len(truth) == outs else [None] * outs,
        true_grads if len(true_grads) == grads else [None] * grads,
    )


def outcome(
    op: OpInfo, func: Callable[..., Any], sample: SampleInput, plan: Plan, turn: int, values: bool
) -> Outcome | None:
    """How one sample goes under one plan; None where the op itself refuses the sample."""
    try:
        expected, sources, _ = run(func, sample, None, turn)
        expected_grads = gradients(expected, sources)
    except Exception:
        return None
    truth, true_grads = true_run(func, sample, turn, len(expected), len(expected_grads))
    largest = largest_of([t for t in (*sources, *truth, *true_grads) if isinstance(t, torch.Tensor)])
    shown = str({f"{i}.{d}": e for (i, d), e in plan.items()})
    drawn = any(isinstance(x, float) and x > 0 for x in dropouts(op, sample))
    values = values and not drawn
    before = sum(padded_calls.fallbacks.values())
    try:
        with observed() as rules:
            actual, sources, _ = run(func, sample, plan, turn)
    except Exception as error:
        return Outcome("refused", "", f"{type(error).__name__}: {str(error)[:300]}", shown)
    how = "fallback" if sum(padded_calls.fallbacks.values()) > before else "rule"
    by = decided_by(rules) if how == "rule" else ""
    if len(actual) != len(expected):
        return Outcome("wrong", "", f"{len(actual)} results instead of {len(expected)}", shown)
    for a, b, t in zip(actual, expected, truth, strict=True):
        why = apart(a, b, t, largest, values)
        if why:
            return Outcome("wrong", "", why, shown)
    if not expected_grads or not values:
        return Outcome(how, "", "", shown, by)
    try:
        grads = gradients(actual, sources)
    except Exception as error:
        return Outcome(how, "refused", f"{type(error).__name__}: {str(error)[:300]}", shown, by)
    if len(grads) != len(expected_grads):
        return Outcome(how, "wrong", "no gradient", shown)
    for g, e, t in zip(grads, expected_grads, true_grads, strict=True):
        g = torch.zeros_like(e) if g is None and e is not None else g
        e = torch.zeros_like(g) if e is None and g is not None else e
        why = apart(g, e, t, largest) if e is not None else ""
        if why:
            return Outcome(how, "wrong", "gradient: " + why, shown)
    return Outcome(how, how, "", shown, by)


def decided_by(rules: list[str]) -> str:
    """The keys that found some rules, as `table.explain` tells them: classes of ops, dimension maps, or ops."""
    keys = {rule.rsplit("registered for ", 1)[1] for rule in rules}
    if any(not key.startswith("every ") or key.startswith("every overload") for key in keys):
        return "own"
    return "map" if any("dimension map" in key or "across" in key for key in keys) else "class" if keys else ""


def outcomes(op: OpInfo, count: int = 4, values: bool = True, func: Callable[..., Any] | None = None) -> list[Outcome]:
    """Every outcome of an op's first samples."""
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            taken = list(samples(op, count))
        except Exception:
            return []
        for turn, sample in enumerate(taken):
            leaves = optree.tree_leaves((sample.input, sample.args, sample.kwargs))
            tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
            if any(t.layout != torch.strided for t in tensors):
                continue
            for plan in plans(tensors):
                got = outcome(op, func or op.op, sample, plan, turn, values)
                if got is not None:
                    found.append(replace(got, turn=turn))
    return found
