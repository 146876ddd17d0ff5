"""Whatever a public function is given, its error says what is wrong: of the library's own, or torch's for the same."""

from __future__ import annotations

import pytest
import torch
from entry_points import ENTRY_POINTS
from fuzzed_calls import Value, calls, outcome
from hypothesis import HealthCheck, given, settings
from oracle import complaint
from wrong_values import VALUES

import subtensors as st


@given(calls())
@settings(max_examples=80, derandomize=True, suppress_health_check=list(HealthCheck))
def test_a_call_with_any_arguments_ends_well_or_with_an_error_that_says_why(
    call: tuple[str, dict[str, Value]],
) -> None:
    assert outcome(*call) == ""


@pytest.mark.parametrize("name", ENTRY_POINTS)
def test_what_an_entry_point_is_said_to_take_it_takes(name: str) -> None:
    ENTRY_POINTS[name].call(**ENTRY_POINTS[name].right())


@pytest.mark.slow
@pytest.mark.parametrize("name", ENTRY_POINTS)
def test_each_argument_may_be_any_value(name: str) -> None:
    point = ENTRY_POINTS[name]
    arguments = [*point.right(), *point.others]
    found = [outcome(name, {argument: Value("named", value)}) for argument in arguments for value in VALUES]
    assert [each for each in found if each] == []


def accident() -> None:
    st.pad(torch.ones(3), {0: 8}).__class__.count(None, 0)


def internal_assert() -> None:
    raise RuntimeError("false INTERNAL ASSERT FAILED")


def torchs_own() -> None:
    torch.ones(3) + torch.ones(2)


def ours() -> None:
    st.Dim("n", max=8).bucket(9)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (accident, "AttributeError from"),
        (internal_assert, "an internal assert"),
        (torchs_own, "RuntimeError from"),
        (ours, ""),
    ],
)
def test_an_error_that_says_nothing_is_told_from_one_that_does(call: object, expected: str) -> None:
    with pytest.raises(Exception) as raised:  # noqa: PT011
        call()
    found = complaint(raised.value, None)
    assert found.startswith(expected)
    assert (expected == "") == (found == "")
    # Torch's own error is allowed where the plain call gives it, too.
    assert (complaint(raised.value, call) == "") == (call is not internal_assert)
