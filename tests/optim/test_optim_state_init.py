"""State of all parameters of a group is initialized together, and equals state that is initialized alone."""

from __future__ import annotations

import copy
import gc
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from kernels_on_cpu import kernels_on_cpu
from optimizers import WITH_STATE_OPTIONS
from python_calls import python_calls
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

import subtensors as st
from subtensors.kernels.fused.launch import Grid


def parameters(device: torch.device | str) -> list[Parameter]:
    """Of several dtypes, sizes and layouts, each with a gradient."""
    torch.manual_seed(0)
    made = [
        torch.randn(3, 4),
        torch.randn(()),
        torch.randn(0, 2),
        torch.randn(5, 2).t(),
        torch.randn(4, 6)[:, ::2],
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        *[torch.randn(7, dtype=dtype) for dtype in (torch.bfloat16, torch.float16, torch.float64)],
        torch.randn(3, 4, dtype=torch.bfloat16),
    ]
    params = [Parameter(t.to(device)) for t in made]
    for p in params:
        p.grad = torch.randn_like(p)
    return params


@pytest.mark.parametrize("name", WITH_STATE_OPTIONS)
def test_state_initialized_together_equals_state_initialized_alone(name: str, device: torch.device) -> None:
    cls, options = getattr(st.optim, name), WITH_STATE_OPTIONS[name]
    together = cls(parameters(device), **options)
    together.step()
    for p, alone in zip(together.param_groups[0]["params"], parameters(device), strict=True):
        optimizer = cls([alone], **options)
        optimizer.step()
        assert list(together.state[p]) == list(optimizer.state[alone])
        for entry, expected in optimizer.state[alone].items():
            value = together.state[p][entry]
            assert (type(value), value.device, value.stride()) == (type(expected), expected.device, expected.stride())
            torch.testing.assert_close(value, expected, rtol=0, atol=0, equal_nan=True)


def test_each_tensor_of_state_has_memory_of_its_own(device: torch.device) -> None:
    params = parameters(device)
    optimizer = st.optim.AdamW(params, master_weights=True, ema=0.9)
    optimizer.step()
    state = [t for entry in optimizer.state.values() for t in entry.values()]
    places = [t.untyped_storage().data_ptr() for t in state if t.numel()]
    assert len(set(places)) == len(places)
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in state)
    assert all(copy.deepcopy(t).untyped_storage().nbytes() == t.nbytes for t in state)


def test_an_entry_that_was_asked_for_before_the_first_step_is_the_one_that_is_filled() -> None:
    params = parameters("cpu")
    optimizer = st.optim.Adam(params)
    early = optimizer.state[params[0]]
    optimizer.step()
    assert optimizer.state[params[0]] is early
    assert early["step"] == 1


class Filling(TorchDispatchMode):
    """Counts the aten calls that do more than to make a view or take memory."""

    count = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        takes_memory = op.overloadpacket._qualified_op_name.startswith("aten::empty")
        self.count += not (op.is_view or takes_memory)
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("name", "dtype"), [("Adam", torch.float32), ("AdamW", torch.bfloat16), ("SGD", torch.float32)]
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="its launches are stubbed where Triton interprets")
def test_a_first_step_fills_as_much_state_for_a_hundred_tensors_as_for_twenty(
    name: str, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Grid, "launch", lambda *_: None)

    def fills(count: int) -> int:
        optimizer = first_step(name, dtype, device, count)
        with kernels_on_cpu(), Filling() as filling:  # type: ignore[no-untyped-call]
            optimizer.step()
        return int(filling.count)

    fills(10)  # a trace is no part of it
    assert fills(100) == fills(20) < 12


@pytest.mark.parametrize("name", ["Adam", "Lion"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="its launches are stubbed where Triton interprets")
def test_a_first_step_runs_little_python_for_each_tensor(
    name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Grid, "launch", lambda *_: None)

    def calls(count: int) -> int:
        optimizer = first_step(name, torch.float32, device, count)
        with kernels_on_cpu():
            return python_calls(optimizer.step)

    calls(20)
    assert (calls(200) - calls(100)) / 100 < 20


def first_step(name: str, dtype: torch.dtype, device: str, count: int) -> Any:
    """An optimizer over so many tensors that has taken no step."""
    params: list[Tensor] = [Parameter(torch.ones(i % 3 + 1, dtype=dtype, device=device)) for i in range(count)]
    for p in params:
        p.grad = torch.ones_like(p)
    return getattr(st.optim, name)(params, **WITH_STATE_OPTIONS[name])


@pytest.mark.skipif(torch.cuda.is_available(), reason="its launches are stubbed where Triton interprets")
def test_a_first_step_hardly_collects_garbage(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Grid, "launch", lambda *_: None)
    collections: list[str] = []

    def note(phase: str, info: dict[str, int]) -> None:
        collections.append(phase)

    optimizer = first_step("Adam", torch.float32, device, 1000)
    thresholds = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    gc.collect()
    gc.callbacks.append(note)
    try:
        with kernels_on_cpu():
            optimizer.step()
    finally:
        gc.callbacks.remove(note)
        gc.set_threshold(*thresholds)
    # It makes some 20 000 objects, and all of them stay.
    assert gc.isenabled()
    assert collections.count("start") <= 10


@pytest.mark.gpu
def test_large_state_is_begun_apart_from_what_a_backward_left() -> None:
    def idle() -> int:
        """Bytes that torch can't give back, since a tensor has a part of their segment."""
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved() - torch.cuda.memory_allocated()

    before = idle()
    p = Parameter(torch.zeros(48 << 18, device="cuda"))
    activations = [torch.empty(n << 18, device="cuda") for n in (150, 200, 250)]
    p.grad = torch.ones_like(p)
    del activations
    optimizer = st.optim.AdamW([p], lr=0.1)
    optimizer.step()
    assert idle() - before < 16 << 20  # 54 MiB of the first, where the state lay there
    assert len(optimizer.state[p]) == 3


def test_on_a_cpu_a_step_neither_joins_nor_splits_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """It lies side by side in memory already; parameters and gradients lie where the user put them."""
    params = [Parameter(torch.randn(n)) for n in (3, 5, 1, 8)]
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer = st.optim.Adam(params)
    for _ in range(3):
        optimizer.step()
    cat, split = Mock(wraps=torch.cat), Mock(wraps=torch.split_with_sizes_copy)
    monkeypatch.setattr(torch, "cat", cat)
    monkeypatch.setattr(torch, "split_with_sizes_copy", split)
    optimizer.step()
    assert (cat.call_count, split.call_count) == (1, 1)  # the gradients are joined by another call of torch's
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.step()
    cat.reset_mock()
    split.reset_mock()
    optimizer.step()
    assert (cat.call_count, split.call_count) == (4, 3)


@pytest.mark.parametrize("kind", ["Adam", "Adagrad", "Adafactor"])
def test_state_is_in_the_order_of_the_parameters(kind: str) -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.float32] + [torch.complex64] * (kind == "Adam")
    params = [Parameter(torch.ones(3, dtype=dtype)) for dtype in dtypes]
    opt = getattr(st.optim, kind)(params, lr=0.1)
    for p in params:
        p.grad = torch.ones_like(p)
    opt.step()
    assert list(opt.state) == params
    assert list(opt.state_dict()["state"]) == list(range(len(params)))
