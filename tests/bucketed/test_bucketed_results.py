"""Results of a bucketed program have the class, structure and parts of the program's results; copies of runners."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bucketed_rows import DIMS, SEQ, rows
from pretend_graphs import pretend
from small_models import VOCABULARY, bert
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import subtensors as st


@pytest.fixture(autouse=True)
def captured(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU pretends to capture."""
    if device == "cpu":
        pretend(monkeypatch)


class Box:
    """A container that only its registration opens."""

    __slots__ = ("label", "parts")

    def __init__(self, label: str, parts: list[Tensor]) -> None:
        self.label, self.parts = label, parts


pytree.register_pytree_node(Box, lambda box: (box.parts, box.label), lambda parts, label: Box(label, list(parts)))


@dataclass
class Scores:
    best: Tensor
    all: list[Tensor]
    name: str = "none"


@torch.no_grad()
def test_registered_containers_go_in_and_come_out(device: str) -> None:
    def program(x: Box) -> Box:
        return Box(x.label + "!", [x.parts[0].softmax(0), x.parts[1].sum(0), x.parts[0]])

    run = st.bucketed(program, DIMS)
    held = []
    for n in (5, 20, 6, 5):
        box = Box("a", [rows(n, device), rows(n, device)])
        held.append((run(box), program(box)))
    for found, expected in held:
        assert type(found) is Box
        assert found.label == expected.label == "a!"
        torch.testing.assert_close(found.parts, expected.parts)
    assert run.stats().hits == 2
    run(Box("b", box.parts))  # its context is part of the key
    assert run.stats().hits == 2


@torch.no_grad()
def test_sizes_come_back_as_the_true_ones(device: str) -> None:
    def program(x: Tensor) -> Any:
        box = SimpleNamespace(last=x[-1:], seen=x.shape[0] + 1)
        return x.shape, [x[1:].shape[0] // 2], x.shape[0] - 30, box

    run = st.bucketed(program, DIMS)
    for n in (5, 20, 6, 5):
        x = rows(n, device)
        found, expected = run(x), program(x)
        assert found[:3] == expected[:3]
        assert found[3].seen == n + 1
        assert torch.equal(found[3].last, expected[3].last)
    assert not run.stats().fallbacks


@torch.no_grad()
def test_objects_that_hold_tensors_come_back_as_their_class(device: str) -> None:
    def program(x: Tensor) -> dict[str, Any]:
        return {"scores": Scores(x.sum(0), [x.softmax(0)], "sums"), "none": None, "size": 3, "twice": (x, x)}

    run = st.bucketed(program, DIMS)
    held = []
    for n in (5, 20, 6, 5):
        x = rows(n, device)
        held.append((run(x), program(x)))
    for found, expected in held:
        assert list(found) == list(expected)
        assert type(found["scores"]) is Scores
        assert (found["scores"].name, found["none"], found["size"]) == ("sums", None, 3)
        torch.testing.assert_close(found["scores"].best, expected["scores"].best)
        torch.testing.assert_close(found["scores"].all, expected["scores"].all)
        torch.testing.assert_close(found["twice"], expected["twice"])


@torch.no_grad()
def test_hugging_face_outputs_come_back_as_their_class(device: str) -> None:
    model = bert("Model").double().eval().to(device)
    run = st.bucketed(model, {"input_ids": {1: SEQ}})
    for n in (5, 20, 6):
        ids = torch.randint(1, VOCABULARY, (2, n), device=device)
        found = run(input_ids=ids, output_hidden_states=True)
        expected = model(input_ids=ids, output_hidden_states=True)
        assert type(found) is type(expected)
        assert list(found) == list(expected)
        torch.testing.assert_close(found.to_tuple(), expected.to_tuple())
        assert type(run(input_ids=ids, return_dict=False)) is tuple
    assert run.stats().hits == 2


@torch.no_grad()
def test_a_copy_has_a_copy_of_the_program_and_no_graphs(device: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3, device=device, dtype=torch.float64)
            self.run = st.bucketed(self.inner, {"input": {0: SEQ}}, max_graphs=2)

        def forward(self, x: Tensor) -> Tensor:
            return self.run(x).softmax(0)  # type: ignore[no-any-return]

    model = Model()
    x = rows(5, device)
    model(x)
    copied = copy.deepcopy(model)
    assert copied.run.program is copied.inner
    assert copied.run.graph_cache.max_graphs == 2
    assert not copied.run.captured_buckets()
    copied.inner.weight.mul_(2)
    for net in (model, copied, model, copied):
        torch.testing.assert_close(net(x), net.inner(x).softmax(0))
    again = pickle.loads(pickle.dumps(model.run))
    torch.testing.assert_close(again(x), model.inner(x))
    assert model.run.stats().hits == 2


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("way", ["script", "trace"])
@pytest.mark.parametrize("trained", [False, True])
def test_scripted_modules_are_programs_too(device: str, way: str, trained: bool) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Softmax(0)).to(device, torch.float64)
    scripted = torch.jit.script(net) if way == "script" else torch.jit.trace(net, rows(4, device))
    run = st.bucketed(scripted, {0: {0: SEQ}})
    with torch.set_grad_enabled(trained):
        for n in (5, 6, 20, 7):
            x, cotangent = rows(n, device), rows(n, device)
            found, expected = run(x), net(x)
            torch.testing.assert_close(found, expected)
            if trained:
                gradients = []
                for y in (found, expected):
                    net.zero_grad()
                    y.backward(cotangent)
                    gradients.append([p.grad for p in net.parameters()])
                torch.testing.assert_close(*gradients)
    # Gradients of scripted code are taken at true sizes, which no graph has.
    assert run.stats().hits == (0 if trained else 2)
