"""The demo trains the same model with each optimizer and shows what it measured."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from demo.__main__ import main
from demo.compare import PLAIN, PLANS, optimizers
from demo.evaluate import documents, evaluate
from demo.model import GPT, Size
from demo.text import batches, corpus, pairs
from demo.train import Plan, Run, train

SMALL = Plan(Size(layers=2, width=16, heads=2, context=16), batch=4, steps=12, device="cpu", learning_rate=1e-2)
PNG = b"\x89PNG\r\n\x1a\n"


def trained(name: str, dtype: torch.dtype) -> Run:
    plan = Plan(SMALL.size, SMALL.batch, SMALL.steps, SMALL.device, SMALL.learning_rate, dtype)
    return train(name, optimizers(plan.learning_rate)[name], plan, corpus(10_000), chunked=name != PLAIN)


def test_the_corpus_is_the_same_text_every_time_and_as_long_as_asked() -> None:
    assert len(corpus(100_000)) == 100_000
    assert torch.equal(corpus(5000), corpus(100_000)[:5000])


def test_a_corpus_larger_than_the_sources_is_refused_with_both_sizes() -> None:
    with pytest.raises(FileNotFoundError, match=r"holds \d+ bytes of Python sources, and 1099511627776 are needed"):
        corpus(1 << 40)


def test_batches_depend_on_the_seed_alone_and_targets_are_the_next_bytes() -> None:
    text = corpus(1000)
    first, again, other = (list(batches(text, batch=3, context=7, steps=2, seed=seed)) for seed in (1, 1, 2))
    for (inputs, targets), (same_inputs, same_targets) in zip(first, again, strict=True):
        assert torch.equal(inputs, same_inputs)
        assert torch.equal(targets, same_targets)
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert not torch.equal(first[0][0], other[0][0])


def test_pairs_of_bytes_are_numbered_among_those_of_the_text() -> None:
    tokens, vocabulary = pairs(corpus(100_001))
    assert len(tokens) == 50_000
    assert int(tokens.min()) == 0
    assert int(tokens.max()) == vocabulary - 1
    assert len(tokens.unique()) == vocabulary


def test_a_chunked_loss_holds_no_logits_and_trains_alike() -> None:
    plain, ours = (trained(name, torch.float32) for name in (PLAIN, "subtensors"))
    assert ours.peak_mb < plain.peak_mb
    assert abs(ours.losses[-1] - plain.losses[-1]) < 1e-4 * plain.losses[-1]


def test_the_model_sees_no_later_token() -> None:
    torch.manual_seed(0)
    model = GPT(SMALL.size, 256)
    inputs = torch.randint(256, (1, 8))
    changed = inputs.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 256
    before, after = model(inputs), model(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5], after[:, 5])


def test_a_run_learns_and_measures_every_step_but_the_first_apart() -> None:
    run = trained("plain PyTorch", torch.float32)
    assert run.losses[-1] < run.losses[0]
    assert len(run.losses) == SMALL.steps
    assert len(run.step_ms) == len(run.optimizer_ms) == SMALL.steps - 1
    assert all(part < whole for part, whole in zip(run.optimizer_ms, run.step_ms, strict=True))
    assert run.first_step_ms > 0
    assert run.calls > 0
    assert run.peak_mb > 0


def test_both_loss_curves_are_equally_near_to_float64() -> None:
    truth = trained("plain PyTorch", torch.float64)
    plain, ours = (
        max(abs(loss - true) for loss, true in zip(trained(name, torch.float32).losses, truth.losses, strict=True))
        for name in ("plain PyTorch", "subtensors")
    )
    rounding = torch.finfo(torch.float32).eps * max(truth.losses)
    assert ours <= 1.5 * plain + rounding


def test_the_bucketed_evaluation_is_the_plain_one() -> None:
    run = trained(PLAIN, torch.float32)
    assert run.model is not None
    texts = documents(pairs(corpus(10_000))[0], count=12, longest=16, seed=0)
    assert len({text.shape[1] for text in texts}) > 5
    plain, ours = evaluate(run.model, texts, "cpu")
    assert ours.loss == pytest.approx(plain.loss, rel=1e-5)
    assert ours.summary.startswith("eager: 24 calls")
    assert run.model.training


def test_the_command_writes_a_table_and_a_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figure = tmp_path / "new" / "demo.png"
    assert main(["--device", "cpu", "--steps", "3", "--out", str(figure)]) == 0
    shown = capsys.readouterr().out
    for words in (
        "plain PyTorch",
        "subtensors",
        "largest difference",
        "first step",
        "aten calls in one optimizer",
        "captured step",
        "peak memory, MiB",
        "none: no GPU",
        "evaluation of 30 documents of varying lengths",
        "bucketed",
    ):
        assert words in shown
    assert figure.read_bytes().startswith(PNG)


def test_a_single_step_is_refused_because_the_first_is_measured_apart(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--steps", "1"])
    assert "1 is less than 2" in capsys.readouterr().err


def test_the_optimizers_differ_in_nothing_but_who_wrote_them() -> None:
    made = [make([torch.nn.Parameter(torch.zeros(2))]) for make in optimizers(PLANS["cpu"].learning_rate).values()]
    assert [type(optimizer).__name__ for optimizer in made] == ["AdamW"] * 3
    assert [type(optimizer).__module__.partition(".")[0] for optimizer in made] == ["torch", "subtensors", "subtensors"]
    plain, *ours = ({key: o.defaults[key] for key in ("lr", "betas", "eps", "weight_decay")} for o in made)
    assert ours == [plain, plain]
