"""Adafactor against torch's, over torch's own sample arguments for it."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from kernels_on_cpu import kernels_on_cpu
from optim_oracle import (
    ADAFACTOR_SHAPE_SETS,
    ADAFACTOR_SHAPES,
    DTYPES,
    STEPS,
    assert_as_accurate,
    exact_adafactor_maker,
    flat,
    start,
    take_steps,
    train,
)
from programs import Lowering, each_kernel_lowering
from torch.nn import Parameter
from torch.testing._internal.common_optimizers import OptimizerErrorEnum, optim_db

import subtensors as st
from subtensors.optim.algorithms.adafactor import _descend_factored

(INFO,) = (info for info in optim_db if info.optim_cls is torch.optim.Adafactor)
SAMPLES = [sample.kwargs for sample in INFO.optim_inputs_func(device="cpu")]


@pytest.mark.parametrize("shapes", ADAFACTOR_SHAPE_SETS.values(), ids=ADAFACTOR_SHAPE_SETS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_twenty_steps_end_where_torch_does_for_every_sample_of_optim_db(
    dtype: torch.dtype, shapes: list[tuple[int, ...]], device: str
) -> None:
    values = start(device, dtype, shapes)
    assert len(SAMPLES) >= 5
    for kwargs in [*SAMPLES, {"lr": 0.02, "eps": (1e-6, 1e-2)}]:
        theirs, _ = train(lambda p: torch.optim.Adafactor(p, **kwargs), values, dtype)  # noqa: B023
        truth, _ = train(exact_adafactor_maker(kwargs, dtype), values, torch.float64)
        ours, _ = train(lambda p: st.optim.Adafactor(p, **kwargs), values, dtype)  # noqa: B023
        assert_as_accurate(ours, theirs, truth, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_learning_rate_may_be_a_tensor(dtype: torch.dtype) -> None:
    values = start("cpu", dtype, ADAFACTOR_SHAPES)
    kwargs: dict[str, Any] = {"lr": torch.tensor(0.02), "weight_decay": 0.1}
    theirs, _ = train(lambda p: torch.optim.Adafactor(p, **kwargs), values, dtype)
    truth, _ = train(exact_adafactor_maker(kwargs, dtype), values, torch.float64)
    ours, _ = train(lambda p: st.optim.Adafactor(p, **kwargs), values, dtype)
    # It is float32, and so is what torch computes from it.
    assert_as_accurate(ours, theirs, truth, torch.float32)


# numpy, which runs the kernels here, warns of 0/0 in lanes beyond the end.
@pytest.mark.filterwarnings("ignore:invalid value encountered in divide:RuntimeWarning")
def test_the_kernels_of_a_step_end_where_torch_does() -> None:
    values = start("cpu", torch.float32, [(7,), (), (3, 5), (3, 5), (40, 30)])
    kwargs: dict[str, Any] = {"weight_decay": 0.1, "d": 1.5}
    with kernels_on_cpu():
        ours, _ = train(lambda p: st.optim.Adafactor(p, **kwargs), values, torch.float32, 3)
    theirs, _ = train(lambda p: torch.optim.Adafactor(p, **kwargs), values, torch.float32, 3)
    truth, _ = train(exact_adafactor_maker(kwargs, torch.float32), values, torch.float64, 3)
    assert_as_accurate(ours, theirs, truth, torch.float32)


@each_kernel_lowering
def test_matrices_of_many_shapes_are_one_batch_and_nothing_of_their_size_is_made(lowering: Lowering) -> None:
    device = lowering.device
    params = [Parameter(torch.ones(shape, device=device)) for shape in [(3, 5), (4, 2), (3, 5), (7,), (2, 3, 4)]]
    optimizer = st.optim.Adafactor(params)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert [len(batch.params) for batch in optimizer._updater.groups[0].batches] == [3, 1, 1]
    with lowering.running():
        x, row, column = (st.TensorList([t.to(device)]) for t in (torch.ones(3, 5), torch.ones(3, 1), torch.ones(3, 5)))
        row = row.like([t.expand(3, 5) for t in row.tensors])
        step, mean = (st.TensorList([torch.ones((), device=device)]) for _ in range(2))
        values: Any = {"lr": 0.1, "d": 1.0, "eps": (None, 1e-3), "weight_decay": None}
        text = st.explain(_descend_factored, x, x.clone(), row, column, mean, step, values)
    assert text.count("over elements") == 2
    assert "copied" not in text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("steps", [0, 1, 7])
@pytest.mark.parametrize("ours_first", [True, False], ids=["ours to torch", "torch to ours"])
def test_training_goes_on_with_the_other_package_from_a_saved_state(
    steps: int, ours_first: bool, dtype: torch.dtype, device: str
) -> None:
    first, second = (st.optim, torch.optim) if ours_first else (torch.optim, st.optim)
    values = start(device, dtype, ADAFACTOR_SHAPES)
    params, optimizer = train(lambda p: first.Adafactor(p), values, dtype, steps)
    saved = copy.deepcopy(optimizer.state_dict())
    theirs_saved = train(lambda p: torch.optim.Adafactor(p), values, dtype, steps)[1].state_dict()
    assert saved["param_groups"] == theirs_saved["param_groups"]
    assert {
        key: {name: (t.shape, t.dtype, t.device) for name, t in state.items()} for key, state in saved["state"].items()
    } == {
        key: {name: (t.shape, t.dtype, t.device) for name, t in state.items()}
        for key, state in theirs_saved["state"].items()
    }
    continued = second.Adafactor(params)
    continued.load_state_dict(saved)
    take_steps(continued, params, values, range(steps, steps + 4))
    theirs, _ = train(lambda p: torch.optim.Adafactor(p), values, dtype, steps + 4)
    truth, _ = train(exact_adafactor_maker({}, dtype), values, torch.float64, steps + 4)
    assert_as_accurate(params, theirs, truth, dtype)


def test_a_converted_optimizer_goes_on_where_torch_left_off() -> None:
    values = start("cpu", torch.float32, ADAFACTOR_SHAPES)
    params, optimizer = train(lambda p: torch.optim.Adafactor(p), values, torch.float32, 3)
    ours = st.optim.convert(optimizer)
    assert type(ours) is st.optim.Adafactor
    take_steps(ours, params, values, range(3, 6))
    theirs, _ = train(lambda p: torch.optim.Adafactor(p), values, torch.float32, 6)
    truth, _ = train(exact_adafactor_maker({}, torch.float32), values, torch.float64, 6)
    assert_as_accurate(params, theirs, truth, torch.float32)


def test_the_learning_rate_is_dynamic(device: str) -> None:
    values = start(device, torch.float64, ADAFACTOR_SHAPES)

    def trained(package: Any) -> list[Parameter]:
        params = [Parameter(v.clone()) for v in values]
        optimizer = package.Adafactor(params, lr=0.5)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for number in range(5):
            take_steps(optimizer, params, values, [number])
            schedule.step()
        return params

    assert_as_accurate(trained(st.optim), trained(torch.optim), trained(torch.optim), torch.float64)


def test_a_scaled_step_is_the_step_and_an_overflow_changes_nothing(device: str) -> None:
    values = start(device, torch.float32, ADAFACTOR_SHAPES)
    scaled, optimizer = train(lambda p: st.optim.Adafactor(p), values, torch.float32, 2)
    plain, reference = train(lambda p: st.optim.Adafactor(p), values, torch.float32, 2)
    optimizer.grad_scale, optimizer.found_inf = (torch.tensor(x, device=device) for x in (4.0, 0.0))  # type: ignore[attr-defined]
    for p, q in zip(scaled, plain, strict=True):
        q.grad = torch.ones_like(q)
        p.grad = 4 * torch.ones_like(p)
    optimizer.step()
    reference.step()
    torch.testing.assert_close(flat(scaled), flat(plain))
    before = flat([*scaled, *(t for s in optimizer.state.values() for t in s.values())])
    optimizer.found_inf.fill_(1.0)  # type: ignore[attr-defined]
    for p in scaled:
        p.grad = torch.full_like(p, float("inf"))
    optimizer.step()
    assert torch.equal(flat([*scaled, *(t for s in optimizer.state.values() for t in s.values())]), before)


def test_arguments_that_torch_refuses_are_refused_alike() -> None:
    for error in INFO.optim_error_inputs_func(device=torch.device("cpu"), dtype=torch.float32):
        sample = error.optimizer_error_input
        params = [Parameter(torch.randn(1, 1))] if sample.params is None else sample.params

        if error.error_on is OptimizerErrorEnum.STEP_ERROR:  # of a complex parameter: here it is refused before
            with pytest.raises(ValueError, match=r"is torch\.complex64"):
                st.optim.Adafactor(params, **sample.kwargs)
            continue
        with pytest.raises(error.error_type, match=error.error_regex or re.escape("")):
            st.optim.Adafactor(params, **sample.kwargs)


def test_options_of_every_optimizer_are_taken(device: str) -> None:
    values = start(device, torch.bfloat16, ADAFACTOR_SHAPES)
    options: Any = {"master_weights": True, "max_norm": 0.5, "ema": 0.5}
    params, optimizer = train(lambda p: st.optim.Adafactor(p, **options), values, torch.bfloat16, STEPS)
    for p in params:
        state = optimizer.state[p]
        assert {t.dtype for name, t in state.items() if name != "step"} == {torch.float32}
        assert torch.equal(p, state["master_param"].bfloat16())
        assert "ema" in state


@pytest.mark.parametrize("shape", [(0,), (0, 2), (2, 0), (3, 0, 2)], ids=str)
def test_a_parameter_without_elements_is_passed_over(shape: tuple[int, ...], device: str) -> None:
    params = [Parameter(torch.ones(2, 3, device=device)), Parameter(torch.ones(shape, device=device))]
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer = st.optim.Adafactor(params)
    for _ in range(2):
        optimizer.step()
    assert params[1].shape == optimizer.state[params[1]]["variance"].shape == shape
    assert (params[0] < 1).all()
