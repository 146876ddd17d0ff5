"""A loop of accelerate's trains as a plain one does, with what is applied to its model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from optim_oracle import flat
from tiny_causal_lms import VOCABULARY, causal_lm

import subtensors as st

accelerate = pytest.importorskip("accelerate", reason="needs the package accelerate")
pytest.importorskip("transformers")
pytestmark = [pytest.mark.filterwarnings("ignore")]

ROWS = torch.randint(3, VOCABULARY, (24, 12), generator=torch.Generator().manual_seed(0))
ACCUMULATE = 2


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """What accelerate says by variables of the process is for that test."""
    kept = {**os.environ}
    os.environ["ACCELERATE_USE_CPU"] = "true"
    yield
    os.environ.clear()
    os.environ.update(kept)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def alone() -> tuple[list[float], Any]:
    model = causal_lm()
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for number, tokens in enumerate(ROWS.split(4)):
        loss = model(input_ids=tokens, labels=tokens).loss
        (loss / ACCUMULATE).backward()
        losses.append(loss.item())
        if number % ACCUMULATE == ACCUMULATE - 1:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    return losses, model


@pytest.mark.parametrize("by", ["accelerate", "the optimizer"])
def test_an_accumulating_loop_trains_as_a_plain_one(by: str) -> None:
    theirs, plain = alone()
    model = causal_lm()
    own = {"accumulate": ACCUMULATE} if by == "the optimizer" else {}
    accelerator = accelerate.Accelerator(gradient_accumulation_steps=1 if own else ACCUMULATE)
    applied = st.integrations.transformers.apply(model, "adamw", loss={"rows": 4}, lr=1e-2, max_norm=0.1, **own)
    loader = torch.utils.data.DataLoader(ROWS, batch_size=4)
    prepared, optimizer, loader = accelerator.prepare(model, applied.optimizer, loader)
    losses = []
    for tokens in loader:
        with accelerator.accumulate(prepared):
            result = prepared(input_ids=tokens, labels=tokens)
            assert isinstance(result.logits, st.ChunkedTensor)
            accelerator.backward(result.loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(result.loss.item())
    assert losses == pytest.approx(theirs, rel=1e-4)
    start = flat(causal_lm().parameters())
    learned = flat(plain.parameters()) - start
    assert float((flat(model.parameters()) - start - learned).norm()) < 1e-3 * float(learned.norm())
