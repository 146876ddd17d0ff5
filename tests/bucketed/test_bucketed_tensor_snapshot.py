"""A snapshot of tensors notices a change of each property that a graph depends on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor, nn

from subtensors.bucketed.program_state import State
from subtensors.bucketed.side_effects import SideEffects
from subtensors.dispatch.graphs.guards import TENSOR_PROPERTIES, TensorSnapshot


def complex_matrix() -> Tensor:
    return torch.randn(2, 2, dtype=torch.complex64)


OTHERS: dict[str, tuple[Callable[[], Tensor], Callable[[Tensor], Tensor]]] = {
    "address": (lambda: torch.ones(2, 2), Tensor.clone),
    "device": (lambda: torch.ones(2, 2), lambda t: t.to("meta")),
    "dtype": (lambda: torch.ones(2, 2, dtype=torch.float16), lambda t: t.view(torch.bfloat16)),
    "shape": (lambda: torch.ones(4), lambda t: t[:3]),
    "strides": (lambda: torch.ones(2, 2), Tensor.t),
    "conjugation": (complex_matrix, Tensor.conj),
    "negation": (lambda: complex_matrix().imag, lambda t: t._base.conj().imag),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("what", TENSOR_PROPERTIES)
def test_each_guarded_property_detects_a_replaced_tensor(what: str) -> None:
    make, change = OTHERS[what]
    tensors = [torch.ones(3), make(), torch.ones(())]
    held = TensorSnapshot(tensors)
    assert held.matches(tensors)
    tensors[1] = change(tensors[1])
    assert not held.matches(tensors)
    index, first = held.first_change(tensors) or (-1, "")
    assert (index, first) == (1, "address" if what == "device" else what)
    changed = [name for name, read in TENSOR_PROPERTIES.items() if read(tensors[1]) != read(make())]
    assert what in changed


def test_added_and_removed_tensors_are_a_change() -> None:
    a, b = torch.ones(2), torch.ones(2)
    assert TensorSnapshot([a, b]).first_change([a]) == (1, "count")
    assert TensorSnapshot([a]).first_change([a, b]) == (1, "count")
    assert not TensorSnapshot([a]).matches([])
    assert TensorSnapshot([]).matches([])


@pytest.mark.parametrize("other", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_tensors_match_their_snapshot_in_every_mode(
    other: Callable[[], AbstractContextManager[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors: list[Tensor] = [nn.Parameter(torch.ones(2, 2)), torch.ones(3)]
    held = TensorSnapshot(tensors)
    looked: list[int] = []
    first_change = TensorSnapshot.first_change
    monkeypatch.setattr(TensorSnapshot, "first_change", lambda *args: (looked.append(1), first_change(*args))[1])
    for mode in (nullcontext, other, nullcontext, other):
        with mode():
            assert held.matches(tensors)
    # The table itself is read once a mode at most.
    assert len(looked) <= 1


def test_tensors_without_memory_can_be_guarded() -> None:
    sparse, lazy = torch.eye(2).to_sparse(), nn.LazyLinear(2)
    held = TensorSnapshot([sparse, lazy.weight])
    assert held.matches([sparse, lazy.weight])
    lazy(torch.ones(1, 3))
    assert held.first_change([sparse, lazy.weight]) == (1, "memory")


@pytest.mark.parametrize("replace", [Tensor.t, Tensor.clone])
def test_the_address_of_an_accumulated_gradient_is_guarded(replace: Callable[[Tensor], Tensor]) -> None:
    weight = nn.Parameter(torch.ones(3, 3))

    def program(x: Tensor) -> None:
        (x @ weight).sum().backward()

    program(torch.ones(2, 3))
    effects = SideEffects(State(program))
    with effects.noted(caller_runs_backward=False):
        program(torch.ones(2, 3))
    assert effects.no_replay_reason() == ""
    assert weight.grad is not None
    weight.grad.data = replace(weight.grad.data)
    assert "a gradient that the program adds to was replaced" in effects.no_replay_reason()
