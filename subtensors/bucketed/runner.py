"""`st.bucketed`: a program over varying sizes, as one captured graph for each bucket of sizes.

What a call `run(x)` passes, the second time that it is made:

```
    run(x)
      | flatten, shared_key, leaf_key                           (call_key.py)
      v
     key ----> CachedCall ----> Bucket                          (a lookup in CallCache.known)
                                  | load: copy and pad x into static inputs, one kernel
                                  | replay: one CUDA graph, or the program itself on a CPU
                                  v                             (bucket.py)
     StateGuard.first_change(): is what the graph read stale?   (state_guard.py, beside the replay)
      |                           |
      | no change                 | a change: GraphCache.drop_stale(), and the call starts over
      v
     cuts: a copy of each result at its true sizes              (outputs.py)
```

The first call of a key is analyzed (`call_cache.py`), the first call of a bucket captures the program, at the first
size after a run of it (`graph_cache.py`). A call that has no graph, for whatever reason, falls back: it runs the
program at its true sizes, and the reason is counted (`statistics.py`). A call that autograd tracks is a node of the
caller's autograd graph, whose backward is a second CUDA graph (`autograd_nodes.py`); a call made inside another
bucketed program becomes a part of it.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Generic, Literal, ParamSpec, TypeVar

from torch import Tensor

from subtensors.arguments import flag
from subtensors.bucketed.autograd_nodes import TrackedFunction, TrainingCall
from subtensors.bucketed.bucket import Bucket
from subtensors.bucketed.call_cache import CachedCall, CallCache
from subtensors.bucketed.call_key import (
    READ_IN_PLACE,
    CallKey,
    SharedKey,
    callers_tensors,
    flatten,
    leaf_key,
    shared_key,
    sizes_sharing,
)
from subtensors.bucketed.call_spec import CallSpec, inside_program
from subtensors.bucketed.check import Checker, Schedule
from subtensors.bucketed.compare_runs import CheckReport
from subtensors.bucketed.compiled import CompileOptions
from subtensors.bucketed.dim_spec import ArgumentDims, warmup_calls, with_progress
from subtensors.bucketed.generation import Generation, prompt_dim
from subtensors.bucketed.graph_cache import GraphCache
from subtensors.bucketed.outputs import run_at_true_sizes
from subtensors.bucketed.program_state import State
from subtensors.bucketed.reports import Program, Reports
from subtensors.bucketed.side_effects import Snapshot, rolled_back
from subtensors.bucketed.statistics import Fallbacks, summarize_error
from subtensors.bucketed.trained_bucket import TrainedBucket
from subtensors.dispatch.graphs.guards import why_not_replayable
from subtensors.dispatch.ops.errors import RuleError
from subtensors.dispatch.ops.tree import Args, Kwargs, PyTree
from subtensors.dispatch.torch_internals import autograd, dynamo

OnMiss = Literal["capture", "eager", "error"]
P = ParamSpec("P")
R = TypeVar("R")


class Bucketed(Reports, Generic[P, R]):
    """The result of `st.bucketed`: called like the program, with the program's attributes besides its own."""

    def __init__(
        self,
        program: Callable[P, R],
        dims: Mapping[Any, object],
        max_graphs: int | None,
        memory_limit: int | None,
        on_miss: OnMiss,
        max_waste: float | None,
        compile_options: CompileOptions | None,
        check: Schedule,
        key: object,
    ) -> None:
        self._made_of = program, dims, max_graphs, memory_limit, on_miss, max_waste, compile_options, check, key
        self.program, self.dims = program, ArgumentDims(program, dims)
        self.on_miss = on_miss
        self.state = State(program, key)
        self.name: str = getattr(program, "__name__", type(program).__name__)
        self.graph_cache = GraphCache(self.name, self.state, max_graphs, memory_limit, compile_options)
        self._lock = threading.RLock()
        self.call_cache = CallCache(program, self.dims, self.state, self.graph_cache, max_waste)
        self._example: list[tuple[Args, Kwargs]] = []
        self._warms_up_first = False
        self.fallbacks = Fallbacks(self.name, on_miss == "error")
        self._generation: Generation[Bucketed[..., PyTree]] | None = None
        self.checker = Checker(self.state, check)
        self._is_settled = False
        """True inside `settled()`: nothing replaces what the program reads."""
        functools.update_wrapper(self, program, updated=())

    def __reduce__(self) -> tuple[type[Bucketed[P, R]], tuple[object, ...]]:
        """A copy is a runner of a copy of the program, without graphs."""
        return type(self), self._made_of

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the program: at the bucket's sizes, with plain values in and out."""
        if inside_program.get():
            with self._lock:
                nested = self.call_cache.nested_call(args, kwargs)
            return self.program(*args, **kwargs) if nested is None else nested.result()  # type: ignore[no-any-return]
        with self._lock:
            if self.state.caller != (thread := threading.get_ident()):
                self.state.note_caller(thread)
            if reason := why_not_replayable():
                return self._fall_back(reason, None, args, kwargs)  # type: ignore[no-any-return]
            leaves, structure = flatten(args, kwargs)
            shared = shared_key(self.state, leaves, structure, args, kwargs)
            try:
                key = (shared, sizes_sharing(leaves), *map(leaf_key, leaves))
                cached = self.call_cache.known.get(key)
            except (TypeError, RuntimeError) as error:  # an argument without a hash, or without a shape
                cached = CachedCall(None, None, f"an argument can't be part of a graph's key: {error}")
            if cached is None:
                cached = self._add_call(key, shared, leaves, args, kwargs)
            cached.calls += 1
            if cached.format.order is not None:
                leaves = cached.format.ordered(leaves)
            if cached.reason:
                return self._fall_back(cached.reason, cached.error, args, kwargs)  # type: ignore[no-any-return]
            if (cached.calls <= 2 or self.checker.every) and not self._is_settled and self.checker.is_due(cached):
                result = self._answer_and_check(cached, leaves, args, kwargs)[0]
                if cached.bucket is None or not cached.bucket.has_no_answer:
                    return result  # type: ignore[no-any-return]
            return self._answer(cached, leaves, args, kwargs)  # type: ignore[no-any-return]

    def _answer_and_check(
        self, cached: CachedCall, leaves: list[PyTree], args: Args, kwargs: Kwargs
    ) -> tuple[PyTree, CheckReport]:
        """Answer a call, and compare the answer with the plain program's; if they differ, that is the answer."""
        self.state.guard.check_resident()
        fall_back = functools.partial(self._fall_back, args=args, kwargs=kwargs)
        answer = functools.partial(self._answer, cached, leaves, args, kwargs)
        return self.checker.answer_and_check(cached, leaves, answer, fall_back)

    def _add_call(
        self, key: CallKey, shared: SharedKey, leaves: list[PyTree], args: Args, kwargs: Kwargs
    ) -> CachedCall:
        self._example[:] = self._example or [(args, kwargs)]
        cached = self.call_cache.add(key, shared, leaves, args, kwargs)
        if self._warms_up_first and not cached.reason and cached.bucket is not None:
            self._warms_up_first = False
            self.warmup(*args, **kwargs)
        return cached

    def _answer(self, cached: CachedCall, leaves: list[PyTree], args: Args, kwargs: Kwargs) -> PyTree:
        bucket, spec = cached.bucket, cached.spec
        assert bucket is not None
        assert spec is not None
        unmet = cached.unmet_condition(bucket, spec) if bucket.conditions.found else ""
        if bucket.has_no_answer:
            raise RuleError(f"{self.name} has no right answer for a ragged batch: {bucket.no_graph_reason}")
        if reason := bucket.no_graph_reason or self.graph_cache.no_graph_reason or unmet:
            return self._fall_back(reason, None, args, kwargs)
        self.state.guard.check_resident()
        requires_grad = isinstance(bucket, TrainedBucket)
        has_side_effects = requires_grad or self.state.has_side_effects or bucket.has_side_effects
        checks_first = has_side_effects and not self._is_settled
        if checks_first and (change := self.state.guard.first_change()):
            self.graph_cache.drop_stale(change)
            return self._answer(cached, leaves, args, kwargs)
        if bucket.is_captured:
            reason = bucket.no_replay_reason(leaves)
        elif self.on_miss != "capture" and not bucket.needs_recapture:
            reason = f"a size has no graph yet: on_miss={self.on_miss!r} leaves that to warmup()"
        elif requires_grad and autograd.has_saved_tensor_hooks():
            reason = "saved-tensor hooks, such as a checkpoint's, take what would be captured"
        else:
            return self._first_call(cached, leaves, args, kwargs)
        if reason:
            return self._fall_back(reason, None, args, kwargs)
        bucket.last_call = next(self.graph_cache.call_numbers)
        if isinstance(bucket, TrainedBucket) and bucket.is_differentiable:
            if bucket.is_one_node:
                result = self._replay_with_grad(bucket, leaves, spec)
            else:
                result = bucket.run_tracked(spec, leaves)
            bucket.count_call(cached.elements, is_hit=True)
            return result
        results = self._replay(bucket, cached, leaves, spec)
        # The device is still busy with the replay.
        if not checks_first and (change := self.state.guard.first_change()):
            self.graph_cache.drop_stale(change)
            if has_side_effects:
                raise RuleError(f"{change} during the call")
            return self._answer(cached, leaves, args, kwargs)
        bucket.count_call(cached.elements, is_hit=True)
        assert bucket.outputs is not None
        return bucket.outputs.rebuild(results)

    def _replay(self, bucket: Bucket, cached: CachedCall, leaves: list[PyTree], spec: CallSpec) -> list[PyTree]:
        self.graph_cache.replay_count += 1
        bucket.replay_call(leaves, spec)
        if cached.outputs is not bucket.outputs:
            cached.outputs = bucket.outputs
            cached.cuts = bucket.outputs.cuts(spec.host) if bucket.outputs is not None else []
        results = [cut() for cut in cached.cuts]
        if bucket.written_inputs:
            bucket.write_back(leaves)
        return results

    def _replay_with_grad(self, bucket: TrainedBucket, leaves: list[PyTree], spec: CallSpec) -> PyTree:
        """Replay the graph as a node of the caller's autograd graph."""
        outputs = bucket.outputs
        assert outputs is not None
        call = TrainingCall(bucket, leaves, spec, self._lock, self.graph_cache)
        tensors = iter(TrackedFunction.apply(call, *call.grad_inputs))  # type: ignore[no-untyped-call]
        leaves = [next(tensors) if isinstance(x.value, Tensor) else x.cut(spec.host)() for x in outputs.leaves]
        return outputs.rebuild(leaves)

    def _fall_back(self, reason: str, error: Exception | None, args: Args, kwargs: Kwargs) -> PyTree:
        """Run the program at its true sizes; an error of its own is raised as it is, without a word about graphs."""
        self.fallbacks.refuse(reason, error)
        with self.state.guard.during_run():
            result = run_at_true_sizes(self.program, args, kwargs)
        self.fallbacks.count(reason)
        return result

    def _capture_and_answer(self, bucket: Bucket, cached: CachedCall, leaves: list[PyTree], spec: CallSpec) -> PyTree:
        """Capture a bucket, and return the result of its first call, from the first run or a replay."""

        def replay() -> PyTree:
            if isinstance(bucket, TrainedBucket):
                return self._replay_with_grad(bucket, leaves, spec)
            results = self._replay(bucket, cached, leaves, spec)
            assert bucket.outputs is not None
            return bucket.outputs.rebuild(results)

        return self.graph_cache.first_call(bucket, spec, leaves, replay)

    def _first_call(self, cached: CachedCall, leaves: list[PyTree], args: Args, kwargs: Kwargs) -> PyTree:
        """Answer a bucket's first call, and capture a graph for later calls."""
        bucket, spec = cached.bucket, cached.spec
        assert bucket is not None
        assert spec is not None
        try:
            result = self._capture_and_answer(bucket, cached, leaves, spec)
        except Exception as error:  # whatever a program says of padded tensors
            raised = error
        else:
            if bucket.no_graph_reason:
                self.fallbacks.warn_not_captured(bucket.statistics.sizes, bucket.no_graph_reason)
            bucket.count_call(cached.elements, is_hit=False)
            return result
        if bucket.is_allocated:
            bucket.drop()
        if reason := bucket.unmet_condition(spec):
            return self._fall_back(reason, None, args, kwargs)
        bucket.no_graph_reason = summarize_error(raised)
        try:
            return self._fall_back(bucket.no_graph_reason, raised, args, kwargs)
        except Exception:
            if not self.fallbacks.are_errors:  # an error of the program's own says nothing of padding
                bucket.no_graph_reason = ""
            raise

    def warmup(self, *args: PyTree, progress: bool = True, **kwargs: PyTree) -> Bucketed[P, R]:
        """Capture the graphs of all buckets before the first request, the largest first.

        Args:
            args, kwargs: an example call; its sizes don't matter. Without any, the first call is the example: the first
                one made or, if there was none yet, the next one.
            progress: show a bar on stderr.

        Returns:
            The runner itself.

        Raises:
            SizeError: a Dim has no max, so that it has no end of buckets.
            TypeError, ValueError: a padded argument of the example is no dense tensor, or lacks a padded dim.
        """
        flag("progress", progress)
        with self._lock:
            if not args and not kwargs:
                if not self._example:
                    self._warms_up_first = True
                    return self
                ((args, kwargs),) = self._example
            calls = warmup_calls(self.dims, self.graph_cache.max_graphs, args, kwargs)
            leaves, _ = flatten(args, kwargs)
            devices = {x.device for x in leaves if isinstance(x, Tensor)}
            self.state.guard.check_resident()
            given = [x for x in leaves if isinstance(x, READ_IN_PLACE) or not isinstance(x, Tensor)]
            extra = [*callers_tensors(given), *self.state.tensors()]
            with rolled_back(Snapshot(self.state, devices, self.state.buffers(), extra)):
                for own_args, own_kwargs in with_progress(calls, f"capturing {self.name}", progress):
                    self._warm_up(own_args, own_kwargs)
        return self

    def _warm_up(self, args: Args, kwargs: Kwargs) -> None:
        """Capture the bucket of one call."""
        cached, leaves = self.call_cache.analyze_once(args, kwargs)
        bucket, spec = cached.bucket, cached.spec
        if isinstance(bucket, TrainedBucket):
            self.fallbacks.warn_once(
                f"warmup() of {self.name} captures nothing where autograd tracks the call: use torch.no_grad()"
            )
            return
        if bucket is None or spec is None or bucket.is_captured or bucket.no_graph_reason:
            return
        copied = {source.leaf for source in spec.inputs}
        leaves = [x.clone() if i in copied else x for i, x in enumerate(leaves)]
        try:
            self._capture_and_answer(bucket, cached, leaves, spec)
        except Exception as error:  # as in a call, which will say so
            bucket.no_graph_reason = summarize_error(error)
        if bucket.no_graph_reason:
            self.fallbacks.warn_not_captured(bucket.statistics.sizes, bucket.no_graph_reason)

    def check(self, *args: PyTree, **kwargs: PyTree) -> CheckReport:
        """Compare a call with the plain program on unpadded arguments, gradients too if autograd tracks the call.

        The call captures a graph if there is none yet; whatever it writes is undone. A bucket whose results differ runs
        the program at its true sizes from then on.

        Args:
            args, kwargs: of the call.

        Returns:
            The report; `report.passed` is True if the results were compared and agree.
        """
        with self._lock:
            cached, leaves = self.call_cache.analyze_once(args, kwargs)
            if cached.reason or cached.bucket is None:
                return CheckReport(cached.sizes, not_checked=f"no graph for this call: {cached.reason}")
            before = self.checker.snapshot(cached.bucket, leaves, self.state.tensors())
            try:
                return self._answer_and_check(cached, leaves, args, kwargs)[1]
            finally:
                before.restore()

    def generate(self, *args: PyTree, **options: PyTree) -> PyTree:
        """Run a Hugging Face model's `generate`, with padded prompts and decode steps that are replays.

        Args:
            args, options: of the model's `generate`, the first one the prompts' tokens, (rows, length) int64. Calls
                that ask for another cache or for attentions, or whose text may get longer than the max of the Dim that
                `input_ids` are padded on, run the model's own `generate`.

        Returns:
            What the model's `generate` returns.

        Raises:
            RuleError: the program is no model that generates, or its `input_ids` have no Dim.
        """
        with self._lock:
            if self._generation is None:
                seq = prompt_dim(self.program, self.dims.by_name)
                self._generation = Generation(self.program, seq, self._with_other_program)
            return self._generation.run(args, options, self.fallbacks)

    def _with_other_program(self, program: Program, dims: Mapping[str, PyTree]) -> Bucketed[..., PyTree]:
        """Bucket another program with the same options; calls of it that have no graph are errors."""
        own = self.graph_cache
        if callable(key := self.state.key):
            raise RuleError(
                "key is called with the program's arguments, and generate makes calls of its own: give a value"
            )
        limits, options = (own.max_graphs, own.memory_limit), own.compile_options
        other = type(self)(program, dims, *limits, "capture", None, options, False, key)
        other.fallbacks.are_errors = True
        other.call_cache.is_bounded = False  # there is one cache for each number of rows
        return other

    @contextmanager
    def settled(self) -> Iterator[None]:
        """A context in which nothing replaces what the program reads, so that calls check for that after their replay.

        Raises:
            RuleError: raised by a call, if something was replaced; what the replay wrote stays written.
        """
        if change := self.state.guard.first_change():
            self.graph_cache.drop_stale(change)
        self._is_settled = True
        try:
            yield
        finally:
            self._is_settled = False

    @property
    def programs(self) -> dict[str, Bucketed[..., PyTree]]:
        """The programs that `generate` runs, each with its own statistics: "decoder", and "encoder" if there is one."""
        return self._generation.programs if self._generation is not None else {}

    def release(self) -> None:
        """Give the memory of graphs and static inputs back to the device; the next calls recapture."""
        with self._lock:
            self.graph_cache.release()
            self.call_cache.forget_values()
            if self._generation is not None:
                self._generation.release()


dynamo.call_eagerly(Bucketed.__call__, "st.bucketed replays graphs of its own")
