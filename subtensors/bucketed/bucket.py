"""One bucket: its static inputs, the program captured on them, and the outputs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from subtensors.bucketed.call_key import callers_tensors, has_parts
from subtensors.bucketed.call_spec import CallSpec
from subtensors.bucketed.outputs import Outputs
from subtensors.bucketed.program_state import State
from subtensors.bucketed.side_effects import Snapshot, dense_of
from subtensors.bucketed.statistics import TIMING_SAMPLE_EVERY, BucketStatistics, summarize_error
from subtensors.dispatch.fused.tensor_columns import WrittenOverlap
from subtensors.dispatch.graphs.collectives import Collectives, is_distributed
from subtensors.dispatch.graphs.guards import Writes
from subtensors.dispatch.graphs.host_reads import HostReads, error_line
from subtensors.dispatch.graphs.pool import GraphPool, capture_modes
from subtensors.dispatch.ops.errors import RuleError
from subtensors.dispatch.ops.tree import PyTree
from subtensors.dispatch.padded.padded_value import PaddedValue
from subtensors.dispatch.padded.size_conditions import HostSize, SizeConditions, UnmetCondition
from subtensors.dispatch.padded.true_sizes import TrueSizes
from subtensors.dispatch.sizes.dim_factors import padded_dim, static_dims
from subtensors.kernels.graph_inputs.inputs import InputLoader
from subtensors.kernels.runtime.async_compile import use_reference_while_compiling
from subtensors.kernels.runtime.launcher import launching_on
from subtensors.padded.autograd import wrap_with_grad
from subtensors.padded.fallback import refusing_fallbacks
from subtensors.padded.host_constants import HostConstants
from subtensors.padded.padded_tensor import PaddedTensor, make_padded
from subtensors.padded.sized_calls import SizedPlainCalls

if TYPE_CHECKING:
    import sympy

Call: TypeAlias = Callable[[Sequence[PyTree]], PyTree]
"""Runs the program on the leaves of a call."""

HostSizes: TypeAlias = "dict[sympy.Symbol, HostSize]"
"""True sizes on the host, by symbol."""


class Bucket:
    """The program at one bucket's sizes.

    Args:
        spec: of a call of this bucket.
        leaves: that call's leaves.
        call: runs the program on leaves, some of which become static inputs.
        device: of the static inputs.
        state: of the program.
        pool: where graphs are captured; None if the program runs again at each call instead.
    """

    has_compiled_code = False
    """True if compilation is on."""

    def __init__(
        self,
        spec: CallSpec,
        leaves: Sequence[PyTree],
        call: Call,
        device: torch.device,
        state: State,
        pool: GraphPool | None,
    ) -> None:
        self.spec, self.call, self.device, self.state, self.pool = spec, call, device, state, pool
        # An argument that isn't copied is the caller's, or a number: it stays what it was in the first call.
        copied = {source.leaf for source in spec.inputs}
        self.uncopied = {i: x for i, x in enumerate(leaves) if i not in copied}
        self.num_leaves = len(leaves)
        self.may_write_uncopied = any(isinstance(x, Tensor) or has_parts(x) for x in self.uncopied.values())
        """True if the program may write in place to an argument that isn't copied."""
        self.statistics = BucketStatistics(
            {dim.name: bucket for dim, bucket in zip(spec.dims, spec.buckets, strict=True)},
            [source.shape for source in spec.inputs],
        )
        self.graph: torch.cuda.CUDAGraph | None = None
        self.retained: list[Tensor] = []
        """Tensors that the graph may read and nothing else may keep alive."""
        self._constants: HostConstants | None = None
        """The tensors that the program makes on the host, while it is captured."""
        self.outputs: Outputs | None = None
        self.no_graph_reason = ""
        """The reason why it can't be captured, once that is known; "" until then."""
        self.has_no_answer = False
        """True if a run at true sizes would be as wrong as the graph: the reason is then an error of the call."""
        self.needs_recapture = False
        """True if its graph was dropped in order to be recaptured."""
        self.conditions = SizeConditions()
        """The conditions on true sizes under which its graph answers a call."""
        self.checked_sizes: dict[tuple[HostSize, ...], bool] = {}
        """The true sizes of the calls that were checked, and whether its results were the plain program's there."""
        self.checked_longest: set[tuple[int, ...]] = set()
        """The sizes at which the plain program ran for a check, of a ragged batch that of its longest row."""
        self.smallest_checked: list[tuple[int, ...]] = []
        """Those of them that are not above others."""
        self.is_allocated = False
        self.statics: list[Tensor] = []
        self.caller_values: list[Tensor] = []
        self.size_values = torch.empty(0)
        self._load: InputLoader | None = None
        self.written_inputs: set[int] = set()
        """Indices of the static inputs that the program writes to."""
        self.last_call = 0
        """The number of its last call, counted over the whole runner."""

    @property
    def is_captured(self) -> bool:
        """Return whether a replay can answer calls."""
        return self.outputs is not None

    def allocate(self) -> None:
        """Make the static inputs, outside of the pool."""
        if self.is_allocated:
            return
        with torch.inference_mode(False):
            self._make_inputs(self.spec)
        size_indices = [s.size_index for s in self.spec.inputs] + [(-1,) * len(c.shape) for c in self.spec.caller_sizes]
        self._load = InputLoader([*self.statics, *self.caller_values], size_indices, self.size_values)
        self.statistics.input_bytes = sum(t.nbytes for t in self.inputs())
        self.is_allocated = True

    def _make_inputs(self, spec: CallSpec) -> None:
        self.statics = [torch.zeros(s.shape, dtype=s.dtype, device=s.device) for s in spec.inputs]
        self.caller_values = [torch.zeros(c.shape, dtype=torch.int64, device=self.device) for c in spec.caller_sizes]
        self.size_values = torch.zeros(len(spec.dims), dtype=torch.int64, device=self.device)

    def load(self, leaves: Sequence[PyTree], sizes: tuple[int, ...]) -> None:
        """Copy a call's tensors into the static inputs, with their padding and true sizes."""
        given: list[Tensor] = []
        for source in self.spec.inputs:
            x = leaves[source.leaf]
            given.append(x._dense if type(x) is PaddedTensor else x)
        for caller in self.spec.caller_sizes:
            given.append(leaves[caller.leaf]._sizes.values)
        assert self._load is not None
        self._load(given, sizes)

    def callers_tensors(self) -> Iterator[Tensor]:
        """Yield the caller's tensors that the program reads in place, without a copy."""
        return callers_tensors(self.uncopied.values())

    @property
    def has_side_effects(self) -> bool:
        """Return whether a call may change its arguments."""
        return self.may_write_uncopied or bool(self.written_inputs)

    def no_replay_reason(self, leaves: Sequence[PyTree]) -> str:
        """Return the reason why a replay can't answer this call, or "" if it can."""
        if not self.written_inputs:
            return ""
        given = [dense_of(leaves[source.leaf]) for source in self.spec.inputs]
        if len({t.untyped_storage().data_ptr() for t in given}) == len(given):
            return ""
        overlaps = WrittenOverlap(self.written_inputs).check([[t] for t in given])
        return "it writes to an argument, which shares memory with another one" if overlaps else ""

    def write_back(self, leaves: Sequence[PyTree]) -> None:
        """Copy what the program wrote into its static inputs back to the arguments of the call."""
        for i in self.written_inputs:
            dense = dense_of(leaves[self.spec.inputs[i].leaf])
            dense.copy_(self.statics[i][tuple(map(slice, dense.shape))])

    def inputs(self) -> list[Tensor]:
        """Return the static inputs: copied tensors, the true sizes of the caller's PaddedTensors, and the call's."""
        return [*self.statics, *self.caller_values, self.size_values]

    def zero_inputs(self, buckets: tuple[int, ...]) -> list[Tensor]:
        """Return zero-filled inputs, ordered like `inputs()`, at other bucket sizes."""
        zeros = []
        for source in self.spec.inputs:
            shape = [buckets[k] if k >= 0 else n for n, k in zip(source.shape, source.size_index, strict=True)]
            zeros.append(torch.zeros(shape, dtype=source.dtype, device=source.device))
        return zeros + [torch.zeros_like(t) for t in [*self.caller_values, self.size_values]]

    def run_on(self, inputs: Sequence[Tensor], host: HostSizes | None = None) -> Outputs:
        """Run the program on the given inputs.

        Args:
            inputs: as `inputs` gives them, perhaps at other buckets.
            host: the true sizes, if the host is to know them; None in a capture, which must serve all true sizes.
        """
        spec = self.spec
        count = len(spec.inputs)
        statics, caller_values, values = inputs[:count], inputs[count:-1], inputs[-1]
        buckets = [0] * len(spec.dims)
        for source, static in zip(spec.inputs, statics, strict=True):
            for d, k in enumerate(source.size_index):
                if k >= 0:
                    buckets[k] = static.shape[d]
        symbols = tuple(dim.symbol for dim in spec.dims)
        own_sizes = _true_sizes(symbols, tuple(buckets), values, host) if spec.dims else None
        caller_sizes = [
            _true_sizes(c.symbols, c.buckets, sizes, host)
            for c, sizes in zip(spec.caller_sizes, caller_values, strict=True)
        ]
        leaves: list[PyTree] = [self.uncopied.get(i) for i in range(self.num_leaves)]
        for source, static in zip(spec.inputs, statics, strict=True):
            if source.dims is not None:
                sizes = caller_sizes[source.caller_index] if source.caller_index >= 0 else None
                leaves[source.leaf] = make_padded(PaddedValue(static, source.dims, sizes))
            elif any(k >= 0 for k in source.size_index):
                dims = [
                    padded_dim(n, symbols[k]) if k >= 0 else static_dims([n])[0]
                    for n, k in zip(static.shape, source.size_index, strict=True)
                ]
                # The program's own autograd functions check `requires_grad` of the argument itself.
                leaves[source.leaf] = wrap_with_grad(PaddedValue(static, tuple(dims), own_sizes, fill=0))
            else:
                leaves[source.leaf] = static
        writes = Writes(statics)
        outputs = Outputs.of(self.call_program(leaves), list(self.uncopied.values()))
        written = set(map(id, writes.written()))
        self.written_inputs |= {i for i, static in enumerate(statics) if id(static) in written}
        if not torch.is_grad_enabled():  # no backward will ask for masks, and a cache may keep padded tensors
            for sizes in filter(None, (own_sizes, *caller_sizes)):
                sizes.forget()
        return outputs

    def call_program(self, leaves: Sequence[PyTree]) -> PyTree:
        """Call the program on padded leaves."""
        # What is to be a graph is refused where the graph would be, so that the program itself answers from the start.
        with SizedPlainCalls(self._constants), refusing_fallbacks(self.pool is not None), self.conditions.noted():
            return self.call(leaves)

    def _run(self, host: HostSizes | None) -> Outputs:
        return self.run_on(self.inputs(), host)

    def run_once(self, host: HostSizes) -> PyTree:
        """Run the program on the loaded inputs; this also warms the libraries up for a later capture.

        Returns:
            The result, cut to the true sizes, in memory of its own.
        """
        with capture_modes():
            outputs = self.pool.run(lambda: self._run(host)) if self.pool is not None else self._run(host)
        return outputs.rebuild([cut() for cut in outputs.cuts(host)])

    def first_run(self, spec: CallSpec, leaves: list[PyTree], before: Snapshot) -> PyTree:
        """Run the program on a call's tensors before its capture; return the call's result.

        If it can't be captured, `no_graph_reason` says why.

        Args:
            spec, leaves: of the call.
            before: a snapshot of what the program may write to.
        """
        self.load(leaves, spec.sizes)
        # The capture waits for kernels that this run asks for; it takes a while itself, the first time.
        with self.watched(spec), use_reference_while_compiling() if self.pool is not None else nullcontext():
            result = self.run_once(spec.host)
        if reason := self.no_replay_reason(leaves):
            raise RuleError(reason)
        self.write_back(leaves)
        if self.no_graph_reason:
            self.drop()
        elif before.has_trained():
            self.no_graph_reason = (
                "it computes gradients, or takes a step, in a call without any: call it under torch.enable_grad()"
            )
            self.drop()
        return result

    @property
    def can_share_first_run(self) -> bool:
        """Return whether other sizes can be captured without a first run of their own."""
        return not self.has_compiled_code

    def copy_first_run(self, other: Bucket) -> None:
        """Copy what the first run of another size found and holds at every size."""

    def unmet_condition(self, spec: CallSpec) -> str:
        """Return a condition that a call's true sizes don't meet, or ""; branches count unless a check agreed."""
        return self.conditions.unmet(spec.host, ignores_branches=self.checked_sizes.get(spec.true_sizes, False))

    @contextmanager
    def watched(self, spec: CallSpec) -> Iterator[None]:
        """A context for the first run, which sets `no_graph_reason` for what a graph can't do.

        A CPU captures nothing, so it is watched for reads of values, which a GPU's capture refuses and no compiled code
        has.

        Raises:
            UnmetCondition: the call's true sizes don't meet a condition of the bucket.
        """
        reads = HostReads() if self.pool is None and not self.has_compiled_code else None
        collectives = Collectives() if is_distributed() else None
        with reads or nullcontext(), collectives or nullcontext():
            yield
        if reason := self.unmet_condition(spec):
            raise UnmetCondition(reason)
        if collectives is not None and collectives.first:
            self.no_graph_reason = (
                f"it calls {collectives.first}, and other processes may meet its sizes at other times"
            )
        elif reads is not None and reads.first:
            self.no_graph_reason = reads.reason()

    def capture(self) -> None:
        """Capture the program.

        Raises:
            Exception: it can't be captured.
        """
        if self.pool is None:
            self.outputs = Outputs.of(None)
        else:
            with capture_modes(), self.measured_capture(self.pool):
                self.graph, outputs = self.pool.capture(lambda: self._run(None))
                self.outputs = outputs.with_replaced(self.pool.non_owning_aliases(outputs.tensors()))

    @contextmanager
    def measured_capture(self, pool: GraphPool) -> Iterator[None]:
        """A context for a capture into a pool, which is measured and retains the tensors that the graph may read."""
        before, started = pool.bytes(), time.perf_counter()
        self._constants = constants = HostConstants()
        try:
            yield
        finally:
            self._constants = None
        self.retained = [*pool.outside(self.state.unwatched_tensors()), *constants.pinned]
        self.statistics.graph_bytes = pool.bytes() - before
        self.statistics.captures += 1
        self.statistics.capture_ms = (time.perf_counter() - started) * 1e3

    def replay_call(self, leaves: Sequence[PyTree], spec: CallSpec) -> None:
        """Load a call's tensors and replay after the pool's last replay, on the device's current stream."""
        if self.pool is None:
            self.load(leaves, spec.sizes)
            self.replay(spec.host)
            return
        with launching_on(self.device):
            self.pool.wait_for_last_replay()
            self.load(leaves, spec.sizes)
            self.replay(spec.host)

    def replay(self, host: HostSizes) -> None:
        """Replay the graph on the loaded inputs, or run the program if there is no graph."""
        if self.graph is None:
            with capture_modes():
                self.outputs = self._run(host)
            return
        if self.is_timed_replay():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            self.graph.replay()
            end.record()
            self.statistics.note_timed(begin, end)
        else:
            self.graph.replay()

    def is_timed_replay(self) -> bool:
        """Return whether the next replay is to be timed."""
        return self.statistics.hits % TIMING_SAMPLE_EVERY == 0

    def count_call(self, elements: tuple[int, int], is_hit: bool, by: int = 1) -> None:
        """Count a call, and the reason why it left no graph, if there is one.

        Args:
            elements: along the Dims: at true sizes, and at the bucket's.
            is_hit: whether a replay answered it.
            by: -1 to take it back.
        """
        statistics = self.statistics
        statistics.calls += by
        statistics.hits += is_hit * by
        statistics.real += elements[0] * by
        statistics.padded += elements[1] * by
        if self.no_graph_reason:
            statistics.fallbacks[self.no_graph_reason] += by

    def drop_graph(self) -> None:
        """Drop the graph, and return its memory to the pool."""
        self.outputs = None
        if self.graph is not None and self.pool is not None:
            self.pool.drop(self.graph)
        self.graph, self.retained = None, []
        self.statistics.graph_bytes = 0

    def refuse(self, error: Exception) -> None:
        """Drop the graph and the static inputs for good, because the capture raised this error."""
        # What the program raises has its message; what CUDA says of a capture names no line.
        line = error_line(error) if "captur" in str(error) else ""
        self.no_graph_reason = summarize_error(error) + f" ({line})" * bool(line)
        self.drop()

    def drop(self) -> None:
        """Drop the graph and the static inputs; the next call allocates and recaptures them."""
        self.drop_graph()
        self.is_allocated = False
        self.statistics.input_bytes = 0
        # After the last replay, which `drop_graph` waits for.
        self.statics, self.caller_values, self.size_values = [], [], torch.empty(0)
        self._load = None


def _true_sizes(
    symbols: tuple[sympy.Symbol, ...],
    buckets: tuple[int, ...],
    values: Tensor,
    host: HostSizes | None,
) -> TrueSizes:
    sizes = TrueSizes(symbols, buckets, values, None if host is None else tuple(host[s] for s in symbols))
    sizes.serves_one_run = True
    return sizes
