"""Private torch APIs that compile an already traced graph of ops, with the versions checked."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx

from subtensors.dispatch.torch_internals.requires import requires

OPTIONS = ("backend", "mode", "options", "dynamic", "fullgraph", "disable")
"""Those of `torch.compile` that a traced graph has a use for, or no need of."""
_BY_PLACE = inspect.Parameter.POSITIONAL_OR_KEYWORD


@requires("torch._inductor.async_compile.maybe_warm_pool", otherwise=lambda options: None)
def start_compile_workers(options: dict[str, Any]) -> None:
    """Start the processes that compile kernels, in the background: it takes them seconds. Checked on 2.11, 2.13.

    Args:
        options: of `torch.compile`.
    """
    if _backend_name(options) == "inductor":
        from torch._inductor.async_compile import maybe_warm_pool

        maybe_warm_pool()


def is_backend(name: str) -> bool:
    """Return whether `torch.compile` knows a backend of this name."""
    return name in torch.compiler.list_backends(exclude_tags=())


class CompiledGraph:
    """A traced graph as compiled code, for inputs of many sizes. Checked on 2.11, 2.13.

    It goes to the backend as it is. `torch.compile` would run its Python once more to find the same ops, which takes
    seconds for a large model, and look at every parameter before each call.

    Args:
        module: the graph, which returns a list of tensors; those that it holds are read anew by each call.
        inputs: of some sizes.
        open_dims: which input, which of its dims: those whose sizes are left open. Sizes that are equal are taken for
            one and the same.
        options: of `torch.compile`.
    """

    @requires(
        "torch._dynamo.source.ConstantSource",
        "torch._subclasses.FakeTensorMode",
        "torch.fx.experimental.symbolic_shapes.DimDynamic",
        "torch.fx.experimental.symbolic_shapes.ShapeEnv",
        "torch.fx.experimental.symbolic_shapes.StatelessSymbolicContext",
        "torch._TorchCompileWrapper",
        "torch._TorchCompileInductorWrapper",
    )
    def __init__(
        self,
        module: fx.GraphModule,
        inputs: Sequence[Tensor],
        open_dims: Collection[tuple[int, int]],
        options: dict[str, Any],
    ) -> None:
        from torch._dynamo.source import ConstantSource
        from torch._subclasses import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

        graph, self._held = _with_tensors_as_inputs(module)
        self._sizes = ShapeEnv()
        stand_ins = FakeTensorMode(shape_env=self._sizes)
        self._inputs = []
        for i, t in enumerate([*inputs, *self._held]):
            if not t.dim():
                # With a source torch takes its value for a number of the caller's Python.
                self._inputs.append(stand_ins.from_tensor(t.detach(), static_shapes=True))
                continue
            kinds = [DimDynamic.DUCK if (i, d) in open_dims else DimDynamic.STATIC for d in range(t.dim())]
            context = StatelessSymbolicContext(dynamic_sizes=kinds)  # type: ignore[var-annotated]
            source = ConstantSource(f"t{i}")
            self._inputs.append(stand_ins.from_tensor(t.detach(), symbolic_context=context, source=source))
        self._code: Callable[..., Sequence[Tensor]] = _backend(options)(graph, self._inputs)
        self._consumer = _consumer(self._code)

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        """Run it."""
        return list(self._code(*inputs, *self._held))

    def consume(self, inputs: list[Tensor]) -> list[Tensor]:
        """Run it on a list that is empty afterwards: what nobody else holds is freed once it was read."""
        taken = [*inputs, *self._held]
        inputs.clear()
        return list(self._consumer(taken))

    def serves(self, inputs: Sequence[Tensor]) -> bool:
        """Return whether the compiler's guards on the open sizes hold for these inputs."""
        return self._sizes.evaluate_guards_for_args(self._inputs[: len(inputs)], inputs)


def _backend_name(options: dict[str, Any]) -> Any:
    """The backend, by name or itself."""
    return "eager" if options.get("disable") else options.get("backend") or "inductor"


def _backend(options: dict[str, Any]) -> Callable[..., Any]:
    """The callable that `torch.compile` would call with a graph and its inputs."""
    backend = _backend_name(options)
    mode, more = options.get("mode"), options.get("options")
    if backend != "inductor":
        return torch._TorchCompileWrapper(backend, mode, more, True)
    inductor = torch._TorchCompileInductorWrapper(mode, more, True)
    # The caller captures; some modes would as well.
    inductor.config["triton.cudagraphs"] = False
    return inductor


def _consumer(code: Callable[..., Sequence[Tensor]]) -> Callable[[list[Tensor]], Sequence[Tensor]]:
    """A backend's code as a function of a list, which it empties if it is of torch's making. Checked on 2.11, 2.13.

    What such a function is wrapped in has its marks, and takes the tensors one by one.
    """
    inner: Any = code
    while inner is not None:
        parameters = inspect.signature(inner, follow_wrapped=False).parameters.values()
        if getattr(inner, "_boxed_call", False) and [p.kind for p in parameters] == [_BY_PLACE]:
            return cast("Callable[[list[Tensor]], Sequence[Tensor]]", inner)
        inner = getattr(inner, "__wrapped__", None)
    return lambda inputs: code(*inputs)


def _with_tensors_as_inputs(module: fx.GraphModule) -> tuple[fx.GraphModule, list[Tensor]]:
    """A copy of a graph that takes the tensors it held after its inputs, and these.

    As constants their values might be compiled in.
    """
    graph = fx.Graph()
    made = {node: graph.node_copy(node) for node in module.graph.find_nodes(op="placeholder")}
    held: dict[int, tuple[Tensor, fx.Node]] = {}
    for node in module.graph.find_nodes(op="get_attr"):
        found: Any = module
        for name in str(node.target).split("."):
            found = getattr(found, name)
        if id(found) not in held:
            held[id(found)] = found, graph.placeholder(f"held_{len(held)}")
        made[node] = held[id(found)][1]
    for node in module.graph.nodes:
        if node not in made:
            made[node] = graph.node_copy(node, made.__getitem__)
    return fx.GraphModule({}, graph), [tensor for tensor, _ in held.values()]
