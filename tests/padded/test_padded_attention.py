"""Attention over padded queries and keys: a query with no key to attend to gives 0, and no gradient."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import subtensors as st

SEQ = st.Dim("seq", max=24, buckets=st.Linear(8))
NAN = float("nan")


@pytest.mark.parametrize("kind", ["bool", "added"])
def test_a_query_with_all_keys_masked_gives_zero(kind: str, device: str) -> None:
    torch.manual_seed(0)
    t = torch.randn(2, 5, 4, dtype=torch.float64, device=device, requires_grad=True)
    allowed = torch.rand(2, 5, 5, device=device) > 0.4
    allowed[0, 1], allowed[1] = False, False
    mask = allowed if kind == "bool" else torch.zeros_like(allowed, dtype=t.dtype).masked_fill(~allowed, -math.inf)
    x, padded_mask = st.pad(t, {1: SEQ}, value=NAN), st.pad(mask, {1: SEQ, 2: SEQ}, value=kind == "bool")

    def program(x: Any, mask: Any) -> Any:
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)

    scores = (t @ t.mT / 2).masked_fill(~allowed, -math.inf)
    expected = torch.where(allowed.any(-1, keepdim=True), scores, 0).softmax(-1) * allowed @ t
    cotangent = torch.randn_like(expected)
    for run in (program, torch.compile(program, fullgraph=True, backend="aot_eager")):
        actual = run(x, padded_mask).unpad()
        assert actual[0, 1].eq(0).all()
        assert actual[1].eq(0).all()
        torch.testing.assert_close(actual, expected)
        given, wanted = (torch.autograd.grad(o, t, cotangent, retain_graph=True) for o in (actual, expected))
        torch.testing.assert_close(given, wanted)


def test_a_row_without_keys_gives_zero(device: str) -> None:
    keys = [torch.randn(n, 4, dtype=torch.float64, device=device, requires_grad=True) for n in (0, 3)]
    queries = torch.randn(2, 3, 4, dtype=torch.float64, device=device, requires_grad=True)
    k = st.pad(keys, {0: SEQ}, value=NAN)
    out = F.scaled_dot_product_attention(queries, k, k).unpad()
    assert out[0].eq(0).all()
    torch.testing.assert_close(out[1], F.scaled_dot_product_attention(queries[1], keys[1], keys[1]))
    gradients = torch.autograd.grad(out[0].sum() + out[1].square().sum(), [queries, keys[1]])
    assert all(g.isfinite().all() for g in gradients)
    assert gradients[0][0].eq(0).all()
