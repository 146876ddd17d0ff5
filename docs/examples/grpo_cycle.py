"""GRPO on one GPU that it shares: sample, learn, give the memory away, take it back, and go on bit by bit the same.

    python docs/examples/grpo_cycle.py --cycles 3

A cycle has every type in it:

    prompts -> run.generate (PaddedTensor: one CUDA graph a bucket) -> completions -> rewards, advantages
            -> trunk -> st.chunk(hidden) -> log-probabilities and entropies, never the logits (ChunkedTensor)
            -> st.optim.AdamW, one graph replay (TensorList)
            -> arena.release() -> another program uses the memory -> arena.restore() (StaticAddressTensor)

Parameters and the optimizer's state lie in the arena. Graphs that were captured over them stay valid.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import subtensors as st


@dataclass(frozen=True)
class Plan:
    """The sizes of the model that is trained, and of its batches.

    Args:
        config: of the model, whose weights are random.
        device: "cpu" or "cuda".
        dtype: of the parameters; the optimizer keeps masters of those in 16 bits.
        prompts: prompts a cycle.
        completions: sampled for each prompt.
        prompt_tokens: of the longest prompt; the shortest has a quarter.
        new_tokens: of the longest completion.
        bucket: lengths of prompts are rounded up to a multiple of it.
        entropy_bonus: its weight in the loss.
        clip: how far the ratio of probabilities counts.
        learning_rate: constant.
        seed: of weights, prompts and samples.
    """

    config: transformers.PretrainedConfig
    device: str
    dtype: torch.dtype = torch.float32
    prompts: int = 4
    completions: int = 8
    prompt_tokens: int = 256
    new_tokens: int = 256
    bucket: int = 64
    entropy_bonus: float = 0.01
    clip: float = 0.2
    learning_rate: float = 1e-5
    seed: int = 0


def plan_on(device: str) -> Plan:
    """Return the plan of a device: the shapes of Qwen3-1.7B on a GPU, a tiny model on a CPU."""
    tokens: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": True}
    if device == "cpu":
        tiny: dict[str, Any] = {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
        }
        config = transformers.Qwen3Config(vocab_size=199, num_key_value_heads=1, head_dim=16, **tiny, **tokens)
        return Plan(config, "cpu", prompts=2, completions=4, prompt_tokens=24, new_tokens=8, bucket=8)
    large: dict[str, Any] = {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
    }
    config = transformers.Qwen3Config(vocab_size=151936, num_key_value_heads=8, head_dim=128, **large, **tokens)
    return Plan(config, device, dtype=torch.bfloat16)


@dataclass
class Cycle:
    """The measurements of one cycle.

    Args:
        reward: mean over completions.
        loss: of the update.
        seconds: of each part.
        freed_bytes: more of the device's memory that was free while it was lent, as nvidia-smi counts; on a CPU, the
            arena's.
        lent_bytes: that another program filled.
    """

    reward: float
    loss: float
    seconds: dict[str, float] = field(default_factory=dict)
    freed_bytes: int = 0
    lent_bytes: int = 0

    @contextmanager
    def part(self, name: str, device: str) -> Iterator[None]:
        """Take the time of a part."""
        synchronize(device)
        started = time.perf_counter()
        yield
        synchronize(device)
        self.seconds[name] = time.perf_counter() - started


def synchronize(device: str) -> None:
    """Wait until the device has done what it was given."""
    if device != "cpu":
        torch.cuda.synchronize()


class Job:
    """A training by GRPO whose parameters and optimizer's state lie in an arena.

    Args:
        plan: what is trained.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan, self.cycles = plan, 0
        self.model = new_model(plan)
        self.arena = st.Arena(plan.device)
        into_arena(self.model, self.arena)
        self.optimizer = st.optim.AdamW(
            self.model.parameters(),
            lr=plan.learning_rate,
            max_norm=1.0,
            master_weights=plan.dtype != torch.float32,
            arena=self.arena,
            graph=True,
        )
        longest = plan.prompt_tokens + plan.new_tokens
        self.run = st.bucketed(self.model, {"input_ids": {1: st.Dim("seq", max=longest, buckets=plan.bucket)}})

    def cycle(self, lend: Callable[[int], int] | None = None) -> Cycle:
        """Sample, learn, and give the memory away for a while.

        Args:
            lend: has another program use so many bytes, and returns how many it used; None to keep the memory.
        """
        device = self.plan.device
        found = Cycle(0.0, 0.0)
        with found.part("generate", device):
            groups = self.sample()
        with found.part("update", device):
            rewards = torch.stack([reward(*group) for group in groups])
            found.reward = float(rewards.mean())
            found.loss = self.update(groups, advantages(rewards))
        if lend is not None:
            before = free_bytes(device)
            with found.part("release", device):
                self.optimizer.zero_grad()
                self.arena.release()
                if device != "cpu":
                    torch.cuda.empty_cache()
            found.freed_bytes = self.arena.used if device == "cpu" else free_bytes(device) - before
            found.lent_bytes = lend(found.freed_bytes)
            with found.part("restore", device):
                self.arena.restore()
        self.cycles += 1
        return found

    def sample(self) -> list[tuple[Tensor, Tensor]]:
        """Return for each prompt the sequences of prompt and completion, and which tokens are new ones.

        Both are (completions, length). Random numbers depend on the seed and the count of cycles alone.
        """
        plan = self.plan
        draw = random.Random(plan.seed + self.cycles)
        torch.manual_seed(plan.seed + self.cycles)
        groups = []
        for _ in range(plan.prompts):
            length = draw.randint(plan.prompt_tokens // 4, plan.prompt_tokens)
            prompt = torch.randint(3, plan.config.vocab_size, (1, length)).to(plan.device)
            sequences = self.run.generate(
                prompt.expand(plan.completions, -1),
                attention_mask=torch.ones_like(prompt).expand(plan.completions, -1),
                max_new_tokens=plan.new_tokens,
                do_sample=True,
                top_k=0,
                pad_token_id=plan.config.pad_token_id,
            )
            is_end = (sequences[:, length:] == plan.config.eos_token_id).long()
            is_new = is_end.cumsum(1) - is_end == 0  # up to the first end, which is sampled, too
            groups.append((sequences, F.pad(is_new, (length, 0))))
        return groups

    def update(self, groups: list[tuple[Tensor, Tensor]], advantage: Tensor) -> float:
        """Make one step of the optimizer, of the gradients of all prompts, and return the loss.

        Args:
            groups: what `sample` returned.
            advantage: (prompts, completions).
        """
        self.optimizer.zero_grad()
        count = torch.stack([is_new.sum() for _, is_new in groups]).sum()
        total = torch.zeros((), device=self.plan.device)
        for (sequences, is_new), of_rows in zip(groups, advantage, strict=True):
            hidden = self.model.model(input_ids=sequences, use_cache=False).last_hidden_state
            loss = self.loss(hidden[:, :-1], sequences[:, 1:], is_new[:, 1:], of_rows[:, None]) / count
            loss.backward()
            total += loss.detach()
        self.optimizer.step()
        return float(total)

    def loss(self, hidden: Tensor, tokens: Tensor, mask: Tensor, advantage: Tensor) -> Tensor:
        """Return the loss of GRPO with an entropy bonus, a sum over tokens.

        Args:
            hidden: (rows, length, width).
            tokens: (rows, length), the ones that follow.
            mask: (rows, length), True where they were sampled.
            advantage: (rows, 1).
        """
        sampled, entropy = self.scores(hidden, tokens)
        ratio = torch.exp(sampled - sampled.detach())  # one update for each sample: the old policy is this one
        gain = torch.minimum(ratio * advantage, ratio.clamp(1 - self.plan.clip, 1 + self.plan.clip) * advantage)
        total: Tensor = ((gain + self.plan.entropy_bonus * entropy) * mask).sum()
        return -total

    def scores(self, hidden: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return each token's log-probability, and the entropy of the choice; the logits are taken in parts."""
        log_probs = self.model.lm_head(st.chunk(hidden, dim=1)).float().log_softmax(-1)
        return log_probs.gather(-1, tokens[..., None]).squeeze(-1), -(log_probs.exp() * log_probs).sum(-1)


def new_model(plan: Plan) -> Any:
    """Return the model of a plan, the same each time."""
    torch.manual_seed(plan.seed)
    with torch.device(plan.device):
        model: Any = transformers.AutoModelForCausalLM.from_config(plan.config)  # type: ignore[no-untyped-call]
    return model.to(plan.dtype).eval()


def into_arena(model: nn.Module, arena: st.Arena) -> None:
    """Move a model's parameters into an arena, those that modules share once."""
    moved: dict[int, Tensor] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in moved:
                moved[id(parameter)] = arena.static(parameter)
            setattr(module, name, moved[id(parameter)])


def reward(sequences: Tensor, is_new: Tensor) -> Tensor:
    """Return a reward a row that a program can check: the part of its new tokens that are even numbers."""
    return ((sequences % 2 == 0) & is_new).sum(1) / is_new.sum(1)


def advantages(rewards: Tensor) -> Tensor:
    """Return how much better each completion is than the others of its prompt, in standard deviations.

    Args:
        rewards: (prompts, completions).
    """
    return (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)


def free_bytes(device: str) -> int:
    """Return the device's free memory, as nvidia-smi counts."""
    return 0 if device == "cpu" else torch.cuda.mem_get_info()[0]


BORROWER = """
import sys, torch
device, size = sys.argv[1], int(sys.argv[2])
x = torch.full((size,), 1, dtype=torch.uint8, device=device)
assert int(x[::4096].sum(dtype=torch.int64)) == len(x[::4096])
"""
CONTEXT_BYTES = 1 << 30
"""Of a second program on a GPU, beside its tensors."""


def to_another_program(device: str) -> Callable[[int], int]:
    """Return a function that has a process of its own fill so many bytes of the device, and end."""

    def lend(size: int) -> int:
        used = size if device == "cpu" else max(0, size - CONTEXT_BYTES)
        subprocess.run([sys.executable, "-c", BORROWER, device, str(used)], check=True)
        return used

    return lend


def digest(job: Job) -> list[int]:
    """Return numbers that another bit in the parameters or the optimizer's state would change."""
    tensors = [*job.model.parameters(), *(x for s in job.optimizer.state.values() for x in s.values())]
    found = []
    for x in tensors:
        if isinstance(x, Tensor):
            for part in x.detach().reshape(-1).view(torch.uint8).split(1 << 24):
                found.append(int((part * torch.arange(1, 2 * len(part), 2, device=part.device)).sum()))
    return found


def main() -> None:
    """Run cycles with lent memory, and the same ones without, and compare them bit by bit."""
    parser = argparse.ArgumentParser(description="GRPO whose memory is lent to another program after each update.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cycles", type=int, default=3)
    options = parser.parse_args()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)  # or two runs that never sleep may differ, too
    plan = plan_on(options.device)
    digests: list[list[list[int]]] = []
    for lend in (to_another_program(options.device), None):
        job, of_run = Job(plan), []
        for number in range(options.cycles):
            found = job.cycle(lend)
            of_run.append(digest(job))
            parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in found.seconds.items())
            memory = f"; {found.freed_bytes / 2**20:.1f} MiB free, {found.lent_bytes / 2**20:.1f} lent" if lend else ""
            total = sum(found.seconds.values())
            print(f"cycle {number}: reward {found.reward:.3f}, loss {found.loss:.4f}; {total:.2f} s ({parts}){memory}")
        digests.append(of_run)
        del job
        if options.device != "cpu":
            torch.cuda.empty_cache()
    same = digests[0] == digests[1]
    print(f"bit by bit what it is without lending: {'yes' if same else 'no'}")
    sys.exit(not same)


if __name__ == "__main__":
    main()
