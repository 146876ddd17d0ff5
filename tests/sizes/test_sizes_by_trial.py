"""Inferred sizes of many programs, checked by running each on real tensors of every size."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import subtensors as st
from subtensors.sizes import real_calls
from subtensors.sizes.accepted_sizes import AcceptedSizes

N = st.Dim("n", max=64)
H, W = st.Dim("h", max=9), st.Dim("w", max=9)

Shape = tuple["int | st.Dim", ...]
Program = tuple[Callable[..., object], Shape] | tuple[Callable[..., object], Shape, Shape]


def trial(program: Callable[..., object], shapes: tuple[Shape, ...]) -> tuple[AcceptedSizes, np.ndarray]:
    """Infer the sizes of a program; return them and the mask of those on which it runs, (sizes, ...)."""
    dims = tuple(dict.fromkeys(n for shape in shapes for n in shape if isinstance(n, st.Dim)))
    examples = [torch.zeros([4 if isinstance(n, st.Dim) else n for n in shape]) for shape in shapes]
    found = st.infer_sizes(
        program, examples, [{i: n for i, n in enumerate(shape) if isinstance(n, st.Dim)} for shape in shapes]
    )
    assert found.dims == dims
    runs = np.zeros([(dim.max or 0) + 1 for dim in dims], dtype=bool)
    for point in itertools.product(*(range(n) for n in runs.shape)):
        sizes = dict(zip(dims, point, strict=True))
        tensors = [torch.zeros([sizes[n] if isinstance(n, st.Dim) else n for n in shape]) for shape in shapes]
        try:
            with torch.no_grad():
                program(*tensors)
            runs[point] = True
        except Exception:  # a program may raise anything at sizes that it does not accept
            pass
    return found, runs


def inferred(found: AcceptedSizes, runs: np.ndarray) -> np.ndarray:
    """The mask of the accepted sizes."""
    mask = np.zeros_like(runs)
    for point in itertools.product(*(range(n) for n in runs.shape)):
        mask[point] = point in found
    return mask


def to_multiple(x: Tensor) -> Tensor:
    return F.pad(x, (0, -x.shape[1] % 8)).view(2, -1, 8)


def to_power_of_two(x: Tensor) -> Tensor:
    n = 1 << max(x.shape[1] - 1, 0).bit_length() if isinstance(x.shape[1], int) else 1
    while n < x.shape[1]:
        n *= 2
    return F.pad(x, (0, n - x.shape[1])).view(2, n)


def attention(x: Tensor) -> Tensor:
    q = x.view(2, -1, 4, 3).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q).transpose(1, 2).reshape(2, -1, 12) + x.reshape(2, -1, 12)


def heads_of_width(x: Tensor) -> Tensor:
    heads = x.shape[2] // 4
    q = x.view(2, 5, heads, -1).transpose(1, 2)
    return (q @ q.transpose(2, 3)).softmax(-1) @ q


def halved(x: Tensor) -> Tensor:
    while x.shape[0] > 3:
        x = x.view(2, -1).sum(0)
    return x


def halves_kept(x: Tensor) -> Tensor:
    while x.shape[0] > 1:
        half = x.shape[0] // 2
        x = x[:half] + x[half : 2 * half]
    return x[0]


def raises_beyond(x: Tensor) -> Tensor:
    if x.shape[1] > 40 or x.shape[1] % 6 == 5:
        raise ValueError(f"a length of {x.shape[1]}")
    return x


def power_of_two(x: Tensor) -> Tensor:
    n = x.shape[1]
    if n & (n - 1):
        raise ValueError("no power of two")
    return x


def square(x: Tensor) -> Tensor:
    side = int(x.shape[1] ** 0.5)
    return x.view(2, side, side)


def square_by_math(x: Tensor) -> Tensor:
    side = int(math.sqrt(x.shape[1]))
    assert side * side == x.shape[1]
    return x


def windows(x: Tensor) -> Tensor:
    x = F.pad(x, (2, 2)).unfold(1, 5, 3)
    return x.reshape(2, -1, 2, 5)


def by_branches(x: Tensor) -> Tensor:
    n = x.shape[1]
    if n % 3 == 0:
        return x.view(2, 3, -1)
    if n % 4 == 1 and n < 50:
        return x[:, 1:].view(2, 4, -1)
    return x.view(2, 7, -1)


def u_net(x: Tensor) -> Tensor:
    down = F.avg_pool1d(F.avg_pool1d(x, 2), 2)
    return x + F.interpolate(down, scale_factor=4)


def merged_patches(x: Tensor) -> Tensor:
    h, w = x.shape[1:]
    return x.view(2, h // 3, 3, w // 2, 2).permute(0, 1, 3, 2, 4).reshape(2, -1, 6)


def small_area(x: Tensor) -> Tensor:
    if x.shape[2] * x.shape[3] > 30:
        raise ValueError("too large an image")
    return x


def windowed(x: Tensor) -> Tensor:
    h, w = x.shape[2:]
    x = F.pad(x, (0, (4 - w % 4) % 4, 0, (4 - h % 4) % 4))
    return x.unfold(2, 4, 4).unfold(3, 4, 4).reshape(1, -1, 16)


def either_way(x: Tensor, y: Tensor) -> Tensor:
    return x @ y if x.shape[1] == y.shape[0] else x.T @ y if x.shape[0] == y.shape[0] else x @ y.T


def tiled(x: Tensor, y: Tensor) -> Tensor:
    return x.repeat(y.shape[0] // x.shape[0]) + y


conv1 = nn.Conv1d(3, 4, 5, stride=2, padding=1, dilation=2)
strided = nn.Sequential(nn.Conv1d(3, 4, 7, 3), nn.ReLU(), nn.Conv1d(4, 4, 3, 2), nn.Flatten(), nn.LazyLinear(3))
strided(torch.zeros(1, 3, 40))
image = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2))
encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()

ONE: dict[str, Program] = {
    "dilated convolution": (conv1, (2, 3, N)),
    "convolution with reflection": (nn.Conv1d(3, 4, 3, padding=4, padding_mode="reflect"), (2, 3, N)),
    "circular padding": (lambda x: F.pad(x, (3, 5), mode="circular"), (2, 3, N)),
    "convolutions before a linear layer": (strided, (2, 3, N)),
    "transposed convolution": (nn.ConvTranspose1d(3, 4, 4, 2, 3), (2, 3, N)),
    "groups": (lambda x: F.group_norm(x, 6), (2, N, 4)),
    "pool with ceil mode": (lambda x: F.max_pool1d(x, 4, 3, 1, ceil_mode=True).view(2, -1, 2), (2, 3, N)),
    "average pool": (lambda x: F.avg_pool1d(x, 5, 2) + 1, (2, 3, N)),
    "adaptive pool": (lambda x: F.adaptive_avg_pool1d(x, 4), (2, 3, N)),
    "view": (lambda x: x.view(2, -1, 3, 4), (2, N)),
    "unflatten": (lambda x: x.unflatten(1, (5, -1)), (2, N)),
    "view of a product": (lambda x: x.reshape(-1, 10), (4, N)),
    "unfold": (lambda x: x.unfold(1, 6, 2).reshape(2, -1, 4, 6), (2, N)),
    "unfold of padded": (windows, (2, N)),
    "strided slices": (lambda x: x[:, ::3] + x[:, 1::3], (2, N)),
    "slices of a slice": (lambda x: x[:, 3:-2:2].view(2, -1, 3), (2, N)),
    "chunks": (lambda x: sum(c.sum() for c in x.chunk(4, 1)), (2, N)),
    "chunks of a number": (lambda x: [a * b for a, b in [x.chunk(2, 1)]], (2, N)),
    "split": (lambda x: torch.stack(x.split(8, 1)), (2, N)),
    "split by sizes": (lambda x: x.split([5, 7, x.shape[1] - 12], 1), (2, N)),
    "tensor_split": (lambda x: torch.stack(x.tensor_split(3, 1)), (2, N)),
    "attention": (attention, (2, N, 12)),
    "heads of a width": (heads_of_width, (2, 5, N)),
    "an encoder": (encoder, (2, N, 8)),
    "an encoder's width": (lambda x: F.layer_norm(x, (24,)), (2, N)),
    "fft": (lambda x: torch.fft.fft(x, dim=1), (2, N)),
    "rfft and back": (lambda x: torch.fft.irfft(torch.fft.rfft(x)) + x, (2, N)),
    "stft": (
        lambda x: torch.stft(x, 16, 8, window=torch.hann_window(16), return_complex=True, center=False),
        (2, N),
    ),
    "padded to a multiple": (to_multiple, (2, N)),
    "padded to a power of two": (to_power_of_two, (2, N)),
    "cut to a multiple": (lambda x: x[:, : x.shape[1] // 8 * 8].view(2, -1, 8), (2, N)),
    "cut by a negative pad": (lambda x: F.pad(x, (-3, -4)).view(2, -1, 2), (2, N)),
    "halved until short": (halved, (N,)),
    "halves until one": (halves_kept, (N, 2)),
    "a loop over steps": (lambda x: [x[:, i : i + 16].view(2, 4, -1) for i in range(0, x.shape[1], 16)], (2, N)),
    "raises": (raises_beyond, (2, N)),
    "a power of two": (power_of_two, (2, N)),
    "other bits": (lambda x: x.view(2, (x.shape[1] | 3) ^ 3, -1), (2, N)),
    "shifts": (lambda x: x.view(2, x.shape[1] >> 2, 1 << 2), (2, N)),
    "a square": (square, (2, N)),
    "a square by math": (square_by_math, (2, N)),
    "branches": (by_branches, (2, N)),
    "interpolate and add": (u_net, (2, 3, N)),
    "interpolate by a fraction": (
        lambda x: F.interpolate(x, scale_factor=1.5, recompute_scale_factor=True).view(2, 3, -1, 3),
        (2, 3, N),
    ),
    "a rounded size": (lambda x: x[:, : round(x.shape[1] * 0.3)].view(2, -1, 4), (2, N)),
    "a ratio rounded up": (lambda x: x.view(2, math.ceil(x.shape[1] / 7), -1), (2, N)),
    "a ratio rounded down": (lambda x: x.view(2, -1, max(int(x.shape[1] / 7), 1)), (2, N)),
    "pixel shuffle": (lambda x: F.pixel_shuffle(x, 2), (1, N, 3, 3)),
    "pixel unshuffle": (lambda x: F.pixel_unshuffle(x, 3), (1, 2, N, 6)),
    "instance norm": (nn.InstanceNorm1d(3), (2, 3, N)),
    "batch norm in training": (nn.BatchNorm1d(3), (1, 3, N)),
    "broadcast": (lambda x: x + torch.ones(2, 30), (2, N)),
    "a mask": (lambda x: x.masked_fill(torch.ones(20, 20).triu(1)[:, : x.shape[1]].bool(), 0.0), (20, N)),
    "positions": (lambda x: x + torch.zeros(1, 48, 4)[:, : x.shape[1]], (2, N, 4)),
    "einsum": (lambda x: torch.einsum("bnd,bmd->bnm", x, torch.ones(2, 5, 6)), (2, 4, N)),
    "maximum": (lambda x: x.amax(1), (2, N)),
    "top 5": (lambda x: x.topk(5, dim=1), (2, N)),
    "an index": (lambda x: x[:, 11], (2, N)),
    "narrow": (lambda x: x.narrow(1, 4, x.shape[1] // 2), (2, N)),
    "roll": (lambda x: (x.roll(3, 1) + x).view(2, 5, -1), (2, N)),
}  # fmt: skip

TWO: dict[str, Program] = {
    "an image": (image, (1, 3, H, W)),
    "an image of a convolution": (nn.Conv2d(3, 4, 3, 2), (2, 3, H, W)),
    "patches": (merged_patches, (2, H, W)),
    "a small area": (small_area, (1, 2, H, W)),
    "windows": (windowed, (1, 1, H, W)),
    "pixels": (lambda x: F.pixel_unshuffle(x, 2), (1, 1, H, W)),
    "cat": (lambda x, y: torch.cat([x, y]).view(-1, 3), (H,), (W,)),
    "cat along another dim": (lambda x, y: torch.cat([x, y], 1), (H, 2), (W, 3)),
    "cross attention": (
        lambda x, y: F.scaled_dot_product_attention(x, y, y).reshape(1, -1, 4) + x, (1, H, 4), (1, W, 4),
    ),
    "one of three products": (either_way, (H, 3), (W, 3)),
    "outer": (lambda x, y: (x[:, None] * y).view(6, -1), (H,), (W,)),
    "twice and one more": (lambda x, y: x.repeat(2) + y[1:], (H,), (W,)),
    "tiled": (tiled, (H,), (W,)),
    "pooled": (lambda x: F.adaptive_max_pool2d(x, (3, 2)), (1, 2, H, W)),
    "stacked": (lambda x, y: torch.stack([x[::2], y[1:]]), (H,), (W,)),
}  # fmt: skip


def cases() -> list[object]:
    """The name of each program; every other one of them is slow."""
    return [
        pytest.param(name, marks=[pytest.mark.slow] * (i % 2))
        for programs in (ONE, TWO)
        for i, name in enumerate(programs)
    ]


@pytest.mark.parametrize("name", cases())
def test_inferred_sizes_are_those_that_a_program_runs_on(name: str) -> None:
    program, *shapes = (ONE | TWO)[name]
    found, runs = trial(program, tuple(shapes))
    mask = inferred(found, runs)
    assert found.is_complete
    wrong = mask != runs
    assert not wrong.any(), (np.argwhere(wrong).tolist(), found)


def test_a_program_that_branches_on_values_is_undecided() -> None:
    def positive(x: Tensor) -> Tensor:
        return x.view(2, -1) if x.sum() > 0 else x

    found = st.infer_sizes(positive, [torch.zeros(4)], [{0: N}])
    assert not found.is_complete
    assert 4 not in found
    assert not any(c.is_decided or c.refusal is None for c in found.classes)


def test_more_empty_calls_than_are_tried_are_reported_as_incomplete(monkeypatch: pytest.MonkeyPatch) -> None:
    program, shape = ONE["adaptive pool"]
    assert trial(program, (shape,))[0].is_complete
    monkeypatch.setattr(real_calls, "MAX_CALLS", 0)
    assert not trial(program, (shape,))[0].is_complete


@pytest.mark.parametrize("is_refused", [True, False])
def test_more_runs_by_real_tensors_than_are_made_are_undecided(
    is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def then(x: Tensor) -> Tensor:
        if is_refused and x.shape[-1] == 0:
            raise ValueError("nothing is left")
        return x

    layer = nn.ConvTranspose1d(3, 4, 4, 2, 3)
    shapes: tuple[Shape, ...] = ((2, 3, N),)
    found, runs = trial(lambda x: then(layer(x)), shapes)
    assert (2 in found) == runs[2] != is_refused
    monkeypatch.setattr(real_calls, "MAX_RUNS", 0)
    found, _ = trial(lambda x: then(layer(x)), shapes)
    assert 2 not in found
    assert not found.is_complete


def test_more_combinations_than_are_looked_at_are_reported_as_incomplete() -> None:
    places = [{0: st.Dim("a"), 1: st.Dim("b"), 2: st.Dim("c")}]
    found = st.infer_sizes(torch.relu, [torch.zeros(2, 3, 4)], places)
    assert not found.is_complete
    assert (3, 512, 9) in found
    assert (3, 300, 9) not in found


def test_a_division_by_a_size_of_zero_refuses_that_size_alone() -> None:
    found = st.infer_sizes(lambda x: x.repeat(12 // x.shape[0]), [torch.zeros(4)], [{0: N}])
    assert 0 not in found
    assert 5 in found
