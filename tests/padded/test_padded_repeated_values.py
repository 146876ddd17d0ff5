"""Repeated calls read values, draw numbers and write to shared memory anew, and free what they computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as some
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import subtensors as st
from subtensors.dispatch.padded import recorded_rules
from subtensors.padded import fast_path

SEQ = st.Dim("seq", max=16, buckets=8)
NAN = float("nan")

NUMBERS = [0, 1, 2, -1, 0.0, -0.0, 1.0, 2.5, True, False, NAN, float("inf"), -float("inf"), 1e300]

OF_NUMBERS: dict[str, Callable[[Any, Any], Any]] = {
    "product": lambda x, n: x * n,
    "sum": lambda x, n: x + n,
    "choice": lambda x, n: torch.where(x == x, x, n),
    "other choice": lambda x, n: torch.where(x != x, x, n),
    "fill": lambda x, n: x.masked_fill(x == x, n),
    "full": lambda x, n: torch.full_like(x, n),
    "new": lambda x, n: x.new_full((2, 3), n),
    "bound": lambda x, n: torch.clamp(x, min=n),
    "power": lambda x, n: x**n,
    "equality": lambda x, n: x == n,
    "dim": lambda x, n: x.sum(n),
    "kept dim": lambda x, n: x.sum(1, keepdim=n),
    "position": lambda x, n: x[n],
    "border": lambda x, n: F.pad(x, (1, 1), value=n),
    "threshold": lambda x, n: F.hardtanh(x, -1, n),
}


def described(out: Any) -> Any:
    """Values with their signs, dtypes and shapes; the type of an error."""
    if isinstance(out, type):
        return out
    t = out.unpad() if isinstance(out, st.PaddedTensor) else out
    listed = [(repr(n), str(n)) for n in t.flatten().tolist()]
    return type(out), t.dtype, tuple(t.shape), listed


def attempt(call: Callable[[Any, Any], Any], x: Any, n: Any) -> Any:
    try:
        return call(x, n)
    except Exception as error:
        return type(error)


@torch.no_grad()
@given(
    some.sampled_from(sorted(OF_NUMBERS)),
    some.lists(some.sampled_from(range(len(NUMBERS))), min_size=1, max_size=4),
    some.sampled_from([torch.float64, torch.float32, torch.int64, torch.bool]),
)
def test_numbers_that_are_equal_are_not_the_same(name: str, turns: list[int], dtype: torch.dtype) -> None:
    for i in [*turns, *turns, *turns, *reversed(turns)]:
        t = torch.tensor([[1.5, -0.0, 0.0, 2.0, -3.0], [0.0, 1.0, 1.0, -1.0, 4.0]], dtype=torch.float64).to(dtype)
        x = st.pad(t, {1: SEQ})
        found = described(attempt(OF_NUMBERS[name], x, NUMBERS[i]))
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(fast_path, "try_fast_path", lambda *_: NotImplemented)
            wanted = described(attempt(OF_NUMBERS[name], x, NUMBERS[i]))
        assert found == wanted
        plain = attempt(OF_NUMBERS[name], t, NUMBERS[i])
        if isinstance(plain, Tensor) and not isinstance(found, type):
            out = attempt(OF_NUMBERS[name], x, NUMBERS[i])
            out = out.unpad() if isinstance(out, st.PaddedTensor) else out
            torch.testing.assert_close(out, plain, rtol=0, atol=0, equal_nan=True)


READS: dict[str, Callable[[Any, Tensor], Any]] = {
    "a position in a tensor": lambda x, i: x[i],
    "a quantile": lambda x, i: x.quantile(i.double() / 4, -1),
    "a number of a tensor": lambda x, i: x * i.item(),
    "rows by a mask": lambda x, i: x[torch.arange(2) < i],
    "a branch in a rule": lambda x, i: torch.tensor_split(x, i.reshape(1), dim=2)[0],
    "repeated elements": lambda x, i: x.repeat_interleave(i.expand(6), 2),
    "whether all are equal": lambda x, i: torch.tensor(torch.equal(x, x * i)),
    "whether all are close": lambda x, i: torch.tensor(torch.allclose(x, x * i)),
}


@torch.no_grad()
@pytest.mark.parametrize("call", READS.values(), ids=READS)
def test_a_call_that_reads_values_reads_them_each_time(call: Callable[[Any, Tensor], Any]) -> None:
    for n in (0, 0, 0, 1, 1, 1, 0, 1, 0):
        t, i = torch.randn(2, 5, 6, dtype=torch.float64), torch.tensor(n)
        out = call(st.pad(t, {1: SEQ}, value=NAN), i)
        torch.testing.assert_close(out.unpad() if isinstance(out, st.PaddedTensor) else out, call(t, i))


@torch.no_grad()
def test_a_repeated_call_checks_values_as_the_first() -> None:
    for q in (0.5, 0.5, 0.5, 0.25, 2.0, 0.5, -1.0):
        t = torch.randn(2, 5, 6, dtype=torch.float64)
        x, at = st.pad(t, {1: SEQ}, value=NAN), torch.tensor([q, 0.5], dtype=torch.float64)
        if 0 <= q <= 1:
            torch.testing.assert_close(x.quantile(at, 1), t.quantile(at, 1))
        else:
            with pytest.raises(RuntimeError, match="range"):
                x.quantile(at, 1)


class Overridable:
    """A callable that tensors may override, as torch's functions are."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function

    def __call__(self, x: Any) -> Any:
        if torch.overrides.has_torch_function((x,)):
            return torch.overrides.handle_torch_function(self, (x,), x)
        return self.function(x)


class OfTorch(Overridable):
    """One of torch's own."""

    __module__ = "torch.nn.functional"


class Scaled(torch.nn.Module):
    """A module whose script reads an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 2.0

    def forward(self, x: Tensor) -> Tensor:
        """The input times the attribute."""
        return x * self.scale


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_functions_that_are_not_torchs_own_run_each_time() -> None:
    module = Scaled()
    script, own = torch.jit.script(module), Overridable(module)
    for scale in (2.0, 2.0, 2.0, 3.0, 2.0):
        script.scale = module.scale = scale
        t = torch.randn(2, 5, 6)
        for call in (script, own):
            torch.testing.assert_close(call(st.pad(t, {1: SEQ})).unpad(), t * scale)


def _written_inside(x: Any) -> Any:
    y = x * 1
    y[:, 1:].mul_(2)
    return y


@torch.no_grad()
def test_a_repeated_call_frees_what_it_needs_no_more() -> None:
    function = OfTorch(lambda x: x.exp().sin().cos().tan().sum(-1))
    x = st.pad(torch.randn(64, 8, 6), {1: SEQ})
    one, peaks = x.numel() * x.element_size(), []
    for _ in range(4):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            function(x)
        used = peak = 0
        for event in profiled.profiler.kineto_results.events():
            if event.name() == "[memory]":
                used += event.nbytes()
                peak = max(peak, used)
        peaks.append(peak / one)
    assert 1 < peaks[-1] < 2.5, peaks


@torch.no_grad()
def test_a_function_that_writes_to_a_view_of_what_it_made_does_so_each_time() -> None:
    function = OfTorch(_written_inside)
    for _ in range(5):
        t = torch.randn(2, 5, 6)
        torch.testing.assert_close(function(st.pad(t, {1: SEQ})).unpad(), _written_inside(t))


WRITES: dict[str, Callable[[Any, Tensor], Any]] = {
    "a contiguous tensor is itself": lambda x, t: x.contiguous().mul_(2),
    "a reshape is a view": lambda x, t: x.reshape(2, x.shape[1], 3, 2).mul_(2),
    "a flatten is a view": lambda x, t: x.flatten(2).add_(1),
    "of a view": lambda x, t: x[:, 1:].mul_(3),
    "by itself": lambda x, t: x.mul_(x),
    "by a part of itself": lambda x, t: x.add_(x[:, :, :1].clone()),
    "to the output": lambda x, t: torch.add(x, t, out=x),
    "to a part": lambda x, t: x[:, :, 0].zero_(),
    "by index": lambda x, t: x.__setitem__((slice(None), slice(0, 2)), 1.0),
    "with a mask": lambda x, t: x.masked_fill_(x > 0, 0.5),
    "of a chunk": lambda x, t: x.chunk(2, -1)[0].add_(1),
    "dtype": lambda x, t: x.to(x.dtype).sub_(1),
    "by the default": lambda x, t: x.type_as(x).sub_(1),
}


@pytest.mark.parametrize("tracked", [False, True])
@pytest.mark.parametrize("name", WRITES)
def test_writes_reach_what_shares_memory_in_every_call(name: str, tracked: bool) -> None:
    for n, is_transposed in ((5, False), (5, True)) * 3 + ((5, False),) * 3 + ((5, True),) * 3 + ((7, False),):
        source = torch.randn(2, n, 6, dtype=torch.float64)
        expected = (source.transpose(0, 2).contiguous().transpose(0, 2) if is_transposed else source).exp()
        x = st.pad(source.transpose(0, 2).contiguous() if is_transposed else source, {1: SEQ}, value=NAN).exp()
        x = x.transpose(0, 2) if is_transposed else x
        view, plain_view, w = x[:, :, 1:], expected[:, :, 1:], torch.ones(6, dtype=torch.float64)
        if name == "a reshape is a view" and is_transposed:
            continue
        with torch.set_grad_enabled(tracked):
            WRITES[name](x, w)
            WRITES[name](expected, w)
        torch.testing.assert_close((x * 1).unpad(), expected)
        torch.testing.assert_close((view * 1).unpad(), plain_view)


@pytest.mark.parametrize("call", [F.dropout, torch.rand_like, torch.bernoulli, lambda x: x.new_empty(2, 3).normal_()])
def test_a_repeated_call_draws_the_numbers_that_the_generator_is_at(call: Callable[[Any], Any]) -> None:
    with torch.no_grad():
        drawn = []
        for _ in range(5):
            torch.manual_seed(3)
            x = st.pad(torch.full((2, 5, 6), 0.5), {1: SEQ})
            drawn.append([y.unpad() if isinstance(y, st.PaddedTensor) else y for y in (call(x), call(x))])
        torch.testing.assert_close(drawn, drawn[:1] * 5, rtol=0, atol=0)
        assert not torch.equal(drawn[0][0], drawn[0][1])


def test_every_op_whose_values_decide_a_shape_is_known_to_recordings() -> None:
    names = {schema.name.removeprefix("aten::") for schema in torch._C._jit_get_all_schemas()}
    packets = {name: getattr(torch.ops.aten, name, None) for name in names}
    ops = [getattr(packet, each) for packet in packets.values() if packet is not None for each in packet.overloads()]
    found = {op.overloadpacket.__name__ for op in ops if torch.Tag.dynamic_output_shape in op.tags}
    assert len(found) > 10
    assert found <= recorded_rules._OF_VALUES | {"index"}  # where it is an index with a mask
