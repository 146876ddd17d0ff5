"""A LightningModule with a causal language model: a chunked loss by a callback, and an optimizer of `st.optim`.

python docs/examples/integrations/with_lightning.py
"""

from __future__ import annotations

import tempfile
from typing import Any

import lightning.pytorch as lightning
import torch
import transformers
from torch import Tensor

import subtensors as st


class LanguageModel(lightning.LightningModule):
    """A tiny model with random weights; take one by `from_pretrained`."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
        self.net: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=199, **sizes))
        self.losses: list[float] = []

    def training_step(self, tokens: Tensor) -> Tensor:
        """Return the loss of a batch, (rows, length) int64."""
        loss: Tensor = self.net(input_ids=tokens, labels=tokens).loss
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return st.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    """Train for an epoch."""
    lightning.seed_everything(0, verbose=False)
    rows = torch.randint(199, (32, 24))
    module = LanguageModel()
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            max_epochs=1,
            gradient_clip_val=1.0,  # becomes the optimizer's max_norm
            callbacks=[st.integrations.lightning.callback()],
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=8))
    (group,) = trainer.optimizers[0].param_groups
    print(f"losses {[round(loss, 3) for loss in module.losses]}, max_norm {group['max_norm']}")


if __name__ == "__main__":
    main()
