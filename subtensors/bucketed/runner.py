"""`st.bucketed`: a program over varying sizes, as one captured graph for each bucket of sizes."""

from __future__ import annotations

import functools
import itertools
import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.utils import _pytree as pytree

from subtensors.bucketed.arguments import ArgumentDims, Reading, Unreadable, flatten, leaf_key, read, unflatten
from subtensors.bucketed.bucket import Bucket, Call
from subtensors.bucketed.compiled import Compiled
from subtensors.bucketed.example import kept_state, repeated, with_progress
from subtensors.bucketed.outputs import Cut, Outputs
from subtensors.bucketed.state import State
from subtensors.bucketed.statistics import Statistics
from subtensors.bucketed.training import ReplayClock, Replayed, TrainedBucket, TrainedCall
from subtensors.byte_sizes import in_units, parse_bytes
from subtensors.dispatch.errors import RuleError, SizeError
from subtensors.dispatch.graph_pool import GraphPool
from subtensors.padded.padded_tensor import PaddedTensor
from subtensors.padded.padding import pad
from subtensors.sizes.bucket_policies import Sizes
from subtensors.sizes.fit_buckets import fit_buckets

_log = logging.getLogger("subtensors.bucketed")

OnMiss = Literal["capture", "eager", "error"]

READINGS = 4096
"""How many different keys a runner remembers."""


@dataclass(slots=True)
class _Visit:
    """What is known of the calls of one key."""

    reading: Reading | None
    bucket: Bucket | None
    refusal: str = ""
    """Why such calls have no graph; "" where they do."""
    error: Exception | None = None
    calls: int = 0
    elements: tuple[int, int] = (0, 0)
    """Along the Dims: real ones, and the bucket's."""
    outputs: Outputs | None = None
    cuts: list[Cut] = field(default_factory=list)


class Bucketed:
    """What `st.bucketed` gives; call it as the program is called."""

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
        self.compile_options = compile_options
        self._compiled: dict[Any, Compiled] = {}
        self._recompiles = 0
        self.program, self.dims = program, ArgumentDims(program, dims)
        self.max_graphs, self.memory_limit, self.on_miss, self.max_waste = max_graphs, memory_limit, on_miss, max_waste
        self.state = State(program)
        self._lock = threading.RLock()
        self._visits: OrderedDict[Any, _Visit] = OrderedDict()
        self._buckets: dict[Any, Bucket] = {}
        self._clock = itertools.count(1)
        self._replays = ReplayClock()
        self._pools: dict[torch.device, GraphPool] = {}
        self._example: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._warms_up_first = False
        self._writes_state = False
        self._fallbacks: Counter[str] = Counter()
        self._sizes: dict[str, Counter[int]] = {name: Counter() for name in self.dims.distinct}
        self._evictions = 0
        functools.update_wrapper(self, program, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the program: at the bucket's sizes, with plain values in and out."""
        with self._lock:
            leaves, spec = flatten(args, kwargs)
            key = (len(args), tuple(kwargs), spec, self._modes(leaves), *map(leaf_key, leaves))
            try:
                visit = self._visits.get(key)
            except TypeError as error:  # an argument without a hash
                visit = _Visit(None, None, f"an argument can't be part of a graph's key: {error}")
            if visit is None:
                visit = self._read(key, leaves, args, kwargs)
            visit.calls += 1
            if visit.refusal:
                return self._fall_back(visit.refusal, visit.error, args, kwargs)
            return self._answer(visit, leaves, args, kwargs)

    # --- what a call is ---------------------------------------------------------------------------------------------

    def _modes(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """What beside the arguments decides what the program computes; first whether autograd follows it."""
        cast = torch.is_autocast_enabled("cuda"), torch.is_autocast_enabled("cpu")
        types = (torch.get_autocast_dtype("cuda"), torch.get_autocast_dtype("cpu")) if any(cast) else None
        return self._is_followed(leaves), torch.is_inference_mode_enabled(), cast, types, self.state.training()

    def _is_followed(self, leaves: Sequence[Any]) -> bool:
        return torch.is_grad_enabled() and (
            self.state.needs_gradients() or any(isinstance(x, Tensor) and x.requires_grad for x in leaves)
        )

    def _read(self, key: Any, leaves: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Visit:
        self._example = self._example or (args, kwargs)
        visit = self._reading(key[:4], leaves, args, kwargs)
        if len(self._visits) >= READINGS:
            self._count_sizes(self._visits.popitem(last=False)[1])
        self._visits[key] = visit
        if self._warms_up_first and not visit.refusal and visit.bucket is not None:
            self._warms_up_first = False
            self.warmup(*args, **kwargs)
        return visit

    def _reading(self, shared: Any, leaves: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Visit:
        try:
            places = self.dims.of_leaves(args, kwargs)
            reading = read(leaves, places, shared)
            device = self._device_of(reading)
        except SizeError as error:
            if "padded on one Dim" in str(error) or " in another argument" in str(error):
                raise
            return _Visit(None, None, str(error), error)
        except Unreadable as error:
            return _Visit(None, None, str(error))
        visit = _Visit(reading, None)
        real = padded = 1
        for size, bucket in zip(reading.sizes, reading.buckets, strict=True):
            real, padded = real * size, padded * bucket
        visit.elements = real, padded
        if self.max_waste is not None and padded > self.max_waste * real:
            visit.refusal = f"padding would be more than max_waste={self.max_waste:g} times the true size"
            return visit
        visit.bucket = self._buckets.get(reading.bucket_key)
        if visit.bucket is None:
            spec, count, names = shared[2], shared[0], shared[1]

            def call(leaves: Sequence[Any]) -> Any:
                given, named = unflatten(leaves, spec, count, names)
                return self.program(*given, **named)

            visit.bucket = self._new_bucket(shared[3][0], reading, leaves, call, device)
            self._buckets[reading.bucket_key] = visit.bucket
            self._drop_unrecorded()
        return visit

    def _new_bucket(
        self, is_followed: bool, reading: Reading, leaves: Sequence[Any], call: Call, device: torch.device
    ) -> Bucket:
        if is_followed:
            trained = TrainedBucket(reading, leaves, call, device, self._pool(device))
            trained.state = self.state
            return trained
        bucket = Bucket(reading, leaves, call, device, self._pool(device))
        bucket.compiled = self._compilation(bucket)
        return bucket

    def _compilation(self, bucket: Bucket) -> Compiled | None:
        """The compiled code that a bucket shares with those that differ from it in sizes alone."""
        if self.compile_options is None:
            return None
        family = bucket.reading.family_key
        if family not in self._compiled:
            self._compiled[family] = Compiled(bucket, self.compile_options)
        return self._compiled[family]

    def _device_of(self, reading: Reading) -> torch.device:
        devices = {source.device for source in reading.sources} or {t.device for t in self.state.tensors()}
        if len(devices) > 1:
            raise Unreadable(f"arguments are on several devices: {', '.join(sorted(map(str, devices)))}")
        return devices.pop() if devices else torch.device("cpu")

    def _pool(self, device: torch.device) -> GraphPool | None:
        if device.type != "cuda":
            return None
        if device not in self._pools:
            self._pools[device] = GraphPool(device)
        return self._pools[device]

    def _drop_unrecorded(self) -> None:
        """Forget the oldest buckets that hold nothing, where there are very many."""
        if len(self._buckets) > READINGS:
            oldest = next((key for key, bucket in self._buckets.items() if not bucket.is_recorded), None)
            self._buckets.pop(oldest, None)

    # --- answers ----------------------------------------------------------------------------------------------------

    def _answer(self, visit: _Visit, leaves: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        bucket, reading = visit.bucket, visit.reading
        assert bucket is not None
        assert reading is not None
        if bucket.refusal:
            return self._fall_back(bucket.refusal, None, args, kwargs)
        self.state.refuse_sleepers()
        is_followed = isinstance(bucket, TrainedBucket)
        if (self._writes_state or is_followed) and (moved := self.state.moved()):
            self._restart(moved)
        if not bucket.is_recorded:
            if self.on_miss != "capture":
                why = f"a size has no graph yet: on_miss={self.on_miss!r} leaves that to warmup()"
                return self._fall_back(why, None, args, kwargs)
            return self._first(visit, leaves, args, kwargs)
        bucket.last_call = next(self._clock)
        if isinstance(bucket, TrainedBucket) and bucket.is_differentiable:
            return self._followed(bucket, visit, leaves, reading)
        if bucket.pool is None or bucket.device.index == torch.cuda.current_device():
            results = self._replayed(bucket, visit, leaves, reading)
        else:
            with torch.cuda.device(bucket.device):
                results = self._replayed(bucket, visit, leaves, reading)
        # The device is busy with the replay meanwhile.
        if not (self._writes_state or is_followed) and (moved := self.state.moved()):
            self._restart(moved)
            return self._answer(visit, leaves, args, kwargs)
        self._count(bucket, visit)
        bucket.statistics.hits += 1
        assert bucket.outputs is not None
        return bucket.outputs.assembled(results)

    def _replayed(self, bucket: Bucket, visit: _Visit, leaves: list[Any], reading: Reading) -> list[Any]:
        if bucket.pool is not None:
            bucket.pool.order()
        self._replays.tick()
        bucket.load(leaves, reading.sizes)
        bucket.replay(reading.host)
        if visit.outputs is not bucket.outputs:
            visit.outputs = bucket.outputs
            visit.cuts = bucket.outputs.cuts(reading.host) if bucket.outputs is not None else []
        return [cut() for cut in visit.cuts]

    def _followed(self, bucket: TrainedBucket, visit: _Visit, leaves: list[Any], reading: Reading) -> Any:
        """A replay that is a node of the caller's autograd graph."""
        assert bucket.outputs is not None
        outputs = bucket.outputs
        call = TrainedCall(bucket, leaves, reading, self._lock, self._replays, self._record_again)
        tensors = iter(Replayed.apply(call, *call.wanted))  # type: ignore[no-untyped-call]
        self._count(bucket, visit)
        bucket.statistics.hits += 1
        return outputs.assembled([next(tensors) if isinstance(x.value, Tensor) else x.value for x in outputs.leaves])

    def _count(self, bucket: Bucket, visit: _Visit) -> None:
        statistics = bucket.statistics
        statistics.calls += 1
        statistics.real += visit.elements[0]
        statistics.padded += visit.elements[1]

    def _fall_back(self, why: str, error: Exception | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.on_miss == "error":
            raise error or RuleError(f"no graph for this call: {why}")
        if not self._fallbacks[why]:
            _log.warning("%s runs at its true sizes, without a graph: %s", self._name(), why)
        self._fallbacks[why] += 1
        return self.program(*args, **kwargs)

    def _name(self) -> str:
        return getattr(self.program, "__name__", type(self.program).__name__)

    # --- recording --------------------------------------------------------------------------------------------------

    def _first(self, visit: _Visit, leaves: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a call by running the program once, and record it for those to come."""
        bucket = visit.bucket
        assert bucket is not None
        try:
            result = self._run_and_record(visit, leaves)
        except Exception as error:  # whatever a program says of padded tensors
            bucket.refusal = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            bucket.forget() if bucket.is_allocated else None
            return self._fall_back(bucket.refusal, error, args, kwargs)
        self._count(bucket, visit)
        if bucket.refusal:
            self._note_refusal(bucket)
        return result

    def _note_refusal(self, bucket: Bucket) -> None:
        if self.on_miss == "error":
            raise RuleError(f"no graph for this call: {bucket.refusal}")
        _log.warning("%s can't be recorded at %s: %s", self._name(), bucket.statistics.sizes, bucket.refusal)

    def _run_and_record(self, visit: _Visit, leaves: list[Any]) -> Any:
        bucket, reading = visit.bucket, visit.reading
        assert bucket is not None
        assert reading is not None
        self._make_room(bucket)
        bucket.allocate()
        before = self.state.versions()
        if isinstance(bucket, TrainedBucket):
            result = self._first_followed(bucket, visit, leaves)
        else:
            bucket.load(leaves, reading.sizes)
            result = bucket.run_once(reading.host)
        self._writes_state = self._writes_state or before is None or before != self.state.versions()
        self._record(bucket)
        self._buckets[reading.bucket_key] = bucket
        bucket.last_call = next(self._clock)
        return result

    def _first_followed(self, bucket: TrainedBucket, visit: _Visit, leaves: list[Any]) -> Any:
        """The program on padded arguments, with autograd following; then what warms its recording up."""
        assert visit.reading is not None
        reading = visit.reading
        dims = {s.leaf: {d: reading.dims[k] for d, k in enumerate(s.which) if k >= 0} for s in reading.sources}
        padded = [pad(x, dims[i]) if dims.get(i) else x for i, x in enumerate(leaves)]

        def run() -> Any:
            return pytree.tree_map_only(PaddedTensor, lambda x: x.unpad(), bucket.call(padded))

        result = run() if bucket.pool is None else bucket.pool.run(run)
        bucket.load(leaves, reading.sizes)
        leaves = pytree.tree_leaves(result)
        bucket.is_differentiable = any(isinstance(x, Tensor) and x.requires_grad for x in leaves)
        if bucket.is_differentiable:
            # What returns no gradients may be a whole step, which is not to be taken twice.
            with kept_state(self.state):
                bucket.run_once(reading.host)
        return result

    def _record(self, bucket: Bucket) -> None:
        """Capture the bucket, within the memory limit; where that can't be, its refusal says why."""
        try:
            bucket.record()
        except Exception as error:  # CUDA's, or a rule's that needs sizes on the host
            bucket.refusal = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            bucket.forget()
            return
        if self.memory_limit is None or self._bytes() <= self.memory_limit:
            return
        graphs = bucket.graph is not None
        for other in self.recorded():
            if other is not bucket and self._bytes() > self.memory_limit:
                self._evict(other, "memory_limit")
        if self._bytes() > self.memory_limit and graphs:
            # What the others left in the pool is torch's again only with the last graph.
            bucket.forget_graph()
            bucket.record()
        if self._bytes() > self.memory_limit:
            bucket.refusal = f"it needs {in_units(self._bytes())}, beyond memory_limit={in_units(self.memory_limit)}"
            bucket.forget()

    def _record_again(self, bucket: Bucket) -> None:
        """Record a bucket that was evicted between a call's forward and its backward."""
        self._make_room(bucket)
        bucket.allocate()
        self._record(bucket)

    def _make_room(self, bucket: Bucket) -> None:
        """Evict before capturing, never after: what a graph is destroyed with may be another's."""
        recorded = [other for other in self.recorded() if other is not bucket]
        if self.max_graphs is not None:
            for other in recorded[: max(len(recorded) + 1 - self.max_graphs, 0)]:
                self._evict(other, "max_graphs")

    def _evict(self, bucket: Bucket, why: str) -> None:
        _log.info("%s: the graph of %s is evicted for %s", self._name(), bucket.statistics.sizes, why)
        bucket.forget()
        self._evictions += 1

    def recorded(self) -> list[Bucket]:
        """The buckets with a graph, the least recently called one first."""
        return sorted([b for b in self._buckets.values() if b.is_recorded], key=lambda b: b.last_call)

    def _bytes(self) -> int:
        pools = sum(pool.bytes() for pool in self._pools.values())
        return pools + sum(bucket.statistics.input_bytes for bucket in self.recorded())

    def _restart(self, moved: str) -> None:
        """Forget every graph, since what they read is no longer there."""
        _log.warning("%s is recorded again: %s", self._name(), moved)
        for bucket in self.recorded():
            bucket.forget()
        self.state.look()
        # Compiled code holds the tensors that it was compiled with.
        self._recompiles += sum(compiled.compilations for compiled in self._compiled.values())
        self._compiled.clear()
        for bucket in self._buckets.values():
            bucket.compiled = self._compilation(bucket)

    # --- what a user asks of it -------------------------------------------------------------------------------------

    def warmup(self, *args: Any, progress: bool = True, **kwargs: Any) -> Bucketed:
        """Record the graphs of all buckets before the first request, the largest first.

        Args:
            args, kwargs: a call's; its sizes don't matter. Without any it is like the first call: the first that was,
                or, before there was one, the first to come.
            progress: show a bar on stderr.

        Returns:
            The runner itself.

        Raises:
            SizeError: a Dim has no max, so that its buckets have no end.
        """
        with self._lock:
            if not args and not kwargs:
                if self._example is None:
                    self._warms_up_first = True
                    return self
                args, kwargs = self._example
            calls = self._calls_to_warm(args, kwargs)
            with kept_state(self.state):
                for leaves, given, named in with_progress(calls, f"capturing {self._name()}", progress):
                    self._warm(leaves, given, named)
        return self

    def _calls_to_warm(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[tuple[list[Any], tuple[Any, ...], dict[str, Any]]]:
        leaves, spec = flatten(args, kwargs)
        places = self.dims.of_leaves(args, kwargs)
        used = {dim: None for _, dims in places for dim in (dims or {}).values()}
        largest = sorted(itertools.product(*[dim.buckets for dim in used]), key=_product, reverse=True)
        calls = []
        for buckets in largest[: self.max_graphs]:
            sizes = dict(zip(used, buckets, strict=True))
            moved = [
                repeated(x, {d: sizes[dim] for d, dim in (dims or {}).items()})
                if isinstance(x, Tensor) and dims and not isinstance(x, PaddedTensor)
                else x
                for x, (_, dims) in zip(leaves, places, strict=True)
            ]
            calls.append((moved, *unflatten(moved, spec, len(args), tuple(kwargs))))
        return calls

    def _warm(self, leaves: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        _, spec = flatten(args, kwargs)
        visit = self._reading((len(args), tuple(kwargs), spec, self._modes(leaves)), leaves, args, kwargs)
        bucket = visit.bucket
        if bucket is None or bucket.is_recorded or bucket.refusal or isinstance(bucket, TrainedBucket):
            return
        try:
            self._run_and_record(visit, leaves)
        except Exception as error:  # as in a call, which will say so
            bucket.refusal = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        if bucket.refusal:
            self._note_refusal(bucket)

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
            every = [
                bucket.statistics for bucket in self._buckets.values() if bucket.statistics.calls or bucket.outputs
            ]
            sizes = {name: Counter(counted) for name, counted in self._sizes.items()}
            for visit in self._visits.values():
                _add_sizes(visit, sizes)
            return Statistics(
                "graphs" if self._pools else "eager",
                sorted(every, key=lambda b: -_product(b.sizes.values())),
                sum(pool.bytes() for pool in self._pools.values()),
                sum(b.captures for b in every),
                sum(max(b.captures - 1, 0) for b in every),
                self._evictions,
                self._recompiles + sum(max(c.compilations - 1, 0) for c in self._compiled.values()),
                dict(self._fallbacks),
                sizes,
            )

    def _count_sizes(self, visit: _Visit) -> None:
        """Keep what a forgotten key says of sizes."""
        _add_sizes(visit, self._sizes)

    def explain(self) -> str:
        """What was done and why: `st.explain(run)`."""
        dims = ", ".join(map(str, self.dims.distinct.values()))
        limits = f"max_graphs={self.max_graphs}, memory_limit={self.memory_limit}, on_miss={self.on_miss!r}"
        return f"{self._name()} bucketed on {dims}; {limits}\n{self.stats()}"

    def refit(self, max_graphs: int | None = None) -> dict[str, Sizes]:
        """The buckets that would have wasted least on the sizes seen so far.

        Args:
            max_graphs: at most so many of each Dim; by default the runner's own limit, or 8.

        Returns:
            For each Dim that calls gave a size, its policy: `st.Dim(name, buckets=policy)`.
        """
        most = max_graphs or self.max_graphs or 8
        seen = self.stats().sizes
        return {name: fit_buckets(list(counted.elements()), most) for name, counted in seen.items() if counted}

    def plot(self) -> Figure:
        """Draw how often each size was called, its bucket and what it wastes, a row a Dim."""
        from subtensors.bucketed.plot import drawn

        return drawn(self.stats(), self.dims.distinct)

    def release(self) -> None:
        """Give the memory of graphs and static inputs back to the device; the next calls record again."""
        with self._lock:
            for bucket in self._buckets.values():
                if bucket.is_allocated:
                    bucket.forget()
            if self._pools:
                torch.cuda.empty_cache()


def bucketed(
    program: Callable[..., Any],
    dims: Mapping[Any, Any],
    compile: bool | dict[str, Any] = False,
    max_graphs: int | None = None,
    memory_limit: int | str | None = None,
    on_miss: OnMiss = "capture",
    max_waste: float | None = None,
) -> Bucketed:
    """A program over varying sizes as one CUDA graph a bucket: pads, replays, cuts back.

    Args:
        program: a function or module of tensors; it runs on PaddedTensors, once for each bucket.
        dims: for each argument that varies, by name or position, its padded dims, such as `{"input_ids": {1: seq}}`;
            for a container those of every tensor in it, or a dict or list like it.
        compile: True, or the options of `torch.compile`: the program is compiled once, with the buckets' sizes left
            open, and captured as compiled code.
        max_graphs: the most graphs at a time; the least recently called one makes room.
        memory_limit: of the graphs' pool and all static inputs: bytes, or text such as "2GiB".
        on_miss: of a size that has no graph, or can't have one: "capture" one if that is possible, run it at its true
            size ("eager"), or refuse it ("error").
        max_waste: where the bucket is more than so many times the true size, run at the true size.

    Returns:
        What is called as the program is, with plain tensors, PaddedTensors, pytrees of them and other arguments, which
        are part of the graph's key. It returns what the program returns, at true sizes and in memory of its own.

    Raises:
        TypeError, ValueError: an argument of this function is none of these.
        SizeError, RuleError: of a call, with `on_miss="error"`; a Dim that gets two sizes is always a SizeError.

    Example:
        >>> import subtensors as st
        >>> seq = st.Dim("seq", max=512, buckets=64)
        >>> run = st.bucketed(lambda x: x.softmax(1), {"x": {1: seq}})
        >>> run(torch.zeros(1, 5))
        tensor([[0.2000, 0.2000, 0.2000, 0.2000, 0.2000]])
    """
    if not callable(program):
        raise TypeError(f"bucketed takes a function or a module, got {program!r}")
    if max_graphs is not None and (not isinstance(max_graphs, int) or max_graphs < 1):
        raise ValueError(f"max_graphs is an int of at least 1, got {max_graphs!r}")
    if on_miss not in ("capture", "eager", "error"):
        raise ValueError(f"on_miss is 'capture', 'eager' or 'error', got {on_miss!r}")
    if max_waste is not None and not max_waste >= 1:
        raise ValueError(f"max_waste is a factor of at least 1, got {max_waste!r}")
    limit = None if memory_limit is None else parse_bytes("memory_limit", memory_limit)
    if not isinstance(compile, (bool, dict)):
        raise TypeError(f"compile is a bool or a dict of torch.compile's options, got {compile!r}")
    options = {} if compile is True else compile or None
    if options and "reduce" in str(options.get("mode")):
        raise ValueError("compile's mode is not 'reduce-overhead': the graphs are captured here")
    return Bucketed(program, dims, max_graphs, limit, on_miss, max_waste, options)


def _add_sizes(visit: _Visit, sizes: dict[str, Counter[int]]) -> None:
    if visit.reading is not None:
        for dim, size in zip(visit.reading.dims, visit.reading.sizes, strict=True):
            sizes.setdefault(dim.name, Counter())[size] += visit.calls


def _product(numbers: Any) -> int:
    out = 1
    for number in numbers:
        out *= number
    return out
