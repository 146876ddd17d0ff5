"""Models of transformers train as they did, with chunked losses, compiled layers and bucketed evaluation."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from causal_lm_gradients import COUNT, IDS, LABELS, check_errs_as_plain, exact_loss, own_loss, values
from chunked_programs import Allocations, allocations
from tiny_causal_lms import FAMILIES, HIDDEN, SAMPLE, VOCABULARY, causal_lm, sampled, with_liger
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import subtensors as st

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("compiler")]
apply = st.integrations.transformers.apply

ROWS = {"rows": 4}
LOGITS = IDS.numel() * VOCABULARY


def smoothed_loss(model: Any, count: Tensor | None) -> Tensor:
    """What a Trainer makes of logits that it smooths the labels for."""
    smoother = transformers.trainer_pt_utils.LabelSmoother(epsilon=0.1)
    logits = model(input_ids=IDS).logits
    loss: Tensor = smoother({"logits": logits}, LABELS, shift_labels=True, num_items_in_batch=count)
    return loss


def measured(model: Any, loss_of: Callable[..., Tensor], *args: Any) -> tuple[Tensor, int]:
    """The same, and the size of the largest tensor that was made for them; what is watched isn't compiled."""
    seen = Allocations()
    return values(model, loss_of, *args, watch=seen), seen.largest


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", sampled([*FAMILIES]))
def test_losses_and_gradients_err_as_plain_ones_and_logits_are_never_there(
    family: str, tied: bool, smoothing: float
) -> None:
    model, count = causal_lm(family, tie_word_embeddings=tied), COUNT if tied else None
    loss_of = smoothed_loss if smoothing else own_loss
    # The grouped products of experts are of float32 at most.
    wide = {"experts_implementation": "eager"} if family == "Mixtral" else {}
    exact = causal_lm(family, torch.float64, tie_word_embeddings=tied, **wide)
    truth = values(exact, exact_loss, count, smoothing)
    applied = apply(model, loss=ROWS)
    found, largest = measured(model, loss_of, count)
    assert largest < LOGITS / 2
    applied.revert()
    check_errs_as_plain(found, lambda: values(model, loss_of, count), truth)
    assert measured(model, loss_of, count)[1] >= LOGITS


def test_enough_families_are_compared() -> None:
    assert len(FAMILIES) >= 12


@pytest.mark.parametrize("compiled", [{"backend": "aot_eager"}, "pointwise"], ids=["layers", "pointwise"])
@pytest.mark.parametrize("options", [{"use_reentrant": True}, {"use_reentrant": False}])
def test_checkpointed_models_keep_their_gradients(options: dict[str, bool], compiled: Any) -> None:
    model = causal_lm()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    applied = apply(model, loss=ROWS, compile=compiled)
    found = values(model, own_loss, COUNT)
    applied.revert()
    truth = values(causal_lm(dtype=torch.float64), exact_loss, COUNT, 0.0)
    check_errs_as_plain(found, lambda: values(model, own_loss, COUNT), truth)


class Attention:
    """A compiler that notes the calls of attention, and runs the graph as it is."""

    def __init__(self) -> None:
        self.masked: list[bool] = []
        self.causal: list[bool] = []

    def note(self, kwargs: Any) -> None:
        self.masked.append(kwargs.get("attn_mask") is not None)
        self.causal.append(kwargs.get("is_causal", False))

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        for node in graph.graph.nodes:
            if node.target is F.scaled_dot_product_attention:
                self.note(node.kwargs)
        return graph


MASKS = {"none": None, "ones": torch.ones_like(IDS), "padding": torch.ones_like(IDS).index_fill(1, torch.tensor(0), 0)}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("family", SAMPLE[::2])
def test_a_mask_that_says_nothing_leaves_attention_causal_by_its_flag(
    family: str, mask: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, seen, attend = causal_lm(family), Attention(), F.scaled_dot_product_attention
    model.set_attn_implementation("sdpa")
    if not compiled:
        monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **k: (seen.note(k), attend(*a, **k))[1])
    apply(model, loss=ROWS, compile={"backend": seen} if compiled else False)
    model(input_ids=IDS, attention_mask=MASKS[mask], labels=LABELS).loss.backward()
    assert seen.masked
    assert {*seen.masked} == {mask == "padding"}
    assert {*seen.causal} == {mask != "padding"}


@pytest.mark.parametrize("family", ["Llama", "OPT"])
def test_layers_are_compiled_once_for_all_of_them_and_for_all_lengths_after_the_second(family: str) -> None:
    model, graphs = causal_lm(family, num_hidden_layers=3), Attention()
    apply(model, compile={"backend": graphs})
    for length in (8, 12, 17, 25, 33):
        model(input_ids=IDS[:, :length], labels=IDS[:, :length]).loss.backward()
    assert len(graphs.masked) == 2


def kept_for_backward(model: Any) -> int:
    """Count the numbers that the body keeps for its backward, beside the parameters."""
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        if not isinstance(x, torch.nn.Parameter):
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes() // x.element_size()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        hidden = model.model(input_ids=IDS).last_hidden_state
    hidden.sum().backward()
    return sum(kept.values())


def test_compiled_layers_keep_neither_normalized_inputs_nor_gated_activations() -> None:
    model, backend = causal_lm(), "aot_eager_decomp_partition"
    for layer in model.model.layers:
        layer.compile(backend=backend)
    plain = kept_for_backward(model)
    gradients = [p.grad for p in model.model.parameters()]
    model.zero_grad()
    torch.compiler.reset()
    apply(model, compile={"backend": backend})
    config = model.config
    saved = config.num_hidden_layers * IDS.numel() * (2 * config.hidden_size + config.intermediate_size)
    assert plain - saved - 100 < kept_for_backward(model) < plain - saved + 100
    torch.testing.assert_close([p.grad for p in model.model.parameters()], gradients)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("mask", MASKS)
def test_attention_prefers_a_given_kernel_where_there_is_no_mask(
    mask: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, cudnn, before = causal_lm(), SDPBackend.CUDNN_ATTENTION, torch._C._get_sdp_priority_order()
    model.set_attn_implementation("sdpa")
    seen: set[tuple[int, bool, bool]] = set()
    flags, attend = torch.backends.cuda, F.scaled_dot_product_attention

    def noting(*args: Any, **kwargs: Any) -> Tensor:
        seen.add((torch._C._get_sdp_priority_order()[0], flags.math_sdp_enabled(), flags.mem_efficient_sdp_enabled()))
        return attend(*args, **kwargs)

    def run_graph(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        for node in graph.graph.nodes:
            if node.target is attend:
                node.target = noting
        graph.recompile()
        return graph

    if not compiled:
        monkeypatch.setattr(F, "scaled_dot_product_attention", noting)
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True):
        applied = apply(model, attention=cudnn, compile={"backend": run_graph} if compiled else False)
        model(input_ids=IDS, attention_mask=MASKS[mask], labels=LABELS).loss.backward()
    first = SDPBackend.FLASH_ATTENTION if mask == "padding" else cudnn
    assert seen == {(first.value, True, False)}
    assert torch._C._get_sdp_priority_order() == before
    applied.revert()
    assert model.config._attn_implementation == "sdpa"


def everything(model: Any) -> list[dict[str, Any]]:
    """What each module holds."""
    return [
        {name: {**value} if isinstance(value, dict) else value for name, value in vars(module).items()}
        for module in model.modules()
    ]


@pytest.mark.parametrize("compile", [True, "pointwise"])
def test_revert_leaves_each_module_as_it_was(compile: Any) -> None:
    model = causal_lm()
    before, found = everything(model), values(model, own_loss, COUNT)
    applied = apply(model, "adamw", compile=compile, buckets=st.Dim("seq", max=64, buckets=16), loss=ROWS)
    assert everything(model) != before
    applied.revert()
    applied.revert()
    assert everything(model) == before
    assert torch.equal(values(model, own_loss, COUNT), found)


def test_what_fails_halfway_leaves_the_model_as_it_was() -> None:
    class Bare(torch.nn.Module):
        """A model without layers of transformers'."""

        def __init__(self) -> None:
            super().__init__()
            self.config, self.head = transformers.LlamaConfig(), torch.nn.Linear(2, 4)

        def get_output_embeddings(self) -> torch.nn.Module:
            return self.head

    model = Bare()
    before = everything(model)
    with pytest.raises(TypeError, match="take a model whose body has layers, and Bare hasn't"):
        apply(model, compile=True)
    assert everything(model) == before


def test_logits_that_are_asked_for_are_plain_and_generate_gives_the_same_tokens() -> None:
    model = causal_lm().eval()
    prompt = {"input_ids": IDS[:, :5], "attention_mask": torch.ones_like(IDS[:, :5])}
    with torch.no_grad():
        logits = model(input_ids=IDS).logits
    tokens = model.generate(**prompt, max_new_tokens=4, do_sample=False)
    apply(model, compile={"backend": "eager"}, buckets=st.Dim("seq", max=64, buckets=16))
    with torch.no_grad():
        found = model(input_ids=IDS).logits
    assert type(model(input_ids=IDS).logits) is Tensor
    torch.testing.assert_close(found, logits)
    assert torch.equal(model.generate(**prompt, max_new_tokens=4, do_sample=False), tokens)
    logits = model(input_ids=IDS, labels=IDS).logits
    assert isinstance(logits, st.ChunkedTensor)
    torch.testing.assert_close(logits.realize(), found)


@pytest.mark.parametrize("family", ["Llama", "OPT"])
def test_evaluation_runs_each_length_in_its_bucket_and_never_makes_the_logits(family: str) -> None:
    model, lengths = causal_lm(family).eval(), (9, 12, 15, 30, 31)
    batches = [
        {"input_ids": IDS[:, :n], "attention_mask": torch.ones_like(IDS[:, :n]), "labels": LABELS[:, :n]}
        for n in lengths
    ]
    with torch.no_grad():
        plain = [model(**batch).loss for batch in batches]
        apply(model, loss=ROWS, buckets=st.Dim("seq", max=64, buckets=16))
        found = [model(**batch).loss for batch in batches]
        with allocations() as seen:
            model(**batches[0])
    torch.testing.assert_close(found, plain)
    stats = model.get_decoder().forward.run.stats()
    assert {next(iter(bucket.sizes.values())) for bucket in stats.buckets} == {16, 32}
    assert seen.largest < 9 * 2 * VOCABULARY


def test_a_whole_step_is_that_of_the_model_and_a_torch_optimizer() -> None:
    weights = []
    for ours in (True, False):
        model = causal_lm("GPT2")
        if ours:
            optimizer: Any = apply(model, "adamw", loss=ROWS, lr=1e-2, max_norm=0.1).optimizer
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(3):
            optimizer.zero_grad()
            model(input_ids=IDS, labels=LABELS).loss.backward()
            if not ours:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        weights.append([p.detach() for p in model.parameters()])
    torch.testing.assert_close(*weights)


BUCKETS = {"buckets": st.Dim("seq", max=64, buckets=16)}


@pytest.mark.parametrize(
    "options",
    [{"compile": {"backend": "eager"}}, {"compile": "pointwise"}, BUCKETS],
    ids=["layers", "pointwise", "buckets"],
)
def test_models_are_copied_and_saved_with_what_was_applied(options: dict[str, Any]) -> None:
    model = causal_lm()
    apply(model, loss=ROWS, **options)
    found = values(model, own_loss, COUNT)
    with torch.no_grad():
        model(input_ids=IDS)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    others = copy.deepcopy(model), torch.load(file, weights_only=False)
    assert all(torch.equal(values(other, own_loss, COUNT), found) for other in others)
    assert all(measured(other, own_loss, COUNT)[1] < LOGITS / 2 for other in others)
    with torch.no_grad():
        expected = model(input_ids=IDS).logits
        for p in model.parameters():
            p.zero_()
        assert all(torch.equal(other(input_ids=IDS).logits, expected) for other in others)


def test_a_body_whose_forward_a_user_replaced_runs_in_buckets() -> None:
    model, calls = causal_lm().eval(), []
    with torch.no_grad():
        expected = model(input_ids=IDS).logits
    plain = model.model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return plain(*args, **kwargs)

    model.model.forward = forward
    applied = apply(model, **BUCKETS)
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=IDS).logits, expected)
    assert calls
    assert [*model.model.forward.run.stats().buckets[0].sizes.values()] == [48]
    applied.revert()
    assert model.model.forward is forward


def test_a_head_is_called_with_one_position_and_by_keyword() -> None:
    model, hidden = causal_lm(), torch.ones(HIDDEN, requires_grad=True)
    expected = model.lm_head(hidden)
    apply(model)
    torch.testing.assert_close(model.lm_head(hidden), expected)
    torch.testing.assert_close(model.lm_head(input=hidden), expected)


@pytest.mark.parametrize("compile", [False, "pointwise"], ids=["eager", "pointwise"])
def test_adapters_train_as_they_did(compile: Any) -> None:
    peft = pytest.importorskip("peft")

    def adapted(dtype: torch.dtype) -> Any:
        names = ["q_proj", "up_proj", "lm_head"]
        model = peft.get_peft_model(
            causal_lm(dtype=dtype), peft.LoraConfig(r=2, target_modules=names, lora_dropout=0.0)
        )
        for place, p in enumerate(p for p in model.parameters() if p.requires_grad):
            torch.nn.init.normal_(p, generator=torch.Generator().manual_seed(place))
        return model.to(dtype)

    model = adapted(torch.float32)
    truth = values(adapted(torch.float64), exact_loss, COUNT, 0.0)
    applied = apply(model, "adamw", loss=ROWS, compile=compile)
    with allocations() as seen:
        found = values(model, own_loss, COUNT)
    assert seen.largest < LABELS.numel() * VOCABULARY / 2
    assert {*map(id, applied.optimizer.param_groups[0]["params"])} == {
        id(p) for p in model.parameters() if p.requires_grad
    }
    applied.revert()
    check_errs_as_plain(found, lambda: values(model, own_loss, COUNT), truth)


def t5() -> Any:
    sizes = {"d_model": HIDDEN, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=VOCABULARY, **sizes))


def without_head() -> Any:
    return transformers.LlamaModel(causal_lm().config)


def odd_head() -> Any:
    model = causal_lm()
    model.lm_head = torch.nn.Sequential(model.lm_head)
    return model


def trained_norms() -> Any:
    model = causal_lm()
    for name, p in model.named_parameters():
        p.requires_grad_("norm" in name)
    return model


REFUSALS: dict[str, tuple[Callable[[], Any], dict[str, Any], type[Exception], str]] = {
    "an encoder": (t5, {}, TypeError, "T5ForConditionalGeneration is an encoder and a decoder"),
    "no head": (without_head, {}, TypeError, r"head is a torch.nn.Linear; that of LlamaModel, .*, is None"),
    "another head": (odd_head, {}, TypeError, "LlamaForCausalLM, .*, is a Sequential"),
    "no model": (lambda: torch.nn.Linear(2, 2), {}, TypeError, "a causal language model of transformers, got Linear"),
    "an optimizer": (causal_lm, {"optimizer": "adamx"}, ValueError, "optimizer is one of .*adamw, .*got 'adamx'"),
    "an optimizer of torch": (
        causal_lm,
        {"optimizer": torch.optim.AdamW},
        ValueError,
        "'adamw' names that of st.optim",
    ),
    "no matrices": (trained_norms, {"optimizer": "muon"}, ValueError, "is a matrix of the model's layers"),
    "a loss": (causal_lm, {"loss": "liger"}, ValueError, "loss is \"chunked\", .* got 'liger'"),
    "rows": (causal_lm, {"loss": {"row": 1}}, TypeError, "row"),
    "a dim": (causal_lm, {"loss": {"dim": 0}}, TypeError, "dim"),
    "buckets": (causal_lm, {"buckets": 16}, TypeError, "buckets is a st.Dim or None, got 16"),
    "attention": (causal_lm, {"attention": "cudnn"}, TypeError, "attention is a .*SDPBackend or None, got 'cudnn'"),
    "attention of a model without": (
        lambda: causal_lm(attn_implementation="eager"),
        {"attention": SDPBackend.CUDNN_ATTENTION},
        ValueError,
        'takes a model with attn_implementation="sdpa", and this one has "eager"',
    ),
    "compile": (causal_lm, {"compile": "max"}, TypeError, "compile is a bool, \"pointwise\", or a dict .*got 'max'"),
    "Liger": (with_liger, {"compile": True}, ValueError, "would compile Liger's kernels in the layers of LlamaForC"),
    "no parts": (lambda: causal_lm("OPT"), {"compile": "pointwise"}, TypeError, "norms, .* OPTForCausalLM has none"),
    "lr": (causal_lm, {"lr": 0.1}, TypeError, "takes no lr without an optimizer"),
    "an option": (causal_lm, {"optimizer": "adamw", "momentum": 0.1}, TypeError, "momentum"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_can_not_be_applied_is_refused_by_name(case: str) -> None:
    make, options, error, message = REFUSALS[case]
    model = make()
    before = everything(model)
    with pytest.raises(error, match=message):
        apply(model, **options)
    assert everything(model) == before


def test_a_second_chunking_of_a_head_is_refused() -> None:
    model = causal_lm()
    first = apply(model, "AdamW", lr=1e-3)
    assert repr(first) == "<Applied, optimizer=AdamW: revert() takes it back>"
    with pytest.raises(ValueError, match=r"the head of LlamaForCausalLM is chunked already; revert\(\)"):
        apply(model)
    first.revert()
    apply(model).revert()


def test_a_second_change_of_a_body_is_refused() -> None:
    model = causal_lm()
    first = apply(model, compile={"backend": "eager"})
    with pytest.raises(ValueError, match=r"the body of LlamaForCausalLM is compiled or in buckets already; revert\(\)"):
        apply(model, loss=None, **BUCKETS)
    first.revert()
    apply(model, **BUCKETS).revert()
