"""StaticAddressTensor under torch.compile: it traces as a plain tensor, and CUDA graphs do not copy it."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from static_inputs import copied_bytes, copies_of, count_static
from torch import Tensor, nn

import subtensors as st

# Inductor's advice is a warning, and torch warns of the empty graph that it captures to keep a pool.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

SIZE = 256


def test_the_compiler_recognizes_static_inputs_parameters_and_buffers(device: str) -> None:
    layer = nn.Linear(4, 4, device=device)
    layer.weight = st.static(layer.weight)
    layer.register_buffer("shift", st.static(torch.ones(4, device=device)))
    x = torch.ones(2, 4, device=device)
    s = st.static(torch.ones(4, device=device))
    assert count_static(lambda x, y: x * y, x, torch.ones(4, device=device)) == (2, 0)
    assert count_static(lambda x, s: x * s, x, s) == (2, 1)
    assert count_static(lambda x: layer(x) + layer.shift, x) == (4, 3)


def test_a_compiled_function_reads_and_writes_it_in_one_graph(device: str) -> None:
    s = st.static(torch.arange(4.0, device=device))
    at = s.data_ptr()

    @torch.compile(fullgraph=True)
    def step(s: Tensor, x: Tensor) -> Tensor:
        s.add_(x)
        s[0] = 7.0
        return s.detach() * 2 + s.data.sum() + s.to(torch.float64)

    for _ in range(2):
        result = step(s, torch.ones(4, device=device))
    assert s.tolist() == [7, 3, 4, 5]
    assert result.tolist() == [40, 28, 31, 34]
    assert type(result) is Tensor
    assert s.data_ptr() == at


# Inductor compiles four graphs with a C++ compiler where there is no GPU; other tests here do so once.
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_training_is_plain_training(backend: str, device: str) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 8, device=device), nn.Tanh(), nn.Linear(8, 1, device=device))
    x = torch.randn(16, 4, device=device)
    losses = []
    for static in (False, True):
        model = nn.Sequential(nn.Linear(4, 8, device=device), nn.Tanh(), nn.Linear(8, 1, device=device))
        model.load_state_dict(plain.state_dict())
        if static:
            for layer in (model[0], model[2]):
                layer.weight, layer.bias = st.static(layer.weight), st.static(layer.bias)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        loss_of = torch.compile(lambda m=model: m(x).square().mean(), fullgraph=True, backend=backend)
        for _ in range(3):
            optimizer.zero_grad()
            loss = loss_of()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert losses[0] == losses[1]


def test_compiled_code_reads_writes_and_assigns_the_gradient_of_a_static_parameter(device: str) -> None:
    w = st.static(nn.Parameter(torch.ones(3, device=device)))

    @torch.compile(fullgraph=True)
    def clip(w: Tensor) -> Tensor:
        w.grad.mul_(0.5)  # type: ignore[union-attr]
        total = w.grad.sum()  # type: ignore[union-attr]
        w.grad = w.grad + 1  # type: ignore[operator]
        return total

    for value in (2.0, 4.0):
        w.grad = torch.full_like(w, value)
        assert clip(w).item() == 1.5 * value
        assert w.grad.tolist() == [value / 2 + 1] * 3


def test_static_tensors_of_compiled_code_are_created_outside_of_its_graph(device: str) -> None:
    arena = st.Arena(device)

    @torch.compile
    def make(x: Tensor) -> tuple[Tensor, Tensor]:
        return st.static(x + 1), arena.full((2,), 3.0)

    for value in (1.0, 2.0):
        s, t = make(torch.full((2,), value, device=device))
        assert type(s) is type(t) is st.StaticAddressTensor
        assert (s.tolist(), t.tolist(), t in arena) == ([value + 1] * 2, [3, 3], True)


def test_a_compiled_relocating_op_is_refused() -> None:
    s = st.static(torch.ones(4))
    for move in (lambda t: t.resize_(100), lambda t: torch.add(torch.ones(100), 1, out=t)):
        with pytest.raises((st.AddressError, torch._dynamo.exc.Unsupported, RuntimeError)):
            torch.compile(move, backend="eager")(s)
        assert s.shape == (4,)


MOVES_BETWEEN_GRAPHS: dict[str, Callable[[Tensor], Any]] = {
    "resize_": lambda t: t.resize_(100),
    "resize_as_": lambda t: t.resize_as_(torch.ones(100)),
    "set_": lambda t: t.set_(torch.ones(100)),
    ".data =": lambda t: setattr(t, "data", torch.ones(100)),
    "as_strided_": lambda t: t.as_strided_((2,), (1,), 1),
    "add(out=": lambda t: torch.add(torch.ones(100), 1, out=t),
    "sort(out=": lambda t: torch.sort(torch.ones(100), out=(t, torch.empty(0, dtype=torch.int64))),
}


@pytest.mark.parametrize("op", MOVES_BETWEEN_GRAPHS)
def test_a_relocating_op_between_two_graphs_is_refused(op: str) -> None:
    s = st.static(torch.arange(4.0))
    at = s.data_ptr()

    def moving(t: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        MOVES_BETWEEN_GRAPHS[op](t)
        return t + 1

    with pytest.raises(st.AddressError, match=re.escape(op)):
        torch.compile(moving, backend="aot_eager")(s)
    assert (s.data_ptr(), s.tolist()) == (at, [0, 1, 2, 3])


@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiled_code_refuses_a_released_arena_and_runs_again_when_restored(device: str, fullgraph: bool) -> None:
    arena = st.Arena(device)
    layer = nn.Linear(4, 4, device=device)
    layer.weight = arena.static(layer.weight)
    s = arena.ones(4)
    x = torch.ones(2, 4, device=device)
    compiled = torch.compile(lambda x, s: layer(x) * s, fullgraph=fullgraph)
    with torch.no_grad():
        before = compiled(x, s)
        for _ in range(2):
            arena.release()
            with pytest.raises(st.AddressError, match=r"restore\(\)"):
                compiled(x, s)
            arena.restore()
            assert torch.equal(compiled(x, s), before)


def test_compiling_keeps_no_static_tensor_alive(device: str) -> None:
    f = torch.compile(lambda t: t * 2, backend="eager" if device == "cpu" else "inductor")

    def live() -> int:
        gc.collect()
        return sum(type(o) is st.StaticAddressTensor for o in gc.get_objects())

    f(st.static(torch.ones(8, device=device)))
    before = live()
    memory = torch.cuda.memory_allocated() if device == "cuda" else 0
    for _ in range(1000):
        f(st.static(torch.ones(8, device=device)))
    assert live() == before
    assert (torch.cuda.memory_allocated() if device == "cuda" else 0) == memory


@pytest.mark.gpu
@pytest.mark.parametrize("is_static", [False, True])
def test_a_graph_copies_a_plain_input_but_not_a_static_one(is_static: bool) -> None:
    t = torch.randn(SIZE, SIZE, device="cuda")
    s = st.static(t) if is_static else t
    double = torch.compile(lambda s: (s @ s).relu(), mode="reduce-overhead")
    with torch.no_grad():
        assert copies_of(lambda: double(s)) == (0 if is_static else 4 * SIZE * SIZE)
        s.fill_(1)
        assert torch.equal(double(s), torch.full_like(t, SIZE))


@pytest.mark.gpu
def test_a_graph_copies_no_static_parameters_or_buffers_in_forward_or_backward() -> None:
    layer = nn.Linear(SIZE, SIZE, device="cuda")
    layer.weight, layer.bias = st.static(layer.weight), st.static(layer.bias)
    layer.register_buffer("shift", st.static(torch.ones(SIZE, device="cuda")))
    x = st.static(torch.randn(SIZE, SIZE, device="cuda"))
    model = torch.compile(lambda x: (layer(x) + layer.shift).square().mean(), mode="reduce-overhead")

    def step() -> None:
        layer.zero_grad()
        model(x).backward()

    # The gradient of the loss is a new number in each step.
    assert copies_of(step) <= 4
    assert layer.weight.grad is not None


@pytest.mark.gpu
def test_a_graph_copies_no_static_optimizer_state() -> None:
    p, m, v = (st.static(torch.zeros(SIZE, SIZE, device="cuda")) for _ in range(3))
    g = st.static(torch.ones(SIZE, SIZE, device="cuda"))

    def adam(p: Tensor, m: Tensor, v: Tensor, g: Tensor) -> None:
        m.lerp_(g, 0.1)
        v.lerp_(g * g, 0.01)
        p.sub_(0.1 * m / (v.sqrt() + 1e-8))

    step = torch.compile(adam, mode="reduce-overhead")
    with torch.no_grad():
        assert copies_of(lambda: step(p, m, v, g)) == 0
    assert torch.allclose(m, 1 - torch.full_like(m, 0.9) ** 6)


@pytest.mark.gpu
def test_graphs_of_the_compiler_keep_no_static_tensor_alive() -> None:
    double = torch.compile(lambda t: t * 2, mode="reduce-overhead")
    for value in range(4):
        s = st.static(torch.full((SIZE,), float(value), device="cuda"))
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            assert double(s)[0] == 2 * value
        owner = weakref.ref(s)
        del s
        gc.collect()
        assert owner() is None


@pytest.mark.gpu
def test_a_graph_of_the_compiler_survives_release_and_restore() -> None:
    arena = st.Arena("cuda")
    torch.manual_seed(0)
    w, x = arena.static(torch.randn(SIZE, SIZE)), arena.static(torch.randn(SIZE, SIZE))
    model = torch.compile(lambda x, w: (x @ w).tanh(), mode="reduce-overhead")
    with torch.no_grad():
        assert copies_of(lambda: model(x, w)) == 0
        before = model(x, w).clone()
        arena.release()
        with pytest.raises(st.AddressError, match=r"restore\(\)"):
            model(x, w)
        arena.restore()
        with copied_bytes() as counts:
            assert torch.equal(model(x, w), before)
        assert sum(counts) == 0


FUNCTIONS_IN_PYTHON: dict[str, Callable[[Any, Tensor], Any]] = {
    "a number minus it": lambda x, w: x * (1 - w),
    "a number to its power": lambda x, w: x * 2**w,
    "pad": lambda x, w: x * torch.nn.functional.pad(w, (1, 1))[1:-1],
    "norm": lambda x, w: x * w.norm(),
    "split": lambda x, w: x * w.split(2)[0].sum(),
    "unflatten": lambda x, w: x * w.unflatten(0, (2, 2)).sum(),
    "rms_norm": lambda x, w: torch.nn.functional.rms_norm(x, (4,), w),
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", FUNCTIONS_IN_PYTHON)
def test_functions_that_torch_writes_in_python_compile_to_one_graph(name: str, backend: str) -> None:
    w, x = st.static(nn.Parameter(torch.linspace(1, 2, 4))), torch.randn(3, 4)
    program = FUNCTIONS_IN_PYTHON[name]
    expected = program(x, w.data)
    torch.testing.assert_close(torch.compile(program, fullgraph=True, backend=backend)(x, w), expected)


def test_padded_tensors_meet_static_ones_in_the_graphs_of_every_backend() -> None:
    w, x = st.static(nn.Parameter(torch.randn(4, 4))), torch.randn(3, 4)
    expected = torch.autograd.grad((x @ w).softmax(0).square().sum(), w)[0]
    for backend in ("eager", "aot_eager"):
        compiled = torch.compile(lambda x: (x @ w).softmax(0).square().sum(), fullgraph=True, backend=backend)
        found = torch.autograd.grad(compiled(st.pad(x, {0: 8}, value=float("nan"))), w)[0]
        torch.testing.assert_close(found, expected)
