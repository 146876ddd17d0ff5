"""Guards: checks that a call's tensors match those of an earlier call, by private C++ functions of torch.

guard                 compares with the tensor at the same position
MetadataGuard         type, dtype, device, shape, strides, requires_grad
AddressGuard          address
AddressLayoutGuard    address; shape and strides where there is more than one dimension
IdentityGuard         address and all metadata
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from operator import attrgetter
from typing import Protocol

import torch
from torch import Tensor

from subtensors.dispatch.torch_internals.requires import requires

_layout = attrgetter("layout")
_have_addresses = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)


class _TensorChecks(Protocol):
    def check(self, *tensors: Tensor) -> bool: ...


class MetadataGuard:
    """A check of tensors' type, dtype, device, shape, strides and requires_grad against earlier ones, in one C++ loop.

    Checked on 2.11, 2.13.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._firsts = self._first_indices(tensors)
        distinct = tensors if self._firsts is None else [tensors[i] for i in dict.fromkeys(self._firsts)]
        # The C++ check ends the process on tensors without strides: those match no others.
        has_strides = set(map(_layout, distinct)) <= {torch.strided}
        self._count = len(tensors) if has_strides else -1
        self._checks: _TensorChecks = _checks_of(distinct) if has_strides else _PythonChecks(())

    def matches(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether every tensor has the metadata of the earlier one at its position."""
        if len(tensors) != self._count:
            return False
        if self._firsts is not None:
            if self._first_indices(tensors) != self._firsts:
                return False
            tensors = [tensors[i] for i in dict.fromkeys(self._firsts)]
        return self._checks.check(*tensors)

    @staticmethod
    def _first_indices(tensors: Sequence[Tensor]) -> list[int] | None:
        """Return the first index of each tensor; None when all differ. The C++ loop requires distinct tensors."""
        if len(set(map(id, tensors))) == len(tensors):
            return None
        first = {id(t): i for i, t in reversed([*enumerate(tensors)])}
        return [first[id(t)] for t in tensors]


class _PythonChecks:
    """A Python equivalent of torch's `TensorGuards`."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._metadata = list(map(_metadata, tensors))

    def check(self, *tensors: Tensor) -> bool:
        return list(map(_metadata, tensors)) == self._metadata


def _metadata(t: Tensor) -> tuple[object, ...]:
    return type(t), t.dtype, t.device, t.shape, t.stride(), t.requires_grad


@requires("torch._C._dynamo.guards.TensorGuards", otherwise=_PythonChecks)
def _checks_of(tensors: Sequence[Tensor]) -> _TensorChecks:
    from torch._C._dynamo.guards import TensorGuards

    checks: _TensorChecks = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    return checks


class AddressGuard:
    """A check of tensors' addresses against earlier ones; one C++ loop where torch has CUDA. Checked on 2.11, 2.13."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.addresses = list(map(Tensor.data_ptr, tensors))
        self._indices = list(range(len(self.addresses)))

    def matches(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether every tensor starts at the address of the earlier one at its position."""
        if len(tensors) != len(self.addresses):
            return False
        if _have_addresses is not None:
            try:
                return bool(_have_addresses(tensors, self.addresses, self._indices))
            except RuntimeError:
                pass  # one has no memory; its class may raise a clearer error
        return list(map(Tensor.data_ptr, tensors)) == self.addresses

    def first_changed(self, tensors: Sequence[Tensor]) -> int | None:
        """Return the index of the first tensor at another address; None when all are where the earlier ones were."""
        if AddressGuard.matches(self, tensors):
            return None
        return next(
            i for i, (t, address) in enumerate(zip(tensors, self.addresses, strict=True)) if t.data_ptr() != address
        )


class AddressLayoutGuard(AddressGuard):
    """A check of tensors' addresses and layouts against earlier ones.

    Only tensors of several dimensions have their layout compared: those may have been transposed in place.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__(tensors)
        self._matrices = [i for i, t in enumerate(tensors) if t.ndim > 1]
        self._layouts = MetadataGuard([tensors[i] for i in self._matrices])

    def matches(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether every tensor has the address and the layout of the earlier one at its position."""
        if not super().matches(tensors):
            return False
        return not self._matrices or self._layouts.matches([tensors[i] for i in self._matrices])


class IdentityGuard(AddressGuard):
    """A check of tensors' metadata (`MetadataGuard`) and addresses against earlier ones.

    Args:
        tensors: in the order in which later ones are passed too.
        max_modes: the number of combinations of grad mode, inference mode and autocast to keep; a C++ check passes only
            in the combination that it was made in. `accept_mode` adds the current one; the oldest are dropped.
    """

    def __init__(self, tensors: Sequence[Tensor], max_modes: int = 1) -> None:
        super().__init__(tensors)
        self._by_mode = deque([MetadataGuard(tensors)], max_modes)

    def matches(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether, in a kept mode, every tensor has the address and metadata of the one at its position."""
        if super().matches(tensors):
            for guard in self._by_mode:  # `any` of a generator would take longer than a guard of few tensors
                if guard.matches(tensors):
                    return True
        return False

    def accept_mode(self, tensors: Sequence[Tensor]) -> None:
        """Accept these tensors, which the caller knows to be the same, in the current mode too."""
        self._by_mode.appendleft(MetadataGuard(tensors))
