"""The memory that cuBLAS works in, on streams that graphs are captured on.

Note [Workspaces of captured graphs]
CuBLAS works in memory that torch hands it, some for each thread and stream, and a graph goes on writing to what it was
captured with. Torch takes that memory back when somebody asks for it, as `torch.compile(mode="reduce-overhead")` does
around each of its recordings, and others' tensors would then lie where the graph writes. So it comes from a pool that
serves nothing else and that nobody gives back: what was taken back is handed out again on the same stream, to graphs
that are replayed one at a time.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from threading import Lock

import torch

_making = Lock()
_pools: dict[tuple[int, int], torch.cuda.MemPool] = {}
"""By device and stream; torch has 32 streams, which it hands out by turns."""


def make_workspaces(device: torch.device) -> None:
    """Allocate the workspaces of cuBLAS and cuBLASLt for this thread and the current stream, where they have none.

    Args:
        device: the current one, a CUDA device with its index.
    """
    with _making, _memory(device):
        torch.cuda.current_blas_handle()  # comes with a workspace
        # Where that is asked for, and not prepared, torch refuses to call either library.
        if not torch.are_deterministic_algorithms_enabled():
            ones = torch.ones(8, 8, device=device)
            torch.addmm(ones[0], ones, ones)


def _memory(device: torch.device) -> AbstractContextManager[None]:
    """A context in which allocations come from the pool of the current stream; only torch's own allocator has pools."""
    if torch.cuda.get_allocator_backend() != "native":
        return nullcontext()
    key = device.index, torch.cuda.current_stream(device).cuda_stream
    if key not in _pools:
        _pools[key] = torch.cuda.MemPool()
    return torch.cuda.use_mem_pool(_pools[key], device)
