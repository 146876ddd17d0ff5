"""CUDA graphs as a CPU can pretend to have them: a capture computes nothing, and a replay is its ops without Python.

What a graph made holds NaN until it is replayed, and again once another graph of the pool was replayed.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from aten_tape import Tape, taped
from torch import Tensor

from subtensors.bucketed.bucket import Bucket
from subtensors.bucketed.graph_cache import GraphCache


class PretendGraph:
    """A program that was captured.

    Args:
        pool: of the graph.
        tape: what it did.
        results: what it gives, which the bucket holds.
    """

    def __init__(self, pool: PretendPool, tape: Tape, results: list[Tensor]) -> None:
        self.pool, self.tape, self.results = pool, tape, [x.detach() for x in results]
        tape.spoil()

    def replay(self) -> None:
        """Run its ops again, over what the other graphs left; a backward reads what its forward did."""
        for other in self.pool.graphs:
            if other is not self and not self.tape.reads_of(other.tape):
                other.tape.spoil()
        self.tape.check_use_after_free([graph.tape for graph in self.pool.graphs])
        self.tape.replay()


class PretendPool:
    """A pool of pretended graphs, in place of a `GraphPool`."""

    def __init__(self) -> None:
        self.graphs: list[PretendGraph] = []
        self.buckets: list[Bucket] = []
        self.runs = self.captures = 0
        self.is_capturing = False

    def run(self, program: Callable[[], Any]) -> Any:
        self.runs += 1
        return program()

    def capture(self, program: Callable[[], Any]) -> tuple[PretendGraph, Any]:
        inputs = [t for bucket in self.buckets if bucket.is_allocated for t in bucket.inputs()]
        self.is_capturing = True
        try:
            with taped(inputs) as tape:
                out = program()
        finally:
            self.is_capturing = False
        self.captures += 1
        self.graphs.append(PretendGraph(self, tape, _results(out)))
        return self.graphs[-1], out

    def non_owning_aliases(self, tensors: Iterable[Tensor]) -> dict[Tensor, Tensor]:
        return {}

    def outside(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [t for t in tensors if not any(graph.tape.is_unknown(t) for graph in self.graphs)]

    def wait_for_last_replay(self) -> None:
        pass

    def drop(self, graph: PretendGraph) -> None:
        self.graphs.remove(graph)

    def bytes(self) -> int:
        return sum(t.nbytes for graph in self.graphs for t in graph.tape.made)

    def active_bytes(self) -> int:
        """The bytes of what a program keeps; what only waits to be collected is nobody's."""
        if self._kept_bytes():
            gc.collect()
        return self._kept_bytes()

    def _kept_bytes(self) -> int:
        tapes = [graph.tape for graph in self.graphs]
        return sum(graph.tape.kept_bytes(tapes, graph.results) for graph in self.graphs)


def _results(out: Any) -> list[Tensor]:
    """Return the tensors that a capture gives: the outputs of a forward, the gradients of a backward."""
    return [x for x in out if x is not None] if isinstance(out, list) else out.tensors()


def pretend(patch: pytest.MonkeyPatch, trained: bool = False) -> list[PretendPool]:
    """Have programs on a CPU captured into pools like a GPU's.

    Args:
        patch: undoes it.
        trained: those as well that autograd tracks.

    Returns:
        The pools, one a runner, as they come to be.
    """
    pools: list[PretendPool] = []
    plain = GraphCache._new

    def new(graph_cache: Any, requires_grad: bool, *arguments: Any) -> Any:
        bucket: Any = plain(graph_cache, requires_grad, *arguments)
        if bucket.device.type == "cpu" and (trained or not requires_grad):
            if bucket.device not in graph_cache.pools:
                pools.append(PretendPool())
                graph_cache.pools[bucket.device] = pools[-1]
            bucket.pool = graph_cache.pools[bucket.device]
            bucket.pool.buckets.append(bucket)
        return bucket

    patch.setattr(GraphCache, "_new", new)
    patch.setattr(Bucket, "is_timed_replay", lambda self: False)
    return pools
