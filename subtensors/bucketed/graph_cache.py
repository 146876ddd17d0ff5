"""The graphs of a bucketed program: captured within a budget, evicted, and dropped when what they read is stale.

```
    first call of a size                                   later calls
    --------------------                                   -----------
    bucket_of(spec) -> Bucket -> run once ---> capture --> replay (by the runner)
                                 (the answer)    ^            |
                                                 |            | first_change(): "weight was replaced"
      evicted for max_graphs or memory_limit:    |            v
      the least recently called graphs ----------+----- drop_stale: all graphs
                                             recapture
```

The program runs once before its first capture alone: at another size the capture is its first run, and a replay the
answer, unless the program is compiled, keeps tensors that it makes, or tunes something, at every size.

A capture records addresses, so everything that it reads must stay where it is: the static inputs of the bucket, and
the state of the program (`state_guard.py`). When `StateGuard.first_change()` names a change, `drop_stale` drops every
graph, takes a new snapshot, and the next call of each bucket recaptures it. A program that never reaches a replay
between recaptures is not captured any more. All graphs of a device share one memory pool (`dispatch/graphs/pool.py`),
so evicting one returns its part of the memory, and a replay overwrites what other graphs computed: `replay_count` tells
a backward whether its forward must be replayed again (`autograd_nodes.py`).
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Sequence

import torch

from subtensors.bucketed.bucket import Bucket, Call
from subtensors.bucketed.call_key import in_modes
from subtensors.bucketed.call_spec import BucketKey, CallSpec
from subtensors.bucketed.compiled import CompileCache, CompiledBucket, CompileOptions
from subtensors.bucketed.compiled_gradients import CompiledTrainedBucket
from subtensors.bucketed.program_state import State
from subtensors.bucketed.reachable_state import generators_in
from subtensors.bucketed.side_effects import ObjectSnapshot, Snapshot, rolled_back
from subtensors.bucketed.state_guard import StateGuard
from subtensors.bucketed.trained_bucket import TrainedBucket
from subtensors.counts import format_bytes
from subtensors.dispatch.graphs import capture
from subtensors.dispatch.graphs.guards import Writes
from subtensors.dispatch.graphs.pool import GraphPool
from subtensors.dispatch.ops.errors import RuleError
from subtensors.dispatch.ops.tree import PyTree
from subtensors.dispatch.torch_internals import autograd

_log = logging.getLogger("subtensors.bucketed")

MAX_WASTED_RECAPTURES = 8
"""After this many recaptures in a row without a replay between them, nothing is captured any more."""

MAX_BUCKETS = 4096
"""The number of buckets above which the oldest one without a graph is forgotten."""


class GraphCache:
    """The buckets of a program and their graphs.

    Args:
        name: of the program.
        state: what it reads besides its arguments.
        max_graphs, memory_limit: the budget.
        compile_options: of `torch.compile`; None if compilation is off.
    """

    def __init__(
        self,
        name: str,
        state: State,
        max_graphs: int | None,
        memory_limit: int | None,
        compile_options: CompileOptions | None,
    ) -> None:
        self.name, self.state = name, state
        self.max_graphs, self.memory_limit, self.compile_options = max_graphs, memory_limit, compile_options
        self.compile_cache = None if compile_options is None else CompileCache(compile_options)
        self.buckets: dict[BucketKey, Bucket] = {}
        self.pools: dict[torch.device, GraphPool] = {}
        self.replay_count = 0
        """The number of replays so far; each overwrites what earlier ones left in the graphs' memory."""
        self.call_numbers = itertools.count(1)
        """Counts calls, to order buckets by their last one."""
        self.evictions = 0
        self.no_graph_reason = ""
        """The reason why nothing is captured any more, or ""."""
        self.notes: Counter[str] = Counter()
        """Events that cost graphs without a fallback, and how often each was seen."""
        self.forgotten_fallbacks: Counter[str] = Counter()
        """The fallbacks that buckets had counted which are forgotten now."""
        self._wasted_recaptures = self._hits_before = 0
        self._shared_first_runs: dict[BucketKey, Bucket | None] = {}
        """By family of calls, the bucket whose first run serves all its sizes; None if each size needs one."""

    def bucket_of(
        self, requires_grad: bool, spec: CallSpec, leaves: Sequence[PyTree], call: Call, device: torch.device
    ) -> Bucket:
        """Return the bucket of a call; make it if it is new.

        Args:
            requires_grad: whether autograd tracks the call.
            spec: the call's spec.
            leaves: the call's leaves.
            call: runs the program.
            device: of the static inputs.
        """
        found = self.buckets.get(spec.bucket_key)
        if found is None:
            found = self.buckets[spec.bucket_key] = self._new(requires_grad, spec, leaves, call, device)
            self._drop_uncaptured()
        return found

    def _new(
        self, requires_grad: bool, spec: CallSpec, leaves: Sequence[PyTree], call: Call, device: torch.device
    ) -> Bucket:
        arguments, cache = (spec, leaves, call, device, self.state, self._pool(device)), self.compile_cache
        if cache is None:
            return TrainedBucket(*arguments) if requires_grad else Bucket(*arguments)
        bucket = CompiledTrainedBucket(*arguments) if requires_grad else CompiledBucket(*arguments)
        bucket.take_code(cache)
        return bucket

    def _pool(self, device: torch.device) -> GraphPool | None:
        if device.type != "cuda":
            return None
        if device not in self.pools:
            self.pools[device] = GraphPool(device)
        return self.pools[device]

    def _drop_uncaptured(self) -> None:
        """Forget the oldest bucket without a graph if there are more than `MAX_BUCKETS`."""
        if len(self.buckets) > MAX_BUCKETS:
            oldest = next((key for key, bucket in self.buckets.items() if not bucket.is_captured), None)
            if oldest is not None:
                forgotten = self.buckets.pop(oldest)
                self.forgotten_fallbacks += forgotten.statistics.fallbacks
                self._shared_first_runs.pop(forgotten.spec.family_key, None)

    def first_call(self, bucket: Bucket, spec: CallSpec, leaves: list[PyTree], replay: Callable[[], PyTree]) -> PyTree:
        """Answer the first call of a bucket, and capture a graph for later calls.

        If it can't be captured, the bucket's `no_graph_reason` says why.

        Args:
            bucket: of the call.
            spec: of the call.
            leaves: of the call.
            replay: returns the call's result from a replay of the bucket's graph.
        """
        if bucket.pool is not None:
            bucket.pool.wait_for_last_replay()
        if change := self.state.guard.first_change():
            self.drop_stale(change)
        try:
            return self._first_run_or_capture(bucket, spec, leaves, replay)
        finally:
            self.state.guard.ignore_replaced()

    def _first_run_or_capture(
        self, bucket: Bucket, spec: CallSpec, leaves: list[PyTree], replay: Callable[[], PyTree]
    ) -> PyTree:
        first = self._shared_first_runs.get(spec.family_key)
        if first is not None and bucket.pool is not None and not torch.backends.cudnn.benchmark:
            self._make_room(bucket)
            active_bytes = bucket.pool.active_bytes()
            if self._capture_without_run(bucket, spec, leaves, first):
                result = replay()
                if bucket.pool.active_bytes() > active_bytes:
                    self._abandon_pool(bucket.pool)
                    self._shared_first_runs[spec.family_key] = None
                return result
            self._shared_first_runs[spec.family_key] = None
        return self._run_and_capture(bucket, spec, leaves)

    def _capture_without_run(self, bucket: Bucket, spec: CallSpec, leaves: list[PyTree], first: Bucket) -> bool:
        """Capture a program that was captured at another size, without running it at this size first.

        The libraries are warm from the other capture, and a replay answers the call, so that a call that autograd
        tracks keeps nothing for its backward outside of the pool. This does not suit a program that needs a run at
        every size, to tune something or to make tensors that it keeps.

        Args:
            bucket: of the call.
            spec: of the call.
            leaves: of the call.
            first: the bucket that was captured at another size.

        Returns:
            True if there is a graph now that answers the call.
        """
        bucket.allocate()
        bucket.copy_first_run(first)
        objects = ObjectSnapshot(self.state.guard.modules)
        if isinstance(bucket, TrainedBucket):
            capture.empty_cache()  # the pool can't use what earlier runs left in torch's cache
        self._capture(bucket)
        if bucket.no_graph_reason or bucket.no_replay_reason(leaves) or bucket.unmet_condition(spec):
            objects.restore()  # tensors that a capture made have no values without a replay
            bucket.drop_graph()
            bucket.no_graph_reason = ""
            return False
        self._note_captured(bucket)
        return True

    def _abandon_pool(self, pool: GraphPool) -> None:
        """Drop a pool's graphs: the program keeps tensors that it made in a capture, which replays would overwrite."""
        _log.info("%s keeps tensors that it made while it was captured: it is run before each capture", self.name)
        for bucket in self.captured_buckets():
            if bucket.pool is pool:
                bucket.drop()

    def _run_and_capture(self, bucket: Bucket, spec: CallSpec, leaves: list[PyTree]) -> PyTree:
        """Run the program once, which answers the call, and capture it."""
        self._make_room(bucket)
        bucket.allocate()
        writes, rng_state = Writes(self.state.guard.distinct_tensors), capture.rng_state(bucket.device)
        snapshot = Snapshot(self.state, [bucket.device], [], bucket.callers_tensors())
        with rolled_back(snapshot, only_on_error=True):
            result = bucket.first_run(spec, leaves, snapshot)
        del snapshot  # before a capture takes memory
        self.state.note_writes(writes)
        self.state.has_side_effects |= not torch.equal(rng_state, capture.rng_state(bucket.device))
        self.state.optimizers.take_snapshot()  # the first step makes their state
        if isinstance(bucket, TrainedBucket) and bucket.pool is not None:
            # The first call left as much memory in torch's cache as the pool needs.
            capture.empty_cache()
        active_bytes = bucket.pool.active_bytes() if bucket.pool is not None else 0
        if not bucket.no_graph_reason:
            self._capture(bucket)
        self._note_captured(bucket)
        if bucket.pool is not None and bucket.is_captured and bucket.can_share_first_run:
            keeps_tensors = bucket.pool.active_bytes() > active_bytes
            self._shared_first_runs.setdefault(spec.family_key, None if keeps_tensors else bucket)
        return result

    def _note_captured(self, bucket: Bucket) -> None:
        """Mark a bucket as the most recently called one, and no longer due for a recapture."""
        self.buckets[bucket.spec.bucket_key] = bucket
        bucket.last_call = next(self.call_numbers)
        bucket.needs_recapture = False

    def _capture(self, bucket: Bucket) -> None:
        """Capture the bucket within the memory limit; if that fails, set its `no_graph_reason`."""
        writes = Writes(self.state.guard.distinct_tensors)
        # A capture writes nothing, and backwards of the caller's may be still to come.
        with autograd.without_version_bumps(self.state.buffers()):
            self._capture_within_limit(bucket)
            self.state.note_writes(writes)  # before the versions are restored

    def _capture_within_limit(self, bucket: Bucket) -> None:
        registered, own = self.state.registered(), [*self.state.generators, *generators_in(bucket.uncopied.values())]
        rng = capture.RngState(own=own) if self.state.draws_random_numbers or own else None
        try:
            bucket.capture()
            # Other threads draw there too.
            if bucket.pool is not None and rng is not None and rng.has_host_drawn():
                raise RuleError("it draws random numbers on the host, which a graph would repeat: draw on the device")
            if replaced := self.state.restore_registered(registered):
                raise RuleError(f"it replaces {replaced}, and a graph can only write to it")
        except Exception as error:  # CUDA's, or a rule's that needs sizes on the host
            if bucket.pool is not None and rng is not None and rng.has_host_drawn():
                rng.restore()
            bucket.refuse(error)
            return
        if self.memory_limit is None or self.bytes() <= self.memory_limit:
            return
        has_graph = bucket.graph is not None
        for other in self.captured_buckets():
            if other is not bucket and self.bytes() > self.memory_limit:
                self._evict(other, "memory_limit")
        if self.bytes() > self.memory_limit and has_graph:
            # The memory of the evicted graphs goes back to torch only when the last graph of the pool is dropped.
            bucket.drop_graph()
            bucket.capture()
        if self.bytes() > self.memory_limit:
            bucket.no_graph_reason = (
                f"it needs {format_bytes(self.bytes())}, beyond memory_limit={format_bytes(self.memory_limit)}"
            )
            bucket.drop()

    def recapture(self, bucket: Bucket, guard: StateGuard) -> None:
        """Recapture a bucket whose graph was dropped between a call's forward and its backward.

        Args:
            bucket: of the call.
            guard: of the state that the call read.

        Raises:
            RuntimeError: that state has changed, or the bucket can't be captured any more.
        """
        with in_modes(bucket.spec.modes, guard):
            if change := guard.first_change(allows_new_buffers=True):
                raise RuntimeError(f"the graph of this call was dropped, and can't be recaptured: {change}")
            if not bucket.is_captured:
                self._make_room(bucket)
                bucket.allocate()
                self._capture(bucket)
                self.replay_count += 1
        if not bucket.is_captured:
            raise RuntimeError(f"the graph of this call can't be recaptured: {bucket.no_graph_reason}")

    def _make_room(self, bucket: Bucket) -> None:
        """Evict graphs for `max_graphs` before a capture, so that the new graph can use their memory."""
        captured = [other for other in self.captured_buckets() if other is not bucket]
        if self.max_graphs is not None:
            for other in captured[: max(len(captured) + 1 - self.max_graphs, 0)]:
                self._evict(other, "max_graphs")

    def _evict(self, bucket: Bucket, limit: str) -> None:
        _log.info("%s: the graph of %s is evicted for %s", self.name, bucket.statistics.sizes, limit)
        bucket.drop()
        self.evictions += 1

    def captured_buckets(self) -> list[Bucket]:
        """Return the buckets with a graph, the least recently called one first."""
        return sorted([b for b in self.buckets.values() if b.is_captured], key=lambda b: b.last_call)

    def bytes(self) -> int:
        """Return the device memory of pools and static inputs."""
        pools = sum(pool.bytes() for pool in self.pools.values())
        return pools + sum(bucket.statistics.input_bytes for bucket in self.captured_buckets())

    def note(self, text: str) -> None:
        """Count what costs graphs without a fallback, and warn the first time."""
        if not self.notes[text]:
            _log.warning("%s: %s", self.name, text)
        self.notes[text] += 1

    def drop_stale(self, change: str) -> None:
        """Drop every graph because what they read is stale; the next calls recapture them.

        Args:
            change: what changed, in words.
        """
        captured = self.captured_buckets()
        if captured:
            _log.warning("%s is recaptured: %s", self.name, change)
            self.notes[f"recaptured: {change}"] += 1
            hits = sum(bucket.statistics.hits for bucket in self.buckets.values())
            self._wasted_recaptures = self._wasted_recaptures + 1 if hits <= self._hits_before else 0
            self._hits_before = hits
        if self._wasted_recaptures >= MAX_WASTED_RECAPTURES:
            times = f"it was captured {MAX_WASTED_RECAPTURES} times in a row"
            self.no_graph_reason = f"{times} and not replayed once: {change}"
        for bucket in captured:
            bucket.drop()
            bucket.needs_recapture = True
        self.state.take_snapshot()
        self.state.optimizers.reread_state()
        if self.compile_cache is not None:
            self.compile_cache.drop()
            for bucket in self.buckets.values():
                if isinstance(bucket, (CompiledBucket, CompiledTrainedBucket)):
                    bucket.take_code(self.compile_cache)
        self._shared_first_runs.clear()

    def release(self) -> None:
        """Drop every graph and static input, and clear the reasons why buckets have none."""
        self.no_graph_reason, self._wasted_recaptures = "", 0
        for bucket in self.buckets.values():
            bucket.needs_recapture = bucket.needs_recapture or bucket.is_captured
            bucket.no_graph_reason = ""
            if bucket.is_allocated:
                bucket.drop()
        if self.pools:
            capture.empty_cache()
