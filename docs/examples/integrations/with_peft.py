"""Adapters of PEFT, on the head too, with a chunked loss and an optimizer of `st.optim`.

python docs/examples/integrations/with_peft.py
"""

from __future__ import annotations

from typing import Any

import peft
import torch
import transformers

import subtensors as st


def main() -> None:
    """Train adapters for some steps, take the changes back, and merge."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    base: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=199, **sizes))
    before = {name: p.detach().clone() for name, p in base.named_parameters()}
    model: Any = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "lm_head"]))
    applied = st.integrations.transformers.apply(model, "adamw", lr=1e-2, max_norm=1.0)
    tokens = torch.randint(199, (4, 24))
    losses = []
    for _ in range(20):
        result = model(input_ids=tokens, labels=tokens)
        result.loss.backward()
        applied.optimizer.step()
        applied.optimizer.zero_grad()
        losses.append(result.loss.item())
    now = {name.replace("base_layer.", ""): p for name, p in base.named_parameters() if "lora" not in name}
    frozen = all(torch.equal(p, before[name]) for name, p in now.items())
    applied.revert()
    merged = model.merge_and_unload()
    with torch.no_grad():
        found = merged(input_ids=tokens, labels=tokens).loss.item()
    print(f"logits {type(result.logits).__name__}, loss {losses[0]:.3f} -> {losses[-1]:.3f}, merged {found:.3f}")
    print(f"the base's weights while it trained: {'as they were' if frozen else 'changed'}")


if __name__ == "__main__":
    main()
