"""What the calls of a runner are: known by their keys, and worked out once for each."""

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
"""Of torch as a whole, which decide what a graph does: it is captured for those of the call."""

KEYS = 4096
"""How many different ones a runner remembers."""

VALUES, OBJECTS = 128, 16
"""How many of one argument have graphs, where `max_graphs` does not say how many there may be; graphs keep objects."""


@dataclass(slots=True)
class CachedCall:
    """One key, its bucket, and how a result of the bucket is cut for it."""

    reading: CallSpec | None
    bucket: Bucket | None
    refusal: str = ""
    """Why such calls have no graph; "" where they do."""
    error: Exception | None = None
    calls: int = 0
    elements: tuple[int, int] = (0, 0)
    """Along the Dims: real ones, and the bucket's."""
    sizes: dict[str, int] = field(default_factory=dict)
    """The true ones, by Dim, whether it pads them or not."""
    style: CallFormat = AS_GIVEN
    """How such calls are written."""
    outputs: Outputs | None = None
    cuts: list[Cut] = field(default_factory=list)

    def add_sizes(self, sizes: dict[str, Counter[int]]) -> None:
        """Count how often each true size was seen, by Dim."""
        for name, size in self.sizes.items():
            sizes.setdefault(name, Counter())[size] += self.calls


def shared_key(
    state: State, leaves: Sequence[Any], spec: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    """What of a call's key is not of one leaf: the form of the call, and the modes it is made in.

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
    """The keys of a runner's calls, and what is known of each.

    Args:
        program: what is called.
        dims: of its arguments.
        state: of the program.
        recorder: where buckets are.
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
        """The sizes that calls of forgotten keys had."""
        self._values: dict[str, set[Any]] = {}
        """What arguments that are no tensors have been, by their place."""
        self.are_bounded = recorder.max_graphs is None
        """Do arguments have graphs for so many values only?"""

    def __len__(self) -> int:
        return len(self.known)

    def first(self, key: Any, leaves: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> CachedCall:
        """What the first call of a key is, to be remembered.

        Args:
            key: what `shared_key` gives, then of each leaf.
            leaves: of the arguments.
            args, kwargs: the call's.
        """
        visit = self.read(key[0], leaves, args, kwargs)
        if len(self.known) >= KEYS:
            self.known.popitem(last=False)[1].add_sizes(self._forgotten)
        if visit.reading is not None or visit.error is not None:
            # Others may be of objects that it must not keep alive.
            self.known[key] = visit
        return visit

    def read(self, shared: Any, leaves: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> CachedCall:
        """What a call is.

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
        """Which argument is another so often that it has no graphs from now on, in words; "" where none is."""
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
        """Arguments that had too many values have graphs again, for as many."""
        self._values.clear()

    def sizes(self) -> dict[str, Counter[int]]:
        """How often each true size was seen, by Dim."""
        sizes = {name: Counter(counted) for name, counted in self._forgotten.items()}
        for visit in self.known.values():
            visit.add_sizes(sizes)
        return sizes
