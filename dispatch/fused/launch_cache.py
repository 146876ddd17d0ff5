"""A call that was made before: what of it must still be looked at before its launch is made again.

A step of an optimizer is the same fused call as the last one, with gradients and numbers of its own. Its lists are the
same objects, and the promises of their holders (`columns.Elements`) leave the addresses of parameters and gradients,
and how matrices lie there, as all that can have changed. So when a call has ended in one launch, the call that follows
it in the same form compares those, and nothing else of what `FusedFunction` looks at in general.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from subtensors.dispatch.fused.tensor_columns import ColumnGuard, Columns, is_fixed
from subtensors.dispatch.graphs.fused_graph import recording_now
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
    """The call's."""
    edition: object
    """Of the kernels of the function; another one once they were tuned."""
    places: list[tuple[int, AddressLayoutGuard]]
    """The leaves that may have moved, and where they were."""
    group: TritonExecutor
    binding: PointerTable

    def repeat(self, call: FusedCall, edition: object, columns: Columns, prelude: Prelude | None) -> bool:
        """Make the launch again, if this call is the same but for its numbers; False where it may be another."""
        group = self.group
        if (
            call.key != self.key
            or edition is not self.edition
            or Release.count
            or recording_now() is not None
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
    """What calls of one form share: the launch that the last of them ended in, if another may just repeat it."""

    __slots__ = ("ready",)

    def __init__(self) -> None:
        self.ready: CachedLaunch | None = None

    def note(
        self, call: FusedCall, edition: object, columns: Columns, guards: Sequence[ColumnGuard], group: TritonExecutor
    ) -> None:
        """The call was made, by this group alone."""
        self.ready = None
        binding = group.repeatable_binding()
        if binding is None or recording_now() is not None:
            return
        places = []
        for position, column, guard in zip(call.form.tensors, columns, guards, strict=True):
            if not is_fixed(column):
                known = guard.places(column)
                if known is None:
                    return
                places.append((position, known))
        self.ready = CachedLaunch(call.key, edition, places, group, binding)
