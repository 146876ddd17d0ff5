"""The compiled code of a program: one for each family of calls, which differ in sizes alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from subtensors.bucketed.compilation.compiled import Compiled
from subtensors.bucketed.compilation.compiled_gradients import CompiledGradients

if TYPE_CHECKING:
    from subtensors.bucketed.bucket import Bucket

B = TypeVar("B", bound="Bucket")
C = TypeVar("C", Compiled, CompiledGradients)


class CompileCache:
    """The compiled code of each family of calls seen so far.

    Args:
        options: of `torch.compile`; None if compilation is off.
    """

    def __init__(self, options: dict[str, Any] | None) -> None:
        self.options = options
        self.made: dict[Any, Compiled | CompiledGradients] = {}
        self._forgotten = 0
        """The number of compilations of dropped code."""

    def of(self, bucket: B, make: Callable[[B, dict[str, Any]], C]) -> C | None:
        """Return the compiled code that a bucket runs, or None if compilation is off.

        Args:
            bucket: any of a family.
            make: makes the family's code if there is none yet.
        """
        if self.options is None:
            return None
        family = bucket.reading.family_key
        if family not in self.made:
            self.made[family] = make(bucket, self.options)
        return cast("C", self.made[family])

    @property
    def recompiles(self) -> int:
        """Compilations after the first of each family."""
        return self._forgotten + sum(max(code.compilations - 1, 0) for code in self.made.values())

    def forget(self) -> None:
        """Drop the code, which holds the tensors that it was compiled with."""
        self._forgotten += sum(code.compilations for code in self.made.values())
        self.made.clear()
