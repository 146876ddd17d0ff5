"""Recording the same program again costs less, and never returns another program's results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from chunked_programs import check_results

import subtensors as st
from subtensors.dispatch.chunked import cost_model, record


def test_recording_a_program_twice_infers_and_plans_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight = torch.randn(6, 4, 5, requires_grad=True), torch.randn(30, 5, requires_grad=True)
    target = torch.randint(0, 30, (6, 4))

    def step() -> None:
        logits = F.linear(st.chunk(hidden, rows=2), weight)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), target[:, 1:].flatten())
        loss.backward()
        (logits.logsumexp(-1) ** 2).mean().backward()

    seen: list[object] = []
    plans = cost_model.possible_plans
    infer, plan = record._infer, cost_model.plan_linear_cross_entropy
    monkeypatch.setattr(record, "_infer", lambda *args: seen.append(args[0]) or infer(*args))
    monkeypatch.setattr(cost_model, "possible_plans", lambda *args: seen.append("plan") or plans(*args))
    record._inferred.clear()
    plan.cache_clear()
    step()
    assert seen.count("plan") >= 1
    assert len(seen) > 5
    seen.clear()
    step()
    assert not seen


def test_equal_numbers_of_two_types_are_promoted_by_their_type() -> None:
    h = st.chunk(torch.ones(4, 3, dtype=torch.int64), rows=2)
    assert [(h * number).dtype for number in (2, 2.0, 2, True)] == [
        torch.int64,
        torch.float32,
        torch.int64,
        torch.int64,
    ]
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        assert (h * 2.0).dtype == torch.float64
    finally:
        torch.set_default_dtype(default)


def test_the_sequence_dim_stays_chunked_through_a_linear_layer() -> None:
    h = st.chunk(torch.ones(4, 12, 3), dim=1, rows=3)
    logits = F.linear(h, torch.ones(5, 3))
    assert "4 chunks of 3 of 12 rows" in st.explain(logits.exp().logsumexp(-1))


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_a_linear_layer_of_rows_is_recorded_as_torch_would_have_it(has_bias: bool, grad: bool) -> None:
    hidden, weight = torch.randn(6, 5), torch.randn(30, 5, requires_grad=grad)
    bias = torch.randn(30, requires_grad=True) if has_bias else None
    direct = F.linear(st.chunk(hidden, rows=2), weight, bias)
    by_rules = torch.addmm(bias, st.chunk(hidden, rows=2), weight.t()) if bias is not None else None
    by_rules = st.chunk(hidden, rows=2) @ weight.t() if by_rules is None else by_rules
    values = [x._ref.value for x in (direct, by_rules)]  # type: ignore[attr-defined]
    assert values[0].node.name == values[1].node.name
    assert direct.requires_grad == by_rules.requires_grad == (grad or has_bias)
    one, two = ((v.shape, v.meta.stride(), v.dtype, v.device, v.layout.dim, v.layout.size, v.node.grad) for v in values)
    assert one == two
    assert torch.equal(direct.realize(), by_rules.realize())


@pytest.mark.parametrize(
    ("weight", "bias"),
    [(torch.ones(30, 4), None), (torch.ones(30, 5).double(), None), (torch.ones(30, 5), torch.ones(7))],
)
def test_a_linear_layer_of_wrong_sizes_is_torchs_own_error(weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    with pytest.raises(RuntimeError) as plain:
        F.linear(torch.ones(6, 5), weight, bias)
    with pytest.raises(RuntimeError, match=str(plain.value)[:12]):
        F.linear(st.chunk(torch.ones(6, 5), rows=2), weight, bias).realize()


def test_a_linear_layer_is_recorded_when_more_than_its_cross_entropy_reads_it() -> None:
    hidden, weight = torch.randn(6, 5, requires_grad=True), torch.randn(30, 5, requires_grad=True)
    target = torch.randint(0, 30, (6,))
    logits = F.linear(st.chunk(hidden, rows=2), weight)
    assert isinstance(logits, st.ChunkedTensor)
    assert (logits.shape, logits.stride(), logits.dtype) == ((6, 30), (30, 1), torch.float32)
    loss = F.cross_entropy(logits, target)
    assert not logits._ref.is_recorded  # type: ignore[attr-defined]
    right = (logits.argmax(-1) == target).sum()
    assert logits._ref.is_recorded  # type: ignore[attr-defined]
    again = F.cross_entropy(logits, target)
    plain = F.linear(hidden, weight)
    assert right == (plain.argmax(-1) == target).sum()
    assert st.explain(again) == st.explain(loss)
    for mine in (loss, again):
        for a, e in zip(
            torch.autograd.grad(mine, [hidden, weight]),
            torch.autograd.grad(F.cross_entropy(plain, target), [hidden, weight], retain_graph=True),
            strict=True,
        ):
            torch.testing.assert_close(a, e)


def test_a_weight_that_is_written_to_before_the_loss_of_its_layer_is_refused() -> None:
    weight = torch.randn(30, 5)
    logits = F.linear(st.chunk(torch.randn(6, 5), rows=2), weight)
    weight.add_(1)
    with pytest.raises(st.RuleError, match="modified in place"):
        F.cross_entropy(logits, torch.randint(0, 30, (6,))).item()


def test_a_boolean_count_is_refused_also_after_an_equal_number() -> None:
    st.chunk(torch.ones(3), rows=1)
    with pytest.raises(TypeError, match="rows is a whole number, got True"):
        st.chunk(torch.ones(3), rows=True)


@pytest.mark.parametrize(
    "cast", [lambda x: x.float(), lambda x: x.to(torch.float32), lambda x: x.to(dtype=torch.float32)]
)
def test_a_cast_of_a_linear_layer_is_lazy_and_shares_its_product(cast: Any) -> None:
    hidden = torch.randn(6, 5).bfloat16().requires_grad_()
    weight, target = torch.randn(30, 5).bfloat16(), torch.randint(0, 30, (6,))
    narrow = F.linear(st.chunk(hidden, rows=2), weight)
    wide = cast(narrow)
    assert (wide.dtype, wide.shape, wide.requires_grad) == (torch.float32, (6, 30), True)
    loss = F.cross_entropy(wide, target)
    assert loss.dtype == torch.float32
    assert not wide._ref.is_recorded
    assert not narrow._ref.is_recorded  # type: ignore[attr-defined]
    assert wide.sum().dtype == torch.float32
    assert wide._ref.value.node.args[0] is narrow._ref.value  # type: ignore[attr-defined]
    assert narrow.to(torch.float32, copy=True).dtype == narrow.float(memory_format=torch.preserve_format).dtype
    with torch.no_grad():
        assert not cast(F.linear(st.chunk(hidden, rows=2), weight)).requires_grad
    written = F.linear(st.chunk(hidden, rows=2), weight)
    before = cast(written)
    written.mul_(0)
    torch.testing.assert_close(before.realize(), F.linear(hidden, weight).float())

    def plain(t: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        logits = F.linear(t["hidden"], t["weight"])
        return [F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), target)]

    check_results([loss], plain, {"hidden": hidden, "weight": weight})
