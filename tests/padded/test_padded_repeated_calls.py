"""Repeated calls in changing surroundings: each gives what its first call gives, and what plain torch gives in float64.

A call that comes again runs recorded torch calls in place of rules. What these depend on has to be part of what makes
two calls alike: each test changes one such thing between calls, back and forth.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import subtensors as st
from subtensors.dispatch.padded import kernels
from subtensors.dispatch.padded.gradient_masking import GradientTracker
from subtensors.padded import fast_path

SEQ = st.Dim("seq", max=16, buckets=8)
NAN = float("nan")
EYE = torch.eye(6, dtype=torch.float64)

Call = Callable[[Any, Tensor], Any]

CALLS: dict[str, Call] = {
    "a product with a weight": lambda x, w: x * w,
    "a sum": lambda x, w: (x * w).sum(1),
    "a mean of all": lambda x, w: (x + w).mean(),
    "a softmax": lambda x, w: (x * w).softmax(1),
    "a maximum": lambda x, w: (x * w).amax(1),
    "a median of all": lambda x, w: (x * w).median(),
    "a median": lambda x, w: (x * w).median(1).values,
    "a variance and a mean": lambda x, w: torch.var_mean(x * w, 1)[0],
    "a cumulative sum": lambda x, w: (x * w).cumsum(1),
    "sorted values": lambda x, w: (x * w).sort(1).values,
    "a layer norm": lambda x, w: F.layer_norm(x, (6,), w),
    "an rms norm": lambda x, w: F.rms_norm(x * w, (6,)),
    "a linear layer": lambda x, w: F.linear(x, w.expand(3, 6)),
    "a product over the padding": lambda x, w: x.transpose(1, 2) @ (x * w),
    "two uses in one call": lambda x, w: F.normalize(x * w, dim=-1),
    "an op less another one": lambda x, w: F.tanhshrink(x * w),
    "one tensor twice": lambda x, w: torch.mul(x, x) + x,
    "attention": lambda x, w: F.scaled_dot_product_attention(x * w, x, x),
    "attention of several heads": lambda x, w: F.multi_head_attention_forward(
        x, x * w, x, 6, 2, EYE.to(x.dtype).repeat(3, 1), None, None, None, False, 0.0, EYE.to(x.dtype), None,
        need_weights=False,
    )[0],
    "a copy where it is needed": lambda x, w: (x * w).transpose(0, 2).contiguous(),
    "the same in one call": lambda x, w: x.contiguous() * w,
    "a flatten": lambda x, w: (x * w).flatten(0, 1) * w,
    "a reshape": lambda x, w: x.reshape(2, x.shape[1], 3, 2) * 2,
    "a slice": lambda x, w: (x * w)[:, 1:],
    "the last position": lambda x, w: (x * w)[:, -1],
    "parts": lambda x, w: (x * w).chunk(2, -1)[1],
    "a concatenation": lambda x, w: torch.cat([x, x * w], 1),
    "a choice with a number": lambda x, w: torch.where(x > 0, x * w, 0.5),
    "a sum by names": lambda x, w: torch.einsum("bse,bte->bst", x, x * w),
    "a distance": lambda x, w: F.cosine_similarity(x, x * w + 1, dim=-1),
}  # fmt: skip


@dataclass(frozen=True)
class State:
    """One state of what a call is made in.

    Args:
        lengths: the true size, or of a ragged batch those of its rows.
        tracked: the tensors that require grad: "x", "w", both or none.
        strides: of the storage.
        context: what surrounds the call.
        around: calls the function.
    """

    lengths: tuple[int, ...] = (5,)
    tracked: str = "xw"
    strides: str = "contiguous"
    dtype: torch.dtype = torch.float64
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    around: Callable[..., Any] = lambda call, x, w: call(x, w)
    is_exact: bool = True


def padded(rows: list[Tensor], strides: str) -> Tensor:
    """A padded tensor whose storage has such strides."""
    if len(rows) > 1:
        return st.pad([t[0] for t in rows], {0: SEQ}, value=NAN)
    (t,) = rows
    if strides == "transposed":
        return st.pad(t.transpose(0, 2).contiguous(), {1: SEQ}, value=NAN).transpose(0, 2)
    if strides == "expanded":
        return st.pad(t[:1], {1: SEQ}, value=NAN).expand(2, -1, -1)
    if strides == "sliced":
        return st.pad(torch.stack([t, t], -1).flatten(-2), {1: SEQ}, value=NAN)[:, :, ::2]
    return st.pad(t, {1: SEQ}, value=NAN)


def made(state: State, seed: int) -> tuple[list[Tensor], Tensor]:
    """The rows of an operand, and a weight."""
    generator = torch.Generator().manual_seed(seed)
    rows = [
        torch.randn(1 if len(state.lengths) > 1 else 2, n, 6, dtype=torch.float64, generator=generator)
        for n in state.lengths
    ]
    if state.strides == "expanded":
        rows = [t[:1].expand(2, -1, -1).clone() for t in rows]
    w = torch.randn(6, dtype=torch.float64, generator=generator) + 2
    rows, w = [t.to(state.dtype) for t in rows], w.to(state.dtype)
    return [t.requires_grad_("x" in state.tracked) for t in rows], w.requires_grad_("w" in state.tracked)


def outcome(call: Call, state: State, seed: int) -> tuple[list[Any], list[Tensor]]:
    """What a padded call gives: what can be compared by ==, and tensors."""
    rows, w = made(state, seed)
    with state.context():
        out = state.around(call, padded(rows, state.strides), w)
    listed = out.unpad() if isinstance(out, st.PaddedTensor) else out
    values = list(listed) if isinstance(listed, list) else [listed]
    known = [type(out), out.dtype, out.requires_grad, out.stride(), [v.shape for v in values]]
    return known, [v.detach() for v in values] + gradients(values, [*rows, w])


def gradients(values: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[Tensor]:
    wanted = [t for t in leaves if t.requires_grad]
    if not wanted or not any(v.requires_grad for v in values):
        return []
    total = torch.stack([(v.double() * torch.arange(1.0, 1 + v.numel()).view(v.shape).cos()).sum() for v in values])
    found = torch.autograd.grad(total.sum(), wanted, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(wanted, found, strict=True)]


def check(call: Call, states: Sequence[State], monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the call in each state, back and forth, by repeats and by the dispatcher."""
    order = [i for i in range(len(states)) for _ in range(3)]
    for seed, i in enumerate([*order, *order[::-2], *range(len(states))]):
        state = states[i]
        known, found = outcome(call, state, seed)
        with monkeypatch.context() as patched:
            patched.setattr(fast_path, "try_fast_path", lambda *_: NotImplemented)
            wanted_known, wanted = outcome(call, state, seed)
        assert known == wanted_known
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
        if state.is_exact and len(state.lengths) == 1:
            rows, w = made(state, seed)
            with torch.enable_grad() if torch.is_grad_enabled() else nullcontext():
                truth = [call(rows[0][:1].expand(2, -1, -1) if state.strides == "expanded" else rows[0], w)]
            count = len(found)
            expected = [truth[0].detach(), *gradients(truth, [*rows, w])][:count]
            torch.testing.assert_close(found, expected)


class _Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _Calling(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def deterministic() -> Any:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def default_dtype() -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _checkpointed(call: Call, x: Any, w: Tensor) -> Any:
    return checkpoint(call, x, w, use_reentrant=False)


def _packed() -> AbstractContextManager[Any]:
    return torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t.clone())


SURROUNDINGS: dict[str, list[State]] = {
    "strides": [State(strides=s) for s in ("contiguous", "transposed", "expanded", "sliced")],
    "strides without gradients": [State(tracked="", strides=s) for s in ("transposed", "contiguous", "sliced")],
    "what requires grad": [State(tracked=t) for t in ("", "x", "w", "xw")],
    "modes of autograd": [
        State(),
        State(tracked="", context=torch.no_grad),
        State(tracked="", context=torch.inference_mode),
        State(context=torch.no_grad),
        State(context=lambda: torch.set_grad_enabled(True)),
    ],
    "autocast": [
        State(dtype=torch.float32),
        State(dtype=torch.float32, context=lambda: torch.autocast("cpu", torch.bfloat16), is_exact=False),
        State(dtype=torch.bfloat16, is_exact=False),
    ],
    "determinism": [State(), State(context=deterministic)],
    "the default dtype": [State(dtype=torch.float32), State(dtype=torch.float32, context=default_dtype), State()],
    "true sizes": [State(lengths=(n,)) for n in (5, 8, 2, 5)],
    "ragged sizes": [State(lengths=n) for n in ((5, 3), (3, 5), (8, 1), (4,), (4, 4))],
    "modes": [State(), State(context=_Watching), State(context=_Calling), State(context=lambda: torch.device("cpu"))],
    "hooks on saved tensors": [
        State(context=_packed),
        State(),
        State(context=lambda: torch.autograd.graph.save_on_cpu()),
        State(context=torch.autograd.detect_anomaly),
    ],
    "checkpoints": [State(around=_checkpointed), State()],
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("surroundings", SURROUNDINGS)
@pytest.mark.parametrize("name", CALLS)
def test_a_call_gives_the_same_in_every_order_of_surroundings(
    name: str, surroundings: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    states, call = SURROUNDINGS[surroundings], CALLS[name]
    if surroundings == "ragged sizes":
        states = [state for state in states if _runs(call, state)]
    check(call, states, monkeypatch)


def _runs(call: Call, state: State) -> bool:
    """Whether there is a rule for a call of a ragged batch, and a result of one shape."""
    try:
        outcome(call, state, 0)
    except (RuntimeError, TypeError, AttributeError, AssertionError):
        return False
    return True


def test_the_trackers_of_a_repeated_call_count_the_uses_that_the_rules_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[list[tuple[int, bool]]] = []
    arrives_zero = GradientTracker.arrives_zero

    def noted(tracker: GradientTracker) -> bool:
        answer = arrives_zero(tracker)
        answers[-1].append((tracker.uses - len(tracker.conditions), answer))
        return answer

    monkeypatch.setattr(GradientTracker, "arrives_zero", noted)
    for call in (F.tanhshrink, lambda x: F.normalize(x, dim=-1), lambda x: F.cosine_similarity(x, x * 2, dim=-1)):
        answers.clear()
        for _ in range(5):
            t = torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True)
            answers.append([])
            call(st.pad(t, {1: SEQ}) * 1).sum(1).square().sum().backward()
        assert any(unknown for unknown, _ in answers[0])
        assert answers == answers[:1] * 5


def test_what_is_read_in_an_autograd_function_is_not_taken_for_its_gradient() -> None:
    # The largest elements that are equal share the gradient: that is no gradient of the calls in its forward.
    for _ in range(5):
        t = torch.tensor([[[1.0, 1.0, 0.0], [1.0, 2.0, 2.0]]], dtype=torch.float64, requires_grad=True)
        u = t.detach().clone().requires_grad_()
        for own, x in ((t, st.pad(t, {1: SEQ}, value=NAN)), (u, u)):
            (x * 1).median().backward()
            assert own.grad is not None
        torch.testing.assert_close(t.grad, u.grad)


def test_an_error_in_a_repeated_call_leaves_the_mode_of_autograd() -> None:
    x = st.pad(torch.randn(2, 5, 6, requires_grad=True), {1: SEQ})
    for index in (0, 0, 0, 9, 0, 9):
        for call in (lambda i: x.gather(2, torch.full((2, 8, 1), i)), lambda i: x.index_select(2, torch.tensor([i]))):
            if index == 9:
                with pytest.raises((RuntimeError, IndexError)):
                    call(index)
            else:
                call(index)
            assert torch.is_grad_enabled()


@torch.no_grad()
def test_results_that_are_none_or_numbers_are_those_of_the_call() -> None:
    for n in (5, 5, 5, 7, 5):
        x = st.pad(torch.randn(2, n, 6), {1: SEQ})
        out, weights = F.multi_head_attention_forward(
            x, x, x, 6, 2, torch.eye(6).repeat(3, 1), None, None, None, False, 0.0, torch.eye(6), None,
            need_weights=False,
        )  # fmt: skip
        assert weights is None
        assert isinstance(out, st.PaddedTensor)


def test_attention_remembers_its_views_where_its_weights_are_none() -> None:
    layer = torch.nn.MultiheadAttention(6, 2, batch_first=True, dtype=torch.float64)
    for n in (5, 5, 5, 7, 5):
        t = torch.randn(2, n, 6, dtype=torch.float64)
        x = st.pad(t, {1: SEQ}, value=NAN)
        torch.testing.assert_close(layer(x, x, x, need_weights=False)[0].unpad(), layer(t, t, t, need_weights=False)[0])


@pytest.mark.parametrize("name", sorted({*CALLS} - {"attention of several heads"}))  # torch has no second derivative
@sdpa_kernel(SDPBackend.MATH)  # the one with second derivatives
def test_gradients_of_gradients_and_hooks_are_those_of_plain_torch(name: str) -> None:
    call = CALLS[name]
    for seed in range(4):
        grads, seen = [], []
        for is_padded in (True, False):
            (t,), w = made(State(), seed)
            x = st.pad(t, {1: SEQ}, value=NAN) if is_padded else t * 1
            x.register_hook(lambda g, seen=seen: seen.append(1) or g * 2)
            out = call(x, w)
            values = out.unpad() if isinstance(out, st.PaddedTensor) else out
            first = torch.autograd.grad(values.pow(3).sum(), [t, w], create_graph=True, allow_unused=True)
            known = [g for g in first if g is not None]
            total = torch.stack([g.square().sum() for g in known]).sum()
            second = torch.autograd.grad(total, [t, w], allow_unused=True) if total.requires_grad else ()
            grads.append([torch.zeros(()) if g is None else g for g in (*first, *second)])
        torch.testing.assert_close(*grads)
        assert len(seen) >= 2


def test_a_graph_is_walked_twice() -> None:
    for seed in range(4):
        (t,), w = made(State(), seed)
        out = F.normalize(st.pad(t, {1: SEQ}, value=NAN) * w, dim=-1).softmax(1).sum((0, 1)).cos().sum()
        first = torch.autograd.grad(out, [t, w], retain_graph=True)
        torch.testing.assert_close(torch.autograd.grad(out, [t, w]), first, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["a softmax", "a layer norm", "two uses in one call", "a slice", "a sum"])
def test_compiled_code_and_repeats_give_the_same(name: str) -> None:
    call = CALLS[name]
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for turn, n in enumerate((5, 5, 5, 7, 5, 3)):
        (t,), w = made(State(lengths=(n,)), turn)
        found = []
        for function in (call, compiled, call):
            out = function(st.pad(t, {1: SEQ}, value=NAN), w)
            values = out.unpad() if isinstance(out, st.PaddedTensor) else out
            found.append([values.detach(), *gradients([values], [t, w])])
        torch.testing.assert_close(found[1], found[0])
        torch.testing.assert_close(found[2], found[0], rtol=0, atol=0)
    torch._dynamo.reset()


def test_transforms_are_refused_before_and_after_repeats() -> None:
    x = st.pad(torch.randn(2, 5, 6), {1: SEQ})
    for _ in range(4):
        x.exp()
        with pytest.raises((st.RuleError, RuntimeError)):
            torch.func.grad(lambda s: (x.exp() * s).sum())(torch.ones(()))
        with pytest.raises((st.RuleError, RuntimeError)):
            torch.vmap(lambda row: (x.exp() * row).sum())(torch.ones(3, 6))


KERNELS: dict[str, Call] = {
    name: CALLS[name] for name in ("a sum", "a softmax", "a maximum", "a layer norm", "an rms norm", "a mean of all")
}


@pytest.mark.parametrize("name", KERNELS)
def test_rules_by_kernels_are_repeated(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # On a GPU these rules run one op of our own, of which the CPU has the reference.
    monkeypatch.setattr(kernels, "has_kernel", lambda *_: True)
    fast_path._calls.clear()
    check(KERNELS[name], [State(), State(lengths=(7,)), State(tracked="w"), State(strides="transposed")], monkeypatch)
    check(KERNELS[name], [State(tracked="", lengths=n) for n in ((5, 3), (3, 5), (8, 1))], monkeypatch)
    fast_path._calls.clear()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("tracked", [False, True])
def test_a_repeated_layer_gives_no_warning_that_its_rule_hides(tracked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    lstm = torch.lstm

    def warning(*args: Any) -> Any:
        warnings.warn("RNN module weights are not part of single contiguous chunk of memory", stacklevel=1)
        return lstm(*args)

    monkeypatch.setattr(torch, "lstm", warning)
    layer = torch.nn.LSTM(6, 3, batch_first=True, dtype=torch.float64)
    recorded = sum(isinstance(known, fast_path.Record) for known in fast_path._calls.values())
    with torch.set_grad_enabled(tracked):
        for n in (5, 5, 5, 7, 5):
            t = torch.randn(2, n, 6, dtype=torch.float64)
            out = layer(st.pad(t, {1: SEQ}, value=NAN))[0].unpad()
            with monkeypatch.context() as patched:
                patched.setattr(torch, "lstm", lstm)
                torch.testing.assert_close(out, layer(t)[0])
    assert sum(isinstance(known, fast_path.Record) for known in fast_path._calls.values()) > recorded
    fast_path._calls.clear()
