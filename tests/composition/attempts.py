"""One attempt at a cell, as data that a process can hand to another, and its comparison with plain torch."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from reordered_sums import orders
from torch import Tensor

from composition.subjects import SUBJECTS
from composition.table import Column, Row
from subtensors.chunked import record_call
from subtensors.padded import fallback


@dataclass(frozen=True)
class Attempt:
    """What a cell did.

    Args:
        values: that it returned, on the CPU; None where it raised.
        error: what it raised: its type, the types that this derives from, and its message.
        logged: each warning of the library, and each of a runner's reasons to run otherwise.
    """

    values: list[Tensor] | None
    error: tuple[type[BaseException], str] | None
    logged: list[str]


def attempt(row: Row, column: Column, device: str, dtype: torch.dtype, plain: bool) -> Attempt:
    """Run a cell, of plain torch or of the column's type."""
    with _logged() as logged:
        subject = SUBJECTS[column](device, dtype, plain)
        try:
            values = row.cells[column].run(subject)
        except Exception as error:  # whatever it is, it is judged by what is expected
            return Attempt(None, (type(error), str(error)), logged)
    return Attempt([x.detach().to("cpu", copy=True) for x in values], None, logged + subject.fallbacks())


@contextmanager
def _logged() -> Iterator[list[str]]:
    """Collect what is logged, as if nothing had been logged before."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("subtensors")
    fallback.fallbacks.clear()
    record_call.fallbacks.clear()
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)


@dataclass(frozen=True)
class Comparison:
    """Attempts at a cell.

    Args:
        ours: of the column's type.
        plain: of plain torch, in the same dtype and in several orders of addition; none where ours raised.
        truth: of plain torch, in float64 or complex128.
    """

    ours: Attempt
    plain: list[Attempt]
    truth: Attempt | None

    def difference(self, dtype: torch.dtype) -> str:
        """Return how our values differ from plain torch's; nothing where they do not.

        They may err 1.5 times as much as plain torch's, and a rounding. Errors are relative to the largest number of
        each tensor; of plain torch's the largest one among all of them counts.
        """
        ours, truth = self.ours.values, self.truth and self.truth.values
        if ours is None or not truth or not all(attempt.values for attempt in self.plain):
            return f"no values to compare: {self}"
        bound = torch.finfo(dtype).eps
        for attempt in self.plain:
            values = attempt.values or []
            kinds = [[(tuple(x.shape), x.dtype) for x in found] for found in (ours, values)]
            if kinds[0] != kinds[1]:
                return f"{kinds[0]} instead of {kinds[1]}"
            bound = max(bound, 1.5 * max(map(_error, values, truth)) + torch.finfo(dtype).eps)
        errors = list(map(_error, ours, truth))
        return "" if max(errors) <= bound else f"errors of {errors}, and {bound} are allowed"


def compared(row: Row, column: Column, device: str) -> Comparison:
    """Run a cell, and plain torch beside it where it does not raise."""
    ours = attempt(row, column, device, row.dtype, plain=False)
    if ours.values is None:
        return Comparison(ours, [], None)
    wide = torch.complex128 if row.dtype.is_complex else torch.float64
    plain, truth = (attempt(row, column, device, dtype, plain=True) for dtype in (row.dtype, wide))
    found = Comparison(ours, [plain], truth)
    if plain.values and found.difference(row.dtype):
        # One order of addition may be a lucky one.
        for order in orders()[1:]:
            with order:
                found.plain.append(attempt(row, column, device, row.dtype, plain=True))
    return found


def _error(actual: Tensor, truth: Tensor) -> float:
    """Return the largest error, relative to the largest number; NaN errs without end."""
    if not truth.numel():
        return 0.0
    largest = truth.abs().max().item()
    error = (actual.to(truth.dtype) - truth).abs().max().item()
    return float("inf") if error != error else error / (largest or 1.0)
