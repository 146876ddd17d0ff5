"""Rules of single classes: what a table of them promises that a sweep of `op_db` does not show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import subtensors as st
from subtensors.padded import torch_function as padded_calls

SEQ = st.Dim("seq", max=24, buckets=st.Linear(8))
LABELS = st.Dim("labels", max=4, buckets=[4])
NAN = float("nan")
WEIGHT = torch.linspace(-1, 1, 9).view(3, 3)


@pytest.mark.parametrize(
    ("value", "program", "fills"),
    [
        (0, lambda x: x.sum(1), 0),
        (0, lambda x: x.relu().tanh().transpose(1, 2).sum(2), 0),
        (0, lambda x: x @ x.transpose(1, 2).contiguous() @ x, 1),  # what two zeros multiply to isn't kept track of
        (-torch.inf, lambda x: x.amax(1), 0),
        (1, lambda x: x.sum(1), 1),
        (0, lambda x: x.exp().sum(1), 1),
        (0, lambda x: F.dropout(x.reshape(2, -1, 1, 3), 0.5, training=False).sum(1), 0),
        # Attention adds -inf to the scores of padded keys: numbers will do, as a linear map makes of zeros.
        (0, lambda x: F.scaled_dot_product_attention(x @ WEIGHT, x @ WEIGHT, F.linear(x, WEIGHT, WEIGHT[0])), 0),
        (1, lambda x: F.scaled_dot_product_attention(x @ WEIGHT, x @ WEIGHT, F.linear(x, WEIGHT, WEIGHT[0])), 2),
        (0, lambda x: F.scaled_dot_product_attention(x, F.layer_norm(x, (3,)).clone(), x * WEIGHT[0]), 2),
    ],
)
def test_padding_that_is_known_to_be_neutral_is_not_filled_again(
    value: float, program: Callable[[Any], Any], fills: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Mock(wraps=torch.where)
    source = torch.randn(2, 5, 3)
    x = st.pad(source, {1: SEQ}, value=value)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "where", counted)
        out = program(x)
    assert counted.call_count == fills
    torch.testing.assert_close(out.unpad() if isinstance(out, st.PaddedTensor) else out, program(source))


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("lengths", [tuple, torch.tensor])
def test_a_ctc_loss_is_that_of_each_rows_frames_and_labels(reduction: str, lengths: Callable[[Any], Any]) -> None:
    frames, labels = (5, 9, 7), (2, 3, 1)
    rows = [torch.randn(n, 6, dtype=torch.float64, requires_grad=True) for n in frames]
    targets = [torch.randint(1, 6, (n,)) for n in labels]
    alone = torch.stack(
        [
            F.ctc_loss(row.log_softmax(-1), target, torch.tensor(n), torch.tensor(m), reduction="none")
            for row, target, n, m in zip(rows, targets, frames, labels, strict=True)
        ]
    )
    expected = {"none": alone, "sum": alone.sum(), "mean": (alone / torch.tensor(labels)).mean()}[reduction]
    scores = st.pad(rows, {0: SEQ}, value=NAN).log_softmax(-1).transpose(0, 1)
    padded_calls.fallbacks.clear()
    actual = F.ctc_loss(
        scores, st.pad(targets, {0: LABELS}, value=10**6), lengths(frames), lengths(labels), reduction=reduction
    )
    assert not padded_calls.fallbacks
    actual = actual.unpad() if isinstance(actual, st.PaddedTensor) else actual
    torch.testing.assert_close(actual, expected)
    wanted = torch.autograd.grad(expected.sum(), rows)
    torch.testing.assert_close(torch.autograd.grad(actual.sum(), rows), wanted)


@pytest.mark.parametrize(
    ("split", "bounds"),
    [
        (lambda x: x.split([1, 2, 5], 1), (0, 1, 3, None)),
        (lambda x: torch.split_with_sizes(x, [6, 2], 1), (0, 6, None)),
        (lambda x: torch.tensor_split(x, (2, 4), 1), (0, 2, 4, None)),
    ],
    ids=["split", "split_with_sizes", "tensor_split"],
)
def test_parts_of_a_padded_dim_end_at_the_true_size(
    split: Callable[[Any], Any], bounds: tuple[int | None, ...]
) -> None:
    rows = [torch.randn(n, 3, dtype=torch.float64, requires_grad=True) for n in (5, 7, 1)]
    padded_calls.fallbacks.clear()
    parts = split(st.pad(rows, {0: SEQ}, value=NAN))
    assert not padded_calls.fallbacks
    for part, start, stop in zip(parts, bounds[:-1], bounds[1:], strict=True):
        for actual, row in zip(part.unpad(), rows, strict=True):
            torch.testing.assert_close(actual, row[start:stop])
            (gradient,) = torch.autograd.grad(actual.sum(), row, retain_graph=True)
            assert gradient.sum() == actual.numel()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("keywords", [{}, {"label_smoothing": 0.2}, {"weight": torch.tensor([0.2, 1.0, 0.5]).double()}])
def test_a_cross_entropy_with_probabilities_equals_that_of_the_valid_positions(
    reduction: str, keywords: dict[str, Any]
) -> None:
    rows, targets = ([torch.randn(n, 3, dtype=torch.float64, requires_grad=True) for n in (5, 9, 2)] for _ in range(2))
    x, t = (st.pad(values, {0: SEQ}, value=NAN) for values in (rows, targets))
    padded_calls.fallbacks.clear()
    actual = F.cross_entropy(x.mT, t.softmax(-1).mT, reduction=reduction, **keywords)
    assert not padded_calls.fallbacks
    actual = torch.cat(actual.unpad()) if isinstance(actual, st.PaddedTensor) else actual
    expected = F.cross_entropy(torch.cat(rows), torch.cat(targets).softmax(-1), reduction=reduction, **keywords)
    torch.testing.assert_close(actual, expected)
    given, wanted = (torch.autograd.grad(out.sum(), [*rows, *targets]) for out in (actual, expected))
    torch.testing.assert_close(given, wanted)


def test_unique_values_are_those_of_valid_elements() -> None:
    source = torch.tensor([[3, 1, 3], [1, 1, 2]])
    x = st.pad(source, {1: SEQ}, value=10**6)
    for function in (torch.unique, torch.unique_consecutive, torch.bincount, torch.nonzero):
        given = (source.flatten(), x.flatten()) if function is torch.bincount else (source, x)
        expected, actual = (function(t) for t in given)
        torch.testing.assert_close(actual, expected)


def test_positions_made_from_a_padded_size_are_valid_where_the_data_is() -> None:
    source = torch.randn(2, 5, 3)
    x = st.pad(source, {1: SEQ}, value=NAN)
    positions, table = torch.arange(x.shape[1]), torch.randn(24, 3)
    torch.testing.assert_close((x + table[positions]).unpad(), source + table[:5])
    torch.testing.assert_close((x + F.embedding(positions, table)).mean(1), (source + table[:5]).mean(1))
    assert torch.arange(x.count(1)).tolist() == list(range(5))


@pytest.mark.parametrize(
    "factory",
    [
        torch.zeros_like,
        torch.ones_like,
        torch.rand_like,
        lambda t: torch.full_like(t, 2.0),
        lambda t: t.new_ones(t.shape),
    ],
)
def test_a_tensor_made_like_a_padded_one_is_padded_alike(factory: Callable[[Any], Any]) -> None:
    x = st.pad([torch.ones(5), torch.ones(3)], {0: SEQ})
    assert factory(x).logical_shape == x.logical_shape
    assert (factory(x) > -1).sum() == 8


def test_an_out_argument_takes_the_result_and_its_padding() -> None:
    source = torch.randn(2, 5)
    x, out = st.pad(source, {1: SEQ}, value=NAN), st.pad(torch.zeros(2, 5), {1: SEQ}, value=7)
    assert torch.exp(x, out=out) is out
    torch.testing.assert_close(out.unpad(), source.exp())
    plain = torch.empty(2)
    assert torch.sum(x, 1, out=plain) is plain
    torch.testing.assert_close(plain, source.sum(1))
    # A plain one holds no padding, so it is written on the logical data.
    plain = torch.empty(2, 5)
    torch.exp(x, out=plain)
    torch.testing.assert_close(plain, source.exp())


def test_nan_in_the_padding_of_a_contractions_operand_has_no_effect() -> None:
    a, b = (torch.randn(*size, dtype=torch.float64, requires_grad=True) for size in ((2, 5), (5, 3)))
    product = st.pad(a, {1: SEQ}, value=NAN) @ st.pad(b, {0: SEQ}, value=torch.inf)
    torch.testing.assert_close(product, a @ b)
    wanted: tuple[Tensor, ...] = torch.autograd.grad((a @ b).square().sum(), [a, b])
    torch.testing.assert_close(torch.autograd.grad(product.square().sum(), [a, b]), wanted)


@pytest.mark.parametrize("pool", [F.adaptive_avg_pool1d, F.adaptive_max_pool1d])
def test_a_pool_to_one_position_is_over_the_valid_ones(pool: Callable[..., Any]) -> None:
    rows = [torch.randn(3, n, dtype=torch.float64, requires_grad=True) for n in (5, 9, 2)]
    padded_calls.fallbacks.clear()
    out = pool(st.pad(rows, {1: SEQ}, value=NAN), 1).unpad()
    assert not padded_calls.fallbacks
    expected = torch.stack([pool(row, 1) for row in rows])
    torch.testing.assert_close(out, expected)
    wanted = torch.autograd.grad(expected.square().sum(), rows)
    torch.testing.assert_close(torch.autograd.grad(out.square().sum(), rows), wanted)


NUMBERS: dict[str, Callable[[int, int], Tensor]] = {
    "distinct": lambda n, c: torch.randn(n, c, dtype=torch.float64),
    "ties": lambda n, c: torch.randint(0, 3, (n, c)).double(),
    "infinities": lambda n, c: torch.tensor([torch.inf, -torch.inf, 1, 0]).double()[torch.randint(0, 4, (n, c))],
    "NaN": lambda n, c: torch.where(torch.rand(n, c) < 0.3, NAN, torch.randn(n, c, dtype=torch.float64)),
    "all NaN": lambda n, c: torch.full((n, c), NAN, dtype=torch.float64),
}
QS = torch.tensor([0.0, 0.3, 0.5, 1.0], dtype=torch.float64)
# Over the dim that is padded, with positions where torch gives them, and over all.
RANKED: dict[str, Callable[[Any, int | None], Any]] = {
    "median": lambda x, d: x.median() if d is None else x.median(d),
    "nanmedian": lambda x, d: x.nanmedian() if d is None else x.nanmedian(d, keepdim=True),
    "mode": lambda x, d: x.mode(d),
    "quantile": lambda x, d: x.quantile(0.3, d),
    "quantiles": lambda x, d: x.quantile(QS.to(x.device), d, keepdim=True),
    "nanquantile": lambda x, d: x.nanquantile(QS.to(x.device), d),
    "nanquantile, nearest": lambda x, d: x.nanquantile(0.6, d, interpolation="nearest"),
    "quantile, lower": lambda x, d: x.quantile(QS.to(x.device), d, interpolation="lower"),
    "quantile, higher": lambda x, d: x.quantile(QS.to(x.device), d, keepdim=True, interpolation="higher"),
    "quantile, midpoint": lambda x, d: x.quantile(0.4, d, interpolation="midpoint"),
}

SEVERAL = {"quantiles", "nanquantile", "quantile, lower", "quantile, higher"}
"""Those that take several quantiles, which are the first dim of the result."""


def unpadded(name: str, x: Tensor, d: int | None) -> Any:
    """The program on plain data.

    Torch's mode depends on where NaN stand: in order they are each one, above all. Of several on CUDA it takes any.
    """
    if name != "mode" or d == 2:
        return RANKED[name](x, d)
    return tuple(t.to(x.device) for t in RANKED[name](x.cpu().sort(d).values, d))


def real(out: Any) -> Any:
    return out.unpad() if isinstance(out, st.PaddedTensor) else out


def check_ranked(actual: Any, expected: Any, source: Tensor, leaf: Tensor, d: int | None) -> None:
    """Compare values, what stands at the positions, and gradients."""
    if isinstance(expected, tuple):
        assert isinstance(d, int)
        (actual, at), (expected, _) = actual, expected
        at = at if at.dim() == source.dim() else at.unsqueeze(d)
        torch.testing.assert_close(source.gather(d, at).reshape(expected.shape), expected, equal_nan=True)
    torch.testing.assert_close(actual, expected, equal_nan=True)
    cotangent = torch.randn_like(expected)
    (wanted,) = torch.autograd.grad(expected, leaf, cotangent, retain_graph=True)
    (given,) = torch.autograd.grad(actual, leaf, cotangent, retain_graph=True)
    check_gradient(given, wanted, source, d)


def check_gradient(given: Tensor, wanted: Tensor, source: Tensor, d: int | None) -> None:
    """Which of several equal elements takes a gradient torch leaves open: their sums, by value, agree."""
    if d is None:
        given, wanted, source, d = given.flatten(), wanted.flatten(), source.flatten(), 0
    for one in source.movedim(d, 0):
        same = (source == one.unsqueeze(d)) | (source.isnan() & one.isnan().unsqueeze(d))
        torch.testing.assert_close((given * same).sum(d), (wanted * same).sum(d))


@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("name", RANKED)
def test_an_order_statistic_equals_that_of_the_valid_elements(name: str, numbers: str, device: str) -> None:
    padded_calls.fallbacks.clear()
    for n in (1, 2, 5, 8):
        for poison in (NAN, torch.inf, -torch.inf, 1.0):
            source = NUMBERS[numbers](2 * n, 3).reshape(2, n, 3).to(device)
            leaf = source.clone().requires_grad_()
            x = st.pad(leaf, {1: SEQ}, value=poison)
            for d in (1, 2) if name == "mode" else (1, 2, None):
                actual = RANKED[name](x, d)
                actual = tuple(map(real, actual)) if isinstance(actual, tuple) else real(actual)
                check_ranked(actual, unpadded(name, leaf, d), source, leaf, d)
    assert not padded_calls.fallbacks


@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("name", RANKED)
def test_an_order_statistic_of_a_ragged_batch_is_that_of_each_row(name: str, numbers: str, device: str) -> None:
    for poison in (NAN, torch.inf, -torch.inf, 1.0):
        rows = [NUMBERS[numbers](n, 3).to(device) for n in (5, 9, 1, 8)]
        leaves = [row.clone().requires_grad_() for row in rows]
        outs = RANKED[name](st.pad(leaves, {0: SEQ}, value=poison), 1)
        for i, (row, leaf) in enumerate(zip(rows, leaves, strict=True)):
            expected = unpadded(name, leaf, 0)
            if isinstance(outs, tuple):
                check_ranked(tuple(o[i] for o in outs), expected, row, leaf, 0)
            else:
                check_ranked(outs.select(int(name in SEVERAL), i), expected, row, leaf, 0)


@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("name", sorted(RANKED.keys() - {"mode"}))
def test_an_order_statistic_over_a_ragged_batch_is_that_of_all_rows(name: str, numbers: str, device: str) -> None:
    for poison in (NAN, torch.inf, -torch.inf, 1.0):
        leaves = [NUMBERS[numbers](n, 3).to(device).requires_grad_() for n in (5, 9, 1, 8)]
        actual = RANKED[name](st.pad(leaves, {0: SEQ}, value=poison), None).flatten()
        expected = RANKED[name](torch.cat(leaves), None).flatten()
        torch.testing.assert_close(actual, expected, equal_nan=True)
        cotangent = torch.randn_like(expected)
        wanted = torch.cat(torch.autograd.grad(expected, leaves, cotangent))
        given = torch.cat(torch.autograd.grad(actual, leaves, cotangent))
        check_gradient(given, wanted, torch.cat(leaves).detach(), None)
        if "median" in name:  # whose gradient all that equal it share
            torch.testing.assert_close(given, wanted)


@pytest.mark.parametrize("name", RANKED)
def test_an_order_statistic_compiles_once_for_every_length(name: str) -> None:
    program = RANKED[name]
    seq = st.Dim("seq", max=12, buckets=[12])
    compiled = torch.compile(lambda x: program(x, 1), fullgraph=True, backend="aot_eager")
    for i, n in enumerate((4, 12, 3)):
        t = torch.randn(2, n, 3, dtype=torch.float64)
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            torch.testing.assert_close(tuple(compiled(st.pad(t, {1: seq}, value=NAN))), tuple(program(t, 1)))


def test_medians_and_modes_of_integers_ignore_the_padding() -> None:
    source = torch.tensor([[3, 1, 3, 2**63 - 1], [2**63 - 1, 2, 2**63 - 1, 5]])
    for poison in (2**63 - 1, -(2**63), 1):
        x = st.pad(source, {1: SEQ}, value=poison)
        for function in (torch.median, torch.nanmedian, torch.mode):
            values, positions = function(x, 1)
            torch.testing.assert_close(values, function(source, 1).values)
            torch.testing.assert_close(source.gather(1, positions[:, None])[:, 0], values)
        torch.testing.assert_close(x.median(), source.median())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.int64, torch.complex64])
def test_logsumexp_and_errors_for_other_dtypes_are_torchs(dtype: torch.dtype) -> None:
    source = (torch.randn(2, 5).abs() * 3).to(dtype)
    for poison in (0, 1):
        x = st.pad(source, {1: SEQ}, value=poison)
        torch.testing.assert_close(x.logsumexp(1), source.logsumexp(1))
        for function in (F.softmin, torch.var, F.layer_norm):
            outs = []
            for t in (source, x):
                try:
                    outs.append(function(t, (t.shape[1],) if function is F.layer_norm else 1))  # type: ignore[operator]
                except RuntimeError as refusal:
                    outs.append(str(refusal))
            assert isinstance(outs[0], str) == isinstance(outs[1], str)


def test_quantiles_raise_where_torchs_do() -> None:
    source = torch.randn(2, 5)
    x = st.pad(source, {1: SEQ}, value=NAN)
    for wrong in (-0.1, torch.tensor([0.5, 1.1]), torch.tensor(0.5).double(), torch.rand(2, 2)):
        with pytest.raises(RuntimeError) as plain:
            source.quantile(wrong, 1)
        with pytest.raises(RuntimeError) as padded:
            x.quantile(wrong, 1)
        assert str(padded.value) == str(plain.value)


def test_the_median_and_quantiles_of_an_empty_row_are_nan() -> None:
    x = st.pad([torch.ones(0), torch.tensor([3.0, 1.0, 2.0])], {0: SEQ}, value=7)
    for out in (x.median(1).values, x.nanmedian(1).values, x.quantile(0.5, 1), x.nanquantile(0.5, 1)):
        torch.testing.assert_close(out, torch.tensor([NAN, 2.0]), equal_nan=True)


SCALES = torch.tensor([0.1, 0.2, 0.3])
OF_REAL_ELEMENTS: dict[str, Callable[[Any], Any]] = {
    "covariance": lambda x: torch.cov(x[0].mT),
    "covariance of positions": lambda x: torch.cov(x[0], correction=0),
    "correlation": lambda x: torch.corrcoef(x[0].mT),
    "variance with a correction of True": lambda x: (x.var(1, correction=True), x.std(1, correction=False)),
    "variance of complex numbers": lambda x: torch.complex(x, x * x).var(1),
    "spread of complex numbers": lambda x: torch.std_mean(torch.complex(x, x * x), 1),
    "rounding to a scale": lambda x: torch.fake_quantize_per_tensor_affine(x.float(), 0.1, 0, -128, 127),
    "rounding to scales": lambda x: torch.fake_quantize_per_channel_affine(
        x.float(), SCALES.to(x.device), torch.zeros(3, dtype=torch.int32, device=x.device), 2, -128, 127
    ),
    "local response": lambda x: F.local_response_norm(x.mT, 2),
    "systems of equations": lambda x: torch.linalg.solve(
        x.unsqueeze(-1) * x.unsqueeze(-2) + torch.eye(3, device=x.device), x
    ),
    "draws that are certain": lambda x: torch.multinomial((x[..., 0] == x[..., 0].amax(1, keepdim=True)).double(), 1),
}


@pytest.mark.parametrize("name", OF_REAL_ELEMENTS)
def test_a_rule_sees_valid_elements_only(name: str, device: str) -> None:
    program = OF_REAL_ELEMENTS[name]
    compiled = torch.compile(program, fullgraph=True, backend="aot_eager")
    for i, n in enumerate((5, 8, 2)):
        source = torch.randn(2, n, 3, dtype=torch.float64, device=device, requires_grad=True)
        expected = program(source)
        for run in (program, compiled):
            padded_calls.fallbacks.clear()
            with torch._dynamo.config.patch(error_on_recompile=i > 0):
                actual = run(st.pad(source, {1: SEQ}, value=NAN))
            assert not padded_calls.fallbacks
            actual = tuple(map(real, actual)) if isinstance(actual, tuple) else real(actual)
            torch.testing.assert_close(actual, expected)
            outs, wanted = ([o] if isinstance(o, Tensor) else o for o in (actual, expected))
            if not wanted[0].requires_grad:
                continue
            given, alone = (
                torch.autograd.grad(torch.stack([o.abs().square().sum() for o in t]).sum(), source, retain_graph=True)
                for t in (outs, wanted)
            )
            torch.testing.assert_close(given, alone)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_the_padding_of_a_grid_reads_nowhere(mode: str, poison: float, device: str) -> None:
    rows, codes = st.Dim("rows", max=4, buckets=[4]), {"bilinear": 0, "bicubic": 2}
    x = torch.randn(2, 3, 5, 8, dtype=torch.float64, device=device)
    grid = torch.rand(2, 6, 7, 2, dtype=torch.float64, device=device) * 2 - 1
    found = []
    for padded in (False, True):
        leaves = [t.clone().requires_grad_() for t in (x, grid)]
        given = [st.pad(t, {0: rows}, value=poison) for t in leaves] if padded else leaves
        y = torch.grid_sampler_2d(*given, codes[mode], 1, False)
        y = y.unpad() if isinstance(y, st.PaddedTensor) else y
        found.append([y.detach(), *torch.autograd.grad(y.square().sum(), leaves)])
    for ours, theirs in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, theirs)


PAIRINGS: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...], tuple[int | None, ...]]] = {
    "rows of a bilinear layer": (F.bilinear, ((2, 5, 3), (2, 5, 4), (6, 3, 4), (6,)), (1, 1, None, None)),
    "features of a bilinear layer": (F.bilinear, ((7, 5), (7, 4), (6, 5, 4)), (1, None, 1)),
    "rows that distances are from": (torch.cdist, ((2, 5, 3), (2, 6, 3)), (1, None)),
    "rows that distances are to": (torch.cdist, ((2, 6, 3), (2, 5, 3)), (None, 1)),
    "features of distances": (torch.cdist, ((2, 6, 5), (7, 5)), (2, 1)),
}


@pytest.mark.parametrize("name", PAIRINGS)
def test_products_of_several_operands_and_distances_take_padding_in_any_dim(name: str) -> None:
    function, shapes, dims = PAIRINGS[name]
    sources = [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]
    given = [t if d is None else st.pad(t, {d: SEQ}, value=NAN) for t, d in zip(sources, dims, strict=True)]
    padded_calls.fallbacks.clear()
    out = function(*given)
    assert not padded_calls.fallbacks
    found, expected = out.unpad() if isinstance(out, st.PaddedTensor) else out, function(*sources)
    torch.testing.assert_close(found, expected)
    cotangent = torch.randn_like(expected)
    gradients = [torch.autograd.grad(each, sources, cotangent) for each in (found, expected)]
    torch.testing.assert_close(*gradients)
