"""The cache of a runner's calls, looked up by key and analyzed once per key."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from numbers import Number

import torch
from torch import Tensor

from subtensors.arguments import shown
from subtensors.bucketed.autograd_nodes import NestedCall, unwrap_padded_leaves
from subtensors.bucketed.bucket import Bucket
from subtensors.bucketed.call_key import CallKey, SharedKey, flatten, has_parts, leaf_key, shared_key
from subtensors.bucketed.call_spec import AS_GIVEN, CallFormat, CallSpec, LeafDims, NotCacheable, analyze, device_of
from subtensors.bucketed.compiled_gradients import CompiledTrainedBucket
from subtensors.bucketed.dim_spec import ArgumentDims
from subtensors.bucketed.graph_cache import GraphCache
from subtensors.bucketed.outputs import Cut, Outputs
from subtensors.bucketed.program_state import State
from subtensors.dispatch.graphs.collectives import is_reducer
from subtensors.dispatch.graphs.guards import is_plain
from subtensors.dispatch.ops.tree import Args, Kwargs, PyTree
from subtensors.dispatch.padded.size_conditions import SizeConditions
from subtensors.padded.padded_tensor import PaddedTensor

MAX_CACHED_CALLS = 4096
"""The most keys that a runner remembers."""

MAX_VALUES_PER_ARG, MAX_OBJECTS_PER_ARG = 128, 16
"""The most values, and objects or functions, of one argument that get graphs if `max_graphs` is None.

Graphs keep objects alive.
"""

VARYING = 3
"""The number of values from which on a number among the arguments is one that varies from call to call."""


@dataclass(slots=True)
class CachedCall:
    """The cached analysis of a key's calls: their bucket, and how its results are cut to their true sizes."""

    spec: CallSpec | None
    bucket: Bucket | None
    reason: str = ""
    """The reason why such calls have no graph, or ""."""
    error: Exception | None = None
    calls: int = 0
    compared: tuple[SizeConditions, int, bool] | None = None
    """The conditions that these calls' true sizes were compared with, their number, and whether branches count."""
    unmet: str = ""
    """The one that they don't meet, in words."""
    elements: tuple[int, int] = (0, 0)
    """Elements along the Dims: at the true sizes, and at the bucket's."""
    sizes: dict[str, int] = field(default_factory=dict)
    """The true sizes, by Dim, whether the call pads them or not."""
    format: CallFormat = AS_GIVEN
    """The way such calls pass their arguments."""
    places: tuple[str, ...] = ()
    """The place of each leaf among the arguments, in the program's names."""
    outputs: Outputs | None = None
    """The bucket's outputs that `cuts` were made for."""
    cuts: list[Cut] = field(default_factory=list)

    def unmet_condition(self, bucket: Bucket, spec: CallSpec) -> str:
        """Return `Bucket.unmet_condition`, found once for the conditions that there are."""
        compared = bucket.conditions, len(bucket.conditions.found), bucket.checked_sizes.get(spec.true_sizes, False)
        if self.compared != compared:
            self.compared, self.unmet = compared, bucket.unmet_condition(spec)
        return self.unmet

    def add_sizes(self, sizes: dict[str, Counter[int]]) -> None:
        """Add how often these calls had each true size to the counters, by Dim."""
        for name, size in self.sizes.items():
            sizes.setdefault(name, Counter())[size] += self.calls


class CallCache:
    """The cached calls of a runner, by key.

    Args:
        program: what is called.
        dims: of its arguments.
        state: of the program.
        graph_cache: has the buckets.
        max_waste: as in `st.bucketed`.
    """

    def __init__(
        self,
        program: Callable[..., PyTree],
        dims: ArgumentDims,
        state: State,
        graph_cache: GraphCache,
        max_waste: float | None,
    ) -> None:
        self._program, self._dims, self._state, self._graph_cache = program, dims, state, graph_cache
        self._max_waste = max_waste
        self.known: OrderedDict[CallKey, CachedCall] = OrderedDict()
        self._dropped_sizes: dict[str, Counter[int]] = {name: Counter() for name in dims.distinct}
        """The true sizes of calls whose keys were dropped from the cache."""
        self._values: dict[str, set[object]] = {}
        """The values seen of arguments that are not tensors, by place."""
        self._last: CachedCall | None = None
        """The call that was analyzed last, of those with a spec."""
        self.is_bounded = graph_cache.max_graphs is None
        """True if an argument has graphs for a limited number of values only."""

    def __len__(self) -> int:
        return len(self.known)

    def add(self, key: CallKey, shared: SharedKey, leaves: list[PyTree], args: Args, kwargs: Kwargs) -> CachedCall:
        """Analyze the first call of a key, and cache the result.

        Args:
            key: the shared key, then the key of each leaf.
            shared: as `shared_key` gives it.
            leaves: of the arguments.
            args, kwargs: the call's.
        """
        cached = self.analyze(shared, leaves, args, kwargs)
        if len(self.known) >= MAX_CACHED_CALLS:
            self.known.popitem(last=False)[1].add_sizes(self._dropped_sizes)
        if cached.spec is not None or cached.error is not None:
            # The rest may belong to objects that the cache must not keep alive.
            self.known[key] = cached
        return cached

    def analyze_once(self, args: Args, kwargs: Kwargs) -> tuple[CachedCall, list[PyTree]]:
        """Analyze a call without a look at the cache; return its leaves, too, in the order of the parameters."""
        leaves, structure = flatten(args, kwargs)
        cached = self.analyze(shared_key(self._state, leaves, structure, args, kwargs), leaves, args, kwargs)
        return cached, cached.format.ordered(leaves)

    def analyze(self, shared: SharedKey, leaves: list[PyTree], args: Args, kwargs: Kwargs) -> CachedCall:
        """Analyze a call: find its bucket, or the reason why it has no graph.

        Args:
            shared: as `shared_key` gives it.
            leaves: of the arguments.
            args, kwargs: the call's.

        Raises:
            SizeError: one Dim has two sizes.
        """
        *_, structure, modes = shared
        form = CallFormat.of(self._dims.positional, args, kwargs, structure)
        leaves, places = form.ordered(leaves), form.ordered(self._dims.of_leaves(args, kwargs))
        given = [(x, dims) for x, (_, dims) in zip(leaves, places, strict=True) if not isinstance(x, PaddedTensor)]
        sizes = {dim.name: x.shape[d] for x, dims in given for d, dim in dims.items()}
        try:
            spec = analyze(leaves, places, (form.key, modes))
            device = device_of(spec, self._state.tensors())
            if reducer := next(filter(is_reducer, self._state.guard.modules), None):
                name = type(reducer).__name__
                raise NotCacheable(f"a {name} calls collectives in Python: let it hold the runner's module instead")
            if self._state.is_lazy():
                raise NotCacheable("parameters have no size before the first call")
        except NotCacheable as reason:
            return CachedCall(None, None, str(reason), reason.error, sizes=sizes)
        elements = spec.elements()
        cached = CachedCall(
            spec, None, elements=elements, sizes=sizes, format=form, places=tuple([place for place, _ in places])
        )
        if self._max_waste is not None and elements[1] > self._max_waste * elements[0]:
            cached.reason = f"padding would be more than max_waste={self._max_waste:g} times the true size"
            return cached
        if too_many := self._note_values(leaves, cached.places, form, modes[-1]):
            return CachedCall(None, None, too_many, sizes=sizes)
        for note in (self._dims.not_given(args, kwargs), *self._unnamed_dim(cached, places)):
            if note:
                self._graph_cache.note(note)
        self._last = cached
        call = form.program_on_leaves(self._program, self._state)
        cached.bucket = self._graph_cache.bucket_of(modes[0] is not None, spec, leaves, call, device)
        cached.bucket.statistics.values = {
            place: shown(x) for x, place in zip(leaves, cached.places, strict=True) if is_plain(x)
        }
        return cached

    def _unnamed_dim(self, cached: CachedCall, places: Sequence[LeafDims]) -> Iterator[str]:
        """Yield a note if an argument varies like a Dim that `dims` do not name for it.

        That is so if a dim of it has this Dim's size in two calls of different sizes.

        Args:
            cached: the call.
            places: for each leaf its place and padded dims.
        """
        if self._last is None or cached.spec is None or self._last.spec is None or self._last.places != cached.places:
            return
        for now, before in zip(cached.spec.inputs, self._last.spec.inputs, strict=False):
            if now.leaf != before.leaf or len(now.shape) != len(before.shape) or now.dims is not None:
                continue
            for d, (size, old) in enumerate(zip(now.shape, before.shape, strict=True)):
                same = [name for name, n in cached.sizes.items() if (n, self._last.sizes.get(name)) == (size, old)]
                if size != old and d not in places[now.leaf][1] and same:
                    place = cached.places[now.leaf]
                    yield (
                        f"each size of {place} gets a graph of its own, since it has the size of {same[0]} in dim {d} "
                        f"and dims don't say so: {{{place!r}: {{{d}: {same[0]}}}}}"
                    )
                    return

    def nested_call(self, args: Args, kwargs: Kwargs) -> NestedCall | None:
        """Return a call of compiled code, made inside another bucketed program; None if the program is to run."""
        if self._graph_cache.compile_options is None or torch.compiler.is_compiling():
            return None
        leaves, structure = flatten(args, kwargs)
        unwrapped = unwrap_padded_leaves(leaves, self._dims.of_leaves(args, kwargs))
        if unwrapped is None:
            return None
        dense, sizes = unwrapped
        shared = shared_key(self._state, leaves, structure, args, kwargs)
        cached = self.analyze(shared, dense, args, kwargs)
        bucket, dense = cached.bucket, cached.format.ordered(dense)
        if not isinstance(bucket, CompiledTrainedBucket):
            return None
        symbols = tuple(dim.symbol for dim in bucket.spec.dims)
        if bucket.spec.caller_sizes or symbols != (sizes.symbols if sizes is not None else ()):
            return None
        bucket.allocate()
        if not bucket.code.prepare(bucket):
            return None
        values = sizes.values if sizes is not None else bucket.size_values
        given = [dense[source.leaf] for source in bucket.spec.inputs]
        return NestedCall(bucket, [*given, values], sizes)

    def _note_values(self, leaves: Sequence[PyTree], places: Sequence[str], form: CallFormat, user_key: object) -> str:
        """Note the values of arguments that are no tensors, and of the user's key, each of which has its own graphs.

        Returns:
            A reason if there were too many of one for further graphs, or "".
        """
        for x, place in zip(leaves, places, strict=True):
            if not isinstance(x, Hashable):
                return f"{place} can't be part of a graph's key: unhashable type: {type(x).__name__!r}"
        values: list[tuple[object, str, int, bool]] = [
            (leaf_key(x), place, MAX_OBJECTS_PER_ARG if has_parts(x) else MAX_VALUES_PER_ARG, _is_number(x))
            for x, place in zip(leaves, places, strict=True)
            if not isinstance(x, Tensor)
        ]
        others: list[tuple[object, str]] = [(own, f"the structure of {name}") for name, own in form.key]
        others.append((user_key, "key"))
        values += [(key, place, MAX_VALUES_PER_ARG, False) for key, place in others if key is not None]
        new = [(*value, seen) for value in values if value[0] not in (seen := self._values.setdefault(value[1], set()))]
        for _, place, most, _, seen in new:
            if len(seen) >= most and self.is_bounded:
                return f"{place} had {most} values, each with graphs of its own: give a tensor, or max_graphs"
        for key, place, most, is_number, seen in new:
            if len(seen) < most:
                seen.add(key)
                if is_number and len(seen) == VARYING:
                    self._graph_cache.note(
                        f"each value of {place} gets a graph of its own: give a tensor on the same device"
                    )
        return ""

    def forget_values(self) -> None:
        """Forget the values seen so far, so that arguments that had too many get graphs again."""
        self._values.clear()

    def sizes(self) -> dict[str, Counter[int]]:
        """Count how often each true size was seen, by Dim."""
        sizes = {name: Counter(counted) for name, counted in self._dropped_sizes.items()}
        for cached in self.known.values():
            cached.add_sizes(sizes)
        return sizes


def _is_number(x: PyTree) -> bool:
    return isinstance(x, Number) and not isinstance(x, bool)
