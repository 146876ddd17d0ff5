"""Python's conversions of a tensor to one value, which a list of tensors refuses."""

from __future__ import annotations

from typing import Any, NoReturn


class NoSingleValue:
    """A base class that precedes `torch.Tensor`, and refuses conversions to bool, numbers and arrays."""

    def __bool__(self) -> bool:
        self._refuse("truth value")

    def __int__(self) -> int:
        self._refuse("int")

    def __float__(self) -> float:
        self._refuse("float")

    def __complex__(self) -> complex:
        self._refuse("complex")

    def __index__(self) -> int:
        self._refuse("index")

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        self._refuse("numpy array")

    def _refuse(self, what: str) -> NoReturn:
        count = len(self)  # type: ignore[arg-type]  # of the class that this is mixed into
        raise TypeError(f"a TensorList of {count} tensors has no single {what}; ask its elements one by one")
