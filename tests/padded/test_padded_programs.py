"""Random programs over the rule tables: random dims, buckets, dtypes and poison, against the unpadded program."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as some
from torch import Tensor

import subtensors as st

Step = Callable[[Any, Tensor], Any]

# Of gradients in float64, where two ways that add up in other orders are compared: a program of five ops may divide by
# small spreads again and again, and what it rounds grows with them. A leak is poison, which no bound lets by. In less
# exact dtypes a test below measures errors against float64 instead.
AGREEING: dict[str, Any] = {"rtol": 1e-6, "atol": 1e-8}

# Each keeps (rows, positions, features): a program is any sequence of them. `w` is a weight of one feature row.
STEPS: dict[str, Step] = {
    "tanh": lambda x, w: torch.tanh(x),
    "weight": lambda x, w: x * w + w,
    "log of a square": lambda x, w: torch.log(x * x + 1),
    "linear": lambda x, w: torch.nn.functional.linear(x, w[:, None] * w[None] / 4),
    "centre": lambda x, w: x - x.mean(1, keepdim=True),
    "standardise": lambda x, w: x / (x.std(1, correction=0, keepdim=True) + 1),
    "softmax": lambda x, w: torch.softmax(x, 1) * 4,
    "log softmax": lambda x, w: torch.log_softmax(x, -2),
    "layer norm": lambda x, w: torch.nn.functional.layer_norm(x, (x.shape[-1],), w),
    "scan": lambda x, w: x.cumsum(1) / 8,
    "running maximum": lambda x, w: x.cummax(1).values,
    "sort": lambda x, w: x.sort(1).values,
    "flip": lambda x, w: x.flip(1),
    "roll": lambda x, w: x.roll(1, 1),
    "attention": lambda x, w: torch.nn.functional.scaled_dot_product_attention(x, x * w, x),
    "causal attention": lambda x, w: torch.nn.functional.scaled_dot_product_attention(x, x, x * w, is_causal=True),
    "scores": lambda x, w: torch.softmax(x @ x.transpose(1, 2), -1) @ x,
    "maximum": lambda x, w: torch.maximum(x, x.amax(1, keepdim=True) - 1),
    "clamped": lambda x, w: x.clamp(-1, 1) + w,
    "in place": lambda x, w: (x * 1).mul_(w).add_(x),
    "grouped": lambda x, w: (x.flatten(0, 1) * w).view(x.shape),
    "shifted": lambda x, w: torch.cat([x[:, :1], x[:, 1:] - x[:, :-1]], 1),
    "less the first": lambda x, w: x - x[:, :1],
    "the last assigned": lambda x, w: assigned(x, w),
    "through a view": lambda x, w: through_a_view(x, w),
    "smoothed": lambda x, w: torch.nn.functional.avg_pool1d(
        torch.nn.functional.pad(x.transpose(1, 2), (1, 1), "reflect"), 3, 1
    ).transpose(1, 2),
    "resized": lambda x, w: torch.nn.functional.interpolate(x.transpose(1, 2), scale_factor=2, mode="linear")[
        ..., 1::2
    ].transpose(1, 2),
    "einsum": lambda x, w: torch.einsum("bnf,bmf,bmg->bng", x, x.tanh(), x.tanh()) / 8,
    "convolution": lambda x, w: torch.nn.functional.conv1d(
        x.transpose(1, 2), (w[:, None] * w[None] / 4)[..., None].expand(-1, -1, 3), padding=1
    ).transpose(1, 2),
}


def assigned(x: Any, w: Tensor) -> Any:
    y = x * 1
    y[:, -1] = w
    return y


def through_a_view(x: Any, w: Tensor) -> Any:
    y = x * 1
    view = y[:, 1:]
    view.mul_(w).add_(1)
    y[..., :2] *= 2
    return torch.cat([y[:, :1], view], 1)


ENDS: dict[str, Callable[[Any], Any]] = {
    "as it is": lambda x: x,
    "sum of positions": lambda x: x.sum(1),
    "variance of positions": lambda x: x.var(1),
    "last": lambda x: x[:, -1],
    "norm": lambda x: torch.linalg.vector_norm(x, dim=(1, 2)),
    "logsumexp": lambda x: x.logsumexp(1),
    "beginning": lambda x: x[:, :2],
}


def run(names: list[str], end: str, x: Any, w: Tensor) -> Any:
    for name in names:
        x = STEPS[name](x, w)
    return ENDS[end](x)


def parts(out: Any) -> list[Tensor]:
    if isinstance(out, st.PaddedTensor):
        out = out.unpad()
    return list(out)


SIZES = some.integers(2, 5)

programs = {
    "names": some.lists(some.sampled_from(sorted(STEPS)), min_size=1, max_size=5),
    "end": some.sampled_from(sorted(ENDS)),
    "lengths": some.lists(some.integers(2, 9), min_size=1, max_size=3),
    "step": some.integers(1, 6),
    "poison": some.sampled_from([float("nan"), float("inf"), -float("inf"), 1e30, 0.0]),
    "seed": some.integers(0, 5),
}


# Equal values have no spread, and a standard deviation of 0 has the gradient 0.
@example(names=["running maximum", "standardise"], end="as it is", lengths=[2], step=1, poison=0.0, seed=0)
# The rows of a batch of one are one position, which a reshape may put anywhere.
@example(names=["einsum"], end="as it is", lengths=[2], step=1, poison=0.0, seed=0)
@given(**programs)
def test_a_random_program_on_a_ragged_batch_is_the_program_on_each_row(
    names: list[str], end: str, lengths: list[int], step: int, poison: float, seed: int
) -> None:
    torch.manual_seed(seed)
    seq = st.Dim("seq", max=12, buckets=st.Linear(step))
    rows = [torch.randn(n, 3, dtype=torch.float64, requires_grad=True) for n in lengths]
    w = torch.randn(3, dtype=torch.float64, requires_grad=True)
    expected = [run(names, end, row[None], w)[0] for row in rows]
    actual = parts(run(names, end, st.pad(rows, {0: seq}, value=poison), w))
    weights = [torch.randn_like(e) for e in expected]
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e)
    for a, e in zip(
        total_gradients(actual, weights, [*rows, w]), total_gradients(expected, weights, [*rows, w]), strict=True
    ):
        torch.testing.assert_close(a, e, **AGREEING)


def total_gradients(outs: list[Tensor], weights: list[Tensor], wanted: list[Tensor]) -> list[Tensor]:
    total = torch.stack([(o * v).sum() for o, v in zip(outs, weights, strict=True)]).sum()
    found = torch.autograd.grad(total, wanted, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(wanted, found, strict=True)]


@given(
    dims=some.sets(some.sampled_from([0, 1, 2]), min_size=1), shape=some.tuples(*[some.integers(2, 5)] * 2), **programs
)
def test_a_random_program_padded_on_any_dims_is_the_unpadded_one(
    dims: set[int], shape: tuple[int, int], names: list[str], end: str, lengths: list[int], step: int, poison: float,
    seed: int,
) -> None:  # fmt: skip
    torch.manual_seed(seed)
    t = torch.randn(*shape, 3, dtype=torch.float64, requires_grad=True)
    w = torch.randn(3, dtype=torch.float64, requires_grad=True)
    named = {d: st.Dim(f"d{d}", max=12, buckets=st.Linear(step)) for d in dims}
    padded_w = st.pad(w, {0: named[2]}, value=poison) if 2 in dims else w
    expected = run(names, end, t, w)
    actual = run(names, end, st.pad(t, named, value=poison), padded_w)
    actual = actual.unpad() if isinstance(actual, st.PaddedTensor) else actual
    torch.testing.assert_close(actual, expected)
    weights = [torch.randn_like(expected)]
    wanted = total_gradients([expected], weights, [t, w])
    for a, e in zip(total_gradients([actual], weights, [t, w]), wanted, strict=True):
        torch.testing.assert_close(a, e, **AGREEING)


@given(dtype=some.sampled_from([torch.float32, torch.bfloat16, torch.float16]), n=some.integers(2, 12), **programs)
def test_a_random_program_errs_no_more_than_the_unpadded_one(
    names: list[str], end: str, lengths: list[int], step: int, poison: float, seed: int, dtype: torch.dtype, n: int
) -> None:
    torch.manual_seed(seed)
    seq = st.Dim("seq", max=12, buckets=st.Linear(step))
    poison = 1e4 if poison == 1e30 else poison  # which float16 can hold
    t, w = torch.randn(2, n, 3, dtype=dtype), torch.randn(3, dtype=dtype)
    names = [name for name in names if name not in ("sort", "running maximum")]
    plain = run(names, end, t, w)
    truth = run(names, end, t.double(), w.double())
    actual = torch.stack(parts(run(names, end, st.pad(t, {1: seq}, value=poison), w)))
    assert actual.dtype == plain.dtype
    error, allowed = ((o.double() - truth).abs().max() for o in (actual, plain))
    # Each op may round its last bit the other way, and one op feeds the next.
    assert error <= 1.5 * allowed + (len(names) + 1) * torch.finfo(dtype).eps * truth.abs().max().clamp(min=1)


@given(n=some.integers(2, 12), **programs)
def test_a_random_program_under_autocast_errs_no_more_than_the_unpadded_one(
    names: list[str], end: str, lengths: list[int], step: int, poison: float, seed: int, n: int
) -> None:
    torch.manual_seed(seed)
    seq = st.Dim("seq", max=12, buckets=st.Linear(step))
    t, w = torch.randn(2, n, 3), torch.randn(3)
    names = [name for name in names if name not in ("sort", "running maximum")]
    truth = run(names, end, t.double(), w.double())
    with torch.autocast("cpu", torch.bfloat16):
        plain = run(names, end, t, w)
        actual = torch.stack(parts(run(names, end, st.pad(t, {1: seq}, value=poison), w)))
    assert actual.dtype == plain.dtype
    error, allowed = ((o.double() - truth).abs().max() for o in (actual, plain))
    # Each op may round its last bit the other way, and one op feeds the next.
    assert error <= 1.5 * allowed + (len(names) + 1) * torch.finfo(torch.bfloat16).eps * truth.abs().max().clamp(min=1)


@pytest.mark.parametrize("names", [["linear", "softmax", "centre"], ["attention", "layer norm", "shifted"]])
def test_a_program_compiles_once_for_every_length(names: list[str]) -> None:
    seq = st.Dim("seq", max=12, buckets=[12])
    compiled = torch.compile(lambda x, w: run(names, "sum of positions", x, w), fullgraph=True, backend="aot_eager")
    w = torch.randn(3, dtype=torch.float64)
    for i, n in enumerate((4, 12, 2)):
        t = torch.randn(2, n, 3, dtype=torch.float64)
        with torch._dynamo.config.patch(error_on_recompile=i > 0), warnings.catch_warnings():
            torch.testing.assert_close(
                compiled(st.pad(t, {1: seq}, value=float("nan")), w), run(names, "sum of positions", t, w)
            )
