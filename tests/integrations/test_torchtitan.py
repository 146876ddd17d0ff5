"""Torchtitan's components train as its own do, with a chunked loss and optimizers of `st.optim`."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from chunked_programs import allocations
from optim_oracle import flat
from torch import Tensor, nn

import subtensors as st

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    losses = pytest.importorskip(
        "torchtitan.components.loss", reason="needs the package torchtitan", exc_type=ImportError
    )
    from torchtitan.components import optimizer as optimizers
import torchtitan_components as titan

pytestmark = [pytest.mark.filterwarnings("ignore")]

VOCABULARY, WIDTH, STEPS = 199, 16, 4


class Model(nn.Module):
    """A decoder as the trainer treats it: it gives hidden states where the loss has the head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self._skip_lm_head = False

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = torch.tanh(self.layer(self.tok_embeddings(tokens)))
        result: Tensor = hidden if self._skip_lm_head else self.lm_head(hidden)
        return result


def batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(VOCABULARY, (4, 17), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[:, :3] = losses.IGNORE_INDEX
    return tokens[:, :-1], labels


def loss_of(config: Any, model: Model) -> Any:
    """What the trainer does with a configuration."""
    built = config.build(compile_config=None)
    if isinstance(built, losses.ChunkedLossWrapper):
        built.set_lm_head(model.lm_head)
        model._skip_lm_head = True
    return built


def container(config: Any, model: nn.Module) -> Any:
    return config.build(model_parts=[model])


def theirs(**options: Any) -> Any:
    group = optimizers.ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs=options)
    return optimizers.OptimizersContainer.Config(param_groups=[group], implementation="for-loop")


def train(model: Model, loss: Any, opt: Any, steps: range) -> list[float]:
    found = []
    for number in steps:
        tokens, labels = batch(number)
        opt.zero_grad()
        value, _ = loss(model(tokens), labels, torch.tensor(float((labels != losses.IGNORE_INDEX).sum())))
        value.backward()
        opt.step()
        found.append(float(value.detach()))
    return found


@pytest.mark.parametrize("way", ["whole", "torchtitan's chunks"])
def test_loss_and_steps_are_those_of_torchtitan(way: str) -> None:
    model, other = Model(), Model()
    config = losses.ChunkedLossWrapper.Config() if way != "whole" else losses.CrossEntropyLoss.Config()
    expected = train(other, loss_of(config, other), container(theirs(lr=1e-2), other), range(STEPS))
    own = loss_of(titan.loss(rows=4), model)
    found = train(model, own, container(titan.optimizer("adamw", lr=1e-2), model), range(STEPS))
    assert found == pytest.approx(expected, rel=1e-5)
    learned = flat(other.parameters()) - flat(Model().parameters())
    assert float((flat(model.parameters()) - flat(other.parameters())).norm()) < 1e-3 * float(learned.norm())


def test_logits_are_never_there_in_full() -> None:
    model = Model()
    loss = loss_of(titan.loss(rows=2), model)
    tokens = torch.randint(VOCABULARY, (16, 64))
    with allocations() as seen:
        loss(model(tokens), tokens)[0].backward()
    assert seen.largest < tokens.numel() * VOCABULARY / 2


def test_validation_needs_no_gradient_and_a_loss_without_its_head_is_refused() -> None:
    model = Model()
    tokens, labels = batch(0)
    whole, _ = loss_of(losses.CrossEntropyLoss.Config(), Model())(model(tokens), labels)
    loss = titan.loss().build(compile_config=None)
    with pytest.raises(ValueError, match="set_lm_head comes before the first loss"):
        loss(model(tokens), labels)
    loss = loss_of(titan.loss(), model)
    with torch.no_grad():
        found, metrics = loss(model(tokens), labels)
    torch.testing.assert_close(found, whole)
    assert metrics == {}


@pytest.mark.parametrize("name", ["adamw", "lion"])
def test_a_run_that_resumes_from_their_flat_state_ends_bit_by_bit_where_it_would_have(name: str) -> None:
    def parts() -> tuple[Model, Any, Any]:
        model = Model()
        return model, loss_of(titan.loss(rows=4), model), container(titan.optimizer(name, lr=1e-2, max_norm=1.0), model)

    model, loss, opt = parts()
    train(model, loss, opt, range(2))
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    state = {k: v.clone() if isinstance(v, Tensor) else v for k, v in opt.state_dict().items()}
    assert "state.lm_head.weight.exp_avg" in state
    expected = train(model, loss, opt, range(2, STEPS))
    again, loss, opt = parts()
    again.load_state_dict(weights)
    opt.load_state_dict(state)
    assert train(again, loss, opt, range(2, STEPS)) == expected
    torch.testing.assert_close(again.state_dict(), model.state_dict(), rtol=0, atol=0)


def test_groups_have_optimizers_of_their_own() -> None:
    model = Model()
    group = optimizers.ParamGroupConfig
    groups = [
        group(pattern="bias", optimizer_name="sgd", optimizer_kwargs={"lr": 0.1}),
        group(pattern=".*", optimizer_name="adamw", optimizer_kwargs={"lr": 1e-3}),
    ]
    made = container(titan.optimizer(param_groups=groups), model)
    assert {type(each) for each in made} == {st.optim.SGD, st.optim.AdamW}
    assert sum(len(g["params"]) for each in made for g in each.param_groups) == len(list(model.parameters()))


def test_what_can_not_be_built_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"optimizer_name is one of .*adamw.*; got 'adamx'"):
        titan.optimizer("adamx")
    with pytest.raises(TypeError, match="optimizer_kwargs; got lr"):
        titan.optimizer(param_groups=[], lr=1.0)
    with pytest.raises(TypeError, match="row"):
        titan.loss(row=1)
