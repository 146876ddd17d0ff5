"""True sizes of zero and below: what torch does of no elements, and which sizes can be at all."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import subtensors as st
from subtensors.padded.torch_function import fallbacks

SEQ = st.Dim("seq", max=16, buckets=[8, 16])

WITHOUT_IDENTITY: dict[str, Callable[[Tensor], object]] = {
    "amax": lambda x: x.amax(1),
    "amin, keeping the dim": lambda x: x.amin(-1, keepdim=True),
    "amax of all": lambda x: x.amax(),
    "max": lambda x: x.max(1),
    "max of all": lambda x: x.max(),
    "argmax": lambda x: x.argmax(1),
    "argmin of all": lambda x: x.argmin(),
    "aminmax": lambda x: torch.aminmax(x, dim=1),
    "median": lambda x: x.median(1),
    "mode": lambda x: x.mode(1),
    "kthvalue": lambda x: x.kthvalue(1, 1),
    "quantile": lambda x: x.quantile(0.5, 1),
    "the largest magnitude": lambda x: torch.linalg.vector_norm(x, float("inf"), 1),
    "of a flattened dim": lambda x: x.flatten().amax(0),
}


@pytest.mark.parametrize("name", WITHOUT_IDENTITY)
def test_a_reduction_without_an_identity_raises_torchs_error_for_no_elements(name: str) -> None:
    reduce = WITHOUT_IDENTITY[name]
    with pytest.raises((IndexError, RuntimeError)) as plain:
        reduce(torch.ones(2, 0))
    with pytest.raises(plain.type):
        reduce(st.pad(torch.ones(2, 0), {1: SEQ}))


def test_a_reduction_of_another_dim_runs_with_no_elements() -> None:
    assert st.pad(torch.ones(2, 0), {1: SEQ}).amax(0).unpad().shape == (0,)


def test_a_row_without_elements_beside_others_has_the_neutral_element() -> None:
    assert st.pad([torch.ones(0), torch.ones(3)], {0: SEQ}).amax(1).tolist() == [-float("inf"), 1]


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(4), nn.InstanceNorm1d(4, track_running_stats=True)], ids=str)
def test_running_statistics_stay_where_no_element_is_seen(layer: nn.Module) -> None:
    layer(st.pad(torch.ones(2, 4, 0), {2: SEQ}))
    assert layer.running_mean.tolist() == [0] * 4
    assert layer.running_var.tolist() == [1] * 4


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(4), nn.InstanceNorm1d(4, track_running_stats=True)], ids=str)
def test_a_single_value_has_no_variance_to_keep(layer: nn.Module) -> None:
    with pytest.raises(ValueError, match="more than 1"):
        layer(st.pad(torch.ones(1, 4, 1), {2: SEQ}))
    assert layer.running_var.tolist() == [1] * 4


def test_sizes_that_differ_only_where_one_would_be_negative_are_the_same() -> None:
    # An even convolution adds a position that the caller cuts off: Max(0, size of x + 1 - 1).
    weight = torch.ones(3, 3, 4)

    def program(x: Tensor) -> Tensor:
        x = nn.functional.conv1d(x, weight[..., :3], stride=2)
        return x + nn.functional.conv1d(x, weight, padding=2)[..., :-1]

    plain = torch.arange(33.0).view(1, 3, 11)
    before = fallbacks["add"]
    got = program(st.pad(plain, {2: SEQ}))
    assert isinstance(got, st.PaddedTensor)
    torch.testing.assert_close(got.unpad(), program(plain))
    assert fallbacks["add"] == before


F = nn.functional

TOO_SMALL: dict[str, Callable[[Tensor], object]] = {
    "unfold by one": lambda x: x.unfold(2, 6, 1),
    "unfold": lambda x: x.unfold(2, 7, 3),
    "max_pool1d by one": lambda x: F.max_pool1d(x, 6, 1),
    "max_pool1d with a step beyond": lambda x: F.max_pool1d(x, 6, 9),
    "max_pool1d with positions": lambda x: F.max_pool1d(x, 7, 1, return_indices=True),
    "avg_pool1d": lambda x: F.avg_pool1d(x, 6, 1),
    "lp_pool1d": lambda x: F.lp_pool1d(x, 2, 7, 1),
    "conv1d": lambda x: F.conv1d(x, torch.ones(4, 3, 6, dtype=x.dtype)),
    "conv1d with a border": lambda x: F.conv1d(x, torch.ones(4, 3, 8, dtype=x.dtype), padding=1),
    "conv1d with holes": lambda x: F.conv1d(x, torch.ones(4, 3, 3, dtype=x.dtype), dilation=3),
    "conv_transpose1d": lambda x: F.conv_transpose1d(x, torch.ones(3, 4, 3, dtype=x.dtype), padding=4),
    "unfold of images": lambda x: F.unfold(x[..., None], (6, 1)),
    "a border that cuts more off": lambda x: F.pad(x, (-3, -3)),
    "a reflected border": lambda x: F.pad(x, (5, 0), mode="reflect"),
    "topk": lambda x: x.topk(6, 2),
    "kthvalue": lambda x: x.kthvalue(6, 2),
    "a position": lambda x: x[:, :, 5],
    "a position from the end": lambda x: x[:, :, -6],
    "narrow": lambda x: x.narrow(2, 2, 4),
    "multinomial": lambda x: torch.multinomial(x[0].abs(), 6),
}
"""Calls that torch takes at a size of 8, the bucket, and refuses at one of 5."""


@pytest.mark.parametrize("tracked", [False, True])
@pytest.mark.parametrize("name", TOO_SMALL)
def test_what_torch_refuses_at_the_true_size_is_refused_whatever_the_bucket_is(name: str, tracked: bool) -> None:
    call = TOO_SMALL[name]
    x = torch.arange(30.0, dtype=torch.float64).view(2, 3, 5)
    with pytest.raises((IndexError, RuntimeError)) as plain:
        call(x)
    large = torch.ones(2, 3, 8, dtype=torch.float64)
    for _ in range(2):  # the second time by its outcome, which no other size's call may take
        call(st.pad(large, {2: SEQ}).requires_grad_(tracked))
        with pytest.raises(plain.type, match=re.escape(str(plain.value))):
            call(st.pad(x, {2: SEQ}).requires_grad_(tracked))


EMPTY: dict[str, Callable[[Tensor], object]] = {
    "a convolution of its border": lambda x: F.conv1d(x, torch.ones(4, 3, 3), padding=2),
    "a transposed convolution": lambda x: F.conv_transpose1d(x, torch.ones(3, 4, 3)),
    "a pooling of its border": lambda x: F.max_pool1d(x, 3, 1, 1),
    "a border that cuts one side off": lambda x: F.pad(x, (-1, 2)),
}


@pytest.mark.parametrize("name", EMPTY)
def test_what_torch_refuses_of_no_elements_is_refused(name: str) -> None:
    x = torch.ones(2, 3, 0)
    with pytest.raises(RuntimeError) as plain:
        EMPTY[name](x)
    with pytest.raises(RuntimeError, match=re.escape(str(plain.value))):
        EMPTY[name](st.pad(x, {2: SEQ}))


@pytest.mark.parametrize("name", TOO_SMALL)
def test_a_row_that_is_too_short_for_a_call_is_refused(name: str) -> None:
    rows = [torch.ones(n, 3, dtype=torch.float64) for n in (5, 8)]
    with pytest.raises((st.RuleError, IndexError, RuntimeError)):
        TOO_SMALL[name](st.pad(rows, {0: SEQ}).mT)
    if name not in ("unfold of images", "multinomial"):
        TOO_SMALL[name](st.pad([rows[1], rows[1]], {0: SEQ}).mT)


DIVISIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "quotients": lambda x: x.argsort(1) // x.shape[1],
    "remainders": lambda x: x.argsort(1) % x.shape[1],
    "of the sign of the dividend": lambda x: torch.fmod(x.argsort(1), x.shape[1]),
    "rounded": lambda x: torch.div(x.argsort(1), x.shape[1], rounding_mode="trunc"),
    "in place": lambda x: x.argsort(1).floor_divide_(x.shape[1]),
    "of positions": lambda x: torch.arange(x.shape[1], device=x.device) // x.shape[1],
    "by a tensor": lambda x: x.argsort(1) // torch.tensor(2 * x.shape[1], device=x.device),
    "coordinates": lambda x: torch.stack(torch.unravel_index(x.argsort(1), (2, x.shape[1]))),
}


@pytest.mark.parametrize("sizes", [(5, 6, 0, 7, 0), (0, 5)])
@pytest.mark.parametrize("name", DIVISIONS)
def test_no_elements_are_divided_by_a_size_of_zero(name: str, sizes: tuple[int, ...], device: str) -> None:
    program = DIVISIONS[name]
    run = st.bucketed(program, {0: {1: SEQ}})
    for n in sizes:
        x = torch.rand(2, n, device=device)
        torch.testing.assert_close(run(x), program(x))
    assert not run.stats().fallbacks
    assert run.stats().hits == len(sizes) - 1


def test_elements_divided_by_a_size_of_zero_are_torchs_error() -> None:
    run = st.bucketed(lambda x: torch.arange(4) // x.shape[1], {0: {1: SEQ}})
    for n in (5, 0, 6, 0):
        if n:
            torch.testing.assert_close(run(torch.ones(2, n)), torch.arange(4) // n)
        else:
            with pytest.raises(RuntimeError, match="ZeroDivisionError"):
                run(torch.ones(2, n))


@pytest.mark.parametrize("name", ["floor_divide_", "remainder_", "fmod_"])
def test_padding_of_zeros_divides_no_integers_in_place(name: str, device: str) -> None:
    given = torch.arange(1, 11, device=device).reshape(2, 5)
    x = st.pad(given, {1: SEQ})
    quotients, divisors = x * 3 + 1, x * 2  # whose padding is 0
    expected = given * 3 + 1
    for _ in range(3):
        getattr(quotients, name)(divisors)
        getattr(expected, name)(given * 2)
        torch.testing.assert_close(quotients.unpad(), expected)
