"""The cache of a runner's calls, looked up by key and analyzed once per key."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from subtensors.bucketed.bucket import Bucket
from subtensors.bucketed.calls.call_spec import CallSpec, NotCacheable, device_of, leaf_key, read, seen
from subtensors.bucketed.calls.dim_spec import ArgumentDims
from subtensors.bucketed.calls.normalize_call import AS_GIVEN, CallFormat
from subtensors.bucketed.calls.object_snapshot import is_by_identity
from subtensors.bucketed.calls.outputs import Cut, Outputs
from subtensors.bucketed.graph_cache import GraphCache
from subtensors.bucketed.state.program_state import State
from subtensors.bucketed.training.nested_call import bucketed_program
from subtensors.dispatch.torch_internals import ops

SETTINGS = (
    torch.get_default_dtype, ops.default_device, torch.are_deterministic_algorithms_enabled,
    torch.get_float32_matmul_precision,
    torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.mem_efficient_sdp_enabled,
    torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.math_sdp_enabled,
)  # fmt: skip
"""Global torch settings that decide what a graph does; a graph is captured for the settings of its call."""

KEYS = 4096
"""The most keys that a runner remembers."""

VALUES, OBJECTS = 128, 16
"""The most values, and objects, of one argument that get graphs if `max_graphs` is None; graphs keep objects alive."""


@dataclass(slots=True)
class CachedCall:
    """The cached analysis of a key's calls: their bucket, and how its results are cut to their true sizes."""

    reading: CallSpec | None
    bucket: Bucket | None
    refusal: str = ""
    """The reason why such calls have no graph, or ""."""
    error: Exception | None = None
    calls: int = 0
    elements: tuple[int, int] = (0, 0)
    """Elements along the Dims: at the true sizes, and at the bucket's."""
    sizes: dict[str, int] = field(default_factory=dict)
    """The true sizes, by Dim, whether the call pads them or not."""
    style: CallFormat = AS_GIVEN
    """The way such calls pass their arguments."""
    outputs: Outputs | None = None
    cuts: list[Cut] = field(default_factory=list)

    def add_sizes(self, sizes: dict[str, Counter[int]]) -> None:
        """Add how often these calls had each true size to the counters, by Dim."""
        for name, size in self.sizes.items():
            sizes.setdefault(name, Counter())[size] += self.calls


def shared_key(
    state: State, leaves: Sequence[Any], spec: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    """The part of a call's key that belongs to no single leaf: the call's structure, and the modes it is made in.

    Args:
        state: of the program.
        leaves, spec: as `flatten` gives them.
        args, kwargs: the call's.
    """
    cast = torch.is_autocast_enabled("cuda"), torch.is_autocast_enabled("cpu")
    types = (torch.get_autocast_dtype("cuda"), torch.get_autocast_dtype("cpu")) if any(cast) else None
    settings = tuple([ask() for ask in SETTINGS])
    return len(args), tuple(kwargs), spec, (state.followed(leaves), cast, types, settings, state.training())


class CallCache:
    """The cached calls of a runner, by key.

    Args:
        program: what is called.
        dims: of its arguments.
        state: of the program.
        recorder: holds the buckets.
        max_waste: as of `st.bucketed`.
    """

    def __init__(
        self,
        program: Callable[..., Any],
        dims: ArgumentDims,
        state: State,
        recorder: GraphCache,
        max_waste: float | None,
    ) -> None:
        self._program, self._dims, self._state, self._recorder = program, dims, state, recorder
        self._max_waste = max_waste
        self.known: OrderedDict[Any, CachedCall] = OrderedDict()
        self._forgotten: dict[str, Counter[int]] = {name: Counter() for name in dims.distinct}
        """The true sizes of calls whose keys were dropped from the cache."""
        self._values: dict[str, set[Any]] = {}
        """The values seen of arguments that are not tensors, by place."""
        self.are_bounded = recorder.max_graphs is None
        """True if an argument has graphs for a limited number of values only."""

    def __len__(self) -> int:
        return len(self.known)

    def first(self, key: Any, leaves: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> CachedCall:
        """Analyze the first call of a key, and cache the result.

        Args:
            key: what `shared_key` gives, then of each leaf.
            leaves: of the arguments.
            args, kwargs: the call's.
        """
        visit = self.read(key[0], leaves, args, kwargs)
        if len(self.known) >= KEYS:
            self.known.popitem(last=False)[1].add_sizes(self._forgotten)
        if visit.reading is not None or visit.error is not None:
            # The rest may belong to objects that the cache must not keep alive.
            self.known[key] = visit
        return visit

    def read(self, shared: Any, leaves: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> CachedCall:
        """Analyze a call: find its bucket, or the reason why it has no graph.

        Args:
            shared: as `shared_key` gives it.
            leaves: of the arguments.
            args, kwargs: the call's.

        Raises:
            SizeError: one Dim has two sizes.
        """
        *_, spec, modes = shared
        style = CallFormat.of(self._dims.positional, args, kwargs, spec)
        leaves, places = style.ordered(leaves), style.ordered(self._dims.of_leaves(args, kwargs))
        sizes = {dim.name: size for x, (_, given) in zip(leaves, places, strict=True) for dim, size in seen(x, given)}
        try:
            reading = read(leaves, places, (style.key, modes))
            device = device_of(reading, self._state.tensors())
            if self._state.is_lazy():
                raise NotCacheable("parameters have no size before the first call")
        except NotCacheable as why:
            return CachedCall(None, None, str(why), why.error, sizes=sizes)
        elements = math.prod(reading.sizes), math.prod(reading.buckets)
        visit = CachedCall(reading, None, elements=elements, sizes=sizes, style=style)
        if self._max_waste is not None and visit.elements[1] > self._max_waste * visit.elements[0]:
            visit.refusal = f"padding would be more than max_waste={self._max_waste:g} times the true size"
            return visit
        if too_many := self._too_many_values(leaves, [place for place, _ in places], style):
            return CachedCall(None, None, too_many, sizes=sizes)

        def call(leaves: Sequence[Any]) -> Any:
            with bucketed_program(), self._state.of_a_run():
                return style.call(self._program, leaves)

        visit.bucket = self._recorder.bucket_of(modes[0] is not None, reading, leaves, call, device)
        return visit

    def _too_many_values(self, leaves: Sequence[Any], places: Sequence[str], style: CallFormat) -> str:
        """Return a reason if an argument has had too many values to get further graphs, or ""."""
        if not self.are_bounded:
            return ""
        others = [
            (leaf_key(x), place, OBJECTS if is_by_identity(x) else VALUES)
            for x, place in zip(leaves, places, strict=True)
            if not isinstance(x, Tensor)
        ]
        others += [(form, f"the structure of {name}", VALUES) for name, form in style.key if form is not None]
        for key, place, most in others:
            values = self._values.setdefault(place, set())
            if key not in values and len(values) >= most:
                return f"{place} had {most} values, each with graphs of its own: give a tensor, or max_graphs"
        for key, place, _ in others:
            self._values[place].add(key)
        return ""

    def forget_values(self) -> None:
        """Forget the values seen so far, so that arguments that had too many get graphs again."""
        self._values.clear()

    def sizes(self) -> dict[str, Counter[int]]:
        """Count how often each true size was seen, by Dim."""
        sizes = {name: Counter(counted) for name, counted in self._forgotten.items()}
        for visit in self.known.values():
            visit.add_sizes(sizes)
        return sizes
