"""Calls that run without a graph: counted, logged once per reason, or raised as errors."""

from __future__ import annotations

import logging
from collections import Counter

import torch

from subtensors.bucketed.bucket import Bucket
from subtensors.dispatch.ops.errors import RuleError
from subtensors.dispatch.torch_internals.dispatcher import is_transforming

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
        self._said: set[str] = set()

    def note(self, why: str, error: Exception | None = None) -> None:
        """Count a call that runs at its true sizes, and warn once per reason.

        Raises:
            Exception: fallbacks are errors: `error` if given, else a RuleError with the reason.
        """
        if self.are_errors:
            raise error or RuleError(f"no graph for this call: {why}")
        self.say(f"{self.name} runs at its true sizes, without a graph: {why}", why)
        self.counted[why] += 1

    def say(self, what: str, why: str = "") -> None:
        """Log a warning, once.

        Args:
            what: the warning.
            why: its reason; only the first warning with this reason is logged.
        """
        if (why or what) not in self._said:
            _log.warning(what)
        self._said.add(why or what)

    def note_refusal(self, bucket: Bucket) -> None:
        """Warn, once per reason, that a bucket could not be captured; the call that tried has its result.

        Raises:
            RuleError: fallbacks are errors.
        """
        if self.are_errors:
            raise RuleError(f"no graph for this call: {bucket.refusal}")
        self.say(f"{self.name} can't be recorded at {bucket.statistics.sizes}: {bucket.refusal}", bucket.refusal)


def why_not_replayable() -> str:
    """Return the reason why no graph can be replayed in the current context, or "" if one can."""
    if is_transforming():
        return "it is inside a transform of torch.func, or forward-mode differentiation"
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return "it is part of a graph that is being captured"
    return ""


def summarize_error(error: Exception) -> str:
    """An error's type and the first line of its message, joined with the second if the first ends with a colon.

    >>> summarize_error(ValueError("no"))
    'ValueError: no'
    """
    lines = str(error).splitlines()
    first = " ".join(lines[:2]) if lines and lines[0].endswith(":") else "".join(lines[:1])
    return f"{type(error).__name__}: {first}"
