"""The optimizers against torch.optim's classes of the same name, over torch's own sample arguments for them."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from kernels_on_cpu import kernels_on_cpu
from small_models import TORCH_NAMES
from torch import Tensor
from torch.nn import Parameter
from torch.testing._internal.common_optimizers import OptimizerErrorEnum, OptimizerInput, optim_db

import subtensors as st

SHAPES = [(), (0,), (1,), (7,), (3, 5), (2, 3, 4), (65, 33)]
STEPS = 20
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
SHAPE_SETS = {"many tensors": SHAPES, "one tensor": [(5, 3)]}
INFOS = {info.optim_cls.__name__: info for info in optim_db if info.optim_cls.__name__ in [*TORCH_NAMES, "Adafactor"]}

MakeOptimizer = Callable[[list[Parameter]], torch.optim.Optimizer]


def random_tensors(
    device: str, dtype: torch.dtype, shapes: Sequence[tuple[int, ...]] = SHAPES, seed: int = 0
) -> list[Tensor]:
    """The same values on every device."""
    generator = torch.Generator().manual_seed(seed)
    exact = torch.complex128 if dtype.is_complex else torch.float64
    return [torch.randn(shape, generator=generator, dtype=exact).to(device, dtype) for shape in shapes]


def start(device: str, dtype: torch.dtype, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[Tensor]:
    """Values to begin with; matrices lie column after column, so that strides are not the default ones."""
    values = random_tensors(device, dtype, shapes)
    return [v.mT.contiguous().mT if v.dim() == 2 else v for v in values]


def train(
    make: MakeOptimizer, values: Iterable[Tensor], dtype: torch.dtype, steps: int = STEPS, first: int = 0
) -> tuple[list[Parameter], torch.optim.Optimizer]:
    """`steps` steps from `values`, held as `dtype`, on gradients that were rounded to the dtype of `values`."""
    params = [Parameter(v.detach().to(dtype, copy=True)) for v in values]
    optimizer = make(params)
    take_steps(optimizer, params, values, range(first, first + steps))
    return params, optimizer


def take_steps(
    optimizer: torch.optim.Optimizer, params: list[Parameter], values: Iterable[Tensor], steps: Iterable[int]
) -> None:
    for number in steps:
        for p, v in zip(params, values, strict=True):
            exact = torch.complex128 if p.is_complex() else torch.float64
            (g,) = random_tensors(str(p.device), exact, [p.shape], seed=number + 1)
            p.grad = g.to(v.dtype).to(p.dtype)
        optimizer.step()


def flat(tensors: Iterable[Tensor]) -> Tensor:
    parts = [torch.view_as_real(t) if t.is_complex() else t for t in tensors]
    return torch.cat([t.detach().cpu().double().reshape(-1) for t in parts])


def assert_as_accurate(
    ours: Iterable[Tensor], theirs: Iterable[Tensor], truth: Iterable[Tensor], dtype: torch.dtype
) -> None:
    """Ours is as near to the float64 truth as 1.5 times torch's own distance and one rounding to `dtype`.

    In float64 the truth itself is rounded in every step, and so is ours. Where torch's own result is not finite, as
    with an eps that float16 takes for 0, ours may differ by a rounding a step.
    """
    error, bound = error_and_bound(ours, theirs, truth, dtype)
    assert error <= bound, f"{error=:.3g} {bound=:.3g}"


def error_and_bound(
    ours: Iterable[Tensor], theirs: Iterable[Tensor], truth: Iterable[Tensor], dtype: torch.dtype
) -> tuple[float, float]:
    """How far ours is from the truth, and how far it may be."""
    exact = flat(truth)
    assert torch.isfinite(exact).all()
    error, allowed = (flat(ours) - exact).norm(), 1.5 * (flat(theirs) - exact).norm()
    is_finite = bool(allowed.isfinite())
    rounding = torch.finfo(dtype).eps * exact.norm() * (STEPS if dtype == torch.float64 or not is_finite else 1)
    return float(error), float((allowed if is_finite else 0) + rounding)


def sample_arguments(name: str, device: str, dtype: torch.dtype) -> list[OptimizerInput]:
    samples = INFOS[name].optim_inputs_func(device=torch.device(device), dtype=dtype)
    # torch builds its tensor hyperparameters on the CPU and lets its optimizers take them there.
    return [s for s in samples if not s.kwargs.get("differentiable")]


def exact_maker(name: str, kwargs: dict[str, Any]) -> MakeOptimizer:
    """Torch's class with numbers for tensors and counts kept on the host, one tensor after the other.

    There it computes in float64 what is one number a tensor; its foreach steps may take float32 for that.
    """

    def number(value: Any) -> Any:
        return (
            tuple(map(number, value))
            if isinstance(value, tuple)
            else value.item()
            if isinstance(value, Tensor)
            else value
        )

    plain = {k: number(v) for k, v in kwargs.items() if k not in ("capturable", "fused")} | {"foreach": False}
    return lambda params: getattr(torch.optim, name)(params, **plain)  # type: ignore[no-any-return]


def makers(name: str, kwargs: dict[str, Any]) -> tuple[MakeOptimizer, MakeOptimizer]:
    """Ours and torch's class with these arguments, each with tensors of its own."""

    def maker(package: Any) -> MakeOptimizer:
        return lambda params: getattr(package, name)(params, **copy.deepcopy(kwargs))  # type: ignore[no-any-return]

    return maker(st.optim), maker(torch.optim)


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
def test_a_gradient_that_is_conjugated_where_it_lies_is_read_as_its_conjugate(name: str, device: str) -> None:
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
    info = INFOS[name]
    errors = info.optim_error_inputs_func(device=torch.device("cpu"), dtype=torch.float32)
    assert len(errors) >= 6
    for error in errors:
        assert error.error_on is OptimizerErrorEnum.CONSTRUCTION_ERROR
        sample = error.optimizer_error_input
        params = [Parameter(torch.randn(1, 1))] if sample.params is None else sample.params
        with pytest.raises(error.error_type, match=error.error_regex or re.escape("")):
            getattr(st.optim, name)(params, **sample.kwargs)
