"""Repeated calls in changing surroundings: each gives what its first call gives, and what plain torch gives in float64.

A call that comes again runs recorded torch calls in place of rules. What these depend on has to be part of what makes
two calls alike: each test changes one such thing between calls, back and forth.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as some
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import subtensors as st
from subtensors.dispatch.padded import interpreter, kernels
from subtensors.dispatch.padded.gradient_masking import GradientTracker
from subtensors.dispatch.padded.padded_value import PaddedValue
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
        plain = described(attempt(OF_NUMBERS[name], t, NUMBERS[i]))
        assert isinstance(found, type) or isinstance(plain, type) or found[1:] == plain[1:]


def garbage_reaches(loss: Callable[[Any], Tensor]) -> list[tuple[Tensor, Tensor]]:
    """The gradients of a bias over the padding in repeated calls, each with that of plain torch."""
    found = []
    for seed in range(6):
        torch.manual_seed(seed)
        t = torch.randn(2, 5, 6, dtype=torch.float64)
        biases = [torch.ones(6, dtype=torch.float64, requires_grad=True) for _ in range(2)]
        for x, bias in zip((st.pad(t, {1: SEQ}, value=3.0), t), biases, strict=True):
            loss(x + bias).backward()
        found.append((biases[0].grad, biases[1].grad))
    return found  # type: ignore[return-value]


def test_a_repeated_call_masks_the_gradient_of_a_use_that_says_nothing_of_it() -> None:
    # Of the two uses of its operand in tanhshrink, the gradient of x in x - tanh(x) is zero where the result's is; of
    # tanh's nothing is known. So the tracker counts uses as well as what is known of them.
    recorded = len(records())
    for found, wanted in garbage_reaches(lambda x: F.tanhshrink(x).sum(1).square().sum()):
        torch.testing.assert_close(found, wanted)
    assert len(records()) > recorded


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


def records() -> list[object]:
    return [known for known in fast_path._calls.values() if isinstance(known, fast_path.Record)]
