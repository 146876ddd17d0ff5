"""Ways to answer requests of varying sizes: the peers', each as its own documentation has it, and ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.bucketed_cases import Case
from benchmarks.side_stream import on_side_stream

Answer = Callable[[Tensor], Tensor]
"""From a request to what the case asks of it: hidden states, logits or tokens."""


@dataclass(frozen=True)
class Way:
    """One way.

    Args:
        answer: answers a request.
        first: of one that generates, the scores of the first new token.
        runner: what `st.bucketed` gave, for ours.
    """

    answer: Answer
    first: Answer | None = None
    runner: Any = None


def _eager(model: nn.Module, case: Case) -> Way:
    if case.new_tokens:
        return _generating(model, case)
    return Way(lambda x: case.result(model(**{case.argument: x})))


def _generating(model: Any, case: Case, runner: Any = None, **options: Any) -> Way:
    generate = (model if runner is None else runner).generate
    options = {"do_sample": False, **options}

    def first(ids: Tensor) -> Tensor:
        found = generate(ids, max_new_tokens=2, output_scores=True, return_dict_in_generate=True, **options)
        scores: Tensor = found.scores[0]
        return scores

    return Way(lambda ids: generate(ids, max_new_tokens=case.new_tokens, **options), first, runner)


def _static_cache(model: nn.Module, case: Case) -> Way:
    """Hugging Face's own: a cache of fixed length, for which `generate` compiles the decode step with CUDA graphs."""
    return _generating(model, case, cache_implementation="static")


def _compiled(model: nn.Module, case: Case, **options: Any) -> Way:
    compiled = torch.compile(model, dynamic=True, **options)
    return Way(lambda x: case.result(compiled(**{case.argument: x})))


def _reduce_overhead(model: nn.Module, case: Case) -> Way:
    way = _compiled(model, case, mode="reduce-overhead")

    def answer(x: Tensor) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return way.answer(x)

    return Way(answer)


def _by_hand(model: nn.Module, case: Case) -> Way:
    """What a careful user writes: pad to a multiple, with an attention mask, and a CUDA graph a bucket."""
    graphs: dict[int, tuple[torch.cuda.CUDAGraph, dict[str, Tensor], Tensor]] = {}
    pool = torch.cuda.graph_pool_handle()

    def record(x: Tensor, size: int) -> tuple[torch.cuda.CUDAGraph, dict[str, Tensor], Tensor]:
        shape = list(x.shape)
        shape[case.dim] = size
        statics = {case.argument: torch.zeros(shape, dtype=x.dtype, device=x.device)}
        if case.takes_mask:
            statics["attention_mask"] = torch.ones(shape, dtype=torch.long, device=x.device)
        with on_side_stream():
            for _ in range(2):
                model(**statics)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            out = case.result(model(**statics))
        return graph, statics, out

    def answer(x: Tensor) -> Tensor:
        n = x.shape[case.dim]
        size = -(-n // case.step) * case.step
        if size not in graphs:
            graphs[size] = record(x, size)
        graph, statics, out = graphs[size]
        for name, static in statics.items():
            static.zero_()
            real = static.narrow(case.dim, 0, n)
            real.copy_(x) if name == case.argument else real.fill_(1)
        graph.replay()
        return out.narrow(case.dim, 0, n).clone()

    return Way(answer)


def _bucketed(model: nn.Module, case: Case, **options: Any) -> Way:
    import subtensors as st  # here, so that a peer's process does not hold it

    dim = st.Dim("seq" if case.dim else "batch", max=case.largest, buckets=case.step)
    run = st.bucketed(model, {case.argument: {case.dim: dim}}, **options)
    if case.new_tokens:
        return _generating(model, case, run)
    return Way(lambda x: case.result(run(**{case.argument: x})), runner=run)


@dataclass(frozen=True)
class Variant:
    """A way, and what it asks for.

    Args:
        make: from the model and its case.
        needs_gpu: is it made of CUDA graphs?
        calls: does it answer requests that are one call?
        generates: does it answer those that are generated?
    """

    make: Callable[[nn.Module, Case], Way]
    needs_gpu: bool = False
    calls: bool = True
    generates: bool = False

    def answers(self, case: Case) -> bool:
        """Is it a way to answer the requests of a case?"""
        return self.generates if case.new_tokens else self.calls


VARIANTS: dict[str, Variant] = {
    "eager": Variant(_eager, generates=True),
    "static-cache": Variant(_static_cache, needs_gpu=True, calls=False, generates=True),
    "compile": Variant(_compiled),
    "reduce-overhead": Variant(_reduce_overhead, needs_gpu=True),
    "by-hand": Variant(_by_hand, needs_gpu=True),
    "bucketed": Variant(_bucketed, generates=True),
    "bucketed-compiled": Variant(lambda model, case: _bucketed(model, case, compile=True), generates=True),
}
