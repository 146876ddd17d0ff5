"""Ops along a dim that was flattened from padded ones, reshapes into padded dims, and interpolation to padded sizes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pretend_graphs import pretend
from torch import Tensor, nn

import subtensors as st
from subtensors.padded import torch_function as padded_calls

HEIGHT, WIDTH = (st.Dim(name, max=16, buckets=[4, 8]) for name in ("height", "width"))
TOKEN = torch.randn(1, 1, 3, dtype=torch.float64)
TABLE = torch.randn(1, 3, 5, 5, dtype=torch.float64)


def tokens_of(x: Any) -> Any:
    return x.flatten(2).transpose(1, 2)


def with_class_token(x: Any) -> Any:
    return torch.cat([TOKEN.expand(x.shape[0], -1, -1), tokens_of(x)], 1)


def attended(x: Any) -> Any:
    h = with_class_token(x)
    return F.scaled_dot_product_attention(h, h, h)


def back_to_image(x: Any) -> Any:
    h = with_class_token(x)[:, 1:]
    return h.transpose(1, 2).reshape(x.shape[0], 3, x.shape[2], x.shape[3]).cumsum(3)


def windows(x: Any) -> Any:
    h = F.pad(x, (0, -x.shape[3] % 2, 0, -x.shape[2] % 2))
    h = h.view(x.shape[0], 3, h.shape[2] // 2, 2, h.shape[3] // 2, 2)
    return h.permute(0, 2, 4, 3, 5, 1).reshape(-1, 4, 3).softmax(1)


PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "a class token": with_class_token,
    "attention": attended,
    "back to an image": back_to_image,
    "windows": windows,
    "all but the first": lambda x: tokens_of(x)[:, 1:],
    "the last ones": lambda x: tokens_of(x)[:, -2:],
    "in reverse": lambda x: tokens_of(x).flip(1),
    "sorted": lambda x: tokens_of(x).sort(1).values,
    "the largest so far": lambda x: tokens_of(x).cummax(1).values,
    "repeated": lambda x: tokens_of(x).repeat_interleave(2, 1),
    "repeated without a dim": lambda x: tokens_of(x).repeat_interleave(2),
    "laid out again": lambda x: tokens_of(x).repeat(1, 2, 1).cumsum(1),
    "beside what is compact": lambda x: tokens_of(x) * with_class_token(x)[:, 1:],
    "columns first": lambda x: x.transpose(2, 3).reshape(x.shape[0], 3, x.shape[2], x.shape[3]),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_flattened_dim_is_one_of_its_valid_positions(name: str) -> None:
    program = PROGRAMS[name]
    for height, width in ((3, 2), (4, 4), (2, 5), (7, 3)):
        x = torch.randn(2, 3, height, width, dtype=torch.float64, requires_grad=True)
        padded_calls.fallbacks.clear()
        found = program(st.pad(x, {2: HEIGHT, 3: WIDTH}, value=float("nan"))).unpad()
        assert not padded_calls.fallbacks
        expected = program(x)
        torch.testing.assert_close(found, expected)
        cotangent = torch.randn_like(expected)
        gradients = [torch.autograd.grad(out, x, cotangent)[0] for out in (found, expected)]
        torch.testing.assert_close(*gradients)


MODES: list[dict[str, Any]] = [
    *({"mode": mode, "align_corners": aligned} for mode in ("bilinear", "bicubic") for aligned in (False, True)),
    *({"mode": mode, "antialias": True} for mode in ("bilinear", "bicubic")),
    *({"mode": mode} for mode in ("nearest", "nearest-exact")),
]


@pytest.mark.parametrize("options", MODES, ids=lambda options: "-".join(map(str, options.values())))
def test_an_interpolation_to_and_from_a_padded_size_has_its_true_scale(options: dict[str, Any]) -> None:
    for height, width in itertools.product((1, 3, 4, 7), (2, 5)):
        x = torch.randn(2, 3, height, width, dtype=torch.float64)
        padded = st.pad(x, {2: HEIGHT, 3: WIDTH}, value=float("nan"))
        padded_calls.fallbacks.clear()
        for size in (lambda x: (6, x.shape[2]), lambda x: (x.shape[3], x.shape[2] + 1)):
            found = F.interpolate(padded, size=size(padded), **options).unpad()
            torch.testing.assert_close(found, F.interpolate(x, size=size(x), **options))
        assert not padded_calls.fallbacks


class Positions(nn.Module):
    """What models of images do with positions that were learned at another size."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(TABLE.clone())

    def forward(self, x: Tensor) -> Tensor:
        places = F.interpolate(self.table, size=(x.shape[2], x.shape[3]), mode="bicubic")
        return attended(x) + torch.cat([TOKEN, places.permute(0, 2, 3, 1).view(1, -1, 3)], 1)


@pytest.mark.parametrize("check", ["first", False])
def test_positions_of_a_parameter_are_interpolated_to_the_true_sizes_of_a_bucket(
    check: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, trained=True)
    torch.manual_seed(0)
    model = Positions()
    run = st.bucketed(model, {"x": {2: HEIGHT, 3: WIDTH}}, check=check)
    for height, width in ((3, 2), (4, 4), (2, 5), (7, 3), (2, 3)):
        x = torch.randn(2, 3, height, width, dtype=torch.float64)
        found, expected = run(x), model(x)
        torch.testing.assert_close(found, expected)
        gradients = [torch.autograd.grad(out.sin().sum(), model.table)[0] for out in (found, expected)]
        torch.testing.assert_close(*gradients)
    assert not run.stats().fallbacks


def test_a_branch_on_two_padded_sizes_is_taken_as_their_true_sizes_decide() -> None:
    def program(x: Any) -> Any:
        halved = x[:, ::2]
        if 2 * halved.shape[1] > x.shape[1]:
            halved = halved + 1
        return halved

    dims = {1: st.Dim("n", max=8, buckets=[8])}
    for n in (5, 6):
        x = torch.randn(2, n)
        torch.testing.assert_close(program(st.pad(x, dims)).unpad(), program(x))
    with pytest.raises(st.RuleError, match="a branch compares"):
        program(st.pad([torch.ones(5), torch.ones(6)], {0: dims[1]}))


def test_a_bucket_has_no_graph_where_true_sizes_decide_a_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)

    def program(x: Any) -> Any:
        halved = x[:, ::2]
        return halved + 1 if 2 * halved.shape[1] > x.shape[1] else halved

    run = st.bucketed(program, {0: {1: st.Dim("n", max=8, buckets=[8])}}, check=False)
    for n in (5, 6, 7):
        x = torch.randn(2, n)
        torch.testing.assert_close(run(x), program(x))
    assert any("a branch compares" in reason for reason in run.stats().fallbacks)


def test_the_backward_of_a_softmax_may_be_called_by_hand() -> None:
    class Softmax(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            out = x.softmax(-1)
            ctx.save_for_backward(out)
            return out

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            (out,) = ctx.saved_tensors
            return torch._softmax_backward_data(gradients[0], out, -1, out.dtype)

    rows = [torch.randn(n, 4, dtype=torch.float64, requires_grad=True) for n in (5, 3)]
    padded = st.pad(rows, {0: HEIGHT}, value=float("nan"))
    found = (Softmax.apply(padded @ padded.mT) @ padded).unpad()
    for row, out in zip(rows, found, strict=True):
        expected = (row @ row.mT).softmax(-1) @ row
        torch.testing.assert_close(out, expected)
        gradients = [torch.autograd.grad(y.sin().sum(), row, retain_graph=True)[0] for y in (out, expected)]
        torch.testing.assert_close(*gradients)
