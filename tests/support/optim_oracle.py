"""The oracle of optimizers: the same steps by torch.optim, and by it in float64, one tensor after the other."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

import subtensors as st

if TYPE_CHECKING:
    from torch.testing._internal.common_optimizers import OptimizerInfo, OptimizerInput

SHAPES = [(), (0,), (1,), (7,), (3, 5), (2, 3, 4), (65, 33)]
STEPS = 20
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
SHAPE_SETS = {"many tensors": SHAPES, "one tensor": [(5, 3)]}

# Torch's Adafactor divides by the root of a tensor's size: none is empty.
ADAFACTOR_SHAPES = [(), (1,), (7,), (3, 5), (3, 5), (2, 3, 4), (65, 33), (1, 4)]
ADAFACTOR_SHAPE_SETS = {"many tensors": ADAFACTOR_SHAPES, "one matrix": [(13, 5)], "one vector": [(65,)]}

MakeOptimizer = Callable[[list[Parameter]], torch.optim.Optimizer]


def random_tensors(
    device: str, dtype: torch.dtype, shapes: Sequence[tuple[int, ...]] = SHAPES, seed: int = 0
) -> list[Tensor]:
    """The same values on every device."""
    generator = torch.Generator().manual_seed(seed)
    exact = torch.complex128 if dtype.is_complex else torch.float64
    return [torch.randn(shape, generator=generator, dtype=exact).to(device, dtype) for shape in shapes]


def start(device: str, dtype: torch.dtype, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[Tensor]:
    """Initial values; matrices are stored column by column, so that strides are not the default ones."""
    values = random_tensors(device, dtype, shapes)
    return [v.mT.contiguous().mT if v.dim() == 2 else v for v in values]


def train(
    make: MakeOptimizer, values: Iterable[Tensor], dtype: torch.dtype, steps: int = STEPS, first: int = 0
) -> tuple[list[Parameter], torch.optim.Optimizer]:
    """Take steps from `values` in `dtype`, on gradients that were rounded to the dtype of `values`."""
    params = [Parameter(v.detach().to(dtype, copy=True)) for v in values]
    optimizer = make(params)
    take_steps(optimizer, params, values, range(first, first + steps))
    return params, optimizer


def take_steps(
    optimizer: torch.optim.Optimizer, params: list[Parameter], values: Iterable[Tensor], steps: Iterable[int]
) -> None:
    """Take the steps of these numbers, which decide the gradients."""
    for number in steps:
        for p, v in zip(params, values, strict=True):
            exact = torch.complex128 if p.is_complex() else torch.float64
            (g,) = random_tensors(str(p.device), exact, [p.shape], seed=number + 1)
            p.grad = g.to(v.dtype).to(p.dtype)
        optimizer.step()


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """All values in one float64 vector."""
    parts = [torch.view_as_real(t) if t.is_complex() else t for t in tensors]
    return torch.cat([t.detach().cpu().double().reshape(-1) for t in parts])


def assert_as_accurate(
    ours: Iterable[Tensor], theirs: Iterable[Tensor], truth: Iterable[Tensor], dtype: torch.dtype
) -> None:
    """Assert that ours is as near to the float64 truth as 1.5 times torch's own distance and one rounding to `dtype`.

    In float64 the truth itself is rounded in every step, and so is ours. Where torch's own result is not finite, as
    with an eps that float16 takes for 0, ours may differ by a rounding a step.
    """
    error, bound = error_and_bound(ours, theirs, truth, dtype)
    assert error <= bound, f"{error=:.3g} {bound=:.3g}"


def error_and_bound(
    ours: Iterable[Tensor], theirs: Iterable[Tensor], truth: Iterable[Tensor], dtype: torch.dtype
) -> tuple[float, float]:
    """The distance of ours from the truth, and the largest that is allowed."""
    exact = flat(truth)
    assert torch.isfinite(exact).all()
    error, allowed = (flat(ours) - exact).norm(), 1.5 * (flat(theirs) - exact).norm()
    is_finite = bool(allowed.isfinite())
    rounding = torch.finfo(dtype).eps * exact.norm() * (STEPS if dtype == torch.float64 or not is_finite else 1)
    return float(error), float((allowed if is_finite else 0) + rounding)


@functools.cache
def optimizer_info(name: str) -> OptimizerInfo:
    """Torch's own record of the arguments and devices of one of its optimizers."""
    from torch.testing._internal.common_optimizers import optim_db  # here, since it takes long to import

    return next(info for info in optim_db if info.optim_cls.__name__ == name)


def sample_arguments(name: str, device: str, dtype: torch.dtype) -> list[OptimizerInput]:
    """Torch's samples of the arguments of an optimizer."""
    samples = optimizer_info(name).optim_inputs_func(device=torch.device(device), dtype=dtype)
    # torch builds its tensor hyperparameters on the CPU and lets its optimizers take them there.
    return [s for s in samples if not s.kwargs.get("differentiable")]


def exact_maker(name: str, kwargs: dict[str, Any]) -> MakeOptimizer:
    """A maker of torch's class with numbers in place of tensors and counts on the host, one tensor after the other.

    There it computes one number a tensor in float64; its foreach steps may use float32 for that.
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


def exact_adafactor_maker(kwargs: dict[str, Any], dtype: torch.dtype) -> MakeOptimizer:
    """A maker of torch's Adafactor as it is with parameters of `dtype`, for parameters in float64."""
    eps1, eps2 = kwargs.get("eps", (None, 1e-3))
    eps = (torch.finfo(dtype).eps if eps1 is None else eps1, eps2)
    return lambda params: torch.optim.Adafactor(params, **{**kwargs, "eps": eps})


def makers(name: str, kwargs: dict[str, Any]) -> tuple[MakeOptimizer, MakeOptimizer]:
    """Makers of our class and of torch's with these arguments, each with tensors of its own."""

    def maker(package: Any) -> MakeOptimizer:
        return lambda params: getattr(package, name)(params, **copy.deepcopy(kwargs))  # type: ignore[no-any-return]

    return maker(st.optim), maker(torch.optim)
