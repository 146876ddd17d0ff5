"""Compiled pointwise parts of causal language models: the ops left to torch, their errors, the graphs they share."""

from __future__ import annotations

import gc
import importlib
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from causal_lm_gradients import COUNT, IDS, check_errs_as_plain, exact_loss, own_loss, values
from tiny_causal_lms import causal_lm, of_liger, sampled, with_liger
from torch import Tensor

import subtensors as st
from subtensors.integrations.pointwise import CompiledPart

pytest.importorskip("transformers")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("compiler")]
apply = st.integrations.transformers.apply

ROWS = {"rows": 4}


def ops_of_a_layer(compile: Any) -> Counter[str]:
    """Count torch's ops, forward and backward, of a layer more."""
    counts = []
    for layers in (1, 2):
        model = causal_lm("Qwen3", torch.bfloat16, num_hidden_layers=layers)
        apply(model, loss=None, compile=compile)
        for _ in range(2):
            with torch.profiler.profile() as profile:
                model.model(input_ids=IDS).last_hidden_state.sum().backward()
        counts.append(Counter(event.name for event in profile.events()))
    return counts[1] - counts[0]


def test_compiled_parts_leave_products_attention_and_sums_to_torch() -> None:
    plain, found = ops_of_a_layer(False), ops_of_a_layer("pointwise")
    elementwise = ["aten::mul", "aten::pow", "aten::mean", "aten::silu", "aten::neg", "aten::_to_copy"]
    assert all(plain[name] for name in elementwise)
    assert not any(found[name] for name in elementwise)
    products, attention = "aten::mm", "aten::scaled_dot_product_attention"
    assert (found[products], found[attention]) == (plain[products], plain[attention])
    assert found["CompiledFunction"] == 6  # four norms, the MLP and the rotary embedding


@pytest.mark.parametrize("family", sampled(["Llama", "Gemma2", "Qwen3", "GPT2", "Phi3", "Olmo2", "Glm", "Mixtral"]))
def test_compiled_parts_err_as_plain_ones_and_all_layers_and_lengths_share_a_few_graphs(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, graphs = causal_lm(family, num_hidden_layers=3), list[torch.fx.GraphModule]()
    aot = torch._dynamo.lookup_backend("aot_eager_decomp_partition")

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor], **options: Any) -> Any:
        graphs.append(graph)
        return aot(graph, inputs)

    lengths, kinds, call = (8, 12, 17, 25), set[tuple[object, ...]](), CompiledPart.__call__

    def noted(part: CompiledPart, *args: Any, **kwargs: Any) -> object:
        shapes = [x.shape for x in args if isinstance(x, Tensor)]
        kinds.add(
            (part.plain.__qualname__, *[n for shape in shapes for n in shape if n not in (*lengths, IDS.shape[1])])
        )
        return call(part, *args, **kwargs)

    monkeypatch.setattr(CompiledPart, "__call__", noted)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    applied = apply(model, loss=ROWS, compile="pointwise")
    found = values(model, own_loss, COUNT)
    for length in lengths:
        model(input_ids=IDS[:, :length], labels=IDS[:, :length]).loss.backward()
    # One of the first length and one of all others, for the MLP, the rotary embedding, and norms of a shape.
    assert 2 <= len(graphs) <= 2 * len(kinds) <= 10
    with torch.no_grad():
        model.eval().generate(IDS[:, :3], max_new_tokens=2, do_sample=False)
    count = len(graphs)
    applied.revert()
    wide = {"experts_implementation": "eager"} if family == "Mixtral" else {}
    truth = values(causal_lm(family, torch.float64, num_hidden_layers=3, **wide), exact_loss, COUNT, 0.0)
    check_errs_as_plain(found, lambda: values(model, own_loss, COUNT), truth)
    assert len(graphs) == count


def test_a_reentrant_checkpoint_drops_in_its_recomputation_what_it_dropped_before() -> None:
    model = causal_lm("GPT2", resid_pdrop=0.3).train()
    apply(model, loss=None, compile="pointwise")
    mlp = model.transformer.h[0].mlp
    for seed in range(3):
        torch.manual_seed(seed)
        mlp.zero_grad()
        x = torch.randn(1, 1, mlp.c_proj.weight.shape[1], requires_grad=True)
        out = torch.utils.checkpoint.checkpoint(mlp, x, use_reentrant=True)
        out.sum().backward()
        assert torch.equal(out.flatten() == 0, mlp.c_proj.bias.grad == 0)


def test_parts_that_are_kernels_of_ligers_are_left_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    file = importlib.import_module("transformers.models.llama.modeling_llama")
    rotary = of_liger(partial(file.apply_rotary_pos_emb))
    monkeypatch.setattr(file, "apply_rotary_pos_emb", rotary)
    model = with_liger()
    mlp, norm = model.model.layers[0].mlp.forward, model.model.norm.forward
    apply(model, compile="pointwise")
    assert (model.model.layers[0].mlp.forward, file.apply_rotary_pos_emb) == (mlp, rotary)
    assert model.model.norm.forward != norm


def test_models_of_a_class_share_the_rotary_embedding_until_the_last_is_reverted_or_gone() -> None:
    gc.collect()  # of models of other tests
    file = vars(importlib.import_module("transformers.models.llama.modeling_llama"))
    plain = file["apply_rotary_pos_emb"]
    models = [causal_lm() for _ in range(2)]
    first, second = (apply(model, compile="pointwise") for model in models)
    shared = file["apply_rotary_pos_emb"]
    first.revert()
    assert file["apply_rotary_pos_emb"] is shared is not plain
    second.revert()
    assert file["apply_rotary_pos_emb"] is plain
    apply(models[0], compile="pointwise")
    assert file["apply_rotary_pos_emb"] is not plain
    models.clear()
    gc.collect()
    assert file["apply_rotary_pos_emb"] is plain
