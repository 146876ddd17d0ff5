"""How much memory a step takes on a device without an allocator that counts."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class LiveTensors(TorchDispatchMode):
    """Counts the bytes of tensors that ops make, while they live.

    What a kernel takes for itself, and gives back before it ends, is not seen.

    >>> with LiveTensors() as seen:
    ...     x = torch.ones(2**18)  # a MiB
    ...     y = (x + 1).sum()
    >>> round(seen.peak_bytes / 2**20)
    2
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes: int = 0
        self.peak_bytes: int = 0
        self._live: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in optree.tree_leaves(out):
            if type(tensor) is Tensor and tensor.device.type != "meta":
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        place, size = storage._cdata, storage.nbytes()
        if place in self._live:
            return
        self._live.add(place)
        self.bytes += size
        self.peak_bytes = max(self.peak_bytes, self.bytes)
        weakref.finalize(storage, self._forget, place, size)

    def _forget(self, place: int, size: int) -> None:
        self._live.discard(place)
        self.bytes -= size


def peak_mb(step: Callable[[], object]) -> float:
    """The most memory of tensors that a step makes, in MiB."""
    with LiveTensors() as seen:
        step()
    return int(seen.peak_bytes) / 2**20
