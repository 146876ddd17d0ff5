"""A cache of launches: the few checks that a repeated call needs before its launch is repeated.

An optimizer step makes the same fused call as the step before, with new gradients and numbers. Its lists are the same
objects, and by the promises of their holders (`tensor_columns.TensorColumn`) only the addresses of parameters and
gradients, and the layout of matrices there, can have changed. So after a call that ended in one launch, the next call
of the same form compares only these, and skips the other checks of `FusedFunction`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from subtensors.dispatch.fused.tensor_columns import ColumnGuard, Columns, is_fixed
from subtensors.dispatch.graphs.fused_graph import current_recording
from subtensors.dispatch.graphs.guards import AddressLayoutGuard
from subtensors.dispatch.graphs.released_tensors import Release

if TYPE_CHECKING:
    from subtensors.dispatch.fused.bound_call import FusedCall
    from subtensors.dispatch.fused.triton_executor import PointerTable, TritonExecutor
    from subtensors.kernels.fused.launch import Prelude


@dataclass(frozen=True)
class CachedLaunch:
    """The launch that a call ended in."""

    key: tuple[Any, ...]
    """The key of the call."""
    edition: object
    """The edition of the function's kernels; stale once they were tuned."""
    places: list[tuple[int, AddressLayoutGuard]]
    """The leaves whose addresses may change, and the guards on them."""
    group: TritonExecutor
    binding: PointerTable

    def repeat(self, call: FusedCall, edition: object, columns: Columns, prelude: Prelude | None) -> bool:
        """Repeat the launch if the call is the same except for its numbers; return False where it may differ."""
        group = self.group
        if (
            call.key != self.key
            or edition is not self.edition
            or Release.count
            or current_recording() is not None
            or not group.is_on_current_device()
            or group.is_capturing()
        ):
            return False
        leaves = call.leaves
        for position, places in self.places:
            if not places.matches(leaves[position]):
                return False
        group.launch(self.binding, columns, call.numbers(), is_capturing=False, prelude=prelude)
        return True


class LaunchCache:
    """The launch that the last call of one form ended in, if the next call may repeat it."""

    __slots__ = ("ready",)

    def __init__(self) -> None:
        self.ready: CachedLaunch | None = None

    def note(
        self, call: FusedCall, edition: object, columns: Columns, guards: Sequence[ColumnGuard], group: TritonExecutor
    ) -> None:
        """Remember the launch of a call that this executor alone has run."""
        self.ready = None
        binding = group.repeatable_binding()
        if binding is None or current_recording() is not None:
            return
        places = []
        for position, column, guard in zip(call.form.tensors, columns, guards, strict=True):
            if not is_fixed(column):
                known = guard.places(column)
                if known is None:
                    return
                places.append((position, known))
        self.ready = CachedLaunch(call.key, edition, places, group, binding)
