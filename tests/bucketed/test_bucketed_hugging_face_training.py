"""Training steps of Hugging Face models through a bucketed program equal those of the models."""

from __future__ import annotations

import copy

import pytest
import torch
from bucketed_rows import SEQ
from small_models import bert, gpt2
from torch import Tensor

import subtensors as st

pytestmark = pytest.mark.usefixtures("captured")

MODELS = {"gpt2": gpt2, "bert": lambda: bert("ForTokenClassification")}


def batch(n: int, classes: int, device: str) -> dict[str, Tensor]:
    mask = torch.ones(2, n, dtype=torch.long)
    mask[0, (n + 1) // 2 :] = 0
    labels = torch.randint(0, classes, (2, n)).masked_fill(torch.rand(2, n) < 0.2, -100)
    labels[:, 0] = 1
    made = {"input_ids": torch.randint(1, 50, (2, n)), "attention_mask": mask, "labels": labels}
    return {name: t.to(device) for name, t in made.items()}


@pytest.mark.parametrize("name", MODELS)
def test_a_bucketed_model_is_trained_like_the_plain_model(device: str, name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().train().to(device, torch.float64)
    alone = copy.deepcopy(model)
    run = st.bucketed(model, {name: {1: SEQ} for name in ("input_ids", "attention_mask", "labels")})
    optimizers = [torch.optim.AdamW(net.parameters(), lr=1e-2) for net in (model, alone)]
    for step, n in enumerate([5, 6, 20, 7, 22]):
        inputs = batch(n, 2 if name == "bert" else 50, device)
        for program, optimizer in zip((run, alone), optimizers, strict=True):
            out = program(**inputs)
            out.loss.backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(p, q)
            torch.testing.assert_close(p.grad, q.grad)
    assert run.stats().hits == 3
    assert not run.stats().fallbacks
