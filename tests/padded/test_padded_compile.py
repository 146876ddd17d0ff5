"""PaddedTensors under torch.compile: one compilation serves every length of a bucket, forward and backward."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from small_models import gpt2
from torch import Tensor, nn

import subtensors as st

SEQ = st.Dim("seq", max=32, buckets=[16, 32])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        out: Tensor = self.head(h * torch.softmax(h, dim=1))
        return out


def loss_of(net: Net, x: Tensor, y: Tensor) -> Tensor:
    scores = net(x)
    return nn.functional.cross_entropy(scores.transpose(1, 2), y) + scores.mean(1).var()


# Attention in float64, compiled by Inductor for a CPU, fails on torch 2.11 whatever its operands are.
@pytest.mark.parametrize(("backend", "dtype"), [("aot_eager", torch.float64), ("inductor", torch.float32)])
def test_one_compilation_serves_every_length_of_a_bucket(backend: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    net = Net().to(dtype)
    compiled = torch.compile(loss_of, fullgraph=True, backend=backend)
    for i, n in enumerate((5, 16, 1, 11)):
        t, y = torch.randn(2, n, 8, dtype=dtype), torch.randint(0, 4, (2, n))
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            actual = compiled(net, st.pad(t, {1: SEQ}, value=float("nan")), st.pad(y, {1: SEQ}, value=10**9))
            found = [actual, *torch.autograd.grad(actual, list(net.parameters()))]
        truth, plain = (
            [loss, *torch.autograd.grad(loss, list(model.parameters()))]
            for model in (copy.deepcopy(net).double(), net)
            for loss in [loss_of(model, t.to(model.head.weight.dtype), y)]
        )
        unit = torch.finfo(dtype).eps
        for f, p, exact in zip(found, plain, truth, strict=True):
            error, torchs = ((x.double() - exact).abs().max() for x in (f, p))
            assert error <= 1.5 * torchs + 16 * unit * exact.abs().max()


@pytest.mark.parametrize("dynamic", [None, True])
def test_sizes_that_a_compiler_left_open_are_those_of_the_bucket(dynamic: bool | None) -> None:
    def pieces(x: Tensor) -> list[Tensor]:
        return [x.flatten(), x.unflatten(1, (-1, 1)).sum(2), x.transpose(0, 1).reshape(-1), x.expand(2, -1, -1)]

    compiled = torch.compile(pieces, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    seq = st.Dim("seq", max=64, buckets=16)
    for n in (11, 13, 20, 40):
        x = torch.randint(0, 9, (3, n))
        for found, expected in zip(compiled(st.pad(x, {1: seq})), pieces(x), strict=True):
            torch.testing.assert_close(found.unpad(), expected)  # type: ignore[attr-defined]


def test_padded_tensors_come_out_and_gradients_go_back_in() -> None:
    net = Net().double()
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    for i, n in enumerate((5, 9)):
        t = torch.randn(2, n, 8, dtype=torch.float64, requires_grad=True)
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            out = compiled(st.pad(t, {1: SEQ}))
            (grad,) = torch.autograd.grad(out.unpad().square().sum(), t)
        expected = net(t)
        torch.testing.assert_close(out.unpad(), expected)
        torch.testing.assert_close(grad, torch.autograd.grad(expected.square().sum(), t)[0])


@pytest.mark.parametrize(
    "program", [lambda x, y: torch.cat([x, y], 1), lambda x, y: torch.stack([x, y * 2]).sum(0)], ids=["cat", "stack"]
)
def test_ops_that_take_a_list_have_gradients(program: Any) -> None:
    compiled = torch.compile(program, fullgraph=True, backend="aot_eager")
    for i, n in enumerate((5, 9)):
        t, u = (torch.randn(2, n, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            out = compiled(*(st.pad(s, {1: SEQ}, value=float("nan")) for s in (t, u))).unpad()
        expected = program(t, u)
        torch.testing.assert_close(out, expected)
        for a, e in zip(
            torch.autograd.grad(out.square().sum(), [t, u]),
            torch.autograd.grad(expected.square().sum(), [t, u]),
            strict=True,
        ):
            torch.testing.assert_close(a, e)


def test_a_ragged_batch_compiles_once_for_all_lengths() -> None:
    torch.manual_seed(0)
    net = Net().double()

    def loss(x: Any) -> Tensor:
        out: Tensor = net(x).mean(1).square().sum()
        return out

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for i, lengths in enumerate(((5, 16, 2), (3, 3, 9))):
        rows = [torch.randn(n, 8, dtype=torch.float64, requires_grad=True) for n in lengths]
        wanted = [*net.parameters(), *rows]
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            actual = compiled(st.pad(rows, {0: st.Dim("n", max=16, buckets=[16])}, value=float("nan")))
        expected = torch.stack([loss(row[None]) for row in rows]).sum()
        torch.testing.assert_close(actual, expected)
        for a, e in zip(torch.autograd.grad(actual, wanted), torch.autograd.grad(expected, wanted), strict=True):
            torch.testing.assert_close(a, e)


def test_a_write_to_an_argument_is_visible_outside() -> None:
    compiled = torch.compile(lambda x, y: x.mul_(2).add_(y), fullgraph=True, backend="aot_eager")
    for i, n in enumerate((5, 9)):
        t, u = torch.randn(2, n), torch.randn(2, n)
        x, y = st.pad(t, {1: SEQ}, value=7), st.pad(u, {1: SEQ}, value=float("nan"))
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            compiled(x, y)
        torch.testing.assert_close(x.unpad(), t * 2 + u)
        assert x.dense[:, n:].eq(7).all()


def test_count_mask_and_dense_are_computed_in_the_graph() -> None:
    @torch.compile(fullgraph=True, backend="aot_eager")
    def average(x: Any) -> Tensor:
        total: Tensor = torch.where(x.mask(), x.dense, 0).sum() / x.count(0)
        return total

    for n in (3, 7):
        torch.testing.assert_close(average(st.pad(torch.ones(n), {0: SEQ}, value=float("inf"))), torch.tensor(1.0))


def test_an_op_without_a_rule_raises_with_its_name() -> None:
    @torch.compile(fullgraph=True, backend="aot_eager")
    def program(x: Any) -> Any:
        return torch.renorm(x, 2, 0, 0.5)

    with pytest.raises(Exception, match=r"renorm.*cannot run at the true sizes either") as refused:
        program(st.pad(torch.ones(3, 2), {0: SEQ}))
    assert "class other" in str(refused.value)


def test_padding_and_unpadding_inside_compiled_code_raise() -> None:
    with pytest.raises(Exception, match="pad before compiled code"):
        torch.compile(lambda t: st.pad(t, {0: SEQ}).sum(), fullgraph=True, backend="aot_eager")(torch.ones(3))
    with pytest.raises(Exception, match="unpad it outside"):
        torch.compile(lambda x: x.unpad(), fullgraph=True, backend="aot_eager")(st.pad(torch.ones(3), {0: SEQ}))


def test_each_bucket_is_compiled_once() -> None:
    compiled = torch.compile(lambda x: torch.softmax(x, 1).amax(1), fullgraph=True, backend="aot_eager")
    torch._dynamo.utils.counters.clear()
    for n in (5, 20, 9, 32, 16):
        t = torch.randn(2, n, 3)
        torch.testing.assert_close(compiled(st.pad(t, {1: SEQ})), torch.softmax(t, 1).amax(1))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == len(SEQ.buckets)


@pytest.mark.filterwarnings("ignore")
def test_an_unmodified_model_compiles_once_for_every_length() -> None:
    model = gpt2(n_layer=1).eval()
    compiled = torch.compile(
        lambda ids: model(input_ids=ids, use_cache=False).logits, fullgraph=True, backend="aot_eager"
    )
    for i, n in enumerate((5, 16, 9)):
        ids = torch.randint(1, 50, (2, n))
        with torch._dynamo.config.patch(error_on_recompile=i > 0), torch.no_grad():
            logits = compiled(st.pad(ids, {1: SEQ}, value=10**6))
            torch.testing.assert_close(logits.unpad(), model(input_ids=ids).logits)


def test_a_number_that_changes_is_no_constant_of_a_product() -> None:
    def product(x: Tensor, scale: float) -> Tensor:
        return torch.baddbmm(x, x, x.new_ones(2, 4, 4), beta=scale, alpha=scale)

    compiled = torch.compile(product, fullgraph=True, backend="aot_eager")
    for scale in (0.5, 0.75, 1.5):
        x = torch.randn(2, 5, 4)
        torch.testing.assert_close(compiled(st.pad(x, {1: SEQ}), scale).unpad(), product(x, scale))


def test_a_number_that_changes_fills_a_tensor_like_a_padded_one() -> None:
    compiled = torch.compile(lambda x, fill: torch.full_like(x, fill) + x, fullgraph=True, backend="aot_eager")
    for fill in (0.5, 0.75, 1.5):
        x = torch.randn(2, 5)
        torch.testing.assert_close(compiled(st.pad(x, {1: SEQ}), fill).unpad(), x + fill)
