"""Fused calls and lists inside the transforms of torch.func and under forward-mode differentiation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

import subtensors as st


@st.fused
def cube(x: Tensor) -> Tensor:
    return x * x * x


@st.fused
def triple(x: Tensor) -> None:
    x.mul_(3)


def through_lists(tree: Any) -> Any:
    """Triple a tensor in place, and return its cube."""
    copies = st.TensorList(tree).clone()
    triple(copies)
    return (copies + cube(st.TensorList(tree))).tree()


def one_by_one(tree: Any) -> Any:
    return {name: 3 * t + t * t * t for name, t in tree.items()}


def total(tree: Any) -> Tensor:
    return torch.stack([t.sum() for t in tree.values()]).sum()


def tree(device: str, *batch: int) -> dict[str, Tensor]:
    w, b = torch.arange(6.0), torch.arange(3.0) - 1
    return {"w": w.view(2, 3).expand(*batch, 2, 3).to(device), "b": b.expand(*batch, 3).to(device)}


def test_torch_func_grad_differentiates_a_call(device: str) -> None:
    actual = torch.func.grad(lambda t: total(through_lists(t)))(tree(device))
    torch.testing.assert_close(actual, torch.func.grad(lambda t: total(one_by_one(t)))(tree(device)))


def test_vmap_maps_over_each_element(device: str) -> None:
    torch.testing.assert_close(torch.vmap(through_lists)(tree(device, 4)), one_by_one(tree(device, 4)))


def test_forward_mode_differentiates_a_call(device: str) -> None:
    x = tree(device)
    actual = torch.func.jvp(through_lists, (x,), (x,))
    torch.testing.assert_close(actual, torch.func.jvp(one_by_one, (x,), (x,)))
    with forward_ad.dual_level():
        duals = {name: forward_ad.make_dual(t, t) for name, t in x.items()}
        tangents = {name: forward_ad.unpack_dual(t).tangent for name, t in through_lists(duals).items()}
    torch.testing.assert_close(tangents, actual[1])


def test_a_plan_made_outside_of_a_transform_is_not_used_inside(device: str) -> None:
    through_lists(tree(device))
    torch.func.grad(lambda t: total(through_lists(t)))(tree(device))
    test_forward_mode_differentiates_a_call(device)
    torch.testing.assert_close(through_lists(tree(device)), one_by_one(tree(device)))
    assert "torch ops" in cube.explain(st.TensorList([torch.ones(3)]))
