"""Loading inputs into static memory: one kernel copies them, pads them with zeros and writes their true sizes.

A captured graph reads its inputs at fixed addresses; each call brings tensors of other sizes. One kernel copies all of
them at once. Its launch is prepared once: only addresses and sizes vary from call to call. Until another thread has
compiled the kernel, torch ops do the same; always, where it can't be compiled or loaded.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from concurrent.futures import Future
from functools import cache

import torch
from torch import Tensor

from subtensors.kernels.runtime.async_compile import CompiledKernel, compile_async
from subtensors.kernels.runtime.launcher import JitKernel, Launch, current_stream, launching_on, prepare_launch

_log = logging.getLogger("subtensors.bucketed")

BLOCK = 1024

# Neither one nor even, so that Triton specializes the kernel for nothing.
_ANY_NUMBER = (1 << 40) + 1

_Constants = tuple[tuple[tuple[int, ...], ...], tuple[int, ...], int]
"""The kernel's DIMS, BYTES and BLOCK."""


def load_inputs_reference(
    sources: Sequence[Tensor], targets: Sequence[Tensor], sizes: Sequence[int], true_sizes: Tensor
) -> None:
    """Load inputs as an `InputLoader` does, in torch ops."""
    for source, static in zip(sources, targets, strict=True):
        target = static.detach()  # which may require grad where no result does
        if source.shape != target.shape:
            target.zero_()
        target[tuple(map(slice, source.shape))].copy_(source.detach())
    true_sizes.copy_(torch.tensor(list(sizes), dtype=torch.int64, device="cpu"))


class InputLoader:
    """A copy of tensors of varying sizes into static ones, in one launch.

    Args:
        targets: contiguous; zeros are written where a source is shorter.
        dims: for each dim of each target, the index of its true size; -1 for a dim without padding.
        true_sizes: (number of sizes,) int64 on the same device, written by each call.

    Raises:
        ValueError: a target is not contiguous.

    Example:
        >>> target, sizes = torch.ones(2, 4), torch.zeros(1, dtype=torch.int64)
        >>> InputLoader([target], [[-1, 0]], sizes)([torch.full((2, 3), 5.0)], (3,))
        >>> target, sizes
        (tensor([[5., 5., 5., 0.],
                [5., 5., 5., 0.]]), tensor([3]))
    """

    def __init__(self, targets: Sequence[Tensor], dims: Sequence[Sequence[int]], true_sizes: Tensor) -> None:
        if not all(t.is_contiguous() for t in targets):
            raise ValueError("static inputs are contiguous")
        self.targets, self.true_sizes = list(targets), true_sizes
        self._device, self._sizes_address = true_sizes.device, true_sizes.data_ptr()
        plans = [_plan(t, d) for t, d in zip(targets, dims, strict=True)]
        totals = [math.prod(shape) for _, shape, _, _ in plans]
        first_programs = [0]
        for total in totals:
            first_programs.append(first_programs[-1] + -(-total // BLOCK))
        self._bytes = tuple(width for width, *_ in plans)
        self._programs = max(first_programs[-1], 1)
        self._fixed = (
            tuple(t.data_ptr() for t in targets), tuple(first_programs), tuple(totals),
            tuple(shape for _, shape, _, _ in plans), tuple(scale for *_, scale in plans),
        )  # fmt: skip
        self._constants: _Constants = tuple(which for _, _, which, _ in plans), self._bytes, BLOCK
        self._launch: Launch | None = None
        """The kernel's launch, once it was compiled and loaded."""
        self._compiled = _compiled(self._constants, self._device, len(true_sizes)) if true_sizes.is_cuda else None

    def __call__(self, sources: Sequence[Tensor], sizes: tuple[int, ...]) -> None:
        """Copy the sources into the targets.

        Args:
            sources: one for each target, of its dtype and device, and of the true sizes in padded dims.
            sizes: the true sizes.
        """
        compiled = self._compiled
        if self._launch is None and (compiled is None or not compiled.done() or compiled.exception() is not None):
            load_inputs_reference(sources, self.targets, sizes, self.true_sizes)
        else:
            self.run_kernel(sources, sizes)

    def run_kernel(self, sources: Sequence[Tensor], sizes: tuple[int, ...]) -> None:
        """Copy the sources into the targets by the kernel; wait for its compilation."""
        # A copy must live until the launch, or the next copy would take its memory.
        ready = []
        for source, width in zip(sources, self._bytes, strict=True):
            # The kernel reads contiguous memory in aligned words.
            x = source if source.is_contiguous() else source.contiguous()
            if x.is_conj() or x.is_neg():
                x = x.resolve_conj().resolve_neg()
            if x.data_ptr() % width:
                x = x.clone()
            ready.append(x)
        arguments = (tuple([t.data_ptr() for t in ready]), *self._fixed, sizes, self._sizes_address, *self._constants)
        if self._launch is None:
            if self._compiled is None:
                from subtensors.kernels.graph_inputs.inputs_kernel import load_inputs_kernel

                with launching_on(self._device):
                    load_inputs_kernel[(self._programs,)](*arguments)
                return
            self._launch = prepare_launch(self._compiled.result())
        with launching_on(self._device):
            self._launch(self._programs, *arguments, stream=current_stream(self._device))


@cache
def _compiled(constants: _Constants, device: torch.device, sizes: int) -> Future[CompiledKernel]:
    """Return a future of the kernel, compiled for arguments of any value and loaded."""
    compiled = compile_async(lambda: _compile(constants, device, sizes))
    compiled.add_done_callback(_log_failure)
    return compiled


def _log_failure(compiled: Future[CompiledKernel]) -> None:
    if (error := compiled.exception()) is not None:
        _log.warning("inputs are copied by torch's ops, since their kernel can't be compiled or loaded: %s", error)


def _compile(constants: _Constants, device: torch.device, sizes: int) -> CompiledKernel:
    from subtensors.kernels.graph_inputs.inputs_kernel import load_inputs_kernel

    dims, widths, _ = constants
    each = (_ANY_NUMBER,) * len(widths)
    shapes = tuple((_ANY_NUMBER,) * len(which) for which in dims)
    jit: JitKernel = load_inputs_kernel
    with launching_on(device):
        kernel = jit.warmup(
            each, each, (*each, _ANY_NUMBER), each, shapes, each, (_ANY_NUMBER,) * sizes, _ANY_NUMBER, *constants,
            grid=(1,),
        )  # fmt: skip
        kernel[(1, 1, 1)]  # loads it
    return kernel


def _plan(target: Tensor, dims: Sequence[int]) -> tuple[int, tuple[int, ...], tuple[int, ...], int]:
    """Plan a copy: bytes per word, the target's dims in words, the index of each dim's true size, the outer scale."""
    merged: list[tuple[int, int]] = []
    for bucket, which in zip(target.shape, dims, strict=True):
        if merged and which < 0 and merged[-1][1] < 0:
            merged[-1] = (merged[-1][0] * bucket, -1)
        else:
            merged.append((bucket, which))
    run = merged.pop()[0] if merged and merged[-1][1] < 0 else 1
    size = run * target.element_size()
    width = next(w for w in (8, 4, 2, 1) if size % w == 0)
    if size // width != 1 or not merged:
        merged.append((size // width, -1))
    scale = 1
    if len(merged) > 1 and merged[0][1] >= 0 and merged[1][1] < 0:
        # No dim is outside of the first, so the valid part of both is contiguous.
        scale = merged[1][0]
        merged[:2] = [(merged[0][0] * scale, merged[0][1])]
    return width, tuple(bucket for bucket, _ in merged), tuple(which for _, which in merged), scale
