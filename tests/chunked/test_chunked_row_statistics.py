"""Losses of policies and language models, written in plain torch, as statistics of rows that the kernels compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from chunked_programs import check_chunked, linear_case
from hypothesis import given
from hypothesis import strategies as some
from row_statistics_programs import (
    ADVANTAGE,
    VECTOR,
    entropy,
    expectation,
    hits,
    of_a_sequence,
    selected,
    several_classes,
)
from torch import Tensor

import subtensors as st
from subtensors.chunked.lazy_tensor import alias_ref
from subtensors.dispatch.chunked import row_forms
from subtensors.dispatch.chunked.match_logits import match_linear_logits


def entropy_of_probabilities(z: Tensor, t: Tensor) -> Tensor:
    return -torch.sum(F.softmax(z, dim=-1) * F.log_softmax(z, dim=-1), dim=-1, keepdim=True)


def entropy_of_logits(z: Tensor, t: Tensor) -> Tensor:
    return torch.logsumexp(z, dim=-1) - (z.softmax(-1) * z).sum(dim=-1)


def entropy_by_special_function(z: Tensor, t: Tensor) -> Tensor:
    return torch.special.entr(z.softmax(-1)).sum(-1)


def categorical(z: Tensor, t: Tensor) -> Tensor:
    policy = torch.distributions.Categorical(logits=z, validate_args=False)
    return policy.log_prob(t) * ADVANTAGE[: t.numel()].to(z.dtype).view(t.shape) - 0.1 * policy.entropy()


def probability(z: Tensor, t: Tensor) -> Tensor:
    return z.softmax(-1).gather(-1, t[..., None])[..., 0] ** 2


def no_class(z: Tensor, t: Tensor) -> Tensor:
    return z.log_softmax(-1).gather(-1, t[..., None][..., :0]).sum(-1) + z.logsumexp(-1)


def hits_without_gradients(z: Tensor, t: Tensor) -> Tensor:
    with torch.no_grad():
        hit = z.argmax(-1) == t
    return hit * z.logsumexp(-1)


def hits_of_probabilities(z: Tensor, t: Tensor) -> Tensor:
    log_p, p = z.log_softmax(-1), z.softmax(-1)
    hit = (log_p.detach().argmax(-1) == t).to(z.dtype) + (0.5 * p).argmax(-1, keepdim=True)[..., 0]
    return hit * log_p.gather(-1, t[..., None])[..., 0]


def clipped_policy(z: Tensor, t: Tensor) -> Tensor:
    log_p = z.log_softmax(-1)
    chosen = log_p.gather(-1, t[..., None])[..., 0]
    ratio = (chosen + 3).exp()
    advantage = ADVANTAGE.to(z.dtype).view(t.shape)
    gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    return -gain + 0.01 * (log_p.exp() * log_p).sum(-1) + 1e-3 * z.logsumexp(-1) ** 2


def read_elsewhere(z: Tensor, t: Tensor) -> Tensor:
    return entropy(z, t) + z.relu().sum(-1) + (-z.log_softmax(-1)).argmax(-1)


PROGRAMS: list[Callable[[Tensor, Tensor], Tensor]] = [
    entropy,
    entropy_of_probabilities,
    entropy_of_logits,
    entropy_by_special_function,
    categorical,
    expectation,
    selected,
    probability,
    several_classes,
    no_class,
    hits,
    hits_without_gradients,
    hits_of_probabilities,
    clipped_policy,
    of_a_sequence,
    read_elsewhere,
]

TRANSFORMS: list[Callable[[Tensor], Tensor]] = [
    lambda z: z,
    lambda z: z / 0.7,
    lambda z: 5 * torch.tanh(z / 5),
    lambda z: z if z.dtype == torch.float64 else z.float(),
    lambda z: (z + 1) * 0.5,
]


FORBIDDEN = torch.arange(20) % 7 == 3
BIAS = VECTOR.masked_fill(torch.arange(20) % 9 == 5, -torch.inf)


def half_as_warm(z: Tensor, t: Tensor) -> Tensor:
    """A temperature that is learned, of logits that have no gradient."""
    with torch.no_grad():
        z = z / 0.5
    return z / t


MAPS: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda z, t: z.masked_fill(FORBIDDEN, -torch.inf),
    lambda z, t: torch.where(~FORBIDDEN, z, -torch.inf) / 0.7,
    lambda z, t: 5 * torch.tanh(z / 5) / 0.7 + BIAS.to(z.dtype),
    lambda z, t: z / t,
    lambda z, t: (t.mean() * z).masked_fill(FORBIDDEN[None], -1e4),
    lambda z, t: (z.masked_fill(FORBIDDEN, -torch.inf) - VECTOR.to(z.dtype)) / 0.5 / t.detach(),
    lambda z, t: torch.where(FORBIDDEN, VECTOR.to(z.dtype), z / t / t.flatten()[0]) + BIAS.to(z.dtype),
    lambda z, t: (z / t).view(-1, 20)[1:].masked_fill(FORBIDDEN, -torch.inf).view(-1, 20),
]

NOT_ONE_OP: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda z, t: z.masked_fill(FORBIDDEN, -1e4) / t,
    lambda z, t: (z / t + VECTOR.to(z.dtype)) / t.detach(),
    lambda z, t: z + t.mean() * VECTOR.to(z.dtype),
    half_as_warm,
]
"""Programs whose gradients, or order, the kernels don't have: some of the maps are ops of their own."""


def cross_entropies(z: Tensor, t: Tensor) -> Tensor:
    z, t = (z, t) if z.ndim == 2 else (z.flatten(0, 1), t.flatten())
    return F.cross_entropy(z, t, reduction="none") * ADVANTAGE[: len(t)].to(z.dtype)


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.usefixtures("blocks")
@given(
    transform=some.sampled_from(TRANSFORMS),
    dtype=some.sampled_from([torch.float32, torch.bfloat16]),
    sizes=some.sampled_from([(12,), (3, 4)]),
    chunks=some.sampled_from([{}, {"rows": 3}, {"memory_limit": 9000}, {"rows": 2, "dim": 1}]),
    biased=some.booleans(),
)
def test_a_loss_of_statistics_equals_the_plain_one(
    program: Any, transform: Any, dtype: torch.dtype, sizes: tuple[int, ...], chunks: dict[str, int], biased: bool
) -> None:
    case = linear_case()
    if not biased:
        del case["b"]
    case |= {"h": case["h"].view(*sizes, 6), "target": case["target"].view(sizes)}
    if "dim" in chunks and len(sizes) == 1:
        chunks = {"rows": 5}

    def loss(h: Tensor, w: Tensor, target: Tensor, b: Tensor | None = None) -> Tensor:
        return program(transform(F.linear(h, w, b)), target).sum()  # type: ignore[no-any-return]

    check_chunked(loss, case, {"h": chunks}, dtype=dtype, passes=3, scale=1.0)


@pytest.mark.parametrize("program", [entropy, categorical, expectation, probability, hits, selected, cross_entropies])
@pytest.mark.usefixtures("blocks")
@given(
    transform=some.sampled_from([*MAPS, *NOT_ONE_OP]),
    dtype=some.sampled_from([torch.float32, torch.bfloat16]),
    sizes=some.sampled_from([(12,), (3, 4)]),
    rows=some.sampled_from([3, 12]),
    is_allowed=some.booleans(),
)
def test_a_loss_of_masked_or_scaled_logits_equals_the_plain_one(
    program: Any, transform: Any, dtype: torch.dtype, sizes: tuple[int, ...], rows: int, is_allowed: bool
) -> None:
    case = linear_case()
    target = case["target"].masked_fill(FORBIDDEN[case["target"]] | BIAS.isinf()[case["target"]], 0)
    case["t"] = torch.linspace(0.5, 1.5, 12).view(*sizes, 1)
    case |= {"h": case["h"].view(*sizes, 6), "target": (target if is_allowed else case["target"]).view(sizes)}

    def loss(h: Tensor, w: Tensor, target: Tensor, b: Tensor, t: Tensor) -> Tensor:
        z = transform(F.linear(h, w, b), t)
        return program(z, target if z.shape[:-1] == sizes else target.flatten()[-z.shape[0] :]).sum()  # type: ignore[no-any-return]

    check_chunked(loss, case, {"h": {"rows": rows}}, dtype=dtype, passes=3, scale=1.0)


@pytest.mark.parametrize("blocks", ["by columns"], indirect=True)
def test_a_scale_without_a_gradient_is_kept_where_statistics_are_computed_by_columns(blocks: None) -> None:
    case = linear_case()
    case["t"] = torch.linspace(0.5, 1.5, 12).view(12, 1)

    def loss(h: Tensor, w: Tensor, target: Tensor, b: Tensor, t: Tensor) -> Tensor:
        return categorical(half_as_warm(F.linear(h, w, b), t), target).sum()  # type: ignore[no-any-return]

    check_chunked(loss, case, {"h": {"rows": 11}}, passes=3, scale=1.0)  # of a plan that no other test has cached


@pytest.mark.parametrize("transform", MAPS[:-1])
def test_masks_and_temperatures_are_a_part_of_the_one_op_on_the_logits(transform: Any) -> None:
    case = linear_case()
    logits = F.linear(st.chunk(case["h"].requires_grad_(), rows=5), case["w"].requires_grad_())
    z = transform(logits, torch.linspace(0.5, 1.5, 12)[:, None].requires_grad_())
    value = categorical(z, case["target"]) + hits(z, case["target"]) + cross_entropies(z, case["target"])
    described = st.explain(value)
    assert described.count("row_statistics") == 1
    assert described.count("[12, 20]") == 1, "only the product has the size of the logits"


@pytest.mark.parametrize("program", PROGRAMS[:-2])
def test_every_form_of_a_statistic_is_one_op_and_logits_are_nothing_else(program: Any) -> None:
    case = linear_case()
    logits = F.linear(st.chunk(case["h"].requires_grad_(), rows=5), case["w"].requires_grad_())
    value = program(logits, case["target"])
    assert isinstance(value, st.ChunkedTensor)
    described = st.explain(value)
    assert described.count("row_statistics") == 1
    assert described.count("[12, 20]") == 1, "only the product has the size of the logits"


def test_statistics_can_be_asked_for_after_others_were_computed() -> None:
    case = linear_case()
    h, w = case["h"].requires_grad_(), case["w"].requires_grad_()
    z, plain = F.linear(st.chunk(h, rows=5), w), F.linear(h, w)
    first, second = (entropy(x, case["target"]).sum() for x in (z, plain))
    torch.testing.assert_close(first, second)
    mine = first + selected(z, case["target"]).sum()
    theirs = second + selected(plain, case["target"]).sum()
    for a, b in zip(torch.autograd.grad(mine, [h, w]), torch.autograd.grad(theirs, [h, w]), strict=True):
        torch.testing.assert_close(a, b)


def ratio_to_the_same_policy(z: Tensor, t: Tensor) -> Tensor:
    new = z.log_softmax(-1).gather(-1, t[:, None])
    with torch.no_grad():
        old = z.log_softmax(-1)
    return -(new - old.gather(-1, t[:, None])).exp().mean()


def probabilities_without_gradients(z: Tensor, t: Tensor) -> Tensor:
    log_p = z.log_softmax(-1)
    with torch.no_grad():
        p = log_p.exp()
    return (p * log_p).sum(-1).mean()


def log_sum_exp_without_gradients(z: Tensor, t: Tensor) -> Tensor:
    with torch.no_grad():
        total = z.logsumexp(-1, keepdim=True)
    return (z - total).gather(-1, t[:, None]).mean()


def log_softmax_without_gradients(z: Tensor, t: Tensor) -> Tensor:
    with torch.no_grad():
        log_p = z.log_softmax(-1)
    return F.nll_loss(log_p, t) * 2 + z.logsumexp(-1).mean()


def difference_without_gradients(z: Tensor, t: Tensor) -> Tensor:
    with torch.no_grad():
        log_p = z - z.logsumexp(-1, keepdim=True)
    return (log_p.exp() * z).sum(-1).mean()


def logits_without_gradients(z: Tensor, t: Tensor) -> Tensor:
    with torch.no_grad():
        cold = z / 0.5
    return (F.softmax(z / 0.5, -1) * cold).sum(-1).mean()


def entropy_without_gradients(z: Tensor, t: Tensor) -> Tensor:
    with torch.no_grad():
        weight = entropy(z, t)
    return (weight * z.log_softmax(-1).gather(-1, t[:, None])[:, 0]).mean()


def detached(z: Tensor, t: Tensor) -> Tensor:
    log_p = z.log_softmax(-1)
    return (log_p.detach().exp() * log_p).sum(-1).mean() + (z - z.detach().logsumexp(-1, keepdim=True)).exp().mean()


def of_the_largest_class(z: Tensor, t: Tensor) -> Tensor:
    return z.log_softmax(-1).gather(-1, z.argmax(-1, keepdim=True)).mean()


def of_the_mode(z: Tensor, t: Tensor) -> Tensor:
    policy = torch.distributions.Categorical(logits=z, validate_args=False)
    return (policy.log_prob(policy.mode) + policy.entropy()).mean()


def of_neighbours_of_the_largest_class(z: Tensor, t: Tensor) -> Tensor:
    with torch.no_grad():
        best = z.argmax(-1, keepdim=True)
        near = z.log_softmax(-1).gather(-1, (best + 1) % 20)
    chosen = (best + (near > -3)) % 20
    return z.log_softmax(-1).gather(-1, chosen).mean() + z.gather(-1, best).square().mean() + z.logsumexp(-1).mean()


STATISTICS_OF_STATISTICS = [of_the_largest_class, of_the_mode, of_neighbours_of_the_largest_class]


def warmed_and_masked(z: Tensor, t: Tensor) -> Tensor:
    warm = z.masked_fill(FORBIDDEN, -torch.inf) / (1 + t[:, None])
    allowed = t.masked_fill(FORBIDDEN[t], 0)
    return F.cross_entropy(warm, allowed) + categorical(warm, allowed).mean()


def as_warm_as_its_entropy(z: Tensor, t: Tensor) -> Tensor:
    return selected(half_as_warm(z, 1 + entropy(z, t)[:, None]), t).mean() + selected(z, t).mean()


def of_truncated_logits(z: Tensor, t: Tensor) -> Tensor:
    rounded = z.long().double()
    return rounded.logsumexp(-1).mean() + z.mean() + rounded.log_softmax(-1).gather(-1, t[:, None]).mean()


def cross_entropy_of_truncated_logits(z: Tensor, t: Tensor) -> Tensor:
    rounded = z.long().double()
    return F.cross_entropy(rounded, t) * z.mean() + F.nll_loss(rounded.log_softmax(-1), t)


MAPPED = [warmed_and_masked, as_warm_as_its_entropy]
TRUNCATED = [of_truncated_logits, cross_entropy_of_truncated_logits]

WITHOUT_GRADIENTS = [
    ratio_to_the_same_policy,
    probabilities_without_gradients,
    log_sum_exp_without_gradients,
    log_softmax_without_gradients,
    difference_without_gradients,
    logits_without_gradients,
    entropy_without_gradients,
    detached,
]


@pytest.mark.parametrize("program", [*WITHOUT_GRADIENTS, *STATISTICS_OF_STATISTICS, *TRUNCATED, *MAPPED])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.usefixtures("blocks")
def test_a_program_of_statistics_with_and_without_gradients_equals_the_plain_one(program: Any, compiled: bool) -> None:
    def loss(h: Tensor, w: Tensor, target: Tensor) -> Tensor:
        return program(F.linear(st.chunk(h, rows=5), w), target)  # type: ignore[no-any-return]

    case = {name: x.double() if x.is_floating_point() else x for name, x in linear_case().items()}
    h, w = case["h"].requires_grad_(), case["w"].requires_grad_()
    mine = (torch.compile(loss, backend="aot_eager") if compiled else loss)(h, w, case["target"])
    theirs = program(F.linear(h, w), case["target"])
    pairs = zip((mine, *torch.autograd.grad(mine, [h, w])), (theirs, *torch.autograd.grad(theirs, [h, w])), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("select", [lambda x: x[:0], lambda x: x[torch.zeros(12, dtype=torch.bool)]])
@pytest.mark.parametrize("program", [entropy, selected, several_classes])
def test_statistics_of_no_rows_are_empty(program: Any, select: Callable[[Tensor], Tensor]) -> None:
    case = linear_case()
    w, target = case["w"].requires_grad_(), select(case["target"])
    mine = program(select(F.linear(st.chunk(case["h"], rows=4), w)), target).sum()
    assert mine.item() == 0
    assert not torch.autograd.grad(mine, w)[0].any()
    rows = program(F.linear(st.chunk(select(case["h"]), rows=4), w), target)
    assert rows.shape == program(select(F.linear(case["h"], w)), target).shape
    assert not torch.autograd.grad(rows.sum(), w)[0].any()


def test_logits_that_are_added_to_themselves_are_looked_through_a_few_steps_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[Any] = []
    look = row_forms.row_form

    def counted(value: Any, *depth: int) -> Any:
        calls.append(value)
        assert len(calls) < 20_000
        return look(value, *depth)

    monkeypatch.setattr(row_forms, "row_form", counted)
    h, w = torch.randn(6, 4, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64)
    z, plain = F.linear(st.chunk(h, rows=2), w), F.linear(h, w)
    for _ in range(40):
        z, plain = z + z, plain + plain
    torch.testing.assert_close(z.sum(-1), plain.sum(-1))


def test_the_transpose_of_a_weight_is_recorded_once_and_its_gradient_with_it() -> None:
    case = {name: x.double() if x.is_floating_point() else x for name, x in linear_case().items()}
    h, w = case["h"], case["w"].t().contiguous().requires_grad_()
    z = st.chunk(h, rows=5) @ w
    layer = match_linear_logits(alias_ref(z).value)  # type: ignore[arg-type]
    assert layer is not None
    assert layer.head_weight is layer.head_weight
    assert layer.head_weight.needs_grad
    loss, plain = (selected(x, case["target"]).exp().sum() for x in (z, h @ w))
    torch.testing.assert_close(torch.autograd.grad(loss, w), torch.autograd.grad(plain, w))
