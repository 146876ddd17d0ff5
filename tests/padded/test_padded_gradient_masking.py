"""Where a gradient is zero in the padding already no op masks it, and where it may be anything each does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as some
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import subtensors as st
from demo.model import Block, Size
from subtensors.padded.padded_tensor import PaddedTensor, make_padded, unwrap

SEQ = st.Dim("seq", max=32, buckets=8)
NAN = float("nan")


class Masks(TorchDispatchMode):
    """Counts fills and masks, which are `where`."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, PaddedTensor) for kind in types):
            return NotImplemented
        self.count += func is torch.ops.aten.where.self
        return func(*args, **(kwargs or {}))


def poisoned(x: Tensor, dim: int = 1) -> PaddedTensor:
    """A padded tensor of which nothing is known, with NaN in the padding."""
    padded = st.pad(x, {dim: SEQ})
    mask = padded.mask()
    dense = torch.where(mask, padded._dense, NAN)
    out = make_padded(unwrap(padded).like(dense))
    return out.requires_grad_(x.requires_grad)


class Model(nn.Module):
    """A transformer that is trained, small."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.token, self.position = nn.Embedding(11, 8), nn.Embedding(32, 8)
        self.blocks = nn.Sequential(*[Block(Size(layers, 8, 2, 32)) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 11)
        self.double()

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.blocks(self.token(tokens) + self.position.weight[: tokens.shape[1]])
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def test_only_the_position_gradient_of_a_transformer_is_masked(device: str) -> None:
    tokens = torch.randint(0, 11, (2, 13), device=device)
    for layers in (1, 3):
        model, alone = Model(layers).to(device), Model(layers).to(device)
        with Masks() as forward:
            loss = model(st.pad(tokens, {1: SEQ}), st.pad(tokens, {1: SEQ}))
        with Masks() as backward:
            loss.backward()
        with Masks() as plain:
            alone(tokens, tokens).backward()
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            # In float64: room for sums in another order, none for what comes out of the padding.
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-11)
        # Without a kernel each norm takes valid rows in place of padded ones, of which there may be none.
        norms = 0 if device == "cuda" else 2 * (2 * layers + 1)
        assert (forward.count - plain.count, backward.count) == (norms + 1, 1)


STEPS: dict[str, Callable[[Any, dict[str, Tensor]], Any]] = {
    "linear": lambda x, w: F.linear(x, w["square"], w["bias"]),
    "add": lambda x, w: x + x,
    "rows": lambda x, w: x + w["bias"],
    "positions": lambda x, w: x + w["positions"][: x.shape[1]],
    "scaled": lambda x, w: x * w["bias"],
    "squared": lambda x, w: x * x,
    "gelu": lambda x, w: F.gelu(x),
    "log": lambda x, w: (x * x + 1).log(),
    "root": lambda x, w: (x.relu() + 0.5).sqrt(),
    "norm": lambda x, w: F.layer_norm(x, (4,), w["bias"], w["row"]),
    "softmax": lambda x, w: x.softmax(-1),
    "along": lambda x, w: x.softmax(1),
    "shifted": lambda x, w: x - x[:, :1],
    "tail": lambda x, w: F.pad(x[:, 1:], (0, 0, 1, 0)),
    "attention": lambda x, w: F.scaled_dot_product_attention(x, x @ w["square"], x, is_causal=True),
    "whole attention": lambda x, w: F.scaled_dot_product_attention(x, x, x),
    "mixed": lambda x, w: x @ (x.transpose(1, 2) @ x),
    "parts": lambda x, w: torch.cat([x[..., 2:], x[..., :2]], -1),
    "split": lambda x, w: x.unflatten(-1, (2, 2)).transpose(-1, -2).flatten(-2),
    "unused": lambda x, w: (x @ w["square"]).unbind(-1)[0].unsqueeze(-1) * x,
    "rows alone": lambda x, w: x.flatten(0, 1).unflatten(0, (x.shape[0], x.shape[1])),
    "dense": lambda x, w: wrap_again(x),
    "written": lambda x, w: written(x),
}
ENDS: dict[str, Callable[[Any], Any]] = {
    "mean": lambda x: x.mean(),
    "last": lambda x: x[:, -1].square().sum(),
    "first": lambda x: x[:, 0].square().sum(),
    "norm": lambda x: x.norm(),
    "classes": lambda x: F.cross_entropy(x.flatten(0, 1), x.detach().argmax(-1).flatten()),
    "pairs": lambda x: F.mse_loss(x, x.detach() + 1),
}


def wrap_again(x: Any) -> Any:
    """Through what the user sees of the storage, where any gradient may arrive in the padding."""
    if not isinstance(x, PaddedTensor):
        return x.clone()
    mask = x.mask()
    return x * make_padded(unwrap(x).like(torch.where(mask, 1.0, NAN).double()))


def written(x: Any) -> Any:
    y = F.linear(x, torch.eye(4, dtype=x.dtype, device=x.device)).clone()
    y += 1
    return y


@settings(max_examples=100, deadline=None)
@given(
    steps=some.lists(some.sampled_from(sorted(STEPS)), min_size=1, max_size=6),
    end=some.sampled_from(sorted(ENDS)),
    n=some.integers(1, 9),
    residual=some.booleans(),
)
def test_gradients_of_random_programs_equal_those_without_padding(
    device: str, steps: list[str], end: str, n: int, residual: bool
) -> None:
    torch.manual_seed(n)
    weights = {
        "square": torch.randn(4, 4), "bias": torch.randn(4), "row": torch.randn(4), "positions": torch.randn(32, 4)
    }  # fmt: skip
    weights = {name: w.to(device, torch.float64) for name, w in weights.items()}
    values = torch.randn(2, n, 4, dtype=torch.float64).to(device)

    def gradients(padded: bool) -> list[Tensor]:
        own = {name: w.clone().requires_grad_() for name, w in weights.items()}
        x = values.clone().requires_grad_()
        y: Any = poisoned(x.detach()).requires_grad_() if padded else x
        start = y
        for step in steps:
            y = STEPS[step](y, own) + y if residual else STEPS[step](y, own)
        found = torch.autograd.grad(ENDS[end](y), [start, *own.values()], allow_unused=True)
        whole = [torch.zeros(()) if g is None else g for g in found]
        return [g.unpad() if isinstance(g, PaddedTensor) else g for g in whole]

    truth = gradients(False)
    # A sum that is zero is one of terms as large as other gradients.
    largest = max(float(g.abs().max()) for g in truth if g.numel())
    assume(largest < 1e30)
    for found, expected in zip(gradients(True), truth, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9 * max(largest, 1))


@pytest.mark.parametrize("through_view", [False, True])
def test_an_edge_fill_is_forgotten_once_valid_values_are_written(through_view: bool) -> None:
    weight = torch.randn(4, 4, requires_grad=True)
    row = torch.ones(4, requires_grad=True)
    values = torch.randn(2, 5, 4)
    values[:, 0] = NAN

    def gradient(x: Any) -> Tensor:
        y = F.layer_norm(x, (4,), row)
        seen = y.unsqueeze(0) if through_view else y
        with torch.no_grad():
            y.masked_fill_(y.isnan(), 0.0)
        return torch.autograd.grad(F.linear(seen, weight).sum(), weight)[0]

    torch.testing.assert_close(gradient(st.pad(values, {1: SEQ})), gradient(values))


def test_a_batch_of_length_zero_has_zero_gradients() -> None:
    norm, layer = nn.LayerNorm(4), nn.Linear(4, 4)
    layer(norm(poisoned(torch.randn(2, 0, 4)))).sum().backward()
    for p in [*norm.parameters(), *layer.parameters()]:
        assert torch.equal(p.grad, torch.zeros_like(p))  # type: ignore[arg-type]


def test_a_double_backward_masks_every_gradient() -> None:
    weight = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    values = torch.randn(2, 5, 4, dtype=torch.float64)

    def second(x: Any) -> Tensor:
        (first,) = torch.autograd.grad((x @ weight).tanh().square().mean(), x, create_graph=True)
        return torch.autograd.grad((first @ weight).exp().sum(), weight)[0]

    found = second(poisoned(values).requires_grad_())
    # In float64: room for sums in another order, none for the NaN of the padding.
    torch.testing.assert_close(found, second(values.clone().requires_grad_()), rtol=1e-9, atol=1e-11)


def test_an_accumulated_gradient_updates_its_fill() -> None:
    x = st.pad(torch.randn(2, 5, 4), {1: SEQ}).requires_grad_()
    weight, ones = torch.randn(4, 4), poisoned(torch.ones(2, 5, 4))
    for times, used in ((1, weight), (2, weight), (2, ones)):
        (F.linear(x, used) if used is weight else x * used).sum().backward()
        expected = torch.full((2, 5, 4), float(used is ones)) + times * weight.sum(0)
        torch.testing.assert_close(x.grad.unpad(), expected)  # type: ignore[union-attr]
        torch.testing.assert_close(x.grad.sum(), expected.sum())  # type: ignore[union-attr]
