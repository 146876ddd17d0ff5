"""StaticAddressTensor: it reads and writes as a plain tensor, nothing moves it, and its copies have its type."""

from __future__ import annotations

import copy
import gc
import io
import multiprocessing
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as hs
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import subtensors as st

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64, torch.uint8]


def six(device: str) -> st.StaticAddressTensor:
    return st.static(torch.arange(6.0, device=device).reshape(2, 3))


@given(
    shape=hs.lists(hs.integers(0, 4), max_size=3),
    dtype=hs.sampled_from(DTYPES),
    order=hs.randoms(use_true_random=False),
)
def test_a_static_tensor_has_the_values_dtype_and_dense_strides_of_its_source(
    device: str, shape: list[int], dtype: torch.dtype, order: Any
) -> None:
    dims = list(range(len(shape)))
    order.shuffle(dims)
    t = torch.randn(shape, device=device).mul(3).to(dtype).permute(dims)
    s = st.static(t)
    assert torch.equal(s, t)
    assert (s.dtype, s.shape, s.stride(), s.device) == (t.dtype, t.shape, torch.empty_like(t).stride(), t.device)
    assert s.numel() == 0 or s.data_ptr() != t.data_ptr()


def test_a_static_tensor_of_a_static_tensor_is_itself(device: str) -> None:
    s = six(device)
    assert st.static(s) is s
    assert st.StaticAddressTensor(s) is s


READS: list[Callable[[Tensor], Any]] = [
    lambda t: t + 1,
    lambda t: t @ t.mT,
    lambda t: t[0],
    lambda t: t.sum(1, keepdim=True),
    lambda t: torch.stack([t, t]),
    lambda t: torch.nn.functional.layer_norm(t, (3,)),
    lambda t: torch.where(t > 2, t, -t),
    lambda t: t.reshape(3, 2).sort(descending=True).values,
    lambda t: torch._foreach_add([t, t], 1)[1],
    lambda t: torch.func.vmap(torch.sin)(t),
    lambda t: torch.func.grad(lambda u: (u * u).sum())(t),
    lambda t: t.clone(),
    lambda t: torch.ops.aten.mul.Tensor(t, 2),
]


@pytest.mark.parametrize("read", READS)
def test_a_read_returns_what_a_plain_tensor_returns(device: str, read: Callable[[Tensor], Tensor]) -> None:
    s = six(device)
    result = read(s)
    assert type(result) is Tensor
    assert torch.equal(result, read(s.data))


WRITES: list[Callable[[Tensor], Any]] = [
    lambda t: t.add_(1),
    lambda t: t[0].zero_(),
    lambda t: t.__setitem__(0, 5.0),
    lambda t: t.copy_(torch.full((2, 3), 7.0)),
    lambda t: torch.mul(t, 2, out=t),
    lambda t: torch.sort(t.data.clone(), descending=True, out=(t, torch.empty(0, dtype=torch.int64, device=t.device))),
    lambda t: torch._foreach_mul_([t], 3),
    lambda t: t.resize_(2, 3),
    lambda t: t.resize_as_(torch.empty(2, 3)),
    lambda t: setattr(t, "data", t.data),
]


@pytest.mark.parametrize("write", WRITES)
def test_a_write_lands_at_the_address(device: str, write: Callable[[Tensor], Any]) -> None:
    s = six(device)
    plain = s.data.clone()
    memory = s.data
    write(s)
    write(plain)
    assert s.data_ptr() == memory.data_ptr()
    assert torch.equal(memory, plain)
    assert torch.equal(s, plain)


def test_out_returns_its_own_tensors(device: str) -> None:
    s = six(device)
    assert torch.add(s, 1, out=s) is s
    values, indices = six(device), torch.empty(2, 3, dtype=torch.int64, device=device)
    got = torch.sort(s, out=(values, indices))
    assert got[0] is values
    assert got[1] is indices


def test_torch_itself_refuses_to_resize_the_storage(device: str) -> None:
    with pytest.raises(RuntimeError, match="not resizable"):
        six(device).untyped_storage().resize_(1 << 20)


def test_share_memory_would_move_values_of_the_cpu() -> None:
    with pytest.raises(st.AddressError, match=r"share_memory_ would move .*clone"):
        six("cpu").share_memory_()


@pytest.mark.gpu
def test_share_memory_does_nothing_on_a_gpu() -> None:
    s = six("cuda")
    assert s.share_memory_() is s


def test_module_to_its_own_device_changes_nothing_and_to_another_is_refused(device: str) -> None:
    layer = nn.Linear(2, 3, device=device)
    layer.weight = st.static(layer.weight)
    at = layer.weight.data_ptr()
    layer.to(device)
    assert layer.weight.data_ptr() == at
    with pytest.raises(st.AddressError, match=r"\.data = would move"):
        layer.double()
    assert layer.weight.dtype == torch.float32


COPIES: dict[str, Callable[[st.StaticAddressTensor], Tensor]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda s: pickle.loads(pickle.dumps(s)),
    "torch.save": lambda s: _saved_and_loaded(s),
    "to": lambda s: s.to(torch.float64),
    "half": lambda s: s.half(),
    "long": lambda s: s.long(),
    "cpu": lambda s: s.to(torch.float64).cpu() if s.device.type == "cpu" else s.cpu(),
}


def _saved_and_loaded(t: Any) -> Any:
    file = io.BytesIO()
    torch.save(t, file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_is_static_at_an_address_of_its_own(device: str, how: str) -> None:
    s = six(device)
    other = COPIES[how](s)
    assert type(other) is st.StaticAddressTensor
    assert other.data_ptr() != s.data_ptr()
    assert torch.equal(other.to(s.device, s.dtype), s)
    with pytest.raises(st.AddressError):
        other.resize_(1000)


def test_a_checkpoint_loads_on_devices_without_addresses(device: str) -> None:
    file = io.BytesIO()
    torch.save({"weight": st.static(nn.Parameter(torch.ones(2, 3, device=device)))}, file)
    file.seek(0)
    weight = torch.load(file, map_location="meta")["weight"]
    assert (type(weight), weight.device.type, weight.shape) == (nn.Parameter, "meta", (2, 3))


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("is_parameter", [False, True])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_copy_keeps_its_role(device: str, how: str, is_parameter: bool, requires_grad: bool) -> None:
    t = torch.ones(3, device=device)
    s = st.static(nn.Parameter(t, requires_grad) if is_parameter else t.requires_grad_(requires_grad))
    assert (isinstance(s, nn.Parameter), s.requires_grad) == (is_parameter, requires_grad)
    other = COPIES[how](s)
    assert (isinstance(other, nn.Parameter), other.requires_grad) == (is_parameter, requires_grad)


def test_to_its_own_device_returns_the_tensor_itself(device: str) -> None:
    s = six(device)
    assert s.to(device) is s
    assert s.float() is s


def test_a_gradient_flows_through_to(device: str) -> None:
    s = st.static(torch.ones(3, device=device, requires_grad=True))
    (s.to(torch.float64) * 2).sum().backward()
    assert torch.equal(s.grad, torch.full((3,), 2.0, device=device))


def test_gradients_and_optimizers_of_torch_work_on_a_static_parameter(device: str) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 3, device=device)]
    layers.append(copy.deepcopy(layers[0]))
    layers[1].weight = st.static(layers[1].weight)
    at = layers[1].weight.data_ptr()
    x = torch.randn(5, 4, device=device)
    for layer in layers:
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            layer(x).square().mean().backward()
            optimizer.step()
    assert torch.equal(layers[0].weight, layers[1].weight)
    assert layers[1].weight.data_ptr() == at


def test_autograd_grad_takes_a_static_tensor(device: str) -> None:
    s = st.static(torch.ones(3, device=device, requires_grad=True))
    (gradient,) = torch.autograd.grad((s * 2).sum(), [s])
    assert gradient.tolist() == [2, 2, 2]


def test_a_backward_to_a_static_tensor_recomputes_checkpoints_of_other_types(device: str) -> None:
    w = st.static(nn.Parameter(torch.randn(4, 4, device=device)))
    x = torch.randn(3, 4, device=device)
    padded = st.pad(x, {0: 8}, value=float("nan"))

    def loss_of(x: Any) -> Tensor:
        return checkpoint(lambda x: (x @ w).tanh().softmax(0), x, use_reentrant=False).square().mean()  # type: ignore[no-any-return]  # of checkpoint

    unused = st.static(nn.Parameter(torch.ones(2, device=device)))
    expected = torch.autograd.grad(loss_of(x), [w])[0]
    found, zeros = torch.autograd.grad(loss_of(padded), [w, unused], materialize_grads=True)
    torch.testing.assert_close(found, expected)
    assert zeros.tolist() == [0, 0]
    loss_of(padded).backward(inputs=[w])
    torch.testing.assert_close(w.grad, expected)


@pytest.mark.usefixtures("process_group")
def test_data_parallel_training_leaves_static_parameters_where_they_are() -> None:
    torch.manual_seed(0)
    plain = nn.Linear(4, 2)
    layer = copy.deepcopy(plain)
    layer.weight = st.static(layer.weight)
    at = layer.weight.data_ptr()
    x = torch.randn(3, 4)
    for model in (nn.parallel.DistributedDataParallel(layer), plain):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
    assert torch.equal(layer.weight, plain.weight)
    assert layer.weight.data_ptr() == at


def test_state_dict_holds_the_same_memory_and_loads_in_place(device: str) -> None:
    layer = nn.Linear(2, 2, device=device)
    layer.weight = st.static(layer.weight)
    at = layer.weight.data_ptr()
    state = layer.state_dict()
    assert type(state["weight"]) is st.StaticAddressTensor
    assert state["weight"].data_ptr() == at
    loaded = _saved_and_loaded(state)
    with torch.no_grad():
        layer.weight.zero_()
    layer.load_state_dict(loaded)
    assert torch.equal(layer.weight, loaded["weight"])
    assert layer.weight.data_ptr() == at


def test_detach_and_parameter_share_the_memory_and_the_type(device: str) -> None:
    s = six(device)
    p = nn.Parameter(s)
    assert type(p) is type(s.detach()) is st.StaticAddressTensor
    assert p.data_ptr() == s.detach().data_ptr() == s.data_ptr()
    assert type(p.data) is Tensor
    assert not isinstance(p.detach(), nn.Parameter)


def test_a_list_of_static_tensors_is_a_tensor_list(device: str) -> None:
    s = six(device)
    got = st.TensorList([s, s]) + 1
    assert torch.equal(got[0], s.data + 1)
    assert torch.equal((s + st.TensorList([torch.ones(3, device=device)]))[0], s.data + 1)


class Labelled(Tensor):
    """A subclass with torch's default `__torch_function__`."""


@pytest.mark.parametrize("first", ["static", "labelled"])
def test_ops_with_another_subclass_treat_it_as_a_plain_tensor(device: str, first: str) -> None:
    u = torch.full((3,), 2.0, device=device).as_subclass(Labelled)
    s = st.static(nn.Parameter(torch.ones(3, device=device)))
    result = s * u if first == "static" else u * s
    assert type(result) is Labelled
    result.sum().backward()
    assert s.grad is not None
    assert s.grad.tolist() == [2, 2, 2]
    at = s.data_ptr()
    with torch.no_grad():
        s.add_(u)
        s[:2] = u[:2]
    assert (s.tolist(), s.data_ptr()) == ([2, 2, 3], at)
    with pytest.raises((st.AddressError, RuntimeError)):
        s.resize_as_(torch.ones(9, device=device).as_subclass(Labelled))
    assert s.shape == (3,)


def test_a_number_is_formatted_as_a_plain_one(device: str) -> None:
    s = st.static(torch.tensor(2.5, device=device))
    assert f"{s:.2f} {s}" == "2.50 2.5"


def test_functions_that_pass_all_arguments_by_name_take_it(device: str) -> None:
    s = st.static(nn.Parameter(torch.zeros(3, 3, device=device)))
    at = s.data_ptr()
    assert nn.init.normal_(s) is s
    assert bool((s != 0).any())
    assert s.data_ptr() == at
    assert s.type().endswith("FloatTensor")


@pytest.mark.parametrize("t", [3, torch.ones(2).to_sparse(), torch.ones(2, device="meta"), st.TensorList([])])
def test_values_without_an_address_are_refused(t: Any) -> None:
    with pytest.raises(TypeError, match=r"st\.static takes a"):
        st.static(t)


def _first_value(t: Tensor) -> float:
    assert type(t) is st.StaticAddressTensor
    return float(t[0, 1])


def test_another_process_gets_a_copy_and_the_address_stays() -> None:
    s = six("cpu")
    at = s.data_ptr()
    with torch.multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map(_first_value, [s]) == [1.0]
    assert s.data_ptr() == at
    assert not s.is_shared()
    assert multiprocessing.active_children() == []


@pytest.mark.gpu
def test_memory_allocated_in_a_capture_is_not_made_static() -> None:
    graph = torch.cuda.CUDAGraph()
    t = torch.ones(3, device="cuda")
    refused = []
    with torch.cuda.graph(graph):
        try:
            st.static(t)
        except st.AddressError as error:
            refused.append(str(error))
        t.add_(1)
    assert "while a CUDA graph is captured" in refused[0]


def test_a_thousand_tensors_made_and_dropped_leave_memory_flat(device: str) -> None:
    def live() -> int:
        gc.collect()
        if device == "cuda":
            return torch.cuda.memory_allocated()
        return sum(issubclass(type(o), Tensor) for o in gc.get_objects())

    six(device)
    before = live()
    for _ in range(1000):
        s = six(device)
        nn.Parameter(s).sum().backward()
        del s
    assert live() <= before
