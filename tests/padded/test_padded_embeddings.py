"""Tables of embeddings under padded indices: rows, bags of them, norms and frequencies, of valid indices only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import subtensors as st
from subtensors.padded import torch_function as padded_calls

SEQ = st.Dim("seq", max=24, buckets=st.Linear(8))
OFFSETS = torch.tensor([0, 2, 2, 4, 5])

CALLS: dict[str, tuple[Any, dict[str, Any]]] = {
    "rows": (F.embedding, {"padding_idx": 1}),
    "rows, by frequency": (F.embedding, {"scale_grad_by_freq": True}),
    "rows of a norm": (F.embedding, {"max_norm": 0.5, "norm_type": 1.0}),
    "sums": (F.embedding_bag, {"mode": "sum"}),
    "means": (F.embedding_bag, {"padding_idx": -5}),
    "means, of a norm": (F.embedding_bag, {"max_norm": 0.5}),
    "maxima": (F.embedding_bag, {"mode": "max", "padding_idx": 2}),
    "means between offsets": (F.embedding_bag, {"offsets": OFFSETS[:-1]}),
    "sums between offsets": (F.embedding_bag, {"offsets": OFFSETS, "include_last_offset": True, "mode": "sum"}),
}


def run(name: str, indices: Any, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The result, the gradient of the table, and the table, which a norm changes."""
    table = source.clone().requires_grad_()
    function, keywords = CALLS[name]
    keywords = {word: x.to(source.device) if isinstance(x, Tensor) else x for word, x in keywords.items()}
    out = function(indices, table, **keywords)
    out = out.unpad() if isinstance(out, st.PaddedTensor) else out
    out = torch.cat(out) if isinstance(out, list) else out
    weights = torch.arange(out.numel(), dtype=out.dtype, device=out.device).view_as(out)
    (gradient,) = torch.autograd.grad(out, table, weights)
    return out, gradient, table.detach()


@pytest.mark.parametrize("name", CALLS)
def test_a_table_sees_valid_indices_only(name: str, device: str) -> None:
    torch.manual_seed(0)
    indices = torch.randint(1, 7, (5,) if "between" in name else (3, 5), device=device)
    source = torch.randn(7, 4, dtype=torch.float64, device=device)
    padded_calls.fallbacks.clear()
    actual = run(name, st.pad(indices, {indices.dim() - 1: SEQ}, value=10**9), source)
    assert not padded_calls.fallbacks
    torch.testing.assert_close(actual, run(name, indices, source))


@pytest.mark.parametrize("name", ["rows, by frequency", "rows of a norm", "sums", "means", "maxima"])
def test_a_table_sees_the_valid_indices_of_a_ragged_batch(name: str) -> None:
    indices = [torch.randint(1, 7, (n,)) for n in (5, 1, 8)]
    source = torch.randn(7, 4, dtype=torch.float64)
    out, _, table = run(name, st.pad(indices, {0: SEQ}, value=10**9), source)
    everything = torch.cat(indices) if CALLS[name][0] is F.embedding else None
    if everything is not None:
        torch.testing.assert_close((out, table), run(name, everything, source)[::2])
    else:
        torch.testing.assert_close(out, torch.cat([run(name, row[None], source)[0] for row in indices]))


def test_weighted_bags_compile_once_for_every_length() -> None:
    compiled = torch.compile(F.embedding_bag, fullgraph=True, backend="aot_eager")
    source = torch.randn(7, 4, dtype=torch.float64)
    for i, n in enumerate((5, 8, 2)):
        indices, weights = torch.randint(0, 7, (3, n)), torch.randn(3, n, dtype=torch.float64)
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            actual = compiled(
                st.pad(indices, {1: SEQ}, value=99), source, mode="sum",
                per_sample_weights=st.pad(weights, {1: SEQ}, value=float("nan")),
            )  # fmt: skip
        torch.testing.assert_close(actual, F.embedding_bag(indices, source, mode="sum", per_sample_weights=weights))
