"""A causal language model whose head is sharded over processes trains as it does on one, with what is applied to it.

Truth is the plain model in float64 on one process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tiny_causal_lms import causal_lm
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from two_ranks import on_two_ranks

import subtensors as st

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
apply = st.integrations.transformers.apply

IDS = torch.randint(3, 211, (2, 12), generator=torch.Generator().manual_seed(3))
LABELS = IDS.masked_fill(IDS % 5 == 0, -100)

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "untied": ("Llama", {"num_key_value_heads": 2, "tie_word_embeddings": False}),
    "tied": ("Llama", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "softcapped": ("Gemma2", {"num_key_value_heads": 2, "tie_word_embeddings": False}),
}


def model(name: str) -> Any:
    family, options = MODELS[name]
    return causal_lm(family, torch.float64, **options)


def by_a_plan(name: str, folder: Path) -> nn.Module:
    """Sharded by the plan of transformers, as a model is loaded."""
    rank = dist.get_rank()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    mesh = init_device_mesh("cpu", (2,))
    load = transformers.AutoModelForCausalLM.from_pretrained
    found: nn.Module = load(folder / name, tp_plan="auto", device_mesh=mesh, dtype=torch.float64).train()
    return found


def by_hand(style: Callable[[], ColwiseParallel]) -> Callable[[str, Path], nn.Module]:
    """A head that `parallelize_module` shards."""

    def make(name: str, folder: Path) -> nn.Module:
        out: nn.Module = model(name)
        return parallelize_module(out, init_device_mesh("cpu", (2,)), {"lm_head": style()})

    return make


WAYS: Mapping[str, tuple[Callable[[str, Path], nn.Module], tuple[str, ...]]] = {
    "a plan of transformers": (by_a_plan, tuple(MODELS)),
    "gathered logits": (by_hand(lambda: ColwiseParallel(output_layouts=Replicate())), ("untied", "softcapped")),
    "logits that stay": (
        by_hand(lambda: ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)),
        ("untied",),
    ),
}


def measured(of: nn.Module) -> dict[str, Tensor]:
    """The loss without gradients, the loss with them, and the gradients, each whole."""
    with torch.no_grad():
        before = of.eval()(input_ids=IDS, labels=LABELS).loss
    loss = of.train()(input_ids=IDS, labels=LABELS).loss
    loss.backward()
    found = {name: p.grad for name, p in of.named_parameters() if p.grad is not None}
    return {
        "evaluated": before,
        "loss": loss.detach(),
        **{name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in found.items()},
    }


def every_way(folder: Path) -> None:
    for way, (make, names) in WAYS.items():
        for name in names:
            sharded = make(name, folder)
            applied = apply(sharded, "sgd", loss={"rows": 4}, lr=0.1)
            logits = sharded(input_ids=IDS, labels=LABELS).logits
            assert isinstance(logits, st.ChunkedTensor), way
            torch.testing.assert_close(
                measured(sharded), measured(model(name)), msg=lambda text, at=(way, name): f"{at}: {text}"
            )
            assert applied.optimizer is not None
            applied.optimizer.step()
            applied.revert()


def test_loss_and_gradients_of_a_sharded_head_are_those_of_the_whole_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # transformers would put each rank on a GPU of its own
    for name in MODELS:
        model(name).save_pretrained(tmp_path / name)
    on_two_ranks(every_way, tmp_path)
