"""Tracing functions of tensors into graphs of aten ops, and the values of a joint graph to save for backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.fx
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from subtensors.dispatch.ops.plain_types import PLAIN_TYPES, PlainViews
from subtensors.dispatch.ops.tree import Args, Kwargs, PyTree
from subtensors.dispatch.torch_internals import dispatcher, ops
from subtensors.dispatch.torch_internals.requires import requires


class NotFunctional(Exception):
    """A function has side effects; the message says which."""


@requires("torch.compiler._is_compiling_flag", "torch.fx.experimental.proxy_tensor.make_fx")
def trace_aten(
    function: Callable[..., object], inputs: Sequence[Tensor], decomposed: bool = False
) -> torch.fx.GraphModule:
    """Trace the aten ops of a function of tensors, without running them. Checked on 2.11, 2.13.

    Tensors that are not among the inputs become attributes of the module, themselves and not copies.

    Args:
        function: what to trace.
        inputs: of the sizes to trace it at.
        decomposed: apply the compiler's decompositions, and replace writes to intermediate results.

    Raises:
        NotFunctional: the function writes to a tensor that is not among the inputs, and `decomposed` is set.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    # Programs check whether they are compiled before they read values, of which a trace has none.
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        # RestoreWrites is outside of the trace, so that it gets the ops that run on real tensors all the same.
        with RestoreWrites(), torch.no_grad(), PlainViews():
            table = _decompositions() if decomposed else None
            module: torch.fx.GraphModule = make_fx(function, table, tracing_mode="fake", _allow_non_fake_inputs=True)(
                *inputs
            )
            if decomposed and any(map(mutates, module.graph.nodes)):
                functional = torch.func.functionalize(module, remove="mutations")
                retrace = make_fx(functional, table, tracing_mode="fake", _allow_non_fake_inputs=True)
                try:
                    module = retrace(*[t.detach() for t in inputs])
                except RuntimeError as error:  # torch calls it an internal assertion
                    if "non-functional tensor" not in str(error):
                        raise
                    raise NotFunctional("it writes to a tensor that is not among its inputs") from error
    finally:
        torch.compiler._is_compiling_flag = before
    return module


def mutates(node: torch.fx.Node) -> bool:
    """Return whether a node calls an op that writes to its arguments."""
    return isinstance(node.target, OpOverload) and bool(node.target._schema.is_mutable)


@requires("torch._inductor.decomposition.select_decomp_table")
def _decompositions() -> dict[OpOverload, Callable[..., object]]:
    from torch._inductor.decomposition import select_decomp_table

    table: dict[OpOverload, Callable[..., object]] = select_decomp_table()
    return table


@requires("torch._functorch.partitioners.min_cut_rematerialization_partition")
def saved_for_backward(
    graph: torch.fx.Graph, owner: torch.nn.Module, results: int, gradients: int
) -> list[torch.fx.Node]:
    """Return the nodes of a joint graph that the compiler would save in forward for backward. Checked on 2.11, 2.13.

    Args:
        graph: returns results, gradients, and the placeholders of the results' gradients; its nodes have the values
            with which it was traced.
        owner: has the graph's constants.
        results, gradients: the number of each.
    """
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    outs = returned_nodes(graph)
    tangents = outs[results + gradients :]
    copy = torch.fx.Graph()
    twins: dict[torch.fx.Node, torch.fx.Node] = {}
    for i, node in enumerate([*graph.find_nodes(op="placeholder"), *tangents]):
        twins[node] = copy.placeholder(f"tangents_{i}" if node in tangents else f"primals_{i}")
        twins[node].meta = dict(node.meta)
    for node in graph.nodes:
        if node not in twins and node.op != "output":
            twins[node] = copy.node_copy(node, twins.__getitem__)
    copy.output([twins[node] for node in outs[: results + gradients]])
    joint = torch.fx.GraphModule(owner, copy)
    forward, _ = min_cut_rematerialization_partition(joint, (), num_fwd_outputs=results)
    names = {twin.name: node for node, twin in twins.items()}
    return [names[node.name] for node in returned_nodes(forward.graph)[results:]]


def returned_nodes(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """Return the nodes that a graph returns."""
    return list(graph.output_node().args[0])  # type: ignore[arg-type]


class RestoreWrites(TorchDispatchMode):
    """A mode that copies each tensor before its first write, and writes the copies back at its exit.

    A trace writes to fake tensors only, but an op without fake arguments runs: `steps.add_(1)` on a tensor that the
    program owns.

    Example:
        >>> x = torch.ones(2)
        >>> with RestoreWrites():
        ...     print(x.add_(1))
        tensor([2., 2.])
        >>> x
        tensor([1., 1.])
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}
        """Each written tensor and its copy, by the tensor's id."""

    def __torch_dispatch__(  # type: ignore[override]
        self, op: OpOverload, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> PyTree:
        """Run the op after copying the tensors that it writes to."""
        kwargs = kwargs or {}
        for i, argument in enumerate(ops.schema_of(op).arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                x: PyTree = args[i] if i < len(args) else kwargs.get(argument.name)
                if type(x) in PLAIN_TYPES and id(x) not in self._copies:
                    with dispatcher.without_modes():
                        self._copies[id(x)] = x, x.clone()
        return op(*args, **kwargs)

    def __exit__(self, *error: object) -> None:
        """Write the copies back."""
        super().__exit__(*error)  # type: ignore[no-untyped-call, arg-type]
        with torch.no_grad():
            for x, values in self._copies.values():
                x.copy_(values)
