"""Numbers that fused math reads in a roundabout way: by an import, a computed name, a mapping, a weak reference."""

import collections
import contextvars
import math
import operator
import os
import sys
import types
import weakref

import pytest
import torch

import subtensors as st

rate = 2.0
which = "rate"
options = {"rate": 2.0}
config = types.SimpleNamespace(rate=2.0)
read_rate = operator.attrgetter("rate")
read_inner = operator.attrgetter("inner.rate")
outer = types.SimpleNamespace(inner=config)
chain = collections.ChainMap({}, options)
proxy = types.MappingProxyType(options)
context = contextvars.ContextVar("context", default=2.0)
texts = collections.UserDict(options)


class Kind(type):
    @property
    def rate(cls):
        return cls.own


class Settings(metaclass=Kind):
    own = 2.0


class Holder:
    rate = 2.0


holder = Holder()
reference, weak = weakref.ref(holder), weakref.proxy(holder)


@pytest.fixture
def settings(monkeypatch):
    """A module that the math imports, with a number."""
    package, module = types.ModuleType("cfgpkg"), types.ModuleType("cfgpkg.settings")
    package.__path__ = []
    module.rate, package.settings = 2.0, module
    monkeypatch.setitem(sys.modules, "cfgpkg", package)
    monkeypatch.setitem(sys.modules, "cfgpkg.settings", module)
    return module


def scaled(function):
    """Return the result of one call of fused math on a one."""
    p = st.TensorList([torch.ones(1)])
    function(p)
    return p[0].item()


def by_import(p):
    from cfgpkg.settings import rate as imported

    p.mul_(imported)


def by_imported_module(p):
    from cfgpkg import settings

    p.mul_(settings.rate)


def by_long_name(p):
    import cfgpkg.settings

    p.mul_(cfgpkg.settings.rate)


@pytest.mark.parametrize("function", [by_import, by_imported_module, by_long_name])
def test_a_number_of_a_module_that_the_math_imports_is_read_at_each_call(settings, function):
    function = st.fused(function)
    assert [scaled(function), scaled(function)] == [2, 2]
    settings.rate = 5.0
    assert scaled(function) == 5
    assert function.traces == 2


def test_a_module_that_the_trace_is_first_to_import_is_watched_too(tmp_path, monkeypatch):
    (tmp_path / "late_settings.py").write_text("rate = 2.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def late(p):
        from late_settings import rate

        p.mul_(rate)

    function = st.fused(late)
    assert scaled(function) == 2
    sys.modules["late_settings"].rate = 5.0
    assert scaled(function) == 5
    sys.modules.pop("late_settings")


def test_an_update_that_imports_its_number_reads_it_at_each_step(settings):
    class Descent(st.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 1.0})

        def update(self, p, g, *, lr):
            from cfgpkg.settings import rate

            p.sub_(lr * rate * g)

    p = torch.nn.Parameter(torch.zeros(1))
    optimizer, p.grad = Descent([p]), torch.ones(1)
    optimizer.step()
    settings.rate = 5.0
    optimizer.step()
    assert p.item() == -7


def set_environ(value):
    os.environ["SUBTENSORS_TEST_RATE"] = str(value)


@pytest.mark.parametrize(
    ("math", "change"),
    [
        (lambda p: p.mul_(getattr(config, which)), lambda x: setattr(config, "rate", x)),
        (lambda p: p.mul_(read_rate(config)), lambda x: setattr(config, "rate", x)),
        (lambda p: p.mul_(read_inner(outer)), lambda x: setattr(config, "rate", x)),
        (lambda p: p.mul_(operator.attrgetter("inner.rate")(outer)), lambda x: setattr(config, "rate", x)),
        (lambda p: p.mul_(chain["rate"]), lambda x: options.update(rate=x)),
        (lambda p: p.mul_(proxy["rate"]), lambda x: options.update(rate=x)),
        (lambda p: p.mul_(texts["rate"]), lambda x: texts.update(rate=x)),
        (lambda p: p.mul_(context.get()), context.set),
        (lambda p: p.mul_(Settings.rate), lambda x: setattr(Settings, "own", x)),
        (lambda p: p.mul_(reference().rate), lambda x: setattr(Holder, "rate", x)),
        (lambda p: p.mul_(weak.rate), lambda x: setattr(Holder, "rate", x)),
        (lambda p: p.mul_(float(os.environ["SUBTENSORS_TEST_RATE"])), set_environ),
        (lambda p: p.mul_(float(os.getenv("SUBTENSORS_TEST_RATE"))), set_environ),
    ],
    ids=range(13),
)
def test_a_number_that_is_read_in_a_roundabout_way_is_read_at_each_call(monkeypatch, math, change):
    monkeypatch.setenv("SUBTENSORS_TEST_RATE", "2.0")
    function = st.fused(math)
    try:
        assert [scaled(function), scaled(function)] == [2, 2]
        change(5.0)
        assert [scaled(function), scaled(function)] == [5, 5]
    finally:
        change(2.0)


numbers = iter([2.0, 3.0])


def by_local_name(p):
    name = "ra" + "tes"[:2]
    p.mul_(getattr(config, name))


@pytest.mark.parametrize(
    ("math", "what"),
    [
        (lambda p: p.mul_(getattr(config, "ra" + str(which)[2:])), "getattr"),
        (by_local_name, "getattr"),
        (lambda p: p.mul_(globals()["rate"]), "globals"),
        (lambda p: p.mul_(eval("rate")), "eval"),
        (lambda p: p.mul_(__import__("cfgpkg").settings.rate), "__import__"),
        (lambda p: p.mul_(next(numbers)), "numbers"),
    ],
)
def test_what_cannot_be_watched_is_refused_with_its_line(settings, math, what):
    with pytest.raises(st.RuleError, match=rf"(?s){what}.*\n  at .*test_read_values_indirect.py:\d+: .*p\.?.*argument"):
        scaled(st.fused(math))


def test_a_literal_name_needs_no_source():
    scope = {"st": st, "config": config}
    exec("function = st.fused(lambda p: p.mul_(getattr(config, 'rate', 7.0)))", scope)
    assert scaled(scope["function"]) == 2


def test_literals_and_constants_of_libraries_are_not_refused():
    length = len([1, 2, 3])

    @st.fused
    def function(p):
        from math import e

        p.mul_(2 * math.pi + torch.pi).add_(e + length + getattr(math, "tau") + p.dtype.itemsize)  # noqa: B009

    expected = 3 * math.pi + math.e + 3 + math.tau + 4
    assert scaled(function) == pytest.approx(expected, rel=1e-6)


class Delegating:
    """An object that asks another one for its attributes."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)


def test_an_object_that_hands_on_attributes_is_not_refused():
    settings = types.SimpleNamespace(rate=2.0)
    delegating = Delegating(settings)
    function = st.fused(lambda p: p.mul_(delegating.rate))
    assert scaled(function) == 2
    settings.rate = 5.0
    assert scaled(function) == 5


@pytest.mark.parametrize("error", [KeyError, RuntimeError])
def test_an_object_may_have_any_error_for_attributes_that_it_has_not(error):
    class Values:
        __slots__ = ("held",)

        def __getattr__(self, name):
            if name != "rate":
                raise error(name)
            return self.held[0]

    class Options(Values):
        pass

    for make in (Values, Options):
        values = make()
        values.held = [2.0]

        @st.fused
        def scale(p, values=values):
            p.mul_(values.rate)

        p = st.TensorList([torch.ones(1)])
        scale(p)
        values.held[0] = 5.0
        scale(p)
        assert p[0].item() == 10.0
