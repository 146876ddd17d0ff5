"""A loop of accelerate's with a chunked loss and an optimizer of `st.optim`; its saved state goes on bit by bit.

accelerate launch docs/examples/integrations/with_accelerate.py
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import set_seed

import subtensors as st

ROWS, BATCH, ACCUMULATE = 48, 4, 2


def tiny_model() -> Any:
    """A tiny model with random weights; take one by `from_pretrained`."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=199, **sizes))


def main() -> None:
    """Train, save in the middle, and take the second half again."""
    accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATE)
    set_seed(0)
    model = tiny_model()
    applied = st.integrations.transformers.apply(model, "adamw", lr=1e-2, max_norm=1.0)  # clips in its step
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(applied.optimizer, ROWS)
    rows = torch.utils.data.DataLoader(torch.randint(199, (ROWS, 24)), batch_size=BATCH)
    model, optimizer, schedule, rows = accelerator.prepare(model, applied.optimizer, schedule, rows)
    batches = list(rows)

    def train(part: list[torch.Tensor]) -> list[float]:
        losses = []
        for tokens in part:
            with accelerator.accumulate(model):
                loss = model(input_ids=tokens, labels=tokens).loss
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    half = len(batches) // 2
    with tempfile.TemporaryDirectory() as folder:
        first = train(batches[:half])
        accelerator.save_state(folder)
        second = train(batches[half:])
        accelerator.load_state(folder)
        again = train(batches[half:])
    accelerator.print(f"losses {[round(loss, 3) for loss in first + second]}")
    accelerator.print(f"after the saved state, bit by bit the same: {'yes' if again == second else 'no'}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
