"""One way to do a job over varying lengths, measured step by step as it is told to."""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.varying_cases import CASES, padded
from benchmarks.varying_variants import VARIANTS, Job
from demo.timing import synchronize

CHECKED = {True: 6, False: 3}
"""Batches whose results are compared with eager ones: of a training, and of calls."""

LIMITS = {True: 2**-7, False: 4.0}
"""What a way may differ by: losses, relative to eager's; and errors of hidden states against float64, over eager's."""


class Recordings:
    """Counts the CUDA graphs that this process captures, and the modules that Inductor compiles."""

    def __init__(self) -> None:
        from torch._inductor.graph import GraphLowering

        self.graphs = self.compilations = 0
        self._count(torch.cuda.CUDAGraph, "capture_begin", "graphs")
        self._count(GraphLowering, "compile_to_module", "compilations")

    def _count(self, owner: Any, name: str, counter: str) -> None:
        plain: Callable[..., Any] = getattr(owner, name)
        self._taken_back = [*getattr(self, "_taken_back", []), functools.partial(setattr, owner, name, plain)]

        @functools.wraps(plain)
        def counted(*args: Any, **kwargs: Any) -> Any:
            setattr(self, counter, getattr(self, counter) + 1)
            return plain(*args, **kwargs)

        setattr(owner, name, counted)

    def end(self) -> None:
        """Stop counting."""
        for take_back in self._taken_back:
            take_back()


class Session:
    """A way, its batches, and what was found.

    Args:
        case: a key of `CASES`.
        variant: a key of `VARIANTS`.
        lengths: a key of `LENGTHS`.
        tiny: whether the model is the tiny one.
        device: "cpu" or "cuda".
        batch: sequences of a batch.
        steps: batches of the first pass, and as many of the second one.
    """

    def __init__(
        self, case: str, variant: str, lengths: str, tiny: bool, device: str, batch: int = 8, steps: int = 100
    ) -> None:
        asked = CASES[case]
        self.job = Job(asked, tiny, device, asked.draw(lengths, 2 * steps, batch, tiny))
        self.device, self.variant = device, VARIANTS[variant]

    def do(self, what: str) -> dict[str, Any]:
        """Do what is asked, by the name of a method; returns what was found."""
        with torch.set_grad_enabled(self.job.case.trains):
            return {"ready": self.ready, "first": self.first, "visit": self.visit, "end": self.end}[what]()

    def ready(self) -> dict[str, Any]:
        """Make the way, its batches and the results that it is held against."""
        self.recordings = Recordings()
        self.way = self.variant.make(self.job)
        self.sequences = self.way.batches or self.job.batches
        self.batches = [self.job.prepared(self.way.collate(each)) for each in self.sequences]
        self.checked = min(CHECKED[self.job.case.trains], len(self.batches) // 2)
        self.expected = Reference(self.job, self.sequences[: self.checked])
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        return {}

    def first(self) -> dict[str, Any]:
        """Run the first half of the batches and the second one, with what is compiled and captured in each."""
        half = len(self.batches) // 2
        found: dict[str, Any] = {"steps": half, "batch": len(self.job.batches[0])}
        found["distinct"] = len({max(map(len, each)) for each in self.sequences[:half]})
        results: list[Tensor] = []
        found["first_s"] = self._pass(0, half, results.append)
        found["difference"] = self.expected.difference(results, self.way.packed)
        del results, self.expected
        found["first_graphs"] = self.recordings.graphs
        found["second_s"] = self._pass(half, 2 * half)
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        return found

    def visit(self) -> dict[str, Any]:
        """Run a quarter of the batches, enqueued back to back; then again, each waited for."""
        quarter = max(len(self.batches) // 4, 1)
        seconds = self._pass(0, quarter)
        walls = []
        for batch in self.batches[:quarter]:
            started = time.perf_counter()
            self.way.step(batch)
            synchronize(self.device)
            walls.append((time.perf_counter() - started) * 1e3)
        elements = sum(len(each) for batch in self.sequences[:quarter] for each in batch)
        unit = self.job.case.unit
        return {"step_ms": seconds / quarter * 1e3, "per_s": elements / unit / seconds, "walls_ms": walls}

    def end(self) -> dict[str, Any]:
        """Return memory in MiB, and what was recorded."""
        is_cuda = self.device == "cuda"
        self.recordings.end()
        stats = [runner.stats() for runner in self.way.runners]
        return {
            "allocated_mb": torch.cuda.max_memory_allocated() / 2**20 if is_cuda else None,
            "reserved_mb": torch.cuda.memory_reserved() / 2**20 if is_cuda else None,
            "graphs": self.recordings.graphs,
            "compilations": self.recordings.compilations,
            "fallbacks": sum(sum(each.fallbacks.values()) for each in stats),
        }

    def _pass(self, start: int, end: int, keep: Callable[[Tensor], object] | None = None) -> float:
        """Seconds of some batches up to a synchronized device."""
        synchronize(self.device)
        started = time.perf_counter()
        for i in range(start, end):
            result = self.way.step(self.batches[i])
            if keep is not None and i < self.checked:
                keep(result)
        synchronize(self.device)
        return time.perf_counter() - started


class Reference:
    """What eager torch gives for some batches: losses of a training, or hidden states and their error.

    Args:
        job: what is asked.
        batches: of sequences.
    """

    def __init__(self, job: Job, batches: Sequence[Sequence[Tensor]]) -> None:
        self.job, self.batches = job, batches
        plain = VARIANTS["eager"].make(job)
        prepared = [job.prepared(plain.collate(each)) for each in batches]
        self.results = [plain.step(each).cpu() for each in prepared]
        self.exact: list[Tensor] = []
        if not job.case.trains:
            self.model: Any = job.model().double()
            program = job.program(self.model)
            wide = [padded(job.case, each) for each in batches]
            for each in wide:
                each |= {name: t.double() for name, t in each.items() if t.is_floating_point()}
            self.exact = [self._valid(program(**job.moved(each)).cpu(), i, False) for i, each in enumerate(wide)]
            self.model.cpu()

    def difference(self, results: Sequence[Tensor], packed: bool) -> float:
        """Return by how much results differ, as `LIMITS` counts it.

        Args:
            results: of the batches, in their order.
            packed: whether hidden states have one row, with a sequence behind the other.
        """
        if self.job.case.trains:
            pairs = zip(results, self.results, strict=True)
            return max(abs(float(found) - float(plain)) / abs(float(plain)) for found, plain in pairs)
        errors = [
            max(
                float((self._valid(each.cpu(), i, is_packed).double() - self.exact[i]).abs().max())
                for i, each in enumerate(several)
            )
            for several, is_packed in ((results, packed), (self.results, False))
        ]
        return errors[0] / errors[1]

    def _valid(self, hidden: Tensor, i: int, packed: bool) -> Tensor:
        """The hidden states of a batch without those of padding, (elements, width)."""
        lengths = [len(each) for each in self.batches[i]]
        if self.job.case.argument == "input_values":
            lengths = [int(self.model._get_feat_extract_output_lengths(n)) for n in lengths]
        if packed:
            return hidden[0, : sum(lengths)]
        return torch.cat([row[:n] for row, n in zip(hidden, lengths, strict=True)])
