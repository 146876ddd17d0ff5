"""TRL's trainers for SFT, DPO and GRPO, with scores of tokens that take logits in parts, and `st.optim`.

python docs/examples/integrations/with_trl.py --trainer grpo
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from typing import Any

import datasets
import torch
import transformers
import trl
from tokenizers import Tokenizer, models, pre_tokenizers

import subtensors as st

WORDS = [f"w{number}" for number in range(200)]


def tokenizer() -> Any:
    """A tokenizer of a few words; take your model's."""
    names = ["<pad>", "<s>", "</s>", *WORDS]
    inner = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def tiny_model() -> Any:
    """A tiny model with random weights; take one by `from_pretrained`."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(
        vocab_size=len(WORDS) + 3, pad_token_id=0, bos_token_id=1, eos_token_id=2, **sizes
    )
    return transformers.LlamaForCausalLM(config)


def words(count: int, seed: int) -> str:
    """Some words."""
    picked = torch.randint(len(WORDS), (count,), generator=torch.Generator().manual_seed(seed))
    return " ".join(WORDS[number] for number in picked)


def even(completion_ids: list[list[int]], **_: object) -> list[float]:
    """Reward completions for even tokens."""
    return [sum(token % 2 == 0 for token in row) / max(1, len(row)) for row in completion_ids]


def trainer_of(kind: str, folder: str, steps: int) -> Any:
    """Return a trainer as TRL makes it.

    Args:
        kind: "sft", "dpo" or "grpo".
        folder: where it writes.
        steps: of the optimizer.
    """
    options: dict[str, Any] = {
        "output_dir": folder,
        "max_steps": steps,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "max_grad_norm": 1.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "bf16": torch.cuda.is_available(),
        "disable_tqdm": True,
    }
    parts: dict[str, Any] = {"model": tiny_model(), "processing_class": tokenizer()}
    prompts = [{"prompt": words(4 + n % 3, n)} for n in range(16)]
    if kind == "sft":
        rows = [{**row, "completion": " " + words(6, n)} for n, row in enumerate(prompts)]
        return trl.SFTTrainer(args=trl.SFTConfig(**options), train_dataset=datasets.Dataset.from_list(rows), **parts)
    if kind == "dpo":
        rows = [{**r, "chosen": " " + words(6, n), "rejected": " " + words(6, -n)} for n, r in enumerate(prompts, 1)]
        parts["ref_model"] = copy.deepcopy(parts["model"])
        return trl.DPOTrainer(args=trl.DPOConfig(**options), train_dataset=datasets.Dataset.from_list(rows), **parts)
    given = trl.GRPOConfig(num_generations=4, max_completion_length=8, **options)
    return trl.GRPOTrainer(reward_funcs=even, args=given, train_dataset=datasets.Dataset.from_list(prompts), **parts)


def main() -> None:
    """Train for some steps."""
    parser = argparse.ArgumentParser(description="A trainer of TRL with chunked scores and an optimizer of st.optim.")
    parser.add_argument("--trainer", choices=["sft", "dpo", "grpo"], default="sft")
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    transformers.set_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(options.trainer, folder, options.steps)
        st.integrations.transformers.apply_to_trainer(trainer, "adamw")  # the line that is new
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        print(f"{options.trainer}: losses {losses}, by {type(trainer.optimizer.optimizer).__module__}")


if __name__ == "__main__":
    main()
