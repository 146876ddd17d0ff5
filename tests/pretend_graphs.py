"""CUDA graphs as a CPU can pretend to have them: a capture runs nothing, and a replay writes where the capture said.

What a capture returns holds NaN until it is replayed, and again once another graph of the pool was replayed.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from subtensors.bucketed.bucket import Bucket
from subtensors.bucketed.recorder import Recorder
from subtensors.bucketed.report.statistics import BucketStatistics
from subtensors.bucketed.state.program_state import State


class PretendGraph:
    """A program that was captured.

    Args:
        pool: of the graph.
        program: returns what has `tensors()`.
        out: what it returned.
    """

    def __init__(self, pool: PretendPool, program: Callable[[], Any], out: Any) -> None:
        self.pool, self.program, self.out = pool, program, out
        self.spoil()

    def spoil(self) -> None:
        """Overwrite what it returned, but for inputs, which are not in the pool."""
        inputs = {t.data_ptr() for bucket in self.pool.buckets if bucket.is_allocated for t in bucket.inputs()}
        for t in self.out.tensors():
            if t.untyped_storage().data_ptr() not in inputs:
                t.fill_(float("nan") if t.is_floating_point() else -1)

    def replay(self) -> None:
        """Run the program again, into the tensors that the capture returned."""
        for other in self.pool.graphs:
            other.spoil()
        with torch.no_grad():
            for there, now in zip(self.out.tensors(), self.program().tensors(), strict=True):
                there.copy_(now)


class PretendPool:
    """What `GraphPool` is on a GPU.

    Args:
        state: of the program.
        watches: does it look for tensors that outlive a capture? It takes a while.
    """

    def __init__(self, state: State, watches: bool) -> None:
        self.state, self.watches = state, watches
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
        values = [(t, t.clone()) for t in self.state.tensors()]
        self.is_capturing = True
        try:
            with torch.random.fork_rng([]):
                out = program()
        finally:
            self.is_capturing = False
            for t, value in values:
                t.copy_(value)
        self.captures += 1
        self.graphs.append(PretendGraph(self, program, out))
        if self.watches:
            self._held += _tensors() - before - len(out.tensors())
        return self.graphs[-1], out

    def unowned(self, tensors: Iterable[Tensor]) -> dict[Tensor, Tensor]:
        return {}

    def is_current(self) -> bool:
        return True

    def as_current(self) -> AbstractContextManager[None]:
        return nullcontext()

    def order(self) -> None:
        pass

    def drop(self, graph: PretendGraph) -> None:
        graph.spoil()
        self.graphs.remove(graph)

    def bytes(self) -> int:
        return sum(t.nbytes for graph in self.graphs for t in graph.out.tensors())

    def held_bytes(self) -> int:
        return self._held


def _tensors() -> int:
    """How many there are, but for what only waits to be collected."""
    gc.collect()
    return sum(issubclass(type(x), Tensor) for x in gc.get_objects())


def pretend(patch: pytest.MonkeyPatch, watches: bool = False) -> list[PretendPool]:
    """Have programs on a CPU captured into pools like a GPU's, where no gradients are asked for.

    Args:
        patch: undoes it.
        watches: see `PretendPool`.

    Returns:
        The pools, one a runner, as they come to be.
    """
    pools: list[PretendPool] = []
    plain = Recorder._new

    def new(recorder: Any, is_followed: bool, *arguments: Any) -> Any:
        bucket: Any = plain(recorder, is_followed, *arguments)
        if not is_followed:
            if bucket.device not in recorder.pools:
                pools.append(PretendPool(recorder.state, watches))
                recorder.pools[bucket.device] = pools[-1]
            bucket.pool = recorder.pools[bucket.device]
            bucket.pool.buckets.append(bucket)
        return bucket

    patch.setattr(Recorder, "_new", new)
    patch.setattr(BucketStatistics, "is_sampled", lambda self: False)
    return pools
