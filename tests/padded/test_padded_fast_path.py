"""Calls on the fast path run the same rules, with the same results, as calls through torch's dispatcher."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from python_calls import python_calls
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import subtensors as st
from subtensors.dispatch.padded import interpreter
from subtensors.dispatch.padded.recorded_rules import Record
from subtensors.padded import fast_path
from subtensors.padded.padded_tensor import unwrap

SEQ = st.Dim("seq", max=16, buckets=8)
NAN = float("nan")
LENGTHS = (5, 7, 1, 8, 7, 7, 7)
W, B = torch.randn(4, 6, dtype=torch.float64), torch.randn(4, dtype=torch.float64)

CALLS: list[tuple[Callable[..., Any], Callable[..., Any]]] = [
    (F.linear, lambda x: F.linear(x, W, B)),
    (F.linear, lambda x: F.linear(x, weight=W)),
    (F.linear, lambda x: F.linear(x.transpose(1, 2), torch.ones(3, 8, dtype=torch.float64))),
    (F.layer_norm, lambda x: F.layer_norm(x, (6,), torch.full((6,), 2.0).double(), eps=1e-3)),
    (F.gelu, lambda x: F.gelu(x)),
    (F.gelu, lambda x: F.gelu(x, approximate="tanh")),
    (F.scaled_dot_product_attention, lambda x: F.scaled_dot_product_attention(x, x, x)),
    (F.scaled_dot_product_attention, lambda x: F.scaled_dot_product_attention(x, x, x * 2, is_causal=True, scale=0.5)),
    (Tensor.transpose, lambda x: x.transpose(1, -1)),
    (Tensor.unsqueeze, lambda x: x.unsqueeze(dim=1)),
    (Tensor.contiguous, lambda x: x.transpose(0, 1).contiguous()),
    (Tensor.matmul, lambda x: x.matmul(W.t())),
    (Tensor.matmul, lambda x: x @ x.transpose(1, 2)),
    (torch.matmul, lambda x: torch.matmul(torch.ones(2, 5, 8, dtype=torch.float64), x)),
    (Tensor.add, lambda x: x + x),
    (Tensor.add, lambda x: x.add(torch.ones(6, dtype=torch.float64), alpha=3)),
    (torch.add, lambda x: torch.add(x, 2)),
    (Tensor.sub, lambda x: x - 1.5),
    (torch.sub, lambda x: torch.sub(torch.ones(2, 8, 6, dtype=torch.float64), x)),
    (Tensor.mul, lambda x: x * True),
    (torch.mul, lambda x: torch.mul(input=x, other=x)),
    (torch.addmm, lambda x: torch.addmm(B, x.reshape(-1, 6), W.t())),
    (torch.addmm, lambda x: torch.addmm(B, x[:, 0], W.t(), alpha=2)),
    (torch.pow, lambda x: torch.pow(x, 3.0)),
    (Tensor.pow, lambda x: x.pow(2)),
    (Tensor.pow, lambda x: (x * x).pow(x)),
    (Tensor.__pow__, lambda x: x**2),
    (torch.neg, lambda x: torch.neg(x)),
    (Tensor.neg, lambda x: x.neg()),
    (Tensor.__neg__, lambda x: -x),
    (torch.relu, lambda x: torch.relu(x)),
    (Tensor.relu, lambda x: x.relu()),
    (F.relu, lambda x: F.relu(x)),
    (F.relu, lambda x: F.relu(x * 1, inplace=True)),
    (F.silu, lambda x: F.silu(x)),
    (Tensor.tanh, lambda x: x.tanh()),
    (torch.tanh, lambda x: torch.tanh(x)),
    (Tensor.sigmoid, lambda x: x.sigmoid()),
    (torch.sigmoid, lambda x: torch.sigmoid(x)),
    (Tensor.rsqrt, lambda x: (x * x + 1).rsqrt()),
    (torch.rsqrt, lambda x: torch.rsqrt(x * x + 1)),
    (Tensor.view, lambda x: x.view(2, -1, 2, 3)),
    (Tensor.view, lambda x: x.view((2, 8, 6, 1))),
    (Tensor.view, lambda x: x.float().view(torch.int32)),
    (Tensor.reshape, lambda x: x.transpose(1, 2).reshape(-1, 8)),
    (Tensor.reshape, lambda x: x.reshape(shape=(2, 8, 3, 2))),
    (Tensor.permute, lambda x: x.permute(2, 0, 1)),
    (Tensor.permute, lambda x: x.permute((1, 0, 2))),
    (Tensor.expand, lambda x: x.unsqueeze(0).expand(3, -1, -1, -1)),
    (Tensor.__getitem__, lambda x: x[:, :, 1:4]),
    (Tensor.__getitem__, lambda x: x[..., -2]),
    (Tensor.__getitem__, lambda x: x[:, None]),
    (Tensor.__getitem__, lambda x: x[:, :3]),
    (Tensor.__getitem__, lambda x: x[0]),
    (torch.cat, lambda x: torch.cat([x, x * 2], -1)),
    (torch.cat, lambda x: torch.cat((x, torch.ones(2, 8, 1, dtype=torch.float64), x), dim=2)),
    (torch.cat, lambda x: torch.cat([x, x])),
    (torch.stack, lambda x: torch.stack([x, x], 1)),
]
LINES = [pytest.param(call, id=f"{i} {func.__name__}") for i, (func, call) in enumerate(CALLS)]


@pytest.mark.parametrize(
    ("records", "is_enabled"),
    [(True, True), (False, False), (False, True)],
    ids=["with gradients", "without", "of tensors that require none"],
)
@pytest.mark.parametrize("call", LINES)
def test_the_fast_path_runs_the_same_rules_as_the_dispatcher(
    call: Callable[..., Any], records: bool, is_enabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[list[Any]] = []
    run_call = interpreter.run_call

    def noted_run_call(call: interpreter.PaddedCall) -> Any:
        made[-1].append((call.op, {name: _described(x) for name, x in call.arguments.items()}))
        return run_call(call)

    monkeypatch.setattr(interpreter, "run_call", noted_run_call)
    monkeypatch.setattr("subtensors.dispatch.padded.rules.run_call", noted_run_call)
    monkeypatch.setattr(fast_path, "_calls", {})
    known, values = [], []
    for is_fast in (True, False):
        if not is_fast:
            monkeypatch.setattr(fast_path, "try_fast_path", lambda *_: NotImplemented)
        torch.manual_seed(0)
        for n in LENGTHS:
            made.append([])
            own = torch.randn(2, n, 6, dtype=torch.float64, requires_grad=records)
            with torch.set_grad_enabled(is_enabled):
                out = call(st.pad(own, {1: SEQ}, value=NAN))
            is_padded = isinstance(out, st.PaddedTensor)
            known.append((_described(unwrap(out)) if is_padded else type(out), out.requires_grad))
            true = out.unpad() if is_padded else out
            values.append([true.detach()])
            if true.requires_grad:
                true.square().sum().backward()
                assert own.grad is not None
                values[-1].append(own.grad)
    count = len(LENGTHS)
    assert made[0] == made[count]
    assert known[:count] == known[count:]
    torch.testing.assert_close(values[:count], values[count:], rtol=0, atol=0, equal_nan=True)
    # The first call is taken apart, the second recorded, and repeated at other lengths of the bucket; one that reads a
    # length is repeated at this length.
    assert recorded() or made[0][-1][0] is torch.ops.aten.select.int
    assert not recorded() or len(made[count - 1]) < len(made[0])


def recorded() -> list[Record]:
    """The calls that are repeated."""
    return [known for known in fast_path._calls.values() if isinstance(known, Record)]


def _described(x: Any) -> Any:
    if isinstance(x, interpreter.PaddedValue):
        return x.dims, tuple(x.shape), x.fill, x.view, x.tracker is None
    return [*map(_described, x)] if isinstance(x, (tuple, list)) else x


def test_autocast_casts_calls_of_the_fast_path() -> None:
    x = st.pad(torch.randn(2, 5, 6), {1: SEQ})
    with torch.autocast("cpu", torch.bfloat16):
        assert F.linear(x, W.float()).dtype == torch.bfloat16


def test_a_dispatch_mode_sees_ops_of_the_fast_path() -> None:
    class Seen(TorchDispatchMode):
        names: list[str] = []  # noqa: RUF012  (of one test)

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    x = st.pad(torch.randn(2, 5, 6), {1: SEQ})
    with Seen() as seen:
        x + x
    assert "aten.add.Tensor" in seen.names


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: F.linear(x, None),
        lambda x: F.linear(x, W, B, B),
        lambda x: x.view("a"),
        lambda x: x.transpose(0),
        lambda x: x.transpose(0, 1, out=3),
        lambda x: x + "a",
        lambda x: F.layer_norm(x, 6),
    ],
)
def test_wrong_arguments_raise_the_same_error_type_as_plain_tensors(wrong: Callable[..., Any]) -> None:
    t = torch.randn(2, 5, 6, dtype=torch.float64)
    with pytest.raises(Exception) as expected:  # noqa: PT011  (whichever torch raises)
        wrong(t)
    with pytest.raises(type(expected.value)):
        wrong(st.pad(t, {1: SEQ}))


def test_dropout_in_evaluation_returns_its_input_itself() -> None:
    x = st.pad(torch.randn(2, 5, 6), {1: SEQ})
    assert F.dropout(x, 0.5, training=False) is x
    with pytest.raises(ValueError, match="between 0 and 1"):
        F.dropout(x, 2.0, training=False)


def test_a_view_is_retaken_after_a_write_to_its_base() -> None:
    t = torch.randn(2, 5, 6, requires_grad=True)
    x = st.pad(t, {1: SEQ}) * 1
    part = x[:, 1:]
    x.mul_(2)
    torch.testing.assert_close((part + part).unpad(), 4 * t[:, 1:])


@torch.no_grad()
def test_a_call_with_a_cached_outcome_makes_few_python_calls() -> None:
    x = st.pad(torch.randn(2, 5, 6, dtype=torch.float64), {1: SEQ})
    apart = st.pad(torch.randn(2, 5, 6, dtype=torch.float64), {1: SEQ})
    for call in (
        lambda: F.linear(x, W, B),
        lambda: x + x,
        lambda: x.transpose(1, 2),
        lambda: x.view(2, -1, 2, 3),
        lambda: x[:, :, :4],
        lambda: torch.cat([x, x], -1),
        lambda: x.split(2, -1),
    ):
        call()
        call()
        assert python_calls(call) <= 32
        with torch.enable_grad():  # of tensors that require no gradient
            call()
            call()
            assert python_calls(call) <= 96
    for call in (lambda: x + apart, lambda: torch.cat([x, apart], -1)):  # their true sizes are compared
        call()
        call()
        assert python_calls(call) <= 40
    _ = x.shape
    assert python_calls(lambda: x.shape) <= 6


@torch.no_grad()
def test_a_repeated_call_takes_its_own_tensors_and_numbers() -> None:
    s, t = torch.randn(2, 5, 6), torch.randn(2, 5, 6)
    x, y = st.pad(s, {1: SEQ}), st.pad(t, {1: SEQ})
    for _ in range(3):
        for a, b, wanted in ((x, x, s + s), (x, y, s + t), (y, x, t + s), (y, y, t + t)):
            torch.testing.assert_close((a + b).unpad(), wanted)
        for number in (0.5, -2.0, 0.0, -0.0):
            torch.testing.assert_close((x * number).unpad(), s * number)
            assert torch.equal(torch.signbit((x * number).unpad()), torch.signbit(s * number))
            torch.testing.assert_close(F.leaky_relu(x, number).unpad(), F.leaky_relu(s, number))
            torch.testing.assert_close(torch.add(x, y, alpha=number).unpad(), s + t * number)
        values, positions = x.sort(1)
        torch.testing.assert_close(values.unpad(), s.sort(1).values)
        torch.testing.assert_close(positions.unpad(), s.sort(1).indices)
        assert type(x.sort(1)) is type(s.sort(1))
        assert [part.shape for part in x.split(3, 2)] == [(2, 8, 3), (2, 8, 3)]


@torch.no_grad()
def test_a_call_that_may_be_no_op_is_one_only_where_it_has_to_be() -> None:
    x = st.pad(torch.randn(2, 5, 6), {1: SEQ})
    for _ in range(3):
        assert x.to(torch.float64).dtype == torch.float64
        assert x.to(torch.float32) is x
        assert x.transpose(0, 1).contiguous().is_contiguous()


def test_tensors_padded_apart_are_alike_where_their_true_sizes_are_the_same() -> None:
    s, t = torch.randn(2, 5, 6), torch.randn(2, 5, 6)
    x = st.pad(s, {1: SEQ})
    for _ in range(3):
        torch.testing.assert_close((x + st.pad(t, {1: SEQ})).unpad(), s + t)
        torch.testing.assert_close(torch.cat([x, st.pad(t, {1: SEQ})], 2).unpad(), torch.cat([s, t], 2))
    for call in (lambda y: x + y, lambda y: torch.cat([x, y], 2)):
        with pytest.raises(st.SizeError, match="seq is 5 in one tensor and 6 in another"):
            call(st.pad(torch.randn(2, 6, 6), {1: SEQ}))


def test_a_view_of_what_requires_no_gradient_gets_one_that_is_written_to_its_base() -> None:
    t, w = torch.randn(2, 5, 6), torch.randn(6, requires_grad=True)
    for take in (lambda x: x.transpose(1, 2), lambda x: x[:, :, :4], lambda x: x.unsqueeze(0)):
        for _ in range(3):  # the third repeats an outcome
            x = st.pad(t, {1: SEQ}) * 1
            view = take(x)
            x.mul_(w)
            (found,) = torch.autograd.grad(view.square().sum(), w)
            (wanted,) = torch.autograd.grad(take(t * w).square().sum(), w)
            torch.testing.assert_close(found, wanted)


def test_a_call_of_a_view_whose_base_was_written_to_takes_its_new_values() -> None:
    t = torch.randn(2, 5, 6)
    for _ in range(3):
        x = st.pad(t, {1: SEQ}) * 1
        view = x.transpose(1, 2)
        torch.testing.assert_close((view + view).unpad(), 2 * t.transpose(1, 2))
        x.mul_(3)
        torch.testing.assert_close((view + view).unpad(), 6 * t.transpose(1, 2))


WRITES: list[Callable[..., Any]] = [
    lambda x, y: x.add_(y),
    lambda x, y: x.mul_(0.5),
    lambda x, y: x.add_(y, alpha=2.5),
    lambda x, y: x.__iadd__(y),
    lambda x, y: F.relu(x, inplace=True),
    lambda x, y: torch.sigmoid_(x),
]


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("is_enabled", [False, True])
def test_a_repeated_write_reaches_the_tensor_and_its_views(write: Callable[..., Any], is_enabled: bool) -> None:
    s, t = torch.randn(2, 5, 6), torch.randn(2, 5, 6)
    with torch.set_grad_enabled(is_enabled):
        for _ in range(4):
            x, y = st.pad(s, {1: SEQ}).exp() + 1, st.pad(t, {1: SEQ})
            assert unwrap(x).fill is None
            aliased, copied = x.transpose(1, 2), x[:, 2:]
            assert write(x, y) is x
            wanted = write(s.exp() + 1, t)
            for found, of in ((x, wanted), (aliased, wanted.transpose(1, 2)), (copied, wanted[:, 2:])):
                torch.testing.assert_close((found * 1).unpad(), of)
    assert any(known.writes for known in recorded())


def test_a_repeated_write_that_autograd_tracks_keeps_its_gradient() -> None:
    s, t, w = torch.randn(2, 5, 6), torch.randn(2, 5, 6), torch.randn(6, requires_grad=True)
    for factor in (None, None, None, w, None, w):
        x, y = st.pad(s, {1: SEQ}).exp() + 1, st.pad(t, {1: SEQ})
        x += y if factor is None else y * factor
        torch.testing.assert_close(x.unpad(), s.exp() + 1 + t * (1 if factor is None else factor))
        assert x.requires_grad == (factor is not None)
        if factor is not None:
            (found,) = torch.autograd.grad(x.square().sum(), w)
            (wanted,) = torch.autograd.grad((s.exp() + 1 + t * w).square().sum(), w)
            torch.testing.assert_close(found, wanted)
    x = st.pad(s, {1: SEQ}).exp() + 1
    with pytest.raises(st.SizeError, match="seq is 5 in one tensor and 6 in another"):
        x += st.pad(torch.randn(2, 6, 6), {1: SEQ})


@pytest.mark.parametrize("call", [lambda x: x.sum(1), lambda x: torch.cat([x, x], -1), lambda x: x.split(2, -1)])
def test_a_repeated_call_leaves_no_tensor_to_the_garbage_collector(call: Callable[..., Any]) -> None:
    own = torch.randn(2, 5, 6, requires_grad=True)
    for _ in range(3):
        call(st.pad(own, {1: SEQ}))
    gc.collect()
    gc.disable()
    try:
        x = st.pad(own, {1: SEQ})
        found = weakref.ref(x._dense)
        call(x)
        del x
        assert found() is None
    finally:
        gc.enable()
