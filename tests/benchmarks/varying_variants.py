"""Ways to run a model on batches of varying lengths: the peers', and ours.

A batch is collated ahead, on the host and in pinned memory, as a loader's workers do; a step copies it to the device.
The training step is that of transformers' Trainer: loss, backward, gradients clipped to a norm of 1, AdamW, and a
learning rate that falls linearly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.side_stream import on_side_stream
from benchmarks.varying_cases import Case, padded
from benchmarks.varying_packed import Packing, refusal

Batch = dict[str, Tensor]
Step = Callable[[Batch], Tensor]
"""From a batch on the host to the loss, or to hidden states on the device."""

RATE, STEPS = 1e-3, 10_000
"""The learning rate of the first step, and the steps in which it falls to zero."""


@dataclass(frozen=True)
class Job:
    """What every way is given.

    Args:
        case: what is asked.
        tiny: whether the model is the tiny one.
        device: "cpu" or "cuda".
        batches: of sequences, all that there will be.
    """

    case: Case
    tiny: bool
    device: str
    batches: list[list[Tensor]] = field(repr=False)

    @property
    def longest(self) -> int:
        """Elements of the longest sequence that there may be."""
        return self.case.longest[self.tiny]

    @property
    def bucket(self) -> int:
        """Elements by which buckets grow."""
        return self.case.step[self.tiny]

    def model(self) -> nn.Module:
        """Return a new model, the same each time; one that is only called is in bfloat16 on a GPU."""
        torch.manual_seed(0)
        model = self.case.make(self.tiny).to(self.device)
        return model.bfloat16() if self.device == "cuda" and not self.case.trains else model

    def program(self, model: nn.Module) -> Callable[..., Tensor]:
        """Return the loss with autocast to bfloat16, or the hidden states, of keyword arguments."""

        def loss(**inputs: Tensor) -> Tensor:
            with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
                value: Tensor = model(**inputs).loss
            return value

        def hidden(**inputs: Tensor) -> Tensor:
            value: Tensor = model(**inputs).last_hidden_state
            return value

        return loss if self.case.trains else hidden

    def moved(self, batch: Batch) -> Batch:
        """Return a batch on the device."""
        return {name: each.to(self.device, non_blocking=True) for name, each in batch.items()}

    def prepared(self, batch: Batch) -> Batch:
        """Return a batch on the host as a loader would leave it: in the model's dtype, and pinned."""
        if self.device == "cpu":
            return batch
        is_half = not self.case.trains
        half = {n: each.bfloat16() if is_half and each.is_floating_point() else each for n, each in batch.items()}
        return {name: each.pin_memory() for name, each in half.items()}


@dataclass(frozen=True)
class Way:
    """One way.

    Args:
        collate: makes a batch of sequences.
        step: what is measured.
        batches: of sequences, where they are made up anew for it.
        runners: what `st.bucketed` gave, for ours.
        packed: whether results have one row, with a sequence behind the other.
    """

    collate: Callable[[Sequence[Tensor]], Batch]
    step: Step
    batches: list[list[Tensor]] | None = None
    runners: tuple[Any, ...] = ()
    packed: bool = False


def stepping(model: nn.Module, program: Callable[..., Tensor], opt: Any, norm: float | None = 1.0) -> Any:
    """Return the training step of keyword arguments.

    Args:
        model: whose gradients are clipped.
        program: the loss.
        opt: the optimizer.
        norm: of the gradients at most; None where the optimizer clips them.
    """

    def step(**inputs: Tensor) -> Tensor:
        loss = program(**inputs)
        loss.backward()  # type: ignore[no-untyped-call]
        if norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), norm)
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return step


def scheduled(step: Callable[..., Tensor], opt: Any) -> Callable[..., Tensor]:
    """Return the step, and before it the learning rate of that step."""
    done = 0

    def one(**inputs: Tensor) -> Tensor:
        nonlocal done
        rate = RATE * (1 - done / STEPS)
        for group in opt.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)  # a graph reads it where it is
            else:
                group["lr"] = rate
        done += 1
        return step(**inputs)

    return one


def _plain(job: Job, wrap: Callable[[Any], Any] = lambda program: program, multiple: int = 1) -> Way:
    """The model, wrapped or not, on batches that are padded to their longest sequence."""
    model = job.model()
    program = wrap(job.program(model))
    if job.case.trains:
        opt = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
        program = scheduled(stepping(model, program, opt), opt)
    return Way(partial(padded, job.case, multiple=multiple), lambda batch: program(**job.moved(batch)))


def _compiled(job: Job, multiple: int = 1, **options: Any) -> Way:
    return _plain(job, lambda program: torch.compile(program, dynamic=True, **options), multiple)


def _reduce_overhead(job: Job, multiple: int = 1) -> Way:
    """Compiled with CUDA graphs, a graph a size; what it gives is copied, since the next step overwrites it."""
    way = _compiled(job, multiple, mode="reduce-overhead")

    def step(batch: Batch) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return way.step(batch).clone()

    return Way(way.collate, step)


class HandMadeGraphs:
    """What a careful user writes: a CUDA graph for each set of shapes, of whole steps, over static inputs.

    Args:
        job: what it is for.
        run: the program or step of keyword arguments.
    """

    def __init__(self, job: Job, run: Callable[..., Tensor]) -> None:
        self.job, self.run = job, run
        self.graphs: dict[tuple[torch.Size, ...], tuple[torch.cuda.CUDAGraph, Batch, Tensor]] = {}
        self.pool, self.side = torch.cuda.graph_pool_handle(), torch.cuda.Stream()

    def __call__(self, **batch: Tensor) -> Tensor:
        """Replay; at new shapes, run and capture what the next batch of these shapes replays."""
        key = tuple(each.shape for each in batch.values())
        if key not in self.graphs:
            statics = self.job.moved(batch)
            with on_side_stream(self.side):
                first = self.run(**statics)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pool, stream=self.side):
                out = self.run(**statics)
            self.graphs[key] = graph, statics, out
            return first
        graph, statics, out = self.graphs[key]
        for name, static in statics.items():
            static.copy_(batch[name], non_blocking=True)
        graph.replay()
        return out.clone()


def _by_hand(job: Job, model: nn.Module, program: Callable[..., Tensor]) -> Step:
    """The step as graphs where there is a GPU."""
    if job.case.trains:
        rate: Any = torch.tensor(RATE, device=job.device) if job.device == "cuda" else RATE
        opt = torch.optim.AdamW(model.parameters(), lr=rate, fused=True, capturable=job.device == "cuda")
        step = stepping(model, program, opt)
        run = scheduled(HandMadeGraphs(job, step) if job.device == "cuda" else step, opt)
    else:
        run = HandMadeGraphs(job, program) if job.device == "cuda" else program
    return lambda batch: run(**batch)


def _hand_buckets(job: Job, compiled: bool = False) -> Way:
    """Batches padded to a multiple, and a graph for each; the model compiled once for all sizes, or not."""
    model = job.model()
    program = job.program(model)
    if compiled:
        program = torch.compile(program, dynamic=True)
    return Way(partial(padded, job.case, multiple=job.bucket), _by_hand(job, model, program))


def _packed(job: Job, compiled: bool = False, full: bool = False) -> Way:
    """The sequences of a batch in one row of a fixed length, and one graph for all.

    Args:
        job: what it is for.
        compiled: whether the model is compiled, for that one size.
        full: whether batches are made up anew, so that the row is full.
    """
    packing = Packing.of(job.batches, job.longest, job.case.trains, 3 if full else 1)
    batches = packing.fill(job.batches) if full else None
    model = job.model()
    packing.attend_in(model)
    program = job.program(model)
    if compiled:
        program = torch.compile(program, dynamic=False)
    return Way(packing.collate, _by_hand(job, model, program), batches, packed=True)


def _bucketed(job: Job, **options: Any) -> Way:
    """Ours: one dim that varies; forward and backward as graphs, with the optimizer's step between them."""
    st, dims = _dims(job)
    model = job.model()
    run = program = st.bucketed(job.program(model), dims, **options)
    if job.case.trains:
        opt = st.optim.AdamW(model.parameters(), lr=RATE, max_norm=1.0, graph=True)
        program = scheduled(stepping(model, run, opt, norm=None), opt)
    return Way(partial(padded, job.case), lambda batch: program(**job.moved(batch)), runners=(run,))


def _whole_step(job: Job, **options: Any) -> Way:
    """Ours: the whole training step as one graph, its loss compiled or not."""
    st, dims = _dims(job)
    model = job.model()
    loss = job.program(model)
    opt = st.optim.AdamW(model.parameters(), lr=RATE, max_norm=1.0)
    inner = (st.bucketed(loss, dims, **options),) if options else ()
    run = st.bucketed(stepping(model, inner[0] if inner else loss, opt, norm=None), dims)
    step = scheduled(run, opt)
    return Way(partial(padded, job.case), lambda batch: step(**job.moved(batch)), runners=(run, *inner))


def _dims(job: Job) -> tuple[Any, dict[str, Any]]:
    import subtensors as st  # here, so that a peer's process does not hold it

    names = [job.case.argument, "attention_mask", *["labels"] * job.case.trains]
    length = st.Dim("length", max=job.longest, buckets=job.bucket)
    return st, {name: {1: length} for name in names}


@dataclass(frozen=True)
class Variant:
    """A way, and what it asks for.

    Args:
        make: from the job.
        compiles: whether anything is compiled.
        needs_gpu: whether it is another one without CUDA graphs.
        packs: whether it packs sequences.
        calls: whether it is a way to call a model without gradients.
        trains: whether it is a way to train one.
    """

    make: Callable[[Job], Way]
    compiles: bool = False
    needs_gpu: bool = False
    packs: bool = False
    calls: bool = True
    trains: bool = True

    def fits(self, case: Case, device: str) -> bool:
        """Return whether it is a way to do a case there at all."""
        return (self.trains if case.trains else self.calls) and (device == "cuda" or not self.needs_gpu)

    def reason(self, case: Case, device: str) -> str:
        """Return why it can't do a case that it is meant for, in a line; "" if it can."""
        return (case.no_packing or refusal(device)) if self.packs else ""


VARIANTS: dict[str, Variant] = {
    "eager": Variant(_plain),
    "compile": Variant(_compiled, compiles=True),
    "reduce-overhead": Variant(_reduce_overhead, compiles=True, needs_gpu=True),
    "reduce-overhead, padded": Variant(
        lambda job: _reduce_overhead(job, multiple=job.bucket), compiles=True, needs_gpu=True
    ),
    "by-hand": Variant(_hand_buckets, needs_gpu=True),
    "by-hand, compiled": Variant(lambda job: _hand_buckets(job, compiled=True), compiles=True, needs_gpu=True),
    "packed": Variant(_packed, packs=True),
    "packed, compiled": Variant(lambda job: _packed(job, compiled=True), compiles=True, packs=True),
    "packed full": Variant(lambda job: _packed(job, full=True), packs=True),
    "packed full, compiled": Variant(lambda job: _packed(job, True, full=True), compiles=True, packs=True),
    "bucketed": Variant(_bucketed),
    "bucketed, compiled": Variant(lambda job: _bucketed(job, compile=True), compiles=True),
    "whole step": Variant(_whole_step, calls=False),
    "whole step, compiled": Variant(lambda job: _whole_step(job, compile=True), compiles=True, calls=False),
}
"""By name. A batch is padded to its longest sequence, and where it says so, to a multiple of the buckets' step."""
