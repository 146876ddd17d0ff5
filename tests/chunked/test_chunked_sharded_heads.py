"""Losses of a head that is sharded over the vocabulary: what each rank gets, and what is sent between them.

Truth is the same program in plain torch, in float64 on the whole vocabulary.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from triton_interpreter import mend_interpreter
from two_ranks import on_two_ranks

import subtensors as st
from subtensors.kernels.cross_entropy.cross_entropy import CrossEntropy
from subtensors.kernels.cross_entropy.linear_cross_entropy import linear_cross_entropy
from subtensors.kernels.cross_entropy.vocabulary_shard import VocabularyShard

ROWS, WIDTH, CLASSES = 12, 8, 21
Sent = Counter[tuple[str, int]]


class Collectives(TorchDispatchMode):
    """Counts what this rank sends: by collective, and by the bytes of its operand."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Sent = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes here again as what it sends
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.overloadpacket.__name__:
            sent = args[1] if "allgather" in func.overloadpacket.__name__ else args[0]
            sent = sent if isinstance(sent, Tensor) else sent[0]
            self.seen[func.overloadpacket.__name__.strip("_"), sent.numel() * sent.itemsize] += 1
        return func(*args, **(kwargs or {}))


def tensors(dtype: torch.dtype = torch.float64, rows: int = ROWS, classes: int = CLASSES) -> dict[str, Tensor]:
    torch.manual_seed(0)
    target = torch.randint(classes, (rows,))
    target[1] = -100
    return {
        "hidden": torch.randn(rows, WIDTH).to(dtype),
        "weight": torch.randn(classes, WIDTH).to(dtype),
        "bias": torch.randn(classes).to(dtype),
        "target": target,
        "class_weight": torch.rand(classes).to(dtype),
        "soft": torch.rand(rows, classes).softmax(1).to(dtype),
        "old": torch.randn(rows).to(dtype),
        "gain": torch.randn(rows).to(dtype),
        "vector": torch.randn(classes).to(dtype),
    }


Given = dict[str, Tensor]


def policy_loss(logits: Tensor, given: Given) -> Tensor:
    """A clipped policy loss with an entropy bonus."""
    lp = (logits / 0.7).log_softmax(-1)
    ratio = torch.exp(lp.gather(-1, given["target"].clamp(0)[:, None]).squeeze(-1) - given["old"])
    gain = torch.minimum(ratio * given["gain"], ratio.clamp(0.8, 1.2) * given["gain"])
    return -(gain + 0.01 * -(lp.exp() * lp).sum(-1)).mean()


def of_whole_sequences(logits: Tensor, given: Given) -> Tensor:
    """A loss whose gradient is known once all rows are."""
    lp = logits.log_softmax(-1).gather(-1, given["target"].clamp(0)[:, None]).squeeze(-1)
    return (lp.view(3, -1).mean(1) * given["gain"][:3]).exp().sum().log()


def with_z_loss(logits: Tensor, given: Given) -> Tensor:
    return F.cross_entropy(logits, given["target"]) + 1e-2 * logits.logsumexp(-1).square().mean()


LOSSES: dict[str, Callable[[Tensor, Given], Tensor]] = {
    "mean": lambda y, g: F.cross_entropy(y, g["target"]),
    "sum": lambda y, g: F.cross_entropy(y, g["target"], reduction="sum"),
    "ignore_index": lambda y, g: F.cross_entropy(y, g["target"].clamp(0), ignore_index=int(g["target"][0])),
    "label smoothing": lambda y, g: F.cross_entropy(y, g["target"], label_smoothing=0.1),
    "class weights": lambda y, g: F.cross_entropy(y, g["target"], g["class_weight"], label_smoothing=0.1),
    "soft targets": lambda y, g: F.cross_entropy(y, g["soft"]),
    "softcap": lambda y, g: F.cross_entropy(3 * torch.tanh(y / 3), g["target"]),
    "masked rows": lambda y, g: F.cross_entropy(y[g["target"] != -100], g["target"][g["target"] != -100]),
    "shifted labels": lambda y, g: F.cross_entropy(y[:-1], g["target"][1:]),
    "each row's own, weighted": lambda y, g: (F.cross_entropy(y, g["target"], reduction="none") * g["gain"]).sum(),
    "nll": lambda y, g: F.nll_loss(y.log_softmax(-1), g["target"]),
    "z-loss": with_z_loss,
    "policy": policy_loss,
    "whole sequences": of_whole_sequences,
    "masked": lambda y, g: F.cross_entropy(
        y.masked_fill(g["vector"] > 0.5, -9) / g["gain"].exp()[:, None], g["target"]
    ),
    "expectation": lambda y, g: (y.softmax(-1) * g["vector"]).sum(-1).square().mean(),
}


def ranks() -> DeviceMesh:
    return init_device_mesh("cpu", (2,))


def gradients(loss: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """The loss and the gradients of leaves, each whole."""
    found = torch.autograd.grad(3 * loss, leaves)
    return [loss.detach(), *(x.full_tensor() if isinstance(x, DTensor) else x for x in found)]


def truth(program: Callable[[Tensor, Given], Tensor], given: Given, bias: bool = True) -> list[Tensor]:
    leaves = [given[name].clone().requires_grad_() for name in ("hidden", "weight", *(["bias"] if bias else []))]
    return gradients(program(F.linear(*leaves), given), leaves)


def every_loss(folder: Path) -> dict[str, Sent]:
    """Each loss against float64 truth; what was sent."""
    mesh, given, seen = ranks(), tensors(), {}
    for name, program in LOSSES.items():
        for bias in (True, False):
            hidden = given["hidden"].clone().requires_grad_()
            names = ["weight", *(["bias"] if bias else [])]
            head = [distribute_tensor(given[x], mesh, [Shard(0)]).requires_grad_() for x in names]
            with Collectives() as sent:
                loss = program(F.linear(st.chunk(hidden, rows=5), *head), given)
                actual = torch.autograd.grad(3 * loss, [hidden, *head])
            seen[name] = sent.seen
            assert all(type(x) is DTensor and x.placements == (Shard(0),) for x in actual[1:]), name
            found = [loss.detach(), actual[0], *(x.full_tensor() for x in actual[1:])]
            for a, e in zip(found, truth(program, given, bias), strict=True):
                torch.testing.assert_close(a, e, msg=lambda text, name=name, bias=bias: f"{name} {bias}: {text}")
    return seen


def test_every_loss_of_a_sharded_head_is_that_of_the_whole_one_by_two_all_reduces_of_numbers_a_row(
    tmp_path: Path,
) -> None:
    for seen in on_two_ranks(every_loss, tmp_path):
        for name, sent in seen.items():
            assert {kind for kind, _ in sent} == {"allreduce"}, (name, sent)
            rows = ROWS - (name in ("shifted labels", "masked rows"))
            assert sent.pop(("allreduce", 8 * rows * WIDTH), 0) == 1, (name, sent)
            assert sum(sent.values()) == 2, (name, sent)
            assert all(size <= 8 * (4 * ROWS + 2) for _, size in sent), (name, sent)


def learned_temperatures(folder: Path) -> None:
    """The gradient of a temperature a row, to which the classes of each rank add."""
    given, head = tensors(), tensors()["weight"]
    scale = given["gain"].exp()[:, None].requires_grad_()
    sharded = distribute_tensor(head, ranks(), [Shard(0)]).requires_grad_()
    layers = F.linear(st.chunk(given["hidden"], rows=5), sharded), F.linear(given["hidden"], head)
    losses = [F.cross_entropy(y / scale, given["target"]) for y in layers]
    torch.testing.assert_close(*[torch.autograd.grad(loss, scale) for loss in losses])


def test_a_learned_temperature_of_a_sharded_head_has_the_gradient_of_all_classes(tmp_path: Path) -> None:
    on_two_ranks(learned_temperatures, tmp_path)


def errors_in_bfloat16(folder: Path) -> dict[str, tuple[list[float], list[float]]]:
    """The errors of plain torch on the whole vocabulary, and of the sharded head, in blocks of columns too."""
    mesh, out = ranks(), {}
    for name in ("mean", "policy"):
        given = tensors(torch.bfloat16, 64, 5000)
        exact = truth(LOSSES[name], {k: v.double() if v.is_floating_point() else v for k, v in given.items()}, False)
        plain = truth(lambda y, g, name=name: LOSSES[name](y.float(), g), given, False)
        hidden = given["hidden"].clone().requires_grad_()
        head = distribute_tensor(given["weight"], mesh, [Shard(0)]).requires_grad_()
        loss = LOSSES[name](F.linear(st.chunk(hidden, rows=1), head).float(), given)
        ours = gradients(loss, [hidden, head])
        pairs = [zip(x, exact, strict=True) for x in (plain, ours)]
        out[name] = tuple([float((a.double() - e).norm()) for a, e in pair] for pair in pairs)
    return out


def test_a_sharded_head_in_bfloat16_is_as_exact_as_plain_torch_on_the_whole_one(tmp_path: Path) -> None:
    for errors in on_two_ranks(errors_in_bfloat16, tmp_path):
        for name, (plain, ours) in errors.items():
            assert all(own <= 1.5 * of_torch + 1e-6 for own, of_torch in zip(ours, plain, strict=True)), (name, errors)


def kernels_of_a_shard(folder: Path) -> None:
    """The interpreted kernels, on a shard in several blocks, beside plain torch."""
    mesh, rank, given = ranks(), dist.get_rank(), tensors(torch.float32, ROWS, 300)
    shard = VocabularyShard(150 * rank, 300, mesh.get_group())
    options = CrossEntropy(class_weight=given["class_weight"], label_smoothing=0.1, z_loss=0.1, softcap=3.0)
    own = slice(150 * rank, 150 * (rank + 1))
    mend_interpreter()
    for target in (given["target"], given["soft"]):
        args = given["hidden"], given["weight"][own], target, given["bias"][own]
        for kernels in (True, False):
            found = linear_cross_entropy(*args, options=options, columns=64, kernels=kernels, shard=shard)
            whole = given["weight"], target, given["bias"]
            exact = [x.double() if x.is_floating_point() else x for x in (given["hidden"], *whole)]
            wide = replace(options, class_weight=given["class_weight"].double())
            e = linear_cross_entropy(*exact, options=wide, kernels=False)
            for a, b in zip(found, (e.loss, e.hidden, e.weight[own], e.bias[own]), strict=True):
                torch.testing.assert_close(a, b.float())


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles where there is a GPU")
def test_the_kernels_count_the_classes_of_a_shard_among_all(tmp_path: Path) -> None:
    on_two_ranks(kernels_of_a_shard, tmp_path)


def placements_of_everything(folder: Path) -> None:
    """Other ways to have a sharded head: parallel plans, `from_local`, hidden states that are DTensors, frozen ones."""
    mesh, given = ranks(), tensors()
    rank, program, target = dist.get_rank(), LOSSES["mean"], given["target"]
    expected = truth(program, given)

    def layer() -> nn.Linear:
        made = nn.Linear(WIDTH, CLASSES, dtype=torch.float64)
        made.load_state_dict({name: given[name] for name in ("weight", "bias")})
        return made

    for layouts, local in ((Replicate(), True), (Shard(-1), False)):
        head = parallelize_module(layer(), mesh, ColwiseParallel(output_layouts=layouts, use_local_output=local))
        hidden = given["hidden"].clone().requires_grad_()
        with Collectives() as sent, loss_parallel():
            loss = F.cross_entropy(head(st.chunk(hidden, rows=5)), target)
            found = torch.autograd.grad(3 * loss, [hidden, head.weight, head.bias])
        assert {kind for kind, _ in sent.seen} == {"allreduce"}, sent.seen
        for a, e in zip([loss.detach(), found[0], *(x.full_tensor() for x in found[1:])], expected, strict=True):
            torch.testing.assert_close(a, e)
    head = parallelize_module(layer(), mesh, ColwiseParallel())
    with pytest.raises(st.RuleError, match="use_local_output=False"):
        head(st.chunk(given["hidden"], rows=5))
    # Each rank has other tokens, and the plan says so.
    head = parallelize_module(layer(), mesh, ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate()))
    own = given["hidden"].chunk(2)[rank].clone().requires_grad_()
    loss = F.cross_entropy(head(st.chunk(own, rows=4)), target)
    grads = torch.autograd.grad(3 * loss, [own, head.weight, head.bias])
    torch.testing.assert_close(loss.detach(), expected[0])
    torch.testing.assert_close(grads[0], expected[1].chunk(2)[rank])
    for a, e in zip(grads[1:], expected[2:], strict=True):
        torch.testing.assert_close(a.full_tensor(), e)
    # The same for hidden states that are DTensors, of tokens that differ or not; targets too.
    for placement in (Shard(0), Replicate()):
        hidden = distribute_tensor(given["hidden"], mesh, [placement]).requires_grad_()
        local = distribute_tensor(given["weight"], mesh, [Shard(0)]).to_local().requires_grad_()
        weight = DTensor.from_local(local, mesh, [Shard(0)], shape=given["weight"].shape, stride=(WIDTH, 1))
        bias = distribute_tensor(given["bias"], mesh, [Shard(0)]).requires_grad_()
        with Collectives() as sent:
            logits = F.linear(st.chunk(hidden, chunks=2), weight, bias)
            loss = F.cross_entropy(logits, distribute_tensor(target, mesh, [placement]))
            found = torch.autograd.grad(3 * loss, [hidden, local, bias])
        assert not any("gather" in kind and size > 8 * ROWS * WIDTH // 2 for kind, size in sent.seen), sent.seen
        torch.testing.assert_close(found[0].full_tensor(), expected[1])
        torch.testing.assert_close(found[1], expected[2].tensor_split([math.ceil(CLASSES / 2)])[rank])
        torch.testing.assert_close(found[2].full_tensor(), expected[3])
    # Nothing more than numbers a row is sent where the hidden states or the head are frozen, or nothing is trained.
    weight, bias = (distribute_tensor(given[x], mesh, [Shard(0)]) for x in ("weight", "bias"))
    for name in ("mean", "policy"):
        whole = truth(LOSSES[name], given)
        with Collectives() as sent:
            loss = LOSSES[name](F.linear(st.chunk(given["hidden"], rows=5), weight, bias), given)
            torch.testing.assert_close(loss, whole[0])
        assert {kind for kind, _ in sent.seen} == {"allreduce"}, sent.seen
        assert sum(sent.seen.values()) == 2, sent.seen
        hidden = given["hidden"].clone().requires_grad_()
        with Collectives() as sent:
            loss = LOSSES[name](F.linear(st.chunk(hidden, rows=5), weight, bias), given)
            (grad,) = torch.autograd.grad(3 * loss, [hidden])
        torch.testing.assert_close(grad, whole[1])
        assert {kind for kind, _ in sent.seen} == {"allreduce"}, sent.seen
    with torch.no_grad():
        top = F.linear(st.chunk(given["hidden"], rows=5), weight, bias).argmax(-1).realize()
    assert torch.equal(top, F.linear(given["hidden"], given["weight"], given["bias"]).argmax(-1))
    # Another way to call it, a second backward, and autocast, whose sums are of the float32 weight.
    hidden = given["hidden"].float().requires_grad_()
    head = distribute_tensor(given["weight"].float(), mesh, [Shard(0)]).requires_grad_()
    loss = F.cross_entropy(F.linear(st.chunk(hidden, rows=5), head), target)
    assert "of its own" in st.explain(loss)
    for retain in (True, False):
        (grad,) = torch.autograd.grad(loss, [head], retain_graph=retain)
        torch.testing.assert_close(
            3 * grad.full_tensor().double(), truth(program, given, False)[2], rtol=1e-4, atol=1e-5
        )
    with torch.autocast("cpu", torch.bfloat16), Collectives() as sent:
        loss = F.cross_entropy(F.linear(st.chunk(hidden, rows=5), head), target)
        (grad,) = torch.autograd.grad(loss, [head])
    assert grad.dtype is torch.float32
    assert {kind for kind, _ in sent.seen} == {"allreduce"}, sent.seen
    torch.testing.assert_close(3 * grad.full_tensor().double(), truth(program, given, False)[2], rtol=0.05, atol=0.02)
    if hasattr(F, "linear_cross_entropy"):
        loss = F.linear_cross_entropy(st.chunk(given["hidden"], rows=5), weight, target, linear_bias=bias)
        torch.testing.assert_close(loss, expected[0])
    # A loss that waits becomes the part that a process has of a sum.
    hidden, sums = given["hidden"].clone().requires_grad_(), []
    for rows in (hidden, st.chunk(hidden, rows=5)):
        part = F.cross_entropy(F.linear(rows, given["weight"]), target)
        total = DTensor.from_local(part, mesh, [Partial()]).full_tensor() * (rank + 1) + part
        sums.append((total.detach(), *torch.autograd.grad(total, [hidden])))
    torch.testing.assert_close(*sums)
    # A head that is written to before its loss is computed.
    logits = F.linear(st.chunk(hidden, rows=5), head)
    with torch.no_grad():
        head.mul_(2)
    with pytest.raises(st.RuleError, match="modified in place"):
        F.cross_entropy(logits, target).item()
    # A product that is no linear layer, and a loss that reads every logit, gather the head.
    parameter = distribute_tensor(given["weight"], mesh, [Shard(0)]).requires_grad_()
    wide = (st.chunk(given["hidden"], rows=5) @ parameter.t()).square().mean()
    (grad,) = torch.autograd.grad(wide, [parameter])
    plain = given["weight"].clone().requires_grad_()
    (e,) = torch.autograd.grad((given["hidden"] @ plain.t()).square().mean(), [plain])
    torch.testing.assert_close(grad.full_tensor(), e)
    # So does a head that is divided by its width, too.
    blocks = init_device_mesh("cpu", (2, 1), mesh_dim_names=("width", "classes"))
    block = distribute_tensor(given["weight"], blocks, [Shard(1), Shard(0)]).requires_grad_()
    (grad,) = torch.autograd.grad(program(F.linear(st.chunk(given["hidden"], rows=5), block), given), [block])
    torch.testing.assert_close(3 * grad.full_tensor(), truth(program, given, False)[2])


def test_a_sharded_head_may_come_from_a_plan_or_from_local_parts_and_be_frozen(tmp_path: Path) -> None:
    on_two_ranks(placements_of_everything, tmp_path)


def other_tokens(folder: Path) -> str:
    mesh, given = ranks(), tensors()
    head = distribute_tensor(given["weight"], mesh, [Shard(0)]).requires_grad_()
    try:
        F.cross_entropy(F.linear(st.chunk(given["hidden"], rows=5), head), given["target"].roll(dist.get_rank())).item()
    except ValueError as error:
        return str(error)
    return "nothing was raised"


def test_other_tokens_in_each_rank_are_refused_where_no_placement_says_so(tmp_path: Path) -> None:
    for text in on_two_ranks(other_tokens, tmp_path):
        assert "Shard(0)" in text, text


class Model(nn.Module):
    """A layer and a head, and the loss of the head's chunked logits."""

    def __init__(self, chunked: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head, self.chunked = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 40, bias=False), chunked

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        h = self.layer(x)
        logits = self.head(st.chunk(h, rows=2) if self.chunked else h)
        return F.cross_entropy(logits, target)


def resharded_after_forward(folder: Path) -> list[Sent]:
    """Steps of FSDP2 with default flags, with tensor parallelism too in four processes; what each step sends."""
    tensor_parallel = dist.get_world_size() // 2
    mesh = init_device_mesh("cpu", (2, tensor_parallel), mesh_dim_names=("data", "tensor"))
    plain, model = Model(False), Model(True)
    if tensor_parallel > 1:
        parallelize_module(model, mesh["tensor"], {"head": ColwiseParallel(output_layouts=Replicate())})
    for module in (model.layer, model.head, model):
        fully_shard(module, mesh=mesh["data"])
    torch.manual_seed(1)
    data = [(torch.randn(ROWS, WIDTH), torch.randint(40, (ROWS,))) for _ in range(2)]
    own, seen = data[mesh["data"].get_local_rank()], []
    for _ in range(2):
        with Collectives() as sent:
            model(*own).backward()
        seen.append(sent.seen)
        torch.stack([plain(*batch) for batch in data]).mean().backward()
        for a, e in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a.grad.full_tensor(), e.grad)
        for each in (model, plain):
            torch.optim.SGD(each.parameters(), lr=0.5).step()
            each.zero_grad()
        with torch.no_grad():  # evaluation leaves no weight gathered, which a step would make stale
            torch.testing.assert_close(model(*own), plain(*own))
    return seen


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_head_that_fsdp_reshards_after_forward_is_gathered_once_more_however_many_chunks(
    tmp_path: Path, ranks: int
) -> None:
    for steps in on_two_ranks(resharded_after_forward, tmp_path, ranks):
        for sent in steps:
            own = 4 * 40 * WIDTH // ranks
            gathers = {kind: n for (kind, size), n in sent.items() if size == own and "gather" in kind}
            assert gathers == {"allgather_base": 2}, sent
            assert sum(n for (kind, _), n in sent.items() if "reduce_scatter" in kind) == 2, sent


def evaluated_after_it_was_freed(folder: Path) -> None:
    """All logits of a head that FSDP2 freed after its forward, in evaluation, where a copy of its part is gathered."""
    mesh, head = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor")), nn.Linear(WIDTH, CLASSES)
    given, plain = tensors(torch.float32), copy.deepcopy(head)
    for each in (plain, head):
        each.load_state_dict({name: given[name] for name in ("weight", "bias")})
    model = nn.Sequential(parallelize_module(head, mesh["tensor"], ColwiseParallel(output_layouts=Replicate())))
    for module in (head, model):
        fully_shard(module, mesh=mesh["data"], reshard_after_forward=True)
    for grad in (False, True):  # recorded so, and evaluated without
        with torch.set_grad_enabled(grad):
            logits = model(st.chunk(given["hidden"], rows=5))
        with torch.no_grad():
            torch.testing.assert_close(logits.square().realize(), plain(given["hidden"]).square())


def test_a_head_that_fsdp_has_freed_is_gathered_for_all_its_logits_in_evaluation(tmp_path: Path) -> None:
    on_two_ranks(evaluated_after_it_was_freed, tmp_path)
