"""The tensor types of this library that may meet in one call, by the facts they need about each other.

Lazy tensors are materialized first; then a type with rules of its own for every op applies these.
"""

from __future__ import annotations

from typing import Any

LAZY_TYPES: set[type[Any]] = set()
"""Types whose values are computed later, by a pass that does not apply the rules of other types."""

MASKED_TYPES: set[type[Any]] = set()
"""Types whose memory is valid only in part, which only their own rules can tell."""
