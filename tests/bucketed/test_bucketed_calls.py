"""Calls of a bucketed program: arguments, results, and the bucket that answers."""

from __future__ import annotations

import logging
import threading
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import subtensors as st

pytestmark = pytest.mark.usefixtures("captured")

SEQ = st.Dim("seq", max=64, buckets=[4, 16, 64])
BATCH = st.Dim("batch", max=8, buckets=4)


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


def mixing(x: Tensor) -> Tensor:
    """Lets all positions meet, so that padding would show."""
    return (x.softmax(1) * x.mean(1, keepdim=True)).cumsum(1)


def check(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def data(*shape: int, device: str) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, device=device)


@torch.no_grad()
def test_every_length_gives_what_the_program_gives(device: str) -> None:
    run = st.bucketed(mixing, {"x": {1: SEQ}})
    for n in (3, 4, 1, 16, 5, 64, 2, 17, 3):
        x = data(2, n, 3, device=device)
        check(run(x), mixing(x))
        check(run(x=x.mT.contiguous().mT), mixing(x))
    stats = run.stats()
    # One bucket a size, whichever way the argument is given.
    assert [b.sizes["seq"] for b in stats.buckets] == [64, 16, 4]
    assert stats.hits == stats.calls - 3
    assert not stats.fallbacks


@torch.no_grad()
def test_results_survive_later_calls(device: str) -> None:
    run = st.bucketed(lambda x: (x + 1, {"sum": x.sum(1)}), {0: {1: SEQ}})
    inputs = [data(2, n, device=device) for n in (3, 4, 4, 2, 9, 4)]
    results = [run(x) for x in inputs]
    for x, (plus, sums) in zip(inputs, results, strict=True):
        check(plus, x + 1)
        check(sums["sum"], x.sum(1))


@torch.no_grad()
def test_two_dims_vary_at_once(device: str) -> None:
    run = st.bucketed(lambda x, w: x.softmax(0) @ w, {"x": {0: BATCH, 1: SEQ}, "w": {0: SEQ}})
    for b, n in ((1, 3), (4, 4), (7, 11), (3, 2)):
        x, w = data(b, n, device=device), data(n, 5, device=device)
        check(run(x, w), x.softmax(0) @ w)


@torch.no_grad()
def test_pytrees_go_in_and_come_out(device: str) -> None:
    def program(batch: dict[str, Any], scale: float) -> Pair:
        return Pair(batch["x"].sum(1) * scale, [batch["more"][0] + batch["x"]])  # type: ignore[arg-type]

    run = st.bucketed(program, {"batch": {"x": {1: SEQ}, "more": [{1: SEQ}]}})
    for n in (3, 5, 3):
        batch = {"x": data(2, n, device=device), "more": [data(2, n, device=device)]}
        out = run(batch, scale=0.5)
        assert type(out) is Pair
        check(out, program(batch, scale=0.5))


@torch.no_grad()
def test_one_spec_serves_every_tensor_of_a_container(device: str) -> None:
    run = st.bucketed(lambda rows: sum(row.sum(0) for row in rows), {"rows": {0: SEQ}})
    rows = [data(5, 2, device=device), data(5, 2, device=device)]
    check(run(rows), rows[0].sum(0) + rows[1].sum(0))


@torch.no_grad()
def test_other_arguments_are_part_of_the_key(device: str) -> None:
    def program(x: Tensor, mode: str, times: float, flag: bool | None = None) -> Tensor:
        return (x.sum(1) if mode == "sum" else x.amax(1)) * times + (flag is True)

    run = st.bucketed(program, {"x": {1: SEQ}})
    x = data(2, 3, device=device)
    for _ in range(2):
        for mode, times, flag in (("sum", 1.0, None), ("max", 1.0, True), ("sum", 2.0, False), ("sum", 1, 1)):
            check(run(x, mode, times, flag=flag), program(x, mode, times, flag=flag))  # type: ignore[arg-type]
    assert len(run.stats().buckets) == 4


@torch.no_grad()
def test_calls_by_position_and_by_name_share_a_bucket(device: str) -> None:
    def program(x: Tensor, y: dict[str, Tensor], *, shift: float = 0.0, times: float = 1.0) -> Tensor:
        return x.cumsum(1) * times + y["a"] - y["b"].mean() + shift

    run = st.bucketed(program, {"x": {1: SEQ}, 1: {"a": {1: SEQ}}})
    x, b = data(2, 3, device=device), data(2, device=device)
    y = {"a": x * 2, "b": b}
    expected = program(x, y, times=2.0, shift=3.0)
    for _ in range(2):
        check(run(x, y, times=2.0, shift=3.0), expected)
        check(run(x, shift=3.0, times=2.0, y=y), expected)
        check(run(times=2.0, y=y, shift=3.0, x=x), expected)
    stats = run.stats()
    assert [(bucket.calls, bucket.hits) for bucket in stats.buckets] == [(6, 5)]
    run.warmup(y=y, x=x, times=2.0, shift=3.0, progress=False)
    longer = data(2, SEQ.max, device=device)
    wide = {"a": longer, "b": b}
    check(run(longer, wide, shift=3.0, times=2.0), program(longer, wide, times=2.0, shift=3.0))
    assert run.stats().buckets[0].hits == 1


@torch.no_grad()
def test_variadic_arguments_are_keyed_by_position(device: str) -> None:
    def program(x: Tensor, *more: Tensor, y: Tensor) -> Tensor:
        return x.cumsum(0) - y.mean() + sum(m.sum() for m in more)

    run = st.bucketed(program, {"x": {0: SEQ}, "y": {0: SEQ}})
    x, y = data(3, device=device), data(3, device=device)
    for _ in range(2):
        check(run(x, data(5, device=device) * 0, y=y), program(x, y=y))
    assert run.stats().hits == 1


@torch.no_grad()
def test_numbers_that_compare_equal_but_compute_differently_have_own_keys(device: str) -> None:
    run = st.bucketed(lambda x, times: x.cumsum(0) * times, {"x": {0: SEQ}})
    x = data(3, device=device).abs()
    assert torch.signbit(run(x, -0.0)).all()
    assert not torch.signbit(run(x, 0.0)).any()
    for _ in range(3):
        assert run(x, float("nan")).isnan().all()
    assert run.stats().hits == 2


@torch.no_grad()
def test_a_graph_is_captured_for_the_torch_settings_of_its_call(device: str) -> None:
    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        return F.scaled_dot_product_attention(x, x, x), torch.zeros(3, device=device)

    run = st.bucketed(program, {"x": {2: SEQ}})
    x = torch.randn(2, 1, 5, 3, device=device)
    torch.testing.assert_close(run(x), program(x))
    torch.set_default_dtype(torch.float64)
    try:
        for _ in range(2):
            torch.testing.assert_close(run(x), program(x))
    finally:
        torch.set_default_dtype(torch.float32)
    with sdpa_kernel(SDPBackend.MATH):
        torch.testing.assert_close(run(x), program(x))
    torch.testing.assert_close(run(x), program(x))
    assert len(run.stats().buckets) == 3
    assert run.stats().hits == 2


@torch.no_grad()
def test_padded_tensors_go_in_and_plain_ones_come_out(device: str) -> None:
    run = st.bucketed(mixing, {"x": {1: SEQ}})
    for n in (3, 2, 9):
        x = data(2, n, 3, device=device)
        for _ in range(2):
            check(run(st.pad(x, {1: SEQ}, value=float("nan"))), mixing(x))
    assert len(run.call_cache) == 3


@torch.no_grad()
def test_padded_tensors_may_share_their_sizes_or_not(device: str) -> None:
    run = st.bucketed(lambda a, b: (a * b).sum(1), {"a": {1: SEQ}})
    for n in (3, 2, 9):
        x = st.pad(data(2, n, device=device), {1: SEQ})
        for y in (x + 1, st.pad(x.unpad() + 1, {1: SEQ})):
            check(run(x, y), (x.unpad() * y.unpad()).sum(1))


@torch.no_grad()
def test_a_ragged_batch_comes_back_as_its_rows(device: str) -> None:
    run = st.bucketed(mixing, {"x": {1: SEQ}})
    for lengths in ((3, 4, 1), (2, 2, 4), (9, 1, 5)):
        rows = [data(n, 3, device=device) for n in lengths]
        out = run(st.pad(rows, {0: SEQ}))
        for a, row in zip(out, rows, strict=True):
            check(a, mixing(row[None])[0])


@torch.no_grad()
def test_a_result_that_is_an_input_is_a_copy_of_its_own(device: str) -> None:
    run = st.bucketed(lambda x: x, {0: {0: SEQ}})
    x = data(4, device=device)
    out = run(x)
    again = run(x)
    out.zero_()
    check(again, x)
    check(run(x), x)


@torch.no_grad()
def test_parameters_and_static_tensors_are_read_in_place(device: str) -> None:
    weight = nn.Parameter(data(3, device=device))
    fixed = st.static(data(3, device=device))
    run = st.bucketed(lambda x, w, s: x * w + s, {"x": {0: SEQ}})
    x = data(5, 3, device=device)
    for _ in range(3):
        check(run(x, weight, fixed), x * weight + fixed)
        weight.add_(1)
        fixed.add_(1)
    assert run.stats().hits == 2


@torch.no_grad()
def test_a_size_beyond_the_max_runs_unpadded_and_warns_once(device: str, caplog: pytest.LogCaptureFixture) -> None:
    run = st.bucketed(mixing, {"x": {1: SEQ}})
    x = data(1, 65, 2, device=device)
    with caplog.at_level(logging.WARNING, "subtensors.bucketed"):
        check(run(x), mixing(x))
        check(run(x), mixing(x))
        longer = data(1, 70, 2, device=device)
        check(run(longer), mixing(longer))
    assert ["seq is beyond its max of 64" in r.message for r in caplog.records] == [True]
    assert list(run.stats().fallbacks.values()) == [3]


@torch.no_grad()
def test_a_size_beyond_the_max_is_an_error_with_on_miss_error(device: str) -> None:
    run = st.bucketed(mixing, {"x": {1: SEQ}}, on_miss="error")
    with pytest.raises(st.SizeError, match="beyond its max"):
        run(data(1, 65, 2, device=device))


def test_a_dim_with_two_sizes_is_refused(device: str) -> None:
    run = st.bucketed(lambda a, b: (a, b), {"a": {0: SEQ}, "b": {0: SEQ}})
    with pytest.raises(st.SizeError, match="seq is 4 in dim 0 of b and 3 in dim 0 of a"):
        run(torch.ones(3, device=device), torch.ones(4, device=device))


def test_a_padded_argument_and_a_plain_one_have_one_size_along_a_dim() -> None:
    run = st.bucketed(torch.add, {0: {0: SEQ}})
    three = st.pad(torch.ones(3), {0: SEQ})
    assert run(torch.ones(3), three).shape == (3,)
    with pytest.raises(st.SizeError, match="seq is 4 in one argument and 3 in a PaddedTensor"):
        run(torch.ones(4), three)
    assert not run.stats().fallbacks


@torch.no_grad()
def test_calls_from_several_threads_take_turns(device: str) -> None:
    run = st.bucketed(mixing, {"x": {1: SEQ}})
    wrong: list[Any] = []

    def calls(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for _ in range(20):
                n = int(torch.randint(1, 20, (), generator=generator))
                x = torch.randn(2, n, 3, dtype=torch.float64, generator=generator).to(device)
                try:
                    check(run(x), mixing(x))
                except Exception as error:
                    wrong.append(error)

    threads = [threading.Thread(target=calls, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert run.stats().calls == 80


def test_gradients_flow_to_parameters_and_inputs(device: str) -> None:
    net = nn.Linear(3, 3, device=device).double()
    run = st.bucketed(lambda x: net(x).softmax(1), {"x": {1: SEQ}})
    for n in (3, 7):
        x = data(2, n, 3, device=device).requires_grad_()
        cotangent = data(2, n, 3, device=device)
        wanted = torch.autograd.grad(net(x).softmax(1), [x, *net.parameters()], cotangent)
        check(torch.autograd.grad(run(x), [x, *net.parameters()], cotangent), wanted)


def test_a_wrong_argument_of_bucketed_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="dims name an argument 'y'"):
        st.bucketed(mixing, {"y": {1: SEQ}})
    with pytest.raises(
        ValueError, match="dims name the argument at position 5, and mixing takes 1 argument by position"
    ):
        st.bucketed(mixing, {5: {1: SEQ}})
    with pytest.raises(ValueError, match="position -1"):
        st.bucketed(lambda *xs: xs, {-1: {1: SEQ}, 3: {1: SEQ}})
    with pytest.raises(TypeError, match="dims are given by argument"):
        st.bucketed(mixing, {})
    with pytest.raises(TypeError, match="a function or a module"):
        st.bucketed(3, {"x": {1: SEQ}})  # type: ignore[arg-type]


@torch.no_grad()
def test_a_convolutional_net_over_batches_of_any_size(device: str) -> None:
    torch.manual_seed(0)

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

        def forward(self, x: Tensor) -> Tensor:
            return (x + self.norm(self.conv(x))).relu()

    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)]
    net = nn.Sequential(nn.Conv2d(3, 4, 7, stride=2), nn.MaxPool2d(3, 2), Residual(), Residual(), *head)
    net = net.to(device, torch.float64).eval()
    run = st.bucketed(net, {0: {0: BATCH}})
    for n in (3, 4, 7, 1, 8):
        x = data(n, 3, 24, 24, device=device)
        torch.testing.assert_close(run(x), net(x))
    assert not run.stats().fallbacks
    assert run.stats().hits == 3


def test_the_debug_mode_reports_a_program_that_divides_by_a_bucket() -> None:
    def mean(x: Tensor) -> Tensor:
        return x.sum(1) * (1 / x.shape[1])

    def right(x: Tensor) -> Tensor:
        return x.sum(1) / torch.ones_like(x).sum(1)

    x = data(2, 3, device="cpu")
    with st.watch_size_arithmetic():
        with pytest.warns(st.PaddedSizeWarning, match=r"arithmetic with 4, the bucket of dim 1 \(true size seq\)"):
            st.bucketed(mean, {"x": {1: SEQ}})(x)
        check(st.bucketed(right, {"x": {1: SEQ}})(x), x.mean(1))


def test_dims_of_a_part_that_a_container_does_not_hold_are_refused() -> None:
    seq = st.Dim("seq", max=16)
    run = st.bucketed(lambda batch: batch["x"] * 2, {"batch": {"y": {1: seq}}})
    with pytest.raises(ValueError, match=r"dims name batch\['y'\], and the batch of this call holds 'x'"):
        run({"x": torch.ones(2, 5)})
    pairs = st.bucketed(lambda pair: pair[0] * 2, {"pair": [{1: seq}, {1: seq}]})
    with pytest.raises(ValueError, match=r"dims name pair\[1\]"):
        pairs([torch.ones(2, 5)])
