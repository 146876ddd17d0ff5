"""Calls on padded values that no rule covers."""

from __future__ import annotations

from subtensors.dispatch.ops.errors import RuleError


class UnsupportedCall(RuleError):
    """A call that no rule covers: eager mode runs it on the logical data, a compiler is told."""


class DataDependentCall(UnsupportedCall):
    """A call that a rule covers where values and true sizes are known, which a compiler and a graph capture don't."""
