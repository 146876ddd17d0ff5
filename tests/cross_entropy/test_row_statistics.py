"""Statistics of rows of logits agree with plain torch in float64, by kernels and by their reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from chunked_programs import assert_as_exact, class_by_class
from hypothesis import given
from hypothesis import strategies as some
from programs import Lowering, each_kernel_lowering
from torch import Tensor

from subtensors.kernels.cross_entropy import logits_block
from subtensors.kernels.cross_entropy.logits_block import Block, Tile, padded_rows
from subtensors.kernels.cross_entropy.row_statistics import linear_row_statistics, row_statistics
from subtensors.kernels.cross_entropy.row_sums import ClassMap, LogitStatistics, RowSums, StatisticsOptions

DEFAULTS = {name: getattr(logits_block, name) for name in ("STATISTICS", "GRADIENT")}


@pytest.fixture(autouse=True, scope="module")
def small_tiles() -> Any:
    """Make tiles so small that a row has several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logits_block, "STATISTICS", Tile(128, 4, rows=4))
        patch.setattr(logits_block, "GRADIENT", Tile(128, 4))
        patch.setattr(logits_block, "PROGRAMS_BY_CLASS", (4, 8))
        yield


def plain(
    logits: Tensor,
    targets: Tensor,
    vector: Tensor,
    options: StatisticsOptions,
    scale: Tensor | None = None,
    classes: ClassMap | None = None,
) -> LogitStatistics:
    """The statistics by torch's own functions."""
    z = logits.double() if logits.dtype == torch.float64 else logits.float()
    z = z if options.softcap is None else options.softcap * torch.tanh(z / options.softcap)
    z = z / options.temperature
    before = 1.0 if scale is None else scale[:, None].to(z)
    if classes is not None:
        before, after = (1.0, before) if classes.is_scaled else (before, 1.0)
        z = (torch.where(classes.masked, 0.0, z * before) + classes.offsets.to(z)) * after
    else:
        z = z * before
    log_p = z.log_softmax(1)
    p = log_p.exp()
    p_log_p = torch.where(p > 0, p * log_p.nan_to_num(neginf=0.0), 0.0)
    return LogitStatistics(
        z.logsumexp(1),
        z.gather(1, targets.t()).t(),
        log_p.gather(1, targets.t()).t(),
        p_log_p.sum(1),
        p @ vector.to(p),
        z.argmax(1),
    )


Maps = tuple[Tensor | None, ClassMap | None]


def maps_of(rows: int, classes: int, kind: int, generator: torch.Generator) -> Maps:
    """No scale or one, and no map by class or one, before the scale or after it, as the number says."""
    if not kind:
        return None, None
    scale = torch.rand(rows, generator=generator, dtype=torch.float64) + 0.5
    offsets = torch.randn(classes, generator=generator, dtype=torch.float64)
    masked = torch.rand(classes, generator=generator) < 0.3
    offsets[1::5], masked[0] = -torch.inf, False
    return None if kind == 2 else scale, None if kind == 1 else ClassMap(offsets, masked, kind == 3)


@some.composite
def problems(draw: Any) -> tuple[Tensor, Tensor, Tensor, StatisticsOptions, Maps]:
    rows, columns = draw(some.integers(1, 7)), draw(some.integers(2, 500))
    generator = torch.Generator().manual_seed(draw(some.integers(0, 2**31)))
    logits = torch.randn(rows, columns, generator=generator, dtype=torch.float64) * draw(some.sampled_from([1.0, 20.0]))
    if draw(some.booleans()):
        masked = torch.rand(rows, columns, generator=generator) < 0.3
        masked[:, 0] = False
        logits.masked_fill_(masked, -torch.inf)
    targets = torch.randint(columns, (draw(some.integers(0, 3)), rows), generator=generator)
    vector = torch.randn(columns, generator=generator, dtype=torch.float64)
    softcap = None if logits.isinf().any() else draw(some.sampled_from([None, 5.0]))
    return (
        logits,
        targets,
        vector,
        StatisticsOptions(softcap, draw(some.sampled_from([1.0, 0.7])), True, True),
        maps_of(rows, columns, draw(some.integers(0, 4)), generator),
    )


def gradient(found: LogitStatistics, upstream: list[Tensor], *leaves: Tensor) -> list[Tensor]:
    """The gradients of a weighted sum of the statistics but the last, those that are finite."""
    kept = [(x, u) for x, u in zip(found[:5], upstream, strict=True)]
    total = sum((torch.where(x.isfinite(), x, 0.0) * u.to(x)).sum() for x, u in kept)
    assert isinstance(total, Tensor)
    return list(torch.autograd.grad(total, leaves))


@each_kernel_lowering
@given(data=some.data(), problem=problems(), cut=some.floats(0, 1), is_by_class=some.booleans())
def test_statistics_of_blocks_of_columns_and_their_gradient_are_as_exact_as_torch(
    lowering: Lowering, data: Any, problem: Any, cut: float, is_by_class: bool
) -> None:
    logits, targets, vector, options, (scale, classes) = problem
    columns = logits.shape[1]
    dtype = data.draw(some.sampled_from([torch.float32, torch.float16]))
    values = logits.to(dtype)
    generator = torch.Generator().manual_seed(1)
    scales = [] if scale is None else [scale.float().double().requires_grad_()]
    scale = scales[0] if scales else None
    classes = classes and classes._replace(offsets=classes.offsets.float())
    wide = values.double().requires_grad_()
    truth = plain(wide, targets, vector, options, scale, classes)
    upstream = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in truth[:5]]
    exact = gradient(truth, upstream, wide, *scales)
    leaf, narrow = values.float().clone().requires_grad_(), [s.detach().float().requires_grad_() for s in scales]
    theirs = plain(leaf, targets, vector, options, narrow[0] if narrow else None, classes)
    their_gradient = gradient(theirs, upstream, leaf, *narrow)
    device = lowering.device
    scale = narrow[0].to(device) if narrow else None
    classes = classes and ClassMap(classes.offsets.to(device), classes.masked.to(device), classes.is_scaled)
    values, first = values.to(lowering.device), max(1, int(cut * columns))
    for kernels in (True, False):
        given = targets.to(device), vector.float().to(device), values, kernels
        sums = RowSums(options, *given, scale=scale, class_map=classes)
        whole, into = values, torch.full_like(values, torch.nan)
        if is_by_class:
            into = whole = class_by_class(values)
        end = padded_rows(len(values)) if is_by_class else None
        blocks = [Block(whole[:, :first], 0, 0, end)] + [Block(whole[:, first:], 0, first, end)] * (first < columns)
        with np.errstate(all="ignore"):
            for block in reversed(blocks) if is_by_class else blocks:
                sums.fold(block)
            sums.complete()
            found = sums.statistics()
            kept = [u.float().to(values.device) * x.isfinite() for u, x in zip(upstream, found[:5], strict=True)]
            factors = sums.factors((*kept, None))
            for block in blocks:
                sums.write_gradient(block, factors, into[:, slice(*block.columns)])
        size = float(values[values.isfinite()].abs().max())
        for name, mine, plain_one, t in zip(LogitStatistics._fields, found, theirs, truth, strict=True):
            assert_as_exact(mine.cpu(), [plain_one], t, name, passes=4, scale=1 + size)
        assert_as_exact(into.cpu(), [their_gradient[0].to(dtype)], exact[0], "gradient", passes=4, scale=1 + size)
        if scales and not (classes and classes.is_scaled):
            given = [their_gradient[1]], exact[1], "gradient of the scale"
            assert_as_exact(sums.scale_grad.cpu(), *given, passes=4, scale=(1 + size) ** 2)


@each_kernel_lowering
def test_an_exact_entropy_is_nan_where_a_logit_is_minus_infinity(lowering: Lowering) -> None:
    logits = torch.tensor([[0.0, 200.0, 3.0], [1.0, -torch.inf, 2.0]], device=lowering.device)
    nothing = torch.empty(0, 2, dtype=torch.int64, device=lowering.device)
    log_p = logits.log_softmax(1)
    for kernels in (True, False):
        for exact, expected in ((True, log_p), (False, log_p.clamp(min=-1e9))):
            sums = RowSums(StatisticsOptions(entropy=True, exact_entropy=exact), nothing, None, logits, kernels)
            with np.errstate(all="ignore"):
                sums.fold(Block(logits))
            torch.testing.assert_close(
                sums.statistics().negative_entropy, (log_p.exp() * expected).sum(1), equal_nan=True
            )


@each_kernel_lowering
def test_one_class_lies_row_by_row_whatever_its_stride(lowering: Lowering) -> None:
    logits = torch.randn(40, 20, device=lowering.device).t()[:, :1].requires_grad_()
    assert logits.stride() == (1, 20) or logits.stride(1) != 1
    targets = torch.zeros(1, 20, dtype=torch.int64, device=lowering.device)
    sums = RowSums(StatisticsOptions(), targets, None, logits, kernels=True)
    sums.fold(Block(logits.detach()))
    factors = sums.factors((None, None, torch.ones(1, 20, device=lowering.device), None, None, None))
    into = torch.full((20, 1), torch.nan, device=lowering.device)
    sums.write_gradient(Block(logits.detach()), factors, into)
    assert (into == 0).all()


def _leaves(dtype: torch.dtype, device: str) -> tuple[list[Tensor], Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(12, 6), (50, 6), (50,)]
    leaves = [
        torch.randn(s, generator=generator, dtype=torch.float64).to(device, dtype).requires_grad_() for s in shapes
    ]
    targets = torch.randint(50, (2, 12), generator=generator).to(device)
    return leaves, targets, torch.linspace(-1, 1, 50, dtype=torch.float64).to(device, dtype)


@pytest.mark.parametrize(("columns", "kept"), [(50, 0), (16, 0), (16, 16), (8, 50)])
@pytest.mark.parametrize("frozen", [None, 0, 1, 2])
@pytest.mark.parametrize("mapped", range(5))
def test_statistics_of_a_linear_layer_equal_those_of_its_logits_twice(
    columns: int, kept: int, frozen: int | None, mapped: int, device: str
) -> None:
    leaves, targets, vector = _leaves(torch.float64, device)
    if frozen is not None:
        leaves[frozen].requires_grad_(False)
    hidden, weight, bias = leaves
    options = StatisticsOptions(4.0, 0.5, True, True)
    scale, classes = maps_of(12, 50, mapped, torch.Generator().manual_seed(0))
    if classes is not None:
        offsets = classes.offsets.nan_to_num(neginf=-3.0).to(device)
        classes = ClassMap(offsets, classes.masked.to(device), classes.is_scaled)
    if scale is not None:
        scale = scale.to(device).requires_grad_(mapped != 3)
    given = {"columns": columns, "kept": kept, "scale": scale, "class_map": classes}
    found = linear_row_statistics(hidden, weight, bias, targets, vector, options=options, **given)  # type: ignore[arg-type]
    truth = plain(hidden @ weight.t() + bias, targets, vector, options, scale, classes)
    for mine, t in zip(found, truth, strict=True):
        torch.testing.assert_close(mine, t)
    needed = [leaf for leaf in (*leaves, scale) if leaf is not None and leaf.requires_grad]
    weights = [torch.randn_like(x) for x in truth[:5]]
    mine, theirs = (sum((x * u).sum() for x, u in zip(f, weights, strict=False)) for f in (found, truth))
    expected = torch.autograd.grad(theirs, needed)  # type: ignore[arg-type]
    for _ in range(2):  # the second backward computes the logits that the first has overwritten
        torch.testing.assert_close(torch.autograd.grad(mine, needed, retain_graph=True), expected)  # type: ignore[arg-type]


def test_a_statistic_without_a_gradient_leaves_the_others_theirs(device: str) -> None:
    (hidden, weight, _), targets, _ = _leaves(torch.float64, device)
    for pick in range(3):
        found = linear_row_statistics(hidden, weight, None, targets, columns=16)
        truth = plain(
            hidden @ weight.t(), targets, torch.zeros(50, dtype=torch.float64, device=device), StatisticsOptions()
        )
        torch.testing.assert_close(
            torch.autograd.grad(found[pick].sum(), weight)[0], torch.autograd.grad(truth[pick].sum(), weight)[0]
        )


def test_a_float32_weight_of_16_bit_rows_gets_a_float32_gradient(device: str) -> None:
    (hidden, weight, _), targets, _ = _leaves(torch.float32, device)
    rows = hidden.detach().bfloat16()
    found = linear_row_statistics(rows, weight, None, targets, columns=16)
    (grad,) = torch.autograd.grad(found.log_sum_exp.sum(), weight)
    assert grad.dtype == torch.float32
    logits = (rows @ weight.detach().bfloat16().t()).double()
    torch.testing.assert_close(grad.double(), logits.softmax(1).t() @ rows.double(), rtol=2**-7, atol=2**-7)


def test_a_write_to_an_operand_before_the_backward_raises(device: str) -> None:
    (hidden, weight, _), targets, _ = _leaves(torch.float64, device)
    found = linear_row_statistics(hidden, weight, None, targets, columns=16)
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        found.log_sum_exp.sum().backward()


def test_a_gradient_of_statistics_that_is_to_be_differentiated_is_refused() -> None:
    (hidden, weight, _), targets, _ = _leaves(torch.float32, "cpu")
    for found in (
        row_statistics(hidden @ weight.t(), targets),
        linear_row_statistics(hidden, weight, None, targets, columns=3),
    ):
        with pytest.raises(NotImplementedError, match="cannot be differentiated again"):
            torch.autograd.grad(found.log_sum_exp.sum(), hidden, create_graph=True)


def test_a_class_that_is_none_raises_torchs_error() -> None:
    with pytest.raises(IndexError, match="index 4 is out of bounds for dimension 1 with size 4"):
        row_statistics(torch.zeros(2, 4), torch.tensor([[0, 4]]))


def test_rows_of_infinite_logits_have_torchs_log_sum_exp() -> None:
    logits = torch.tensor([[-torch.inf, -torch.inf], [torch.inf, 0.0], [-torch.inf, 2.0]])
    found = row_statistics(logits, torch.empty(0, 3, dtype=torch.int64))
    assert torch.equal(found.log_sum_exp, logits.logsumexp(1))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("columns", [4224, 8448])
def test_a_large_head_is_as_exact_as_torch_on_a_gpu(
    dtype: torch.dtype, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, tile in DEFAULTS.items():
        monkeypatch.setattr(logits_block, name, tile)
    generator = torch.Generator("cuda").manual_seed(0)
    leaves = [torch.randn(s, 256, generator=generator, device="cuda") for s in (1000, 20011)]
    leaves[1] /= 16
    targets = torch.randint(20011, (1, 1000), generator=generator, device="cuda")
    results: list[list[Tensor]] = []
    for kind in ("truth", "plain", "mine"):
        hidden, weight = (
            x.to(dtype).to(torch.float64 if kind == "truth" else dtype, copy=True).requires_grad_() for x in leaves
        )
        if kind == "mine":
            options = StatisticsOptions(entropy=True)
            found = linear_row_statistics(hidden, weight, None, targets, options=options, columns=columns)
            assert found.negative_entropy is not None
            numbers = [found.log_probabilities[0], found.negative_entropy]
        else:
            logits = hidden @ weight.t()
            log_p = (logits.float() if kind == "plain" else logits).log_softmax(1)
            numbers = [log_p.gather(1, targets.t())[:, 0], (log_p.exp() * log_p).sum(1)]
        (numbers[0] - 0.1 * numbers[1]).sum().backward()
        results.append([x.detach().double() for x in (*numbers, hidden.grad, weight.grad)])  # type: ignore[union-attr]
    for truth, theirs, mine in zip(*results, strict=True):
        error, allowed = (mine - truth).norm(), 1.5 * (theirs - truth).norm()
        assert error <= allowed, f"{error:.3g}, and {allowed:.3g} is allowed"
