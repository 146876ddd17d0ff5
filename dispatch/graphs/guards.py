"""Guards: checks that a call's tensors match those of an earlier call, by private C++ functions of torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch

from subtensors.dispatch.torch_internals.requires import requires

_layout = attrgetter("layout")
_are_at = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)


class MetadataGuard:
    """A check of tensors' type, dtype, device, shape, strides and requires_grad against earlier ones, in one C++ loop.

    Checked on 2.11, 2.13.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._firsts = self._first_places(tensors)
        distinct = tensors if self._firsts is None else [tensors[i] for i in dict.fromkeys(self._firsts)]
        # It ends the process on tensors that have no strides: those are alike to none.
        has_strides = set(map(_layout, distinct)) <= {torch.strided}
        self._count = len(tensors) if has_strides else -1
        self._guards: Any = _guards(distinct) if has_strides else None

    def matches(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether every tensor has the metadata of the one in its place."""
        if len(tensors) != self._count:
            return False
        if self._firsts is not None:
            if self._first_places(tensors) != self._firsts:
                return False
            tensors = [tensors[i] for i in dict.fromkeys(self._firsts)]
        return bool(self._guards.check(*tensors))

    @staticmethod
    def _first_places(tensors: Sequence[torch.Tensor]) -> list[int] | None:
        """For each tensor the first place where it stands; None when all differ. The C++ loop wants distinct ones."""
        if len(set(map(id, tensors))) == len(tensors):
            return None
        first = {id(t): i for i, t in reversed([*enumerate(tensors)])}
        return [first[id(t)] for t in tensors]


class _PythonGuards:
    """A Python equivalent of torch's `TensorGuards`."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._described = list(map(_metadata, tensors))

    def check(self, *tensors: torch.Tensor) -> bool:
        return list(map(_metadata, tensors)) == self._described


def _metadata(t: torch.Tensor) -> tuple[Any, ...]:
    return type(t), t.dtype, t.device, t.shape, t.stride(), t.requires_grad


@requires("torch._C._dynamo.guards.TensorGuards", otherwise=_PythonGuards)
def _guards(tensors: Sequence[torch.Tensor]) -> Any:
    from torch._C._dynamo.guards import TensorGuards

    return TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)


class AddressGuard:
    """A check of tensors' addresses against earlier ones; one C++ loop where torch has CUDA. Checked on 2.11, 2.13."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.addresses = list(map(torch.Tensor.data_ptr, tensors))
        self._all = list(range(len(self.addresses)))

    def matches(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether every tensor starts at the address of the one in its place."""
        if len(tensors) != len(self.addresses):
            return False
        if _are_at is not None:
            try:
                return bool(_are_at(tensors, self.addresses, self._all))
            except RuntimeError:
                pass  # one has no memory, which its class may say better
        return list(map(torch.Tensor.data_ptr, tensors)) == self.addresses

    def first_elsewhere(self, tensors: Sequence[torch.Tensor]) -> int | None:
        """The first of as many tensors that does not start where the one in its place did; None when all do."""
        if AddressGuard.matches(self, tensors):
            return None
        return next(i for i, (t, at) in enumerate(zip(tensors, self.addresses, strict=True)) if t.data_ptr() != at)


class AddressLayoutGuard(AddressGuard):
    """A check of tensors' addresses and layouts against earlier ones.

    A vector at the same address is the same vector; a tensor of more dimensions may have been transposed in place.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(tensors)
        self._matrices = [i for i, t in enumerate(tensors) if t.ndim > 1]
        self._layouts = MetadataGuard([tensors[i] for i in self._matrices])

    def matches(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether every tensor has the address and the layout of the one in its place."""
        if not super().matches(tensors):
            return False
        return not self._matrices or self._layouts.matches([tensors[i] for i in self._matrices])


class IdentityGuard(AddressGuard):
    """A check of tensors' metadata (`MetadataGuard`) and addresses against earlier ones.

    Args:
        tensors: in the order in which later ones are passed too.
        modes: how many combinations of grad mode, inference mode and autocast to keep; the C++ check passes only in
            the one that it was made in. `met_again` adds the current one; the oldest are dropped.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], modes: int = 1) -> None:
        super().__init__(tensors)
        self._alike = deque([MetadataGuard(tensors)], modes)

    def matches(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether every tensor has the address and the metadata, in a kept mode, of the one in its place."""
        if super().matches(tensors):
            for guard in self._alike:  # `any` of a generator would take longer than a guard of few tensors
                if guard.matches(tensors):
                    return True
        return False

    def met_again(self, tensors: Sequence[torch.Tensor]) -> None:
        """Accept these tensors, which the caller knows to be the same, in the current modes too."""
        self._alike.appendleft(MetadataGuard(tensors))
