"""One bucket: its static inputs, the program captured on them, and the outputs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from subtensors.bucketed.calls.cache_key import callers_tensors, has_parts
from subtensors.bucketed.calls.call_spec import CallSpec
from subtensors.bucketed.calls.outputs import Outputs
from subtensors.bucketed.compilation.compile_cache import CompileCache
from subtensors.bucketed.compilation.compiled import Compiled
from subtensors.bucketed.report.statistics import BucketStatistics
from subtensors.dispatch.graphs.pool import GraphPool, without_autocast_cache
from subtensors.dispatch.padded.padded_value import PaddedValue
from subtensors.dispatch.padded.true_sizes import HostSize, TrueSizes
from subtensors.dispatch.sizes.dim_factors import padded_dim, static_dims
from subtensors.kernels.graph_inputs.inputs import InputLoader
from subtensors.kernels.runtime.current_device import launching_on
from subtensors.padded.autograd import wrap_with_grad
from subtensors.padded.padded_tensor import PaddedTensor, make_padded

Call = Callable[[Sequence[Any]], Any]
"""Runs the program on the leaves of a call."""


class Bucket:
    """The program at one bucket's sizes.

    Args:
        reading: the spec of a call of this bucket.
        leaves: that call's leaves.
        call: runs the program on leaves, some of which become static inputs.
        device: of the static inputs.
        pool: where graphs are captured; None if the program runs again at each call instead.
    """

    def __init__(
        self,
        reading: CallSpec,
        leaves: Sequence[Any],
        call: Call,
        device: torch.device,
        pool: GraphPool | None,
    ) -> None:
        self.reading, self.call, self.device, self.pool = reading, call, device, pool
        self.compiled: Compiled | None = None
        """The program's compiled code, if compilation is on."""
        # An argument that isn't copied is the caller's, or a number: it stays what it was in the first call.
        copied = {source.leaf for source in reading.sources}
        self.others = {i: x for i, x in enumerate(leaves) if i not in copied}
        self.count = len(leaves)
        self.holds_callers = any(isinstance(x, Tensor) or has_parts(x) for x in self.others.values())
        """True if the program may write in place to an argument that isn't copied."""
        self.statistics = BucketStatistics(
            {dim.name: bucket for dim, bucket in zip(reading.dims, reading.buckets, strict=True)},
            [source.shape for source in reading.sources],
        )
        self.graph: torch.cuda.CUDAGraph | None = None
        self.outputs: Outputs | None = None
        self.refusal = ""
        """The reason why it can't be captured, once that is known."""
        self.is_due = False
        """True if its graph was dropped in order to be recaptured."""
        self.is_allocated = False
        self.written: set[int] = set()
        """Indices of the sources that the program writes to."""
        self.last_call = 0
        """The time of its last call, on the runner's clock."""

    def take_code(self, code: CompileCache) -> None:
        """Take the program's compiled code from the cache, if compilation is on."""
        self.compiled = code.of(self, Compiled)

    @property
    def is_recorded(self) -> bool:
        """Return whether a replay can answer calls."""
        return self.outputs is not None

    def allocate(self) -> None:
        """Make the static inputs, outside of the pool."""
        if self.is_allocated:
            return
        reading = self.reading
        with torch.inference_mode(False):
            self._make_inputs(reading)
        targets = [*self.statics, *self.caller_values]
        which = [*[s.which for s in reading.sources], *[(-1,) * len(c.shape) for c in reading.caller]]
        self._load = InputLoader(targets, which, self.values)
        self.statistics.input_bytes = sum(t.nbytes for t in self.inputs())
        self.is_allocated = True

    def _make_inputs(self, reading: CallSpec) -> None:
        self.statics = [torch.zeros(s.shape, dtype=s.dtype, device=s.device) for s in reading.sources]
        self.caller_values = [torch.zeros(c.shape, dtype=torch.int64, device=self.device) for c in reading.caller]
        self.values = torch.zeros(len(reading.dims), dtype=torch.int64, device=self.device)

    def load(self, leaves: Sequence[Any], sizes: tuple[int, ...]) -> None:
        """Copy a call's tensors into the static inputs, with their padding and true sizes."""
        found: list[Tensor] = []
        for source in self.reading.sources:
            x = leaves[source.leaf]
            found.append(x._dense if type(x) is PaddedTensor else x)
        for caller in self.reading.caller:
            found.append(leaves[caller.leaf]._sizes.values)
        self._load(found, sizes)

    def callers_tensors(self) -> Iterator[Tensor]:
        """The caller's tensors that the program reads in place, without a copy."""
        return callers_tensors(self.others.values())

    @property
    def leaves_traces(self) -> bool:
        """Return whether a call may change its arguments."""
        return self.holds_callers or bool(self.written)

    def obstacle(self, leaves: Sequence[Any]) -> str:
        """Return the reason why a replay can't answer this call, or "" if it can."""
        if not self.written or len({id(leaves[s.leaf]) for s in self.reading.sources}) == len(self.reading.sources):
            return ""
        return "it writes to an argument, and one tensor is given as several"

    def write_back(self, leaves: Sequence[Any]) -> None:
        """Copy what the program wrote into its static inputs back to the arguments of the call."""
        for i in self.written:
            given = leaves[self.reading.sources[i].leaf]
            own = given._dense if type(given) is PaddedTensor else given
            own.copy_(self.statics[i][tuple(map(slice, own.shape))])

    def inputs(self) -> list[Tensor]:
        """The static inputs: those of the sources, the true sizes of the caller's PaddedTensors, and the call's."""
        return [*self.statics, *self.caller_values, self.values]

    def zeros(self, buckets: tuple[int, ...]) -> list[Tensor]:
        """Zero-filled inputs, ordered like `inputs()`, at other bucket sizes."""
        reading = self.reading
        made = []
        for source in reading.sources:
            shape = [buckets[k] if k >= 0 else n for n, k in zip(source.shape, source.which, strict=True)]
            made.append(torch.zeros(shape, dtype=source.dtype, device=source.device))
        return made + [torch.zeros_like(t) for t in [*self.caller_values, self.values]]

    def run_on(self, inputs: Sequence[Tensor], host: dict[Any, HostSize] | None = None) -> Outputs:
        """Run the program on the given inputs.

        Args:
            inputs: as `inputs` gives them, perhaps at other buckets.
            host: the true sizes, if the host is to know them; None in a capture, which must serve all true sizes.
        """
        reading = self.reading
        count = len(reading.sources)
        statics, caller_values, values = inputs[:count], inputs[count:-1], inputs[-1]
        buckets = [0] * len(reading.dims)
        for source, static in zip(reading.sources, statics, strict=True):
            for d, k in enumerate(source.which):
                if k >= 0:
                    buckets[k] = static.shape[d]
        symbols = tuple(dim.symbol for dim in reading.dims)
        own = _true_sizes(symbols, tuple(buckets), values, host) if reading.dims else None
        theirs = [
            _true_sizes(c.symbols, c.buckets, held, host) for c, held in zip(reading.caller, caller_values, strict=True)
        ]
        leaves: list[Any] = [self.others.get(i) for i in range(self.count)]
        for source, static in zip(reading.sources, statics, strict=True):
            if source.dims is not None:
                sizes = theirs[source.sizes] if source.sizes >= 0 else None
                leaves[source.leaf] = make_padded(PaddedValue(static, source.dims, sizes))
            elif any(k >= 0 for k in source.which):
                dims = [
                    padded_dim(n, symbols[k]) if k >= 0 else static_dims([n])[0]
                    for n, k in zip(static.shape, source.which, strict=True)
                ]
                # The program's own autograd functions check `requires_grad` of the argument itself.
                leaves[source.leaf] = wrap_with_grad(PaddedValue(static, tuple(dims), own, fill=0))
            else:
                leaves[source.leaf] = static
        versions = [static._version for static in statics]
        outputs = Outputs.of(self.call(leaves), list(self.others.values()))
        self.written |= {i for i, v in enumerate(versions) if statics[i]._version != v}
        return outputs

    def _run(self, host: dict[Any, HostSize] | None) -> Outputs:
        if self.compiled is not None:
            return self.compiled.run(self)
        return self.run_on(self.inputs(), host)

    def run_once(self, host: dict[Any, HostSize]) -> Any:
        """Run the program on the loaded inputs; this also warms the libraries up for a later capture.

        Returns:
            The result, cut to the true sizes, in memory of its own.
        """
        with recording_modes():
            outputs = self.pool.run(lambda: self._run(host)) if self.pool is not None else self._run(host)
        return outputs.assembled([cut() for cut in outputs.cuts(host)])

    def record(self) -> None:
        """Capture the program.

        Raises:
            Exception: it can't be captured.
        """
        started = time.perf_counter()
        if self.pool is None:
            self.outputs = Outputs.of(None)
            self.statistics.is_recorded = True
            return
        with recording_modes():
            before = self.pool.bytes()
            self.graph, outputs = self.pool.capture(lambda: self._run(None))
            self.outputs = outputs.elsewhere(self.pool.non_owning_aliases(outputs.tensors()))
            self.statistics.graph_bytes = self.pool.bytes() - before
        self.statistics.is_recorded = True
        self.statistics.captures += 1
        self.statistics.capture_ms = (time.perf_counter() - started) * 1e3

    def replay_call(self, leaves: Sequence[Any], reading: CallSpec) -> None:
        """Load a call's tensors and replay after the pool's last replay, on the device's current stream."""
        if self.pool is None:
            self.load(leaves, reading.sizes)
            self.replay(reading.host)
            return
        with launching_on(self.device):
            self.pool.wait_for_last_replay()
            self.load(leaves, reading.sizes)
            self.replay(reading.host)

    def replay(self, host: dict[Any, HostSize]) -> None:
        """Replay the graph on the loaded inputs, or run the program if there is no graph."""
        if self.graph is None:
            with recording_modes():
                self.outputs = self._run(host)
            return
        assert self.pool is not None
        if self.statistics.is_sampled():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            self.graph.replay()
            end.record()
            self.statistics.note_timed(begin, end)
        else:
            self.graph.replay()

    def forget_graph(self) -> None:
        """Drop the graph, and give its memory back to the pool."""
        self.outputs = None
        self.statistics.is_recorded = False
        if self.graph is not None and self.pool is not None:
            self.pool.drop(self.graph)
        self.graph = None
        self.statistics.graph_bytes = 0

    def forget(self) -> None:
        """Drop the graph and the static inputs; the next call allocates and recaptures them."""
        self.forget_graph()
        self.is_allocated = False
        self.statistics.input_bytes = 0
        # After the last replay, which `drop` waits for.
        self.statics, self.caller_values, self.values = [], [], torch.empty(0)
        del self._load


def _true_sizes(
    symbols: tuple[Any, ...], buckets: tuple[int, ...], values: Tensor, host: dict[Any, HostSize] | None
) -> TrueSizes:
    sizes = TrueSizes(symbols, buckets, values, None if host is None else tuple(host[s] for s in symbols))
    sizes.serves_one_run = True
    return sizes


@contextmanager
def recording_modes(records: bool = False) -> Iterator[None]:
    """A context for captures and runs of the program: no inference mode or autocast cache, backward on this thread.

    A capture serves all later calls, so it makes plain tensors and keeps nothing that the caller's contexts own.

    Args:
        records: whether autograd records the program.
    """
    # The mode of inference decides on autograd's threads as well, so that these come after it. A backward runs on this
    # thread: the capture is its own, and another thread's backward may wait for the lock.
    with (
        torch.inference_mode(False),
        torch.autograd.set_multithreading_enabled(False),
        torch.set_grad_enabled(records),
        without_autocast_cache(),
    ):
        yield
