"""What runs without a graph: said once a reason, counted, or refused where that is asked for."""

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
        are_errors: is it an error where a call would?
    """

    def __init__(self, name: str, are_errors: bool) -> None:
        self.name, self.are_errors = name, are_errors
        self.counted: Counter[str] = Counter()
        """How many calls, by reason."""
        self._said: set[str] = set()

    def note(self, why: str, error: Exception | None = None) -> None:
        """A call runs at its true sizes.

        Raises:
            Exception: that is an error: the one that is given, or a RuleError that says why.
        """
        if self.are_errors:
            raise error or RuleError(f"no graph for this call: {why}")
        self.say(f"{self.name} runs at its true sizes, without a graph: {why}", why)
        self.counted[why] += 1

    def say(self, what: str, why: str = "") -> None:
        """Warn of something, once.

        Args:
            what: to say.
            why: its reason, which is said once whatever follows from it.
        """
        if (why or what) not in self._said:
            _log.warning(what)
        self._said.add(why or what)

    def note_refusal(self, bucket: Bucket) -> None:
        """A bucket could not be recorded; the call that was to record it has its answer.

        Raises:
            RuleError: that is an error.
        """
        if self.are_errors:
            raise RuleError(f"no graph for this call: {bucket.refusal}")
        self.say(f"{self.name} can't be recorded at {bucket.statistics.sizes}: {bucket.refusal}", bucket.refusal)


def why_not_replayable() -> str:
    """Why nothing can be replayed where a call is made; "" where something can."""
    if is_transforming():
        return "it is inside a transform of torch.func, or forward-mode differentiation"
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return "it is part of a graph that is being captured"
    return ""


def summarize_error(error: Exception) -> str:
    """An error's kind and the first line of its message, or that of what it only announces.

    >>> summarize_error(ValueError("no"))
    'ValueError: no'
    """
    lines = str(error).splitlines()
    first = " ".join(lines[:2]) if lines and lines[0].endswith(":") else "".join(lines[:1])
    return f"{type(error).__name__}: {first}"
