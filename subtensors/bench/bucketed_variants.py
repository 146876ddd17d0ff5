"""Ways to answer requests of varying sizes: the peers', each as its own documentation has it, and ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Answer = Callable[[Tensor], Tensor]
"""From a request's tokens, (B, n) int64, to the model's hidden states, (B, n, D)."""


@dataclass(frozen=True)
class Way:
    """One way.

    Args:
        answer: answers a request.
        runner: what `st.bucketed` gave, for ours.
    """

    answer: Answer
    runner: Any = None


BUCKET = 64


def _eager(model: nn.Module) -> Way:
    return Way(lambda ids: model(input_ids=ids).last_hidden_state)


def _compiled(model: nn.Module, **options: Any) -> Way:
    compiled = torch.compile(model, dynamic=True, **options)
    return Way(lambda ids: compiled(input_ids=ids).last_hidden_state)


def _reduce_overhead(model: nn.Module) -> Way:
    way = _compiled(model, mode="reduce-overhead")

    def answer(ids: Tensor) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return way.answer(ids)

    return Way(answer)


def _by_hand(model: nn.Module) -> Way:
    """What a careful user writes: pad to a multiple of 64 with an attention mask, and a CUDA graph a bucket."""
    graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor, Tensor, Tensor]] = {}
    pool = torch.cuda.graph_pool_handle()

    def record(rows: int, size: int) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor, Tensor]:
        ids = torch.zeros(rows, size, dtype=torch.long, device="cuda")
        mask = torch.ones(rows, size, dtype=torch.long, device="cuda")
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                model(input_ids=ids, attention_mask=mask)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
        return graph, ids, mask, hidden

    def answer(ids: Tensor) -> Tensor:
        n = ids.shape[1]
        size = -(-n // BUCKET) * BUCKET
        if size not in graphs:
            graphs[size] = record(ids.shape[0], size)
        graph, static, mask, hidden = graphs[size]
        static.zero_()
        static[:, :n].copy_(ids)
        mask.zero_()
        mask[:, :n] = 1
        graph.replay()
        return hidden[:, :n].clone()

    return Way(answer)


def _bucketed(model: nn.Module, **options: Any) -> Way:
    import subtensors as st  # here, so that a peer's process does not hold it

    seq = st.Dim("seq", max=512, buckets=BUCKET)
    run = st.bucketed(model, {"input_ids": {1: seq}}, **options)
    return Way(lambda ids: run(input_ids=ids).last_hidden_state, run)


@dataclass(frozen=True)
class Variant:
    """A way, and what it asks for.

    Args:
        make: from the model.
        needs_gpu: is it made of CUDA graphs?
        is_ours: is it of this project?
    """

    make: Callable[[nn.Module], Way]
    needs_gpu: bool = False
    is_ours: bool = False


VARIANTS: dict[str, Variant] = {
    "eager": Variant(_eager),
    "compile": Variant(_compiled),
    "reduce-overhead": Variant(_reduce_overhead, needs_gpu=True),
    "by-hand": Variant(_by_hand, needs_gpu=True),
    "bucketed": Variant(_bucketed, is_ours=True),
    "bucketed-compiled": Variant(lambda model: _bucketed(model, compile=True), is_ours=True),
}
