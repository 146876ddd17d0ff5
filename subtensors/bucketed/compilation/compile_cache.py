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
    """The code of each family that was met.

    Args:
        options: of `torch.compile`; None where it is not asked for.
    """

    def __init__(self, options: dict[str, Any] | None) -> None:
        self.options = options
        self.made: dict[Any, Compiled | CompiledGradients] = {}
        self._forgotten = 0
        """Compilations of what was forgotten."""

    def of(self, bucket: B, make: Callable[[B, dict[str, Any]], C]) -> C | None:
        """What a bucket runs; None where nothing is compiled.

        Args:
            bucket: of a family.
            make: the family's code where there is none yet.
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
        """Give up the code, which holds the tensors that it was compiled with."""
        self._forgotten += sum(code.compilations for code in self.made.values())
        self.made.clear()
