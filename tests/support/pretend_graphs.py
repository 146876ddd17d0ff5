"""CUDA graphs as a CPU can pretend to have them: a capture computes nothing, and a replay is its ops without Python.

What a graph made holds NaN until it is replayed, and again once another graph of the pool was replayed.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
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
    """

    def __init__(self, pool: PretendPool, tape: Tape) -> None:
        self.pool, self.tape = pool, tape
        tape.spoil()

    def replay(self) -> None:
        """Run its ops again, over what the other graphs left; a backward reads what its forward did."""
        for other in self.pool.graphs:
            if other is not self and not self.tape.reads_of(other.tape):
                other.tape.spoil()
        self.tape.replay()


class PretendPool:
    """What `GraphPool` is on a GPU.

    Args:
        watches: does it look for tensors that outlive a capture? It takes a while.
    """

    def __init__(self, watches: bool) -> None:
        self.watches = watches
        self.graphs: list[PretendGraph] = []
        self.buckets: list[Bucket] = []
        self.runs = self.captures = 0
        self.is_capturing = False
        self._held = 0

    def run(self, program: Callable[[], Any]) -> Any:
        self.runs += 1
        return program()

    def capture(self, program: Callable[[], Any]) -> tuple[PretendGraph, Any]:
        before = _tensors() if self.watches else 0
        inputs = [t for bucket in self.buckets if bucket.is_allocated for t in bucket.inputs()]
        self.is_capturing = True
        try:
            with taped(inputs) as tape:
                out = program()
        finally:
            self.is_capturing = False
        self.captures += 1
        if self.watches:
            self._held += _tensors() - before - len(_results(out)) - tape.kept()
        self.graphs.append(PretendGraph(self, tape))
        return self.graphs[-1], out

    def non_owning_aliases(self, tensors: Iterable[Tensor]) -> dict[Tensor, Tensor]:
        return {}

    def wait_for_last_replay(self) -> None:
        pass

    def drop(self, graph: PretendGraph) -> None:
        self.graphs.remove(graph)

    def bytes(self) -> int:
        return sum(t.nbytes for graph in self.graphs for t in graph.tape.made)

    def active_bytes(self) -> int:
        return self._held


def _results(out: Any) -> list[Tensor]:
    """What a capture gives: a forward its outputs, a backward gradients."""
    return [x for x in out if x is not None] if isinstance(out, list) else out.tensors()


def _tensors() -> int:
    """How many there are, but for what only waits to be collected."""
    gc.collect()
    return sum(issubclass(type(x), Tensor) for x in gc.get_objects())


def pretend(patch: pytest.MonkeyPatch, watches: bool = False, trained: bool = False) -> list[PretendPool]:
    """Have programs on a CPU captured into pools like a GPU's.

    Args:
        patch: undoes it.
        watches: see `PretendPool`.
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
                pools.append(PretendPool(watches))
                graph_cache.pools[bucket.device] = pools[-1]
            bucket.pool = graph_cache.pools[bucket.device]
            bucket.pool.buckets.append(bucket)
        return bucket

    patch.setattr(GraphCache, "_new", new)
    patch.setattr(Bucket, "is_timed_replay", lambda self: False)
    return pools
