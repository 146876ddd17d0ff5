"""Torch's own op_db with poisoned padding: no wrong result anywhere, and how many ops run without unpadding."""

from __future__ import annotations

from collections import Counter

import pytest
from padded_conformance import Outcome, outcomes
from torch.testing._internal.common_methods_invocations import op_db

# What these give is drawn at random, for the bucket rather than for the true size, or is whatever the memory held.
WITHOUT_VALUES = set(
    """bernoulli multinomial normal nn.functional.dropout nn.functional.dropout2d nn.functional.dropout3d
    nn.functional.alpha_dropout nn.functional.feature_alpha_dropout rand_like randn_like randint_like uniform cauchy
    exponential geometric log_normal randint randn rand nn.functional.rrelu nn.functional.fractional_max_pool2d
    nn.functional.fractional_max_pool3d empty_like empty new_empty empty_strided new_empty_strided empty_permuted
    pca_lowrank svd_lowrank""".split()
)

# torch.masked is Python that no type can intercept; these divide by torch.ones(x.shape).sum(), the bucket's size.
PYTHON_ARITHMETIC = {"masked.var", "masked.std"}

OPS = [op for op in op_db if op.name not in PYTHON_ARITHMETIC]


def best(found: list[Outcome], backward: bool) -> str:
    ways = [o.backward if backward else o.how for o in found]
    return next((way for way in ("rule", "fallback", "refused") if way in ways), "none")


def sweep(ops: list[object], count: int) -> tuple[Counter[str], Counter[str], list[str]]:
    forward, backward, wrong = Counter[str](), Counter[str](), []
    for op in ops:
        found = outcomes(op, count, values=op.name not in WITHOUT_VALUES)  # type: ignore[attr-defined, arg-type]
        bad = [o for o in found if "wrong" in (o.how, o.backward)]
        wrong += [f"{op.formatted_name} {o.plan}: {o.why}" for o in bad[:1]]  # type: ignore[attr-defined]
        forward[best(found, backward=False)] += 1
        backward[best(found, backward=True)] += 1
    return forward, backward, wrong


# A third of the table in two tests, so that two workers share them.
@pytest.mark.parametrize("part", range(2))
def test_no_op_gives_a_wrong_result_on_its_first_samples(part: int) -> None:
    forward, _, wrong = sweep(OPS[part::6], 2)
    assert not wrong, "\n".join(wrong)
    assert forward["rule"] >= 60


@pytest.mark.slow
def test_no_op_gives_a_wrong_result_and_most_run_by_rules() -> None:
    forward, backward, wrong = sweep(OPS, 12)
    assert not wrong, "\n".join(wrong)
    assert forward["rule"] >= 400
    assert backward["rule"] >= 300


def test_the_sweep_notices_a_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    from subtensors.dispatch.padded.padded_value import Padded

    monkeypatch.setattr(Padded, "filled", lambda self, value, only=None: self.dense)
    (op,) = [op for op in op_db if op.name == "sum"]
    assert any(o.how == "wrong" for o in outcomes(op, 8))
