"""Branches on padded sizes: what a program decided by the bucket's number, which a graph decides for all its calls.

To Python a padded size is the bucket's number, so `if x.shape[1] <= 4` goes the bucket's way, and a graph holds that
way alone. While a bucketed program runs, each such comparison is noted with its outcome. A call whose true sizes decide
one of them otherwise is compared with the plain program, or runs at its true sizes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from subtensors.dispatch.ops.errors import RuleError
from subtensors.dispatch.sizes.expressions import Size

if TYPE_CHECKING:
    import sympy

COMPARISONS: dict[str, tuple[str, Callable[[int, float], bool]]] = {
    "__lt__": ("<", operator.lt),
    "__le__": ("<=", operator.le),
    "__gt__": (">", operator.gt),
    "__ge__": (">=", operator.ge),
    "__eq__": ("==", operator.eq),
    "__ne__": ("!=", operator.ne),
}
"""The methods of an int that compare, each with its sign and its function."""


class DecidedByTrueSize(RuleError):
    """A program decides by a size, and the true one decides otherwise than the bucket's."""


class Decision(NamedTuple):
    """One comparison of a size with a number, and its outcome for the bucket's number."""

    size: Size
    name: str
    other: float
    outcome: bool

    def holds(self, host: Mapping[sympy.Symbol, int | tuple[int, ...]]) -> bool:
        """Return whether these true sizes decide it alike; those of a ragged batch count as if they did."""
        import sympy

        values = {s: sympy.Integer(n) for s, n in host.items() if isinstance(n, int)}
        if not self.size.free_symbols <= values.keys():
            return True
        true = int(self.size.xreplace(values))
        return COMPARISONS[self.name][1](true, self.other) == self.outcome


class Decisions:
    """The decisions that a program took in the runs of one bucket.

    Example:
        >>> import sympy
        >>> n = sympy.Symbol("n", integer=True)
        >>> decisions = Decisions()
        >>> decisions.note(n, "__le__", 4, 8 <= 4)
        >>> decisions.otherwise({n: 7}), decisions.otherwise({n: 3})
        ('', 'the size n decides a branch otherwise than its bucket: n <= 4')
    """

    def __init__(self) -> None:
        self._taken: dict[tuple[Size, str, float], Decision] = {}

    def __len__(self) -> int:
        return len(self._taken)

    def note(self, size: Size, name: str, other: float, outcome: bool) -> None:
        """Note the outcome of a comparison of a size, whose expression is given, by the name of its method."""
        self._taken.setdefault((size, name, other), Decision(size, name, other, outcome))

    def otherwise(self, host: Mapping[sympy.Symbol, int | tuple[int, ...]]) -> str:
        """Return the first decision that these true sizes take otherwise, in words; "" if there is none."""
        for decision in self._taken.values():
            if not decision.holds(host):
                sign = COMPARISONS[decision.name][0]
                comparison = f"{decision.size} {sign} {decision.other}"
                return f"the size {decision.size} decides a branch otherwise than its bucket: {comparison}"
        return ""
