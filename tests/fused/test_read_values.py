"""Numbers that fused math reads besides its arguments: read at each call, or refused."""

import copy
import pickle
import types

import pytest
import torch

import subtensors as st
from subtensors.dispatch.fused.fused_function import FusedFunction
from subtensors.dispatch.fused.read_values import ReadValues

rate = 2.0
options = {"rate": 2.0, "other": [1, 2]}
config = types.SimpleNamespace(rate=2.0, inner=types.SimpleNamespace(rate=2.0))


def times_rate(p):
    return p.mul_(rate)


def scaled(function):
    """Return the result of one call of fused math on a one."""
    p = st.TensorList([torch.ones(1)])
    function(p)
    return p[0].item()


class Scale:
    rate = 2.0

    def __init__(self):
        self.own = 1.0

    @st.fused
    def apply(self, p):
        p.mul_(self.rate * self.own)

    def __call__(self, p):
        p.mul_(self.rate)

    @property
    def doubled(self):
        return 2 * self.own


class Slotted:
    __slots__ = ("rate",)

    def __init__(self):
        self.rate = 2.0


scale, slotted, module = Scale(), Slotted(), torch.nn.Identity()
module.rate = 2.0


@pytest.mark.parametrize(
    ("math", "owner", "name"),
    [
        (lambda p: p.mul_(rate), globals(), "rate"),
        (lambda p: times_rate(p), globals(), "rate"),
        (lambda p: p.mul_(options["rate"]), options, "rate"),
        (lambda p: p.mul_(config.rate), config, "rate"),
        (lambda p: p.mul_(config.inner.rate), config.inner, "rate"),
        (lambda p: p.mul_(getattr(config, "rate")), config, "rate"),  # noqa: B009
        (lambda p: p.mul_(Scale.rate), Scale, "rate"),
        (lambda p: p.mul_(scale.rate), Scale, "rate"),
        (lambda p: scale(p), Scale, "rate"),
        (lambda p: p.mul_(slotted.rate), slotted, "rate"),
        (lambda p: p.mul_(module.rate), module, "rate"),
    ],
    ids=range(11),
)
def test_a_number_that_the_math_reads_is_read_at_each_call(monkeypatch, math, owner, name):
    function = st.fused(math)
    assert [scaled(function), scaled(function)] == [2.0, 2.0]
    for value in (5.0, -3.0, 5.0):
        (monkeypatch.setitem if isinstance(owner, dict) else monkeypatch.setattr)(owner, name, value)
        assert scaled(function) == value
    monkeypatch.undo()
    assert scaled(function) == 2.0
    assert function.traces == 3


def test_closures_defaults_and_partial_arguments_are_read_at_each_call():
    factor = 2.0
    factors = [1.0, 3.0]

    def math(p, extra=factors, *, last=factors):
        p.mul_(factor * extra[0] * last[1])

    function = st.fused(math)
    assert scaled(function) == 6.0
    factor = 5.0
    assert scaled(function) == 15.0
    factors[1] = 1.0
    assert scaled(function) == 5.0
    math.__defaults__ = ([2.0],)
    assert scaled(function) == 10.0


def test_a_number_shadowed_by_the_object_is_read_at_the_next_call(monkeypatch):
    function = st.fused(lambda p: p.mul_(scale.rate))
    assert scaled(function) == 2.0
    monkeypatch.setattr(scale, "rate", 7.0, raising=False)
    assert scaled(function) == 7.0


def test_a_property_and_a_method_are_followed(monkeypatch):
    function = st.fused(lambda p: p.mul_(scale.doubled))
    assert scaled(function) == 2.0
    monkeypatch.setattr(scale, "own", 4.0)
    assert scaled(function) == 8.0


@pytest.mark.parametrize("values", [(1, 1.0, True), (0.0, -0.0), (float("nan"), 1.0), ("add", "mul", None)], ids=str)
def test_values_that_python_finds_equal_are_told_apart(monkeypatch, values):
    def math(p):
        return p.copysign(rate) if isinstance(rate, float) else p + (2 if type(rate) is int else 4)

    function, p = st.fused(math), st.TensorList([torch.ones(1)])
    for value in values * 2:
        monkeypatch.setitem(globals(), "rate", value)
        assert torch.equal(function(p)[0], math(torch.ones(1)))


def test_a_helper_that_is_replaced_is_traced_anew(monkeypatch):
    function = st.fused(lambda p: times_rate(p))
    assert scaled(function) == 2.0
    monkeypatch.setitem(globals(), "times_rate", lambda p: p.mul_(9))
    assert scaled(function) == 9.0


def test_too_many_values_are_refused_with_the_name_and_the_line(monkeypatch):
    function = st.fused(lambda p: p.mul_(rate))
    monkeypatch.setattr(FusedFunction, "MAX_VARIANTS", 3)
    for value in range(3):
        monkeypatch.setitem(globals(), "rate", value)
        assert scaled(function) == value
    monkeypatch.setitem(globals(), "rate", 4)
    with pytest.raises(st.RuleError, match=r"(?s)3 values.*of rate\n.*test_read_values.*p\.mul_\(rate\).*argument"):
        scaled(function)
    monkeypatch.setitem(globals(), "rate", 1)
    assert scaled(function) == 1


def test_calls_that_run_the_function_itself_may_read_any_number_of_values(monkeypatch):
    monkeypatch.setattr(FusedFunction, "MAX_VARIANTS", 2)
    function = st.fused(lambda p: p * rate)
    x = torch.ones(2, requires_grad=True)
    for value in range(5):
        monkeypatch.setitem(globals(), "rate", value)
        assert function(st.TensorList([x]))[0].tolist() == [value] * 2


def test_math_that_counts_its_own_calls_is_refused():
    calls = 0

    @st.fused
    def math(p):
        nonlocal calls
        calls += 1
        p.mul_(calls)

    with pytest.raises(st.RuleError, match=r"(?s)changes calls\n.*once, when it is traced"):
        scaled(math)


def test_a_list_that_grows_during_the_trace_is_no_reason_to_trace_again():
    seen = []

    @st.fused
    def math(p):
        seen.append(1)
        p.mul_(2)

    assert [scaled(math), scaled(math), len(seen), math.traces] == [2, 2, 1, 1]


def test_a_large_container_is_refused():
    table = list(range(5000))
    with pytest.raises(st.RuleError, match=r"reads table.*5000 items.*\n  at .*table\[3\].*\n.*arguments"):
        scaled(st.fused(lambda p: p.mul_(table[3])))


def test_math_that_names_nothing_of_its_own_has_nothing_to_compare():
    def math(p, g, *, lr):
        p.sub_(lr * torch.sqrt(g))

    assert ReadValues(math).readers == []
    assert ReadValues(st.optim.AdamW._fusion.function).readers == []


def test_an_optimizer_that_reads_a_number_reads_it_at_each_step(monkeypatch):
    class Descent(st.optim.Optimizer):
        def __init__(self, params, lr=1.0):
            super().__init__(params, {"lr": lr})

        def update(self, p, g, *, lr):
            p.sub_(lr * rate * g)

    p = torch.nn.Parameter(torch.zeros(1))
    optimizer, p.grad = Descent([p]), torch.ones(1)
    optimizer.step()
    monkeypatch.setitem(globals(), "rate", 5.0)
    optimizer.step()
    assert p.item() == -7


def test_a_method_reads_the_numbers_of_its_object():
    a, b = Scale(), Scale()
    b.own = 5.0
    assert [scaled(a.apply), scaled(b.apply), scaled(a.apply)] == [2, 10, 2]
    assert a.apply is a.apply
    a.own = 3.0
    assert scaled(a.apply) == 6


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "deepcopy", "pickle"]
)
def test_a_copy_of_an_object_has_a_method_of_its_own(copied):
    a = Scale()
    scaled(a.apply)
    b = copied(a)
    b.own = 5.0
    assert [scaled(a.apply), scaled(b.apply)] == [2, 10]


def test_an_object_that_keeps_nothing_refuses_a_fused_method():
    class Small:
        __slots__ = ()

        @st.fused
        def apply(self, p):
            p.mul_(2)

    with pytest.raises(TypeError, match="class without __dict__"):
        scaled(Small().apply)


@pytest.mark.parametrize("value", [3, None, torch.ones(1)], ids=["int", "None", "tensor"])
def test_what_is_no_function_is_refused(value):
    with pytest.raises(TypeError, match=r"st\.fused makes a function"):
        st.fused(value)


def test_a_static_method_is_fused_below_its_decorator():
    with pytest.raises(TypeError, match="below @staticmethod"):
        st.fused(staticmethod(times_rate))

    class Namespace:
        @staticmethod
        @st.fused
        def apply(p):
            p.mul_(3)

    assert scaled(Namespace.apply) == 3
