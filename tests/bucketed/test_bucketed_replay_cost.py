"""The work of a replayed bucket, compared with the same padding written by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_models import VOCABULARY, bert
from torch import Tensor

import subtensors as st
from subtensors.dispatch.tracing import aten_trace

transformers = pytest.importorskip("transformers")
SEQ = st.Dim("seq", max=256, buckets=64)
LAYERS = 3
NORMS = 1 + 2 * LAYERS
VIEWS = ("view", "expand", "transpose", "t", "slice", "select", "unsqueeze", "detach", "alias")


def encoder() -> Any:
    torch.manual_seed(0)
    model = bert("Model", num_hidden_layers=LAYERS, max_position_embeddings=256, attn_implementation="sdpa").eval()
    model.pooler = None
    return model


def ops(program: Callable[..., Any], inputs: list[Tensor]) -> Counter[str]:
    """The aten ops of a program that make something new."""
    nodes = aten_trace.trace_aten(program, inputs).graph.nodes
    made = [n.target for n in nodes if isinstance(n.target, torch._ops.OpOverload)]
    return Counter(op.overloadpacket.__name__ for op in made if op.overloadpacket.__name__ not in VIEWS)


@torch.no_grad()
def test_an_encoder_does_no_more_for_padding_than_masks_written_by_hand() -> None:
    model = encoder()
    run = st.bucketed(model, {"input_ids": {1: SEQ}})
    run(input_ids=torch.randint(1, VOCABULARY, (1, 100)))
    bucket = run.captured_buckets()[0]
    ours = ops(lambda *inputs: [leaf.value for leaf in bucket.run_on(inputs).leaves], bucket.inputs())
    ids = torch.zeros(1, 128, dtype=torch.long)
    by_hand = ops(
        lambda ids, mask: [model(input_ids=ids, attention_mask=mask).last_hidden_state], [ids, torch.ones_like(ids)]
    )
    # Zeros behind the norms, which their own kernel writes on a GPU, are all that every layer does for its padding. The
    # indices of the three embeddings, once a model, are made to be in range.
    assert ours["where"] == NORMS + 3
    assert ours.total() - NORMS - 3 <= by_hand.total()
    assert ours["clone"] == 0


@torch.no_grad()
def test_layers_share_the_padding_mask_and_the_callers_mask() -> None:
    model = encoder()
    run = st.bucketed(model, {"input_ids": {1: SEQ}, "attention_mask": {1: SEQ}})
    ids = torch.randint(1, VOCABULARY, (2, 100))
    mask = torch.ones_like(ids)
    mask[0, 60:] = 0
    found = run(input_ids=ids, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(found, model(input_ids=ids, attention_mask=mask).last_hidden_state)
    bucket = run.captured_buckets()[0]
    ours = ops(lambda *inputs: [leaf.value for leaf in bucket.run_on(inputs).leaves], bucket.inputs())
    assert ours["masked_fill_"] == ours["materialize"] == 1
    assert ours["scalar_tensor"] <= 1  # once for all layers


@torch.no_grad()
def test_a_mask_that_is_written_between_layers_is_read_anew() -> None:
    def twice(x: Tensor, mask: Tensor) -> Tensor:
        first = torch.nn.functional.scaled_dot_product_attention(x, x, x, mask)
        mask[..., 0] = False
        return first + torch.nn.functional.scaled_dot_product_attention(x, x, x, mask)

    x = torch.randn(1, 2, 30, 4)
    run = st.bucketed(lambda x: twice(x, torch.ones(1, 1, 64, 64, dtype=torch.bool)), {"x": {2: SEQ}}, check=False)
    run(x)
    bucket = run.captured_buckets()[0]
    found = bucket.run_on(bucket.inputs()).leaves[0].value[:, :, :30]  # as in a capture
    torch.testing.assert_close(found, twice(x, torch.ones(1, 1, 30, 30, dtype=torch.bool)))


@torch.no_grad()
def test_a_convolutional_net_does_no_more_for_a_padded_batch_than_for_a_full_one() -> None:
    torch.manual_seed(0)
    sizes = {"embedding_size": 4, "hidden_sizes": [8, 8], "depths": [2, 2], "num_labels": 3}
    model = transformers.ResNetForImageClassification(transformers.ResNetConfig(**sizes)).eval()
    run = st.bucketed(model, {"pixel_values": {0: st.Dim("batch", max=8, buckets=4)}})
    images = torch.randn(3, 3, 32, 32)
    torch.testing.assert_close(run(pixel_values=images).logits, model(pixel_values=images).logits)
    bucket = run.captured_buckets()[0]
    ours = ops(lambda *inputs: [leaf.value for leaf in bucket.run_on(inputs).leaves], bucket.inputs())
    plain = ops(lambda images: [model(pixel_values=images).logits], [torch.zeros(4, 3, 32, 32)])
    assert ours - plain == Counter()
