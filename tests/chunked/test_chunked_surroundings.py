"""What other code does around a chunked loss: threads, hooks, counters, modes, lists, devices without values."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import subtensors as st
from subtensors.chunked.record_call import fallbacks


class Model(nn.Module):
    """A layer, and a head whose logits are chunked."""

    def __init__(self, by_kernels: bool = True) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(8, 8), nn.Linear(8, 23, bias=False)
        self.by_kernels, self.chunked = by_kernels, True

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        logits = self.head(st.chunk(h, rows=5) if self.chunked else h)
        return F.cross_entropy(logits, torch.arange(17)) if self.by_kernels else logits.exp().mean()


def plain(model: Model) -> Model:
    out = copy.deepcopy(model)
    out.chunked = False
    return out


def gradients(model: Model, x: Tensor) -> list[Any]:
    model.zero_grad()
    loss = model(x)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


@pytest.fixture(params=[True, False], ids=["kernels", "ops"])
def model(request: Any) -> Model:
    torch.manual_seed(0)
    return Model(request.param)


def test_threads_compute_chunked_losses_at_once(model: Model) -> None:
    models = [copy.deepcopy(model) for _ in range(4)]
    batches = [torch.randn(17, 8) for _ in models]
    expected = [gradients(plain(m), x) for m, x in zip(models, batches, strict=True)]
    found: dict[int, list[Any]] = {}
    start = threading.Barrier(len(models))

    def work(place: int) -> None:
        start.wait()
        for _ in range(5):
            found[place] = gradients(models[place], batches[place])

    threads = [threading.Thread(target=work, args=(place,)) for place in range(len(models))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for place in range(len(models)):
        torch.testing.assert_close(found[place], expected[place])


def test_a_flop_counter_counts_the_products_of_a_chunked_module(model: Model) -> None:
    counts = []
    for each in (model, plain(model)):
        with FlopCounterMode(display=False) as counter:
            gradients(each, torch.randn(17, 8))
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


class Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_sees_the_ops_of_chunks(model: Model) -> None:
    x = torch.randn(17, 8)
    expected = gradients(plain(model), x)
    with Names() as names:
        found = gradients(model, x)
    torch.testing.assert_close(found, expected)
    assert names.seen & {"mm", "addmm", "addmm_", "_addmm_activation"}


class Doubled(TorchDispatchMode):
    """Double what some ops return."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names, self.calls = names, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ not in self.names:
            return out
        self.calls += 1
        return out * 2


WEIGHT = torch.randn(8, 19, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

SCALED: dict[str, Callable[[Tensor], Tensor]] = {
    "a sum": lambda h: h.tanh().sum(),
    "a product": lambda h: (h @ WEIGHT).square().sum(0),
    "rows": lambda h: h.tanh() * h,
    "a loss of logits": lambda h: F.cross_entropy((h @ WEIGHT).tanh(), torch.arange(17)),
    "a linear layer": lambda h: F.linear(h.tanh(), WEIGHT.T).square().mean(),
    "a number": lambda h: h.tanh().sum().item() * h.tanh().sum(),
    "an op on plain operands": lambda h: (h * WEIGHT[:1, :8].tanh()).tanh().sum(),
}


@pytest.mark.parametrize("rows", [5, 17])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", SCALED)
def test_a_dispatch_mode_that_changes_results_changes_them_once(name: str, grad: bool, rows: int) -> None:
    found, calls = [], []
    for chunks in (False, True):
        x = torch.linspace(-1, 1, 17 * 8, dtype=torch.float64).view(17, 8).requires_grad_()
        with torch.set_grad_enabled(grad), Doubled("tanh", "mm") as mode:
            out = SCALED[name](st.chunk(x, rows=rows) if chunks else x)
            out = out.realize() if hasattr(out, "realize") else out
            gradient = torch.autograd.grad(out.sum(), x)[0] if grad else None
        found.append((out.detach(), gradient))
        calls.append(mode.calls)
    torch.testing.assert_close(*found)
    assert calls[0] > 0
    if rows == 17 and not grad:
        assert calls[0] == calls[1]


def test_hooks_of_parameters_modules_and_saved_tensors_run(model: Model) -> None:
    x = torch.randn(17, 8)
    expected = gradients(plain(model), x)
    seen: list[str] = []
    model.head.weight.register_hook(lambda grad: seen.append("weight"))
    model.head.register_forward_hook(lambda *args: seen.append("forward"))
    model.layer.register_full_backward_hook(lambda *args: seen.append("layer"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of a module whose input has no gradient
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
            found = gradients(model, x)
    torch.testing.assert_close(found, expected)
    assert set(seen) == {"weight", "forward", "layer"}


def test_backward_hooks_of_a_module_called_with_chunks_are_refused(model: Model) -> None:
    model.head.register_full_backward_hook(print)
    with pytest.raises(st.RuleError, match="full backward hooks"):
        model(torch.randn(17, 8))


def test_a_hook_of_several_tensors_is_refused() -> None:
    h = st.chunk(torch.ones(4, 3, requires_grad=True), rows=2)
    with pytest.raises(st.RuleError, match="the tensor that was chunked"):
        torch.autograd.graph.register_multi_grad_hook([h.exp()], print)


def test_a_users_own_error_in_a_hook_is_raised_as_it_is() -> None:
    def fail(grad: Tensor) -> None:
        raise KeyError("data pointer of the user")

    x = torch.ones(4, 3, requires_grad=True)
    x.register_hook(fail)
    with pytest.raises(KeyError, match="data pointer of the user"):
        F.linear(st.chunk(x, rows=2), torch.ones(5, 3)).exp().mean().backward()


def test_a_linear_layer_and_its_loss_have_sizes_on_meta() -> None:
    h = st.chunk(torch.empty(8, 4, device="meta"), rows=2)
    logits = F.linear(h, torch.empty(5, 4, device="meta"))
    assert logits.shape == (8, 5)
    assert F.cross_entropy(logits, torch.empty(8, dtype=torch.int64, device="meta")).device.type == "meta"


def test_a_chunked_tensor_joins_each_tensor_of_a_list() -> None:
    h = torch.randn(6, 3)
    tensors = [torch.randn(6, 3), torch.randn(3)]
    found = st.chunk(h, rows=2) + st.TensorList(tensors)
    for f, t in zip(found, tensors, strict=True):
        torch.testing.assert_close(f.realize() if isinstance(f, st.ChunkedTensor) else f, h + t)


def test_a_program_of_fake_tensors_leaves_nothing_to_later_ones() -> None:
    program = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5))

    def result(x: Any) -> Any:
        return program(st.chunk(x, chunks=3)).exp().sum()

    expected = result(torch.ones(6, 4))
    for _ in range(2):
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert isinstance(result(torch.ones(6, 4)), FakeTensor)
        assert type(h := nn.Tanh()(st.chunk(torch.ones(6, 4), chunks=3))) is st.ChunkedTensor
        assert type(h._ref.value.meta) is Tensor
        torch.testing.assert_close(result(torch.ones(6, 4)), expected)


def test_what_is_recorded_under_one_fake_mode_is_no_part_of_another(caplog: pytest.LogCaptureFixture) -> None:
    fallbacks.clear()
    for out in (7, 9):  # the first op is known to the second mode, the next one is not
        with FakeTensorMode():
            h = st.chunk(torch.ones(6, 4), rows=2).tanh()
            assert isinstance(torch.addmm(torch.ones(out), h, torch.ones(4, out)).exp().mean(), FakeTensor)
    assert not fallbacks
    assert not caplog.messages
