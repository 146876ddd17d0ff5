"""Private torch APIs of the dispatcher: its active keys and modes, and transformed or traced tensors.

One function each, with the versions checked.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch
from torch.autograd import forward_ad
from torch.utils import _python_dispatch

from subtensors.dispatch.torch_internals.requires import requires

if TYPE_CHECKING:
    from torch._C import DispatchKeySet

    Keys = tuple[DispatchKeySet, DispatchKeySet]

_AUTOCAST = ("AutocastCPU", "AutocastCUDA")

# Of `is_intercepted`, which every call on a PaddedTensor asks, and which is another function where one is missing.
_is_any_autocast_enabled: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", bool)
_count_modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", int)
_transform_level: Callable[[], int | None] = getattr(getattr(torch._C, "_functorch", None), "maybe_current_level", int)


@requires("torch._C._dispatch_tls_local_include_set", "torch._C._dispatch_tls_local_exclude_set")
def dispatch_keys() -> Keys:
    """Return the keys that torch's dispatcher now includes and excludes in this thread. Checked on 2.13."""
    return torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()


@requires(
    "torch._C.DispatchKey",
    "torch._C.DispatchKeySet",
    "torch._C._ForceDispatchKeyGuard",
    "torch._C._len_torch_dispatch_stack",
)
def restored_dispatch_keys(keys: Keys, casting: bool = False) -> AbstractContextManager[object]:
    """Return a context in which the dispatcher includes and excludes these keys; autocast's only if `casting`.

    Checked on 2.13.
    """
    included, excluded = keys
    if torch._C._len_torch_dispatch_stack() == 0:
        # Inside a mode's own handler there is no mode for ops without tensors to go to.
        for mode_key in ("Python", "PythonTLSSnapshot"):
            included = included - torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, mode_key))
    for key in () if casting else _AUTOCAST:
        excluded = excluded | torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    return torch._C._ForceDispatchKeyGuard(included, excluded)


@requires("torch._C.DispatchKey", "torch._C.DispatchKeySet", "torch._C._ForceDispatchKeyGuard")
def restored_autocast(keys: Keys) -> AbstractContextManager[object]:
    """Return a context in which the dispatcher casts where it did under these keys. Checked on 2.13."""
    included, excluded = dispatch_keys()
    for key in (getattr(torch._C.DispatchKey, name) for name in _AUTOCAST):
        if not keys[1].has(key):
            excluded = excluded - torch._C.DispatchKeySet(key)
    return torch._C._ForceDispatchKeyGuard(included, excluded)


@requires("torch._C._DisableTorchDispatch")
def without_modes() -> AbstractContextManager[object]:
    """Return a context in which ops go past every mode and subclass, to torch's own kernels. Checked on 2.11, 2.13."""
    return torch._C._DisableTorchDispatch()  # type: ignore[attr-defined]


@requires("torch.utils._python_dispatch._get_current_dispatch_mode_stack", otherwise=lambda: False)
def has_dispatch_mode() -> bool:
    """Return whether a dispatch mode is active, other than those of torch's own tracing. Checked on 2.13."""
    return any(not mode.is_infra_mode() for mode in _python_dispatch._get_current_dispatch_mode_stack())


@requires("torch.utils._python_dispatch._disable_current_modes")
def without_dispatch_modes() -> AbstractContextManager[object]:
    """Return a context without dispatch modes, in which subclasses still see their ops. Checked on 2.13."""
    return _python_dispatch._disable_current_modes()


@requires("torch._C._AutoDispatchBelowAutograd")
def below_autograd() -> AbstractContextManager[object]:
    """Return a context in which ops go past autograd, and composite ones are not decomposed. Checked on 2.13."""
    return torch._C._AutoDispatchBelowAutograd()


@requires("torch._C.DisableTorchFunction")
def without_overrides() -> AbstractContextManager[object]:
    """Return a context in which no subclass and no mode overrides functions. Checked on 2.13."""
    return torch._C.DisableTorchFunction()


@requires("torch._C._EnableTorchFunction")
def overrides_enabled() -> AbstractContextManager[object]:
    """Return a context in which subclasses override functions again, if they were kept from it. Checked on 2.13."""
    return torch._C._EnableTorchFunction()  # type: ignore[no-untyped-call]


@requires(
    "torch._subclasses.fake_tensor.FakeTensor",
    "torch._subclasses.functional_tensor.FunctionalTensor",
    "torch._C._functorch.is_functorch_wrapped_tensor",
    "torch._is_functional_tensor",
)
def is_traced(tensor: torch.Tensor) -> bool:
    """Return whether a tensor belongs to a compiler or a transform, and has no known values. Checked on 2.13."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    if isinstance(tensor, FakeTensor | FunctionalTensor) or tensor.is_meta:
        return True
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor) or torch._is_functional_tensor(tensor)


@requires(
    "torch._C._is_any_autocast_enabled",
    "torch._C._len_torch_dispatch_stack",
    "torch._C._functorch.maybe_current_level",
    "torch.autograd.forward_ad._current_level",
    otherwise=lambda: True,
)
def is_intercepted() -> bool:
    """Return whether autocast, a mode that intercepts ops or a transform is active. Checked on 2.11, 2.13."""
    return (
        _is_any_autocast_enabled()
        or _count_modes() > 0
        or _transform_level() is not None
        or forward_ad._current_level >= 0
    )
