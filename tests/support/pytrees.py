"""Pytrees of tensors, drawn by hypothesis: every container, shape, dtype and layout that a TensorList is made from."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as some


class Pair(NamedTuple):
    left: Any
    right: Any


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64]
LAYOUTS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda t: t,
    lambda t: t.t() if t.dim() == 2 else t,
    lambda t: t[..., ::2],
    lambda t: t[:1].expand(3, *t.shape[1:]) if t.numel() else t,
]


@some.composite
def tensors(draw: some.DrawFn, dtypes: list[torch.dtype] = DTYPES) -> torch.Tensor:
    shape = draw(some.sampled_from([(), (0,), (1,), (7,), (2, 3), (3, 0, 2), (5, 1, 3)]))
    seed = draw(some.integers(0, 99))
    wide = torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 4 - 2
    values = wide.to(draw(some.sampled_from(dtypes)))
    return values if not shape else draw(some.sampled_from(LAYOUTS))(values)


def trees(leaves: some.SearchStrategy[torch.Tensor]) -> some.SearchStrategy[Any]:
    return some.recursive(
        leaves,
        lambda part: (
            some.lists(part, max_size=3)
            | some.lists(part, max_size=3).map(tuple)
            | some.dictionaries(some.sampled_from(["w", "b", "layers"]), part, max_size=3)
            | some.dictionaries(some.sampled_from([1, 2]), part, max_size=2).map(collections.OrderedDict)
            | some.builds(Pair, part, part | some.none())
        ),
        max_leaves=6,
    )


def same_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
