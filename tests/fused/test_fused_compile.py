"""Fused functions inside `torch.compile(fullgraph=True)`."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters

import subtensors as st
from subtensors.fused import custom_ops


@st.fused
def momentum(p: torch.Tensor, g: torch.Tensor, buf: torch.Tensor, *, lr: float, nesterov: bool) -> None:
    buf.mul_(0.9).add_(g)
    if nesterov:
        g = g + 0.9 * buf
        p.sub_(lr * g)
    else:
        p.add_(buf, alpha=-lr)


@st.fused
def scaled(p: torch.Tensor, *, by: float) -> tuple[torch.Tensor, torch.Tensor]:
    return p * by, p.sum()


def step(p: Any, g: Any, buf: Any, lr: float, nesterov: bool) -> None:
    momentum(p, g, buf, lr=lr, nesterov=nesterov)


def lists(count: int, packed: bool) -> tuple[st.TensorList, ...]:
    torch.manual_seed(0)
    made = tuple(st.TensorList([torch.randn(3 + i % 4) for i in range(count)]) for _ in range(3))
    return tuple(x.pack() for x in made) if packed else made


class Graph:
    """A backend that keeps the graph that the compiler passed to it."""

    def __init__(self) -> None:
        self.targets: list[str] = []
        self.placeholders = 0

    def backend(self) -> Callable[..., Any]:
        def keep(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
            self.targets = [str(n.target) for n in graph.graph.nodes if n.op == "call_function"]
            self.placeholders = sum(n.op == "placeholder" for n in graph.graph.nodes)
            return graph.forward

        return aot_autograd(fw_compiler=keep)


# The branch of the math is chosen before inductor sees it.
@pytest.mark.parametrize(
    ("backend", "nesterov"), [("eager", False), ("aot_eager", False), ("aot_eager", True), ("inductor", True)]
)
@pytest.mark.parametrize("packed", [False, True])
def test_a_compiled_step_equals_the_eager_one(packed: bool, nesterov: bool, backend: str) -> None:
    expected, actual = lists(4, packed), lists(4, packed)
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    with torch.no_grad():
        for lr in (0.5, 0.25):
            step(*expected, lr, nesterov)
            compiled(*actual, lr, nesterov)
    for a, b in zip(expected, actual, strict=True):
        for x, y in zip(a.tensors, b.tensors, strict=True):
            torch.testing.assert_close(x, y)


def test_unpacked_lists_go_to_one_opaque_op_that_declares_its_writes() -> None:
    graph = Graph()
    with torch.no_grad():
        torch.compile(step, fullgraph=True, backend=graph.backend())(*lists(6, packed=False), 0.5, True)
    assert graph.targets.count("auto_functionalized_v2") == 1
    assert "aten.add.Tensor" not in graph.targets
    assert graph.placeholders == 3 * 6


def test_packed_lists_are_traced_natively_whatever_their_length() -> None:
    seen = []
    for count in (4, 200):
        graph = Graph()
        torch._dynamo.reset()
        with torch.no_grad():
            torch.compile(step, fullgraph=True, backend=graph.backend())(*lists(count, packed=True), 0.5, True)
        assert not any("auto_functionalized" in t for t in graph.targets)
        seen.append((graph.placeholders, len(graph.targets)))
    assert seen[0] == seen[1]
    assert seen[0][0] == 3


@pytest.mark.parametrize("packed", [False, True])
def test_a_changing_learning_rate_compiles_at_most_twice(packed: bool) -> None:
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    arguments = lists(3, packed)
    counters.clear()
    with torch.no_grad():
        for i in range(12):
            compiled(*arguments, 0.1 + 0.01 * i, True)
    assert counters["stats"]["unique_graphs"] <= 2


def test_math_that_returns_lists_is_traced_natively() -> None:
    (p, *_) = lists(3, packed=False)
    with torch.no_grad():
        doubled, sums = torch.compile(lambda x: scaled(x, by=2.0), fullgraph=True, backend="aot_eager")(p)
    for x, y, total in zip(p.tensors, doubled.tensors, sums.tensors, strict=True):
        torch.testing.assert_close(x * 2, y)
        torch.testing.assert_close(x.sum(), total)


def test_opcheck_accepts_the_op() -> None:
    (p, g, buf) = lists(2, packed=False)
    with torch.no_grad():
        torch.compile(step, fullgraph=True, backend="aot_eager")(p, g, buf, 0.5, True)
    name = next(k for k, s in custom_ops.compiled_calls.items() if len(s.kinds) == 5)
    written = custom_ops.compiled_calls[name].written
    columns = [p.tensors, g.tensors, buf.tensors]
    writes = [t for i, c in enumerate(columns) if i in written for t in c]
    reads = [t for i, c in enumerate(columns) if i not in written for t in c]
    number = [torch.tensor(0.5, dtype=torch.float64)]
    torch.library.opcheck(torch.ops.subtensors.fused.default, (name, 2, writes, reads, number))
    single = ([p.tensors[0], buf.tensors[0]], [g.tensors[0]])
    torch.library.opcheck(torch.ops.subtensors.fused.default, (name, 1, *single, number))


def test_two_functions_of_one_signature_have_different_names() -> None:
    # Compiled graphs are cached on disk by their constants: a counter would name another function in the next process.
    def double(p: torch.Tensor) -> None:
        p.mul_(2)

    def triple(p: torch.Tensor) -> None:
        p.mul_(3)

    names = []
    for function in (double, triple, double):
        fused = st.fused(function)
        torch._dynamo.reset()
        (p, *_) = lists(2, packed=False)
        before = set(custom_ops.compiled_calls)
        with torch.no_grad():
            torch.compile(lambda x, f=fused: f(x), fullgraph=True, backend="aot_eager")(p)
        names.append(set(custom_ops.compiled_calls) - before)
    assert names[0] != names[1]
    assert names[2] == set()


def test_writing_to_a_tensor_that_all_elements_share_is_refused_when_compiling() -> None:
    @st.fused
    def count(p: torch.Tensor, total: torch.Tensor) -> None:
        total.add_(1)
        p.mul_(2)

    (p, *_) = lists(2, packed=False)
    with torch.no_grad(), pytest.raises(Exception, match="writes to a tensor that all elements share"):
        torch.compile(lambda x, t: count(x, t), fullgraph=True, backend="aot_eager")(p, torch.zeros(()))


def test_deleted_functions_are_freed_and_compiled_ones_kept_once() -> None:
    def decorated() -> Any:
        def decay(p: torch.Tensor, lr: float) -> None:
            p.mul_(1 - lr)

        return st.fused(decay)

    gc.collect()
    before = len(custom_ops.functions), len(custom_ops.compiled_calls)
    for _ in range(5):
        decorated()(st.TensorList([torch.ones(2)]), 0.5)
    gc.collect()
    assert len(custom_ops.functions) == before[0]
    for _ in range(3):
        decay = decorated()
        p = st.TensorList([torch.ones(2)])
        with torch.no_grad():
            torch.compile(lambda p, decay=decay: decay(p, 0.5), fullgraph=True, backend="eager")(p)
        assert p[0].tolist() == [0.5, 0.5]
        torch._dynamo.reset()
    del decay
    gc.collect()
    assert len(custom_ops.compiled_calls) == before[1] + 1
    assert len(custom_ops.functions) == before[0] + 1
