"""What compiled code does with static inputs: how many it takes, and how much it copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def count_static(function: Callable[..., Any], *args: Any) -> tuple[int, int]:
    """How many tensors a compiled function's graph takes, and how many of them at addresses known to be static."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._guards import TracingContext

    counts: list[tuple[int, int]] = []

    def look(graph: Any, inputs: list[Any]) -> Any:
        context = TracingContext.get()
        counts.append((len(inputs), len(context.fw_metadata.static_input_indices)))
        return graph.forward

    compiler = aot_autograd(fw_compiler=look)
    with torch.no_grad():
        torch.compile(function, backend=compiler, fullgraph=True)(*args)
    return counts[0]


@contextmanager
def copied_bytes() -> Iterator[list[int]]:
    """The bytes of inputs that replays of compiled graphs copy into their own memory."""
    from torch._inductor.cudagraph_trees import CUDAGraphNode

    counts: list[int] = []
    original = CUDAGraphNode._copy_inputs_and_remove_from_src

    def counting(self: Any, targets: Any, sources: Any) -> None:
        copied = [sources[i] for i in self.non_static_input_idx]
        counts.append(sum(t.numel() * t.element_size() for t in copied if isinstance(t, Tensor)))
        original(self, targets, sources)

    CUDAGraphNode._copy_inputs_and_remove_from_src = counting
    try:
        yield counts
    finally:
        CUDAGraphNode._copy_inputs_and_remove_from_src = original


def copies_of(call: Callable[[], object]) -> int:
    """The bytes of inputs that one call copies, once its graphs are recorded."""
    for _ in range(5):
        torch.compiler.cudagraph_mark_step_begin()
        call()
    with copied_bytes() as counts:
        torch.compiler.cudagraph_mark_step_begin()
        call()
    assert counts, "no graph was replayed"
    return sum(counts)
