"""Torchtitan's loss and optimizer container by configurations that build ours, as its trainer uses them.

    python docs/examples/integrations/with_torchtitan.py

In a recipe of torchtitan the two lines are fields of `Trainer.Config`: `loss=` and `optimizer=`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torchtitan_components import loss as chunked_loss
from torchtitan_components import optimizer as optimizer_of


class Decoder(nn.Module):
    """A tiny decoder; like torchtitan's, it leaves its head to a chunked loss."""

    def __init__(self, vocabulary: int = 199, width: int = 32) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocabulary, width)
        self.layer = nn.Linear(width, width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self._skip_lm_head = False

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits, or hidden states for a loss that has the head."""
        hidden = torch.tanh(self.layer(self.tok_embeddings(tokens)))
        result: Tensor = hidden if self._skip_lm_head else self.lm_head(hidden)
        return result


def main() -> None:
    """Train for some steps, and go on from the container's state."""
    torch.manual_seed(0)
    loss_config: Any = chunked_loss(memory_limit="1MiB")
    optimizer_config: Any = optimizer_of("adamw", lr=1e-2, max_norm=1.0)

    model = Decoder()
    loss = loss_config.build(compile_config=None)
    loss.set_lm_head(model.lm_head)  # the trainer does this, and the next line
    model._skip_lm_head = True
    optimizers = optimizer_config.build(model_parts=[model])
    tokens = torch.randint(199, (4, 65))
    found = []
    for _ in range(10):
        optimizers.zero_grad()
        value, _ = loss(model(tokens[:, :-1]), tokens[:, 1:], torch.tensor(256.0))
        value.backward()
        optimizers.step()
        found.append(value.item())
    print(f"loss {found[0]:.3f} -> {found[-1]:.3f}, by {type(optimizers.optimizers[0]).__module__}")
    print(f"{len(optimizers.state_dict())} entries of state by parameters' names")


if __name__ == "__main__":
    main()
