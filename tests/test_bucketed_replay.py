"""What a replay of a bucket does, beside what the same padding written by hand does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import subtensors as st
from subtensors.dispatch import torch_capture

transformers = pytest.importorskip("transformers")
SEQ = st.Dim("seq", max=256, buckets=64)
LAYERS = 3
NORMS = 1 + 2 * LAYERS
VIEWS = ("view", "expand", "transpose", "t", "slice", "select", "unsqueeze")


def bert() -> Any:
    sizes = {"hidden_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": 2, "intermediate_size": 64}
    torch.manual_seed(0)
    config = transformers.BertConfig(**sizes, attn_implementation="sdpa")
    return transformers.BertModel(config, add_pooling_layer=False).eval()


def ops(program: Callable[..., Any], inputs: list[Tensor]) -> Counter[str]:
    """The aten ops of a program that make something new."""
    nodes = torch_capture.traced(program, inputs).graph.nodes
    made = [n.target for n in nodes if isinstance(n.target, torch._ops.OpOverload)]
    return Counter(op.overloadpacket.__name__ for op in made if op.overloadpacket.__name__ not in VIEWS)


@torch.no_grad()
def test_an_encoder_does_no_more_for_padding_than_masks_written_by_hand() -> None:
    model = bert()
    run = st.bucketed(model, {"input_ids": {1: SEQ}})
    run(input_ids=torch.randint(1, 1000, (1, 100)))
    bucket = run.recorded()[0]
    ours = ops(lambda *inputs: [leaf.value for leaf in bucket.run_on(inputs).leaves], bucket.inputs())
    ids = torch.zeros(1, 128, dtype=torch.long)
    by_hand = ops(
        lambda ids, mask: [model(input_ids=ids, attention_mask=mask).last_hidden_state], [ids, torch.ones_like(ids)]
    )
    # Zeros behind the norms, which their own kernel writes on a GPU, are all that every layer does for its padding.
    assert ours["where"] == NORMS
    assert ours.total() - NORMS <= by_hand.total()
    assert ours["clone"] == 0
