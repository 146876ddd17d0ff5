"""What torch keeps private of CUDA graph captures and their pools: one function each, with the versions checked."""

from __future__ import annotations

import torch


def forget_capture(device: torch.device, pool: tuple[int, int]) -> None:
    """Clean up after a CUDA graph capture that CUDA invalidated, which torch leaves half open. Checked on 2.11.

    The allocator stops serving the capture, the pool loses the reference it had taken, and the random generators, which
    believe that they are being captured, are told otherwise by a capture of nothing.
    """
    for close in (torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool):  # type: ignore[attr-defined]
        try:
            close(device.index, pool)
        except RuntimeError:
            continue
    empty = torch.cuda.CUDAGraph()
    empty.capture_begin(capture_error_mode="thread_local")
    torch.empty(1, device=device).zero_()
    empty.capture_end()
    empty.reset()


def pool_bytes(pool: tuple[int, int]) -> int:
    """How much device memory the segments of a private pool have. Checked on 2.11."""
    segments = torch.cuda.memory_snapshot()
    return sum(segment["total_size"] for segment in segments if tuple(segment.get("segment_pool_id", ())) == pool)
