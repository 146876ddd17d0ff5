"""Types of ours that meet in one call, by what they must know of each other.

Tensors whose ops are recorded give their values first; then a type with rules of its own for every op applies these.
"""

from __future__ import annotations

from typing import Any

LAZY_TYPES: set[type[Any]] = set()
"""What they are is computed later, by a pass of which other types' rules are no part."""

MASKED_TYPES: set[type[Any]] = set()
"""What their memory holds is not all real, and only their rules know what is."""
