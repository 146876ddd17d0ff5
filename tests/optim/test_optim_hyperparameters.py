"""Hyperparameters are checked wherever a group takes them, as torch's classes check them in their constructors."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from optimizers import CASES
from small_models import ones
from torch.nn import Parameter

import subtensors as st
from subtensors.optim.options import DEFAULTS

NAN = float("nan")
OPTIONS = {"max_norm": 1.0, "ema": 0.5}


def numeric(cls: Any) -> Iterator[tuple[str, Any]]:
    """The hyperparameters of a class that are numbers, or tuples of them, with their defaults."""
    for name, parameter in inspect.signature(cls.__init__).parameters.items():
        numbers = parameter.default if isinstance(parameter.default, tuple) else (parameter.default,)
        if any(isinstance(x, int | float) and not isinstance(x, bool) for x in numbers):
            yield name, parameter.default


def spoiled(default: Any, bad: Any) -> Iterator[Any]:
    """A default with `bad` in it, in each place."""
    if not isinstance(default, tuple):
        yield bad
        return
    yield from ((*default[:i], bad, *default[i + 1 :]) for i in range(len(default)))
    yield bad


def param() -> Parameter:
    return Parameter(torch.ones(2, 2))


def refused(make: Callable[[], object]) -> Exception | None:
    try:
        make()
    except (TypeError, ValueError, IndexError) as error:
        return error
    return None


SWEEP = [
    (case.name, name, value)
    for case in CASES
    for name, default in numeric(case.cls)
    for bad in (NAN, -1, "x")
    for value in spoiled(default, bad)
]


def test_the_sweep_covers_every_class_and_its_learning_rate() -> None:
    assert {(name, "lr") for name in (case.name for case in CASES)} <= {(name, own) for name, own, _ in SWEEP}
    assert len(SWEEP) > 300


@pytest.mark.parametrize("place", ["constructor", "group", "added group"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_place_refuses_what_torch_refuses_and_nan_and_strings(case: Any, place: str) -> None:
    for name, value in [(own, value) for of, own, value in SWEEP if of == case.name]:
        optimizer = case.cls([param()])

        def make(name: str = name, value: Any = value, optimizer: Any = optimizer) -> None:
            if place == "constructor":
                case.cls([param()], **{name: value})
            elif place == "group":
                case.cls([{"params": [param()], name: value}])
            else:
                optimizer.add_param_group({"params": [param()], name: value})

        error = refused(make)
        if error is not None:
            assert len(optimizer.param_groups) == 1
            assert "SymFloat" not in str(error)
        numbers = value if isinstance(value, tuple) else (value,)
        if any(x == "x" for x in numbers):
            assert isinstance(error, TypeError), (name, value, error)
            assert str(error).startswith(f"Invalid {name}: "), error
        elif any(x is not None and math.isnan(x) for x in numbers):
            assert isinstance(error, ValueError | TypeError), (name, value, error)
        elif hasattr(torch.optim, case.name):
            theirs = refused(lambda name=name, value=value: one_step(getattr(torch.optim, case.name), {name: value}))
            is_known = (case.name, name, value) in REFUSED_HERE
            assert is_known or (error is None) == (theirs is None), (name, value, error, theirs)


def one_step(cls: Any, arguments: dict[str, Any]) -> None:
    p = param()
    optimizer = cls([p], **arguments)
    p.grad = torch.ones_like(p)
    optimizer.step()


REFUSED_HERE = {("Muon", "ns_steps", -1)}
"""Values that torch takes, and that make no sense."""


@pytest.mark.parametrize(
    ("value", "message"), [("x", "Invalid lr: 'x'; expected a number"), (NAN, "Invalid lr: nan"), ((1,), "Invalid lr")]
)
def test_a_class_of_the_users_own_takes_numbers_where_its_constructor_says_so(value: Any, message: str) -> None:
    class Own(st.optim.Optimizer):
        def __init__(self, params: Any, lr: float = 0.1, mode: Any = "fast") -> None:
            super().__init__(params, {"lr": lr, "mode": mode})

        def update(self, p: Any, g: Any, *, lr: float, mode: str) -> None:
            p.sub_(lr * g)

    (p,) = ones(1)
    Own([p], lr=-1.0)
    Own([p], mode="slow")
    Own([{"params": [p], "mode": None}])
    for make in (lambda: Own([p], lr=value), lambda: Own([{"params": [p], "lr": value}])):
        with pytest.raises((TypeError, ValueError), match=message):
            make()


def test_a_class_whose_annotations_alone_say_so_takes_numbers_too() -> None:
    class Own(st.optim.Optimizer):
        def update(self, p: torch.Tensor, g: torch.Tensor, *, rate: float, mode: str) -> None:
            p.sub_(rate * g)

    (p,) = ones(1)
    Own([p], {"rate": 0.5, "mode": "x"})
    with pytest.raises(TypeError, match="Invalid rate: 'x'; expected a number"):
        Own([p], {"rate": "x", "mode": "x"})
    with pytest.raises(ValueError, match="Invalid rate: nan"):
        Own([{"params": [p], "rate": NAN}], {"mode": "x"})


def test_tensors_and_numbers_of_numpy_are_numbers() -> None:
    (p,) = ones(1)
    rates = (torch.tensor(0.1), torch.tensor([0.1]), np.float32(0.1), np.int64(1), True)
    for lr in rates:
        optimizer = st.optim.Lion([{"params": [p], "lr": lr}], lr=lr)
        assert optimizer.param_groups[0]["lr"] is lr
        optimizer.step()
    st.optim.Adam([p], betas=[0.9, 0.99])
    st.optim.Adam([p], betas=(torch.tensor(0.9), torch.tensor(0.99)))
    for bad in (torch.tensor(NAN), torch.tensor(-1.0), torch.ones(2)):
        with pytest.raises(ValueError, match="lr"):
            st.optim.Lion([p], lr=bad)


@pytest.mark.parametrize(
    ("make", "name", "value", "expected"),
    [
        (st.optim.SGD, "lr", "x", "a number"),
        (st.optim.SGD, "lr", None, "a number"),
        (st.optim.SGD, "weight_decay", None, "a number"),
        (st.optim.ASGD, "lr", "x", "a number"),  # whose state is made of it
        (st.optim.ASGD, "lambd", [1], "a number"),
        (st.optim.AdamW, "betas", (0.9, "x"), "2 numbers"),
        (st.optim.AdamW, "betas", (0.9, None), "2 numbers"),
        (st.optim.Lion, "lr", {}, "a number"),
    ],
)
def test_what_is_no_number_in_a_group_later_is_refused_by_the_step(
    make: Any, name: str, value: Any, expected: str
) -> None:
    p, q = ones(2)
    optimizer = make([{"params": [p]}, {"params": [q]}], lr=0.1)
    for is_first in (True, False):
        before = optimizer.param_groups[1][name]
        optimizer.param_groups[1][name] = value
        message = re.escape(f"Invalid {name}: {value!r} in param_groups[1]; expected {expected}")
        with pytest.raises(TypeError, match=message):
            optimizer.step()
        optimizer.param_groups[1][name] = before
        if is_first:
            optimizer.step()


def test_a_number_that_may_be_none_may_be_none_later() -> None:
    p = Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    optimizer = st.optim.AdEMAMix([p], alpha_warmup=9)
    optimizer.param_groups[0]["alpha_warmup"] = None
    optimizer.step()
    assert (p < 1).all()


def test_a_loaded_string_is_refused_and_a_number_out_of_range_is_not_as_in_torch() -> None:
    (p,) = ones(1)
    optimizer = st.optim.SGD([p], lr=0.1)
    saved = optimizer.state_dict()
    saved["param_groups"][0]["lr"] = "x"
    with pytest.raises(TypeError, match="Invalid lr: 'x'; expected a number"):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.1
    saved["param_groups"][0]["lr"] = -1e-20  # a schedule may have ended there
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == -1e-20
    assert st.optim.convert(torch.optim.SGD([p], lr=0.1)).param_groups[0]["lr"] == 0.1


def test_a_converted_optimizer_keeps_a_number_that_a_schedule_has_brought_out_of_range() -> None:
    (p,) = ones(1)
    theirs = torch.optim.SGD([p], lr=0.1)
    theirs.param_groups[0]["lr"] = -1e-20
    assert st.optim.convert(theirs).param_groups[0]["lr"] == -1e-20


@pytest.mark.parametrize("value", [NAN, "x", -1.0])
@pytest.mark.parametrize("option", OPTIONS)
def test_options_are_numbers_too(option: str, value: Any) -> None:
    for make in (
        lambda: st.optim.SGD(ones(1), **{option: value}),
        lambda: st.optim.SGD([{"params": ones(1), option: value}]),
    ):
        with pytest.raises(ValueError, match=f"Invalid {option}: {value!r}; expected"):
            make()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_docstring_has_each_argument_and_option_once(case: Any) -> None:
    names = [name for name in inspect.signature(case.cls).parameters if name != "options"]
    section = case.cls.__doc__.split("    Args:\n")[1].split("\n\n")[0]
    documented = re.findall(r"^        (\w+): \S", section, re.MULTILINE)
    assert documented == list(dict.fromkeys((*names, *DEFAULTS)))
    assert "\n    Raises:\n        ValueError: " in case.cls.__doc__


@pytest.mark.parametrize("name", ["Lion", "Muon", "SOAP", "RMSprop"])
def test_the_flags_of_torch_are_options_of_every_class(name: str) -> None:
    cls, weights = getattr(st.optim, name), [param(), param()]
    descends, ascends = cls([weights[0]]), cls([weights[1]], maximize=True, foreach=False, capturable=True)
    for sign, p, optimizer in zip((1, -1), weights, (descends, ascends), strict=True):
        for _ in range(2):
            p.grad = sign * torch.eye(2)
            optimizer.step()
    assert torch.equal(*weights)
    assert not torch.equal(weights[0], param())
    assert ascends.param_groups[0]["capturable"] is True
    with pytest.raises(ValueError, match="differentiable=True is not supported") as error:
        cls([param()], differentiable=True)
    assert ("can differentiate" in str(error.value)) == hasattr(torch.optim, name)


@pytest.mark.parametrize(
    "wrong", [torch.ones(3), torch.ones(0), [True], np.ones(2)], ids=["several", "none", "list", "numpy"]
)
@pytest.mark.parametrize("name", ["foreach", "maximize", "differentiable", "master_weights", "amsgrad"])
def test_a_flag_that_is_neither_on_nor_off_is_refused_by_name(name: str, wrong: Any) -> None:
    with pytest.raises(ValueError, match=f"Invalid {name}: .*; expected True or False"):
        st.optim.Adam(ones(1), **{name: wrong})


@pytest.mark.parametrize("name", ["max_norm", "ema", "accumulate"])
def test_an_option_that_is_one_number_refuses_several_by_name(name: str) -> None:
    for wrong in (torch.ones(3), np.ones(2)):
        with pytest.raises(ValueError, match=f"Invalid {name}: "):
            st.optim.SGD(ones(1), **{name: wrong})


def test_a_number_may_be_true() -> None:
    ends = []
    for make in (st.optim.ASGD, torch.optim.ASGD):
        w = Parameter(torch.ones(2))
        w.grad = torch.ones(2)
        make([w], t0=True).step()
        ends.append(w.detach())
    torch.testing.assert_close(*ends)


def test_a_subclass_may_have_a_list_with_none_for_its_default() -> None:
    class Mine(st.optim.Adafactor):
        def __init__(self, params: Any, lr: float = 1e-2, eps: Any = [None, 1e-3], **options: Any) -> None:  # noqa: B006  # as a user may write it
            super().__init__(params, lr, -0.8, eps, **options)

    Mine(ones(1)).step()
