"""What torch keeps private of CUDA graph captures and their pools: one function each, with the versions checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx


def forget_capture(device: torch.device, pool: tuple[int, int]) -> None:
    """Clean up after a CUDA graph capture that CUDA invalidated, which torch leaves half open. Checked on 2.11.

    The allocator stops serving the capture, and the pool loses the reference it had taken.
    """
    for close in (torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool):  # type: ignore[attr-defined]
        try:
            close(device.index, pool)
        except RuntimeError:
            continue
    settle_generators(device)


def settle_generators(device: torch.device) -> None:
    """Tell random generators that believe to be captured otherwise, by a capture of nothing. Checked on 2.11."""
    empty = torch.cuda.CUDAGraph()
    empty.capture_begin(capture_error_mode="thread_local")
    torch.empty(1, device=device).zero_()
    empty.capture_end()
    empty.reset()


def pool_bytes(pool: tuple[int, int]) -> int:
    """How much device memory the segments of a private pool have. Checked on 2.11."""
    segments = torch.cuda.memory_snapshot()
    return sum(segment["total_size"] for segment in segments if tuple(segment.get("segment_pool_id", ())) == pool)


def traced(function: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> torch.fx.GraphModule:
    """The aten ops that a function of tensors makes, without running them. Checked on 2.11, 2.13.

    Tensors that are not among the inputs are attributes of the module, themselves and not copies.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    # Programs ask whether they are compiled before they look at values, which a trace has none of.
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        with torch.no_grad():
            module: torch.fx.GraphModule = make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
    finally:
        torch.compiler._is_compiling_flag = before
    return module


def compilations() -> int:
    """How many graphs the compiler has compiled in this process. Checked on 2.11, 2.13."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def random_place(device: torch.device) -> torch.Tensor:
    """Where the random generator of a device is; the host knows. Checked on 2.11, 2.13."""
    return _generator(device).get_state()


def go_to_random_place(device: torch.device, place: torch.Tensor) -> None:
    """Set the random generator of a device to where it was."""
    _generator(device).set_state(place)


def _generator(device: torch.device) -> torch.Generator:
    return torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator
