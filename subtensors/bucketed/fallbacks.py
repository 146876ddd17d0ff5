"""Calls that run without a graph: counted, logged once per reason, or raised as errors."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping

from subtensors.dispatch.ops.errors import RuleError

_log = logging.getLogger("subtensors.bucketed")


class Fallbacks:
    """The calls of a program that run without a graph.

    Args:
        name: of the program.
        are_errors: whether such a call is an error.
    """

    def __init__(self, name: str, are_errors: bool) -> None:
        self.name, self.are_errors = name, are_errors
        self.counted: Counter[str] = Counter()
        """The number of such calls, by reason."""
        self._warned: set[str] = set()

    def refuse(self, reason: str, error: Exception | None = None) -> None:
        """Raise, if fallbacks are errors.

        Raises:
            Exception: `error` if given, else a RuleError with the reason.
        """
        if self.are_errors:
            raise error or RuleError(f"no graph for this call: {reason}")

    def count(self, reason: str) -> None:
        """Count a call that ran at its true sizes, and warn once per reason."""
        self.warn_once(f"{self.name} runs at its true sizes, without a graph: {reason}", reason)
        self.counted[reason] += 1

    def warn_once(self, message: str, reason: str = "") -> None:
        """Log a warning; only the first with its reason, or its text if it has none, is logged."""
        if (reason or message) not in self._warned:
            _log.warning(message)
        self._warned.add(reason or message)

    def warn_not_captured(self, sizes: Mapping[str, int], reason: str) -> None:
        """Warn, once per reason, that a bucket could not be captured; the call that tried has its result.

        Args:
            sizes: the bucket's size of each Dim, by name.
            reason: in words.

        Raises:
            RuleError: fallbacks are errors.
        """
        self.refuse(reason)
        self.warn_once(f"{self.name} can't be captured at {sizes}: {reason}", reason)


def summarize_error(error: Exception) -> str:
    """Return an error's type and the first line of its message, joined with the second if the first ends with a colon.

    >>> summarize_error(ValueError("no"))
    'ValueError: no'
    """
    lines = str(error).splitlines()
    first = " ".join(lines[:2]) if lines and lines[0].endswith(":") else "".join(lines[:1])
    return f"{type(error).__name__}: {first}"
