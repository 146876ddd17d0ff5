"""The example that trains a GPT: resumed bit by bit, evaluated, and the same in one process and in two."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from two_ranks import on_two_ranks

import subtensors as st
from demo.model import Size
from demo.text import IGNORED, Batches, corpus, tokenized
from train_gpt import Data, Plan, Training, main, save, train

SMALL = Plan(
    Size(layers=1, width=16, heads=2, context=48),
    batch=4,
    steps=6,
    device="cpu",
    learning_rate=1e-2,
    corpus_bytes=30_000,
    evaluation_batches=3,
)
HALF = SMALL.steps // 2
Result = tuple[list[float], float]


def quietly(plan: Plan, checkpoint: Path | None = None, until: int | None = None) -> Result:
    return train(plan, checkpoint, save_every=1, until=until, show=lambda line: None)


def tensors(state: object) -> Iterator[object]:
    """The leaves of a checkpoint."""
    if isinstance(state, dict):
        for key, value in state.items():
            yield key
            yield from tensors(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from tensors(value)
    else:
        yield state


def same_checkpoints(first: Path, second: Path) -> bool:
    a, b = (list(tensors(torch.load(path))) for path in (first, second))
    pairs = list(zip(a, b, strict=True))
    assert sum(isinstance(x, Tensor) for x in a) > 40
    return all(torch.equal(x, y) if isinstance(x, Tensor) and isinstance(y, Tensor) else x == y for x, y in pairs)


def test_documents_vary_in_length_and_every_token_is_a_target_once() -> None:
    documents, vocabulary = tokenized(corpus(30_000))
    assert vocabulary == 256
    assert len({len(document) for document in documents}) > 20
    batches = Batches(documents, batch=1, context=48, seed=0)
    targets = [batches[step][1] for step in range(batches.per_epoch)]
    assert len({x.shape[1] for x in targets}) > 20
    seen = torch.cat([x[x != IGNORED] for x in targets]).bincount(minlength=256)
    assert torch.equal(seen, torch.cat([d[1:] for d in documents]).bincount(minlength=256))


def test_a_batch_depends_on_seed_and_step_alone() -> None:
    documents, _ = tokenized(corpus(30_000))
    first, again, other = (Batches(documents, 4, 48, seed) for seed in (1, 1, 2))
    far = 2 * first.per_epoch + 1
    in_order = [first[step] for step in range(far + 1)]
    assert all(torch.equal(x, y) for x, y in zip(in_order[far], again[far], strict=True))
    assert not all(torch.equal(x, y) for x, y in zip(first[0], other[0], strict=False) if x.shape == y.shape)
    assert not torch.equal(*(torch.nn.functional.pad(first[s][0], (0, 48))[:, :48] for s in (0, first.per_epoch)))


def test_too_few_documents_and_too_little_text_are_refused() -> None:
    with pytest.raises(ValueError, match="1 documents are fewer than a batch of 2"):
        Batches([torch.arange(5)], batch=2, context=8, seed=0)
    with pytest.raises(FileNotFoundError, match=r"holds \d+ bytes of Python sources, and 1099511627776 are needed"):
        corpus(1 << 40)


def test_a_run_that_resumes_ends_bit_by_bit_where_it_would_have(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole.pt", tmp_path / "parts.pt"
    losses, found = quietly(SMALL, whole)
    before, _ = quietly(SMALL, parts, until=HALF)
    assert not same_checkpoints(whole, parts)
    after, found_again = quietly(SMALL, parts)
    assert len(before) == len(after) == HALF
    assert before + after == losses
    assert found == found_again
    assert same_checkpoints(whole, parts)


def test_the_evaluation_falls_as_the_model_learns_and_uses_none_of_its_text() -> None:
    data = Data(SMALL)
    training = Training(SMALL, data)
    before = training.evaluate()
    for _ in range(SMALL.steps):
        training.step()
    assert training.evaluate() < before
    held_out = {tuple(d.tolist()) for d in data.evaluation.documents if len(d) > 20}
    assert len(held_out) > 10
    assert not held_out & {tuple(d.tolist()) for d in data.training.documents}


def test_the_memory_of_the_state_is_lent_during_an_evaluation_and_comes_back() -> None:
    training = Training(SMALL, Data(SMALL))
    training.step()
    state = [x for x in tensors(dict(training.optimizer.state)) if isinstance(x, Tensor) and x.dim()]
    moments = [x for x in state if x in training.arena and not isinstance(x, torch.nn.Parameter)]
    assert len(moments) >= 2 * len(list(training.model.parameters()))
    before = [x.clone() for x in moments]
    with training.lent_memory(), pytest.raises(st.AddressError, match="released Arena"):
        moments[0] + 1
    assert all(torch.equal(x, y) for x, y in zip(moments, before, strict=True))


def test_every_type_takes_part() -> None:
    training = Training(SMALL, Data(SMALL))
    for _ in range(SMALL.steps):
        training.step()
    stats = training.local_loss.run.stats()
    assert stats.hits > 0
    assert stats.fallbacks == {}
    logits = training.model(training.batch(0)[0])
    assert isinstance(logits, st.ChunkedTensor)
    assert isinstance(training.optimizer, st.optim.AdamW)
    assert training.arena.used > 0


def curve(plan: Plan, ours: bool) -> list[float]:
    training = Training(plan, Data(plan), ours=ours)
    return [training.step() for _ in range(plan.steps)]


def test_losses_err_no_more_than_those_of_plain_torch() -> None:
    truth = torch.tensor(curve(dataclasses.replace(SMALL, dtype=torch.float64), ours=False), dtype=torch.float64)
    plain, ours = (torch.tensor(curve(SMALL, each), dtype=torch.float64) for each in (False, True))
    rounding = torch.finfo(torch.float32).eps * float(truth.max())
    assert float((ours - truth).abs().max()) <= 1.5 * float((plain - truth).abs().max()) + rounding


def ways(folder: Path) -> dict[str, tuple[Result, Result, bool]]:
    """In each of two processes: a run, the same run in two parts, and whether both ended with the same checkpoint."""
    found = {}
    for parallel in ("ddp", "fsdp"):
        plan = dataclasses.replace(SMALL, parallel=parallel)
        whole_path, path = folder / f"{parallel}.pt", folder / f"{parallel}-parts.pt"
        whole = quietly(plan, whole_path)
        before, _ = quietly(plan, path, until=HALF)
        torch.distributed.barrier()  # until the first process has written it
        if torch.distributed.get_rank() == 0:
            shutil.copy(path, folder / f"{parallel}-half.pt")
        after, evaluated = quietly(plan, path)
        torch.distributed.barrier()
        found[parallel] = whole, (before + after, evaluated), same_checkpoints(whole_path, path)
    return found


def test_two_processes_train_as_one_does_and_resume_bit_by_bit_in_their_way_or_in_one_process(tmp_path: Path) -> None:
    losses, evaluated = quietly(SMALL)
    for found in on_two_ranks(ways, tmp_path):
        assert found.keys() == {"ddp", "fsdp"}
        for whole, parts, same in found.values():
            assert whole == parts
            assert same
            assert whole[0] == pytest.approx(losses, rel=1e-5)
            assert whole[1] == pytest.approx(evaluated, rel=1e-5)
    for parallel in ("ddp", "fsdp"):
        after, evaluated_after = quietly(SMALL, tmp_path / f"{parallel}-half.pt")
        assert after == pytest.approx(losses[HALF:], rel=1e-5)
        assert evaluated_after == pytest.approx(evaluated, rel=1e-5)


def test_a_checkpoint_is_whole_at_every_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new" / "gpt.pt"
    save({"steps": 1}, path)

    def ends(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", ends)
    with pytest.raises(KeyboardInterrupt):
        save({"steps": 2}, path)
    assert torch.load(path) == {"steps": 1}


def test_the_command_line_trains_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("train_gpt.PLANS", {"cpu": SMALL})
    path = tmp_path / "gpt.pt"
    for until in ("1", "2"):
        monkeypatch.setattr("sys.argv", ["train_gpt", "--device", "cpu", "--checkpoint", str(path), "--until", until])
        main()
    shown = capsys.readouterr().out
    assert f"goes on after step 1 of {path}" in shown
    assert "bits a byte" in shown
    assert torch.load(path)["steps"] == 2
