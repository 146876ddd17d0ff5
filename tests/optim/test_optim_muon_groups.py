"""Muon beside AdamW: every form in which parameters are given is split alike, and the optimizer is copied as others."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from subtensors.optim.algorithms.adam import AdamW
from subtensors.optim.algorithms.muon import MuonAdamW, with_adamw


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.layer, self.head = nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5, bias=False)


FORMS: dict[str, Callable[[Net], Any]] = {
    "an iterator": lambda net: net.parameters(),
    "a list": lambda net: list(net.parameters()),
    "names": lambda net: net.named_parameters(),
    "a group with an iterator": lambda net: [{"params": net.parameters()}],
    "groups": lambda net: [{"params": p, "lr": 1e-3} for p in net.parameters()],
}


def step(net: Net, opt: MuonAdamW) -> None:
    for i, p in enumerate(net.parameters()):
        p.grad = torch.full_like(p, 0.1 * (i + 1))
    opt.step()


@pytest.mark.parametrize("form", FORMS)
def test_all_parameters_are_updated_however_they_are_given(form: str) -> None:
    nets = [Net(), Net()]
    for net, given in zip(nets, (FORMS[form], FORMS["a list"]), strict=True):
        opt = with_adamw(net, net.head)(given(net), lr=1e-3)
        assert {id(p) for group in opt.param_groups if group["use_muon"] for p in group["params"]} == {
            id(net.layer.weight)
        }
        step(net, opt)
    torch.testing.assert_close(list(nets[0].parameters()), list(nets[1].parameters()))
    assert all(not torch.equal(p, q) for p, q in zip(nets[0].parameters(), Net().parameters(), strict=True))


def test_parameters_without_a_matrix_are_refused() -> None:
    net = Net()
    for params in ([], [net.layer.bias], [net.embedding.weight]):
        with pytest.raises(ValueError, match="is a matrix of the model's layers"):
            with_adamw(net, net.head)(params)


def test_a_copied_and_a_pickled_optimizer_go_on_as_the_original() -> None:
    net = Net()
    opt = with_adamw(net, net.head)(net.parameters(), lr=1e-2)
    step(net, opt)
    copies = [copy.deepcopy((net, opt)), pickle.loads(pickle.dumps((net, opt)))]
    step(net, opt)
    for model, own in copies:
        step(model, own)
        torch.testing.assert_close(list(model.parameters()), list(net.parameters()))


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_is_not_muons_is_updated_as_adamw_does(dtype: torch.dtype, weight_decay: float) -> None:
    torch.manual_seed(0)
    options = {"lr": 1e-2, "betas": (0.8, 0.95), "weight_decay": weight_decay}
    starts = [torch.randn(4, 3, dtype=dtype), torch.randn(5, dtype=dtype)]
    weights = [[nn.Parameter(t.clone()) for t in starts] for _ in range(2)]
    optimizers = [cls(own, **options) for cls, own in zip((MuonAdamW, AdamW), weights, strict=True)]
    for _ in range(3):
        for p, q in zip(*weights, strict=True):
            p.grad, q.grad = (g := torch.randn_like(p)), g.clone()
        for opt in optimizers:
            opt.step()
    for p, q in zip(*weights, strict=True):
        assert torch.equal(p, q)
        for name, entry in optimizers[1].state[q].items():
            assert torch.equal(optimizers[0].state[p][name], entry)
