"""TRL's trainers for SFT, DPO and GRPO train as they did, with what is applied to them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from chunked_programs import Products, allocations
from optim_oracle import flat
from tiny_causal_lms import causal_lm
from torch import Tensor

import subtensors as st
from subtensors.integrations.token_scores import TokenScores

trl = pytest.importorskip("trl", reason="needs the package trl")
datasets = pytest.importorskip("datasets", reason="needs the package datasets")
transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.filterwarnings("ignore")]
apply_to_trainer = st.integrations.transformers.apply_to_trainer

STEPS = 3
WORDS = [f"w{number}" for number in range(200)]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a trainer says by variables of the process is for that test; there is no network."""
    kept = {**os.environ}
    os.environ.update({"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"})
    yield
    os.environ.clear()
    os.environ.update(kept)


def tokenizer() -> Any:
    """Words that are tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    names = ["<pad>", "<s>", "</s>", "<unk>", *WORDS]
    inner = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def words(seed: int, count: int) -> str:
    picked = torch.randint(len(WORDS), (count,), generator=torch.Generator().manual_seed(seed))
    return " ".join(WORDS[number] for number in picked)


def arguments(config: type, folder: Path, **more: Any) -> Any:
    return config(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        max_grad_norm=0.5,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        gradient_checkpointing=False,
        **more,
    )


def sft(folder: Path, family: str = "Llama", **options: Any) -> Any:
    rows = datasets.Dataset.from_list(
        [{"prompt": words(n, 4 + n % 3), "completion": " " + words(n + 100, 5 + n % 4)} for n in range(16)]
    )
    return trl.SFTTrainer(
        model=causal_lm(family),
        args=arguments(trl.SFTConfig, folder, **options),
        train_dataset=rows,
        processing_class=tokenizer(),
    )


def dpo(folder: Path, **options: Any) -> Any:
    rows = datasets.Dataset.from_list(
        [
            {"prompt": words(n, 4), "chosen": " " + words(n + 100, 5 + n % 4), "rejected": " " + words(n + 200, 6)}
            for n in range(16)
        ]
    )
    return trl.DPOTrainer(
        model=causal_lm(),
        ref_model=causal_lm(),
        args=arguments(trl.DPOConfig, folder, **options),
        train_dataset=rows,
        processing_class=tokenizer(),
    )


def grpo(folder: Path, **options: Any) -> Any:
    def even(completion_ids: list[list[int]], **others: Any) -> list[float]:
        return [sum(token % 2 == 0 for token in row) / max(1, len(row)) for row in completion_ids]

    rows = datasets.Dataset.from_list([{"prompt": words(n, 4 + n % 3)} for n in range(16)])
    return trl.GRPOTrainer(
        model=causal_lm(),
        reward_funcs=even,
        args=arguments(trl.GRPOConfig, folder, num_generations=4, max_completion_length=6, **options),
        train_dataset=rows,
        processing_class=tokenizer(),
    )


TRAINERS: dict[str, Any] = {
    "SFT": sft,
    "SFT of a softcapped model": lambda folder: sft(folder, "Gemma2"),
    "SFT of a model that scales its logits": lambda folder: sft(folder, "Granite"),
    "SFT by DFT": lambda folder: sft(folder, loss_type="dft"),
    "DPO": dpo,
    "DPO with weights": lambda folder: dpo(folder, use_weighting=True),
    "GRPO": grpo,
    "GRPO with entropy bonus": lambda folder: grpo(folder, entropy_coef=0.1, temperature=0.7),
}
MEASURES = ("loss", "grad_norm", "entropy", "mean_token_accuracy", "rewards/margins", "logits/chosen", "reward", "kl")


def logged(trainer: Any) -> dict[str, list[float]]:
    """The measures of each step."""
    found: dict[str, list[float]] = {}
    for entry in trainer.state.log_history:
        for name in MEASURES:
            if name in entry:
                found.setdefault(name, []).append(float(entry[name]))
    return {name: values[:STEPS] for name, values in found.items()}


@pytest.mark.parametrize("name", TRAINERS)
def test_a_trainer_logs_and_learns_what_it_did(name: str, tmp_path: Path) -> None:
    found, learned = [], []
    for ours in (False, True):
        transformers.set_seed(0)
        trainer = TRAINERS[name](tmp_path)
        before = flat(p.detach().clone() for p in trainer.model.parameters())
        if ours:
            applied = apply_to_trainer(trainer, "adamw", loss={"rows": 2})
            assert isinstance(vars(trainer.model)["forward"], TokenScores)
        transformers.set_seed(1)
        trainer.train()
        found.append(logged(trainer))
        learned.append(flat(trainer.model.parameters()) - before)
    theirs, own = found
    assert theirs.keys() == own.keys() >= {"loss", "grad_norm", "entropy"}
    for measure, values in theirs.items():
        assert own[measure] == pytest.approx(values, rel=2e-4, abs=2e-6), measure
    assert float(learned[0].norm()) > 0.1
    assert float((learned[1] - learned[0]).norm()) < 1e-3 * float(learned[0].norm())
    assert isinstance(getattr(trainer.optimizer, "optimizer", trainer.optimizer), st.optim.AdamW)
    applied.revert()
    assert not isinstance(vars(trainer.model)["forward"], TokenScores)
    assert vars(trainer.model)["forward"].__func__.__name__ == "forward"


def scored(model: Any, ids: Tensor, labels: Tensor) -> Any:
    return model(input_ids=ids, labels=labels, fused_lm_head=True)


def test_scores_and_gradients_are_those_of_trl_and_prompts_are_left_out(tmp_path: Path) -> None:
    trainer = dpo(tmp_path, use_weighting=True)
    model = trainer.model
    ids = torch.randint(4, 200, (3, 20))
    labels = ids.clone()
    labels[:, :12] = -100
    labels[1, 15:] = -100
    outputs = []
    rows: list[int] = []
    for ours in (False, True):
        if ours:
            apply_to_trainer(trainer, loss={"rows": 2})
            model.lm_head.register_forward_hook(lambda module, args, out: rows.append(out.shape[1]))
        out = scored(model, ids, labels)
        weighted = (out.log_probs * torch.linspace(0, 1, 19)).sum() + out.loss + (out.entropy**2).sum()
        outputs.append((out, torch.autograd.grad(weighted, list(model.parameters()))))
    (theirs, their_gradients), (found, gradients) = outputs
    assert rows == [8]
    for field in ("loss", "log_probs", "entropy", "mean_logits", "is_top1", "log_sum_sq_probs", "label_mask"):
        torch.testing.assert_close(getattr(found, field), getattr(theirs, field), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradients, their_gradients, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["SFT", "DPO", "DPO with weights", "GRPO", "GRPO with entropy bonus"])
def test_training_takes_no_more_products_than_trl_does(name: str, tmp_path: Path) -> None:
    counts = []
    for ours in (False, True):
        transformers.set_seed(0)
        trainer = TRAINERS[name](tmp_path)
        if ours:
            apply_to_trainer(trainer, loss={"chunks": 4})
        transformers.set_seed(1)
        with Products() as products:
            trainer.train()
        counts.append(products.multiplications)
    assert 0 < counts[1] <= counts[0]


def test_a_batch_without_labels_gives_zeros_that_have_gradients(tmp_path: Path) -> None:
    trainer = sft(tmp_path)
    apply_to_trainer(trainer)
    ids = torch.randint(4, 200, (2, 9))
    out = scored(trainer.model, ids, torch.full_like(ids, -100))
    assert float(out.loss) == 0
    assert not out.log_probs.any()
    out.loss.backward()
    assert not trainer.model.lm_head.weight.grad.any()


def test_logits_are_never_there_in_full(tmp_path: Path) -> None:
    trainer = sft(tmp_path)
    apply_to_trainer(trainer, loss={"rows": 8})
    ids = torch.randint(4, 200, (8, 60))
    with allocations() as seen:
        scored(trainer.model, ids, ids).loss.backward()
    assert seen.largest < ids.numel() * trainer.model.config.vocab_size / 2


def test_adapters_of_peft_train_alike(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    found = []
    for ours in (False, True):
        transformers.set_seed(0)
        model = peft.get_peft_model(causal_lm(), peft.LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.0))
        trainer = sft(tmp_path)
        rows = trainer.train_dataset
        trainer = trl.SFTTrainer(
            model=model, args=trainer.args, train_dataset=rows, processing_class=trainer.processing_class
        )
        if ours:
            apply_to_trainer(trainer, "adamw", loss={"rows": 2})
            assert isinstance(vars(trainer.model.get_base_model())["forward"], TokenScores)
        transformers.set_seed(1)
        trainer.train()
        found.append(logged(trainer))
    assert found[1].keys() == found[0].keys()
    for measure, values in found[0].items():
        assert found[1][measure] == pytest.approx(values, rel=2e-4, abs=2e-6), measure


def test_a_head_in_float32_is_left_to_trl(tmp_path: Path) -> None:
    trainer = grpo(tmp_path, cast_lm_head_to_fp32=True)
    forward = trainer.model.forward
    with pytest.raises(ValueError, match="cast_lm_head_to_fp32=True needs TRL's own head; pass loss=None"):
        apply_to_trainer(trainer)
    assert trainer.model.forward == forward
    apply_to_trainer(trainer, "adamw", loss=None)
    assert trainer.model.forward == forward


def test_a_trainer_whose_batches_are_lists_takes_its_own_steps_with_buckets(tmp_path: Path) -> None:
    trainer = grpo(tmp_path)
    apply_to_trainer(trainer, "adamw", buckets=st.Dim("seq", max=64, buckets=16))
    trainer.train()
    assert "GRPOTrainer has a training_step" in trainer.training_step.said
