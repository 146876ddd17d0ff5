"""Watched parameters and gradients stamp a change of memory or gradient, and behave as plain tensors."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from static_inputs import count_static
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.func import functional_call

import subtensors as st
from subtensors.optim.versions import Version, unwatch, watch

CHANGES: dict[str, Callable[[Any], object]] = {
    "grad =": lambda p: setattr(p, "grad", torch.ones(3)),
    "grad = None": lambda p: setattr(p, "grad", None),
    "_grad =": lambda p: setattr(p, "_grad", None),
    "del grad": lambda p: delattr(p, "grad"),
    "data =": lambda p: setattr(p, "data", torch.ones(3)),
    "set_": lambda p: p.requires_grad_(False).set_(torch.ones(3)),
    "as_strided_": lambda p: p.requires_grad_(False).as_strided_((2,), (1,), 1),
    "swap_tensors": lambda p: torch.utils.swap_tensors(p, nn.Parameter(torch.ones(3))),
    "Module.zero_grad": lambda p: Holder(p).zero_grad(),
    "Module.to": lambda p: Holder(p).double(),
}
READS: dict[str, Callable[[Any], object]] = {
    "grad": lambda p: p.grad,
    "data": lambda p: p.data,
    "arithmetic": lambda p: p * 2 + 1,
    "detach": lambda p: p.detach().sum().item(),
    "backward": lambda p: p.square().sum().backward(),
    "in place": lambda p: p.data.add_(1),
    "grad in place": lambda p: p.grad.zero_(),
    "Module.zero_grad in place": lambda p: Holder(p).zero_grad(set_to_none=False),
    "Module.load_state_dict": lambda p: Holder(p).load_state_dict({"p": torch.ones(3)}),
    "clip_grad_norm_": lambda p: nn.utils.clip_grad_norm_([p], 1.0, foreach=True),
    "st.clip_grad_norm_": lambda p: st.clip_grad_norm_(st.TensorList([p]), 1.0),
    "st.TensorList": lambda p: (st.TensorList([p]) * 2, st.TensorList([p.grad]) + 1),
    "st.static": st.static,
    "st.chunk": lambda p: nn.functional.linear(st.chunk(torch.ones(4, 3), chunks=2), p.view(1, 3)).sum().backward(),
    "an optimizer that is not captured": lambda p: st.optim.SGD([p], lr=1.0).step(),
    "an optimizer of torch": lambda p: torch.optim.AdamW([p], foreach=True).step(),
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
}


class Holder(nn.Module):
    """A module with one parameter."""

    def __init__(self, p: nn.Parameter) -> None:
        super().__init__()
        self.p = p


def watched() -> tuple[nn.Parameter, Version]:
    p, changes = nn.Parameter(torch.arange(3.0)), Version()
    p.grad = torch.ones(3)
    p.label = "weight"  # type: ignore[attr-defined]
    watch([p, p.grad], changes)
    return p, changes


@pytest.mark.parametrize("change", CHANGES)
def test_moving_or_replacing_is_stamped(change: str) -> None:
    p, changes = watched()
    before = changes.stamp
    CHANGES[change](p)
    assert changes.stamp is not before


def test_compiled_code_that_moves_a_watched_tensor_stamps_it() -> None:
    p, changes = watched()
    before, memory = changes.stamp, p.data

    def move(p: Tensor, t: Tensor) -> Tensor:
        p.data = t
        return p + 1

    torch.compile(move, backend="aot_eager")(p, torch.ones(3))
    assert changes.stamp is not before
    assert p.data_ptr() != memory.data_ptr()


def test_giving_a_gradient_other_memory_is_stamped() -> None:
    p, changes = watched()
    for move in (lambda g: setattr(g, "data", torch.ones(3)), lambda g: g.set_(torch.ones(3))):
        before = changes.stamp
        move(p.grad)
        assert changes.stamp is not before


@pytest.mark.parametrize("read", READS)
def test_writes_in_place_are_not_stamped(read: str) -> None:
    p, changes = watched()
    before, at = changes.stamp, (p.data_ptr(), p.grad.data_ptr())  # type: ignore[union-attr]
    READS[read](p)
    assert changes.stamp is before
    assert (p.data_ptr(), p.grad.data_ptr()) == at  # type: ignore[union-attr]


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda t: pickle.loads(pickle.dumps(t))])
def test_a_copy_is_of_its_own_class(copied: Callable[[Any], Any]) -> None:
    p, _ = watched()
    plain = nn.Parameter(torch.arange(3.0))
    plain.label = "weight"  # type: ignore[attr-defined]
    for ours, expected in ((p, plain), (p.grad, torch.ones(3))):
        ours, expected = copied(ours), copied(expected)
        assert type(ours) is type(expected)
        assert torch.equal(ours, expected)
        assert vars(ours) == vars(expected)
        assert repr(ours) == repr(expected)


def test_a_saved_model_holds_plain_parameters() -> None:
    p, _ = watched()
    file = io.BytesIO()
    torch.save(Holder(p).state_dict(), file)
    file.seek(0)
    loaded = torch.load(file)["p"]
    assert type(loaded) is Tensor
    assert torch.equal(loaded, p)
    assert repr(p) == repr(nn.Parameter(torch.arange(3.0)))


def test_it_is_what_it_was_when_it_is_watched_no_more() -> None:
    p, _ = watched()
    gradient = p.grad
    unwatch([p, gradient, None, torch.ones(2)])  # type: ignore[list-item]
    assert (type(p), type(gradient)) == (nn.Parameter, Tensor)
    assert vars(p) == {"label": "weight"}


def packed_model(device: str) -> tuple[nn.Module, st.optim.Optimizer]:
    """A model of more parameters than are looked at in each glance."""
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(9) for layer in (nn.Linear(4, 4), nn.Tanh())]).to(device)
    opt = st.optim.AdamW(model.parameters(), lr=1e-2)
    opt.capture(packed=True)
    return model, opt


def test_a_model_over_packed_memory_is_compiled_once_and_trained_as_ever(device: str) -> None:
    losses = []
    counter = CompileCounterWithBackend("aot_eager")
    for compiled in (False, True):
        model, opt = packed_model(device)
        run = torch.compile(model, backend=counter, fullgraph=True) if compiled else model
        x = torch.ones(3, 4, device=device)
        for _ in range(5):
            opt.zero_grad()
            loss = run(x).square().sum()
            loss.backward()
            opt.step()
        losses.append(loss.item())
    assert losses[0] == losses[1]
    assert counter.frame_count == 1


def test_gradients_of_packed_parameters_are_known_to_be_laid_out_as_they_are(device: str) -> None:
    model, opt = packed_model(device)
    model(torch.ones(3, 4, device=device)).sum().backward()
    opt.step()
    assert all(batch.has_plain_gradients for batch in opt._updater.groups[0].batches)


def test_the_compiler_knows_that_packed_parameters_are_static(device: str) -> None:
    model, _ = packed_model(device)
    assert count_static(model, torch.ones(3, 4, device=device)) == (19, 18)


def test_functional_calls_take_packed_parameters(device: str) -> None:
    model, _ = packed_model(device)
    x = torch.ones(3, 4, device=device)
    params = dict(model.named_parameters())
    assert torch.equal(functional_call(model, params, (x,)), model(x))
    gradients = torch.func.grad(lambda params: functional_call(model, params, (x,)).sum())(params)
    model(x).sum().backward()
    assert all(torch.equal(gradients[name], p.grad) for name, p in params.items())


@pytest.mark.usefixtures("process_group")
def test_data_parallel_training_over_packed_memory_is_training() -> None:
    weights = []
    for is_wrapped in (False, True):
        model, opt = packed_model("cpu")
        run = nn.parallel.DistributedDataParallel(model) if is_wrapped else model
        for _ in range(5):
            opt.zero_grad()
            run(torch.ones(3, 4)).square().sum().backward()
            opt.step()
        weights.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *weights))


def test_compiled_code_reads_and_assigns_gradients() -> None:
    p, changes = watched()
    before = changes.stamp

    @torch.compile(backend="aot_eager", fullgraph=True)
    def halve(p: nn.Parameter) -> None:
        p.grad = p.grad * 0.5  # type: ignore[operator]

    halve(p)
    assert p.grad.tolist() == [0.5, 0.5, 0.5]  # type: ignore[union-attr]
    assert changes.stamp is not before
