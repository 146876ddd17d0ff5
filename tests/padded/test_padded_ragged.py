"""Rules on a ragged batch, class by class: each row is as if it were alone, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import subtensors as st
from subtensors.padded import torch_function as padded_calls

SEQ = st.Dim("seq", max=16, buckets=[8, 16])
W = torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 3)

Program = Callable[[Any], Any]

POINTWISE: dict[str, Program] = {
    "where": lambda x: torch.where(x > 0, x, -x),
    "clamp": lambda x: x.clamp(-1, 1),
    "lerp": lambda x: torch.lerp(x, x * 2, 0.3),
    "addcmul": lambda x: torch.addcmul(x, x, x),
    "a comparison with a mean": lambda x: x > x.mean(1, keepdim=True),
    "positions": lambda x: torch.arange(x.shape[1])[None, :, None] * x,
    "pairs": lambda x: x[:, :, None] + x[:, None],
    "in place": lambda x: (x * 1).mul_(x).masked_fill_(x > 0, 1.0),
    "ones like it": lambda x: torch.ones_like(x).sum(1) * x.sum(1),
}
REDUCTIONS: dict[str, Program] = {
    "sum": lambda x: x.sum(1),
    "mean over two dims": lambda x: x.mean((1, 2)),
    "mean, dim kept": lambda x: x.mean(1, keepdim=True),
    "variance": lambda x: x.var(1),
    "standard deviation": lambda x: x.std((1, 2), correction=0),
    "variance and mean": lambda x: torch.var_mean(x, 1)[1],
    "norm of order 1": lambda x: torch.linalg.vector_norm(x, 1, dim=1),
    "norm of order 3": lambda x: torch.linalg.vector_norm(x, 3, dim=(1, 2)),
    "greatest norm": lambda x: torch.linalg.vector_norm(x, math.inf, dim=1),
    "least norm": lambda x: torch.linalg.vector_norm(x, -math.inf, dim=1),
    "logsumexp": lambda x: x.logsumexp((1, 2)),
    "amax": lambda x: x.amax(1),
    "max": lambda x: x.max(1).values,
    "where max is": lambda x: x.max(1).indices,
    "argmin": lambda x: x.argmin(1),
    # Which has a gradient in newer versions of torch only.
    "aminmax": lambda x: torch.aminmax(x.detach(), dim=1)[0],
    "prod": lambda x: x.prod(1),
    "any": lambda x: (x > 1).any(1),
    "count_nonzero": lambda x: torch.count_nonzero(x > 0, dim=1),
    "nanmean": lambda x: x.nanmean(1),
    "mean of pairs": lambda x: (x[:, :, None] * x[:, None]).mean((1, 2)),
    "sum over count": lambda x: x.sum(1) / (x.count(1)[:, None] if isinstance(x, st.PaddedTensor) else x.shape[1]),
}
ALONG: dict[str, Program] = {
    "softmax": lambda x: x.softmax(1),
    "log_softmax": lambda x: F.log_softmax(x, 1),
    "softmin": lambda x: F.softmin(x, 1),
    "cumsum": lambda x: x.cumsum(1),
    "cumprod": lambda x: x.cumprod(1),
    "logcumsumexp": lambda x: x.logcumsumexp(1),
    "cummax": lambda x: x.cummax(1).values,
    "where cummin is": lambda x: x.cummin(1).indices,
    "diff": lambda x: x.diff(dim=1),
    "trapezoid": lambda x: torch.trapezoid(x, dim=1),
    "cumulative trapezoid": lambda x: torch.cumulative_trapezoid(x, dim=1),
    "sort": lambda x: x.sort(1, descending=True).values,
    "argsort": lambda x: x.argsort(1),
    "topk": lambda x: x.topk(2, 1).values,
    "kthvalue": lambda x: x.kthvalue(2, 1).values,
    "flip": lambda x: x.flip(1),
    "roll": lambda x: x.roll(-2, 1),
    "normalize": lambda x: F.normalize(x, dim=1),
}
CONTRACTIONS: dict[str, Program] = {
    "over the padded dim": lambda x: x.mT @ x,
    "scores": lambda x: x @ x.mT,
    "einsum": lambda x: torch.einsum("bnf,bng->bfg", x, x),
    "linear": lambda x: F.linear(x, W, W[:, 0]),
    "baddbmm": lambda x: torch.baddbmm(torch.ones(1, 3, 3, dtype=x.dtype), x.mT, x),
    "tensordot": lambda x: torch.tensordot(x, W, dims=([2], [1])),
    "bilinear": lambda x: F.bilinear(x, x, torch.ones(2, 3, 3, dtype=x.dtype)),
    "cdist": lambda x: torch.cdist(x, x + 1),
    "cosine": lambda x: F.cosine_similarity(x, x * 2 + 1, dim=1),
    "determinant of a product": lambda x: torch.linalg.det(x.mT @ x),
    "attention of heads": lambda x: F.scaled_dot_product_attention(*[x.unsqueeze(1)] * 3),
    "causal attention": lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
}
NORMS: dict[str, Program] = {
    "layer": lambda x: F.layer_norm(x, (3,)),
    "rms": lambda x: F.rms_norm(x, (3,), W[0]),
    "group": lambda x: F.group_norm(x.mT, 1),
    "instance": lambda x: F.instance_norm(x.mT),
}
WINDOWS: dict[str, Program] = {
    "convolution": lambda x: F.conv1d(x.mT, W[:, :, None].expand(4, 3, 3), padding=1),
    "convolution with stride": lambda x: F.conv1d(x.mT, W[:, :, None].expand(4, 3, 2), stride=2),
    "transposed convolution": lambda x: F.conv_transpose1d(x.mT, W.T[:, :, None].expand(3, 4, 3), stride=2),
    "max pool": lambda x: F.max_pool1d(x.mT, 2),
    "max pool, ceil": lambda x: F.max_pool1d(x.mT, 2, ceil_mode=True),
    "where max pool is": lambda x: F.max_pool2d(x[:, None], (2, 1), return_indices=True)[1],
    "average pool": lambda x: F.avg_pool1d(x.mT, 2),
    "power mean pool": lambda x: F.lp_pool1d(x.mT.abs(), 2, 2),
    "pool down to one": lambda x: F.adaptive_max_pool1d(x.mT, 1),
    "unfold": lambda x: x.unfold(1, 2, 2),
}
MOVES: dict[str, Program] = {
    "cat": lambda x: torch.cat([x, x * 2], 1),
    "cat after plain": lambda x: torch.cat([torch.zeros(x.shape[0], 1, 3, dtype=x.dtype), x], 1),
    "stack": lambda x: torch.stack([x, x * 2], 1),
    "repeat": lambda x: x.repeat(1, 2, 1),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 1),
    "repeat_interleave rows": lambda x: x.repeat_interleave(2, 0).view(x.shape[0], 2, *x.shape[1:]),
    "repeat_interleave flattened": lambda x: x.reshape(-1, 3).repeat_interleave(2, 0).view(*x.shape[:2], 2, 3).sum(2),
    "pad": lambda x: F.pad(x, (0, 0, 1, 2), value=3.0),
    "cut by a pad": lambda x: F.pad(x, (0, 0, 0, -1)),
    "tril": lambda x: x.tril(),
    "diagonal": lambda x: x.diagonal(0, 1, 2),
    "slice": lambda x: x[:, 1:],
    "slice to the last": lambda x: x[:, :-1],
    "slice from the end": lambda x: x[:, -2:],
    "steps": lambda x: x[:, ::2],
    "the last": lambda x: x[:, -1],
    "less the first": lambda x: x - x[:, :1],
    "listed positions": lambda x: x[:, [0, -1]],
    "fill at listed positions": lambda x: x.index_fill(1, torch.tensor([-1, 0]), 2.0),
    "narrow from the end": lambda x: x.narrow(1, -2, 2),
    "index_select": lambda x: x.index_select(1, torch.tensor([0, 1])),
    "gather": lambda x: x.gather(1, x.argsort(1)),
    "take_along_dim": lambda x: x.take_along_dim(x.argsort(1), 1),
    "scatter_add": lambda x: torch.zeros(x.shape[0], 4, 3, dtype=x.dtype).scatter_add(
        1, x.abs().long().clamp(max=3), x
    ),
    "flatten": lambda x: x.flatten(1),
    "unflatten": lambda x: x.unflatten(2, (3, 1)),
    "embedding": lambda x: F.embedding((x.abs() * 3).long().clamp(max=3), W),
    "one_hot": lambda x: F.one_hot((x.abs() * 3).long().clamp(max=9), 10),
    "isin": lambda x: torch.isin(x.round(), torch.tensor([0.0, 1.0], dtype=x.dtype)),
}
CLASSES = {
    "pointwise": POINTWISE,
    "reduction": REDUCTIONS,
    "along": ALONG,
    "contraction": CONTRACTIONS,
    "norm": NORMS,
    "window": WINDOWS,
    "move": MOVES,
}
PROGRAMS = {f"{kind}: {name}": program for kind, programs in CLASSES.items() for name, program in programs.items()}


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_row_of_a_ragged_batch_is_as_alone_by_rule(name: str) -> None:
    program = PROGRAMS[name]
    for poison in (math.nan, math.inf, 1e30):
        rows = [torch.randn(n, 3, dtype=torch.float64, requires_grad=True) for n in (5, 7, 3)]
        expected = [program(row[None])[0] for row in rows]
        padded_calls.fallbacks.clear()
        out = program(st.pad(rows, {0: SEQ}, value=poison))
        actual = list(out.unpad() if isinstance(out, st.PaddedTensor) else out)
        assert not padded_calls.fallbacks
        for a, e in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, e)
        if expected[0].requires_grad:
            cotangents = [torch.randn_like(e) for e in expected]
            wanted = torch.autograd.grad(expected, rows, cotangents)
            torch.testing.assert_close(torch.autograd.grad(actual, rows, cotangents), wanted)


def test_narrow_takes_a_start_that_is_made_of_a_size() -> None:
    rows = [torch.arange(n) for n in (3, 5, 2)]
    x = st.pad(rows, {0: SEQ})
    narrowed = x.narrow(1, x.shape[1] - 2, 2).unpad()
    assert [row.tolist() for row in narrowed] == [row.narrow(0, len(row) - 2, 2).tolist() for row in rows]
    with pytest.raises(st.RuleError, match=r"a size of .* - 3 is below 0"):
        x.narrow(1, x.shape[1] - 3, 1)  # in the row of 2 it would count from the end
    y = st.pad(torch.arange(10).view(2, 5), {1: SEQ})
    for back, length in ((2, 2), (5, 3), (7, 1)):  # beyond the size it counts from the end, as in torch
        out = y.narrow(1, y.shape[1] - back, length)
        out = out.unpad() if isinstance(out, st.PaddedTensor) else out
        assert out.tolist() == torch.arange(10).view(2, 5).narrow(1, 5 - back, length).tolist()


@pytest.mark.parametrize("order", [(5, 7, 3, 2, 1), (1, 2, 6)])
def test_a_graph_narrows_from_a_size_only_where_that_does_not_count_from_the_end(order: tuple[int, ...]) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return x.narrow(1, x.shape[1] - 2, 1).sum(1)

    run = st.bucketed(program, {"x": {1: SEQ}}, check=False)
    for n in order:
        x = torch.rand(2, n)
        assert torch.equal(run(x), program(x))


def check_compiled(name: str) -> None:
    torch.compiler.reset()
    program = PROGRAMS[name]
    compiled = torch.compile(program, fullgraph=True, backend="aot_eager")
    for i, lengths in enumerate(((5, 7, 3), (8, 2, 6))):
        rows = [torch.randn(n, 3, dtype=torch.float64, requires_grad=True) for n in lengths]
        expected = [program(row[None])[0] for row in rows]
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            out = compiled(st.pad(rows, {0: SEQ}, value=math.nan))
        actual = list(out.unpad() if isinstance(out, st.PaddedTensor) else out)
        for a, e in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, e)
        if expected[0].requires_grad:
            cotangents = [torch.randn_like(e) for e in expected]
            given, wanted = (
                torch.autograd.grad(
                    torch.stack([(o * c).sum() for o, c in zip(outs, cotangents, strict=True)]).sum(), rows
                )
                for outs in (actual, expected)
            )
            torch.testing.assert_close(given, wanted)


@pytest.mark.parametrize("name", list(PROGRAMS)[::12])
def test_a_rule_compiles_once_for_all_lengths_of_a_ragged_batch(name: str) -> None:
    check_compiled(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_rule_compiles_once_for_all_lengths_of_a_ragged_batch(name: str) -> None:
    check_compiled(name)


def test_a_flattened_batch_of_one_row_loses_a_dim_of_size_one() -> None:
    row = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4)
    x = st.pad([row], {0: SEQ}, value=math.nan).flatten(0, 1)
    torch.testing.assert_close(x[:, :1].squeeze(-1).cumsum(0).sum(), row[:, 0].cumsum(0).sum())
    torch.testing.assert_close(x.sum(-1, keepdim=True).squeeze().exp().sum(), row.sum(-1).exp().sum())


LENGTHS = (3, 2, 4)


def _all_pairs() -> tuple[Any, torch.Tensor]:
    """Products of all pairs of rows, both dims of which are the rows of the batch, padded and plain."""
    rows = [torch.randn(3, n, dtype=torch.float64) for n in LENGTHS]
    means = torch.stack([row.mean(-1) for row in rows])
    padded = st.pad(rows, {1: SEQ}).mean(-1)
    return padded @ padded.T, means @ means.T


def _with_fives(x: Any) -> Any:
    x = x.clone()
    x[:, torch.tensor([0, -1])] = 5.0
    return x


@pytest.mark.parametrize(
    "program",
    [
        lambda x: x[:, torch.tensor([0, -1])],
        lambda x: x[:, torch.tensor([-1])],
        lambda x: x[torch.tensor([0, 1]), torch.tensor([1, 2])],
        lambda x: x.take_along_dim(x.argmax(1, keepdim=True), 1),
        _with_fives,
        lambda x: x.flatten()[torch.tensor([0, -1])],
        lambda x: x.flatten().sort().values,
        lambda x: x.flatten().topk(3).values,
        lambda x: x.flatten().median(0).values,
    ],
)
def test_products_of_all_pairs_of_rows_are_indexed_and_sorted_in_both_dims(program: Program) -> None:
    padded, plain = _all_pairs()
    found = program(padded)
    found = found.unpad() if isinstance(found, st.PaddedTensor) else found
    found = torch.stack(found) if isinstance(found, list) else found
    torch.testing.assert_close(found, program(plain))


def test_a_sort_along_rows_whose_lengths_differ_elsewhere_is_refused() -> None:
    x = st.pad([torch.randn(3, n) for n in LENGTHS], {1: SEQ})
    with pytest.raises(st.RuleError, match="rows of different lengths"):
        x.transpose(0, 1).flatten(0, 1).sort(0)
