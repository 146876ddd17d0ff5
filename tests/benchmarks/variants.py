"""The optimizers that are measured, each called the way its documentation says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.side_stream import on_side_stream

Step = Callable[[], object]


def _foreach(parameters: list[Tensor]) -> Step:
    return torch.optim.Adam(parameters, lr=1e-3, foreach=True).step


def _fused(parameters: list[Tensor]) -> Step:
    return torch.optim.Adam(parameters, lr=1e-3, fused=True).step


def compiled_adam(parameters: list[Tensor], mode: str | None = None) -> Step:
    """Return torch's step compiled the tutorial's way: the learning rate and the step count are on the device."""
    device = parameters[0].device
    lr = torch.tensor(1e-3, device=device)
    is_cuda = device.type == "cuda"  # foreach takes a learning rate that is a tensor only where it is capturable
    optimizer = torch.optim.Adam(parameters, lr=lr, foreach=is_cuda, capturable=is_cuda)
    step: Step = torch.compile(optimizer.step, fullgraph=False, mode=mode)
    return step


def _subtensors(parameters: list[Tensor]) -> Step:
    from subtensors.optim import Adam  # here, so that a peer's process does not hold it

    return Adam(parameters, lr=1e-3).step


def _subtensors_master(parameters: list[Tensor]) -> Step:
    from subtensors.optim import Adam

    return Adam(parameters, lr=1e-3, master_weights=True).step


def as_it_is(step: Step) -> Step:
    """The step."""
    return step


def as_graph(step: Step) -> Step:
    """The replay of the step, captured by hand after a warm-up on a side stream."""
    with on_side_stream():
        for _ in range(3):
            step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    replay: Step = graph.replay
    return replay


@dataclass(frozen=True)
class Variant:
    """One way to take a step: of Adam, where nothing else is said.

    Args:
        make: gives the step over parameters that have gradients.
        settle: what becomes of the step once its first two calls were timed.
        compiles_per_tensor: its first step takes minutes over a thousand tensors.
        needs_gpu: it exists only there.
        master_weights: it keeps float32 copies of low-precision parameters; measured only on sets that have some.
        sets: where it is measured; None for the main ones.
        element_bytes: the least that a step moves for an element of a float32 parameter; None for Adam's.
        package: what must be installed for it.
    """

    make: Callable[[list[Tensor]], Step]
    settle: Callable[[Step], Step] = as_it_is
    compiles_per_tensor: bool = False
    needs_gpu: bool = False
    master_weights: bool = False
    sets: tuple[str, ...] | None = None
    element_bytes: float | None = None
    package: str | None = None


VARIANTS: dict[str, Variant] = {
    "foreach": Variant(_foreach),
    "fused": Variant(_fused),
    "compile": Variant(compiled_adam, compiles_per_tensor=True),
    "subtensors": Variant(_subtensors),
    "subtensors-graph": Variant(_subtensors, as_graph, needs_gpu=True),
    "subtensors-master": Variant(_subtensors_master, master_weights=True),
}
