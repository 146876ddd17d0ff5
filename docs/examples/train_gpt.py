"""A byte-level GPT on documents of varying length, with every type: the training that `make demo` measures.

    python docs/examples/train_gpt.py --checkpoint out/gpt.pt                                          # CPU or one GPU
    torchrun --nproc-per-node 2 docs/examples/train_gpt.py --checkpoint out/gpt.pt                     # DDP
    torchrun --nproc-per-node 2 docs/examples/train_gpt.py --checkpoint out/gpt.pt --parallel fsdp     # FSDP2

Started again, it goes on from its checkpoint, bit by bit as if it had not ended, in any of the three ways.

- **PaddedTensor**: the trunk runs through `st.bucketed`, as one CUDA graph a bucket of lengths.
- **ChunkedTensor**: the hidden states that it returns are chunked, so that logits are taken in parts.
- **TensorList**: `st.optim.AdamW` clips and updates all parameters in fused kernels.
- **StaticAddressTensor**: the optimizer's state lies in an arena, whose memory an evaluation may use.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import subtensors as st
from demo.model import GPT, Size
from demo.text import IGNORED, Batches, corpus, parts, tokenized
from subtensors.bucketed.runner import Bucketed

HELD_OUT = 20
"""One document of so many is for the evaluation."""

BUCKETS = 8
"""Buckets of lengths at most."""


@dataclass(frozen=True)
class Plan:
    """What is trained, where and for how long.

    Args:
        size: of the model.
        batch: documents a step, of all processes together.
        steps: optimizer steps.
        device: "cpu" or "cuda".
        learning_rate: the largest; it rises for a tenth of the steps, and falls to zero along a cosine.
        token_bytes: 1 or 2 bytes a token.
        corpus_bytes: how much text.
        evaluation_batches: batches of the evaluation, at most.
        parallel: what several processes do, "ddp" or "fsdp".
        dtype: of the parameters.
        autocast: whether the forward runs under bfloat16 autocast; without effect on a CPU.
        seed: of the parameters and of the order of the documents.
    """

    size: Size
    batch: int
    steps: int
    device: str
    learning_rate: float
    token_bytes: int = 1
    corpus_bytes: int = 2 << 20
    evaluation_batches: int = 16
    parallel: str = "ddp"
    dtype: torch.dtype = torch.float32
    autocast: bool = True
    seed: int = 0


PLANS = {
    "cpu": Plan(Size(layers=4, width=128, heads=4, context=128), batch=8, steps=120, device="cpu", learning_rate=1e-3),
    "cuda": Plan(
        Size(layers=12, width=768, heads=12, context=512), batch=32, steps=300, device="cuda", learning_rate=3e-4
    ),
}


class Data:
    """The text of a plan, as batches to train on and batches to evaluate on.

    Args:
        plan: says how much text, in which tokens.
    """

    def __init__(self, plan: Plan) -> None:
        documents, self.vocabulary = tokenized(corpus(plan.corpus_bytes), plan.token_bytes)
        held_out = parts(documents[::HELD_OUT], plan.size.context)
        known = {part.numpy().tobytes() for part in held_out}
        training = [part for part in parts(documents, plan.size.context) if part.numpy().tobytes() not in known]
        self.training = Batches(training, plan.batch, plan.size.context, plan.seed)
        self.evaluation = Batches(held_out, plan.batch, plan.size.context, plan.seed)


class Loss(nn.Module):
    """The loss of a batch, a sum over its tokens times a factor.

    Args:
        model: next-token logits from (batch, length) tokens.
        longest: tokens of the longest row, where the trunk runs through `st.bucketed`; None for the plain trunk.
        autocast: whether the forward runs under bfloat16 autocast.
    """

    def __init__(self, model: GPT, longest: int | None, autocast: bool) -> None:
        super().__init__()
        self.model = model
        self.autocast = autocast
        self.run: Bucketed[..., Tensor] | None = None
        if longest is not None:
            length = st.Dim("length", max=longest, buckets=-(-longest // BUCKETS))
            self.run = st.bucketed(model.trunk, {"inputs": {1: length}})

    def forward(self, inputs: Tensor, targets: Tensor, factor: Tensor) -> Tensor:
        """Return the loss, a scalar.

        Args:
            inputs: (batch, length) int64.
            targets: (batch, length) int64, IGNORED beyond the end of a document.
            factor: of the sum; () float.
        """
        with torch.autocast(inputs.device.type, dtype=torch.bfloat16, enabled=self.autocast):
            logits = self.model(inputs) if self.run is None else self.model.logits(self.run(inputs))
        # In float32 at least; where logits are chunked, a chunk at a time.
        logits = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum") * factor


class Training:
    """A training run: what the next step depends on is in `state_dict`.

    Args:
        plan: the model, the data and the steps.
        data: of the plan.
        ours: False for the same training without this package.
        graph: whether optimizer steps are replays of a CUDA graph; None where there may be one.
    """

    def __init__(self, plan: Plan, data: Data, ours: bool = True, graph: bool | None = None) -> None:
        self.plan, self.data, self.steps = plan, data, 0
        self.rank, self.ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        if plan.batch % self.ranks:
            raise ValueError(f"a batch of {plan.batch} documents can't be divided among {self.ranks} processes")
        torch.manual_seed(plan.seed)
        self.model = GPT(plan.size, data.vocabulary, chunked=ours).to(plan.device, plan.dtype)
        self.sharded = self.ranks > 1 and plan.parallel == "fsdp"
        if self.sharded:
            mesh = init_device_mesh(plan.device, (self.ranks,))  # by default it is of GPUs wherever there are any
            for block in self.model.trunk.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(self.model, mesh=mesh, reshard_after_forward=False)  # a chunked head is gathered once a step
        self.arena: st.Arena | None = None
        self.optimizer = self._our_optimizer(graph) if ours else self._torch_optimizer()
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._rate)
        has_graphs = ours and not self.sharded  # FSDP2's collectives take place in the trunk
        autocast = plan.autocast and plan.device == "cuda"
        self.local_loss = Loss(self.model, plan.size.context if has_graphs else None, autocast)
        replicated = self.ranks > 1 and not self.sharded
        self.loss = nn.parallel.DistributedDataParallel(self.local_loss) if replicated else self.local_loss

    def _our_optimizer(self, graph: bool | None) -> torch.optim.Optimizer:
        on_gpu = self.plan.device == "cuda"
        if not self.sharded and (not on_gpu or (find_spec("cuda") and find_spec("cuda.bindings"))):
            self.arena = st.Arena(self.plan.device)
        return st.optim.AdamW(
            self.model.parameters(),
            lr=self.plan.learning_rate,
            max_norm=1.0,
            graph=(on_gpu and not self.sharded) if graph is None else graph,
            arena=self.arena,
        )

    def _torch_optimizer(self) -> torch.optim.Optimizer:
        fused = self.plan.device == "cuda" or None
        return torch.optim.AdamW(self.model.parameters(), lr=self.plan.learning_rate, fused=fused)

    def _rate(self, step: int) -> float:
        rising = max(1, self.plan.steps // 10)
        return min((step + 1) / rising, 0.5 * (1 + math.cos(math.pi * step / self.plan.steps)))

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of all processes."""
        return self.data.training[step]

    def step(self, around_update: AbstractContextManager[object] | None = None) -> float:
        """Make one update, and return the mean loss of its tokens, in nats.

        Args:
            around_update: entered for the optimizer's part, as a clock is.
        """
        self.optimizer.zero_grad()
        loss = self.forward_backward(*self.batch(self.steps))
        with around_update or nullcontext():
            self.update()
        self.steps += 1
        return self._mean(loss)

    def forward_backward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Add up gradients, and return this process's part of the loss times the count of processes."""
        tokens = int((targets != IGNORED).sum())
        loss: Tensor = self.loss(*self._own(inputs, targets), self._scalar(self.ranks / tokens))
        loss.backward()
        return loss.detach()

    def update(self) -> None:
        """Clip and step; an optimizer of `st.optim` clips in its step."""
        if not isinstance(self.optimizer, st.optim.Optimizer):
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the mean loss over held-out documents, in nats a token."""
        self.model.eval()
        total, tokens = self._scalar(0.0), 0
        with self.lent_memory():
            for place in range(min(self.plan.evaluation_batches, self.data.evaluation.per_epoch)):
                inputs, targets = self.data.evaluation[place]
                total += self.local_loss(*self._own(inputs, targets), self._scalar(float(self.ranks)))
                tokens += int((targets != IGNORED).sum())
        self.model.train()
        return self._mean(total) / tokens

    @contextmanager
    def lent_memory(self) -> Iterator[None]:
        """Release the memory of the optimizer's state inside the context."""
        if self.arena is None or not self.optimizer.state:
            yield
            return
        self.arena.release()
        try:
            yield
        finally:
            self.arena.restore()

    def state_dict(self) -> dict[str, object]:
        """Return what the next step depends on, in full on each process; graphs are captured anew."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        model, optimizer = get_state_dict(self.model, self.optimizer, options=options)
        return {"model": model, "optimizer": optimizer, "schedule": self.schedule.state_dict(), "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a return value of `state_dict`, of any number of processes."""
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=StateDictOptions(full_state_dict=True),
        )
        self.schedule.load_state_dict(state["schedule"])
        self.steps = state["steps"]

    def _own(self, *tensors: Tensor) -> list[Tensor]:
        """The rows of this process, on its device."""
        return [x[self.rank :: self.ranks].to(self.plan.device) for x in tensors]

    def _scalar(self, value: float) -> Tensor:
        return torch.tensor(value, dtype=torch.promote_types(self.plan.dtype, torch.float32), device=self.plan.device)

    def _mean(self, value: Tensor) -> float:
        """The mean over processes."""
        if self.ranks > 1:
            dist.all_reduce(value)
        return float(value) / self.ranks


def save(state: dict[str, object], path: Path) -> None:
    """Write a checkpoint so that there is a whole one at every moment: beside the last one, then in its place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".new")
    with beside.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def train(
    plan: Plan,
    checkpoint: Path | None,
    save_every: int = 50,
    until: int | None = None,
    show: Callable[[str], None] = print,
) -> tuple[list[float], float]:
    """Train, from the checkpoint if there is one.

    Args:
        plan: the model, the data and the steps.
        checkpoint: where it is; None for none.
        save_every: steps between two checkpoints.
        until: the step to end at; None for the plan's last.
        show: told what happened, by the first process.

    Returns:
        the loss of each step that was taken, and the loss of the evaluation.
    """
    training = Training(plan, Data(plan))
    say = show if training.rank == 0 else lambda line: None
    if checkpoint is not None and checkpoint.exists():
        training.load_state_dict(torch.load(checkpoint, map_location="cpu"))
        say(f"goes on after step {training.steps} of {checkpoint}")
    losses = []
    while training.steps < (plan.steps if until is None else until):
        losses.append(training.step())
        if training.steps % save_every == 0 or training.steps == (until or plan.steps):
            say(f"step {training.steps}: loss {losses[-1]:.4f} nats a token")
            if checkpoint is not None:
                state = training.state_dict()  # which all processes gather
                if training.rank == 0:
                    save(state, checkpoint)
    found = training.evaluate()
    say(f"held-out documents: {found:.4f} nats a token, {found / plan.token_bytes / math.log(2):.3f} bits a byte")
    if training.local_loss.run is not None:
        say(str(training.local_loss.run.stats()))
    return losses, found


@contextmanager
def processes(device: str) -> Iterator[None]:
    """Join the processes that `torchrun` started, if it did."""
    if "RANK" not in os.environ:
        yield
        return
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=timedelta(minutes=5))
    try:
        yield
    finally:
        dist.destroy_process_group()


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Train a byte-level GPT on documents of varying length.")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, help="optimizer steps of the plan")
    parser.add_argument("--until", type=int, help="end at this step, to go on another time")
    parser.add_argument("--checkpoint", type=Path, help="where to write it, and to go on from")
    parser.add_argument("--save-every", type=int, default=50, metavar="STEPS")
    parser.add_argument("--parallel", choices=["ddp", "fsdp"], default="ddp", help="what several processes do")
    options = parser.parse_args()
    plan = dataclasses.replace(PLANS[options.device], parallel=options.parallel)
    if options.steps is not None:
        plan = dataclasses.replace(plan, steps=options.steps)
    with processes(options.device):
        train(plan, options.checkpoint, options.save_every, options.until)


if __name__ == "__main__":
    main()
