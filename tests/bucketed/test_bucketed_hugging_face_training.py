"""Training steps of Hugging Face models through a bucketed program equal those of the models."""

from __future__ import annotations

import copy

import pytest
import torch
from bucketed_rows import SEQ
from small_models import bert, gpt2, llama, t5
from torch import Tensor

import subtensors as st

pytestmark = pytest.mark.usefixtures("captured")

ANSWER = st.Dim("answer", max=32, buckets=8)
MODELS = {"gpt2": gpt2, "llama": llama, "bert": lambda: bert("ForTokenClassification"), "t5": t5}


def batch(n: int, m: int, classes: int, device: str) -> dict[str, Tensor]:
    mask = torch.ones(2, n, dtype=torch.long)
    mask[0, (n + 1) // 2 :] = 0
    labels = torch.randint(0, classes, (2, m)).masked_fill(torch.rand(2, m) < 0.2, -100)
    labels[:, 0] = 1
    made = {"input_ids": torch.randint(1, 50, (2, n)), "attention_mask": mask, "labels": labels}
    return {name: t.to(device) for name, t in made.items()}


@pytest.mark.parametrize("name", MODELS)
def test_a_bucketed_model_is_trained_like_the_plain_model(device: str, name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().train().to(device, torch.float64)
    alone = copy.deepcopy(model)
    dims = {"input_ids": {1: SEQ}, "attention_mask": {1: SEQ}, "labels": {1: ANSWER if name == "t5" else SEQ}}
    run = st.bucketed(model, dims)
    optimizers = [torch.optim.AdamW(net.parameters(), lr=1e-2) for net in (model, alone)]
    for step, (n, m) in enumerate([(5, 3), (6, 9), (20, 12), (7, 4), (22, 14)]):
        inputs = batch(n, m if name == "t5" else n, 2 if name == "bert" else 50, device)
        for program, optimizer in zip((run, alone), optimizers, strict=True):
            out = program(**inputs)
            out.loss.backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(p, q)
            torch.testing.assert_close(p.grad, q.grad)
    assert run.stats().hits == (2 if name == "t5" else 3)
    assert not run.stats().fallbacks
