"""Errors for calls on padded values that no rule covers."""

from __future__ import annotations

from subtensors.dispatch.ops.errors import RuleError


class UnsupportedCall(RuleError):
    """A call that no rule covers: eager mode runs it on the unpadded data, a compiler gets the error."""


class DataDependentCall(UnsupportedCall):
    """A call whose rule needs values or true sizes on the host, which a compiler and a graph capture don't have."""
