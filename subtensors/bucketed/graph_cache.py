"""The graphs of a bucketed program: captured within a budget, evicted, and dropped when what they read is stale."""

from __future__ import annotations

import itertools
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from subtensors.bucketed.bucket import Bucket, Call
from subtensors.bucketed.calls.call_spec import CallSpec, padded_leaves
from subtensors.bucketed.calls.copy_aliases import callers_own
from subtensors.bucketed.calls.flatten_objects import opened_results
from subtensors.bucketed.compilation.compile_cache import CompileCache
from subtensors.bucketed.fallbacks import summarize_error
from subtensors.bucketed.report.statistics import Statistics
from subtensors.bucketed.state.program_state import State, leaves_behind
from subtensors.bucketed.state.rng_state import RandomPlaces
from subtensors.bucketed.state.rollback import restore_state, rollback_on_error
from subtensors.bucketed.state.write_counter import Writes
from subtensors.bucketed.training.autograd_node import ReplayCounter
from subtensors.bucketed.training.side_effects import TrainingDetector
from subtensors.bucketed.training.trained_bucket import TrainedBucket
from subtensors.byte_sizes import format_bytes
from subtensors.dispatch.graphs import capture
from subtensors.dispatch.graphs.pool import GraphPool
from subtensors.dispatch.ops.errors import RuleError
from subtensors.dispatch.torch_internals import autograd
from subtensors.kernels.runtime.async_compile import use_reference_while_compiling

_log = logging.getLogger("subtensors.bucketed")

MAX_WASTED_RECAPTURES = 8
"""After this many recaptures in a row without a replay between them, nothing is captured any more."""

BUCKETS = 4096
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
        compile_options: dict[str, Any] | None,
    ) -> None:
        self.name, self.state = name, state
        self.max_graphs, self.memory_limit, self.compile_options = max_graphs, memory_limit, compile_options
        self.code = CompileCache(compile_options)
        self.buckets: dict[Any, Bucket] = {}
        self.pools: dict[torch.device, GraphPool] = {}
        self.replays = ReplayCounter()
        self.clock = itertools.count(1)
        """Counts calls, to order buckets by their last one."""
        self.leaves_traces = False
        """True once the program has had side effects: it wrote to what it reads, or drew random numbers."""
        self.evictions = 0
        self.refusal = ""
        """The reason why nothing is captured any more, or ""."""
        self._in_vain = self._hits_before = 0
        self._captures_unrun: dict[Any, bool] = {}
        """For each captured family of calls, whether it can be captured at another size without being run first."""

    def bucket_of(
        self, is_followed: bool, reading: CallSpec, leaves: Sequence[Any], call: Call, device: torch.device
    ) -> Bucket:
        """Return the bucket of a call; make it if it is new.

        Args:
            is_followed: whether autograd tracks the call.
            reading: the call's spec.
            leaves: the call's leaves.
            call: runs the program.
            device: of the static inputs.
        """
        found = self.buckets.get(reading.bucket_key)
        if found is None:
            found = self.buckets[reading.bucket_key] = self._new(is_followed, reading, leaves, call, device)
            self._drop_unrecorded()
        return found

    def _new(
        self, is_followed: bool, reading: CallSpec, leaves: Sequence[Any], call: Call, device: torch.device
    ) -> Bucket:
        kind = TrainedBucket if is_followed else Bucket
        bucket = kind(reading, leaves, call, device, self._pool(device))
        if isinstance(bucket, TrainedBucket):
            bucket.state = self.state
        bucket.take_code(self.code)
        return bucket

    def _pool(self, device: torch.device) -> GraphPool | None:
        if device.type != "cuda":
            return None
        if device not in self.pools:
            self.pools[device] = GraphPool(device)
        return self.pools[device]

    def _drop_unrecorded(self) -> None:
        """Forget the oldest bucket without a graph if there are more than `BUCKETS`."""
        if len(self.buckets) > BUCKETS:
            oldest = next((key for key, bucket in self.buckets.items() if not bucket.is_recorded), None)
            self.buckets.pop(oldest, None)

    def first_answer(self, bucket: Bucket, reading: CallSpec, leaves: list[Any]) -> Any:
        """Answer the first call of a bucket, and capture a graph for later calls.

        If it can't be captured, the bucket's refusal is the reason.
        """
        if moved := self.state.moved():
            self.restart(moved)
        try:
            return self._run_or_record(bucket, reading, leaves)
        finally:
            self.state.reached.leave_out_others()

    def _run_or_record(self, bucket: Bucket, reading: CallSpec, leaves: list[Any]) -> Any:
        family = reading.family_key
        if self._captures_unrun.get(family) and not torch.backends.cudnn.benchmark:
            found = self._record_unrun(bucket, reading, leaves)
            if found is not None:
                return found()
            self._captures_unrun[family] = False
        return self._run_and_record(bucket, reading, leaves)

    def _record_unrun(self, bucket: Bucket, reading: CallSpec, leaves: list[Any]) -> Callable[[], Any] | None:
        """Capture a program that was captured at another size, without running it at this size first.

        The libraries are warm from the other capture, and a replay answers the call. This does not suit a program that
        needs a run at every size, to tune something or to make tensors that it keeps.

        Returns:
            A function that returns the result, once; None if there is no graph.
        """
        self._make_room(bucket)
        bucket.allocate()
        assert bucket.pool is not None
        versions, held = self.state.versions(), bucket.pool.active_bytes()
        self._record(bucket)
        self._note_writes(versions)
        if bucket.refusal or bucket.obstacle(leaves):
            bucket.refusal = ""
            return None
        self._note_recorded(bucket)
        self.replays.tick()
        bucket.replay_call(leaves, reading)
        assert bucket.outputs is not None
        outputs = bucket.outputs
        results = [cut() for cut in outputs.cuts(reading.host)]
        bucket.write_back(leaves)
        if bucket.pool.active_bytes() > held:
            self._leave_pool(bucket.pool)
            self._captures_unrun[reading.family_key] = False
        return lambda: outputs.assembled(results)

    def _leave_pool(self, pool: GraphPool) -> None:
        """Drop a pool's graphs: the program keeps tensors that it made in a capture, which replays would overwrite."""
        _log.info("%s keeps tensors that it made while it was captured: it is run before each capture", self.name)
        for bucket in self.recorded():
            if bucket.pool is pool:
                bucket.forget()

    def _run_and_record(self, bucket: Bucket, reading: CallSpec, leaves: list[Any]) -> Any:
        """Run the program once, which answers the call, and capture it."""
        self._make_room(bucket)
        bucket.allocate()
        before, place = self.state.versions(), capture.rng_state(bucket.device)
        # What the context keeps is freed before a capture takes memory.
        with rollback_on_error(self.state, bucket.callers_tensors(), bucket.device):
            if isinstance(bucket, TrainedBucket):
                result = self._first_followed(bucket, reading, leaves)
            else:
                result = self._first_unfollowed(bucket, reading, leaves)
        self._note_writes(before)
        self.leaves_traces |= not torch.equal(place, capture.rng_state(bucket.device))
        self.state.optimizers.look()  # the first step makes their state
        if isinstance(bucket, TrainedBucket) and bucket.pool is not None:
            # The first call left as much memory in torch's cache as the pool needs.
            torch.cuda.empty_cache()
        held = bucket.pool.active_bytes() if bucket.pool is not None else 0
        if not bucket.refusal:
            # A capture writes nothing, and the caller's backward is still to come.
            with autograd.without_version_bumps(self.state.buffers()):
                self._record(bucket)
        self._note_recorded(bucket)
        if bucket.pool is not None and bucket.is_recorded and type(bucket) is Bucket and bucket.compiled is None:
            self._captures_unrun.setdefault(reading.family_key, bucket.pool.active_bytes() <= held)
        return result

    def _first_unfollowed(self, bucket: Bucket, reading: CallSpec, leaves: list[Any]) -> Any:
        """Run the program on static inputs, in a call that autograd does not track."""
        steps = TrainingDetector(self.state)
        bucket.load(leaves, reading.sizes)
        # The capture waits for kernels that this run asks for; it takes a while itself, the first time.
        with use_reference_while_compiling() if bucket.pool is not None else nullcontext():
            result = bucket.run_once(reading.host)
        if obstacle := bucket.obstacle(leaves):
            raise RuleError(obstacle)
        bucket.write_back(leaves)
        if steps.any():
            bucket.refusal = (
                "it computes gradients, or takes a step, in a call without any: call it under torch.enable_grad()"
            )
            bucket.forget()
        return result

    def _note_recorded(self, bucket: Bucket) -> None:
        """Mark a bucket as the most recently called one, and no longer due for a recapture."""
        self.buckets[bucket.reading.bucket_key] = bucket
        bucket.last_call = next(self.clock)
        bucket.is_due = False

    def _note_writes(self, before: list[int] | None) -> None:
        """Note whether the program wrote to its state since `before`, its versions at an earlier time."""
        self.leaves_traces = self.state.note_writes(before) or self.leaves_traces

    def _first_followed(self, bucket: TrainedBucket, reading: CallSpec, leaves: list[Any]) -> Any:
        """Run the program on padded arguments under autograd, and warm up its capture."""
        padded = padded_leaves(leaves, reading, bucket.device)
        copies = [(own, x, Writes([x])) for own, x in zip(leaves, padded, strict=True) if x is not own]
        before, steps = self.state.versions(), TrainingDetector(self.state)
        arguments = Writes(padded[source.leaf] for source in reading.sources)
        theirs = Writes(bucket.callers_tensors())

        # On the caller's stream, which its backward is on as well. One of the program's own is on this thread, as in
        # the capture: compiled code that it runs is compiled for the settings of a thread.
        with torch.autograd.set_multithreading_enabled(False):
            result = opened_results(bucket.call(padded), set(map(id, bucket.others.values())))
            results, spec = pytree.tree_flatten(result)
            results = callers_own(results, [*self.state.tensors(), *leaves, *bucket.callers_tensors()])
        self._note_writes(before)
        with torch.no_grad():
            for own, x, writes in copies:
                if writes.any():
                    own.copy_(x.unpad())
            bucket.load(leaves, reading.sizes)
        roots = [x for x in results if isinstance(x, Tensor) and x.requires_grad]
        bucket.is_differentiable = bool(roots)
        if roots and steps.any():
            bucket.refusal = "it calls backward itself, and returns a tensor that requires grad: return loss.detach()"
            bucket.forget()
        elif arguments.any() or (roots and theirs.any()):
            bucket.refusal = "it writes to its arguments, and autograd tracks it"
            bucket.forget()
        elif roots:
            bucket.first_leaves = frozenset(leaves_behind(roots))
            # A program whose results need no gradient may be a whole training step, which must not be taken twice.
            try:
                with restore_state(self.state, self.state.at_risk(), [bucket.device]):
                    bucket.run_once(reading.host)
            except Exception as error:  # a rule's, or what such a program can't be; the call has its answer
                self._refuse(bucket, error)
        return pytree.tree_unflatten(results, spec)

    def _record(self, bucket: Bucket) -> None:
        """Capture the bucket within the memory limit; if that fails, set its refusal to the reason."""
        held, random = self.state.held(), RandomPlaces() if self.state.reached.draws else None
        try:
            bucket.record()
            # Other threads draw there too.
            if bucket.pool is not None and random is not None and random.has_host_drawn():
                random.go_back()
                raise RuleError("it draws random numbers on the host, which a graph would repeat: draw on the device")
            if replaced := self.state.put_back(held):
                raise RuleError(f"it replaces {replaced}, and a graph can only write to it")
        except Exception as error:  # CUDA's, or a rule's that needs sizes on the host
            self._refuse(bucket, error)
            return
        if self.memory_limit is None or self.bytes() <= self.memory_limit:
            return
        graphs = bucket.graph is not None
        for other in self.recorded():
            if other is not bucket and self.bytes() > self.memory_limit:
                self._evict(other, "memory_limit")
        if self.bytes() > self.memory_limit and graphs:
            # The memory of the evicted graphs goes back to torch only when the last graph of the pool is dropped.
            bucket.forget_graph()
            bucket.record()
        if self.bytes() > self.memory_limit:
            bucket.refusal = (
                f"it needs {format_bytes(self.bytes())}, beyond memory_limit={format_bytes(self.memory_limit)}"
            )
            bucket.forget()

    def _refuse(self, bucket: Bucket, error: Exception) -> None:
        bucket.refusal = summarize_error(error)
        bucket.forget()

    def record_again(self, bucket: Bucket) -> None:
        """Recapture a bucket that was evicted between a call's forward and its backward."""
        self._make_room(bucket)
        bucket.allocate()
        self._record(bucket)

    def _make_room(self, bucket: Bucket) -> None:
        """Evict graphs for `max_graphs` before a capture, so that the new graph can use their memory."""
        recorded = [other for other in self.recorded() if other is not bucket]
        if self.max_graphs is not None:
            for other in recorded[: max(len(recorded) + 1 - self.max_graphs, 0)]:
                self._evict(other, "max_graphs")

    def _evict(self, bucket: Bucket, why: str) -> None:
        _log.info("%s: the graph of %s is evicted for %s", self.name, bucket.statistics.sizes, why)
        bucket.forget()
        self.evictions += 1

    def recorded(self) -> list[Bucket]:
        """The buckets with a graph, the least recently called one first."""
        return sorted([b for b in self.buckets.values() if b.is_recorded], key=lambda b: b.last_call)

    def bytes(self) -> int:
        """The device memory of pools and static inputs."""
        pools = sum(pool.bytes() for pool in self.pools.values())
        return pools + sum(bucket.statistics.input_bytes for bucket in self.recorded())

    def statistics(self, fallbacks: Mapping[str, int], sizes: dict[str, Counter[int]]) -> Statistics:
        """The statistics of the program so far.

        Args:
            fallbacks: the number of calls that ran at their true sizes, by reason.
            sizes: how often each true size was seen, by Dim.
        """
        every = [b.statistics for b in self.buckets.values() if b.statistics.calls or b.outputs]
        return Statistics(
            "graphs" if self.pools else "eager",
            sorted(every, key=lambda b: -math.prod(b.sizes.values())),
            sum(pool.bytes() for pool in self.pools.values()),
            sum(b.captures for b in every),
            sum(max(b.captures - 1, 0) for b in every),
            self.evictions,
            self.code.recompiles,
            dict(fallbacks),
            sizes,
        )

    def restart(self, moved: str) -> None:
        """Drop every graph because what they read is stale; the next calls recapture them."""
        recorded = self.recorded()
        if recorded:
            _log.warning("%s is recorded again: %s", self.name, moved)
            hits = sum(bucket.statistics.hits for bucket in self.buckets.values())
            self._in_vain = self._in_vain + 1 if hits <= self._hits_before else 0
            self._hits_before = hits
        if self._in_vain >= MAX_WASTED_RECAPTURES:
            self.refusal = f"it was recorded {MAX_WASTED_RECAPTURES} times in a row and not replayed once: {moved}"
        for bucket in recorded:
            bucket.forget()
            bucket.is_due = True
        self.state.look()
        self.state.optimizers.reread()
        self.code.forget()
        self._captures_unrun.clear()
        for bucket in self.buckets.values():
            bucket.take_code(self.code)

    def release(self) -> None:
        """Drop every graph and static input, and clear the reasons why buckets have none."""
        self.refusal, self._in_vain = "", 0
        for bucket in self.buckets.values():
            bucket.is_due = bucket.is_due or bucket.is_recorded
            bucket.refusal = ""
            if bucket.is_allocated:
                bucket.forget()
        if self.pools:
            torch.cuda.empty_cache()
