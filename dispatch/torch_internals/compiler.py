"""Private torch APIs that compile an already traced graph of ops, with the versions checked."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from typing import cast

import torch
from torch import Tensor, fx

from subtensors.dispatch.torch_internals.requires import requires

OPTIONS = ("backend", "mode", "options", "dynamic", "fullgraph", "disable")
"""The options of `torch.compile` that apply to a traced graph, or that it can ignore."""

Code = Callable[..., Sequence[Tensor]]

_BY_PLACE = inspect.Parameter.POSITIONAL_OR_KEYWORD


@requires("torch._inductor.async_compile.maybe_warm_pool", otherwise=lambda options: None)
def start_compile_workers(options: Mapping[str, object]) -> None:
    """Start the processes that compile kernels, in the background, since that takes seconds. Checked on 2.11, 2.13."""
    if _backend_name(options) == "inductor":
        from torch._inductor.async_compile import maybe_warm_pool

        maybe_warm_pool()


@requires("torch._functorch.config.activation_memory_budget", otherwise=nullcontext)
def recomputing_what_fuses() -> AbstractContextManager[None]:
    """A context in which code is compiled to recompute in its backward what fuses into kernels there.

    Without it the compiler keeps what a product of the backward reads, such as a gated activation, though the kernel
    that writes its gradient could write it too. Any number below 1 says so; those near 1 recompute no products.
    Checked on 2.11, 2.13.
    """
    from torch._functorch import config

    return cast(AbstractContextManager[None], config.patch(activation_memory_budget=0.99))


def is_backend(name: str) -> bool:
    """Return whether `torch.compile` knows a backend of this name."""
    return name in torch.compiler.list_backends(exclude_tags=())


class CompiledGraph:
    """A traced graph as compiled code, for inputs of many sizes. Checked on 2.11, 2.13.

    It goes straight to the backend. `torch.compile` would run its Python once more to find the same ops, which takes
    seconds for a large model, and check every parameter before each call.

    Args:
        module: the graph, which returns a list of tensors; each call reads the module's own tensors again.
        inputs: tensors of some sizes.
        open_dims: (input, dim) pairs whose sizes are dynamic. Equal sizes become one symbol.
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
        options: Mapping[str, object],
    ) -> None:
        from torch._dynamo.source import ConstantSource
        from torch._subclasses import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

        graph, self._own_tensors = _with_tensors_as_inputs(module)
        self._sizes = ShapeEnv()
        fake_mode = FakeTensorMode(shape_env=self._sizes)
        self._inputs = []
        for i, t in enumerate([*inputs, *self._own_tensors]):
            if not t.dim():
                # With a source torch would take its value for a Python number of the caller.
                self._inputs.append(fake_mode.from_tensor(t.detach(), static_shapes=True))
                continue
            kinds = [DimDynamic.DUCK if (i, d) in open_dims else DimDynamic.STATIC for d in range(t.dim())]
            context = StatelessSymbolicContext(dynamic_sizes=kinds)  # type: ignore[var-annotated]
            source = ConstantSource(f"t{i}")
            self._inputs.append(fake_mode.from_tensor(t.detach(), symbolic_context=context, source=source))
        self._code: Code = _backend(options)(graph, self._inputs)
        self._boxed = _boxed(self._code)

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        """Run it."""
        return list(self._code(*inputs, *self._own_tensors))

    def consume(self, inputs: list[Tensor]) -> list[Tensor]:
        """Run it on a list, which is emptied: tensors with no other reference are freed once they were read."""
        operands = [*inputs, *self._own_tensors]
        inputs.clear()
        return list(self._boxed(operands))

    def serves(self, inputs: Sequence[Tensor]) -> bool:
        """Return whether the compiler's guards on the open sizes hold for these inputs."""
        return self._sizes.evaluate_guards_for_args(self._inputs[: len(inputs)], inputs)


def _backend_name(options: Mapping[str, object]) -> object:
    """The backend, by name or itself."""
    return "eager" if options.get("disable") else options.get("backend") or "inductor"


def _backend(options: Mapping[str, object]) -> Callable[[fx.GraphModule, Sequence[Tensor]], Code]:
    """The callable that `torch.compile` would call with a graph and its inputs."""
    backend = _backend_name(options)
    mode, more = options.get("mode"), options.get("options")
    if backend != "inductor":
        return torch._TorchCompileWrapper(backend, mode, more, True)
    inductor = torch._TorchCompileInductorWrapper(mode, more, True)
    # The caller captures; some modes would, too.
    inductor.config["triton.cudagraphs"] = False
    return inductor


def _boxed(code: Code) -> Callable[[list[Tensor]], Sequence[Tensor]]:
    """A backend's code as a function of a list, which torch's own backends empty. Checked on 2.11, 2.13.

    A wrapper of such a function carries its attributes, but takes the tensors one by one.
    """
    inner: Callable[..., object] | None = code
    while inner is not None:
        parameters = inspect.signature(inner, follow_wrapped=False).parameters.values()
        if getattr(inner, "_boxed_call", False) and [p.kind for p in parameters] == [_BY_PLACE]:
            return cast("Callable[[list[Tensor]], Sequence[Tensor]]", inner)
        inner = getattr(inner, "__wrapped__", None)
    return lambda inputs: code(*inputs)


def _with_tensors_as_inputs(module: fx.GraphModule) -> tuple[fx.GraphModule, list[Tensor]]:
    """A copy of a graph that takes the module's own tensors after its inputs, and these tensors.

    As constants their values might be compiled in.
    """
    graph = fx.Graph()
    made = {node: graph.node_copy(node) for node in module.graph.find_nodes(op="placeholder")}
    own: dict[int, tuple[Tensor, fx.Node]] = {}
    for node in module.graph.find_nodes(op="get_attr"):
        tensor = attrgetter(str(node.target))(module)
        if id(tensor) not in own:
            own[id(tensor)] = tensor, graph.placeholder(f"own_{len(own)}")
        made[node] = own[id(tensor)][1]
    for node in module.graph.nodes:
        if node not in made:
            made[node] = graph.node_copy(node, made.__getitem__)
    return fx.GraphModule({}, graph), [tensor for tensor, _ in own.values()]
