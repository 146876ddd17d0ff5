"""Ways to train on batches of varying lengths: the peers', each as its own documentation has it, and ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpt2_step import GPT2
from benchmarks.side_stream import on_side_stream

Step = Callable[[Tensor, Tensor], Tensor]
"""From tokens and targets, (B, n) int64, to the loss; the parameters are updated."""

BUCKET = 32
"""Of four sequences 128 tokens, as many as a tile of a product has."""
IGNORED = -100


@dataclass(frozen=True)
class Way:
    """One way.

    Args:
        step: takes a training step.
        runner: what `st.bucketed` gave, for ours.
        inner: further ones that it calls.
    """

    step: Step
    runner: Any = None
    inner: tuple[Any, ...] = ()


def loss_of(model: GPT2) -> Step:
    """The mean loss, with bfloat16 autocast."""

    def loss(tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(tokens.device.type, torch.bfloat16):
            logits = F.linear(model(tokens), model.token.weight)
        return F.cross_entropy(logits.float(), targets.flatten(), ignore_index=IGNORED)

    return loss


def step_of(loss: Step, opt: Any) -> Step:
    """A training step with this loss and this optimizer."""

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        value = loss(tokens, targets)
        value.backward()  # type: ignore[no-untyped-call]
        opt.step()
        opt.zero_grad()
        return value.detach()

    return step


def _adamw(model: GPT2, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True, **options)


def _eager(model: GPT2, longest: int) -> Way:
    return Way(step_of(loss_of(model), _adamw(model)))


def _compiled(model: GPT2, longest: int, **options: Any) -> Way:
    return Way(step_of(torch.compile(loss_of(model), dynamic=True, **options), _adamw(model)))


def _reduce_overhead(model: GPT2, longest: int) -> Way:
    """Compiled, and a graph a length; what it gives is copied, since the next step overwrites it."""
    step = _compiled(model, longest, mode="reduce-overhead").step

    def one(tokens: Tensor, targets: Tensor) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return step(tokens, targets).clone()

    return Way(one)


def _by_hand(model: GPT2, longest: int) -> Way:
    """What a careful user writes: pad to a multiple of 32, ignore those targets, one CUDA graph of a step a bucket."""
    opt = _adamw(model, capturable=True)
    step = step_of(loss_of(model), opt)
    graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Tensor, Tensor, Tensor]] = {}
    pool, side = torch.cuda.graph_pool_handle(), torch.cuda.Stream()

    def padded(tokens: Tensor, targets: Tensor) -> Tensor:
        rows, n = tokens.shape
        size = -(-n // BUCKET) * BUCKET
        if (rows, size) not in graphs:
            static = torch.zeros(rows, size, dtype=torch.long, device="cuda")
            wanted = torch.full((rows, size), IGNORED, dtype=torch.long, device="cuda")
            static[:, :n], wanted[:, :n] = tokens, targets
            with on_side_stream(side):
                first = step(static, wanted)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=side):
                loss = step(static, wanted)
            graphs[rows, size] = graph, static, wanted, loss
            return first
        graph, static, wanted, loss = graphs[rows, size]
        static.zero_()
        wanted.fill_(IGNORED)
        static[:, :n], wanted[:, :n] = tokens, targets
        graph.replay()
        return loss.clone()

    return Way(padded)


def _dims(longest: int) -> tuple[Any, dict[str, Any]]:
    import subtensors as st  # here, so that a peer's process does not hold it

    seq = st.Dim("seq", max=longest, buckets=min(BUCKET, longest))
    return st, {"tokens": {1: seq}, "targets": {1: seq}}


def _bucketed(model: GPT2, longest: int, **options: Any) -> Way:
    """Forward and backward as graphs, with a step of the optimizer between them."""
    st, dims = _dims(longest)
    run = st.bucketed(loss_of(model), dims, **options)
    return Way(step_of(run, st.optim.AdamW(model.parameters(), lr=3e-4, graph=True)), run)


def _whole(model: GPT2, longest: int, **options: Any) -> Way:
    """The whole step as one graph, its loss compiled or not."""
    st, dims = _dims(longest)
    loss = loss_of(model)
    inner = (st.bucketed(loss, dims, **options),) if options else ()
    run = st.bucketed(step_of(inner[0] if inner else loss, st.optim.AdamW(model.parameters(), lr=3e-4)), dims)
    return Way(run, run, inner)


@dataclass(frozen=True)
class Variant:
    """A way, and what it asks for.

    Args:
        make: from the model and the longest sequence.
        needs_gpu: is it made of CUDA graphs?
    """

    make: Callable[[GPT2, int], Way]
    needs_gpu: bool = False


VARIANTS: dict[str, Variant] = {
    "eager": Variant(_eager),
    "compile": Variant(_compiled),
    "reduce-overhead": Variant(_reduce_overhead, needs_gpu=True),
    "by-hand": Variant(_by_hand, needs_gpu=True),
    "bucketed": Variant(_bucketed),
    "bucketed-compiled": Variant(lambda model, n: _bucketed(model, n, compile=True)),
    "whole-step": Variant(_whole),
    "whole-step-compiled": Variant(lambda model, n: _whole(model, n, compile=True)),
}
