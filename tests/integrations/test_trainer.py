"""A Trainer of transformers trains, evaluates, predicts and resumes as it did, with what is applied to it."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from optim_oracle import flat
from reordered_sums import orders
from tiny_causal_lms import VOCABULARY, causal_lm
from torch import Tensor

import subtensors as st

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("own_environment")]
apply_to_trainer = st.integrations.transformers.apply_to_trainer
OPTIMIZERS = st.integrations.transformers.OPTIMIZERS

STEPS = 6


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Sequences, some of whose labels don't count."""

    def __init__(self, count: int = 32) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = (torch.arange(11) * (index + 1)) % (VOCABULARY - 3) + 3
        labels = row.clone()
        labels[: index % 4] = -100
        return {"input_ids": row, "labels": labels, "attention_mask": torch.ones_like(row)}


def trainer_in(folder: Path, dtype: torch.dtype = torch.float32, **arguments: Any) -> Any:
    """A Trainer of a tiny Llama that clips, decays weights, follows a schedule and adds up two batches a step."""
    transformers.set_seed(0)
    given = transformers.TrainingArguments(
        **{
            "output_dir": str(folder),
            "max_steps": STEPS,
            "save_steps": STEPS // 2,
            "per_device_train_batch_size": 4,
            "per_device_eval_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "learning_rate": 1e-2,
            "weight_decay": 0.1,
            "max_grad_norm": 0.05,
            "lr_scheduler_type": "cosine",
            "logging_steps": 1,
            "report_to": [],
            "use_cpu": True,
            "disable_tqdm": True,
            **arguments,
        }
    )
    model = causal_lm("Llama", dtype, tie_word_embeddings=True)
    trainer = transformers.Trainer(model=model, args=given, train_dataset=Rows(), eval_dataset=Rows(10))
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def logged(trainer: Any, name: str) -> list[float]:
    """A number of each step."""
    return [float(entry[name]) for entry in trainer.state.log_history if name in entry]


def weights(trainer: Any) -> list[Tensor]:
    return [p.detach().clone() for p in trainer.model.parameters()]


@functools.cache
def alone(smoothing: float) -> tuple[Any, Tensor, float]:
    """A Trainer by itself that has trained, its weights in float64, and how far from those others may be."""
    with tempfile.TemporaryDirectory() as name:
        folder, arguments = Path(name), {"label_smoothing_factor": smoothing, "save_strategy": "no"}
        exact = trainer_in(folder, torch.float64, **arguments)
        exact.train()
        truth, errors, trainers = flat(weights(exact)), [], []
        for order in orders():
            trainers.append(trainer_in(folder, **arguments))
            with order:
                trainers[-1].train()
            errors.append(float((flat(weights(trainers[-1])) - truth).norm()))
    # Adam divides by the size of a gradient, so where that is nearly zero its rounding decides the step.
    return trainers[0], truth, 3 * max(errors) + torch.finfo(torch.float32).eps * float(truth.norm())


WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "smoothed": ({"label_smoothing_factor": 0.1}, {}),
    "compiled and checkpointed": ({"gradient_checkpointing": True}, {"compile": {"backend": "eager"}}),
    "bucketed": ({}, {"buckets": st.Dim("seq", max=64, buckets=16)}),
    "compiled by the trainer": ({"torch_compile": True, "torch_compile_backend": "aot_eager"}, {}),
}


@pytest.mark.parametrize("way", [*list(WAYS)[:4], pytest.param("compiled by the trainer", marks=pytest.mark.slow)])
def test_training_evaluation_and_prediction_are_those_of_the_trainer_alone(way: str, tmp_path: Path) -> None:
    arguments, options = WAYS[way]
    ours, (theirs, truth, allowed) = (
        trainer_in(tmp_path, **arguments),
        alone(arguments.get("label_smoothing_factor", 0)),
    )
    applied = apply_to_trainer(ours, "adamw", loss={"rows": 4}, **options)
    ours.train()
    assert float((flat(weights(ours)) - truth).norm()) <= allowed
    assert isinstance(ours.optimizer.optimizer, st.optim.AdamW)
    assert [group["weight_decay"] for group in ours.optimizer.param_groups] == [0.1, 0.0]
    for name in ("loss", "grad_norm", "learning_rate"):
        torch.testing.assert_close(logged(ours, name), logged(theirs, name), rtol=1e-4, atol=0)
        assert len(logged(ours, name)) == STEPS
    assert ours.evaluate()["eval_loss"] == pytest.approx(theirs.evaluate()["eval_loss"], rel=1e-4)
    predicted = ours.predict(Rows(5)).predictions
    assert predicted.shape == (5, 11, VOCABULARY)
    torch.testing.assert_close(predicted, theirs.predict(Rows(5)).predictions, rtol=1e-3, atol=1e-4)
    if "buckets" in options:
        assert ours.model.model.forward.run.stats().calls >= 5
    applied.revert()
    assert "forward" not in vars(ours.model.model)


@pytest.mark.parametrize("optimizer", ["adamw", "lion", "muon"])
def test_a_run_that_resumes_from_a_checkpoint_ends_bit_by_bit_where_it_would_have(
    optimizer: str, tmp_path: Path
) -> None:
    ends = []
    for checkpoint in (None, str(tmp_path / f"checkpoint-{STEPS // 2}")):
        trainer = trainer_in(tmp_path)
        apply_to_trainer(trainer, optimizer, loss={"rows": 4})
        trainer.train(resume_from_checkpoint=checkpoint)
        assert trainer.state.global_step == STEPS
        ends.append((weights(trainer), trainer.optimizer.state_dict()["state"]))
    torch.testing.assert_close(*ends, rtol=0, atol=0)


def test_gradients_are_clipped_once_and_their_norm_is_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_in(tmp_path, save_strategy="no", max_steps=2, learning_rate=1.0)
    applied = apply_to_trainer(trainer, "sgd")
    clipped: list[object] = []
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *args, **kwargs: clipped.append(args))
    norms: list[Tensor] = []

    trainer.create_optimizer().register_step_pre_hook(
        lambda *given: norms.append(st.total_norm([p.grad for p in trainer.model.parameters()]))
    )
    trainer.train()
    assert clipped == []
    assert {group["max_norm"] for group in trainer.optimizer.param_groups} == {0.05}
    assert trainer.args.max_grad_norm == 0.05
    assert min(norms) > 0.05
    assert logged(trainer, "grad_norm") == pytest.approx([float(norm) for norm in norms])
    applied.revert()
    assert trainer.args.max_grad_norm == 0.05
    assert "clip_grad_norm_" not in vars(trainer.accelerator)
    assert trainer.optimizer_cls_and_kwargs is None


@pytest.mark.parametrize("clip", [0.02, 0.0])
def test_what_the_arguments_of_a_trainer_say_when_it_trains_counts(clip: float, tmp_path: Path) -> None:
    trainers = [trainer_in(tmp_path, save_strategy="no", max_steps=3) for _ in range(2)]
    apply_to_trainer(trainers[0], "adamw")
    for trainer in trainers:
        trainer.args.learning_rate, trainer.args.adam_beta2, trainer.args.max_grad_norm = 3e-3, 0.9, clip
        trainer.train()
    for name in ("loss", "grad_norm", "learning_rate"):
        torch.testing.assert_close(logged(trainers[0], name), logged(trainers[1], name), rtol=1e-4, atol=0)
    torch.testing.assert_close(*map(weights, trainers), rtol=1e-3, atol=1e-5)
    assert trainers[0].optimizer.param_groups[0]["max_norm"] == (clip or None)


def test_a_run_that_resumes_clips_as_its_own_arguments_say(tmp_path: Path) -> None:
    ends = []
    for ours in (True, False):
        for clip in (0.05, 1e-3):
            trainer = trainer_in(tmp_path, torch.float64, max_grad_norm=clip)
            applied = apply_to_trainer(trainer, "adamw") if ours else None
            trainer.train(resume_from_checkpoint=None if clip == 0.05 else str(tmp_path / f"checkpoint-{STEPS // 2}"))
        ends.append(weights(trainer))
        assert torch.load(tmp_path / f"checkpoint-{STEPS}/training_args.bin", weights_only=False).max_grad_norm == clip
        if applied:
            assert {group["max_norm"] for group in trainer.optimizer.param_groups} == {1e-3}
            applied.revert()
            assert {group["max_norm"] for group in trainer.optimizer.param_groups} == {None}
    torch.testing.assert_close(*ends, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_model_of_each_training_of_a_trainer_with_model_init_is_changed(optimizer: str, tmp_path: Path) -> None:
    given = trainer_in(tmp_path, save_strategy="no", max_steps=2)
    trainer = transformers.Trainer(model_init=lambda: causal_lm(), args=given.args, train_dataset=Rows())
    first = trainer.model
    applied = apply_to_trainer(trainer, optimizer)
    trainer.train()
    assert trainer.model is not first
    assert len(trainer.model.get_output_embeddings()._forward_pre_hooks) == 1
    assert not first.get_output_embeddings()._forward_pre_hooks
    trainer.create_accelerator_and_postprocess()  # as a search over hyperparameters does
    assert "clip_grad_norm_" in vars(trainer.accelerator)
    applied.revert()
    assert not trainer.model.get_output_embeddings()._forward_pre_hooks
    assert not {"clip_grad_norm_"} & {*vars(trainer.accelerator)}
    assert not {"call_model_init", "create_accelerator_and_postprocess"} & {*vars(trainer)}


def test_a_trainer_that_makes_another_optimizer_clips_as_it_did(tmp_path: Path) -> None:
    class Own(transformers.Trainer):  # type: ignore[misc, name-defined]
        def create_optimizer(self, model: Any = None) -> Any:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
            return self.optimizer

    ends = []
    for ours in (True, False):
        given = trainer_in(tmp_path, save_strategy="no", max_steps=2)
        trainer = Own(model=given.model, args=given.args, train_dataset=Rows())
        if ours:
            apply_to_trainer(trainer, "adamw")
        trainer.train()
        ends.append(weights(trainer))
    torch.testing.assert_close(*ends)


def test_a_callback_finds_gradients_that_are_clipped_and_may_change_them(tmp_path: Path) -> None:
    class Scaling(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_pre_optimizer_step(self, *args: Any, model: Any, **kwargs: Any) -> None:
            norms.append(float(st.total_norm([p.grad for p in model.parameters()])))
            for p in model.parameters():
                p.grad.mul_(3)

    trainers, norms = [trainer_in(tmp_path, save_strategy="no", max_steps=3, learning_rate=1.0) for _ in range(2)], []
    apply_to_trainer(trainers[0], "sgd")
    trainers[1].optimizer_cls_and_kwargs = (torch.optim.SGD, {"lr": 1.0})
    for trainer in trainers:
        trainer.add_callback(Scaling())
        trainer.train()
    assert norms == pytest.approx([0.05] * 6, rel=1e-3)
    torch.testing.assert_close(*map(weights, trainers), rtol=1e-4, atol=1e-6)
    assert logged(trainers[0], "grad_norm") == pytest.approx(logged(trainers[1], "grad_norm"), rel=1e-4)


def test_options_given_go_before_those_of_the_trainer(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path, adam_beta2=0.95)
    apply_to_trainer(trainer, "adamw", lr=0.5, max_norm=None)
    made = trainer.create_optimizer()
    assert (made.defaults["lr"], made.defaults["betas"], made.defaults.get("max_norm")) == (0.5, (0.9, 0.95), None)
    assert trainer.args.max_grad_norm == 0.05
    other = trainer_in(tmp_path)
    apply_to_trainer(other, "lion")
    assert other.create_optimizer().defaults["betas"] == (0.9, 0.99)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_trains_by_its_name(name: str, tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path)
    apply_to_trainer(trainer, name)
    made, before, losses = trainer.create_optimizer(), weights(trainer), []
    assert name == "muon" or type(made) is OPTIMIZERS[name]
    for _ in range(3):
        loss = trainer.model(**{key: value[None] for key, value in Rows()[3].items()}).loss
        losses.append(float(loss))
        loss.backward()
        made.step()
        made.zero_grad()
    assert all(map(torch.isfinite, map(torch.tensor, losses)))
    assert losses[-1] < losses[0]
    assert not any(map(torch.equal, before, weights(trainer)))


def test_muon_is_for_the_matrices_of_layers_and_adamw_for_the_rest(tmp_path: Path) -> None:
    trainers = [trainer_in(tmp_path, adam_beta2=0.95, max_grad_norm=0.0) for _ in range(2)]
    apply_to_trainer(trainers[0], "muon")
    together = trainers[0].create_optimizer()
    named = list(trainers[1].model.named_parameters())
    layers = [p for name, p in named if "_proj" in name]
    norms = [p for name, p in named if "norm" in name]
    embedding = [p for name, p in named if "embed" in name]
    assert len(layers) + len(norms) + len(embedding) == len(named)
    apart = [
        st.optim.Muon(layers, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        st.optim.AdamW([{"params": embedding}, {"params": norms, "weight_decay": 0.0}], 1e-2, (0.9, 0.95), 1e-8, 0.1),
    ]
    for seed in range(3):
        for trainer, optimizers in zip(trainers, ([together], apart), strict=True):
            torch.manual_seed(seed)
            for p in trainer.model.parameters():
                p.grad = torch.randn_like(p)
            for optimizer in optimizers:
                optimizer.step()
    torch.testing.assert_close(*map(weights, trainers))


def with_optimizer(folder: Path) -> Any:
    trainer = trainer_in(folder)
    trainer.create_optimizer()
    return trainer


def compiling(folder: Path) -> Any:
    trainer = trainer_in(folder)
    trainer.args.torch_compile = True  # as an argument it sets a backend's flags, which torch's test utilities lock
    return trainer


def of_liger(folder: Path) -> Any:
    trainer = trainer_in(folder)
    trainer.args.use_liger_kernel = True
    return trainer


def of_two_gpus(folder: Path) -> Any:
    trainer = trainer_in(folder)
    trainer.args._n_gpu = 2
    return trainer


REFUSALS: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "an optimizer made": (with_optimizer, {"optimizer": "adamw"}, ValueError, "the trainer has an optimizer already"),
    "a name": (trainer_in, {"optimizer": "adam8bit"}, ValueError, "optimizer is one of .*got 'adam8bit'"),
    "a number": (trainer_in, {"optimizer": "adamw", "eps": -1.0}, ValueError, "eps"),
    "two compilers": (compiling, {"compile": True}, ValueError, "torch_compile=True does what compile=True does"),
    "Liger": (of_liger, {"loss": None, "compile": True}, ValueError, "use_liger_kernel=True does what compile=True"),
    "copies of the model": (of_two_gpus, {}, ValueError, "copy its model to 2 GPUs by DataParallel.*torchrun"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_can_not_be_applied_to_a_trainer_is_refused_by_name(case: str, tmp_path: Path) -> None:
    make, options, error, message = REFUSALS[case]
    trainer = make(tmp_path)
    with pytest.raises(error, match=message):
        apply_to_trainer(trainer, **options)
    assert trainer.args.max_grad_norm == 0.05
    assert trainer.optimizer_cls_and_kwargs is None
    assert not trainer.model.get_output_embeddings()._forward_pre_hooks
