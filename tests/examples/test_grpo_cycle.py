"""The example that lends its memory between GRPO's updates: it learns, and goes on bit by bit as if it never had."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator

import pytest
import torch
from pretend_graphs import pretend
from torch import Tensor

import subtensors as st

pytest.importorskip("transformers")

import grpo_cycle
from grpo_cycle import Job, Plan, advantages, digest, main, plan_on, reward

PLAN: Plan = dataclasses.replace(plan_on("cpu"), prompts=2, learning_rate=1e-2)
CYCLES = 3


def test_cycles_whose_memory_is_lent_are_bit_by_bit_those_that_keep_it() -> None:
    lending, keeping = Job(PLAN), Job(PLAN)
    lent: list[int] = []

    def lend(size: int) -> int:
        assert lending.arena.released
        with pytest.raises(st.AddressError, match="released Arena"):
            lending.model.lm_head(torch.ones(1, PLAN.config.hidden_size))
        lent.append(size)
        return size

    before = digest(lending)
    for _ in range(CYCLES):
        ours, theirs = lending.cycle(lend), keeping.cycle()
        assert (ours.reward, ours.loss) == (theirs.reward, theirs.loss)
        assert digest(lending) == digest(keeping)
        assert ours.seconds.keys() == {"generate", "update", "release", "restore"}
        assert theirs.seconds.keys() == {"generate", "update"}
    assert digest(lending)[:10] != before[:10]
    parameters = sum(p.nbytes for p in lending.model.parameters())
    assert len(lent) == CYCLES
    assert min(lent) >= 3 * parameters  # and two moments


def test_graphs_of_the_generation_outlive_a_release(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, trained=True)
    job = Job(PLAN)
    job.run = st.bucketed(job.model, {"input_ids": {1: st.Dim("seq", max=96, buckets=8)}})
    replays = []
    for _ in range(CYCLES):
        job.cycle(lambda size: size)
        stats = job.run.programs["decoder"].stats()
        assert (stats.recaptures, stats.fallbacks, job.run.stats().fallbacks) == (0, {}, {})
        assert stats.hits + stats.captures == stats.calls
        replays.append(stats.hits)
    assert 0 < replays[0] < replays[1] < replays[2]


def test_another_bit_changes_the_digest() -> None:
    job = Job(PLAN)
    job.cycle()
    before = digest(job)
    (state, *_) = job.optimizer.state.values()
    with torch.no_grad():
        moment = state["exp_avg"].view(-1)
        moment[3] = torch.nextafter(moment[3], torch.tensor(9.0))
    assert sum(a != b for a, b in zip(digest(job), before, strict=True)) == 1


def test_completions_are_sampled_by_graphs_of_buckets_and_end_where_they_end() -> None:
    job = Job(dataclasses.replace(PLAN, prompts=6, new_tokens=24, config=small_vocabulary()))
    groups = job.sample()
    assert len({sequences.shape[1] for sequences, _ in groups}) > 2
    ends = 0
    for sequences, is_new in groups:
        prompt = int((~is_new).long().argmin(1)[0])
        assert not is_new[:, :prompt].any()
        for row, new in zip(sequences[:, prompt:].tolist(), is_new[:, prompt:].tolist(), strict=True):
            length = row.index(2) + 1 if 2 in row else len(row)
            ends += 2 in row
            assert new == [place < length for place in range(len(row))]
    assert ends > 5
    stats = [program.stats() for program in job.run.programs.values()]
    assert sum(each.hits for each in stats) > 0
    assert [each.fallbacks for each in stats] == [{}] * len(stats)
    assert job.run.stats().fallbacks == {}


def small_vocabulary() -> object:
    config = plan_on("cpu").config
    config.vocab_size = 20
    return config


@pytest.mark.parametrize("chunked", [True, False])
def test_the_loss_and_its_gradient_are_those_of_the_formula(chunked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not chunked:
        monkeypatch.setattr(grpo_cycle.st, "chunk", lambda x, **options: x)
    job = Job(dataclasses.replace(PLAN, dtype=torch.float64))
    monkeypatch.setattr(Tensor, "float", lambda x: x)  # all in float64
    weight = job.model.lm_head.weight
    hidden = torch.randn(4, 9, PLAN.config.hidden_size, dtype=torch.float64, requires_grad=True)
    tokens = torch.randint(PLAN.config.vocab_size, (4, 9))
    mask, advantage = torch.rand(4, 9) < 0.6, torch.randn(4, 1, dtype=torch.float64)
    found = job.loss(hidden, tokens, mask, advantage)
    gradients = torch.autograd.grad(found, [hidden, weight])
    exact = torch.zeros((), dtype=torch.float64)
    for row, place in mask.nonzero().tolist():
        log_probs = (weight @ hidden[row, place]).log_softmax(0)
        one = log_probs[tokens[row, place]]
        entropy = torch.distributions.Categorical(logits=log_probs).entropy()
        exact = exact - (torch.exp(one - one.detach()) * advantage[row, 0] + PLAN.entropy_bonus * entropy)
    torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(gradients, torch.autograd.grad(exact, [hidden, weight]), rtol=1e-9, atol=1e-12)


def test_rewards_count_new_tokens_alone_and_advantages_compare_within_a_prompt() -> None:
    sequences = torch.tensor([[2, 4, 6, 8], [2, 4, 7, 8], [2, 4, 7, 9]])
    is_new = torch.tensor([[False, False, True, True]] * 3)
    assert reward(sequences, is_new).tolist() == [1.0, 0.5, 0.0]
    rewards = torch.tensor([[1.0, 0.5, 0.0], [9.0, 9.0, 9.0]])
    found = advantages(rewards)
    torch.testing.assert_close(found[0], torch.tensor([1.0, 0.0, -1.0]), rtol=1e-3, atol=1e-6)
    assert found[1].tolist() == [0.0, 0.0, 0.0]


def test_rewards_rise() -> None:
    job = Job(dataclasses.replace(PLAN, prompts=4, entropy_bonus=0.0))
    rewards = [job.cycle().reward for _ in range(16)]
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.1  # more than 4 standard deviations of 512 tokens


@pytest.fixture
def determinism() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("determinism")
def test_the_program_lends_to_another_one_and_says_that_nothing_changed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setattr(sys, "argv", ["grpo_cycle", "--device", "cpu", "--cycles", "2"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert "bit by bit what it is without lending: yes" in shown
    assert shown.count("MiB free, 0.3 lent") == 2


def test_another_program_that_can_not_have_the_memory_is_an_error() -> None:
    with pytest.raises(Exception, match="returned non-zero exit status"):
        grpo_cycle.to_another_program("cpu")(1 << 60)
