"""TensorLists inside torch.compile: the map, compile work, geometry, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.testing._internal.two_tensor import TwoTensor

import subtensors as st


class Counted:
    """A backend that runs the traced graph as it is, and remembers its size."""

    def __init__(self) -> None:
        from torch._dynamo.backends.common import aot_autograd

        self.placeholders: list[int] = []
        self.nodes: list[int] = []
        self.backend = aot_autograd(fw_compiler=self._record)

    def _record(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        from torch._functorch.aot_autograd import make_boxed_func

        self.placeholders.append(sum(n.op == "placeholder" for n in graph.graph.nodes))
        self.nodes.append(len(graph.graph.nodes))
        return make_boxed_func(graph.forward)


def update(p: Any, g: Any, lr: float) -> tuple[Any, Any]:
    p.mul_(0.9)
    m = torch.where(g > 0, g, -g).sqrt()
    p -= m * lr
    return m + 1, torch.maximum(p, g).clamp(-1, 1)


def many(count: int) -> list[torch.Tensor]:
    return [torch.randn(3, i % 5 + 1) for i in range(count)]


def updated(p: list[torch.Tensor], g: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    p = [t.clone() for t in p]
    results = [update(a, b, 0.1) for a, b in zip(p, g, strict=True)]
    return [[a for a, _ in results], [b for _, b in results], p]


@pytest.mark.parametrize(
    ("backend", "packed"),
    [
        ("aot_eager", True),
        ("aot_eager", False),
        pytest.param("inductor", True, marks=pytest.mark.filterwarnings("ignore")),
    ],
)
def test_compiled_math_on_lists_is_the_map(backend: str, packed: bool) -> None:
    compiled = torch.compile(update, fullgraph=True, backend=backend)
    with torch.no_grad():
        for _ in range(2):
            p, g = many(4), many(4)
            expected = updated(p, g)
            ps, gs = st.TensorList(map(torch.nn.Parameter, p)), st.TensorList(g)
            if packed:
                ps.pack(), gs.pack()
            first, second = compiled(ps, gs, 0.1)
            for actual, wanted in zip((first, second, ps), expected, strict=True):
                torch.testing.assert_close([t.detach() for t in actual], wanted)
            assert (first.arena is not None) == packed


def test_compile_work_does_not_grow_with_the_number_of_packed_tensors() -> None:
    counted = Counted()
    with torch.no_grad():
        for count in (4, 400):
            torch._dynamo.reset()
            p, g = many(count), many(count)
            expected = updated(p, g)
            ps, gs = st.TensorList(map(torch.nn.Parameter, p)).pack(), st.TensorList(g).pack()
            compiled = torch.compile(update, fullgraph=True, backend=counted.backend)
            results = compiled(ps, gs, 0.1)
            for actual, wanted in zip((*results, ps), expected, strict=True):
                torch.testing.assert_close([t.detach() for t in actual], wanted)
            compiled(gs.clone(), gs, 0.1)
    assert counted.placeholders == [2, 2]
    assert counted.nodes[0] == counted.nodes[1]


def test_compiled_code_notices_that_an_element_left_the_arena() -> None:
    compiled = torch.compile(lambda x: x + 1, fullgraph=True, backend="aot_eager")
    p = st.TensorList(many(3)).pack()
    compiled(p)
    p[0].data = torch.full((3, 1), 9.0)
    torch.testing.assert_close(compiled(p).tree(), [t + 1 for t in p])


@pytest.mark.parametrize("packed", [True, False])
def test_reductions_len_iteration_and_indexing_compile(packed: bool) -> None:
    def f(x: Any) -> Any:
        whole = x.sum(dim=-1), x.amax(0).mean(), x + torch.ones(3, 1)
        return *whole, [t * len(x) for t in x], x[1] + x["b", 0], [t * 2 for t in x.tensors]

    tl = st.TensorList({"a": torch.randn(3, 2), "b": [torch.randn(3, 2), torch.randn(3, 4)]})
    tl = tl.pack() if packed else tl
    actual, expected = torch.compile(f, fullgraph=True, backend="aot_eager")(tl), f(tl)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(list(a), list(e))


GEOMETRY: list[Callable[[Any], Any]] = [
    lambda x: x.shape,
    lambda x: x.size(),
    lambda x: x.size(0),
    lambda x: x.size(dim=-1),
    lambda x: x.stride(),
    lambda x: (x.numel(), x.nelement(), torch.numel(x)),
    lambda x: (x.ndim, x.dim(), x.ndimension()),
    lambda x: (x.dtype, x.device, x.layout, x.is_cuda),
    lambda x: (x.element_size(), x.itemsize, x.nbytes),
    lambda x: (x.is_contiguous(), x.is_contiguous(memory_format=torch.contiguous_format)),
    lambda x: (x.is_floating_point(), torch.is_floating_point(x), x.is_complex(), torch.is_complex(input=x)),
    lambda x: (len(x), [t.shape for t in x], x[1].numel()),
    lambda x: (torch.ones(2, 3).shape, torch.numel(torch.ones(4)), len(torch.ones(5))),
]


@pytest.mark.parametrize("packed", [True, False])
def test_compiled_code_reads_the_shapes_and_strides_of_the_elements(packed: bool) -> None:
    x = st.TensorList([torch.ones(4, 2).t(), torch.ones(3, dtype=torch.float64), torch.ones((), dtype=torch.int64)])
    for f in GEOMETRY[:2] + GEOMETRY[4:]:
        check_geometry(f, x.pack() if packed else x)
    for f in GEOMETRY[2:4]:
        check_geometry(f, x[:2].pack() if packed else x[:2])


def check_geometry(f: Callable[[Any], Any], x: st.TensorList) -> None:
    def asked(x: Any) -> Any:
        return x + 1, f(x)

    torch._dynamo.reset()
    assert torch.compile(asked, fullgraph=True, backend="aot_eager")(x)[1] == f(x)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("ask", [lambda x: x.shape, lambda x: x.size(), lambda x: x.size(0), lambda x: x.numel()])
def test_each_list_gets_its_own_sizes_in_compiled_code(ask: Callable[[Any], Any], packed: bool) -> None:
    dynamic = None if packed else False
    compiled = torch.compile(lambda x: (x * 2, ask(x)), fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for sizes in ((2, 3), (4, 5), (6, 7), (2, 3), (4, 5, 6)):
        x = st.TensorList([torch.ones(n) for n in sizes])
        assert compiled(x.pack() if packed else x)[1] == ask(x)


def test_metadata_with_symbolic_sizes_is_refused_in_compiled_code() -> None:
    compiled = torch.compile(lambda x: (x * 2, x.numel()), fullgraph=True, backend="eager")
    compiled(st.TensorList([torch.ones(2), torch.ones(3)]))
    with pytest.raises(Exception, match="numel of a TensorList has no rule"):
        compiled(st.TensorList([torch.ones(4), torch.ones(5)]))


def test_a_packed_list_compiles_with_dynamic_sizes() -> None:
    x = st.TensorList([torch.ones(n) for n in (2, 3)]).pack()
    doubled, shapes = torch.compile(lambda x: (x * 2, x.shape), fullgraph=True, backend="aot_eager", dynamic=True)(x)
    assert shapes == doubled.shape == [torch.Size([2]), torch.Size([3])]


@pytest.mark.parametrize(
    "f", [lambda x: x @ x, lambda x: x.view(-1), lambda x: x.softmax(0), lambda x: x.detach(), lambda x: x.normal_()]
)
def test_a_call_without_a_rule_under_compile_is_refused(f: Callable[[Any], Any]) -> None:
    for tl in (st.TensorList([torch.ones(2, 2)]), st.TensorList([torch.ones(2, 2)]).pack()):
        with pytest.raises(Exception, match="has no rule"):
            torch.compile(f, fullgraph=True, backend="aot_eager")(tl)


def without_gradients(x: Any) -> Any:
    with torch.no_grad():
        return x * 3


def halved_first(x: Any) -> Any:
    with torch.no_grad():
        x.mul_(0.5)
    return sum((x * x).sum())


@st.fused
def smooth(x: Any) -> Any:
    return (x * x + 1).sqrt() - 1


PROGRAMS: dict[str, Callable[[Any, Any], Any]] = {
    "sums": lambda x, w: sum((x * x).sum()),
    "a chain": lambda x, w: sum((x.sin() * x + 1).clamp(min=0.5).mean()),
    "a plain tensor": lambda x, w: sum((x * w).exp().sum()) + sum((w - x).sum()),
    "choices": lambda x, w: sum(torch.where(x > 0, x, 0.1 * x).sum()),
    "elements": lambda x, w: sum((t * t).sum() for t in x) + (x[0] * w).sum() + (x * x)[1].norm(),
    "plain results": lambda x, w: (x[0] * 2, (x * x)[1], x.amax()[0] * w),
    "a constant": lambda x, w: sum((x * without_gradients(x)).sum()),
    "a write before": lambda x, w: halved_first(x),
    "fused math": lambda x, w: sum(smooth(x).sum()),
    "reductions": lambda x, w: sum(x.norm()) + sum(x.var()),
}


def tensors_of(turn: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(turn)
    return [torch.randn(n, generator=generator, dtype=torch.float64) for n in (3, 4, 5)]


def leaves(turn: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    parameters: list[torch.Tensor] = list(map(torch.nn.Parameter, tensors_of(turn)))
    return parameters, parameters


def results(turn: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    parameters = leaves(turn)[0]
    return parameters, [t.exp() for t in parameters]


def partly_frozen(turn: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    parameters = leaves(turn)[0]
    return parameters, [parameters[0].detach(), *parameters[1:]]


@pytest.mark.parametrize(
    ("elements", "packed"), [(leaves, False), (leaves, True), (results, False), (partly_frozen, False)]
)
@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_flow_through_lists_passed_to_compiled_code(
    name: str, elements: Callable[[int], Any], packed: bool
) -> None:
    if name == "a write before" and elements is results:
        pytest.skip("writes to what a backward has saved")
    program, counted = PROGRAMS[name], CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(program, fullgraph=True, backend=counted)
    compiled_once: int = 0
    for turn in range(10):
        found = []
        for run in (compiled, program):
            parameters, taken = elements(turn)
            w = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
            x = st.TensorList(taken).pack() if packed else st.TensorList(taken)
            out = run(x, w)
            values = list(out) if isinstance(out, tuple) else [out]
            ends = [v.sum() for v in values if v.requires_grad]
            grads = torch.autograd.grad(ends, [*parameters, w], materialize_grads=True, allow_unused=True)
            found.append([*values, *grads])
        torch.testing.assert_close(found[0], found[1])
        compiled_once = compiled_once or counted.frame_count
    assert counted.frame_count == compiled_once


@pytest.mark.parametrize("dynamic", [None, True])
def test_gradients_flow_for_any_sizes_and_number_of_packed_tensors(dynamic: bool | None) -> None:
    compiled = torch.compile(lambda x: sum((x * x).sum()), fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for sizes in ((2, 3), (4, 5), (6, 7), (3, 4, 5), (8,), (2, 3)):
        x = st.TensorList([torch.arange(float(n), requires_grad=True) for n in sizes]).pack()
        compiled(x).backward()
        assert all(torch.equal(t.grad, 2 * t) for t in x)


def test_a_list_that_the_result_does_not_depend_on_has_no_gradient() -> None:
    x, unused = parameters(packed=False), parameters(packed=True)
    torch.compile(lambda x, y: (y + y, sum((x * x).sum()))[1], fullgraph=True, backend="aot_eager")(
        x, unused
    ).backward()
    assert all(torch.equal(t.grad, 2 * t) for t in x)
    assert unused.grad == [None, None]


def test_gradients_reach_the_current_elements_after_elements_changed() -> None:
    w = torch.ones(3, requires_grad=True)
    x = st.TensorList([w * 2, w * 3])
    compiled = torch.compile(lambda x: sum((x * x).sum()), fullgraph=True, backend="aot_eager")
    assert torch.equal(torch.autograd.grad(compiled(x), w, retain_graph=True)[0], torch.full((3,), 26.0))
    x += w
    x[0].mul_(2)
    assert torch.equal(torch.autograd.grad(compiled(x), w)[0], torch.full((3,), 2.0 * 36 + 2 * 16))
    p = parameters(packed=True)
    compiled(p).backward()
    compiled(p).backward()
    assert all(torch.equal(t.grad, 4 * t) for t in p)


REFUSED_WITH_GRADIENTS: list[tuple[Callable[[Any], Any], str]] = [
    (lambda x: x.mul_(2), "mul_ has no rule that writes where a TensorList requires grad"),
    (lambda x: torch.mul(x, 2, out=x), "has no rule that writes where a TensorList requires grad"),
    (lambda x: descend(x, x, lr=0.5), "has no rule that writes where a TensorList requires grad"),
    (lambda x: x * 2, "can't return a TensorList that requires grad"),
    (lambda x: x[0].mul_(2), "is a view and is being modified inplace"),
    (lambda x: x.__setitem__(0, x[0] * 2), "is a view and is being modified inplace"),
]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("f", "message"), REFUSED_WITH_GRADIENTS)
def test_gradients_that_would_be_lost_are_refused(f: Callable[[Any], Any], message: str, packed: bool) -> None:
    with pytest.raises(Exception, match=message):
        torch.compile(f, fullgraph=True, backend="aot_eager")(parameters(packed))


def test_gradients_through_a_list_that_begins_with_integers_are_refused() -> None:
    x = st.TensorList([torch.ones(2, dtype=torch.int64), torch.ones(2, requires_grad=True)])
    with pytest.raises(Exception, match="whose first element holds no floats"):
        torch.compile(lambda x: x[1] * 2, fullgraph=True, backend="aot_eager")(x)


def test_gradients_through_a_list_of_a_subclass_are_refused() -> None:
    values = [TwoTensor(torch.ones(2), torch.ones(2)), torch.ones(2)]
    x = st.TensorList([t.requires_grad_() for t in values])
    for f in (lambda x: x[0] * 2, lambda x: sum((x * x).sum())):
        with pytest.raises(Exception, match="holds tensors of a subclass"):
            torch.compile(f, fullgraph=True, backend="aot_eager")(x)


def parameters(packed: bool) -> st.TensorList:
    p = st.TensorList([torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))])
    return p.pack() if packed else p


@st.fused
def descend(p: Any, g: Any, *, lr: float) -> None:
    p.sub_(lr * g)


@torch.no_grad()
def decorated(p: Any, g: Any, lr: float) -> Any:
    p.mul_(0.5)
    descend(p, g, lr=lr)
    return p + 1


def with_a_block(p: Any, g: Any, lr: float) -> Any:
    with torch.no_grad():
        p.mul_(0.5)
        descend(p, g, lr=lr)
        return p + 1


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("step", [decorated, with_a_block])
def test_parameters_are_updated_in_a_compiled_function_that_uses_no_grad_inside(
    step: Callable[..., Any], packed: bool
) -> None:
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    p, g = parameters(packed), st.TensorList([torch.ones(2), torch.ones(3)])
    g = g.pack() if packed else g
    for lr, left in ((0.25, 0.25), (0.125, 0.0)):
        results = compiled(p, g, lr)
        assert all((t == left).all() and t.requires_grad for t in p)
        assert all((t == left + 1).all() and not t.requires_grad for t in results)
    sum((t**2).sum() for t in p).backward()
    assert all((t.grad == 2 * t).all() for t in p)
