"""An update that writes nothing is refused, rather than taken for a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_models import ones
from torch import Tensor, nn

import subtensors as st

Update = Callable[..., Any]


def optimizer_of(update: Update, base: Any = st.optim.Optimizer, **declared: Any) -> Any:
    return type("Mine", (base,), {"update": update, **({"state": declared} if declared else {})})


def out_of_place(self: Any, p: Tensor, g: Tensor, *, lr: float) -> None:
    p = p - lr * g


def returned(self: Any, p: Tensor, g: Tensor, *, lr: float) -> Tensor:
    return p - lr * g


def of_the_gradient_alone(self: Any, p: Tensor, g: Tensor, *, lr: float) -> None:
    g.mul_(-lr)


def empty(self: Any, p: Tensor, g: Tensor, *, lr: float) -> None:
    pass


@pytest.mark.parametrize("update", [out_of_place, returned, of_the_gradient_alone, empty])
@pytest.mark.parametrize("base", [st.optim.Optimizer, st.optim.MatrixOptimizer])
@pytest.mark.parametrize("options", [{}, {"ema": 0.5}, {"max_norm": 1.0}], ids=["plain", "ema", "max_norm"])
def test_an_update_that_writes_nothing_is_refused_with_what_to_write(
    update: Update, base: Any, options: dict[str, Any]
) -> None:
    params = ones(2)
    optimizer = optimizer_of(update, base)(params, {"lr": 0.1}, **options)
    for _ in range(2):
        with pytest.raises(st.RuleError, match=r"Mine.update writes nothing(.|\n)*in place, as in p.sub_\(lr \* g\)"):
            optimizer.step()
    assert all(torch.equal(p, torch.ones_like(p)) for p in params)


def test_it_is_refused_for_narrow_parameters_masters_and_loss_scales_too() -> None:
    for master in (False, True):
        p = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        p.grad = torch.ones_like(p)
        optimizer = optimizer_of(out_of_place)([p], {"lr": 0.1}, master_weights=master)
        optimizer.found_inf, optimizer.grad_scale = torch.zeros(()), torch.ones(())
        with pytest.raises(st.RuleError, match="writes nothing"):
            optimizer.step()


def test_it_is_refused_where_tensors_are_updated_one_by_one() -> None:
    flat = torch.ones(4)
    params = [nn.Parameter(flat[:3]), nn.Parameter(flat[1:])]  # they overlap
    for p in params:
        p.grad = torch.ones_like(p)
    with pytest.raises(st.RuleError, match="writes nothing"):
        optimizer_of(out_of_place)(params, {"lr": 0.1}).step()


def counting(self: Any, p: Tensor, g: Tensor, step: Tensor, *, lr: float) -> None:
    step.add_(1)
    p = p - lr * g


def with_momentum(self: Any, p: Tensor, g: Tensor, buf: Tensor, *, lr: float) -> Tensor:
    buf.mul_(0.9).add_(g)
    return p - lr * buf


@pytest.mark.parametrize(("update", "declared"), [(counting, {}), (with_momentum, {"buf": torch.zeros_like})])
def test_an_update_that_writes_state_and_drops_the_parameters_new_value_is_refused(
    update: Update, declared: dict[str, Any]
) -> None:
    (p,) = ones(1)
    with pytest.raises(st.RuleError, match=r"Mine\.update changes no parameter"):
        optimizer_of(update, **declared)([p], {"lr": 0.1}).step()


def reassigning(self: Any, p: Tensor, g: Tensor, m: Tensor, *, lr: float) -> None:
    m = 0.9 * m + 0.1 * g
    p.sub_(lr * m)


@pytest.mark.parametrize("base", [st.optim.Optimizer, st.optim.MatrixOptimizer])
def test_an_update_that_assigns_to_state_it_never_writes_is_refused(base: Any) -> None:
    (p,) = ones(1)
    with pytest.raises(st.RuleError, match=r"Mine\.update assigns to 'm' and never writes it(.|\n)*m\.copy_"):
        optimizer_of(reassigning, base, m=torch.zeros_like)([p], {"lr": 0.1}).step()


@pytest.mark.parametrize("base", [st.optim.Optimizer, st.optim.MatrixOptimizer])
def test_an_update_that_only_reads_state_is_taken(base: Any) -> None:
    def update(self: Any, p: Tensor, g: Tensor, start: Tensor, *, pull: float) -> None:
        p.sub_(pull * (p - start) + g)

    (p,) = ones(1)
    optimizer = optimizer_of(update, base, start=lambda p: p.detach().clone())([p], {"pull": 0.5})
    for _ in range(2):
        optimizer.step()
    assert p.item() == pytest.approx(1 - 1 - 0.5)


def test_an_update_that_only_gathers_state_is_taken() -> None:
    def update(self: Any, p: Tensor, g: Tensor, step: Tensor, distance: Tensor, mean: Tensor, *, rate: float) -> None:
        step.add_(1)
        mean.add_(rate * (g - mean))
        distance.copy_((p - mean).norm())

    (p,) = ones(1)
    declared = {"distance": lambda p: p.new_zeros(()), "mean": torch.zeros_like}
    optimizer = optimizer_of(update, **declared)([p], {"rate": 0.5})
    optimizer.step()
    assert p.item() == 1.0
    assert (optimizer.state[p]["mean"].item(), optimizer.state[p]["distance"].item()) == (0.5, 0.5)


def test_an_update_that_returns_what_it_wrote_is_taken() -> None:
    def update(self: Any, p: Tensor, g: Tensor, *, lr: float) -> Tensor:
        return p.sub_(lr * g)

    (p,) = ones(1)
    optimizer_of(update)([p], {"lr": 0.5}).step()
    assert p.item() == 0.5
