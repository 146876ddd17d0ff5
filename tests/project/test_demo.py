"""The demo trains the same model in each way, step by step side by side, and shows what it measured."""

from __future__ import annotations

import dataclasses
import io
import re
from pathlib import Path

import pytest
import torch
from rich.console import Console

from demo.__main__ import main
from demo.compare import OURS, PLAIN, PLANS, SCALED, Run, compare, evaluated, high_precision, variants
from demo.evaluate import evaluate
from demo.model import GPT, Size
from demo.report import largest_loss_difference, median_with_interval, table
from demo.text import corpus, tokenized
from train_gpt import Data, Plan

SMALL = Plan(
    Size(layers=2, width=16, heads=2, context=48),
    batch=4,
    steps=8,
    device="cpu",
    learning_rate=1e-2,
    token_bytes=2,
    corpus_bytes=30_000,
)
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def runs() -> list[Run]:
    return compare(SMALL)


def shown(runs: list[Run], plan: Plan) -> str:
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(table(runs, plan))
    return console.export_text()


def test_pairs_of_bytes_are_numbered_among_those_of_the_text() -> None:
    texts = [text for text in corpus(100_000) if len(text) > 50]
    documents, vocabulary = tokenized(texts, width=2)
    assert [len(d) for d in documents] == [len(text) // 2 for text in texts]
    numbers: dict[bytes, int] = {}
    for text, document in zip(texts, documents, strict=True):
        for place, number in enumerate(document.tolist()):
            pair = text[2 * place : 2 * place + 2]
            assert numbers.setdefault(pair, number) == number
    assert sorted(numbers.values()) == list(range(vocabulary))


def test_the_model_sees_no_later_token() -> None:
    torch.manual_seed(0)
    model = GPT(SMALL.size, 256)
    inputs = torch.randint(256, (1, 8))
    changed = inputs.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 256
    before, after = model(inputs), model(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5], after[:, 5])


def test_each_variant_takes_each_step_and_the_first_is_measured_apart(runs: list[Run]) -> None:
    assert [run.name for run in runs] == [PLAIN, SCALED, OURS]
    for run in runs:
        assert run.losses[-1] < run.losses[0]
        assert len(run.losses) == SMALL.steps
        assert len(run.step_ms) == len(run.optimizer_ms) == SMALL.steps - 1
        assert all(part < whole for part, whole in zip(run.optimizer_ms, run.step_ms, strict=True))
        assert run.first_step_ms > 0


def test_steps_of_the_variants_are_interleaved_in_varying_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    step = Run.step

    def noted(run: Run) -> None:
        taken.append(run.name)
        step(run)

    monkeypatch.setattr(Run, "step", noted)
    compare(SMALL)
    rounds = [tuple(taken[start : start + 3]) for start in range(0, len(taken), 3)]
    assert all(set(each) == {PLAIN, SCALED, OURS} for each in rounds)
    assert len(set(rounds)) > 1


def test_a_second_plain_run_differs_by_rounding_and_the_table_says_how_much(runs: list[Run]) -> None:
    plain, scaled, _ = runs
    spread = largest_loss_difference(scaled, plain)
    assert 0 < spread < 1e-3
    assert f"differ by {spread:.1e}, by rounding alone" in " ".join(shown(runs, SMALL).split())


def test_on_a_cpu_each_loss_is_held_against_float64(runs: list[Run]) -> None:
    plain, _, ours = (max(run.errors) for run in runs)
    assert [len(run.errors) for run in runs] == [SMALL.steps] * 3
    assert 0 < ours <= 1.5 * plain + torch.finfo(torch.float32).eps * max(runs[0].losses)
    assert f"{plain:.1e}" in next(line for line in shown(runs, SMALL).splitlines() if "against float64" in line)


def test_on_a_gpu_each_loss_is_held_against_float32_without_autocast() -> None:
    for plan in (PLANS["cuda"], high_precision(PLANS["cuda"])):
        assert plan.dtype == torch.float32
    assert PLANS["cuda"].autocast
    assert not high_precision(PLANS["cuda"]).autocast


def test_a_chunked_loss_holds_no_logits(runs: list[Run]) -> None:
    plain, scaled, ours = runs
    assert ours.peak_mb < 0.9 * plain.peak_mb
    assert scaled.peak_mb == plain.peak_mb


def test_a_cpu_compares_losses_and_memory_and_leaves_times_to_a_gpu(runs: list[Run]) -> None:
    on_cpu = shown(runs, SMALL)
    assert "memory of a forward and backward, MiB" in on_cpu
    assert "that takes a GPU" in " ".join(on_cpu.split())
    assert "median" not in on_cpu
    assert " ms" not in on_cpu


def test_the_variants_differ_in_nothing_but_who_wrote_them() -> None:
    made = {name: make() for name, make in variants(SMALL, Data(SMALL)).items()}
    optimizers = [training.optimizer for training in made.values()]
    assert [type(optimizer).__name__ for optimizer in optimizers] == ["AdamW"] * 3
    assert [type(o).__module__.partition(".")[0] for o in optimizers] == ["torch", "torch", "subtensors"]
    first, *others = ({key: o.defaults[key] for key in ("lr", "betas", "eps", "weight_decay")} for o in optimizers)
    assert others == [first, first]
    weights = [list(training.model.state_dict().values()) for training in made.values()]
    assert all(torch.equal(x, y) for other in weights[1:] for x, y in zip(weights[0], other, strict=True))
    inputs = [training.batch(0)[0] for training in made.values()]
    assert all(torch.equal(inputs[0], other) for other in inputs[1:])


def test_the_bucketed_evaluation_is_the_plain_one(runs: list[Run]) -> None:
    plain, ours = evaluated(runs[-1])
    assert ours.loss == pytest.approx(plain.loss, rel=1e-5)
    assert len(ours.seconds) == len(plain.seconds) == 2
    assert ours.summary.startswith(f"eager: {2 * ours.documents} calls")


def test_an_evaluation_leaves_the_model_training() -> None:
    model = GPT(SMALL.size, 256)
    lengths = [20, 31, 17, 40]
    evaluate(model, [torch.randint(256, (n,)) for n in lengths], passes=1)
    assert model.training


def test_the_median_of_steps_has_an_interval_that_holds_it_in_95_of_100_samples() -> None:
    generator = torch.Generator().manual_seed(0)
    held = 0
    for _ in range(1000):
        values = torch.randn(50, generator=generator, dtype=torch.float64).tolist()
        low, high = median_with_interval(values).split("(")[1].rstrip(")").split(" to ")
        held += float(low) <= 0 <= float(high)
    assert 930 <= held <= 985


def test_the_command_writes_tables_and_a_plot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(PLANS, "cpu", SMALL)
    figure = tmp_path / "new" / "demo.png"
    assert main(["--device", "cpu", "--steps", "3", "--out", str(figure)]) == 0
    found = capsys.readouterr().out.split()
    assert " ".join(found).startswith(
        f"3 steps of each of: {PLAIN}; {SCALED}; {OURS}. Then an evaluation and a plot: about "
    )
    assert re.search(
        r"step 1 of 3: loss [\d.]+ step 2 of 3: loss [\d.]+, \d+ seconds left step 3 of 3", " ".join(found)
    )
    for words in (PLAIN, OURS, "loss times 3", "reference", "documents of varying lengths", "bucketed"):
        assert words in " ".join(found)
    assert str(figure) in "".join(found)  # a long path is folded
    assert figure.read_bytes().startswith(PNG)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "1"], "2 at least; got '1'"),  # the first is measured apart
        (["--steps", "abc"], "a whole number, 2 at least; got 'abc'"),
        (["--out", "demo.xyz"], "ending in .png, .svg or .pdf; got 'demo.xyz'"),
    ],
)
def test_an_option_that_cannot_be_taken_is_refused_before_anything_runs(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(options)
    assert message in capsys.readouterr().err


def test_the_plans_of_the_demo_are_those_of_the_training_with_pairs_of_bytes() -> None:
    from train_gpt import PLANS as TRAINED

    assert {device: dataclasses.replace(plan, token_bytes=1) for device, plan in PLANS.items()} == TRAINED
