"""Programs of one padded tensor and a weight, which the CPU and the GPU tests of PaddedTensor run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import subtensors as st

SEQ = st.Dim("seq", max=24, buckets=st.Linear(8))
NAN = float("nan")


def _assign_first(x: Any, w: Tensor) -> Any:
    y = x * 1
    y[:, 0] = w
    return y


PROGRAMS: dict[str, Callable[[Any, Tensor], Any]] = {
    "a pointwise op with a weight that broadcasts": lambda x, w: (x * w).exp(),
    "a contraction over the padded dim": lambda x, w: x.transpose(1, 2) @ x,
    "a linear layer": lambda x, w: torch.nn.functional.linear(x, w.expand(2, 3)),
    "a mean over the padded dim": lambda x, w: (x * w).mean(1),
    "a variance over all": lambda x, w: (x * w).var(),
    "a softmax along the padded dim": lambda x, w: torch.softmax(x * w, 1),
    "a slice from the true end": lambda x, w: (x * w)[:, -2:],
    "the last position": lambda x, w: (x * w)[:, -1],
    "all but the last": lambda x, w: (x * w)[:, :-1],
    "a concatenation along the padded dim": lambda x, w: torch.cat([x, x * w], 1),
    "a flip": lambda x, w: (x * w).flip(1),
    "a cumulative sum": lambda x, w: (x * w).cumsum(1),
    "a sort": lambda x, w: (x * w).sort(1, descending=True).values,
    "a flatten of two dims and back": lambda x, w: (x.flatten(0, 1) * w).view(x.shape[0], -1, 3),
    "a sum over a flattened dim": lambda x, w: (x * w).flatten(0, 1).sum(0),
    "a layer norm": lambda x, w: torch.nn.functional.layer_norm(x, (3,), w),
    "a convolution along the padded dim": lambda x, w: torch.nn.functional.conv1d(
        x.transpose(1, 2), w.expand(2, 3)[:, :, None].expand(2, 3, 2), padding=1, stride=2
    ),
    "in place": lambda x, w: (x * w).add_(1).mul_(x),
    "an assignment": lambda x, w: _assign_first(x, w),
    "attention": lambda x, w: torch.nn.functional.scaled_dot_product_attention(x * w, x, x),
    "causal attention": lambda x, w: torch.nn.functional.scaled_dot_product_attention(x * w, x, x, is_causal=True),
}
"""Each takes `x` (rows, seq, 3) and `w` (3,)."""

RAGGED = [
    "a pointwise op with a weight that broadcasts",
    "a contraction over the padded dim",
    "a linear layer",
    "a mean over the padded dim",
    "a softmax along the padded dim",
    "a slice from the true end",
    "the last position",
    "a flip",
    "a layer norm",
    "a convolution along the padded dim",
    "attention",
    "causal attention",
]
"""The programs whose result for each row depends on that row alone."""
