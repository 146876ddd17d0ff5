"""The optimizers against torch.optim's classes of the same name, over torch's own sample arguments for them."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from kernels_on_cpu import kernels_on_cpu
from optim_oracle import (
    DTYPES,
    SHAPE_SETS,
    STEPS,
    MakeOptimizer,
    assert_as_accurate,
    exact_maker,
    makers,
    optimizer_info,
    sample_arguments,
    start,
    take_steps,
    train,
)
from optimizers import TORCH_NAMES
from torch.nn import Parameter
from torch.testing._internal.common_optimizers import OptimizerErrorEnum

import subtensors as st


@pytest.mark.parametrize("shapes", SHAPE_SETS.values(), ids=SHAPE_SETS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", TORCH_NAMES)
def test_twenty_steps_end_where_torch_does_for_every_sample_of_optim_db(
    name: str, dtype: torch.dtype, shapes: list[tuple[int, ...]], device: str
) -> None:
    values = start(device, dtype, shapes)
    samples = sample_arguments(name, device, dtype)
    assert len(samples) >= 5
    for sample in samples:
        make, make_theirs = makers(name, sample.kwargs)
        theirs, _ = train(make_theirs, values, dtype)
        truth, _ = train(exact_maker(name, sample.kwargs), values, torch.float64)
        ours, _ = train(make, values, dtype)
        assert_as_accurate(ours, theirs, truth, dtype)
        assert all(p.stride() == v.stride() for p, v in zip(ours, values, strict=True))


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("SGD", {"lr": torch.tensor([0.01]), "momentum": 0.9}),
        ("Adam", {"lr": torch.tensor(0.01), "betas": (torch.tensor(0.9), torch.tensor([0.99]))}),
        ("AdamW", {"lr": torch.tensor(0.01), "amsgrad": True, "weight_decay": 1}),
        ("Adam", {"lr": 1, "betas": (0.0, 0.9)}),
        ("Adam", {"lr": np.float32(0.01), "weight_decay": np.int64(1)}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_hyperparameters_of_any_kind_of_number_do_what_they_do_in_torch(
    name: str, kwargs: dict[str, Any], dtype: torch.dtype
) -> None:
    make, make_theirs = makers(name, kwargs)
    values = start("cpu", dtype)
    theirs, _ = train(make_theirs, values, dtype)
    truth, _ = train(make_theirs, values, torch.float64)
    # A tensor among the hyperparameters is float32, and so is what is computed from it, whatever the parameters are.
    assert_as_accurate(train(make, values, dtype)[0], theirs, truth, torch.float32)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "lr": 0.1}),
        ("Adam", {"amsgrad": True, "weight_decay": 0.1, "maximize": True}),
        ("AdamW", {}),
        ("NAdam", {"weight_decay": 0.1, "decoupled_weight_decay": True}),
        ("RAdam", {"weight_decay": 0.1}),
        ("Adamax", {"weight_decay": 0.1}),
        ("Adadelta", {"weight_decay": 0.1}),
        ("Adagrad", {"initial_accumulator_value": 0.1}),
        ("RMSprop", {"centered": True, "momentum": 0.1}),
        ("Rprop", {}),
        ("ASGD", {"t0": 5.0}),
    ],
)
def test_complex_parameters_end_where_torch_does(
    name: str, kwargs: dict[str, Any], dtype: torch.dtype, device: str
) -> None:
    values = start(device, dtype)
    make, make_theirs = makers(name, kwargs)
    theirs, _ = train(make_theirs, values, dtype)
    truth, _ = train(exact_maker(name, kwargs), values, torch.complex128)
    ours, optimizer = train(make, values, dtype)
    assert_as_accurate(ours, theirs, truth, torch.empty(0, dtype=dtype).real.dtype)
    assert optimizer.state.keys() in ({*ours}, set())
    for p, state in optimizer.state.items():
        assert {t.dtype for name, t in state.items() if name not in ("step", "mu_product", "eta", "mu")} == {dtype}
        assert p.dtype == dtype


@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_a_lazily_conjugated_gradient_is_read_as_its_conjugate(name: str, device: str) -> None:
    gradient = torch.tensor([1 + 2j, -3j], device=device)
    ends = []
    for grad in (gradient.conj(), gradient.conj().resolve_conj()):
        p = Parameter(torch.ones_like(gradient))
        p.grad = grad
        getattr(st.optim, name)([p], lr=0.1, max_norm=1.0).step()
        ends.append(p.detach())
    assert torch.equal(*ends)
    assert ends[0].isfinite().all()


def test_a_group_of_several_dtypes_ends_where_torch_does(device: str) -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.float16]
    shapes = [(5, 3), (4,), (), (2, 2)]
    values = [v.to(dtype) for v, dtype in zip(start(device, torch.float64, shapes), dtypes, strict=True)]

    def ending(make: MakeOptimizer, widened: bool) -> list[Parameter]:
        params = [Parameter(v.double() if widened else v.clone()) for v in values]
        take_steps(make(params), params, values, range(STEPS))
        return params

    make, make_theirs = makers("Adam", {"lr": 0.01, "eps": 1e-3})
    ours, theirs, truth = ending(make, False), ending(make_theirs, False), ending(make_theirs, True)
    for i, dtype in enumerate(dtypes):
        assert_as_accurate(ours[i : i + 1], theirs[i : i + 1], truth[i : i + 1], dtype)


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("SGD", {"lr": 0.01, "momentum": 0.9, "dampening": 0.5}),
        ("Adam", {"lr": 0.01, "amsgrad": True, "maximize": True}),
        ("AdamW", {"lr": torch.tensor(0.01)}),
        ("NAdam", {"weight_decay": 0.1}),
        ("RAdam", {"betas": (0.9, 0.5)}),
        ("RAdam", {"betas": (0.9, 0.999)}),
        ("Adamax", {"weight_decay": 0.1}),
        ("Adadelta", {"maximize": True}),
        ("Adagrad", {"lr_decay": 0.5, "initial_accumulator_value": 0.1}),
        ("RMSprop", {"centered": True, "momentum": 0.1}),
        ("RMSprop", {"weight_decay": 0.1}),
        ("Rprop", {"lr": 0.1}),
        ("ASGD", {"t0": 1.0, "weight_decay": 0.1}),
    ],
)
def test_the_kernels_of_a_step_end_where_torch_does(name: str, kwargs: dict[str, Any]) -> None:
    values = start("cpu", torch.float32, [(7,), (), (0,), (3, 5), (1030,)])
    make, make_theirs = makers(name, kwargs)
    with kernels_on_cpu():
        ours, _ = train(make, values, torch.float32, 3)
    theirs, _ = train(make_theirs, values, torch.float32, 3)
    truth, _ = train(exact_maker(name, kwargs), values, torch.float64, 3)
    assert_as_accurate(ours, theirs, truth, torch.float32)


# numpy, which runs the kernels here, warns of 0/0 in lanes beyond the end.
@pytest.mark.filterwarnings("ignore:invalid value encountered in divide:RuntimeWarning")
def test_the_kernels_of_a_step_skip_an_overflow_and_keep_masters() -> None:
    params = [Parameter(torch.ones(shape, dtype=torch.bfloat16)) for shape in [(5,), (), (33, 40)]]
    optimizer = st.optim.Lion(params, lr=0.125, master_weights=True)
    for found_inf in (0.0, 1.0, 0.0):
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.found_inf, optimizer.grad_scale = torch.tensor(found_inf), torch.tensor(2.0)
        with kernels_on_cpu():
            optimizer.step()
    assert [set(p.flatten().tolist()) for p in params] == [{0.75}] * 3
    assert [set(optimizer.state[p]["master_param"].flatten().tolist()) for p in params] == [{0.75}] * 3


@pytest.mark.parametrize("name", TORCH_NAMES)
def test_arguments_that_torch_refuses_are_refused_alike(name: str) -> None:
    info = optimizer_info(name)
    errors = info.optim_error_inputs_func(device=torch.device("cpu"), dtype=torch.float32)
    assert len(errors) >= 6
    for error in errors:
        assert error.error_on is OptimizerErrorEnum.CONSTRUCTION_ERROR
        sample = error.optimizer_error_input
        params = [Parameter(torch.randn(1, 1))] if sample.params is None else sample.params
        with pytest.raises(error.error_type, match=error.error_regex or re.escape("")):
            getattr(st.optim, name)(params, **sample.kwargs)
