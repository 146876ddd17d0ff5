"""A Trainer's training step as a bucketed program: what it logs, how often it replays, and what keeps it plain."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from pretend_graphs import pretend
from tiny_causal_lms import VOCABULARY, causal_lm
from torch import Tensor

import subtensors as st

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("own_environment")]
apply_to_trainer = st.integrations.transformers.apply_to_trainer

STEPS = 20
SEQ = st.Dim("seq", max=64, buckets=16)


class Rows(torch.utils.data.Dataset[Tensor]):
    """Sequences of many lengths."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Tensor:
        return (torch.arange(5 + index * 7 % 27) * (index + 1)) % (VOCABULARY - 3) + 3


def collate(rows: list[Tensor]) -> dict[str, Tensor]:
    """A batch as long as its longest row."""
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def trainer_in(folder: Path, kind: Any = transformers.Trainer, callback: Any = None, **arguments: Any) -> Any:
    transformers.set_seed(0)
    given = transformers.TrainingArguments(
        **{
            "output_dir": str(folder),
            "max_steps": STEPS,
            "save_strategy": "no",
            "per_device_train_batch_size": 3,
            "learning_rate": 1e-2,
            "weight_decay": 0.1,
            "max_grad_norm": 0.5,
            "lr_scheduler_type": "cosine",
            "logging_steps": 1,
            "report_to": [],
            "use_cpu": True,
            "disable_tqdm": True,
            **arguments,
        }
    )
    out = kind(model=causal_lm(), args=given, train_dataset=Rows(), eval_dataset=Rows(), data_collator=collate)
    out.remove_callback(transformers.PrinterCallback)
    if callback is not None:
        out.add_callback(callback)
    return out


def logged(trainer: Any) -> dict[str, list[float]]:
    names = ("loss", "grad_norm", "learning_rate", "eval_loss")
    return {name: [float(entry[name]) for entry in trainer.state.log_history if name in entry] for name in names}


WAYS: dict[str, dict[str, Any]] = {
    "clipped": {},
    "evaluated in between": {"eval_strategy": "steps", "eval_steps": 7, "max_grad_norm": 0.0},
    "accumulated": {"gradient_accumulation_steps": 3},  # 14 batches an epoch: the last step of each has two
    "smoothed": {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2},
    "checkpointed": {"gradient_checkpointing": True},
}


@pytest.mark.parametrize("way", WAYS)
def test_twenty_steps_log_what_the_trainer_alone_logs_and_are_replays(way: str, tmp_path: Path) -> None:
    trainers = [trainer_in(tmp_path, **WAYS[way]) for _ in range(2)]
    applied = apply_to_trainer(trainers[0], "adamw", buckets=SEQ, loss={"rows": 4})
    for trainer in trainers:
        trainer.train()
    ours, theirs = map(logged, trainers)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=0)
    assert len(ours["grad_norm"]) == STEPS
    stats = trainers[0].training_step.run.stats()
    assert {bucket.sizes["seq"] for bucket in stats.buckets} == {16, 32}
    batches = {"accumulated": 56, "smoothed": 40}.get(way, STEPS)
    assert (stats.calls, stats.fallbacks, stats.not_checked) == (batches, {}, {})
    assert stats.hits == batches - len(stats.buckets)
    applied.revert()
    assert "training_step" not in vars(trainers[0])
    assert "clip_grad_norm_" not in vars(trainers[0].accelerator)


@pytest.mark.parametrize("passes", [1, 3])
def test_graphs_of_steps_add_up_gradients_and_take_them(
    passes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The numbers of an optimizer are handed to the replays of a GPU alone.
    arguments = {"gradient_accumulation_steps": passes, "lr_scheduler_type": "constant", "max_steps": 12}
    theirs = trainer_in(tmp_path, **arguments)
    theirs.train()
    pretend(monkeypatch, trained=True)
    ours = trainer_in(tmp_path, **arguments)
    apply_to_trainer(ours, "adamw", buckets=SEQ)
    ours.train()
    torch.testing.assert_close(logged(ours), logged(theirs), rtol=1e-4, atol=0)
    stats = ours.training_step.run.stats()
    assert (stats.mode, stats.fallbacks) == ("graphs", {})
    assert stats.hits == stats.calls - len(stats.buckets) > 0


@pytest.mark.parametrize("passes", [1, 2])
def test_a_run_in_buckets_that_resumes_ends_where_it_would_have(passes: int, tmp_path: Path) -> None:
    ends = []
    for checkpoint in (None, str(tmp_path / "checkpoint-3")):
        arguments = {"save_strategy": "steps", "save_steps": 3, "max_steps": 6, "gradient_accumulation_steps": passes}
        trainer = trainer_in(tmp_path, **arguments)
        apply_to_trainer(trainer, "adamw", buckets=SEQ)
        trainer.train(resume_from_checkpoint=checkpoint)
        assert trainer.training_step.run.stats().calls == passes * (6 if checkpoint is None else 3)
        ends.append([p.detach() for p in trainer.model.parameters()])
    torch.testing.assert_close(*ends, rtol=1e-5, atol=1e-6)


class Counting(transformers.Trainer):  # type: ignore[misc, name-defined]
    """A Trainer that does something of its own in Python."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)


class Preparing(transformers.Trainer):  # type: ignore[misc, name-defined]
    """Another."""

    def _prepare_inputs(self, inputs: Any) -> Any:
        return super()._prepare_inputs(inputs)


class Scaling(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    """Changes gradients before the step."""

    def on_pre_optimizer_step(self, *args: Any, model: Any, **kwargs: Any) -> None:
        for p in model.parameters():
            p.grad.mul_(0.1)


class Freezing(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    """Trains the embedding up to a step, or from one."""

    def __init__(self, is_first: bool) -> None:
        self.is_first = is_first

    def on_step_begin(self, args: Any, state: Any, control: Any, *, model: Any, **kwargs: Any) -> None:
        model.get_input_embeddings().weight.requires_grad_((state.global_step < 4) == self.is_first)


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("is_first", [True, False], ids=["frozen", "unfrozen"])
def test_parameters_that_are_frozen_during_training_stay_and_the_norm_is_of_the_others(
    is_first: bool, passes: int, tmp_path: Path
) -> None:
    trainers = [trainer_in(tmp_path, gradient_accumulation_steps=passes, max_steps=8) for _ in range(2)]
    apply_to_trainer(trainers[0], "adamw", buckets=SEQ)
    for trainer in trainers:
        trainer.add_callback(Freezing(is_first))
        trainer.train()
    torch.testing.assert_close(*map(logged, trainers), rtol=1e-4, atol=0)
    assert trainers[0].training_step.run.stats().calls == 8 * passes


def test_a_step_whose_groups_are_empty_but_one_is_a_replay(tmp_path: Path) -> None:
    trainers = [trainer_in(tmp_path, max_steps=6) for _ in range(2)]
    apply_to_trainer(trainers[0], "adamw", buckets=SEQ)
    for trainer in trainers:
        for p in trainer.model.parameters():
            p.requires_grad_(p.ndim > 1)
        trainer.train()
    assert [len(group["params"]) > 0 for group in trainers[0].optimizer.param_groups] == [True, False]
    torch.testing.assert_close(*map(logged, trainers), rtol=1e-4, atol=0)
    assert trainers[0].training_step.run.stats().hits > 0


PLAIN: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a loss of its own": ({"kind": Counting}, {"optimizer": "adamw"}, "Counting has a compute_loss of its own"),
    "inputs of its own": ({"kind": Preparing}, {"optimizer": "adamw"}, "Preparing has a _prepare_inputs of its own"),
    "a callback": ({"callback": Scaling()}, {"optimizer": "adamw"}, "a callback looks at gradients"),
    "compiled": ({}, {"optimizer": "adamw", "compile": {"backend": "eager"}}, "layers are compiled"),
    "another optimizer": ({}, {}, "none of st.optim"),
    "whole matrices": ({}, {"optimizer": "muon"}, "learning rate of a matrix optimizer"),
    "clipped by the trainer": ({}, {"optimizer": "adamw", "max_norm": None}, "clips gradients between"),
    "accumulating": ({}, {"optimizer": "adamw", "accumulate": 2}, "accumulates gradients itself"),
}


@pytest.mark.parametrize("case", PLAIN)
def test_a_step_that_no_graph_can_be_is_taken_as_it_was_and_the_log_says_so_once(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    arguments, options, reason = PLAIN[case]
    trainer = trainer_in(tmp_path, max_steps=3, **arguments)
    apply_to_trainer(trainer, buckets=SEQ, **options)
    with caplog.at_level(logging.WARNING, "subtensors.integrations"):
        trainer.train()
    found = [record.getMessage() for record in caplog.records if record.name == "subtensors.integrations"]
    assert len(found) == 1
    assert reason in found[0]
    assert trainer.training_step.run is None
