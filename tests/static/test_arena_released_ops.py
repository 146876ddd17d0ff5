"""Every op on a tensor of a released Arena is refused, through every alias and view, and works after restore()."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import subtensors as st


def _hooked(gradient: Tensor) -> Tensor:
    leaf = torch.ones(4, device=gradient.device, requires_grad=True)
    leaf.register_hook(lambda _: gradient)
    return leaf * 1


USES: dict[str, Callable[[Tensor], Any]] = {
    "operator": lambda t: t + 1,
    "reflected operator": lambda t: 1 + t,
    "function": lambda t: torch.add(t, 1),
    "method": lambda t: t.sum(),
    "in place": lambda t: t.add_(1),
    "index": lambda t: t[0],
    "setitem": lambda t: t.__setitem__(0, 1),
    "functional": lambda t: nn.functional.linear(torch.ones(1, 4, device=t.device), t[None]),
    "in a list": lambda t: torch.stack([torch.ones(4, device=t.device), t]),
    "foreach": lambda t: torch._foreach_add([t], 1),
    "overload": lambda t: torch.ops.aten.add.Tensor(t, t),
    "out": lambda t: torch.add(torch.ones(4, device=t.device), 1, out=t),
    "copied from": lambda t: torch.ones(4, device=t.device).copy_(t),
    "detach": lambda t: t.detach(),
    "data": lambda t: t.data,
    "to": lambda t: t.to(torch.float64),
    "clone": lambda t: t.clone(),
    "numpy": lambda t: t.numpy(),
    "tolist": lambda t: t.tolist(),
    "item": lambda t: float(t[0]),
    "data_ptr": lambda t: t.data_ptr(),
    "unbound data_ptr": lambda t: Tensor.data_ptr(t),
    "storage": lambda t: t.untyped_storage(),
    "dlpack": lambda t: t.__dlpack__(),
    "pickle": lambda t: __import__("pickle").dumps(t),
    "deepcopy": lambda t: __import__("copy").deepcopy(t),
    "parameter": lambda t: nn.Parameter(t),
    "tensor list": lambda t: st.TensorList([t]) + 1,
    "static": lambda t: st.static(t) + 1,
    "view": lambda t: t.view(2, 2),
}
ALIASES: dict[str, Callable[[Tensor], Tensor]] = {
    "allocated": lambda t: t,
    "view": lambda t: t.view(4),
    "data": lambda t: t.data,
    "detached": lambda t: t.detach(),
    "parameter": lambda t: nn.Parameter(t, requires_grad=False),
    "plain parameter": lambda t: nn.Parameter(t.data, requires_grad=False),
}


@pytest.mark.parametrize("alias", ALIASES)
def test_every_use_while_released_is_refused_for_every_alias(device: str, alias: str) -> None:
    arena = st.Arena(device)
    t = ALIASES[alias](arena.ones(4))
    kind = type(t)
    arena.release()
    for name, use in USES.items():
        with pytest.raises(st.AddressError, match=r"restore\(\)"):
            pytest.fail(f"{name} was not refused: {use(t)}")
    assert (t.shape, t.dtype, t.device, t.size(0), t.requires_grad) == ((4,), torch.float32, arena.device, 4, False)
    assert "its Arena is released" in repr(t)
    assert isinstance(t, kind)
    arena.restore()
    assert type(t) is kind
    assert (t + 1).tolist() == [2, 2, 2, 2]


# These do not call __torch_function__.
BYPASSING: dict[str, Callable[[Tensor], Any]] = {
    "vmap": lambda t: torch.func.vmap(torch.neg)(t),
    "grad": lambda t: torch.func.grad(torch.sum)(t),
    "vjp": lambda t: torch.func.vjp(torch.exp, t),
    "functionalize": lambda t: torch.func.functionalize(torch.exp)(t),
    "scripted": lambda t: torch.jit.trace(torch.neg, torch.ones(4, device=t.device))(t),
    "new_tensor": lambda t: torch.ones(1, device=t.device).new_tensor(t),
    "DLPack of C++": torch.utils.dlpack.to_dlpack,
    "another class": lambda t: Tensor._make_subclass(Tensor, t) + 1,
    "a gradient for backward": lambda t: torch.ones(4, device=t.device, requires_grad=True).exp().backward(t),
    "a gradient of a hook": lambda t: _hooked(t).sum().backward(),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore:`torch.jit:FutureWarning")
@pytest.mark.parametrize("use", BYPASSING)
def test_ops_that_bypass_torch_function_are_refused_too_while_released(device: str, use: str) -> None:
    arena = st.Arena(device)
    t = arena.ones(4)
    view = t[1:]
    address = t.data_ptr()
    arena.release()
    # Without CUDA torch raises its own message.
    with pytest.raises((RuntimeError, BufferError), match=r"restore\(\)" if torch.backends.cuda.is_built() else None):
        BYPASSING[use](t)
    assert t in arena
    assert view in arena
    assert (view.device, view.storage_offset()) == (arena.device, 1)
    arena.restore()
    view.add_(1)
    assert t.tolist() == [1, 2, 2, 2]
    assert t.data_ptr() == address
    assert "_memory_of_released" not in vars(t)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "view_as_real": torch.view_as_real,
    "a slice of view_as_real": lambda t: torch.view_as_real(t)[1:],
    "conj": torch.conj,
    "another dtype": lambda t: t.view(torch.float32),
}


@pytest.mark.parametrize("view", VIEWS)
def test_views_between_complex_and_real_numbers_are_released_too(device: str, view: str) -> None:
    arena = st.Arena(device)
    t = arena.full((4,), 1 + 2j, dtype=torch.complex64)
    viewed = VIEWS[view](t)
    values = viewed.tolist()
    metadata = viewed.shape, viewed.stride(), viewed.storage_offset(), viewed.is_conj(), viewed.is_neg()
    arena.release()
    with pytest.raises(st.AddressError):
        viewed + 1
    assert (viewed.shape, viewed.stride(), viewed.storage_offset(), viewed.is_conj(), viewed.is_neg()) == metadata
    arena.restore()
    assert viewed.tolist() == values
    leaf = torch.ones(4, dtype=torch.complex64, device=device, requires_grad=True)
    product = leaf * t  # saves it
    with pytest.raises(st.AddressError, match="referenced by C"):
        arena.release()
    product.abs().sum().backward()


def test_a_module_and_an_optimizer_are_refused_while_released(device: str) -> None:
    arena = st.Arena(device)
    layer = nn.Linear(3, 2, device=device)
    layer.weight = arena.static(layer.weight)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    x = torch.ones(1, 3, device=device)
    layer(x).sum().backward()
    arena.release()
    for use in (lambda: layer(x), optimizer.step, layer.state_dict, lambda: layer.to(torch.float64)):
        with pytest.raises(st.AddressError):
            use()
    optimizer.zero_grad()
    assert layer.weight.grad is None
    arena.restore()
    layer(x).sum().backward()
    optimizer.step()


def test_a_step_without_its_state_is_refused_before_it_writes_anything(device: str) -> None:
    class WritesFirst(st.optim.Optimizer):
        state: ClassVar = {"seen": torch.zeros_like}

        def update(self, p: Tensor, g: Tensor, seen: Tensor) -> None:
            p.sub_(g)
            seen.add_(g)

    w, arena = nn.Parameter(torch.zeros(3, device=device)), st.Arena(device)
    opt = WritesFirst([w], {}, arena=arena)
    w.grad = torch.ones_like(w)
    opt.step()
    arena.release()
    with pytest.raises(st.AddressError, match="a step on a tensor of a released Arena"):
        opt.step()
    assert w.tolist() == [-1, -1, -1]
    arena.restore()
    opt.step()
    assert opt.state[w]["seen"].tolist() == [2, 2, 2]


def test_a_guarded_call_is_refused_while_released(device: str) -> None:
    arena = st.Arena(device)
    t = arena.ones(1)
    add = arena.guard(lambda n: t.add_(n))
    add(1)
    arena.release()
    with pytest.raises(st.AddressError, match="uses memory of a released Arena"):
        add(1)
    arena.restore()
    add(1)
    assert t.item() == 3
