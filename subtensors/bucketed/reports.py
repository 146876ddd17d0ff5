"""The outside of a runner: its program's attributes, and reports.

Reports are statistics, in numbers, words and a figure, and buckets that would fit better.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Mapping
from html import escape
from typing import TYPE_CHECKING, TypeAlias

from subtensors.arguments import whole_number
from subtensors.bucketed.bucket import Bucket
from subtensors.bucketed.call_cache import CallCache
from subtensors.bucketed.check import Checker
from subtensors.bucketed.dim_spec import ArgumentDims
from subtensors.bucketed.graph_cache import GraphCache
from subtensors.bucketed.statistics import Fallbacks, Statistics
from subtensors.dispatch.ops.tree import PyTree
from subtensors.sizes.bucket_policies import Sizes
from subtensors.sizes.fit_buckets import fit_buckets
from subtensors.sizes.plot_buckets import plot_sizes

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Program: TypeAlias = Callable[..., PyTree]


class ModuleProxy:
    """An object with the attributes of `program` besides its own, such as a module's `parameters` and `eval`.

    A method that returns the program, as `eval` does, returns the proxy instead.
    """

    program: Program

    def __dir__(self) -> list[str]:
        names = dir(vars(self).get("program"))
        return sorted({*super().__dir__(), *(name for name in names if not name.startswith("__"))})

    if not TYPE_CHECKING:  # so that mypy sees a wrong name of its own

        def __getattr__(self, name: str) -> object:
            program = vars(self).get("program")
            if program is None or name.startswith("__") or not hasattr(program, name):
                raise AttributeError(f"neither {type(self).__name__!r} nor its program has an attribute {name!r}")
            found = getattr(program, name)
            if getattr(found, "__self__", None) is not program:
                return found

            @functools.wraps(found)
            def method(*args: object, **kwargs: object) -> object:
                result = found(*args, **kwargs)
                return self if result is program else result

            return method


class Reports(ModuleProxy):
    """The part of a runner that tells what it did."""

    name: str
    on_miss: str
    dims: ArgumentDims
    graph_cache: GraphCache
    call_cache: CallCache
    checker: Checker
    fallbacks: Fallbacks
    _lock: threading.RLock

    @property
    def programs(self) -> Mapping[str, Reports]:
        """The programs that a call of another method runs, by name; none in general."""
        return {}

    def __repr__(self) -> str:
        dims = ", ".join(map(str, self.dims.distinct.values()))
        return f"<st.bucketed {self.name} on {dims or 'no Dim'}: {str(self.stats()).splitlines()[0]}>"

    def _repr_html_(self) -> str:
        """The same as a notebook shows it, above the table of its buckets."""
        title, statistics = repr(self).partition(": ")[0], self.stats()
        return f"<p>{escape(title)}&gt;</p>{statistics._repr_html_()}"

    def no_graph_reasons(self) -> list[str]:
        """Return the reasons why buckets could not be captured."""
        return [b.no_graph_reason for b in self.graph_cache.buckets.values() if b.no_graph_reason]

    def stats(self) -> Statistics:
        """Return calls, captures, replay times, bytes and waste by bucket; fallbacks and their reasons.

        The table says "reused" on a CPU where a GPU has replays. It shows plain values among the arguments, such as
        numbers, where buckets differ in them.

        Example:
            >>> import subtensors as st, torch
            >>> run = st.bucketed(torch.exp, {0: {0: st.Dim("n", max=8, buckets=4)}})
            >>> _ = run(torch.ones(3)), run(torch.ones(2)), run(torch.ones(8))
            >>> print(run.stats())
            eager: 3 calls, 1 reused, 0 captures, 19% waste, pool 0 B
              n=8 [(8,)]: 1 call, 0 reused, 40 B, 0% waste
              n=4 [(4,)]: 2 calls, 1 reused, 24 B, 38% waste
        """
        cache, checker = self.graph_cache, self.checker
        with self._lock:
            used = [b for b in cache.buckets.values() if b.statistics.calls or b.outputs or b.no_graph_reason]
            for b in used:
                b.statistics.no_graph_reason, b.statistics.is_recorded = b.no_graph_reason, b.is_captured
            buckets = [b.statistics for b in used]
            fallbacks = sum([b.fallbacks for b in buckets], cache.forgotten_fallbacks) + self.fallbacks.counted
            return Statistics(
                mode="graphs" if cache.pools else "eager",
                buckets=sorted(buckets, key=lambda b: -math.prod(b.sizes.values())),
                pool_bytes=sum(pool.bytes() for pool in cache.pools.values()),
                captures=sum(b.captures for b in buckets),
                recaptures=sum(max(b.captures - 1, 0) for b in buckets),
                evictions=cache.evictions,
                recompiles=0 if cache.compile_cache is None else cache.compile_cache.recompiles,
                fallbacks=dict(fallbacks),
                sizes=self.call_cache.sizes(),
                checked=checker.checked,
                not_checked=dict(checker.not_checked),
                notes=dict(cache.notes),
            )

    def captured_buckets(self) -> list[Bucket]:
        """Return the buckets with a graph, the least recently called one first."""
        return self.graph_cache.captured_buckets()

    def explain(self) -> str:
        """Describe what was done and why; `st.explain(run)` returns this."""
        dims = ", ".join(map(str, self.dims.distinct.values()))
        budget = f"max_graphs={self.graph_cache.max_graphs}, memory_limit={self.graph_cache.memory_limit}"
        parts = [f"\n{name}: {program.explain()}" for name, program in self.programs.items()]
        return f"{self.name} bucketed on {dims}; {budget}, on_miss={self.on_miss!r}\n{self.stats()}" + "".join(parts)

    def refit(self, max_graphs: int | None = None) -> dict[str, Sizes]:
        """Return the buckets that would have wasted least on the sizes seen so far.

        Args:
            max_graphs: the most buckets of each Dim; by default the runner's own limit, or 8.

        Returns:
            The policy of each Dim that calls gave a size, for `st.Dim(name, buckets=policy)`. Sizes beyond the Dim's
            max count too.

        Raises:
            ValueError: `max_graphs` is below 1.
        """
        if max_graphs is not None:
            max_graphs = whole_number("max_graphs", max_graphs, at_least=1)
        count = max_graphs or self.graph_cache.max_graphs or 8
        seen = {name: [n for n in counted.elements() if n > 0] for name, counted in self.stats().sizes.items()}
        return {name: fit_buckets(sizes, count) for name, sizes in seen.items() if sizes}

    def plot(self) -> Figure:
        """Draw how often each size was called, its bucket and the bucket's waste, one row per Dim."""
        return plot_sizes(self.stats().sizes, self.dims.distinct)
