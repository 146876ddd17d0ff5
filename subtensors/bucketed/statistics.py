"""Statistics of a bucketed program, as numbers and as a table: calls, captures, memory, waste, and fallbacks."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from html import escape
from statistics import median

import torch

from subtensors.counts import counted, format_bytes
from subtensors.dispatch.ops.errors import RuleError

TIMING_SAMPLE_EVERY = 64
"""One in this many replays is timed."""


@dataclass
class BucketStatistics:
    """Counters of one bucket.

    Args:
        sizes: the bucket's size of each Dim, by its name.
        shapes: of the static inputs.
    """

    sizes: dict[str, int]
    shapes: list[tuple[int, ...]]
    values: dict[str, str] = field(default_factory=dict)
    """The plain values among the arguments, as text, by place; the graph is captured for these."""
    calls: int = 0
    """Calls that ran at this bucket's sizes."""
    hits: int = 0
    """Calls among these that a replay answered."""
    fallbacks: Counter[str] = field(default_factory=Counter)
    """Calls among these that left no graph, by reason."""
    no_graph_reason: str = ""
    """The reason why it can't be captured, once that is known."""
    captures: int = 0
    capture_ms: float = 0.0
    """The duration of the last capture."""
    graph_bytes: int = 0
    """The memory that the graph added to the pool."""
    input_bytes: int = 0
    """The memory of the static inputs and true sizes."""
    real: int = 0
    """Elements along the Dims at true sizes, summed over all calls."""
    padded: int = 0
    """Elements along the Dims at the bucket's sizes, summed over all calls."""
    replayed_again: int = 0
    """Forwards that were replayed once more for their backward, because another replay came in between."""
    is_recorded: bool = False
    _events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list, repr=False)
    """CUDA events around timed replays that may not have finished."""
    _replay_ms: list[float] = field(default_factory=list, repr=False)

    def note_timed(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> None:
        """Keep the two events around a replay, and read those that have finished, so that only a few are kept."""
        self._read_events()
        self._events.append((begin, end))

    def _read_events(self) -> None:
        done = [pair for pair in self._events if pair[1].query()]
        self._events = self._events[len(done) :]
        self._replay_ms = (self._replay_ms + [begin.elapsed_time(end) for begin, end in done])[-TIMING_SAMPLE_EVERY:]

    @property
    def replay_ms(self) -> float | None:
        """The median time of the timed replays; None if none was timed."""
        self._read_events()
        return median(self._replay_ms) if self._replay_ms else None

    @property
    def waste(self) -> float:
        """The fraction of the computed elements that is padding."""
        return 1 - self.real / self.padded if self.padded else 0.0

    @property
    def not_captured(self) -> str:
        """The state of a bucket without a graph, with the reason if there is one."""
        return "not captured" + f": {self.no_graph_reason}" * bool(self.no_graph_reason)

    @property
    def bytes(self) -> int:
        """Device memory: that which the graph added to the pool, and the static inputs'."""
        return self.graph_bytes + self.input_bytes


@dataclass(frozen=True, repr=False)
class Statistics:
    """The statistics of a bucketed program up to now.

    Args:
        mode: "graphs" on a CUDA device; "eager" elsewhere, where the same padding runs without graphs.
        buckets: each one's counters, by decreasing size.
        pool_bytes: the device memory of the pool that all graphs share.
        captures: the number of captures.
        recaptures: the captures of these because what a graph read was stale, or the graph had been evicted.
        evictions: graphs dropped for `max_graphs` or `memory_limit`.
        recompiles: compilations after the first, with `compile`.
        fallbacks: the number of calls without a graph, by reason: a bucket's first call where no graph could be
            captured, and calls that ran at their true sizes.
        sizes: how often each true size was seen, by Dim.
        checked: the number of calls that were compared with the plain program.
        not_checked: the number of calls that were due for a comparison and could not be compared, by reason.
    """

    mode: str
    buckets: list[BucketStatistics]
    pool_bytes: int
    captures: int
    recaptures: int
    evictions: int
    recompiles: int
    fallbacks: dict[str, int]
    sizes: dict[str, Counter[int]]
    checked: int = 0
    not_checked: dict[str, int] = field(default_factory=dict)
    notes: dict[str, int] = field(default_factory=dict)
    """Events that cost graphs without a fallback, such as a recapture, and how often each was seen."""

    @property
    def calls(self) -> int:
        """All calls."""
        return sum(b.calls - b.fallbacks.total() for b in self.buckets) + sum(self.fallbacks.values())

    @property
    def hits(self) -> int:
        """Calls that were answered by a replay, on a CPU by a bucket that an earlier call made."""
        return sum(b.hits for b in self.buckets)

    @property
    def waste(self) -> float:
        """The fraction of the elements computed in buckets that is padding."""
        padded = sum(b.padded for b in self.buckets)
        return 1 - sum(b.real for b in self.buckets) / padded if padded else 0.0

    def __str__(self) -> str:
        captures = counted(self.captures, "capture")
        lines = [
            f"{self.mode}: {counted(self.calls, 'call')}, {self._counted_hits(self.hits)}, {captures}, "
            f"{self.waste:.0%} waste, pool {format_bytes(self.pool_bytes)}"
        ]
        lines += [f"  {name} {b.shapes}: {self._describe(b)}" for name, b in self._named_buckets()]
        events = (self.evictions, "eviction"), (self.recaptures, "recapture"), (self.recompiles, "recompilation")
        if any(count for count, _ in events):
            lines.append("  " + ", ".join(counted(*event) for event in events))
        lines += [f"  {counted(count, 'call')} fell back: {reason}" for reason, count in self.fallbacks.items()]
        lines += [f"  {counted(count, 'call')} not checked: {reason}" for reason, count in self.not_checked.items()]
        lines += [f"  {note}" + f" ({count} times)" * (count > 1) for note, count in self.notes.items()]
        return "\n".join(lines)

    __repr__ = __str__

    def _counted_hits(self, hits: int) -> str:
        """Return a number of hits as text, without a word of replays where there are no graphs."""
        return counted(hits, "replay") if self.mode == "graphs" else f"{hits} reused"

    def _named_buckets(self) -> Iterator[tuple[str, BucketStatistics]]:
        """Yield each bucket after its name: its sizes, and the values that other buckets have otherwise."""
        texts: defaultdict[str, set[str]] = defaultdict(set)
        for b in self.buckets:
            for place, text in b.values.items():
                texts[place].add(text)
        for b in self.buckets:
            varying = [(place, text) for place, text in b.values.items() if len(texts[place]) > 1]
            yield ", ".join(f"{name}={value}" for name, value in [*b.sizes.items(), *varying]) or "no Dim", b

    def _describe(self, b: BucketStatistics) -> str:
        """Describe what a bucket did, and why it has no graph."""
        if not (b.calls or b.is_recorded):
            return b.not_captured
        replay = b.replay_ms
        counts = (
            f"{counted(b.calls, 'call')}, {self._counted_hits(b.hits)}, "
            + (f"capture {b.capture_ms:.1f} ms, " if b.captures else "")
            + (f"replay {replay:.3f} ms, " if replay is not None else "")
            + f"{format_bytes(b.bytes)}, {b.waste:.0%} waste"
        )
        return counts if b.is_recorded else f"{counts}, {b.not_captured}"

    def _repr_html_(self) -> str:
        """The same as a notebook shows it: a table of the buckets between the first line and the notes."""
        first, *rest = str(self).splitlines()
        notes = rest[len(self.buckets) :]
        rows = [
            [
                name,
                ", ".join(map(str, b.shapes)),
                *map(str, (b.calls, b.hits, b.captures)),
                "" if (replay := b.replay_ms) is None else f"{replay:.3f}",
                format_bytes(b.bytes),
                f"{b.waste:.0%}",
                "" if b.is_recorded else b.not_captured,
            ]
            for name, b in self._named_buckets()
        ]
        hits = "replays" if self.mode == "graphs" else "reused"
        head = _html_row("th", f"bucket shapes calls {hits} captures replay&nbsp;ms memory waste notes".split())
        body = "".join(_html_row("td", map(escape, row)) for row in rows)
        below = "".join(f"<p>{escape(note.strip())}</p>" for note in notes)
        return f"<p>{escape(first)}</p><table><thead>{head}</thead><tbody>{body}</tbody></table>{below}"


def _html_row(tag: str, cells: Iterable[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{cell}</{tag}>' for cell in cells)}</tr>"


_log = logging.getLogger("subtensors.bucketed")


class Fallbacks:
    """The calls of a program that run without a graph.

    Args:
        name: of the program.
        are_errors: whether such a call is an error.
    """

    def __init__(self, name: str, are_errors: bool) -> None:
        self.name, self.are_errors = name, are_errors
        self.counted: Counter[str] = Counter()
        """The number of such calls, by reason."""
        self._warned: set[str] = set()

    def refuse(self, reason: str, error: Exception | None = None) -> None:
        """Raise, if fallbacks are errors.

        Raises:
            Exception: `error` if given, else a RuleError with the reason.
        """
        if self.are_errors:
            raise error or RuleError(f"no graph for this call: {reason}")

    def count(self, reason: str) -> None:
        """Count a call that ran at its true sizes, and warn once per reason."""
        self.warn_once(f"{self.name} runs at its true sizes, without a graph: {reason}", reason)
        self.counted[reason] += 1

    def warn_once(self, message: str, reason: str = "") -> None:
        """Log a warning; only the first with its reason, or its text if it has none, is logged."""
        if (reason or message) not in self._warned:
            _log.warning(message)
        self._warned.add(reason or message)

    def warn_not_captured(self, sizes: Mapping[str, int], reason: str) -> None:
        """Warn, once per reason, that a bucket could not be captured; the call that tried has its result.

        Args:
            sizes: the bucket's size of each Dim, by name.
            reason: in words.

        Raises:
            RuleError: fallbacks are errors.
        """
        self.refuse(reason)
        self.warn_once(f"{self.name} can't be captured at {sizes}: {reason}", reason)


def summarize_error(error: Exception) -> str:
    """Return an error's type and the first line of its message, joined with the second if the first ends with a colon.

    >>> summarize_error(ValueError("no"))
    'ValueError: no'
    """
    lines = str(error).splitlines()
    first = " ".join(lines[:2]) if lines and lines[0].endswith(":") else "".join(lines[:1])
    return f"{type(error).__name__}: {first}"
