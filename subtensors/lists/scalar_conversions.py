"""Python's ways of taking a tensor for one value, which many tensors are not."""

from __future__ import annotations

from typing import Any, NoReturn


class NoSingleValue:
    """What a list of tensors has before `torch.Tensor`: it is no bool, no number and no array."""

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
