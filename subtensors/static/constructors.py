"""Constructors of tensors in carved memory, under torch's names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from subtensors.static.static_tensor import StaticAddressTensor, refuse_other, with_role


class Constructors(ABC):
    """The constructors of an arena."""

    @abstractmethod
    def _carve(self, layout: Tensor, value: float | None = None, requires_grad: bool = False) -> StaticAddressTensor:
        """A tensor of this layout, filled with a value where one is given."""

    def empty(self, *size: Any, dtype: torch.dtype | None = None, requires_grad: bool = False) -> StaticAddressTensor:
        """A tensor carved from the arena, not initialized.

        Args:
            size: ints, or one sequence of them.
            dtype: torch's default dtype where None.
            requires_grad: of the tensor.

        Returns:
            (*size) StaticAddressTensor on the arena's device.

        Raises:
            AddressError: the arena is released, its reserve is used up, or a CUDA graph is being captured.
            torch.OutOfMemoryError: the device has no memory left to map; MemoryError on a CPU.

        Example:
            >>> import subtensors as st
            >>> st.Arena("cpu").empty(2, 3).shape
            torch.Size([2, 3])
        """
        return self._carve(_layout(size, dtype), None, requires_grad)

    def full(
        self, size: Sequence[int], fill_value: float, *, dtype: torch.dtype | None = None, requires_grad: bool = False
    ) -> StaticAddressTensor:
        """As `empty`, every value being `fill_value`, whose dtype it has where None is given.

        Example:
            >>> import subtensors as st
            >>> st.Arena("cpu").full((2,), 7)
            StaticAddressTensor([7, 7])
        """
        layout = torch.full(size, fill_value, dtype=dtype, device="meta")
        return self._carve(layout, fill_value, requires_grad)

    def zeros(self, *size: Any, dtype: torch.dtype | None = None, requires_grad: bool = False) -> StaticAddressTensor:
        """As `empty`, every value being 0.

        Example:
            >>> import subtensors as st
            >>> st.Arena("cpu").zeros(2, dtype=torch.int64)
            StaticAddressTensor([0, 0])
        """
        return self._carve(_layout(size, dtype), 0, requires_grad)

    def ones(self, *size: Any, dtype: torch.dtype | None = None, requires_grad: bool = False) -> StaticAddressTensor:
        """As `empty`, every value being 1.

        Example:
            >>> import subtensors as st
            >>> st.Arena("cpu").ones(2)
            StaticAddressTensor([1., 1.])
        """
        return self._carve(_layout(size, dtype), 1, requires_grad)

    def empty_like(self, t: Tensor, *, dtype: torch.dtype | None = None) -> StaticAddressTensor:
        """A tensor of the shape and strides of `t`, and of its dtype where None is given, not initialized."""
        return self._carve(torch.empty_like(t, dtype=dtype, device="meta"))

    def zeros_like(self, t: Tensor, *, dtype: torch.dtype | None = None) -> StaticAddressTensor:
        """As `empty_like`, every value being 0; it may replace torch.zeros_like where an optimizer makes its state."""
        return self._carve(torch.empty_like(t, dtype=dtype, device="meta"), 0)

    def static(self, t: Tensor) -> StaticAddressTensor:
        """The values of `t` in this arena: `st.static(t)` with an address from here.

        Args:
            t: a strided tensor on any device.

        Returns:
            A StaticAddressTensor: a leaf, which requires grad, and is a parameter, where `t` is.

        Raises:
            TypeError: `t` is no such tensor.
            AddressError: as for `empty`.

        Example:
            >>> import subtensors as st
            >>> st.Arena("cpu").static(torch.arange(3))
            StaticAddressTensor([0, 1, 2])
        """
        refuse_other(t)
        with torch.no_grad():
            out = self.empty_like(t)
            out.copy_(t)
        return with_role(out, t.requires_grad and t.is_leaf, isinstance(t, torch.nn.Parameter))


def _layout(size: tuple[Any, ...], dtype: torch.dtype | None) -> Tensor:
    """A tensor without memory of the size that torch.empty(*size) has."""
    return torch.empty(
        size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size, dtype=dtype, device="meta"
    )
