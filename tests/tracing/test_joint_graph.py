"""What is done to a graph of a program and its gradients before it is compiled."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode

from subtensors.dispatch.tracing.joint_graph import _cast_in_products, _merge_equals

aten, prims = torch.ops.aten, torch.ops.prims


def made(program: Callable[..., list[fx.Node]], device: str = "cpu") -> fx.Graph:
    """A graph of ops on two matrices in bfloat16, which has their values."""
    graph = fx.Graph()
    with FakeTensorMode() as mode:
        values = {name: torch.empty(4, 4, dtype=torch.bfloat16, device=device) for name in ("a", "b")}

    def call(op: torch._ops.OpOverload, *args: object) -> fx.Node:
        node = graph.call_function(op, args)
        with mode:
            node.meta["val"] = op(*[x.meta["val"] if isinstance(x, fx.Node) else x for x in args])
        return node

    inputs = [graph.placeholder(name) for name in values]
    for node, value in zip(inputs, values.values(), strict=True):
        node.meta["val"] = value
    graph.output(program(call, *inputs))
    return graph


def ops(graph: fx.Graph) -> list[str]:
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


def test_equal_values_are_computed_once_and_random_ones_each_time() -> None:
    def program(call: Callable[..., fx.Node], a: fx.Node, b: fx.Node) -> list[fx.Node]:
        first, second = (call(aten.mul.Tensor, call(aten.detach.default, a), b) for _ in range(2))
        drawn = [call(aten.rand_like.default, x) for x in (first, second)]
        return [call(aten.add.Tensor, first, second), *drawn, call(aten.mul.Tensor, a, b)]

    graph = made(program)
    of_output = graph.output_node().args[0][-1]  # type: ignore[index]
    first = _merge_equals(graph, distinct=[])
    graph.eliminate_dead_code()
    assert ops(graph) == ["aten.mul.Tensor", "aten.rand_like.default", "aten.rand_like.default", "aten.add.Tensor"]
    assert first[of_output].target is aten.mul.Tensor  # type: ignore[index]
    assert first[of_output] is not of_output  # type: ignore[index]


def test_a_tangent_is_not_merged_with_the_value_it_was_traced_as() -> None:
    graph = made(lambda call, a, b: [call(aten.ones_like.default, a), call(aten.ones_like.default, a)])
    _merge_equals(graph, distinct=[graph.output_node().args[0][1]])  # type: ignore[index,list-item]
    graph.eliminate_dead_code()
    assert len(ops(graph)) == 2


@pytest.mark.parametrize("also", ["", "product", "sum"])
def test_a_product_that_is_only_cast_returns_float32_on_a_gpu(also: str) -> None:
    def program(call: Callable[..., fx.Node], a: fx.Node, b: fx.Node) -> list[fx.Node]:
        product = call(aten.mm.default, a, b)
        turned = call(aten.permute.default, call(aten.permute.default, product, [1, 0]), [1, 0])
        cast = call(prims.convert_element_type.default, turned, torch.float32)
        if also == "sum":
            return [call(aten.add.Tensor, cast, cast), cast]
        return [cast, product] if also else [cast]

    kept = ["aten.mm.default", "aten.permute.default", "aten.permute.default", "prims.convert_element_type.default"]
    kept += ["aten.add.Tensor"] * (also == "sum")
    for device in ("cpu", "cuda"):
        graph = made(program, device)
        _cast_in_products(graph, list(graph.output_node().args[0]), distinct=frozenset())  # type: ignore[arg-type]
        is_changed = device == "cuda" and not also
        assert ops(graph) == (["aten.mm.dtype", *kept[1:3]] if is_changed else kept)


@pytest.mark.gpu
def test_products_that_return_float32_are_more_exact() -> None:
    a, b = (torch.randn(256, 256, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    truth = a.double() @ b.double()

    def error(x: Tensor) -> float:
        return float((x - truth).norm())

    assert error(aten.mm.dtype(a, b, torch.float32)) < error(a @ b)
