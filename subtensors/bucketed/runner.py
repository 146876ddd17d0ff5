"""`st.bucketed`: a program over varying sizes, as one captured graph for each bucket of sizes."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from subtensors.bucketed.bucket import Bucket
from subtensors.bucketed.call_cache import CachedCall, CallCache, shared_key
from subtensors.bucketed.calls.cache_key import callers_tensors
from subtensors.bucketed.calls.call_spec import FIXED, CallSpec, flatten, leaf_key, sharing
from subtensors.bucketed.calls.dim_spec import ArgumentDims
from subtensors.bucketed.fallbacks import Fallbacks, summarize_error, why_not_replayable
from subtensors.bucketed.generation.generation import Generation, tokens_dim
from subtensors.bucketed.graph_cache import GraphCache
from subtensors.bucketed.module_proxy import ModuleProxy
from subtensors.bucketed.report.statistics import Statistics
from subtensors.bucketed.state.program_state import State
from subtensors.bucketed.state.rollback import restore_all
from subtensors.bucketed.training.autograd_node import ReplayFunction, TrainingCall
from subtensors.bucketed.training.nested_call import NestedCall, is_inside, opened
from subtensors.bucketed.training.trained_bucket import TrainedBucket
from subtensors.bucketed.warmup import calls_to_warm, with_progress
from subtensors.dispatch.ops.errors import RuleError
from subtensors.dispatch.torch_internals import autograd, dynamo
from subtensors.sizes.bucket_policies import Sizes
from subtensors.sizes.fit_buckets import fit_buckets

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OnMiss = Literal["capture", "eager", "error"]


class Bucketed(ModuleProxy):
    """The result of `st.bucketed`: called like the program, with the program's attributes besides its own."""

    def __init__(
        self,
        program: Callable[..., Any],
        dims: Mapping[Any, Any],
        max_graphs: int | None,
        memory_limit: int | None,
        on_miss: OnMiss,
        max_waste: float | None,
        compile_options: dict[str, Any] | None,
    ) -> None:
        self._made_of = program, dims, max_graphs, memory_limit, on_miss, max_waste, compile_options
        self.program, self.dims = program, ArgumentDims(program, dims)
        self.on_miss = on_miss
        self.state = State(program)
        self.name: str = getattr(program, "__name__", type(program).__name__)
        self.recorder = GraphCache(self.name, self.state, max_graphs, memory_limit, compile_options)
        self._lock = threading.RLock()
        self.visits = CallCache(program, self.dims, self.state, self.recorder, max_waste)
        self._example: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._warms_up_first = False
        self.fallbacks = Fallbacks(self.name, on_miss == "error")
        self._generation: Generation | None = None
        self._is_settled = False
        """True inside `settled()`: nothing replaces what the program reads."""
        functools.update_wrapper(self, program, updated=())

    def __reduce__(self) -> tuple[type[Bucketed], tuple[Any, ...]]:
        """A copy is a runner of a copy of the program, without graphs."""
        return type(self), self._made_of

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the program: at the bucket's sizes, with plain values in and out."""
        if is_inside():
            with self._lock:
                code = self._code(args, kwargs)
            return self.program(*args, **kwargs) if code is None else code.result()
        with self._lock:
            if why := why_not_replayable():
                return self._fall_back(why, None, args, kwargs)
            leaves, spec = flatten(args, kwargs)
            shared = shared_key(self.state, leaves, spec, args, kwargs)
            try:
                key = (shared, sharing(leaves), *map(leaf_key, leaves))
                visit = self.visits.known.get(key)
            except (TypeError, RuntimeError) as error:  # an argument without a hash, or without a shape
                visit = CachedCall(None, None, f"an argument can't be part of a graph's key: {error}")
            if visit is None:
                visit = self._read(key, leaves, args, kwargs)
            visit.calls += 1
            leaves = visit.style.ordered(leaves)
            if visit.refusal:
                return self._fall_back(visit.refusal, visit.error, args, kwargs)
            return self._answer(visit, leaves, args, kwargs)

    def _read(self, key: Any, leaves: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> CachedCall:
        self._example = self._example or (args, kwargs)
        visit = self.visits.first(key, leaves, args, kwargs)
        if self._warms_up_first and not visit.refusal and visit.bucket is not None:
            self._warms_up_first = False
            self.warmup(*args, **kwargs)
        return visit

    def _code(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NestedCall | None:
        """The compiled code for a call made inside another bucketed program; None if the program itself is to run."""
        if self.recorder.compile_options is None or torch.compiler.is_compiling():
            return None
        leaves, spec = flatten(args, kwargs)
        found = opened(leaves, self.dims.of_leaves(args, kwargs))
        if found is None:
            return None
        dense, sizes = found
        visit = self.visits.read(shared_key(self.state, leaves, spec, args, kwargs), dense, args, kwargs)
        bucket, dense = visit.bucket, visit.style.ordered(dense)
        if not isinstance(bucket, TrainedBucket) or bucket.gradients_code is None:
            return None
        symbols = tuple(dim.symbol for dim in bucket.reading.dims)
        if bucket.reading.caller or symbols != (sizes.symbols if sizes is not None else ()):
            return None
        bucket.allocate()
        bucket.gradients_code.prepare(bucket)
        if bucket.gradients_code.refusal:
            return None
        values = sizes.values if sizes is not None else bucket.values
        given = [dense[source.leaf] for source in bucket.reading.sources]
        return NestedCall(bucket.gradients_code, bucket, [*given, values], sizes)

    def _answer(self, visit: CachedCall, leaves: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        bucket, reading = visit.bucket, visit.reading
        assert bucket is not None
        assert reading is not None
        if why := bucket.refusal or self.recorder.refusal:
            return self._fall_back(why, None, args, kwargs)
        self.state.refuse_releaseds()
        is_followed = isinstance(bucket, TrainedBucket)
        leaves_traces = is_followed or self.recorder.leaves_traces or bucket.leaves_traces
        looks_first = leaves_traces and not self._is_settled
        if looks_first and (moved := self.state.moved()):
            self.recorder.restart(moved)
            if self.recorder.refusal:
                return self._fall_back(self.recorder.refusal, None, args, kwargs)
        if not bucket.is_recorded:
            if self.on_miss != "capture" and not bucket.is_due:
                why = f"a size has no graph yet: on_miss={self.on_miss!r} leaves that to warmup()"
                return self._fall_back(why, None, args, kwargs)
            if is_followed and autograd.has_saved_tensor_hooks():
                return self._fall_back("hooks, as of a checkpoint, take what would be recorded", None, args, kwargs)
            return self._first(visit, leaves, args, kwargs)
        if obstacle := bucket.obstacle(leaves):
            return self._fall_back(obstacle, None, args, kwargs)
        bucket.last_call = next(self.recorder.clock)
        if isinstance(bucket, TrainedBucket) and bucket.is_differentiable:
            return self._followed(bucket, visit, leaves, reading)
        results = self._replayed(bucket, visit, leaves, reading)
        # The device is still busy with the replay.
        if not looks_first and (moved := self.state.moved()):
            self.recorder.restart(moved)
            if leaves_traces:
                raise RuleError(f"{moved} on the way")
            return self._answer(visit, leaves, args, kwargs)
        bucket.statistics.note_call(visit.elements, is_hit=True)
        assert bucket.outputs is not None
        return bucket.outputs.assembled(results)

    def _replayed(self, bucket: Bucket, visit: CachedCall, leaves: list[Any], reading: CallSpec) -> list[Any]:
        self.recorder.replays.tick()
        bucket.replay_call(leaves, reading)
        if visit.outputs is not bucket.outputs:
            visit.outputs = bucket.outputs
            visit.cuts = bucket.outputs.cuts(reading.host) if bucket.outputs is not None else []
        results = [cut() for cut in visit.cuts]
        if bucket.written:
            bucket.write_back(leaves)
        return results

    def _followed(self, bucket: TrainedBucket, visit: CachedCall, leaves: list[Any], reading: CallSpec) -> Any:
        """Replay the graph as a node of the caller's autograd graph."""
        assert bucket.outputs is not None
        outputs = bucket.outputs
        call = TrainingCall(bucket, leaves, reading, self._lock, self.recorder)
        tensors = iter(ReplayFunction.apply(call, *call.wanted))  # type: ignore[no-untyped-call]
        bucket.statistics.note_call(visit.elements, is_hit=True)
        return outputs.assembled([next(tensors) if isinstance(x.value, Tensor) else x.value for x in outputs.leaves])

    def _fall_back(self, why: str, error: Exception | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.fallbacks.note(why, error)
        with self.state.of_a_run():
            return self.program(*args, **kwargs)

    def _first(self, visit: CachedCall, leaves: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a bucket's first call, and capture a graph for later calls."""
        bucket, reading = visit.bucket, visit.reading
        assert bucket is not None
        assert reading is not None
        try:
            result = self.recorder.first_answer(bucket, reading, leaves)
        except Exception as error:  # whatever a program says of padded tensors
            bucket.refusal = summarize_error(error)
            if bucket.is_allocated:
                bucket.forget()
            return self._fall_back(bucket.refusal, error, args, kwargs)
        bucket.statistics.note_call(visit.elements, is_hit=False)
        if bucket.refusal:
            self.fallbacks.note_refusal(bucket)
        return result

    def warmup(self, *args: Any, progress: bool = True, **kwargs: Any) -> Bucketed:
        """Capture the graphs of all buckets before the first request, the largest first.

        Args:
            args, kwargs: an example call; its sizes don't matter. Without any, the first call is the example: the first
                one made or, if there was none yet, the next one.
            progress: show a bar on stderr.

        Returns:
            The runner itself.

        Raises:
            SizeError: a Dim has no max, so that it has no end of buckets.
        """
        with self._lock:
            if not args and not kwargs:
                if self._example is None:
                    self._warms_up_first = True
                    return self
                args, kwargs = self._example
            calls = calls_to_warm(self.dims, self.recorder.max_graphs, args, kwargs)
            devices = {x.device for leaves, _, _ in calls for x in leaves if isinstance(x, Tensor)}
            self.state.refuse_releaseds()
            there = [x for x in flatten(args, kwargs)[0] if isinstance(x, FIXED) or not isinstance(x, Tensor)]
            others = list(callers_tensors(there))
            with restore_all(self.state, others, devices):
                for leaves, given, named in with_progress(calls, f"capturing {self.name}", progress):
                    self._warm(leaves, given, named)
        return self

    def _warm(self, leaves: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        _, spec = flatten(args, kwargs)
        visit = self.visits.read(shared_key(self.state, leaves, spec, args, kwargs), leaves, args, kwargs)
        bucket, reading = visit.bucket, visit.reading
        if isinstance(bucket, TrainedBucket):
            self.fallbacks.say(
                f"warmup() of {self.name} records nothing where autograd tracks the call: use torch.no_grad()"
            )
            return
        if bucket is None or reading is None or bucket.is_recorded or bucket.refusal:
            return
        copied = {source.leaf for source in reading.sources}
        leaves = [x.clone() if i in copied else x for i, x in enumerate(visit.style.ordered(leaves))]
        try:
            self.recorder.first_answer(bucket, reading, leaves)
        except Exception as error:  # as in a call, which will say so
            bucket.refusal = summarize_error(error)
        if bucket.refusal:
            self.fallbacks.note_refusal(bucket)

    def generate(self, inputs: Tensor | None = None, **options: Any) -> Any:
        """Run a Hugging Face model's `generate`, with padded prompts and decode steps that are replays.

        Args:
            inputs: the prompts' tokens, (rows, length) int64.
            options: of the model's `generate`. Calls that ask for another cache, or whose text may get longer than the
                max of the Dim that `input_ids` are padded on, run the model's own `generate`.

        Returns:
            What the model's `generate` returns.

        Raises:
            RuleError: the program is no model that generates, or its `input_ids` have no Dim.
        """
        with self._lock:
            if self._generation is None:
                self._generation = Generation(self, tokens_dim(self.program, self.dims.by_name))
            return self._generation.answer(inputs, options, self.fallbacks.note)

    @contextmanager
    def settled(self) -> Iterator[None]:
        """A context in which nothing replaces what the program reads, so that calls check for that after their replay.

        Raises:
            RuleError: raised by a call, if something was replaced; what the replay wrote stays written.
        """
        if moved := self.state.moved():
            self.recorder.restart(moved)
        self._is_settled = True
        try:
            yield
        finally:
            self._is_settled = False

    @property
    def programs(self) -> dict[str, Bucketed]:
        """The programs that `generate` runs, each with its own statistics: "decoder", and "encoder" if there is one."""
        return self._generation.programs if self._generation is not None else {}

    def stats(self) -> Statistics:
        """Calls, captures, replay times, bytes and waste by bucket; fallbacks and their reasons.

        Example:
            >>> import subtensors as st
            >>> run = st.bucketed(torch.exp, {0: {0: st.Dim("n", max=8, buckets=4)}})
            >>> _ = run(torch.ones(3)), run(torch.ones(2)), run(torch.ones(8))
            >>> print(run.stats())
            eager: 3 calls, 1 replays, 0 captures, 19% waste, pool 0 B
              n=8 [(8,)]: 1 calls, 0 replays, 40 B, 0% waste
              n=4 [(4,)]: 2 calls, 1 replays, 24 B, 38% waste
        """
        with self._lock:
            return self.recorder.statistics(self.fallbacks.counted, self.visits.sizes())

    def recorded(self) -> list[Bucket]:
        """The buckets with a graph, the least recently called one first."""
        return self.recorder.recorded()

    def explain(self) -> str:
        """Describe what was done and why; `st.explain(run)` returns this."""
        dims = ", ".join(map(str, self.dims.distinct.values()))
        budget = f"max_graphs={self.recorder.max_graphs}, memory_limit={self.recorder.memory_limit}"
        parts = [f"\n{name}: {program.explain()}" for name, program in self.programs.items()]
        return f"{self.name} bucketed on {dims}; {budget}, on_miss={self.on_miss!r}\n{self.stats()}" + "".join(parts)

    def refit(self, max_graphs: int | None = None) -> dict[str, Sizes]:
        """The buckets that would have wasted least on the sizes seen so far.

        Args:
            max_graphs: the most buckets of each Dim; by default the runner's own limit, or 8.

        Returns:
            The policy of each Dim that calls gave a size, for `st.Dim(name, buckets=policy)`. Sizes beyond the Dim's
            max count too.

        Raises:
            ValueError: `max_graphs` is below 1.
        """
        if max_graphs is not None and max_graphs < 1:
            raise ValueError(f"max_graphs is at least 1, got {max_graphs}")
        most = max_graphs or self.recorder.max_graphs or 8
        seen = {name: [n for n in counted.elements() if n > 0] for name, counted in self.stats().sizes.items()}
        return {name: fit_buckets(sizes, most) for name, sizes in seen.items() if sizes}

    def plot(self) -> Figure:
        """Draw how often each size was called, its bucket and the bucket's waste, one row per Dim."""
        from subtensors.bucketed.report.plot import drawn

        return drawn(self.stats(), self.dims.distinct)

    def release(self) -> None:
        """Give the memory of graphs and static inputs back to the device; the next calls recapture."""
        with self._lock:
            self.recorder.release()
            self.visits.forget_values()
            if self._generation is not None:
                self._generation.release()


dynamo.call_eagerly(Bucketed.__call__, "st.bucketed replays graphs of its own")
