"""Sizes at which a program's tensors are empty, or at which it is refused: what real tensors say there.

Torch's stand-ins without values check other than its kernels do where nothing is in a tensor. So for each path through
a program its calls are made on real tensors, at those of the path's sizes at which they have an empty one; and so is a
call that raised, at the path's first and last sizes. Where one has another outcome, that is the outcome of these sizes.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence

import numpy as np
import sympy

from subtensors.dispatch.sizes.grid_evaluation import NotEvaluated
from subtensors.dispatch.sizes.shape_guards import Arguments, ProgramPath, error_message, refusal_by_real_calls
from subtensors.dispatch.sizes.torch_calls import Difference, TorchCall
from subtensors.sizes.accepted_sizes import ConsideredSizes

logger = logging.getLogger("subtensors.sizes")

MAX_CALLS = 1 << 14
"""The most calls that are made on real tensors."""

MAX_RUNS = 64
"""The most sizes that the program is run at once more, since a real call returns other tensors than its stand-in."""

FIRST_AND_LAST = 16
"""The number of a path's first sizes, and of its last ones, at which a call that raised is made."""

Class = tuple[ProgramPath, np.ndarray]
"""A path, and the mask of its sizes."""


class RealCalls:
    """The real calls of a program, each made once.

    Args:
        program, arguments: as `trace_path` takes them.
        grid: the sizes that are considered.
    """

    def __init__(self, program: Callable[..., object], arguments: Arguments, grid: ConsideredSizes) -> None:
        self._program, self._arguments, self._grid = program, arguments, grid
        self._known: dict[str, Difference | None] = {}
        self._zeros: dict[sympy.Basic, np.ndarray] = {}
        self._runs = 0
        self.is_complete = True
        """False once there were more calls or runs than are made."""

    def decide(self, path: ProgramPath, where: np.ndarray) -> list[Class]:
        """Return the classes of a path's sizes: those at which real tensors have another outcome, and the rest."""
        masks = [(call, where & self._is_tried(call, where)) for call in _distinct(path.calls)]
        tried = np.any([np.zeros_like(where), *(mask for _, mask in masks)], axis=0)
        found, rest = dict[ProgramPath, np.ndarray](), where.copy()
        for index in map(tuple, np.argwhere(tried)):
            if not self.is_complete:
                break
            sizes = self._grid.at(index)
            difference = self._first_difference([call for call, mask in masks if mask[index]], sizes)
            if difference is None or (difference.refusal is not None and path.refusal is not None):
                continue
            by_real = self._path(path, difference, sizes)
            found.setdefault(by_real, np.zeros_like(where))[index] = True
            rest[index] = False
        return [(each, mask) for each, mask in (*found.items(), (path, rest)) if mask.any()]

    def _is_tried(self, call: TorchCall, where: np.ndarray) -> np.ndarray:
        """Return the mask of sizes at which a call is made on real tensors."""
        if call.results is not None:
            return functools.reduce(np.logical_or, map(self._is_zero, call.sizes()), np.zeros_like(where))
        mask, flat = np.zeros_like(where), np.flatnonzero(where)
        mask.flat[[*flat[:FIRST_AND_LAST], *flat[-FIRST_AND_LAST:]]] = True
        return mask

    def _is_zero(self, size: sympy.Basic) -> np.ndarray:
        if size not in self._zeros:
            try:
                self._zeros[size] = self._grid.where(sympy.Eq(size, 0))
            except (NotEvaluated, KeyError):  # a size that depends on values
                self._zeros[size] = np.zeros(self._grid.shape, dtype=bool)
        return self._zeros[size]

    def _first_difference(self, calls: Sequence[TorchCall], sizes: dict[str, int]) -> Difference | None:
        values = {dim.symbol: sizes[dim.name] for dim in self._grid.dims}
        for call in calls:
            at = call.at(values)
            key = repr((at.function, at.args, at.kwargs, at.results))
            if key not in self._known and len(self._known) >= MAX_CALLS:
                self._give_up("calls of empty tensors")
                return None
            if key not in self._known:
                self._known[key] = at.difference()
            found = self._known[key]
            if found is not None:
                return found
        return None

    def _path(self, path: ProgramPath, difference: Difference, sizes: dict[str, int]) -> ProgramPath:
        """Return the path of these sizes, by a real call that has another outcome on `path`."""
        if difference.refusal is not None:
            return ProgramPath(path.conditions, error_message(difference.refusal))
        self._runs += 1
        if self._runs > MAX_RUNS:
            self._give_up("sizes at which stand-ins return other tensors")
            return ProgramPath(path.conditions, "not decided: a stand-in returns another tensor", is_decided=False)
        refusal = refusal_by_real_calls(self._program, self._arguments, sizes)
        return ProgramPath(path.conditions, refusal)

    def _give_up(self, what: str) -> None:
        if self.is_complete:
            logger.info("there are more %s than are tried", what)
        self.is_complete = False


def _distinct(calls: Sequence[TorchCall]) -> list[TorchCall]:
    """Return the calls without those that repeat another, as the layers of a model do."""
    return list({repr((call.function, call.args, call.kwargs, call.results)): call for call in calls}.values())
