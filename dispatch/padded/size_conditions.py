"""Conditions on true sizes: what holds for the calls that a graph answers, since it did where the graph was made.

To Python a padded size is the bucket's number, so `if x.shape[1] <= 4` goes the bucket's way, and a graph holds that
way alone. An op that needs elements, as a maximum does, checks that once, and a graph never again. While a bucketed
program runs both are noted, each as a comparison of a size with a number. A call that doesn't meet what an op requires
runs at its true sizes, where torch raises its error; so does one that decides a branch otherwise, unless a comparison
with the plain program showed that the branch makes no difference.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch

from subtensors.dispatch.ops.errors import RuleError
from subtensors.dispatch.sizes.expressions import Size

if TYPE_CHECKING:
    import sympy

HostSize = int | tuple[int, ...]

COMPARISONS: dict[str, tuple[str, Callable[[int, float], bool]]] = {
    "__lt__": ("<", operator.lt),
    "__le__": ("<=", operator.le),
    "__gt__": (">", operator.gt),
    "__ge__": (">=", operator.ge),
    "__eq__": ("==", operator.eq),
    "__ne__": ("!=", operator.ne),
}
"""The methods of an int that compare, each with its sign and its function."""


class UnmetCondition(RuleError):
    """The true sizes of a call don't meet a condition of its bucket."""


class SizeCondition(NamedTuple):
    """A comparison of a size with a number, which an op requires to hold or by which a program branched."""

    size: Size
    name: str
    other: float
    is_required: bool = False

    def holds(self, host: Mapping[sympy.Symbol, HostSize], outcome: bool) -> bool:
        """Return whether the comparison has this outcome, in every row of a ragged batch.

        A ragged batch has no one size to branch on, so that branches on its sizes count as if they had the outcome.
        """
        values = {symbol: host[symbol] for symbol in self.size.free_symbols if symbol in host}
        rows = [len(n) for n in values.values() if not isinstance(n, int)]
        if len(values) < len(self.size.free_symbols) or (rows and not self.is_required):
            return True
        each = [{s: n if isinstance(n, int) else n[row] for s, n in values.items()} for row in range(min(rows or [1]))]
        compare = COMPARISONS[self.name][1]
        return all(compare(int(self.size.xreplace(assigned)), self.other) == outcome for assigned in each)

    def __str__(self) -> str:
        comparison = f"{self.size} {COMPARISONS[self.name][0]} {self.other}"
        if self.is_required:
            return f"an op needs {comparison}"
        return f"the size {self.size} decides a branch otherwise than its bucket: {comparison}"


class SizeConditions:
    """The conditions of a graph.

    Example:
        >>> import sympy
        >>> n = sympy.Symbol("n", integer=True)
        >>> conditions = SizeConditions()
        >>> conditions.note(SizeCondition(n, "__le__", 4), 8 <= 4)
        >>> conditions.unmet({n: 7}), conditions.unmet({n: 3})
        ('', 'the size n decides a branch otherwise than its bucket: n <= 4')
    """

    def __init__(self) -> None:
        self.found: dict[SizeCondition, bool] = {}
        """The outcome of each condition."""
        self.is_number_read = False
        """True if a size was read as a plain number, of which Python may make anything: each true size has its own."""
        self.dtypes: set[torch.dtype] = set()
        """The dtypes of tensors that the program's functions returned, which its results are rounded by."""
        self._makes_no_difference: set[SizeCondition] = set()

    @contextmanager
    def noted(self) -> Iterator[None]:
        """A context in which this thread notes its conditions here."""
        before, noting.into = noting.into, self
        try:
            yield
        finally:
            noting.into = before

    def note(self, condition: SizeCondition, outcome: bool) -> None:
        """Note a condition; one that had both outcomes, as in runs at several sizes that gave one graph, is none."""
        if condition in self._makes_no_difference:
            return
        if self.found.setdefault(condition, outcome) != outcome:
            del self.found[condition]
            self._makes_no_difference.add(condition)

    def clear(self) -> None:
        """Forget all conditions."""
        self.is_number_read = False
        self.found.clear()
        self.dtypes.clear()
        self._makes_no_difference.clear()

    def unmet(self, host: Mapping[sympy.Symbol, HostSize], ignores_branches: bool = False) -> str:
        """Return the first condition that some true sizes don't meet, in words, or "".

        Args:
            host: the true sizes.
            ignores_branches: True for sizes at which the branches are known to make no difference.
        """
        for condition, outcome in self.found.items():
            if not (ignores_branches and not condition.is_required) and not condition.holds(host, outcome):
                return str(condition)
        return ""


class _Noting(threading.local):
    into: SizeConditions | None = None
    host_reads = 0  # how often any sizes were asked for values: what did not ask holds for others of their kind
    recording: Callable[..., None] | None = None  # notes a function, its arguments and its result

    def number_read(self) -> None:
        """Note that a size was read as a plain number."""
        if self.into is not None:
            self.into.is_number_read = True


noting = _Noting()
"""The place of this thread's notes on the sizes that it computes with."""
