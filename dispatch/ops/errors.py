"""The errors that subtensors raises for users."""

from __future__ import annotations


class RuleError(NotImplementedError):
    """An op that a type has no rule for, or math that cannot be lowered.

    The message names the op, its class, the type, and what to do instead.
    """

    __module__ = "subtensors"


class UnsupportedCall(RuleError):
    """A call that no rule covers: eager mode runs it on the unpadded data, a compiler gets the error."""


class DataDependentCall(UnsupportedCall):
    """A call whose rule needs values or true sizes on the host, which a compiler and a graph capture don't have."""


class SizeError(ValueError):
    """A size that is not allowed: outside of what a `Dim` allows, or no number of bytes."""

    __module__ = "subtensors"


class AddressError(RuntimeError):
    """Memory that moved or was used when it must not."""

    __module__ = "subtensors"
