"""Plain torch in another order of addition: the reference for how far rounding may take a whole model.

A sum of floats depends on its order, and torch fixes none: vector width, number of threads and the libraries beneath
it choose one for each shape, and a padded call has other shapes than a plain call. Over the layers of a model such
differences add up or cancel, so the error of a single plain run may be small by luck, and a bound derived from it too
strict on some CPU. Here the plain program runs several times, with the terms of each contraction in random order. A
program is as good as plain torch if its error is at most 1.5 times the largest one among those runs.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

ORDERS = 4
"""How many random orders are tried beside torch's own."""

aten = torch.ops.aten

# By op: the positions of two arguments, and the dim of each that the contraction adds over.
_CONTRACTIONS: dict[Any, tuple[tuple[int, int], tuple[int, int]]] = {
    aten.mm.default: ((0, -1), (1, -2)),
    aten.bmm.default: ((0, -1), (1, -2)),
    aten.addmm.default: ((1, -1), (2, -2)),
    aten.baddbmm.default: ((1, -1), (2, -2)),
    aten.convolution.default: ((0, 1), (1, 1)),
    aten._scaled_dot_product_flash_attention_for_cpu.default: ((0, -1), (1, -1)),
}


class ReorderedSums(TorchDispatchMode):
    """Permute the terms of each contraction at random: the same mathematics, other roundings.

    Args:
        seed: which orders.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = list(args)
        if func in _CONTRACTIONS:
            (i, dim), (j, other) = _CONTRACTIONS[func]
            size = args[i].shape[dim]
            if size == args[j].shape[other]:  # a grouped convolution adds over fewer channels than its input has
                order = torch.randperm(size, generator=self.generator).to(args[i].device)
                args[i], args[j] = args[i].index_select(dim, order), args[j].index_select(other, order)
        return func(*args, **(kwargs or {}))


def orders() -> list[AbstractContextManager[object]]:
    """Return contexts to run a plain program in: torch's own order of addition, then `ORDERS` random ones."""
    return [nullcontext(), *map(ReorderedSums, range(ORDERS))]
