"""Loading inputs into static memory: copied, padded with zeros and their true sizes set, by one kernel.

What a captured graph reads stays where it is; each call brings tensors of other sizes. Between the two stands one walk
over all the static inputs. Its launch is made ready once: a call hands over addresses and sizes, nothing else varies.
Until another thread has compiled the kernel, torch's ops do the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future
from functools import cache
from typing import Any

import torch
from torch import Tensor

from subtensors.kernels.runtime.async_compile import compile_async
from subtensors.kernels.runtime.current_device import current_stream, launching_on
from subtensors.kernels.runtime.launcher import Launch, launcher

BLOCK = 1024

# Not 1 and odd, so that Triton takes nothing for granted of a number that stands for all later ones.
_ANY = (1 << 40) + 1


def load_inputs_reference(
    sources: Sequence[Tensor], targets: Sequence[Tensor], sizes: Sequence[int], true_sizes: Tensor
) -> None:
    """Load inputs as an `InputLoad` does, in torch ops."""
    for source, target in zip(sources, targets, strict=True):
        if source.shape != target.shape:
            target.zero_()
        target[tuple(map(slice, source.shape))].copy_(source)
    true_sizes.copy_(torch.tensor(list(sizes), dtype=torch.int64, device="cpu"))


class InputLoad:
    """Tensors of varying sizes into static ones, in one launch.

    Args:
        targets: contiguous, zero where a shorter source leaves them.
        dims: for each target, for each of its dims, which of the true sizes it has; -1 for a dim without padding.
        true_sizes: (number of sizes,) int64 on the same device, which a call sets.

    Example:
        >>> target, sizes = torch.ones(2, 4), torch.zeros(1, dtype=torch.int64)
        >>> InputLoad([target], [[-1, 0]], sizes)([torch.full((2, 3), 5.0)], (3,))
        >>> target, sizes
        (tensor([[5., 5., 5., 0.],
                [5., 5., 5., 0.]]), tensor([3]))
    """

    def __init__(self, targets: Sequence[Tensor], dims: Sequence[Sequence[int]], true_sizes: Tensor) -> None:
        self.targets, self.true_sizes = list(targets), true_sizes
        self.walk = Walk(targets, dims, true_sizes) if true_sizes.is_cuda else None
        self._is_ready = False

    def __call__(self, sources: Sequence[Tensor], sizes: tuple[int, ...]) -> None:
        """Load these.

        Args:
            sources: one a target, of its dtype and device, of the true sizes in dims that have them.
            sizes: the true sizes.
        """
        if self.walk is not None and (self._is_ready or self.walk.is_compiled()):
            self._is_ready = True
            self.walk(sources, sizes)
        else:
            load_inputs_reference(sources, self.targets, sizes, self.true_sizes)


class Walk:
    """The kernel's walk over some static inputs; arguments as of `InputLoad`."""

    def __init__(self, targets: Sequence[Tensor], dims: Sequence[Sequence[int]], true_sizes: Tensor) -> None:
        plans = [_plan(t, d) for t, d in zip(targets, dims, strict=True)]
        totals = [math.prod(shape) for _, shape, _, _ in plans]
        firsts = [0]
        for total in totals:
            firsts.append(firsts[-1] + -(-total // BLOCK))
        self.bytes = tuple(width for width, *_ in plans)
        self.programs = max(firsts[-1], 1)
        self._fixed = (
            tuple(t.data_ptr() for t in targets), tuple(firsts), tuple(totals),
            tuple(shape for _, shape, _, _ in plans), tuple(scale for *_, scale in plans),
        )  # fmt: skip
        self._constants = tuple(which for _, _, which, _ in plans), self.bytes, BLOCK
        self._end = true_sizes.data_ptr()
        self._count = true_sizes.shape[0]
        self._kept = [*targets, true_sizes]
        self._device = true_sizes.device
        self._launcher: Launch | None = None
        self._kernel = _compiled(self._constants, self._device, self._count) if true_sizes.is_cuda else None

    def is_compiled(self) -> bool:
        """Return whether a call can run without waiting for the compiler."""
        return self._kernel is None or self._kernel.done()

    def __call__(self, sources: Sequence[Tensor], sizes: tuple[int, ...]) -> None:
        """Load these; see `InputLoad`."""
        # A copy must live until the launch, or the next one would take its place.
        moved = []
        for source, width in zip(sources, self.bytes, strict=True):
            # The walk is that of contiguous memory in whole words, as they are there.
            whole = source if source.is_contiguous() else source.contiguous()
            if whole.is_conj() or whole.is_neg():
                whole = whole.resolve_conj().resolve_neg()
            if whole.data_ptr() % width:
                whole = whole.clone()
            moved.append(whole)
        arguments = (tuple([t.data_ptr() for t in moved]), *self._fixed, sizes, self._end, *self._constants)
        if self._launcher is None:
            if self._kernel is None:
                from subtensors.kernels.graph_inputs.inputs_kernel import load_inputs_kernel

                with launching_on(self._device):
                    load_inputs_kernel[(self.programs,)](*arguments)
                return
            self._launcher = launcher(self._kernel.result(), self.programs)
        with launching_on(self._device):
            self._launcher(*arguments, stream=current_stream(self._device))


@cache
def _compiled(constants: tuple[Any, ...], device: torch.device, sizes: int) -> Future[Any]:
    """The kernel for inputs of these kinds, once it is compiled for arguments of any value and loaded."""
    return compile_async(lambda: _compile(constants, device, sizes))


def _compile(constants: tuple[Any, ...], device: torch.device, sizes: int) -> Any:
    from subtensors.kernels.graph_inputs.inputs_kernel import load_inputs_kernel

    dims, widths, _ = constants
    each = (_ANY,) * len(widths)
    shapes = tuple((_ANY,) * len(which) for which in dims)
    with launching_on(device):
        kernel = load_inputs_kernel.warmup(
            each, each, (*each, _ANY), each, shapes, each, (_ANY,) * sizes, _ANY, *constants, grid=(1,)
        )
        kernel[(1, 1, 1)]  # is loaded by this
    return kernel


def _plan(target: Tensor, dims: Sequence[int]) -> tuple[int, tuple[int, ...], tuple[int, ...], int]:
    """Plan a walk over a target: bytes per word, dims in words, the index of each dim's true size, the outer scale."""
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
        # Nothing lies outside of the first dim, so what is real of both is one stretch.
        scale = merged[1][0]
        merged[:2] = [(merged[0][0] * scale, merged[0][1])]
    return width, tuple(bucket for bucket, _ in merged), tuple(which for _, which in merged), scale
