"""The launches that a recording replays: a CUDA graph, or one by one where Triton interprets kernels on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch

from subtensors.dispatch.graphs import capture, deferred_finalizers
from subtensors.dispatch.graphs.cublas_workspaces import make_workspaces
from subtensors.kernels.runtime.current_device import on_stream


class CudaTape:
    """Launches as a CUDA graph.

    Args:
        device: a CUDA device, with its index.
        has_ops: whether there are torch ops among the calls.
    """

    def __init__(self, device: torch.device, has_ops: bool) -> None:
        self.device, self.has_ops = device, has_ops
        self.graph = capture.new_graph(device)
        self.replay: Callable[[], None] = self.graph.replay

    def record(self, calls: Callable[[], object]) -> None:
        """Capture the calls on a stream of their own; other threads may go on using the device."""
        current, side = torch.cuda.current_stream(self.device), torch.cuda.Stream(self.device)
        side.wait_stream(current)
        pool = torch.cuda.graph_pool_handle()
        with deferred_finalizers.no_gc_during_capture(), on_stream(side):
            if self.has_ops:
                make_workspaces(self.device)
            with capture.captured(self.graph, self.device, pool):
                calls()
        current.wait_stream(side)

    def take(self, run: Callable[[], None]) -> None:
        """Capture one launch."""
        run()

    def reset(self) -> None:
        """Give the graph back, which ends the capture of another one that is on."""
        self.graph.reset()


class HostTape:
    """Launches as what makes them, for kernels that Triton interprets."""

    def __init__(self) -> None:
        self.runs: list[Callable[[], None]] = []

    def record(self, calls: Callable[[], object]) -> None:
        """Make the calls, whose launches are taken."""
        calls()

    def take(self, run: Callable[[], None]) -> None:
        """Keep one launch."""
        self.runs.append(run)

    def replay(self) -> None:
        """Make the launches."""
        for run in self.runs:
            run()

    def reset(self) -> None:
        """Forget the launches."""
        self.runs.clear()
