"""The constructors of an arena's tensors, under torch's names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from subtensors.arguments import shown
from subtensors.static.static_tensor import StaticAddressTensor, check_can_be_static, with_role


class Constructors(ABC):
    """Constructors of tensors, for a class that allocates their memory."""

    @abstractmethod
    def _allocate(self, layout: Tensor, value: float | None = None, requires_grad: bool = False) -> StaticAddressTensor:
        """Return a new tensor of this layout, filled with the value unless it is None."""

    def empty(
        self, *size: int | Sequence[int], dtype: torch.dtype | None = None, requires_grad: bool = False
    ) -> StaticAddressTensor:
        """Return an uninitialized tensor in the arena.

        Args:
            size: ints, or one sequence of them.
            dtype: None for torch's default dtype.
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
        return self._allocate(_layout(size, dtype), None, requires_grad)

    def full(
        self, size: Sequence[int], fill_value: float, *, dtype: torch.dtype | None = None, requires_grad: bool = False
    ) -> StaticAddressTensor:
        """As `empty`, filled with `fill_value`; a dtype of None means that of the value.

        Example:
            >>> import subtensors as st
            >>> st.Arena("cpu").full((2,), 7)
            StaticAddressTensor([7, 7])
        """
        layout = torch.full(size, fill_value, dtype=dtype, device="meta")
        return self._allocate(layout, fill_value, requires_grad)

    def zeros(
        self, *size: int | Sequence[int], dtype: torch.dtype | None = None, requires_grad: bool = False
    ) -> StaticAddressTensor:
        """As `empty`, filled with 0.

        Example:
            >>> import subtensors as st
            >>> st.Arena("cpu").zeros(2, dtype=torch.int64)
            StaticAddressTensor([0, 0])
        """
        return self._allocate(_layout(size, dtype), 0, requires_grad)

    def ones(
        self, *size: int | Sequence[int], dtype: torch.dtype | None = None, requires_grad: bool = False
    ) -> StaticAddressTensor:
        """As `empty`, filled with 1.

        Example:
            >>> import subtensors as st
            >>> st.Arena("cpu").ones(2)
            StaticAddressTensor([1., 1.])
        """
        return self._allocate(_layout(size, dtype), 1, requires_grad)

    def empty_like(self, t: Tensor, *, dtype: torch.dtype | None = None) -> StaticAddressTensor:
        """Return an uninitialized tensor with the shape and strides of `t`; a dtype of None means that of `t`."""
        return self._allocate(_layout_like(t, dtype))

    def zeros_like(self, t: Tensor, *, dtype: torch.dtype | None = None) -> StaticAddressTensor:
        """As `empty_like`, filled with 0; it may replace torch.zeros_like where an optimizer creates its state."""
        return self._allocate(_layout_like(t, dtype), 0)

    def static(self, t: Tensor) -> StaticAddressTensor:
        """Return a copy of `t` in this arena: `st.static(t)` with an address of the arena.

        Args:
            t: a strided tensor on any device.

        Returns:
            A StaticAddressTensor: a leaf, which requires grad if `t` does, and is a parameter if `t` is one.

        Raises:
            TypeError: `t` is not a strided tensor.
            AddressError: as for `empty`.

        Example:
            >>> import subtensors as st
            >>> st.Arena("cpu").static(torch.arange(3))
            StaticAddressTensor([0, 1, 2])
        """
        check_can_be_static(t)
        with torch.no_grad():
            out = self.empty_like(t)
            out.copy_(t)
        return with_role(out, t.requires_grad and t.is_leaf, isinstance(t, torch.nn.Parameter))


def _layout_like(t: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return a tensor on the meta device like one that an arena can hold."""
    check_can_be_static(t)
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype is a torch.dtype or None, got {shown(dtype)}")
    return torch.empty_like(t, dtype=dtype, device="meta")


def _layout(size: tuple[int | Sequence[int], ...], dtype: torch.dtype | None) -> Tensor:
    """Return a tensor on the meta device of the size of torch.empty(*size)."""
    shape = size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size
    return torch.empty(shape, dtype=dtype, device="meta")  # type: ignore[arg-type]  # torch refuses other nestings
