"""Borders and images of another size: what is made at the true end is made of valid data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import subtensors as st
from subtensors.padded import torch_function as padded_calls

SEQ = st.Dim("seq", max=24, buckets=st.Linear(8))
WIDTH = st.Dim("width", max=16, buckets=4)
NAN = float("nan")

# Of images (samples, channels, height, width).
PROGRAMS: dict[str, Callable[[Any], Any]] = {
    **{f"a border by {mode}": lambda x, mode=mode: F.pad(x, (1, 2, 2, 1), mode) for mode in ("replicate", "reflect")},
    "a border in a circle": lambda x: F.pad(x, (2, 0, 1, 3), "circular"),
    "less on one side, then a circle": lambda x: F.pad(x, (-1, 1, -1, 1), "circular"),
    "a border on one side, less on the other": lambda x: F.pad(x, (-1, 1, 2, -1), "replicate"),
    "nearest": lambda x: F.interpolate(x, scale_factor=2),
    "nearest, exactly": lambda x: F.interpolate(x, scale_factor=(1.5, 0.5), mode="nearest-exact"),
    "bilinear": lambda x: F.interpolate(x, scale_factor=(2.5, 1), mode="bilinear"),
    "bilinear, smaller": lambda x: F.interpolate(x, scale_factor=0.5, mode="bilinear"),
    "bicubic": lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"),
    "a quarter turn": lambda x: torch.rot90(x, 1, (2, 3)),
    "half a turn": lambda x: x.rot90(-2, (3, 2)),
    "a diagonal": lambda x: torch.diag_embed(x[..., 0], offset=1),
    "channels side by side": lambda x: F.pixel_shuffle(torch.cat([x, x * 2, -x, x], 1), 2),
    "what a convolution looks at": lambda x: F.unfold(x, (2, 3), padding=1, stride=(2, 1)),
    "means with a shorter last window": lambda x: F.avg_pool2d(x, 2, ceil_mode=True),
    "means within a border": lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False),
}


def real(x: Any) -> Any:
    return x.unpad() if isinstance(x, st.PaddedTensor) else x


@pytest.mark.parametrize("dims", [{2: SEQ}, {2: SEQ, 3: WIDTH}], ids=["height", "both"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_border_is_placed_at_the_true_end(name: str, dims: dict[int, st.Dim], device: str) -> None:
    torch.manual_seed(0)
    for n, m in ((5, 3), (8, 6), (3, 4)):
        source = torch.randn(2, 3, n, m, dtype=torch.float64, device=device, requires_grad=True)
        padded_calls.fallbacks.clear()
        actual = real(PROGRAMS[name](st.pad(source, dims, value=NAN)))
        assert not padded_calls.fallbacks
        expected = PROGRAMS[name](source)
        torch.testing.assert_close(actual, expected)
        cotangent = torch.randn_like(expected)
        given, wanted = (torch.autograd.grad(out, source, cotangent) for out in (actual, expected))
        torch.testing.assert_close(given, wanted)


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_row_of_a_ragged_batch_has_its_own_border(name: str) -> None:
    rows = [torch.randn(3, n, 4, dtype=torch.float64, requires_grad=True) for n in (5, 8, 3)]
    actual = PROGRAMS[name](st.pad(rows, {1: SEQ}, value=NAN)).unpad()
    expected = [PROGRAMS[name](row[None])[0] for row in rows]
    torch.testing.assert_close(actual, expected)
    given, wanted = (
        torch.autograd.grad(torch.stack([(t**2).sum() for t in out]).sum(), rows) for out in (actual, expected)
    )
    torch.testing.assert_close(given, wanted)


def test_a_border_compiles_once_for_every_length() -> None:
    def program(x: Any) -> Any:
        return F.interpolate(F.pad(x, (1, 1), "reflect"), scale_factor=2, mode="linear")

    compiled = torch.compile(program, fullgraph=True, backend="aot_eager")
    for i, n in enumerate((5, 8, 3)):
        source = torch.randn(2, 3, n, dtype=torch.float64)
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            out = compiled(st.pad(source, {2: SEQ}, value=NAN))
        torch.testing.assert_close(out.unpad(), program(source))


def test_a_border_wider_than_the_true_size_raises_as_in_torch() -> None:
    source = torch.randn(1, 2, 3)
    for x in (source, st.pad(source, {2: SEQ})):
        for mode, width in (("reflect", 3), ("circular", 4)):
            with pytest.raises(RuntimeError):
                F.pad(x, (width, 0), mode)


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0])
@pytest.mark.parametrize("padding", [1.0, 0.0, -0.0])
def test_a_border_has_the_sign_of_its_zero(value: float, padding: float) -> None:
    t = torch.randn(2, 5)
    x = st.pad(t, {1: SEQ}, value=padding)
    actual = F.pad(x, (1, 2, 1, 0), value=value).unpad()
    expected = F.pad(t, (1, 2, 1, 0), value=value)
    assert torch.equal(actual.view(torch.int32), expected.view(torch.int32))
    flat = (1 / F.pad(x, (0, 0, 1, 0), value=value)).amin(0)  # infinite at the border, by its sign
    torch.testing.assert_close(flat.unpad(), (1 / F.pad(t, (0, 0, 1, 0), value=value)).amin(0))
